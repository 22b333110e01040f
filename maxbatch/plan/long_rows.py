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
        tokens = Fraction(rows * length, shape.batch_shards)
        if model.context_parallel_strategy == "ulysses":
            kv_heads = math.lcm(kv_heads, tensor * size)
            numbers = tokens * (heads + kv_heads) * (width + value_width) / (tensor * size)
        else:
            kv_heads = kv_heads if kv_heads % tensor == 0 else heads
            numbers = tokens * kv_heads * (width + value_width) / tensor
        received = numbers * (size - 1) / size * _BYTES[model.dtype]
        is_even = (
            model.context_parallel_strategy == "ulysses" or model.context_parallel_load_balance
        )
        return cls(size, round(received), 1.0 if is_even else (2 * size - 1) / size)
