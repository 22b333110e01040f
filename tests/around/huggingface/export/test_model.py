"""A Hugging Face folder as parameters: each tensor's place, config keys, and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from maxbatch import ConfigError, load_config
from maxbatch.around.huggingface.arrays import reading
from maxbatch.around.huggingface.export.model import export_model
from maxbatch.cli import main
from maxbatch.config.model_forms import end_tokens
from maxbatch.model.parameters import parameter_path
from maxbatch.parallel.mesh import make_mesh
from maxbatch.run.pretraining import train
from maxbatch.run.weights.parameters import open_source
from maxbatch.system.storage.safetensors import stored_tensors
from maxbatch.system.storage.storage import as_path, copy_tree
from tests.helpers.huggingface_folders import (
    HEAD,
    HEADS,
    KV_HEADS,
    LAYERS,
    MLP,
    VOCABULARY,
    WIDTH,
    assert_same_tensors,
    tiny_llama_tensors,
    write_folder,
)
from tests.helpers.parameters import load_parameters
from tests.helpers.stores import Store

Tensors = dict[str, np.ndarray]


def imported(folder: Path) -> dict[str, np.ndarray]:
    _, _, params = load_parameters(folder, ["max_target_length=16"])
    return {
        ".".join(parameter_path(path)): np.asarray(leaf)
        for path, leaf in jax.tree.leaves_with_path(params)
    }


def test_every_tensor_becomes_its_parameter(tmp_path: Path) -> None:
    tensors = tiny_llama_tensors()
    params = imported(write_folder(tmp_path / "model"))

    def stacked(name: str) -> np.ndarray:
        return np.stack([tensors[f"model.layers.{layer}.{name}.weight"] for layer in range(LAYERS)])

    def heads(name: str, number: int) -> np.ndarray:
        return stacked(name).reshape(LAYERS, number, HEAD, WIDTH).transpose(0, 3, 1, 2)

    expected = {
        "embedding": tensors["model.embed_tokens.weight"],
        "output": tensors["lm_head.weight"].T,
        "final_norm.scale": tensors["model.norm.weight"],
        "layers.attention_norm.scale": stacked("input_layernorm"),
        "layers.mlp_norm.scale": stacked("post_attention_layernorm"),
        "layers.attention.query": heads("self_attn.q_proj", HEADS),
        "layers.attention.key": heads("self_attn.k_proj", KV_HEADS),
        "layers.attention.value": heads("self_attn.v_proj", KV_HEADS),
        "layers.attention.out": stacked("self_attn.o_proj")
        .reshape(LAYERS, WIDTH, HEADS, HEAD)
        .transpose(0, 2, 3, 1),
        "layers.mlp.gate": stacked("mlp.gate_proj").swapaxes(1, 2),
        "layers.mlp.up": stacked("mlp.up_proj").swapaxes(1, 2),
        "layers.mlp.down": stacked("mlp.down_proj").swapaxes(1, 2),
    }
    assert params.keys() == expected.keys()
    for name, parameter in params.items():
        np.testing.assert_array_equal(parameter, expected[name], err_msg=name)


def test_a_tied_model_has_no_output_of_its_own(tmp_path: Path) -> None:
    """Some files of tied models hold a copy of the embedding, which is not read."""
    tensors = tiny_llama_tensors()
    assert "output" not in imported(
        write_folder(tmp_path / "copy", tensors, tie_word_embeddings=True)
    )
    del tensors["lm_head.weight"]
    assert "output" not in imported(
        write_folder(tmp_path / "tied", tensors, tie_word_embeddings=True)
    )


def test_a_folder_states_the_model_of_a_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder(tmp_path / "model")
    model = ("model_name=auto", f"load_parameters_path={folder}", "dataset_type=synthetic")
    assert main(["plan", *model, "max_target_length=32", "--devices", "4", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["tokens_per_step"] == plan["global_batch_size_to_train_on"] * 32
    config = load_config(overrides=model)
    assert (config.decoder_block, config.vocab_size, config.logits_via_embedding) == (
        "llama2",
        VOCABULARY,
        False,
    )
    assert (config.base_emb_dim, config.base_mlp_dim, config.head_dim) == (WIDTH, MLP, HEAD)
    assert (config.base_num_query_heads, config.base_num_kv_heads) == (HEADS, KV_HEADS)
    assert (config.base_num_decoder_layers, config.normalization_layer_epsilon) == (LAYERS, 1e-5)


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_an_export_of_an_import_has_the_same_bytes(dtype: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", dtype=dtype)
    assert main(["export", str(folder), "--output", str(tmp_path / "first")]) == 0
    assert main(["export", str(tmp_path / "first"), "--output", str(tmp_path / "second")]) == 0
    for name in ("model.safetensors", "config.json", "generation_config.json"):
        assert (tmp_path / "first" / name).read_bytes() == (
            tmp_path / "second" / name
        ).read_bytes(), name
    assert_same_tensors(folder, tmp_path / "first")


@pytest.mark.parametrize("axes", [("fsdp",), ("tensor", "fsdp"), ("pipeline", "tensor")])
def test_every_device_gets_its_part_of_the_tensors(axes: tuple[str, ...], tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", dtype="BF16")
    ones = [f"ici_{axis}_parallelism=1" for axis in ("fsdp", "tensor", "pipeline")]
    overrides = ["max_target_length=16", *ones, *(f"ici_{axis}_parallelism=2" for axis in axes)]
    mesh = make_mesh(load_config(overrides=overrides), jax.devices()[: 2 ** len(axes)])
    params = load_parameters(folder, overrides, mesh)[2]
    whole = imported(folder)
    split = 0
    for path, parameter in jax.tree.leaves_with_path(params):
        np.testing.assert_array_equal(parameter, whole[".".join(parameter_path(path))])
        split += not parameter.is_fully_replicated
    assert split >= 8


def test_a_run_opens_the_files_of_a_folder_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []

    def count(folder: Any) -> Any:
        opened.append(folder)
        return stored_tensors(folder)

    monkeypatch.setattr(reading, "stored_tensors", count)
    folder = write_folder(tmp_path / "model")
    overrides = [
        "model_name=auto",
        f"load_parameters_path={folder}",
        f"run_dir={tmp_path / 'run'}",
        "steps=1",
    ]
    own = [
        "dataset_type=synthetic",
        "max_target_length=16",
        "enable_checkpointing=false",
        "generate_prompt=",
    ]
    train(load_config(overrides=[*overrides, *own]), jax.devices()[:1])
    assert opened == [folder]


def test_a_folder_has_the_same_identity_in_an_object_store(store: Store, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    there = as_path(store.bucket()) / "model"
    copy_tree(folder, there)
    stated = open_source(str(there)).identity
    assert open_source(folder).identity_like(stated) == stated
    assert (
        open_source(str(there)).identity_like(open_source(folder).identity)
        == open_source(folder).identity
    )


def test_an_export_reads_one_parameter_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []

    def recorded(*arguments: Any) -> jax.Array:
        sizes.append(sum(array.nbytes for array in jax.live_arrays()))
        return read(*arguments)

    read = reading._read
    monkeypatch.setattr(reading, "_read", recorded)
    before = sum(array.nbytes for array in jax.live_arrays())
    export_model(str(write_folder(tmp_path / "model")), str(tmp_path / "export"), None)
    largest = max(tensor.nbytes for tensor in tiny_llama_tensors().values())
    assert len(sizes) == 12 and max(sizes) - before <= LAYERS * largest


def refusal(capsys: pytest.CaptureFixture[str], folder: Path) -> str:
    """Returns the one-line reason why a folder cannot be exported."""
    output = folder.parent / "output"
    assert main(["export", str(folder), "--output", str(output)]) == 2
    captured = capsys.readouterr()
    assert (
        captured.out == ""
        and captured.err.count("\n") == 1
        and captured.err.startswith("maxbatch: error: ")
    )
    assert not output.exists()
    return captured.err


def without_a_norm(tensors: Tensors) -> None:
    del tensors["model.norm.weight"]


def with_a_bias(tensors: Tensors) -> None:
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(HEADS * HEAD, np.float32)


def with_a_long_norm(tensors: Tensors) -> None:
    tensors["model.norm.weight"] = np.zeros(WIDTH + 1, np.float32)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without_a_norm, "lacks 'model.norm.weight'"),
        (with_a_bias, "holds 'model.layers.0.self_attn.q_proj.bias'"),
        (
            with_a_long_norm,
            f"model.norm.weight has the shape [{WIDTH + 1}]; the model keys make it [{WIDTH}]",
        ),
    ],
)
def test_tensors_of_another_model_are_refused(
    change: Callable[[Tensors], None], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = tiny_llama_tensors()
    change(tensors)
    folder = write_folder(tmp_path / "model", tensors)
    assert said.replace("'", "") in refusal(capsys, folder).replace("'", "")
    run_dir = tmp_path / "run"
    with pytest.raises(ConfigError, match=r"norm|q_proj"):
        train(
            load_config(
                overrides=[
                    "model_name=auto",
                    f"load_parameters_path={folder}",
                    "dataset_type=synthetic",
                    "steps=1",
                    "max_target_length=16",
                    f"run_dir={run_dir}",
                ]
            ),
            jax.devices()[:1],
        )
    assert not run_dir.exists(), "refused before anything is written"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model_type": "mamba"}, "model_type=mamba is not supported; works: one of llama"),
        (
            {"num_local_experts": 8},
            "num_local_experts=8 is not supported for llama, which has no experts",
        ),
        ({"model_type": "mistral", "mlp_bias": True}, "mlp_bias=True is not supported for mistral"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "rope_type=dynamic is not supported",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1], "long_factor": [2]}},
            "rope_short_factors=1.0",
        ),
        ({"hidden_act": "relu"}, "hidden_act=relu is not supported"),
        ({"hidden_size": None}, "a field of the model has a value of the wrong type"),
        ({"model_type": ["llama"]}, "model_type=['llama'] is not supported"),
        (
            {"num_hidden_layers": 10**10},
            "num_hidden_layers=10000000000: must be a whole number from 0 to 10000",
        ),
        ({"hidden_size": 64.0}, "hidden_size=64.0: must be a whole number"),
        ({"vocab_size": True}, "vocab_size=True: must be a whole number"),
        ({"vocab_size": 10**200}, "must be a whole number from 0 to 2147483647"),
        ({"num_key_value_heads": -1}, "num_key_value_heads=-1: must be a whole number"),
        ({"num_attention_heads": 0}, "a field of the model has a value of the wrong type"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps='x': must be a number"),
        ({"rope_theta": 10**200}, "must be a number up to 1e+30"),
        ({"rope_theta": float("nan")}, "NaN is not a JSON number"),
        ({"layer_types": [["full_attention"]]}, "must be a list of at most 10000 texts"),
        ({"rope_scaling": [1]}, "rope_scaling=[1]: must be an object"),
        (
            {"rope_scaling": {"rope_type": ["linear"], "factor": 2.0}},
            "a field of the model has a value of the wrong",
        ),
        ({"hidden_act": ["silu"]}, "hidden_act=['silu']: must be a text"),
        (
            {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 8.5},
            "n_positions=8.5: must be",
        ),
    ],
)
def test_a_model_that_is_not_supported_is_named(
    fields: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder(tmp_path / "model", **fields)
    assert said in refusal(capsys, folder)
    assert main(["plan", "model_name=auto", f"load_parameters_path={folder}"]) == 2
    assert said in capsys.readouterr().err


def test_a_damaged_folder_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / "generation_config.json").write_text("{")
    assert "generation_config.json: is not JSON" in refusal(capsys, folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1.5]}')
    with pytest.raises(ConfigError, match="must be the id of a token"):
        end_tokens(folder)
    (folder / "generation_config.json").unlink()
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    assert "is not a whole safetensors file" in refusal(capsys, folder)
    file.unlink()
    assert "holds no *.safetensors" in refusal(capsys, folder)
    (folder / "config.json").write_text("{")
    assert "is not JSON" in refusal(capsys, folder)
