"""The memory of a program on one device, and whether it fits, as the compiler says."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from typing import Any

import jax

from maxbatch.data.feed.placement import Batch
from maxbatch.system.errors import TrainingError
from maxbatch.training.compile.target import Target
from maxbatch.training.state import TrainState

_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)B?"
# The wordings of the compilers for TPUs and GPUs; the first that matches counts.
_WANTED = (rf"Used {_SIZE} of {_SIZE} hbm", rf"\({_SIZE}\) exceeds available HBM \({_SIZE}\)")


@dataclasses.dataclass(frozen=True)
class Memory:
    """The bytes of one device that a compiled program takes.

    Attributes:
      argument_bytes: state and batch.
      output_bytes: results, of which `alias_bytes` lie in the memory of arguments.
      temp_bytes: arrays that live only while the program runs.
      code_bytes: the program itself.
      peak_bytes: the most that is in use at once, without the code. Only the TPU compiler says it; it lets the parts
        overlap, so their sum is larger.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    code_bytes: int
    peak_bytes: int | None = None

    @property
    def needed_bytes(self) -> int:
        """The memory that a device must have: peak and code if the peak is known, else the sum of the parts."""
        if self.peak_bytes is not None:
            return self.peak_bytes + self.code_bytes
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes + self.code_bytes


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The compiler's verdict on a program.

    Attributes:
      fits: whether it fits; true if the available bytes are unknown.
      needed_bytes: what it takes of a device, or would take; None if the compiler does not say.
      available_bytes: what a device has; None if unknown.
      memory: the parts of a program that was compiled.
      seconds: time that the compiler took.
    """

    fits: bool
    needed_bytes: int | None
    available_bytes: int | None
    memory: Memory | None
    seconds: float


def compile_for(lowered: jax.stages.Lowered, target: Target) -> tuple[Verdict, Any]:
    """Compiles a program; returns the verdict, and the compiled program if it fits.

    Raises:
      TrainingError: the compiler fails for another reason than memory.
    """
    started = time.perf_counter()
    is_tpu = target.devices[0].platform == "tpu"
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        text = str(error)
        if "RESOURCE_EXHAUSTED" not in text:
            reason = text.strip().splitlines()[0][:300]
            raise TrainingError(
                f"{target.name}: the compiler fails on this program ({reason}); it is not for want of memory"
            ) from error
        needed, available = wanted_bytes(text)
        seconds = time.perf_counter() - started
        return Verdict(False, needed, available or target.memory_bytes, None, seconds), None
    stats = compiled.memory_analysis()
    if stats is None:
        raise TrainingError(f"{target.name}: its compiler does not say what memory a program needs")
    memory = Memory(
        stats.argument_size_in_bytes,
        stats.output_size_in_bytes,
        stats.alias_size_in_bytes,
        stats.temp_size_in_bytes,
        stats.generated_code_size_in_bytes,
        (getattr(stats, "peak_memory_in_bytes", 0) or None) if is_tpu else None,
    )
    # The TPU compiler compares by itself: what it compiles fits.
    limit = target.memory_bytes
    fits = is_tpu or limit is None or memory.needed_bytes <= limit
    verdict = Verdict(fits, memory.needed_bytes, limit, memory, time.perf_counter() - started)
    return verdict, compiled if fits else None


def wanted_bytes(message: str) -> tuple[int | None, int | None]:
    """Returns the bytes needed and available that a compiler's message names; None for what it does not name."""
    for pattern in _WANTED:
        found = re.search(pattern, message)
        if found:
            needed, needed_unit, available, available_unit = found.groups()
            return _bytes(needed, needed_unit), _bytes(available, available_unit)
    return None, None


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit])


@dataclasses.dataclass(frozen=True)
class Parts:
    """The bytes of one device by what they hold.

    Gradients and activations are temporaries. Every update ends with one gradient of `weight_dtype` per parameter;
    `activations` is the rest of the compiler's figure.
    """

    parameters: int
    optimizer: int
    batch: int
    gradients: int
    activations: int


def known_parts(abstract: TrainState, batch: Batch) -> Parts:
    """Returns the parts that follow from shapes and shardings alone, with no activations."""
    parameters = shard_bytes(abstract.params)
    return Parts(parameters, shard_bytes(abstract.opt_state), shard_bytes(batch), parameters, 0)


def all_parts(known: Parts, verdict: Verdict) -> Parts:
    """Returns the parts of a program; the rest of what it needs counts as activations and other temporaries."""
    if verdict.needed_bytes is None:
        return known
    rest = verdict.needed_bytes - sum(dataclasses.astuple(known))
    return dataclasses.replace(known, activations=max(0, rest))


def shard_bytes(tree: Any) -> int:
    """Returns the bytes that one device holds of abstract arrays with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def gigabytes(num_bytes: int | None) -> str:
    """Returns bytes as text for a person; a GB is 10^9 bytes."""
    if num_bytes is None:
        return "unknown"
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e7 else f"{num_bytes / 1e6:.2f} MB"
