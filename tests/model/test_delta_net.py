"""Models of gated delta rules: their states while sampling, their counts, and keys that exclude
each other.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxbatch.families.matrices import active_model_size, active_size_of, model_size, parameters
from maxbatch.model import delta_rule
from maxbatch.model.cache import StateCache
from maxbatch.model.decoder import Decoder
from maxbatch.model.flops import model_flops_per_token
from tests.helpers.configs import config_of

ROWS, LENGTH, PROMPT = 2, 12, 7
TINY = (
    "decoder_block=qwen3_next",
    "base_emb_dim=32",
    "base_num_query_heads=4",
    "base_num_kv_heads=2",
    "head_dim=16",
    "base_num_decoder_layers=2",
    "inhomogeneous_layer_cycle_interval=2",
    "num_experts=4",
    "num_experts_per_tok=2",
    "base_mlp_dim=24",
    "shared_experts=1",
    "norm_topk_prob=true",
    "use_qk_norm=true",
    "partial_rotary_factor=0.25",
    "gdn_num_key_heads=2",
    "gdn_num_value_heads=4",
    "gdn_key_head_dim=8",
    f"max_target_length={LENGTH}",
)
PUBLISHED = (
    "decoder_block=qwen3_next",
    "base_emb_dim=2048",
    "base_num_query_heads=16",
    "base_num_kv_heads=2",
    "head_dim=256",
    "base_num_decoder_layers=48",
    "inhomogeneous_layer_cycle_interval=4",
    "vocab_size=151936",
    "base_mlp_dim=512",
    "num_experts=512",
    "num_experts_per_tok=10",
    "shared_experts=1",
    "use_qk_norm=true",
    "logits_via_embedding=false",
)


@pytest.mark.runs
def test_states_of_prompts_end_with_them_and_give_what_the_whole_row_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(delta_rule, "CHUNK_TOKENS", 4)
    decoder = Decoder(config_of(*TINY, "scan_layers=true").decoder, rngs=nnx.Rngs(params=0))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 260, (ROWS, LENGTH)), jnp.int32)
    # Prompts of other lengths, whose rows behind them go on from their last token.
    lengths = np.array([PROMPT, PROMPT - 3])
    graphdef, params = nnx.split(decoder)

    @jax.jit
    def both(params: nnx.State) -> tuple[jax.Array, list[jax.Array]]:
        decoder, found = nnx.merge(graphdef, params), list[jax.Array]()
        positions = jnp.broadcast_to(jnp.arange(PROMPT + 1), (ROWS, PROMPT + 1))
        caches = decoder.empty_caches(ROWS, PROMPT + 1, jnp.asarray(lengths - 1))
        _, caches = decoder.hidden_with_caches(tokens[:, : PROMPT + 1], positions, caches)
        starts = jnp.repeat(lengths - 1, 2)
        caches = caches.before(starts, 0).with_room_for(LENGTH)
        for step in range(LENGTH - PROMPT):
            last = starts[:, None] + step
            drawn = jnp.take_along_axis(jnp.repeat(tokens, 2, axis=0), last, axis=1)
            hidden, caches = decoder.hidden_with_caches(drawn, last, caches)
            found.append(hidden)
        return decoder.hidden(tokens, jnp.ones_like(tokens)).x_MxLxD, found

    states, _ = decoder.empty_caches(ROWS, LENGTH).places
    assert isinstance(states, StateCache) and states.states_NxBxHxkxv.shape == (1, ROWS, 4, 8, 8)
    whole, found = both(params)
    for step, hidden in enumerate(found):
        expected = np.asarray(whole)[np.arange(ROWS), lengths - 1 + step]
        np.testing.assert_allclose(hidden[:, 0], np.repeat(expected, 2, axis=0), atol=2e-5)


def test_parameters_and_flops_are_those_of_qwen3_next_80b_a3b() -> None:
    config = config_of(*PUBLISHED).decoder
    assert round(model_size(config) / 1e9, 1) == 79.7
    lookup = 151936 * 2048
    assert round((active_model_size(config) - 2 * lookup) / 1e9, 1) == 3.3
    multiplying = (row for row in parameters(config) if row.inputs or row.is_convolution)
    matrices = sum(active_size_of(row, config) for row in multiplying) - lookup
    states, attention = 36 * 24 * 32 * 128 * 128, 12 * 6 * config.max_target_length * 16 * 256
    assert model_flops_per_token(config) == 6 * matrices + states + attention
