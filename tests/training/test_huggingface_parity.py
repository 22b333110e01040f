"""Hugging Face's families against transformers itself: what they compute, and what it makes of an export."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxbatch.config.families import FAMILIES
from maxbatch.model.loss import loss_sums, token_logprobs
from maxbatch.system.safetensors import write_tensors
from maxbatch.training.export import export_model
from maxbatch.training.huggingface import read_parameters
from maxbatch.training.parameters import load_parameters
from tests.helpers.huggingface_folders import assert_same_tensors
from tests.helpers.transformers_models import MODELS, VOCABULARY, make_model, save_model

pytestmark = [pytest.mark.slow, pytest.mark.parity]

LENGTH = 40  # several windows of the models that have one
# Without token 0, the padding of these models, to whose embedding torch gives no gradient.
TOKENS_2xL = np.random.default_rng(0).integers(1, VOCABULARY, (2, LENGTH))


def losses(model: Any) -> Any:
    """Returns the cross-entropy of each token but the first of a row, as torch computes it from logits."""
    import torch

    tokens = torch.tensor(TOKENS_2xL)
    logits = model(tokens).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")


def load(folder: Path, *overrides: str) -> tuple[Any, nnx.GraphDef[Any], nnx.State]:
    return load_parameters(folder, [f"max_target_length={LENGTH}", *overrides])


def rows() -> tuple[jax.Array, jax.Array]:
    tokens = jnp.asarray(TOKENS_2xL, jnp.int32)
    return tokens, jnp.ones_like(tokens)


def test_every_family_has_a_model() -> None:
    kinds = {make_model(name).config.model_type for name in MODELS}
    assert kinds == set(FAMILIES)


@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    import torch

    with torch.no_grad():
        expected = -losses(save_model(name, tmp_path)).numpy().reshape(2, LENGTH - 1)
    assert expected.std() > 0.2  # the tokens tell models apart
    for scan in ("scan_layers=true", "scan_layers=false"):
        _, graphdef, params = load(tmp_path, scan)
        got, _ = jax.jit(lambda params, graph=graphdef: token_logprobs(nnx.merge(graph, params), *rows()))(params)
        np.testing.assert_allclose(got[:, 1:], expected, rtol=0, atol=1e-4, err_msg=scan)


@pytest.mark.parametrize("name", ["llama3", "gemma2", "gemma3", "qwen2_windows", "olmo2", "phi3", "gpt2"])
def test_gradients_are_those_of_torch(name: str, tmp_path: Path) -> None:
    model = save_model(name, tmp_path)
    losses(model).sum().backward()
    config, graphdef, params = load(tmp_path)
    weights = jnp.ones(TOKENS_2xL.shape).at[:, 0].set(0)
    loss = jax.jit(jax.grad(lambda params: loss_sums(nnx.merge(graphdef, params), *rows(), weights)[0]))
    got = loss(params)
    expected = read_parameters(folder_of_gradients(model, tmp_path), config, abstract(params))
    largest = max(float(jnp.linalg.norm(leaf)) for leaf in jax.tree.leaves(expected))
    for (path, ours), theirs in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        difference, size = float(jnp.linalg.norm(ours - theirs)), float(jnp.linalg.norm(theirs))
        # The gradient of a bias of keys without rope is 0 but for rounding.
        assert difference <= 1e-3 * size + 1e-6 * largest, (jax.tree_util.keystr(path), difference, size)


def folder_of_gradients(model: Any, folder: Path) -> Path:
    """Writes the gradients of a model as if they were its tensors, so that they are read as parameters are."""
    gradients = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    target = folder / "gradients"
    target.mkdir()
    shutil.copy(folder / "config.json", target)
    shapes = {name: gradient.shape for name, gradient in gradients.items()}
    write_tensors(target / "model.safetensors", "F32", shapes, iter(gradients.values()))
    return target


def abstract(params: nnx.State) -> nnx.State:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)


@pytest.mark.parametrize("name", MODELS)
def test_an_export_is_the_model_bit_for_bit_and_transformers_loads_it(name: str, tmp_path: Path) -> None:
    import torch
    import transformers

    model = save_model(name, tmp_path / "model")
    export_model(str(tmp_path / "model"), str(tmp_path / "export"), None)
    assert_same_tensors(tmp_path / "model", tmp_path / "export")
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "export", output_loading_info=True, attn_implementation="eager"
    )
    assert {key: value for key, value in report.items() if value} == {}  # missing, unexpected, mismatched
    with torch.no_grad():
        assert torch.equal(losses(model), losses(loaded.eval()))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_export_keeps_the_type_of_the_tensors(name: str, dtype: str, tmp_path: Path) -> None:
    import torch

    make_model(name).to(getattr(torch, dtype)).save_pretrained(tmp_path / "model")
    export_model(str(tmp_path / "model"), str(tmp_path / "export"), None)
    assert_same_tensors(tmp_path / "model", tmp_path / "export")
