"""The experts of Hugging Face folders: every expert's matrix in its place, and out again bit for
bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from maxbatch.around.huggingface.arrays.tensors import parameter_places, tensor_shapes
from maxbatch.around.huggingface.export.model import export_model
from maxbatch.around.huggingface.folder.config_json import read_config_json
from maxbatch.around.huggingface.folder.model_fields import config_json, model_keys
from maxbatch.config.loading import dump_config, load_config
from maxbatch.model.parameters import parameter_path
from maxbatch.parallel.mesh import make_mesh
from maxbatch.plan.place import Place
from maxbatch.run.folder.json_file import write_json
from maxbatch.run.weights.checkpoints import Checkpoints, Position, model_identity
from maxbatch.system.errors import ConfigError
from maxbatch.system.storage.safetensors import stored_tensors, write_tensors
from maxbatch.update.state import abstract_model, abstract_state
from tests.helpers.huggingface_folders import assert_same_tensors
from tests.helpers.parameters import load_parameters
from tests.helpers.tiny import TINY_MODEL

LAYER = "model.layers.1"
# Of layer 1, the router's tensor and the gate, up and down of expert 2.
NAMES = {
    "mixtral": (
        "block_sparse_moe.gate",
        *(f"block_sparse_moe.experts.2.w{number}" for number in (1, 3, 2)),
    ),
    "qwen3_moe": ("mlp.gate", *(f"mlp.experts.2.{name}_proj" for name in ("gate", "up", "down"))),
    "olmoe": ("mlp.gate", *(f"mlp.experts.2.{name}_proj" for name in ("gate", "up", "down"))),
}


def write_model(folder: Path, family: str) -> dict[str, np.ndarray]:
    """Writes a folder of random tensors, and returns them."""
    keys = [
        *TINY_MODEL,
        f"decoder_block={family}",
        "num_experts=3",
        "num_experts_per_tok=2",
        "norm_topk_prob=true",
    ]
    keys += ["use_qk_norm=true"] if family != "mixtral" else []
    keys += ["base_moe_mlp_dim=24"] if family == "qwen3_moe" else []
    config = load_config(overrides=[*keys, "logits_via_embedding=false"])
    places = parameter_places(config.model, abstract_model(config.decoder)[1])
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.normal(size=shape).astype(np.float32)
        for name, shape in tensor_shapes(places).items()
    }
    folder.mkdir()
    write_json(folder / "config.json", config_json(config, "float32", {}))
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    write_tensors(folder / "model.safetensors", "F32", shapes, iter(tensors.values()))
    return tensors


@pytest.mark.parametrize("family", NAMES)
def test_every_expert_becomes_its_part_of_a_parameter_and_comes_out_again(
    family: str, tmp_path: Path
) -> None:
    tensors = write_model(tmp_path / "model", family)
    _, _, params = load_parameters(tmp_path / "model", ["max_target_length=16", "routed_bias=true"])
    found = {
        parameter_path(path)[-1]: np.asarray(leaf)
        for path, leaf in jax.tree.leaves_with_path(params)
    }
    router, *matrices = (tensors[f"{LAYER}.{name}.weight"] for name in NAMES[family])
    np.testing.assert_array_equal(found["router"][1], router.T)
    for part, tensor in zip(("gate", "up", "down"), matrices, strict=True):
        np.testing.assert_array_equal(found[f"expert_{part}"][1, 2], tensor.T)
    assert not found["routed_bias"].any()  # the folder has none, so routers begin without
    export_model(str(tmp_path / "model"), str(tmp_path / "out"), None)
    assert_same_tensors(tmp_path / "model", tmp_path / "out")
    assert (tmp_path / "model" / "config.json").read_text() == (
        tmp_path / "out" / "config.json"
    ).read_text()


def test_a_folder_of_deepseek_comes_out_as_it_went_in_with_a_bias_in_float32(
    tmp_path: Path,
) -> None:
    config = load_config(overrides=["model_name=tiny-deepseek", "logits_via_embedding=false"])
    places = parameter_places(config.model, abstract_model(config.decoder)[1])
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.normal(size=shape).astype(np.float32)
        for name, shape in tensor_shapes(places).items()
    }
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert shapes[bias] == (8,) and shapes["model.layers.0.mlp.gate_proj.weight"] == (128, 64)
    assert shapes["model.layers.2.mlp.shared_experts.down_proj.weight"] == (64, 48)
    # The layer behind the last one, which predicts further tokens, is left out.
    further = {
        "model.layers.3.eh_proj.weight": (64, 128),
        "model.layers.3.self_attn.o_proj.weight": (64, 64),
    }
    tensors |= {name: np.zeros(shape, np.float32) for name, shape in further.items()}
    model = tmp_path / "model"
    model.mkdir()
    write_json(
        model / "config.json", config_json(config, "float32", {}) | {"num_nextn_predict_layers": 1}
    )
    write_tensors(model / "model.safetensors", "F32", shapes | further, iter(tensors.values()))
    _, _, params = load_parameters(model, ["max_target_length=16"])
    found = {
        ".".join(parameter_path(path)): np.asarray(leaf)
        for path, leaf in jax.tree.leaves_with_path(params)
    }
    down = tensors["model.layers.1.self_attn.kv_a_proj_with_mqa.weight"]
    np.testing.assert_array_equal(found["layers.attention.latent"][0], down.T)
    first = tensors["model.layers.0.self_attn.q_a_proj.weight"]
    np.testing.assert_array_equal(found["dense_layers.attention.query_down"][0], first.T)
    export_model(str(model), str(tmp_path / "out"), "bfloat16")
    stored = stored_tensors(tmp_path / "out")
    assert stored.keys() == shapes.keys()
    np.testing.assert_array_equal(stored[bias].array(), tensors[bias])
    assert {tensor.dtype for name, tensor in stored.items() if not name.endswith("_bias")} == {
        "BF16"
    }


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "quant_method=fp8: 8-bit weights .* in bfloat16",
        ),
        ({"scoring_func": "softmax"}, "scoring_func=softmax is not supported for deepseek_v3"),
        ({"rope_interleave": False}, "rope_interleave=False is not supported"),
        ({"moe_layer_freq": 2}, "moe_layer_freq=2 is not supported"),
        (
            {"num_key_value_heads": 2},
            "num_key_value_heads=2 is not supported: latents make a key of each of the 4",
        ),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"kv_lora_rank": "16"}, "kv_lora_rank='16': must be a whole number"),
    ],
)
def test_forms_that_deepseek_does_not_have_here_are_refused_by_name(
    fields: dict[str, Any], said: str
) -> None:
    stated = config_json(load_config(overrides=["model_name=tiny-deepseek"]), "float32", {})
    assert model_keys(stated, "here")["first_num_dense_layers"] == "1"
    with pytest.raises(ConfigError, match=said):
        model_keys(stated | fields, "here")


def test_scores_that_deepseek_v3_lacks_are_refused_by_name() -> None:
    config = load_config(overrides=["model_name=tiny-deepseek", "routed_score_func=softmax"])
    with pytest.raises(
        ConfigError, match=r"routed_score_func=softmax.*deepseek_v3 cannot express it"
    ):
        config_json(config, "float32", {})


@pytest.mark.runs
def test_a_run_without_a_bias_is_exported_with_one_of_zeros_and_loaded_as_one_that_has_it(
    tmp_path: Path,
) -> None:
    stated = ["routed_bias=false", "routed_bias_update_rate=0", "topk_routing_group=-1"]
    config = load_config(overrides=["model_name=tiny-deepseek", *stated])
    keys, rng = config.update, np.random.default_rng(0)
    abstract = abstract_state(keys, make_mesh(config, jax.devices()[:1]))
    state = jax.tree.map(
        lambda x: jax.device_put(rng.integers(-99, 99, x.shape).astype(x.dtype), x.sharding),
        abstract,
    )
    (tmp_path / "run").mkdir()
    checkpoints = Checkpoints(
        tmp_path / "run", 1, {"data": {}, "model": model_identity(keys)}, pytest.fail
    )
    checkpoints.save(state, Position(1, Place(8)))
    checkpoints.close()
    (tmp_path / "run" / "config.yml").write_text(dump_config(config))
    export_model(str(tmp_path / "run"), str(tmp_path / "out"), None)
    written = read_config_json(str(tmp_path / "out"))
    assert (written["n_group"], written["topk_group"]) == (4, 4)
    found, expected = (
        load_parameters(tmp_path / name, ["routed_bias=true"])[2] for name in ("out", "run")
    )
    assert not expected["layers"]["experts"]["routed_bias"][...].any()
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    del expected["layers"]["experts"]["routed_bias"]
    jax.tree.map(np.testing.assert_array_equal, expected, state.params)


def test_a_bias_that_the_family_lacks_is_refused_by_name() -> None:
    config = load_config(overrides=["model_name=tiny-moe", "routed_bias=true"])
    with pytest.raises(ConfigError, match=r"no parameter like layers\.experts\.routed_bias"):
        parameter_places(config.model, abstract_model(config.decoder)[1])
