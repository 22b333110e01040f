"""(i) Tokens/s of sampling: with the key-value cache against a forward pass over the whole window
for every token, and groups that share their prompt's cache against rows that each have their own.

The model is the default one. Both sides must draw the same tokens. Without the cache the time of a
token does not depend on its position, so that side draws fewer.

Shapes: B rows, P tokens of a prompt, L tokens of a row, D model, V vocabulary; Q prompts, G rows of
each.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.measurement import BenchmarkError, Measurement, ratio, seconds_in_turns
from maxbatch.around.sampling.sampler import Sampler, SamplingRules
from maxbatch.config.loading import load_config
from maxbatch.data.tokenizers.tokenizers import ByteTokenizer
from maxbatch.model.decoder import Decoder

BAR, SHARED_BAR = 10.0, 2.0
_P = 16


class _Endless(ByteTokenizer):
    """Lets no response end before its row is full."""

    eos_id = None


def measure(quick: bool) -> list[Measurement]:
    """Ratios of tokens/s, one row and eight rows at a time."""
    if quick:
        return [_measure(1, 64, tokens_without=2, turns=2), _shared(32, 8, turns=2)]
    return [
        _measure(1, 512, tokens_without=64, turns=7),
        _measure(8, 512, tokens_without=8, turns=7),
        _shared(512, 64, turns=7),
    ]


def _measure(rows: int, length: int, tokens_without: int, turns: int) -> Measurement:
    config = load_config(overrides=[f"max_target_length={length}"])
    graphdef, params = nnx.split(Decoder(config.decoder, rngs=nnx.Rngs(params=0)), nnx.Param)
    prompts_BxP = np.random.default_rng(0).integers(0, 256, (rows, _P), dtype=np.int32)
    sampler = Sampler(config.decoder, _Endless(), None, prompt_length=_P)
    prompts, greedy = (
        sampler.rows(list(prompts_BxP), np.zeros((rows, 3))),
        SamplingRules(temperature=0.0),
    )

    def with_cache() -> jax.Array:
        return jax.block_until_ready(sampler(params, prompts, greedy).tokens_BxL)

    @jax.jit
    def drawn(params: nnx.State, tokens_BxL: jax.Array) -> jax.Array:
        decoder = nnx.merge(graphdef, params)

        def next_token(position: jax.Array, tokens_BxL: jax.Array) -> jax.Array:
            segments_BxL = jnp.broadcast_to(jnp.arange(length) < position, tokens_BxL.shape).astype(
                jnp.int32
            )
            x_BxD = decoder.hidden(tokens_BxL, segments_BxL).x_MxLxD[:, position - 1]
            logits_BxV = x_BxD @ decoder.output_projection()
            return tokens_BxL.at[:, position].set(
                jnp.argmax(logits_BxV[:, :256], axis=1).astype(jnp.int32)
            )

        return jax.lax.fori_loop(_P, _P + tokens_without, next_token, tokens_BxL)

    padded_BxL = np.pad(prompts_BxP, ((0, 0), (0, length - _P)))

    def without_cache() -> jax.Array:
        return jax.block_until_ready(drawn(params, padded_BxL))

    first = slice(0, _P + tokens_without)
    if not np.array_equal(with_cache()[:, first], without_cache()[:, first]):
        raise BenchmarkError("the sampler and the forward pass take different tokens")
    seconds = seconds_in_turns({"with": with_cache, "without": without_cache}, turns)
    return ratio(
        f"tokens/s, cache / no cache, {length} tokens, batch {rows}",
        seconds["without"],
        seconds["with"],
        bar=BAR,
        sense="at least",
        scale=(length - _P) / tokens_without,
    )


def _shared(prompt: int, response: int, turns: int) -> Measurement:
    num_prompts, group = 2, 8
    config = load_config(overrides=[f"max_target_length={prompt + response}"])
    params = nnx.state(Decoder(config.decoder, rngs=nnx.Rngs(params=0)), nnx.Param)
    prompts_QxP = np.random.default_rng(0).integers(0, 256, (num_prompts, prompt), dtype=np.int32)
    rows = np.arange(num_prompts * group, dtype=np.uint32)
    draw_ids_Bx3 = np.stack([rows // group, np.zeros_like(rows), rows % group], axis=1)
    sampler = Sampler(config.decoder, _Endless(), None, prompt_length=prompt)

    def drawn(times: int) -> jax.Array:
        prompts = sampler.rows(list(np.repeat(prompts_QxP, times, axis=0)), draw_ids_Bx3)
        return jax.block_until_ready(sampler(params, prompts, SamplingRules()).tokens_BxL)

    if not np.array_equal(drawn(1), drawn(group)):
        raise BenchmarkError(
            "rows that share a prompt's cache and rows that do not take different tokens"
        )
    seconds = seconds_in_turns({"shared": lambda: drawn(1), "own": lambda: drawn(group)}, turns)
    return ratio(
        f"tokens/s, a prompt of {prompt} read once / by each row, {response} tokens, "
        f"{num_prompts} groups of {group}",
        seconds["own"],
        seconds["shared"],
        bar=SHARED_BAR,
        sense="at least",
    )
