"""Layers of several forms, which repeat a cycle: what each sees, with a cache and in packed
rows.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxbatch.config.loading import load_config
from maxbatch.families.cycle import LayerForm, cycle_of, local_layers
from maxbatch.families.family import FAMILIES
from maxbatch.families.matrices import num_sparse_layers, num_stacked
from maxbatch.model import scores
from maxbatch.model.chunks import chunks_of_segments
from maxbatch.model.decoder import Decoder
from maxbatch.model.flops import model_flops_per_token
from maxbatch.plan.mesh_shape import MeshShape, check_model_fits
from maxbatch.system.errors import ConfigError
from tests.helpers.tiny import tiny_config

LENGTH, FIRST = 24, 9  # tokens of a row, and of its first document
LLAMA4 = (
    "decoder_block=llama4",
    "num_experts=4",
    "shared_experts=1",
    "routed_score_func=sigmoid",
    "use_qk_norm=true",
    "interleave_moe_layer_step=2",
    "nope_layer_interval=4",
    "chunk_attn_window_size=7",
    "temperature_tuning=true",
    "base_num_decoder_layers=4",
    f"max_target_length={LENGTH}",
)
SECOND_HAS_EXPERTS = (
    "decoder_block=llama4",
    "num_experts=4",
    "routed_score_func=sigmoid",
    "interleave_moe_layer_step=2",
)


def test_a_cycle_is_as_long_as_the_periods_of_all_keys_together() -> None:
    model = load_config(
        overrides=[*LLAMA4, "interleave_moe_layer_step=3", "base_num_decoder_layers=24"]
    ).model
    assert len(cycle_of(model)) == 12 and (num_stacked(model), num_sparse_layers(model)) == (2, 8)
    attention = FAMILIES["llama4"].attention
    assert cycle_of(model)[:4] == (
        LayerForm(attention, False, True),
        LayerForm(attention, False, True),
        LayerForm(attention, True, True),
        LayerForm(attention, False, False, has_rope=False),
    )
    assert local_layers(model, 24) == (True, True, True, False) * 6


def test_the_chunks_of_a_document_count_from_its_first_token() -> None:
    segments = jnp.asarray([[1, 1, 1, 1, 1, 2, 2, 2, 0, 0]])
    np.testing.assert_array_equal(chunks_of_segments(segments, 2), [[1, 1, 2, 2, 3, 4, 4, 5, 6, 6]])


def test_the_flops_of_chunks_are_those_of_half_a_chunk_per_token() -> None:
    chunked = load_config(overrides=[*LLAMA4, "chunk_attn_window_size=8"])
    whole = load_config(overrides=[*LLAMA4, "chunk_attn_window_size=0"])
    fewer = model_flops_per_token(whole.decoder) - model_flops_per_token(chunked.decoder)
    # Three layers in which a token sees 4 tokens in place of 12: 12 x heads x head_dim each.
    assert fewer == 3 * 12 * 4 * 32 * (LENGTH - 8) // 2


@pytest.mark.runs
@pytest.mark.parametrize("scan", ["scan_layers=true", "scan_layers=false"])
def test_chunks_layers_without_rope_and_growing_scores_are_those_of_each_document_alone(
    monkeypatch: pytest.MonkeyPatch, scan: str
) -> None:
    """In a packed row, and token by token with the cache."""
    monkeypatch.setattr(scores, "GROWTH_TOKENS", 5)
    decoder = Decoder(tiny_config(*LLAMA4, scan).decoder, rngs=nnx.Rngs(0))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 260, (2, LENGTH)), jnp.int32)
    hidden = nnx.jit(lambda decoder, tokens, segments: decoder.hidden(tokens, segments).x_MxLxD)
    ones, rest = jnp.ones_like(tokens), LENGTH - FIRST
    whole = hidden(decoder, tokens, ones)
    packed = hidden(decoder, tokens, ones.at[:, FIRST:].set(2))
    second = jnp.roll(tokens, -FIRST, axis=1)
    alone = hidden(decoder, second, ones.at[:, rest:].set(0))[:, :rest]
    np.testing.assert_allclose(packed[:, FIRST:], alone, atol=2e-5)
    assert float(jnp.abs(packed[:, FIRST:] - whole[:, FIRST:]).max()) > 0.1
    cached, caches, found = nnx.jit(Decoder.hidden_with_caches), decoder.empty_caches(2, LENGTH), []
    for begin, end in [(0, FIRST), *((place, place + 1) for place in range(FIRST, LENGTH))]:
        positions = jnp.broadcast_to(jnp.arange(begin, end), (2, end - begin))
        step, caches = cached(decoder, tokens[:, begin:end], positions, caches)
        found.append(step)
    np.testing.assert_allclose(jnp.concatenate(found, axis=1), whole, atol=2e-5)


def test_a_stage_of_a_pipeline_holds_whole_cycles() -> None:
    config = load_config(
        overrides=[*SECOND_HAS_EXPERTS, "base_num_decoder_layers=4", "ici_pipeline_parallelism=4"]
    )
    with pytest.raises(
        ConfigError, match=r"must divide the 2 cycles of 2 layers .*ici_pipeline_parallelism=2"
    ):
        check_model_fits(config.plan, MeshShape.from_config(config.plan, 4))
