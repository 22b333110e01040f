"""One program, compiled for the devices of a command, with its memory and its modelled time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from maxbatch.config.config import Config
from maxbatch.plan.batch import BatchPlan, expansion_factor
from maxbatch.system.storage.atomic_files import write_atomically

if TYPE_CHECKING:
    import jax

    from maxbatch.around.compile.modelled import Modelled
    from maxbatch.data.feed.placement import BatchShape
    from maxbatch.plan.mesh_shape import MeshShape
    from maxbatch.run.compile.memory import Verdict
    from maxbatch.run.compile.target import Target
    from maxbatch.run.programs import Programs


class Compiled(NamedTuple):
    """A program that was compiled, or that does not fit."""

    verdict: Verdict
    executable: jax.stages.Compiled | None  # None if it does not fit, or is of several programs
    modelled: Modelled


class Update(NamedTuple):
    """The shape of an update's batch, and its samples; the other rows are padding. Where samples
    share rows, rows are counted as if all of them were full.
    """

    shape: BatchShape
    samples: int

    @property
    def share(self) -> float:
        """The share of samples in all slots."""
        return self.samples / (self.shape.micro_batch * self.shape.max_micro_batches)


def programs_of(config: Config, target: Target, mesh: MeshShape, expansion: int = 1) -> Programs:
    """Returns the programs of a config's own model and loss on devices, not yet lowered."""
    from maxbatch.run.programs import Programs
    from maxbatch.update.recipe import TrainedRecipe

    keys = config.programs
    return Programs(
        keys, target.devices, mesh, TrainedRecipe.of(keys.recipe).objective(keys), expansion
    )


def programs_on(config: Config, target: Target, plan: BatchPlan) -> tuple[Programs, list[Update]]:
    """Returns the programs of a run on devices, not yet lowered, and its updates."""
    from maxbatch.run.compile.ladder import largest_batch, plan_shapes

    expansion = max(1, int(expansion_factor(config.plan, target.num_hosts)))
    programs = programs_of(config, target, plan.mesh, expansion)
    stages = [stage for stage in plan.stages if stage.num_steps is None or stage.num_steps]

    def samples(shape: BatchShape) -> int:
        if plan.is_packed:
            return shape.micro_batch * shape.max_micro_batches
        return largest_batch(shape.micro_batch, stages)

    return programs, [Update(shape, samples(shape)) for shape in plan_shapes(stages)]


def compiled(
    lowered: jax.stages.Lowered,
    target: Target,
    config: Config,
    shape: BatchShape | None,
    hlo: Path | None = None,
    name: str = "",
) -> Compiled:
    """Compiles a program and models its time.

    Args:
      shape: the batch of an update; None for another program.
      hlo: the file for the program's HLO text, if one is written.
      name: the program's name, for `program_options`; an update needs none.
    """
    from maxbatch.around.compile.modelled import Modelled, has_clock, model_time
    from maxbatch.config.recipes import slots_per_row
    from maxbatch.run.compile.flags import program_options
    from maxbatch.run.compile.memory import compile_for

    verdict, executable = compile_for(
        lowered, target, program_options(config.libtpu_flags, target.devices, name)
    )
    modelled = Modelled()
    if executable is not None and (hlo or has_clock(target)):
        text = executable.as_text() or ""
        if hlo:
            write_atomically(hlo, text)
        if has_clock(target):
            slots, peak = slots_per_row(config), config.peak_tflops_per_device
            modelled = model_time(text, target, config.decoder, slots, peak, shape)
    return Compiled(verdict, executable, modelled)


def compile_one(
    name: str,
    lowered: jax.stages.Lowered,
    target: Target,
    config: Config,
    hlo: Path | None = None,
    update: Update | None = None,
) -> Compiled:
    """Compiles a program of a run as `compiled` does, and writes its HLO text to a folder if one is
    given.
    """
    from maxbatch.run.compile.cache import without_persistent_cache

    with without_persistent_cache():
        program = compiled(
            lowered, target, config, update and update.shape, hlo and hlo / f"{name}.hlo", name
        )
    return (
        program._replace(modelled=program.modelled.of_samples(update.share)) if update else program
    )


class ProgramsElsewhere:
    """The programs of a run, compiled for devices that need not be here, each name once.

    A program for one device is compiled for the first one alone.

    Args:
      say: is told of each program.

    Attributes:
      done: by name.
    """

    def __init__(
        self,
        config: Config,
        target: Target,
        hlo: Path | None = None,
        say: Callable[[str], object] = lambda text: None,
    ) -> None:
        self._config, self._target, self._hlo, self._say = config, target, hlo, say
        self.done: dict[str, Compiled] = {}

    def executable(self, name: str, lower: Callable[[], jax.stages.Lowered]) -> jax.stages.Compiled:
        """Compiles a program.

        Raises:
          DoesNotFit: the compiler refuses it, or it needs more memory than there is.
        """
        if name not in self.done:
            self._say(name)
            self.done[name] = compile_one(name, lower(), self._target, self._config, self._hlo)
        executable = self.done[name].executable
        if executable is None:
            raise DoesNotFit(name)
        return executable

    def executables(
        self, name: str, lower: Callable[[], jax.stages.Lowered], devices: Sequence[jax.Device]
    ) -> dict[jax.Device, jax.stages.Compiled]:
        """Compiles a program for one device, as `executable` does."""
        return dict.fromkeys(devices, self.executable(name, lower))

    def update(self, programs: Programs, update: Update) -> Compiled:
        """Compiles an update; one of several programs has their sum, and no executable."""
        from maxbatch.run.programs import step_name

        name = step_name(update.shape)
        if self._config.reproducible_sums:
            self.done[name] = self._sum_of_programs(programs, update)
        else:
            self._say(name)
            self.done[name] = compile_one(
                name, programs.step(update.shape), self._target, self._config, self._hlo, update
            )
        return self.done[name]

    def _sum_of_programs(self, programs: Programs, update: Update) -> Compiled:
        from maxbatch.around.compile.modelled import sum_of_times
        from maxbatch.config.recipes import slots_per_row
        from maxbatch.run.compile.memory import largest_of

        config, target = self._config, self._target
        try:
            uses = programs.reproducible_update(
                update.shape, self.executable, self.executables
            ).uses
        except DoesNotFit as error:
            return self.done[error.name]
        parts = [(self.done[name], use) for name, use in uses.items()]
        verdict = largest_of(
            [(part.verdict, use.held_bytes) for part, use in parts], target.memory_bytes
        )
        times = [(part.modelled, use.runs) for part, use in parts]
        slots, peak = slots_per_row(config), config.peak_tflops_per_device
        modelled = sum_of_times(times, target, config.decoder, slots, peak, update.shape)
        return Compiled(verdict, None, modelled.of_samples(update.share))


class DoesNotFit(Exception):
    """A program does not fit the devices' memory."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def largest_update(config: Config, target: Target, plan: BatchPlan) -> Compiled:
    """Returns the update of a run that needs the most memory, compiled for devices."""
    programs, updates = programs_on(config, target, plan)
    elsewhere = ProgramsElsewhere(config, target)
    return max(
        (elsewhere.update(programs, update) for update in updates),
        key=lambda program: (not program.verdict.fits, program.verdict.needed_bytes or 0),
    )
