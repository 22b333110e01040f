"""Samples that share rows are what they are in rows of their own, in kernels and in chunks too."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxbatch.data.feed.passes import Passes, packed
from maxbatch.model.decoder import Decoder
from maxbatch.parallel.mesh import make_mesh
from maxbatch.parallel.sharding import activation_constraint
from tests.helpers.tiny import tiny_config

LENGTH = 128  # of a row: a block of splash, two chunks of the delta rule
FORMS = {
    "splash": ("head_dim=16", "base_num_decoder_layers=1"),
    "delta rule": (
        "decoder_block=qwen3_next",
        "base_num_decoder_layers=2",
        "inhomogeneous_layer_cycle_interval=2",
        "num_experts=4",
        "num_experts_per_tok=2",
        "norm_topk_prob=true",
        "base_moe_mlp_dim=16",
        "shared_experts=1",
        "gdn_num_key_heads=2",
        "gdn_num_value_heads=4",
        "gdn_key_head_dim=8",
    ),
}


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("form", FORMS)
def test_a_sample_in_a_shared_row_is_what_it_is_alone(form: str) -> None:
    config = tiny_config(f"max_target_length={LENGTH}", *FORMS[form])
    constrain = activation_constraint(make_mesh(config, jax.devices()[:1]), ("fsdp",))
    decoder = Decoder(config.decoder, rngs=nnx.Rngs(params=0), constrain=constrain)
    if form == "splash":  # interpreted
        decoder.layers.attention.implementation = "splash"
    lengths = np.array([1, 90, 100, 27, 128, 37])
    is_token = np.arange(LENGTH) < lengths[:, None]
    tokens = np.random.default_rng(0).integers(0, 256, is_token.shape)
    alone = {
        "tokens": np.where(is_token, tokens, 258).astype(np.int32),
        "segments": is_token.astype(np.int32),
    }
    passes = Passes.of(lengths, LENGTH, 2)
    shared = packed(alone, passes)

    @nnx.jit
    def hidden(decoder: Decoder, tokens: jax.Array, segments: jax.Array) -> jax.Array:
        return decoder.hidden(tokens, segments).x_MxLxD

    def of(rows: dict[str, np.ndarray]) -> np.ndarray:
        missing = ((0, len(lengths) - len(rows["tokens"])), (0, 0))  # the same program
        arrays = (jnp.asarray(np.pad(rows[name], missing)) for name in ("tokens", "segments"))
        return np.asarray(hidden(decoder, *arrays))

    expected, found = of(alone), of(shared)
    assert passes.num_rows < len(lengths)
    for sample, length in enumerate(lengths):
        row, begin = passes.row_P[sample], passes.begin_P[sample]
        np.testing.assert_allclose(
            found[row, begin : begin + length], expected[sample, :length], atol=2e-5
        )
