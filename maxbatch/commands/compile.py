"""`maxbatch compile`: every program of a run, compiled ahead of time and saved for `train` to load."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ml_collections import ConfigDict

from maxbatch.commands.arguments import local_path, note, place
from maxbatch.commands.targets import add_target_arguments, planned, show_time
from maxbatch.plan.batch import expansion_factor
from maxbatch.plan.plan_config import PlanConfig
from maxbatch.system.atomic_files import write_atomically
from maxbatch.system.errors import EXIT_DONE, TrainingError, writing
from maxbatch.system.folding import printable
from maxbatch.system.storage import AnyPath, as_path
from maxbatch.training.compile.target import Target, device_facts

if TYPE_CHECKING:
    import jax

    from maxbatch.data.feed.placement import BatchShape
    from maxbatch.training.compile.memory import Parts, Verdict
    from maxbatch.training.compile.modelled import Modelled


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `maxbatch compile`."""
    add_target_arguments(parser)
    folder = "folder to save in (default: RUN_DIR/compiled)"
    parser.add_argument("--output", type=place, metavar="DIR", help=folder)
    hlo = "write the optimised HLO text here, one file per program; for a TPU it is scheduled"
    parser.add_argument("--hlo", type=local_path, metavar="DIR", help=hlo)


class _Compiled(NamedTuple):
    """A program that was compiled, or that does not fit."""

    verdict: Verdict
    executable: jax.stages.Compiled | None  # None if it does not fit
    modelled: Modelled


def run(args: argparse.Namespace) -> int:
    """Compiles the programs of a run and saves them; raises TrainingError if one does not fit."""
    config, target, plan = planned(args)
    from maxbatch.training.compile.ladder import plan_shapes
    from maxbatch.training.compile.memory import known_parts
    from maxbatch.training.compile.saved import program_keys, save_programs
    from maxbatch.training.programs import Programs, ProgramsConfig, step_name

    expansion = max(1, int(expansion_factor(PlanConfig.of(config), target.num_hosts)))
    programs = Programs(ProgramsConfig.of(config), target.devices, plan.mesh, expansion)
    shapes = plan_shapes([s for s in plan.stages if s.num_steps is None or s.num_steps])
    hlo = _made_folder(args.hlo)
    say = (lambda text: None) if args.json else note
    done: dict[str, _Compiled] = {}
    for shape in shapes:
        name = step_name(shape)
        say(f"compiling {name} for {target.name}")
        done[name] = _compile(name, programs.step(shape), target, config, hlo, shape)
        verdict = done[name].verdict
        if not verdict.fits:
            known = known_parts(programs.abstract, programs.placement.abstract_batch(shape))
            if args.json:
                print(json.dumps(_refusal(verdict, known, target), indent=2))
            raise _does_not_fit(
                f"a micro-batch of {shape.micro_batch} ({name})",
                verdict, target, "maxbatch fit finds the largest that does",
            )  # fmt: skip
    for name, lowered in programs.others(plan.eval_batch_size):
        say(f"compiling {name}")
        done[name] = _compile(name, lowered, target, config, hlo)
        if not done[name].verdict.fits:
            raise _does_not_fit(name, done[name].verdict, target, "works: a smaller eval_per_device_batch_size")
    folder = as_path(args.output) if args.output else as_path(config.run_dir) / "compiled"
    executables = {name: one.executable for name, one in done.items() if one.executable is not None}
    size = save_programs(folder, program_keys(config), target.devices, shapes, executables)
    if args.json:
        steps = [done[step_name(shape)] for shape in shapes]
        record = _figures(max(steps, key=lambda one: one.verdict.needed_bytes or 0)) | {
            "target": target.name,
            "devices": device_facts(target.devices),
            "programs": {name: _figures(one) for name, one in done.items()},
            "output": str(folder),
            "saved_bytes": size,
        }
        print(json.dumps(record, indent=2))
    else:
        _show(done, target, folder, size)
    return EXIT_DONE


def _compile(
    name: str,
    lowered: jax.stages.Lowered,
    target: Target,
    config: ConfigDict,
    hlo: Path | None,
    shape: BatchShape | None = None,
) -> _Compiled:
    """Compiles a program, keeps its HLO text in a folder if there is one, and models its time."""
    from maxbatch.config.sections import slots_per_sample
    from maxbatch.model.decoder_config import DecoderConfig
    from maxbatch.training.compile.cache import without_persistent_cache
    from maxbatch.training.compile.memory import compile_for
    from maxbatch.training.compile.modelled import Modelled, has_clock, model_time

    with without_persistent_cache():
        verdict, executable = compile_for(lowered, target)
    if executable is None or not (hlo or has_clock(target)):
        return _Compiled(verdict, executable, Modelled())
    text = executable.as_text() or ""
    if hlo:
        write_atomically(hlo / f"{name}.hlo", text)
    modelled = model_time(
        text, target, DecoderConfig.of(config), slots_per_sample(config), config.peak_tflops_per_device, shape
    )
    return _Compiled(verdict, executable, modelled)


def _made_folder(path: str | None) -> Path | None:
    """Returns the folder of `--hlo`, made before anything is compiled; None if none is stated."""
    if path is None:
        return None
    folder = Path(os.path.expanduser(path))
    with writing(f"--hlo {path}"):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def _does_not_fit(what: str, verdict: Verdict, target: Target, advice: str) -> TrainingError:
    from maxbatch.training.compile.compiler import HBM

    return TrainingError(
        f"{what} does not fit {target.name}: {verdict.wants}; "
        f"{advice if verdict.lacks.space == HBM else 'works: libtpu_flags=none'}"
    )


def _figures(one: _Compiled) -> dict[str, object]:
    return _memory_figures(one.verdict) | one.modelled.to_dict()


def _memory_figures(verdict: Verdict) -> dict[str, object]:
    from maxbatch.training.compile.compiler import LACKS_HBM

    return {
        **(dataclasses.asdict(verdict.memory) if verdict.memory else {}),
        "hbm_bytes_needed": verdict.needed_bytes,
        "hbm_bytes_available": verdict.available_bytes,
        **({} if verdict.lacks == LACKS_HBM else {"lacks": verdict.lacks._asdict()}),
        "fits": verdict.fits,
        "compile_s": round(verdict.seconds, 2),
    }


def _refusal(verdict: Verdict, known: Parts, target: Target) -> dict[str, object]:
    """Returns the figures of a program that was refused.

    The TPU compiler names one figure: arguments then follow from their shapes, and the rest counts as temporary.
    """
    arguments, needed = known.parameters + known.optimizer + known.batch, verdict.needed_bytes
    parts = {
        "argument_bytes": arguments,
        "temp_bytes": None if needed is None else max(0, needed - arguments),
        "alias_bytes": known.parameters + known.optimizer,
    }
    return parts | _memory_figures(verdict) | {"target": target.name}


def _show(done: Mapping[str, _Compiled], target: Target, folder: AnyPath, size: int) -> None:
    from rich.table import Table

    from maxbatch.plan.view import plan_console
    from maxbatch.training.compile.memory import gigabytes

    columns = ("program", "arguments", "temporaries", "needed", "available", "compiled in")
    table = Table(*columns, title=target.name)
    for name, one in done.items():
        verdict, memory = one.verdict, one.verdict.memory
        parts = (memory.argument_bytes, memory.temp_bytes) if memory else (None, None)
        cells = (*parts, verdict.needed_bytes, verdict.available_bytes)
        table.add_row(name, *map(gigabytes, cells), f"{verdict.seconds:.1f} s")
    plan_console().print(table)
    if target.devices[0].platform == "cpu":
        print(printable(f"available: {target.memory_source}"))
    show_time({name: one.modelled for name, one in done.items()})
    print(printable(f"saved {len(done)} programs ({gigabytes(size)}) in {folder}"))
    print(printable(f"next: maxbatch train ... compiled_dir={folder}"))
