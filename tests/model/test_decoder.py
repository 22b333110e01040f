"""The decoder: dependencies of a position, and settings without effect on the result."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxbatch import load_config
from maxbatch.model import decoder
from maxbatch.model.decoder import Decoder, DecoderLayer
from maxbatch.model.flops import model_flops_per_token
from tests.helpers.tiny import LENGTH, TINY_MODEL, loss_sums, some_rows, tiny_config

LONG_ROPE = (
    "rope_type=longrope",
    "original_max_position_embeddings=16",
    "rope_factor=4",
    "head_dim=8",
    "rope_short_factors=1,1.1,1.3,1.5",
    "rope_long_factors=1,2.5,4,6",
)
LAYERS_ONLY = ("query", "key", "value", "out", "gate", "up", "down")


def decoder_of(*overrides: str) -> Decoder:
    return Decoder(tiny_config(*overrides).decoder, rngs=nnx.Rngs(params=0))


@nnx.jit
def hidden(decoder: Decoder, tokens: jax.Array, segments: jax.Array) -> jax.Array:
    return decoder.hidden(tokens, segments).x_MxLxD


def tokens_of(rows: int = 2) -> jax.Array:
    return jax.random.randint(jax.random.key(1), (rows, LENGTH), 0, 256)


@partial(jax.jit, static_argnums=0)
def loss_and_gradient(
    graphdef: nnx.GraphDef[Any], params: nnx.State, rows: dict[str, jax.Array]
) -> tuple[jax.Array, nnx.State]:
    def loss(params: nnx.State) -> jax.Array:
        return loss_sums(
            nnx.merge(graphdef, params), rows["tokens"], rows["segments"], rows["weights"]
        )[0]

    return jax.value_and_grad(loss)(params)


def loss_and_gradient_of(*overrides: str) -> tuple[jax.Array, nnx.State]:
    graphdef, params = nnx.split(decoder_of(*overrides), nnx.Param)
    return loss_and_gradient(graphdef, params, some_rows(4))


def assert_same_gradients(
    got: tuple[jax.Array, nnx.State], expected: tuple[jax.Array, nnx.State], rtol: float = 1e-5
) -> None:
    np.testing.assert_allclose(got[0], expected[0], rtol=rtol)
    for a, b in zip(jax.tree.leaves(got[1]), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(a, b, atol=rtol * float(jnp.max(jnp.abs(b))))


def test_a_stack_is_made_by_tracing_one_of_its_layers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, init = [], DecoderLayer.__init__

    def counted(self: DecoderLayer, *arguments: Any, **options: Any) -> None:
        made.append(self)
        init(self, *arguments, **options)

    monkeypatch.setattr(DecoderLayer, "__init__", counted)
    nnx.eval_shape(lambda: decoder_of("base_num_decoder_layers=5"))
    assert len(made) == 1


def test_no_position_depends_on_a_later_token() -> None:
    decoder, tokens, segments = decoder_of(), tokens_of(), jnp.ones((2, LENGTH), jnp.int32)
    changed = tokens.at[:, 20:].set(7)
    before, after = (hidden(decoder, t, segments) for t in (tokens, changed))
    np.testing.assert_array_equal(before[:, :20], after[:, :20])
    assert not np.array_equal(before[:, 20:], after[:, 20:])


@pytest.mark.parametrize("changed", [slice(0, 12), slice(12, 26)])
def test_a_packed_document_is_blind_to_the_others_bit_for_bit(changed: slice) -> None:
    decoder, tokens = decoder_of(), tokens_of()
    segments = jnp.asarray([[1] * 12 + [2] * 14 + [0] * 6] * 2)
    before, after = (hidden(decoder, t, segments) for t in (tokens, tokens.at[:, changed].set(7)))
    same = np.ones(LENGTH, bool)
    same[changed] = False
    np.testing.assert_array_equal(before[:, same], after[:, same])


def test_a_document_means_the_same_wherever_it_lies_in_the_row() -> None:
    decoder, document = decoder_of(), tokens_of(1)[:, :10]
    rest = LENGTH - 10
    first = hidden(
        decoder, jnp.pad(document, ((0, 0), (0, rest))), jnp.asarray([[1] * 10 + [0] * rest])
    )[:, :10]
    last = hidden(
        decoder, jnp.pad(document, ((0, 0), (rest, 0))), jnp.asarray([[1] * rest + [2] * 10])
    )[:, rest:]
    np.testing.assert_allclose(first, last, atol=1e-4)


def test_a_document_has_the_rope_factors_of_its_own_length_beside_others() -> None:
    """LongRoPE's factors depend on the document's length, not on the row's."""
    decoder, tokens = decoder_of(*LONG_ROPE), tokens_of(1)
    packed = hidden(decoder, tokens, jnp.asarray([[1] * 10 + [2] * (LENGTH - 10)]))
    short, long = tokens[:, :10], tokens[:, 10:]
    np.testing.assert_allclose(
        packed[:, :10], hidden(decoder, short, jnp.ones_like(short)), atol=1e-5
    )
    np.testing.assert_allclose(
        packed[:, 10:], hidden(decoder, long, jnp.ones_like(long)), atol=1e-4
    )
    in_a_long_one = hidden(decoder, tokens, jnp.ones_like(tokens))[:, :10]
    assert float(jnp.abs(packed[:, :10] - in_a_long_one).max()) > 1e-2


@pytest.mark.parametrize("length", [14, LENGTH])
def test_sampled_rows_have_one_set_of_rope_factors_from_their_first_token_on(length: int) -> None:
    """The cache of a prompt may be shorter than the texts from which other factors hold."""
    decoder, tokens = decoder_of(*LONG_ROPE), tokens_of(2)[:, :length]
    expected = hidden(decoder, tokens, jnp.ones_like(tokens))
    positions, limits, prompt = (
        jnp.broadcast_to(jnp.arange(length), tokens.shape),
        jnp.full(2, length),
        8,
    )
    cached = nnx.jit(Decoder.hidden_with_caches)
    first, cache = cached(
        decoder, tokens[:, :prompt], positions[:, :prompt], decoder.empty_caches(2, prompt), limits
    )
    room = cache.with_room_for(LENGTH)
    rest, _ = cached(decoder, tokens[:, prompt:], positions[:, prompt:], room, limits)
    np.testing.assert_allclose(jnp.concatenate([first, rest], axis=1), expected, atol=1e-4)


def test_layers_in_a_loop_equal_unrolled_layers() -> None:
    assert_same_gradients(
        loss_and_gradient_of("scan_layers=true"), loss_and_gradient_of("scan_layers=false")
    )


@pytest.mark.parametrize(
    ("policy", "scan_layers"),
    [
        ("minimal", "true"),
        ("full", "false"),
        ("custom query_proj=device mlpwi_0=device", "false"),
        ("custom decoder_layer_input=offload value_proj=offload out_proj=device", "true"),
    ],
)
def test_rematerialisation_changes_no_gradient(policy: str, scan_layers: str) -> None:
    scan = f"scan_layers={scan_layers}"
    assert_same_gradients(
        loss_and_gradient_of(*f"remat_policy={policy}".split(), scan), loss_and_gradient_of(scan)
    )


def test_rematerialisation_keeps_less() -> None:
    def temporaries(policy: str) -> int:
        graphdef, params = nnx.split(
            decoder_of(f"remat_policy={policy}", "scan_layers=true"), nnx.Param
        )
        compiled = loss_and_gradient.lower(graphdef, params, some_rows(16)).compile()
        return int(compiled.memory_analysis().temp_size_in_bytes)

    assert max(temporaries("minimal"), temporaries("full")) < temporaries("none")


@pytest.mark.usefixtures("standard_promotion")
def test_bfloat16_compute_stays_close_to_float32() -> None:
    (loss, gradient), (exact_loss, exact_gradient) = (
        loss_and_gradient_of(f"dtype={dtype}") for dtype in ("bfloat16", "float32")
    )
    np.testing.assert_allclose(loss, exact_loss, rtol=2e-3)
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(exact_gradient), strict=True):
        assert a.dtype == jnp.float32
        assert jnp.linalg.norm(a - b) < 0.03 * jnp.linalg.norm(b)


@pytest.mark.runs
@pytest.mark.parametrize("tied", ["true", "false"])
@pytest.mark.parametrize("overrides", [(), TINY_MODEL])
def test_the_loss_starts_near_that_of_a_uniform_guess(
    tied: str, overrides: tuple[str, ...]
) -> None:
    config = load_config(overrides=[*overrides, f"logits_via_embedding={tied}"])
    decoder = Decoder(config.decoder, rngs=nnx.Rngs(params=0))
    tokens = jax.random.randint(jax.random.key(1), (4, config.max_target_length), 0, 256)
    ones = jnp.ones(tokens.shape, jnp.int32)
    loss, weight = nnx.jit(loss_sums)(
        decoder, tokens, ones, ones.astype(jnp.float32).at[:, 0].set(0)
    )
    uniform = math.log(config.vocab_size)
    assert uniform - 0.1 < loss / weight < uniform + 0.7


@pytest.mark.parametrize("tied", ["true", "false"])
def test_every_parameter_names_its_axes_and_has_the_dtype_of_weights(tied: str) -> None:
    decoder = decoder_of(f"logits_via_embedding={tied}", "weight_dtype=bfloat16", "dtype=bfloat16")
    names = {"layers", "vocab", "embed", "heads", "kv_heads", "head_dim", "mlp", "norm"}
    parameters = [v for _, v in nnx.iter_graph(decoder) if isinstance(v, nnx.Param)]
    assert len(parameters) == 11 + (tied == "false")
    for parameter in parameters:
        axes = parameter.get_metadata("logical_axes")
        assert len(axes) == parameter.ndim and set(axes) <= names
        assert parameter.dtype == jnp.bfloat16
    projection = decoder.output_projection()
    assert projection.shape == (32, 264)
    if tied == "true":
        np.testing.assert_array_equal(projection, decoder.embedding[...].T)


def test_one_seed_is_one_model_on_any_mesh() -> None:
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.NamedSharding(mesh, jax.P(None, "fsdp"))

    def embedding() -> jax.Array:
        return decoder_of().embedding[...]

    np.testing.assert_array_equal(jax.jit(embedding)(), jax.jit(embedding, out_shardings=sharded)())


def test_layers_start_unlike_each_other() -> None:
    query = decoder_of().layers.attention.query[...]
    assert not np.allclose(query[0], query[1])


def test_flops_count_every_matrix_six_times_and_causal_attention() -> None:
    config = tiny_config()
    decoder = Decoder(config.decoder, rngs=nnx.Rngs(params=0))
    by_name = [
        (path[-1], v.size) for path, v in nnx.iter_graph(decoder) if isinstance(v, nnx.Param)
    ]
    matrices = (
        sum(size for name, size in by_name if name in LAYERS_ONLY)
        + decoder.output_projection().size
    )
    # Scores and weighted values: 2 products of 2 * h operations for each of the (L + 1) / 2 visible
    # keys on average.
    attention = 3 * 2 * 2 * 2 * 4 * 8 * LENGTH / 2
    assert model_flops_per_token(config.decoder) == 6 * matrices + attention


@pytest.mark.parametrize("file", ["decoder", "layer", "walk"])
def test_no_function_inside_of_another_closes_over_more_than_three_names(file: str) -> None:
    """A reader of the way of a token keeps no more than that in mind."""
    path = Path(decoder.__file__).with_name(f"{file}.py")
    inner = [compile(path.read_text(), path, "exec")]
    for code in inner:  # which grows
        inner += [const for const in code.co_consts if isinstance(const, CodeType)]
    assert len(inner) > 10  # functions and methods too
    assert {code.co_name: code.co_freevars for code in inner if len(code.co_freevars) > 3} == {}
