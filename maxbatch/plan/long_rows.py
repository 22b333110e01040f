"""Rows that the context axis splits: what attention moves for them, and how its work is divided. No
JAX.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

from maxbatch.config.sections import ModelConfig
from maxbatch.families.family import FAMILIES
from maxbatch.families.matrices import attention_widths
from maxbatch.plan.mesh_shape import MeshShape

_BYTES = {"float32": 4, "bfloat16": 2}


class LongRows(NamedTuple):
    """The numbers of rows that several devices share."""

    context_shards: int  # devices that share a row
    # that a device receives in a layer's attention, forward, in one pass
    context_bytes_per_layer: int
    # the causal scores of the device that has most, as a multiple of the mean
    context_busiest_share: float

    @classmethod
    def if_any(
        cls, model: ModelConfig, shape: MeshShape, rows: int, length: int
    ) -> LongRows | None:
        """Returns the numbers for one pass over `rows` rows on all devices; None if no row is
        split.
        """
        size, tensor = shape.sizes["context"], shape.sizes["tensor"]
        if size == 1:
            return None
        attention = FAMILIES[model.decoder_block].attention
        heads = model.base_num_query_heads
        kv_heads = model.base_num_kv_heads if attention.groups_heads else heads
        width, value_width = attention_widths(model)
        strategy, is_balanced = model.context_parallel_strategy, model.context_parallel_load_balance
        share = Fraction(rows * length, shape.batch_shards) / size  # tokens of a device
        of_head = Fraction(width + value_width, tensor)  # numbers of a token
        if strategy == "ulysses":
            kv_heads = math.lcm(kv_heads, tensor * size)
            numbers = share * (heads + kv_heads) * of_head * (size - 1) / size
        else:
            of_keys = of_head * (kv_heads if kv_heads % tensor == 0 else heads)
            if strategy == "ring" and not model.quantization:
                of_keys = Fraction(attention.compressed_width(model)) or of_keys
            numbers = share * of_keys * (size - 1)
            if is_balanced:  # queries and results change their order, and the keys of a ring
                dealt = heads * of_head + (of_keys if strategy == "ring" else 0)
                numbers += share * dealt * _dealt_share(size)
        is_even = strategy == "ulysses" or is_balanced
        return cls(
            size,
            round(numbers * _BYTES[model.dtype]),
            1.0 if is_even else (2 * size - 1) / size,
        )


def _dealt_share(size: int) -> Fraction:
    """Returns the share of its tokens that a device receives for the balanced order, at most."""
    received = (
        {device, 2 * size - 1 - device} - {2 * device, 2 * device + 1} for device in range(size)
    )
    return Fraction(max(map(len, received)), 2)
