"""The cycles of custom kernels, whose time the compiler does not estimate. No JAX."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from maxbatch.system.chips import Chip
from maxbatch.training.compile.hlo import Instruction, arrays

_SPLASH = re.compile(r"splash_m[hq]a_(fwd|dq|dkv)")
# Products of the size of queries times keys that a splash kernel computes, by its phase.
_SPLASH_PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}
_FUSED_BACKWARD_PRODUCTS = 5  # of a `dkv` that computes the gradient of the queries as well


def is_kernel(one: Instruction) -> bool:
    """Returns whether an instruction runs a custom kernel of the TPU."""
    return one.opcode == "custom-call" and 'custom_call_target="tpu_custom_call"' in one.rest


def kernel_cycles(one: Instruction, shapes: Mapping[str, str], chip: Chip) -> int:
    """Returns the cycles of a custom kernel at the chip's peak, of its arithmetic or its memory.

    JAX's splash attention (`jax.experimental.pallas.ops.tpu.splash_attention`, JAX 0.10) states no cost, so its
    products are counted.
    """
    if chip.clock_ghz is None:
        return 0
    flops = one.number("flops") or _splash_flops(one, shapes)
    seconds = max(flops / (chip.tflops * 1e12), (one.number("bytes_accessed") or 0) / (chip.hbm_gb_s * 1e9))
    return round(seconds * chip.clock_ghz * 1e9)


def _splash_flops(one: Instruction, shapes: Mapping[str, str]) -> float:
    """Returns the FLOPs of causal splash attention from its queries, [..., heads, length, head_dim], and its keys."""
    splash = _SPLASH.search(one.name + one.op_name)
    given = [array for name in one.operands for array in arrays(shapes.get(name, ""))]
    floats = [dims for kind, dims in given if kind[0] in "fb" and len(dims) >= 2]
    if not splash or len(floats) < 2:
        return 0
    queries, keys = floats[0], floats[1]
    products = _SPLASH_PRODUCTS[splash[1]]
    if splash[1] == "dkv" and any(len(dims) > len(queries) for _, dims in arrays(one.shape)):
        products = _FUSED_BACKWARD_PRODUCTS  # it returns the queries' gradient by blocks of keys: one axis more
    grid = next((dims for kind, dims in given if kind[0] == "s" and len(dims) == 3), None)
    share = _computed_share(queries[-2], keys[-2], _blocks(one, splash[1]), grid)
    return share * products * 2 * math.prod(queries) * keys[-2]


def _blocks(one: Instruction, phase: str) -> tuple[int, int] | None:
    """Returns the rows of queries and keys in a block, which splash kernels state for the profiler."""
    suffix = "" if phase == "fwd" else f"_{phase}"
    found = [re.search(rf'block_{side}{suffix}\\?":\s*(\d+)', one.rest) for side in ("q", "kv")]
    return (int(found[0][1]), int(found[1][1])) if found[0] and found[1] else None


def _computed_share(queries: int, keys: int, blocks: tuple[int, int] | None, grid: tuple[int, ...] | None) -> float:
    """Returns the share of the products that a causal kernel computes: a block that the mask cuts is computed whole.

    Args:
      queries: rows of them.
      keys: rows of them.
      blocks: rows of queries and of keys in a block; None if they are not known.
      grid: of the blocks that are visited, [heads, by queries, by keys], narrower for a window; None if not known.
    """
    if blocks is None:
        return 0.5
    block_q, block_kv = blocks
    rows, columns = max(1, keys // block_q), max(1, keys // block_kv)
    causal = sum(min(columns, math.ceil((row + 1) * block_q / block_kv)) for row in range(rows)) / (rows * columns)
    visited = grid[1] * grid[2] * block_q * block_kv / (queries * keys) if grid else 1.0
    return min(causal, visited)
