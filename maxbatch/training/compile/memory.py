"""What the compiler says of a program's memory on one device, whether it fits or not."""

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
# How the TPU compiler and the GPU's put it, in the order in which they are looked for.
_WANTED = (
    rf"Used {_SIZE} of {_SIZE} hbm",
    rf"\({_SIZE}\) exceeds available HBM \({_SIZE}\)",
)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one device that a compiled program takes.

    Attributes:
      argument_bytes: what it is given: state and batch.
      output_bytes: what it returns, of which `alias_bytes` lie where arguments lay.
      temp_bytes: what lives only while it runs.
      code_bytes: the program itself.
      peak_bytes: the most that is in use at once, code aside, where the TPU compiler says it: it lets the parts
        overlap, so that their sum is larger. None where nobody says.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    code_bytes: int
    peak_bytes: int | None = None

    @property
    def needed_bytes(self) -> int:
        """What must be there for it: the peak and the code where the peak is known, else all parts at once."""
        if self.peak_bytes is not None:
            return self.peak_bytes + self.code_bytes
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes + self.code_bytes


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether a program fits, by the compiler's own word.

    Attributes:
      needed_bytes: what it takes of a device, or would; None where the compiler does not say.
      available_bytes: what there is; None where nobody says, and then it counts as fitting.
      memory: its parts, where it was compiled.
      seconds: how long the compiler took.
    """

    fits: bool
    needed_bytes: int | None
    available_bytes: int | None
    memory: Memory | None
    seconds: float


def compile_for(lowered: jax.stages.Lowered, target: Target) -> tuple[Verdict, Any]:
    """Compile a program and return the verdict, and the executable where it fits.

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
    # The TPU compiler has compared already: what it compiles fits.
    limit = target.memory_bytes
    fits = is_tpu or limit is None or memory.needed_bytes <= limit
    verdict = Verdict(fits, memory.needed_bytes, limit, memory, time.perf_counter() - started)
    return verdict, compiled if fits else None


def wanted_bytes(message: str) -> tuple[int | None, int | None]:
    """Return the bytes that a compiler's message says it needed and had; None for what it does not say."""
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
    """Bytes of one device by what they hold; the last two are what is left of the compiler's figure.

    `gradients` is one float32 (`weight_dtype`) gradient per parameter, which every update has at its end; it is a part
    of the temporaries, as are the activations.
    """

    parameters: int
    optimizer: int
    batch: int
    gradients: int
    activations: int


def known_parts(abstract: TrainState, batch: Batch) -> Parts:
    """Return the parts that follow from shapes and shardings alone, with no activations."""
    parameters = shard_bytes(abstract.params)
    return Parts(parameters, shard_bytes(abstract.opt_state), shard_bytes(batch), parameters, 0)


def all_parts(known: Parts, verdict: Verdict) -> Parts:
    """Return the parts of a program, with the rest of what it needs as activations and other temporaries."""
    if verdict.needed_bytes is None:
        return known
    rest = verdict.needed_bytes - sum(dataclasses.astuple(known))
    return dataclasses.replace(known, activations=max(0, rest))


def shard_bytes(tree: Any) -> int:
    """Return the bytes that one device holds of abstract arrays with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def gigabytes(num_bytes: int | None) -> str:
    """Return bytes for a person: GB are 10^9 bytes."""
    if num_bytes is None:
        return "unknown"
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e7 else f"{num_bytes / 1e6:.2f} MB"
