"""`maxbatch compile`: every program of a run, compiled ahead of time and saved for `train` to load."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from maxbatch.commands.arguments import add_config, config_of, count
from maxbatch.commands.simulation import simulate_devices
from maxbatch.plan.batch import BatchPlan, check_batch_keys, expansion_factor
from maxbatch.system.errors import ConfigError
from maxbatch.training.compile.target import Target, find_target


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the config and the flags that say which devices are meant."""
    add_config(parser)
    parser.add_argument(
        "--topology",
        metavar="T",
        help="a TPU slice that is not here, in chips: v5p:4x4x4 (default: this machine)",
    )
    parser.add_argument(
        "--slices", type=count, metavar="S", default=1, help="slices of that topology (default 1)"
    )
    parser.add_argument(
        "--simulate-devices", type=count, metavar="N", help="compile for N CPU devices made in this process"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `maxbatch compile`."""
    add_target_arguments(parser)
    parser.add_argument("--output", metavar="DIR", help="folder to save in (default: RUN_DIR/compiled)")


def chosen_target(args: argparse.Namespace) -> Target:
    """The devices that the flags name.

    Raises:
      ConfigError: the flags contradict each other, or name no topology.
    """
    if args.topology and args.simulate_devices:
        raise ConfigError(
            f"--simulate-devices {args.simulate_devices}: must not be given beside --topology, which says how "
            f"many devices there are; works: --topology {args.topology}"
        )
    if args.simulate_devices:
        simulate_devices(args.simulate_devices)
    return find_target(args.topology, args.slices)


def plan_for(config: ConfigDict, target: Target) -> BatchPlan:
    """The batch plan on those devices."""
    from maxbatch.data.stream.epoch_length import samples_per_epoch_if_cached

    return BatchPlan.from_config(
        config,
        len(target.devices),
        target.num_hosts,
        num_slices=target.num_slices,
        samples_per_epoch=samples_per_epoch_if_cached(config),
    )


def run(args: argparse.Namespace) -> int:
    """Compiles the programs of a run and saves them; returns the exit code."""
    config = config_of(args)
    check_batch_keys(config)
    target = chosen_target(args)
    plan = plan_for(config, target)
    from maxbatch.training.compile.ladder import plan_shapes
    from maxbatch.training.compile.lowering import Programs, checked_mesh_shape, step_name
    from maxbatch.training.compile.memory import Verdict, compile_for, gigabytes, known_parts
    from maxbatch.training.compile.saved import save_programs

    mesh_shape = checked_mesh_shape(config, target.devices)
    expansion = max(1, int(expansion_factor(config, target.num_hosts)))
    programs = Programs(config, target.devices, mesh_shape, expansion)
    shapes = plan_shapes([s for s in plan.stages if s.num_steps is None or s.num_steps])
    say = _Progress(quiet=args.json)
    verdicts: dict[str, Verdict] = {}
    executables: dict[str, Any] = {}
    for shape in shapes:
        name = step_name(shape)
        say(f"compiling {name} for {target.name}")
        verdicts[name], executables[name] = compile_for(programs.step(shape), target)
        if not verdicts[name].fits:
            known = known_parts(programs.abstract, programs.placement.abstract_batch(shape))
            arguments = known.parameters + known.optimizer + known.batch
            print(
                f"maxbatch: error: a micro-batch of {shape.micro_batch} ({name}) does not fit {target.name}: it needs "
                f"{gigabytes(verdicts[name].needed_bytes)} ({verdicts[name].needed_bytes} bytes) per device of "
                f"{gigabytes(verdicts[name].available_bytes)}; maxbatch fit finds the largest that does",
                file=sys.stderr,
            )
            if args.json:
                print(json.dumps(_refusal(verdicts[name], arguments, known, target), indent=2))
            return 1
    for name, lowered in programs.others(plan.eval_batch_size):
        say(f"compiling {name}")
        verdicts[name], executables[name] = compile_for(lowered, target)
        if not verdicts[name].fits:
            print(
                f"maxbatch: error: {name} does not fit {target.name}: it needs "
                f"{gigabytes(verdicts[name].needed_bytes)} per device of "
                f"{gigabytes(verdicts[name].available_bytes)}; works: a smaller eval_per_device_batch_size",
                file=sys.stderr,
            )
            return 1
    folder = Path(args.output or Path(config.run_dir) / "compiled").expanduser()
    size = save_programs(folder, config, target.facts, shapes, executables)
    largest = max((step_name(shape) for shape in shapes), key=lambda name: verdicts[name].needed_bytes or 0)
    if args.json:
        record = {
            **_figures(verdicts[largest]),
            "target": target.name,
            "devices": dict(target.facts),
            "output": str(folder),
            "saved_bytes": size,
            "programs": {name: _figures(verdict) for name, verdict in verdicts.items()},
        }
        print(json.dumps(record, indent=2))
        return 0
    _show(verdicts, target)
    print(f"saved {len(executables)} programs ({gigabytes(size)}) in {folder}")
    print(f"next: maxbatch train ... compiled_dir={folder}")
    return 0


class _Progress:
    """Says on standard error what takes its time."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet

    def __call__(self, text: str) -> None:
        if not self._quiet:
            print(f"maxbatch: {text}", file=sys.stderr, flush=True)


def _figures(verdict: Any) -> dict[str, Any]:
    memory = dataclasses.asdict(verdict.memory) if verdict.memory else {}
    return {
        **memory,
        "hbm_bytes_needed": verdict.needed_bytes,
        "hbm_bytes_available": verdict.available_bytes,
        "fits": verdict.fits,
        "compile_s": round(verdict.seconds, 2),
    }


def _refusal(verdict: Any, arguments: int, known: Any, target: Target) -> dict[str, Any]:
    """What is known of a program that the compiler gave up: its arguments from their shapes, the rest is temporary."""
    needed = verdict.needed_bytes
    parts = {
        "argument_bytes": arguments,
        "temp_bytes": None if needed is None else max(0, needed - arguments),
        "alias_bytes": known.parameters + known.optimizer,
    }
    return {**parts, **_figures(verdict), **(parts if verdict.memory is None else {}), "target": target.name}


def _show(verdicts: dict[str, Any], target: Target) -> None:
    from rich.table import Table

    from maxbatch.plan.view import plan_console
    from maxbatch.training.compile.memory import gigabytes

    table = Table(
        "program", "arguments", "temporaries", "needed", "available", "compiled in", title=target.name
    )
    for name, verdict in verdicts.items():
        memory = verdict.memory
        cells = (
            memory.argument_bytes,
            memory.temp_bytes,
            verdict.needed_bytes,
            verdict.available_bytes,
        )
        table.add_row(name, *map(gigabytes, cells), f"{verdict.seconds:.1f} s")
    plan_console().print(table)
    if target.devices[0].platform == "cpu":
        print(f"available: {target.memory_source}")
