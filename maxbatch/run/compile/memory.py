"""The compiler's report on a program's memory per device, and whether it fits."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence

import jax

from maxbatch.data.feed.placement import Batch
from maxbatch.parallel.sharding import shard_bytes
from maxbatch.run.compile.compiler import (
    HBM,
    LACKS_HBM,
    NO_OPTIONS,
    Shortage,
    compile_program,
    is_out_of_memory,
    shortage_in,
)
from maxbatch.run.compile.target import Target
from maxbatch.system.errors import TrainingError
from maxbatch.update.state import TrainState


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of a compiled program on one device."""

    argument_bytes: int  # state and batch
    output_bytes: int  # results
    alias_bytes: int  # results that reuse the memory of arguments
    temp_bytes: int  # arrays during the program only
    code_bytes: int
    # Peak use without the code. Only the TPU compiler reports it; the parts overlap, so their sum
    # is larger.
    peak_bytes: int | None = None

    @property
    def needed_bytes(self) -> int:
        """Required memory of a device: peak and code if the peak is known, else the sum of the
        parts.
        """
        if self.peak_bytes is not None:
            return self.peak_bytes + self.code_bytes
        return (
            self.argument_bytes
            + self.output_bytes
            - self.alias_bytes
            + self.temp_bytes
            + self.code_bytes
        )


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The compiler's verdict on a program."""

    fits: bool  # true if the available bytes are unknown
    needed_bytes: int | None  # memory needed on a device; None if not reported
    available_bytes: int | None  # memory of a device; None if unknown
    memory: Memory | None  # of a compiled program
    seconds: float  # compile time
    lacks: Shortage = LACKS_HBM  # of a refused program, if not HBM

    @property
    def wants(self) -> str:
        """The missing memory, as text for users."""
        if self.lacks.space != HBM:
            needed, available = self.lacks.needed, self.lacks.available
            return (
                f"it needs {gigabytes(needed)} ({needed} bytes) of {self.lacks.space}, memory of "
                f"a core, which has {gigabytes(available)} ({available} bytes)"
            )
        needed, available = self.needed_bytes, self.available_bytes
        return f"it needs {gigabytes(needed)} ({needed} bytes) per device of {gigabytes(available)}"


def compile_for(
    lowered: jax.stages.Lowered, target: Target, options: Mapping[str, str] = NO_OPTIONS
) -> tuple[Verdict, jax.stages.Compiled | None]:
    """Compiles a program with `program_options`; returns the verdict, with the program if it fits.

    Raises:
      TrainingError: the compiler fails for another reason than memory.
    """
    started = time.perf_counter()
    is_tpu = target.devices[0].platform == "tpu"
    try:
        compiled = compile_program(lowered, options)
    except jax.errors.JaxRuntimeError as error:
        text = str(error)
        if not is_out_of_memory(error):
            reason = text.strip().splitlines()[0][:300]
            raise TrainingError(
                f"{target.name}: the compiler fails on this program ({reason}); the cause is not "
                "a lack of memory"
            ) from error
        lacks, seconds = shortage_in(text), time.perf_counter() - started
        if lacks.space != HBM:
            return Verdict(False, None, target.memory_bytes, None, seconds, lacks), None
        return Verdict(
            False, lacks.needed, lacks.available or target.memory_bytes, None, seconds
        ), None

    stats = compiled.memory_analysis()
    if stats is None:
        raise TrainingError(f"{target.name}: its compiler does not report the memory of a program")
    kinds = ("argument", "output", "alias", "temp", "generated_code")
    peak = (getattr(stats, "peak_memory_in_bytes", 0) or None) if is_tpu else None
    arguments, output, alias, temp, code = (
        getattr(stats, f"{kind}_size_in_bytes") for kind in kinds
    )
    memory = Memory(arguments, output, alias, temp, code, peak)

    # The TPU compiler checks this itself, so a compiled program fits.
    limit = target.memory_bytes
    fits = is_tpu or limit is None or memory.needed_bytes <= limit
    verdict = Verdict(fits, memory.needed_bytes, limit, memory, time.perf_counter() - started)
    return verdict, compiled if fits else None


def largest_of(verdicts: Sequence[tuple[Verdict, int]], available_bytes: int | None) -> Verdict:
    """Returns the verdict on programs that run one after another among a run's arrays: the memory
    of the one that needs most.

    Args:
      verdicts: of compiled programs, each with the bytes of the arrays that are in memory while the
        program runs, its arguments among them.
      available_bytes: memory of a device; None: it is unknown.
    """

    def among_arrays(memory: Memory, held_bytes: int) -> Memory:
        beside = held_bytes - memory.argument_bytes
        peak = None if memory.peak_bytes is None else memory.peak_bytes + beside
        return dataclasses.replace(memory, argument_bytes=held_bytes, peak_bytes=peak)

    memories = [among_arrays(v.memory, held) for v, held in verdicts if v.memory is not None]
    most = max(memories, key=lambda memory: memory.needed_bytes)
    fits = available_bytes is None or most.needed_bytes <= available_bytes
    seconds = sum(verdict.seconds for verdict, _ in verdicts)
    return Verdict(fits, most.needed_bytes, available_bytes, most, seconds)


@dataclasses.dataclass(frozen=True)
class Parts:
    """The bytes of one device by kind; gradients and activations are temporaries."""

    parameters: int
    optimizer: int  # including the average of the parameters
    batch: int
    gradients: int  # one of `weight_dtype` per trained parameter at the end of an update
    activations: int  # and other temporaries: the rest of the compiler's figure


def known_parts(abstract: TrainState, batch: Batch) -> Parts:
    """Returns the parts known from shapes and shardings; activations are 0."""
    trained, optimizer = (
        shard_bytes(abstract.params),
        shard_bytes((abstract.opt_state, abstract.average)),
    )
    parameters = trained + shard_bytes(abstract.frozen)
    return Parts(parameters, optimizer, shard_bytes(batch), gradients=trained, activations=0)


def gigabytes(num_bytes: int | None) -> str:
    """Formats bytes for users; a GB is 10^9 bytes."""
    if num_bytes is None:
        return "unknown"
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e7 else f"{num_bytes / 1e6:.2f} MB"
