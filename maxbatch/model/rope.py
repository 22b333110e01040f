"""Rotary positions, and their extension to longer texts.

Shapes: M micro-batch, L length, H heads, h head_dim.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from maxbatch.config.sections import ModelConfig
from maxbatch.families.family import FAMILIES
from maxbatch.families.matrices import global_head_dim
from maxbatch.model.products import Adapted, quarter_turn

Rope = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class RopeKeys:
    """The config keys of a model's rotary positions. They are compared by value, as compiled
    programs need it.
    """

    head_dim: int
    rope_max_timescale: float
    local_rope_max_timescale: float
    rope_type: str
    rope_factor: float
    rope_attention_factor: float
    rope_low_freq_factor: float
    rope_high_freq_factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    rope_truncate: bool
    rope_short_factors: str
    rope_long_factors: str
    global_head_dim: int
    partial_rotary_factor: float  # share of a global head's pairs that are rotated

    @classmethod
    def from_config(cls, config: ModelConfig) -> RopeKeys:
        """Returns the keys of a config; without global heads the head is the part of it that is
        rotated.
        """
        keys_of_config = {
            field.name: config[field.name]
            for field in dataclasses.fields(cls)
            if field.name != "global_head_dim"
        }
        keys = cls(**keys_of_config, global_head_dim=global_head_dim(config))
        family = FAMILIES[config.decoder_block]
        if family.attention.has_global_heads:
            return keys
        head_dim = family.attention.rotated(config)
        return dataclasses.replace(
            keys, head_dim=head_dim, global_head_dim=head_dim, partial_rotary_factor=1.0
        )


class Ropes:
    """The tables of a model: those of its global layers, and those of its local ones, which may
    have another base.

    LongRoPE has other tables for long documents (Ding et al. 2024,
    https://arxiv.org/abs/2402.13753). Each document uses the tables of its own length, also when
    packed with others.

    Args:
      length: of a row.
      longest: most tokens of a document; None: `length`.
    """

    def __init__(self, keys: RopeKeys, length: int, longest: int | None = None) -> None:
        self._global = rope_tables(length, *_stretched(keys))
        self._local: Rope | None = None
        self._long: Rope | None = None
        self._original = keys.original_max_position_embeddings
        if keys.rope_type == "longrope" and (longest or length) > self._original:
            self._long = rope_tables(length, *_stretched(keys, is_long=True))
        base = keys.local_rope_max_timescale
        if base > 0 or keys.global_head_dim != keys.head_dim:
            base = base if base > 0 else keys.rope_max_timescale
            self._local = rope_tables(length, frequencies_of(keys.head_dim, base))

    def of(
        self,
        is_local: jax.Array | bool,
        lengths: Callable[[], jax.Array],
        positions_MxL: jax.Array | None = None,
    ) -> Rope:
        """Returns the tables of one layer, [L, h/2], or [M, L, h/2] where rows have their own.

        Args:
          is_local: whether the layer is local.
          lengths: returns the number of tokens in each token's document, int32[M, L] or [M, 1].
          positions_MxL: the tokens' places in their rows; None: they are all tokens of a row.
        """
        if self._local and is_local is True:
            return _at(positions_MxL, self._local)
        table = _at(positions_MxL, self._global)
        if self._long:
            is_long_MxLx1 = lengths()[..., None] > self._original
            table = _where(is_long_MxLx1, _at(positions_MxL, self._long), table)
        if self._local is None or isinstance(is_local, bool):
            return table
        return _where(is_local, _at(positions_MxL, self._local), table)


def neighbours_apart(weight: jax.Array | Adapted, rotated: int) -> jax.Array | Adapted:
    """Reorders the rotated outputs (the last ones) from neighbouring pairs to halves: even columns
    first.
    """

    def apart(w: jax.Array) -> jax.Array:
        others, pairs = jnp.split(w, [w.shape[-1] - rotated], axis=-1)
        pairs = (
            pairs.reshape(*pairs.shape[:-1], rotated // 2, 2).swapaxes(-1, -2).reshape(pairs.shape)
        )
        return jnp.concatenate([others, pairs], axis=-1)

    return weight.with_outputs(apart) if isinstance(weight, Adapted) else apart(weight)


def apply_rope(
    x_MxLxHxh: jax.Array, rope: Rope, platform: str = "cpu", factor: float = 1.0
) -> jax.Array:
    """Rotates each pair (i, i + h/2) of the heads by its position's angle, in float32; returns x's
    dtype.

    The tables hold their positions: [L, h/2], or [M, L, h/2] if every row has its own positions. If
    they are narrower, they rotate the first part of a head, and the rest stays.

    Args:
      platform: "cpu", "gpu" or "tpu": selects the fastest form; the values are the same.
      factor: multiplies the result before it is rounded.
    """
    if (turned := 2 * rope[0].shape[-1]) < x_MxLxHxh.shape[-1]:
        x_MxLxHxr, rest = jnp.split(x_MxLxHxh, [turned], axis=-1)
        rest = rest if factor == 1.0 else (rest.astype(jnp.float32) * factor).astype(rest.dtype)
        return jnp.concatenate([apply_rope(x_MxLxHxr, rope, platform, factor), rest], axis=-1)
    cos, sin = (table.reshape(-1, *table.shape[-2:])[:, :, None, :] for table in rope)
    if factor != 1.0:
        cos, sin = cos * factor, sin * factor
    if platform == "tpu":
        cos, sin = (jnp.concatenate([table, table], axis=-1) for table in (cos, sin))
        rotated = x_MxLxHxh.astype(jnp.float32) * cos + quarter_turn(x_MxLxHxh) * sin
        return rotated.astype(x_MxLxHxh.dtype)
    first, second = jnp.split(x_MxLxHxh.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_MxLxHxh.dtype)


def _at(positions_MxL: jax.Array | None, rope: Rope) -> Rope:
    return rope if positions_MxL is None else (rope[0][positions_MxL], rope[1][positions_MxL])


def _where(condition: jax.Array, rope: Rope, other: Rope) -> Rope:
    (cos, sin), (other_cos, other_sin) = (
        [table.reshape(-1, *table.shape[-2:]) for table in r] for r in (rope, other)
    )
    return jnp.where(condition, cos, other_cos), jnp.where(condition, sin, other_sin)


def rope_tables(length: int, frequencies: np.ndarray, scale: float = 1.0) -> Rope:
    """Returns the float32 cosines and sines, each [L, h/2], of positions 0 to L - 1, times a scale.

    Positions count from the start of the row. A rotated query and key depend only on the difference
    of their positions, so the documents of a packed row need no restart. The tables are constants
    of the program, computed in float64: in float32 the angles of late positions are off by
    thousandths, and XLA would compute them again in every layer.

    Reference: Su et al. 2021, RoFormer (https://arxiv.org/abs/2104.09864), section 3.2.
    """
    angles = np.outer(np.arange(length), frequencies)
    return jnp.asarray(np.cos(angles) * scale, jnp.float32), jnp.asarray(
        np.sin(angles) * scale, jnp.float32
    )


def frequencies_of(head_dim: int, max_timescale: float, proportion: float = 1.0) -> np.ndarray:
    """Returns the frequency of each pair; pairs beyond the proportion that is rotated have 0."""
    pairs = np.arange(head_dim // 2)
    return np.where(
        pairs < int(proportion * head_dim // 2), max_timescale ** (-2 * pairs / head_dim), 0.0
    )


def _stretched(keys: RopeKeys, is_long: bool = False) -> tuple[np.ndarray, float]:
    """Returns the frequencies under `rope_type`, and what multiplies cosines and sines.

    Args:
      is_long: whether the frequencies are for long documents, which LongRoPE treats differently.
    """
    frequencies = frequencies_of(
        keys.global_head_dim, keys.rope_max_timescale, keys.partial_rotary_factor
    )
    factor = keys.rope_factor
    if keys.rope_type == "linear":
        return frequencies / factor, 1.0
    if keys.rope_type == "longrope":
        return frequencies / _long_factors(
            keys, is_long
        ), keys.rope_attention_factor or _long_scale(keys)
    if keys.rope_type == "llama3.1":
        share = _llama3_share(keys, frequencies)
    elif keys.rope_type == "yarn":
        share = _yarn_share(keys)
    else:
        return frequencies, 1.0
    scale = 1.0
    if keys.rope_type == "yarn":
        scale = keys.rope_attention_factor or 0.1 * math.log(factor) + 1.0
    return frequencies * (1 - share) / factor + frequencies * share, scale


def _long_factors(keys: RopeKeys, is_long: bool) -> np.ndarray:
    text = keys.rope_long_factors if is_long else keys.rope_short_factors
    return np.array([float(word) for word in text.split(",")])


def _long_scale(keys: RopeKeys) -> float:
    return math.sqrt(
        1 + math.log(keys.rope_factor) / math.log(keys.original_max_position_embeddings)
    )


def _llama3_share(keys: RopeKeys, frequencies: np.ndarray) -> np.ndarray:
    """Returns the share of each frequency that is not stretched (Grattafiori et al. 2024, as Llama
    3.1's code has it).

    It grows from 0 to 1 with the turns that a pair makes over the original length.
    """
    turns = keys.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = keys.rope_low_freq_factor, keys.rope_high_freq_factor
    if high == low:
        return (turns > low).astype(np.float64)
    return np.clip((turns - low) / (high - low), 0, 1)


def _yarn_share(keys: RopeKeys) -> np.ndarray:
    """Returns the share of each frequency that is not stretched (YaRN: Peng et al. 2023,
    arXiv:2309.00071, 3.2).
    """
    h, length = keys.head_dim, keys.original_max_position_embeddings

    def pair(turns: float) -> float:
        return (
            h * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(keys.rope_max_timescale))
        )

    first, last = pair(keys.beta_fast), pair(keys.beta_slow)
    if keys.rope_truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, h - 1)
    share: np.ndarray = 1 - np.clip((np.arange(h // 2) - first) / max(last - first, 0.001), 0, 1)
    return share
