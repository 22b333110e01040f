"""The experts of Hugging Face folders: every expert's matrix in its place, and out again bit for bit."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from maxbatch.config.huggingface_export import config_json
from maxbatch.config.loading import load_config
from maxbatch.model.decoder_config import DecoderConfig
from maxbatch.model.parameters import parameter_path
from maxbatch.runs.json_file import write_json
from maxbatch.system.errors import ConfigError
from maxbatch.system.safetensors import write_tensors
from maxbatch.training.update.state import abstract_model
from maxbatch.training.weights.export import export_model
from maxbatch.training.weights.huggingface import parameter_places, tensor_shapes
from tests.helpers.huggingface_folders import assert_same_tensors
from tests.helpers.parameters import load_parameters
from tests.helpers.tiny import TINY_MODEL

LAYER = "model.layers.1"
# Of layer 1, the router's tensor and the gate, up and down of expert 2.
NAMES = {
    "mixtral": ("block_sparse_moe.gate", *(f"block_sparse_moe.experts.2.w{number}" for number in (1, 3, 2))),
    "qwen3_moe": ("mlp.gate", *(f"mlp.experts.2.{name}_proj" for name in ("gate", "up", "down"))),
    "olmoe": ("mlp.gate", *(f"mlp.experts.2.{name}_proj" for name in ("gate", "up", "down"))),
}


def write_model(folder: Path, family: str) -> dict[str, np.ndarray]:
    """Writes a folder of random tensors, and returns them."""
    keys = [*TINY_MODEL, f"decoder_block={family}", "num_experts=3", "num_experts_per_tok=2", "norm_topk_prob=true"]
    keys += ["use_qk_norm=true"] if family != "mixtral" else []
    keys += ["base_moe_mlp_dim=24"] if family == "qwen3_moe" else []
    config = load_config(overrides=[*keys, "logits_via_embedding=false"])
    places = parameter_places(family, abstract_model(DecoderConfig.of(config))[1])
    rng = np.random.default_rng(0)
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in tensor_shapes(places).items()}
    folder.mkdir()
    write_json(folder / "config.json", config_json(config, "float32", {}))
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    write_tensors(folder / "model.safetensors", "F32", shapes, iter(tensors.values()))
    return tensors


@pytest.mark.parametrize("family", NAMES)
def test_every_expert_becomes_its_part_of_a_parameter_and_comes_out_again(family: str, tmp_path: Path) -> None:
    tensors = write_model(tmp_path / "model", family)
    _, _, params = load_parameters(tmp_path / "model", ["max_target_length=16", "routed_bias=true"])
    found = {parameter_path(path)[-1]: np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(params)}
    router, *matrices = (tensors[f"{LAYER}.{name}.weight"] for name in NAMES[family])
    np.testing.assert_array_equal(found["router"][1], router.T)
    for part, tensor in zip(("gate", "up", "down"), matrices, strict=True):
        np.testing.assert_array_equal(found[f"expert_{part}"][1, 2], tensor.T)
    assert not found["routed_bias"].any()  # the folder has none, so routers begin without
    export_model(str(tmp_path / "model"), str(tmp_path / "out"), None)
    assert_same_tensors(tmp_path / "model", tmp_path / "out")
    assert (tmp_path / "model" / "config.json").read_text() == (tmp_path / "out" / "config.json").read_text()


def test_a_bias_that_the_family_lacks_is_refused_by_name() -> None:
    config = load_config(overrides=["model_name=tiny-moe", "routed_bias=true"])
    with pytest.raises(ConfigError, match=r"no parameter like layers\.experts\.routed_bias"):
        parameter_places("qwen3_moe", abstract_model(DecoderConfig.of(config))[1])
