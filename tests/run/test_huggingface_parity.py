"""Hugging Face's families against transformers: computation, and loading of an export."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from maxbatch.around.huggingface.arrays.reading import HuggingFaceFolder
from maxbatch.around.huggingface.export.model import export_model
from maxbatch.around.huggingface.export.peft import export_adapters
from maxbatch.around.scoring import Scorer
from maxbatch.config.config import Config
from maxbatch.config.loading import load_config
from maxbatch.data.stream.stream import open_stream
from maxbatch.families.family import FAMILIES, MODEL_TYPES
from maxbatch.model import delta_rule, scores
from maxbatch.model.cache import Caches
from maxbatch.model.loss import token_logprobs
from maxbatch.parallel.mesh import make_mesh
from maxbatch.run.pretraining import train
from tests.helpers.chats import chat_config, some_talks
from tests.helpers.huggingface_folders import assert_same_tensors
from tests.helpers.parameters import load_parameters
from tests.helpers.tiny import loss_sums, read_metrics
from tests.helpers.transformers_models import (
    FAMILY_MODELS,
    MODELS,
    VOCABULARY,
    make_model,
    save_model,
)

pytestmark = [pytest.mark.slow, pytest.mark.parity]

LENGTH = 40  # several windows of the models that have one
# Without token 0, the padding of these models, to whose embedding torch gives no gradient.
TOKENS_2xL = np.random.default_rng(0).integers(1, VOCABULARY, (2, LENGTH))


@pytest.fixture(scope="module", autouse=True)
def constants_of_short_texts() -> Iterator[None]:
    """Has scores grow, and chunks of a gated delta rule end, within the LENGTH tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES["llama4"].fixed, "floor_scale", 5)
        patch.setattr(scores, "GROWTH_TOKENS", 5)
        patch.setattr(delta_rule, "CHUNK_TOKENS", 8)
        yield


def losses(model: Any) -> Any:
    """Returns the cross-entropy of each token but the first of a row, as torch computes it from
    logits.
    """
    import torch

    tokens = torch.tensor(TOKENS_2xL)
    logits = model(tokens).logits[:, :-1]
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
    )


def load(folder: Path, *overrides: str) -> tuple[Any, nnx.GraphDef[Any], nnx.State]:
    return load_parameters(folder, [f"max_target_length={LENGTH}", *overrides])


def rows() -> tuple[jax.Array, jax.Array]:
    tokens = jnp.asarray(TOKENS_2xL, jnp.int32)
    return tokens, jnp.ones_like(tokens)


class Reference(NamedTuple):
    """A model of transformers, where it is saved, and its log-probabilities of TOKENS_2xL after the
    first tokens.
    """

    model: Any
    folder: Path
    logprobs: np.ndarray


def make_reference(name: str, folder: Path) -> Reference:
    import torch

    model = save_model(name, folder)
    with torch.no_grad():
        expected = -losses(model).numpy().reshape(2, LENGTH - 1)
    assert expected.std() > 0.2  # the tokens tell models apart
    return Reference(model, folder, expected)


@pytest.fixture(scope="module", params=MODELS)
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Reference:
    return make_reference(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=FAMILY_MODELS)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference(request.param, tmp_path_factory.mktemp(request.param))


def assert_close(found: Any, expected: np.ndarray, what: str = "") -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4, err_msg=what)


def layers_in_turn(model: str, names: Iterable[str], first: int) -> pytest.MarkDecorator:
    """Parametrizes a test by model and scanned or unrolled layers, in turn: with another `first` by
    the other one.
    """
    layers = ("scan_layers=true", "scan_layers=false")
    cases = [(name, layers[number % 2]) for number, name in enumerate(names, first)]
    return pytest.mark.parametrize((model, "scan"), cases, indirect=[model])


def test_every_family_has_a_model() -> None:
    import transformers

    kinds = {
        name: getattr(transformers, f"{kind}Config").model_type
        for name, (kind, _) in MODELS.items()
    }
    assert (
        set(kinds.values())
        == {kinds[name] for name in (*FAMILY_MODELS, "qwen3_5")}
        == MODEL_TYPES.keys()
    )


# of those, the tests below have them
@layers_in_turn("reference", sorted(MODELS.keys() - FAMILY_MODELS), 0)
def test_log_probabilities_are_those_of_transformers(reference: Reference, scan: str) -> None:
    _, graphdef, params = load(reference.folder, scan)
    got = jax.jit(lambda params: token_logprobs(nnx.merge(graphdef, params), *rows()).logprobs_MxL)(
        params
    )
    assert_close(got[:, 1:], reference.logprobs)


@layers_in_turn("family", FAMILY_MODELS, 0)
def test_packed_documents_have_the_log_probabilities_that_each_has_alone(
    family: Reference, scan: str
) -> None:
    first, second = 23, LENGTH - 23
    tokens = np.concatenate([TOKENS_2xL[0, :first], TOKENS_2xL[1, :second]])[None]
    segments = np.repeat([1, 2], [first, second])[None]
    _, graphdef, params = load(family.folder, scan)
    got = jax.jit(
        lambda params: token_logprobs(nnx.merge(graphdef, params), tokens, segments).logprobs_MxL
    )(params)
    assert_close(got[0, 1:first], family.logprobs[0, : first - 1])
    assert_close(got[0, first + 1 :], family.logprobs[1, : second - 1])


def test_packed_documents_of_longrope_have_the_factors_that_each_has_alone(tmp_path: Path) -> None:
    import torch

    # other factors from 33 tokens on
    model, lengths = save_model("phi3_long", tmp_path / "model"), (20, 33, 27)
    documents = [
        np.random.default_rng(number).integers(1, VOCABULARY, n) for number, n in enumerate(lengths)
    ]
    tokens, segments = np.concatenate(documents)[None], np.repeat([1, 2, 3], lengths)[None]
    _, graphdef, params = load_parameters(tmp_path / "model", ["max_target_length=80"])
    got = jax.jit(
        lambda params: token_logprobs(nnx.merge(graphdef, params), tokens, segments).logprobs_MxL
    )(params)
    for number, document in enumerate(documents, 1):
        with torch.no_grad():
            logits = model(torch.tensor(document)[None]).logits[0, :-1]
        expected = -torch.nn.functional.cross_entropy(
            logits, torch.tensor(document[1:]), reduction="none"
        ).numpy()
        assert_close(got[segments == number][1:], expected, str(number))


@layers_in_turn("family", FAMILY_MODELS, 1)
def test_log_probabilities_with_the_cache_are_those_of_transformers(
    family: Reference, scan: str
) -> None:
    prompt = 11
    _, graphdef, params = load(family.folder, scan)

    @jax.jit
    def logprobs(
        params: nnx.State, tokens: jax.Array, first: jax.Array, caches: Caches
    ) -> tuple[jax.Array, Caches]:
        decoder = nnx.merge(graphdef, params)
        positions = first + jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        hidden, caches = decoder.hidden_with_caches(tokens, positions, caches)
        return jax.nn.log_softmax(decoder.capped(hidden @ decoder.output_projection())), caches

    caches, found = nnx.merge(graphdef, params).empty_caches(2, LENGTH), []
    for begin, end in [(0, prompt), *((place, place + 1) for place in range(prompt, LENGTH))]:
        of_vocabulary, caches = logprobs(params, TOKENS_2xL[:, begin:end], jnp.int32(begin), caches)
        found.append(of_vocabulary)
    next_token = np.concatenate(found, axis=1)[:, :-1]
    got = np.take_along_axis(next_token, TOKENS_2xL[:, 1:, None], axis=-1)[..., 0]
    assert_close(got, family.logprobs)


def load_over(folder: Path, *axes: str) -> tuple[Config, Mesh, nnx.GraphDef[Any], nnx.State]:
    """Loads a model over two devices on each of the axes."""
    sizes = {
        axis: 2 if axis in axes else 1 for axis in ("data", "fsdp", "tensor", "context", "pipeline")
    }
    overrides = [
        f"max_target_length={LENGTH}",
        *(f"ici_{axis}_parallelism={size}" for axis, size in sizes.items()),
    ]
    mesh = make_mesh(load_config(overrides=overrides), jax.devices()[: 2 ** len(axes)])
    config, graphdef, params = load_parameters(folder, overrides, mesh)
    return config, mesh, graphdef, params


def test_log_probabilities_on_a_mesh_are_those_of_transformers(family: Reference) -> None:
    # Layers that share keys run in one stage.
    last = "data" if getattr(family.model.config, "num_kv_shared_layers", 0) else "pipeline"
    config, mesh, _, params = load_over(family.folder, "tensor", "context", last)
    found = Scorer(config.decoder, config.mesh, mesh, params)(list(TOKENS_2xL))
    assert_close([row.logprobs for row in found], family.logprobs)


def test_the_loss_and_its_gradients_over_fsdp_are_those_of_torch(family: Reference) -> None:
    losses(family.model).sum().backward()
    config, _, graphdef, params = load_over(family.folder, "fsdp")
    weights = jnp.ones(TOKENS_2xL.shape).at[:, 0].set(0)
    loss = jax.value_and_grad(
        lambda params: loss_sums(nnx.merge(graphdef, params), *rows(), weights)[0]
    )
    value, got = jax.jit(loss)(params)
    assert float(value) == pytest.approx(-family.logprobs.sum(), rel=1e-5)
    shapes = abstract(params)
    folder = HuggingFaceFolder(folder_of_gradients(family.model, family.folder))
    expected = folder.open(config.model, shapes)(shapes)
    largest = max(float(jnp.linalg.norm(leaf)) for leaf in jax.tree.leaves(expected))
    for (path, ours), theirs in zip(
        jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True
    ):
        difference, size = float(jnp.linalg.norm(ours - theirs)), float(jnp.linalg.norm(theirs))
        # The gradient of a bias of keys without rope is 0 but for rounding.
        assert difference <= 1e-3 * size + 1e-6 * largest, (
            jax.tree_util.keystr(path),
            difference,
            size,
        )


def folder_of_gradients(model: Any, folder: Path) -> Path:
    """Writes the gradients of a model as if they were its tensors, so that they are read as
    parameters are.
    """
    import torch

    holding = copy.deepcopy(model)
    with torch.no_grad():
        for ours, parameter in zip(holding.parameters(), model.parameters(), strict=True):
            ours.copy_(parameter.grad)
        for (name, ours), buffer in zip(holding.named_buffers(), model.buffers(), strict=True):
            if buffer.requires_grad:
                ours.copy_(buffer.grad)
            elif name.endswith("e_score_correction_bias"):  # which has no gradient
                ours.zero_()
    # which takes the experts apart that it holds as one
    holding.save_pretrained(folder / "gradients")
    return folder / "gradients"


def abstract(params: nnx.State) -> nnx.State:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params
    )


def test_an_export_is_the_model_bit_for_bit_and_transformers_loads_it(
    reference: Reference, tmp_path: Path
) -> None:
    import torch
    import transformers

    export_model(str(reference.folder), str(tmp_path / "export"), None)
    assert_same_tensors(reference.folder, tmp_path / "export")
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "export", output_loading_info=True, attn_implementation="eager"
    )
    # missing, unexpected, mismatched
    assert {key: value for key, value in report.items() if value} == {}
    with torch.no_grad():
        assert torch.equal(losses(reference.model), losses(loaded.eval()))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_export_keeps_the_type_of_the_tensors(name: str, dtype: str, tmp_path: Path) -> None:
    import torch

    make_model(name).to(getattr(torch, dtype)).save_pretrained(tmp_path / "model")
    export_model(str(tmp_path / "model"), str(tmp_path / "export"), None)
    assert_same_tensors(tmp_path / "model", tmp_path / "export")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of PEFT's own
@pytest.mark.parametrize(
    ("name", "targets", "fields"),
    [
        ("gemma3", "all", {}),
        # its last layers lack keys, and two matrices lie in a layer itself
        ("gemma4_small", "all", {}),
        ("phi3", "all", {}),  # whose layers join matrices, as those of gpt2
        ("phi3", "query,up,out", {}),
        ("gpt2", "query,up,out", {}),
        # Beside experts PEFT renames modules, such as those of an MLP; here also joined ones, head
        # by head.
        ("deepseek", "all", {"num_hidden_layers": 2, "first_k_dense_replace": 1}),
        ("qwen3_next", "all", {"num_hidden_layers": 2}),
        (
            "qwen3_5",
            "delta_key,query_gate,up,shared_gate",
            {"num_hidden_layers": 2, "full_attention_interval": 2},
        ),
    ],
)
def test_peft_applies_exported_adapters_as_the_merged_export_has_them(
    name: str, targets: str, fields: dict[str, int], tmp_path: Path
) -> None:
    import torch
    import transformers

    peft = pytest.importorskip("peft")
    model = save_model(name, tmp_path / "model", **fields)
    before = losses(model).detach()
    adapted = load_config(
        overrides=[
            "model_name=auto",
            f"load_parameters_path={tmp_path / 'model'}",
            f"run_dir={tmp_path / 'run'}",
            "steps=2",
            "dataset_type=synthetic",
            "max_target_length=16",
            "lora_rank=3",
            "lora_alpha=9",
            f"lora_targets={targets}",
            "learning_rate=1e-2",
            "warmup_steps_fraction=0",
            "eval_interval=-1",
            "generate_prompt=",
            "gradient_noise_scale=false",
        ]
    )
    train(adapted, jax.devices()[:1])
    export_model(str(tmp_path / "run"), str(tmp_path / "merged"), None)
    export_adapters(str(tmp_path / "run"), str(tmp_path / "adapters"), None)
    merged = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", attn_implementation="eager"
    )
    with torch.no_grad():
        expected = losses(merged.eval())
        found = losses(peft.PeftModel.from_pretrained(model, tmp_path / "adapters").eval())
    assert (expected - before).abs().max() > 1e-2
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_the_loss_of_an_sft_update_is_the_cross_entropy_of_torch_over_the_trained_tokens(
    tmp_path: Path,
) -> None:
    import torch

    model = save_model("llama", tmp_path / "model", vocab_size=320)
    config = chat_config(
        tmp_path,
        some_talks(40),
        "model_name=auto",
        f"load_parameters_path={tmp_path / 'model'}",
        "steps=1",
        f"run_dir={tmp_path / 'run'}",
        "global_batch_size=8",
        "per_device_batch_size=1",
        "gradient_noise_scale=false",
        "eval_interval=-1",
        "generate_prompt=",
    )
    train(config, jax.devices()[:2])
    read = open_stream(config).read(0, 8)
    sums = torch.zeros(2)
    for tokens_L, segments_L, weights_L in zip(
        read["tokens"], read["segments"], read["weights"], strict=True
    ):
        for segment in set(segments_L.tolist()) - {0}:
            ids = torch.tensor(tokens_L[segments_L == segment], dtype=torch.long)[None]
            labels = torch.where(
                torch.tensor(weights_L[segments_L == segment])[None] > 0, ids, -100
            )
            with torch.no_grad():
                mean, trained = model(ids, labels=labels).loss, (labels[:, 1:] != -100).sum()
            sums += torch.stack([mean * trained, trained]) if trained else 0
    [update] = read_metrics(tmp_path / "run")
    assert update["loss_weight"] == sums[1] > 8
    assert update["loss"] == pytest.approx(float(sums[0] / sums[1]), abs=1e-4)
