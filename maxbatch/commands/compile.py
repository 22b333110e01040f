"""`maxbatch compile`: every program of a run, compiled ahead of time and saved for `train` to load."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxbatch.commands.arguments import local_path, note
from maxbatch.commands.targets import add_target_arguments, planned
from maxbatch.plan.batch import expansion_factor
from maxbatch.system.errors import EXIT_DONE, TrainingError
from maxbatch.training.compile.target import Target, device_facts

if TYPE_CHECKING:
    from maxbatch.training.compile.memory import Parts, Verdict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `maxbatch compile`."""
    add_target_arguments(parser)
    parser.add_argument(
        "--output", type=local_path, metavar="DIR", help="folder to save in (default: RUN_DIR/compiled)"
    )


def run(args: argparse.Namespace) -> int:
    """Compiles the programs of a run and saves them; raises TrainingError if one does not fit."""
    config, target, plan = planned(args)
    from maxbatch.training.compile.cache import without_persistent_cache
    from maxbatch.training.compile.ladder import plan_shapes
    from maxbatch.training.compile.lowering import Programs, step_name
    from maxbatch.training.compile.memory import compile_for, known_parts
    from maxbatch.training.compile.saved import save_programs

    expansion = max(1, int(expansion_factor(config, target.num_hosts)))
    programs = Programs(config, target.devices, plan.mesh, expansion)
    shapes = plan_shapes([s for s in plan.stages if s.num_steps is None or s.num_steps])
    say = (lambda text: None) if args.json else note
    verdicts: dict[str, Verdict] = {}
    executables: dict[str, Any] = {}
    for shape in shapes:
        name = step_name(shape)
        say(f"compiling {name} for {target.name}")
        with without_persistent_cache():
            verdicts[name], executables[name] = compile_for(programs.step(shape), target)
        if not verdicts[name].fits:
            known = known_parts(programs.abstract, programs.placement.abstract_batch(shape))
            if args.json:
                print(json.dumps(_refusal(verdicts[name], known, target), indent=2))
            raise _does_not_fit(
                f"a micro-batch of {shape.micro_batch} ({name})",
                verdicts[name], target, "maxbatch fit finds the largest that does",
            )  # fmt: skip
    for name, lowered in programs.others(plan.eval_batch_size):
        say(f"compiling {name}")
        with without_persistent_cache():
            verdicts[name], executables[name] = compile_for(lowered, target)
        if not verdicts[name].fits:
            raise _does_not_fit(name, verdicts[name], target, "works: a smaller eval_per_device_batch_size")
    folder = Path(args.output or Path(config.run_dir) / "compiled").expanduser()
    size = save_programs(folder, config, target.devices, shapes, executables)
    if args.json:
        steps = [verdicts[step_name(shape)] for shape in shapes]
        largest = max(steps, key=lambda verdict: verdict.needed_bytes or 0)
        record = _figures(largest) | {
            "target": target.name,
            "devices": device_facts(target.devices),
            "programs": {name: _figures(verdict) for name, verdict in verdicts.items()},
            "output": str(folder),
            "saved_bytes": size,
        }
        print(json.dumps(record, indent=2))
    else:
        _show(verdicts, target, folder, size)
    return EXIT_DONE


def _does_not_fit(what: str, verdict: Verdict, target: Target, advice: str) -> TrainingError:
    from maxbatch.training.compile.memory import gigabytes

    return TrainingError(
        f"{what} does not fit {target.name}: it needs {gigabytes(verdict.needed_bytes)} "
        f"({verdict.needed_bytes} bytes) per device of {gigabytes(verdict.available_bytes)}; {advice}"
    )


def _figures(verdict: Verdict) -> dict[str, Any]:
    return {
        **(dataclasses.asdict(verdict.memory) if verdict.memory else {}),
        "hbm_bytes_needed": verdict.needed_bytes,
        "hbm_bytes_available": verdict.available_bytes,
        "fits": verdict.fits,
        "compile_s": round(verdict.seconds, 2),
    }


def _refusal(verdict: Verdict, known: Parts, target: Target) -> dict[str, Any]:
    """Returns the figures of a program that was refused.

    The TPU compiler names one figure: arguments then follow from their shapes, and the rest counts as temporary.
    """
    arguments, needed = known.parameters + known.optimizer + known.batch, verdict.needed_bytes
    parts = {
        "argument_bytes": arguments,
        "temp_bytes": None if needed is None else max(0, needed - arguments),
        "alias_bytes": known.parameters + known.optimizer,
    }
    return parts | _figures(verdict) | {"target": target.name}


def _show(verdicts: Mapping[str, Verdict], target: Target, folder: Path, size: int) -> None:
    from rich.table import Table

    from maxbatch.plan.view import plan_console
    from maxbatch.training.compile.memory import gigabytes

    columns = ("program", "arguments", "temporaries", "needed", "available", "compiled in")
    table = Table(*columns, title=target.name)
    for name, verdict in verdicts.items():
        memory = verdict.memory
        parts = (memory.argument_bytes, memory.temp_bytes) if memory else (None, None)
        cells = (*parts, verdict.needed_bytes, verdict.available_bytes)
        table.add_row(name, *map(gigabytes, cells), f"{verdict.seconds:.1f} s")
    plan_console().print(table)
    if target.devices[0].platform == "cpu":
        print(f"available: {target.memory_source}")
    print(f"saved {len(verdicts)} programs ({gigabytes(size)}) in {folder}")
    print(f"next: maxbatch train ... compiled_dir={folder}")
