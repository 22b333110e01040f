"""`maxbatch compile`: every program of a run, compiled ahead of time and saved for `train` to
load.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from maxbatch.around.compile.compiling import (
    Compiled,
    DoesNotFit,
    ProgramsElsewhere,
    programs_on,
)
from maxbatch.commands.arguments import config_of, count, local_path, place
from maxbatch.commands.refusing import may_have_others, refusing_together
from maxbatch.commands.simulation import check_hosts, run_hosts
from maxbatch.commands.targets import (
    add_target_arguments,
    config_before_devices,
    plan_on,
    show_time,
    smaller_targets,
    with_flags_of,
)
from maxbatch.config.config import Config
from maxbatch.config.pins import program_keys
from maxbatch.plan.batch import BatchPlan
from maxbatch.plan.survival import Machine, smaller_machines
from maxbatch.run.compile.target import Target, device_facts, find_target, machine_name
from maxbatch.run.folder.old_forms import refuse_old_run
from maxbatch.system.errors import EXIT_DONE, ConfigError, TrainingError, report, writing
from maxbatch.system.hardware.chips import Peak, mfu_peak
from maxbatch.system.storage.storage import AnyPath, as_path
from maxbatch.system.terminal.folding import printable
from maxbatch.system.terminal.warning import note

if TYPE_CHECKING:
    from maxbatch.run.compile.memory import Parts, Verdict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target_arguments(parser)
    folder = "folder to save in (default: RUN_DIR/compiled)"
    parser.add_argument("--output", type=place, metavar="DIR", help=folder)
    survive = (
        "compile also for every machine down to K slices or simulated hosts fewer, in folders of "
        "their own in DIR"
    )
    parser.add_argument("--survive", type=count, metavar="K", help=survive)
    hosts = (
        "compile in H processes of N / H devices each (default N: H), --survive K for fewer of them"
    )
    parser.add_argument("--simulate-hosts", type=count, metavar="H", help=hosts)
    hlo = "write the optimised HLO text here, one file per program; for a TPU it is scheduled"
    parser.add_argument("--hlo", type=local_path, metavar="DIR", help=hlo)


def run(args: argparse.Namespace) -> int:
    """Compiles the programs of a run and saves them; raises TrainingError if one does not fit."""
    if args.simulate_hosts:
        return _on_simulated_hosts(args)
    with contextlib.nullcontext() if args.topology else refusing_together():
        config = config_before_devices(args)
    with _joined(args, config):
        from maxbatch.parallel.hosts import is_first

        target = find_target(args.topology, args.slices)
        config = with_flags_of(config, target)
        plan = plan_on(config, target)
        smaller = _smaller(config, args, target)  # plans them all before compiling anything
        folder = _folder(args, config)
        hlo = _made_folder(args.hlo) if is_first() else None
        record = _compile_run(config, target, plan, folder, hlo, args.json)
        others = []
        for left, its_plan in smaller:
            name = machine_name(left.devices)
            its_hlo = _made_folder(str(hlo / name)) if hlo else None
            others.append(_compile_run(config, left, its_plan, folder / name, its_hlo, args.json))
        if args.json and is_first():
            print(json.dumps(record | ({"survive": others} if args.survive else {}), indent=2))
        elif is_first():
            print(printable(f"next: maxbatch train ... compiled_dir={folder}"))
    return EXIT_DONE


def _joined(args: argparse.Namespace, config: Config) -> AbstractContextManager[None]:
    """Returns a context of the hosts that the environment names, which compile together; a topology
    has none.
    """
    if args.topology or not may_have_others():
        return contextlib.nullcontext()
    from maxbatch.parallel.hosts import together

    return together(
        partial(report, as_json=args.json),
        config.heartbeat_timeout_s,
        config.host_wait_s,
        lambda: None,
    )


def _folder(args: argparse.Namespace, config: Config) -> AnyPath:
    if args.output:
        return as_path(args.output)
    refuse_old_run(as_path(config.run_dir))
    return as_path(config.run_dir) / "compiled"


def _on_simulated_hosts(args: argparse.Namespace) -> int:
    """Compiles in the processes of simulated hosts, and again in fewer of them for `--survive`."""
    if args.topology:
        raise ConfigError(
            f"--simulate-hosts {args.simulate_hosts}: must not be given beside --topology, which "
            f"states the hosts; works: --topology {args.topology}"
        )
    if args.json and args.survive:
        raise ConfigError(
            "--json: prints one object, and --survive on simulated hosts compiles several "
            "machines one after the other; works: without --json"
        )
    config = config_of(args)
    num_devices = args.simulate_devices or args.simulate_hosts
    check_hosts(num_devices, args.simulate_hosts)
    folder, whole = _folder(args, config), Machine(num_devices, args.simulate_hosts)
    machines = smaller_machines(whole, args.survive) if args.survive else [whole]
    for left in machines:
        BatchPlan.from_config(config, left.num_devices, left.num_hosts)
    words = ["compile", *args.config, "--simulate-devices", str(num_devices // args.simulate_hosts)]
    for left in machines:
        its_folder = folder if left == whole else folder / left.name
        flags = ["--output", str(its_folder), *(["--json"] if args.json else [])]
        if args.hlo:
            flags += ["--hlo", args.hlo if left == whole else os.path.join(args.hlo, left.name)]
        if code := run_hosts(
            [*words, *flags], left.num_hosts, lambda: None, config.heartbeat_timeout_s
        ):
            return code
    return EXIT_DONE


def _smaller(
    config: Config, args: argparse.Namespace, target: Target
) -> list[tuple[Target, BatchPlan]]:
    """Returns the slices without 1 to `--survive` of them, and the plan on each machine.

    Raises:
      ConfigError: the devices are not slices of a topology, nothing is left, or a rule of the batch
        is broken there.
    """
    machines = []
    for left, _ in smaller_targets(args, target):
        try:
            machines.append((left, plan_on(config, left)))
        except ConfigError as error:
            raise ConfigError(f"--survive {args.survive}: {left.name}: {error}") from error
    return machines


def _compile_run(
    config: Config,
    target: Target,
    plan: BatchPlan,
    folder: AnyPath,
    hlo: Path | None,
    is_json: bool,
) -> dict[str, object]:
    """Compiles the programs of a run on devices and saves them; returns the record of `--json`.

    Raises:
      TrainingError: a program does not fit.
    """
    from maxbatch.parallel.hosts import is_first
    from maxbatch.run.compile.memory import known_parts
    from maxbatch.run.compile.saved import save_programs
    from maxbatch.run.programs import step_name

    programs, updates = programs_on(config, target, plan)
    shapes = [update.shape for update in updates]
    say = note if is_first() and not is_json else lambda text: None
    elsewhere = ProgramsElsewhere(
        config, target, hlo, lambda name: say(f"compiling {name} for {target.name}")
    )
    done = elsewhere.done
    for update in updates:
        shape, name = update.shape, step_name(update.shape)
        verdict = elsewhere.update(programs, update).verdict
        if not verdict.fits:
            error = _does_not_fit(
                f"a micro-batch of {shape.micro_batch} ({name})",
                verdict,
                target,
                "reproducible_rows=1 and more devices need the least"
                if config.reproducible_sums
                else "maxbatch fit finds the largest that does",
            )
            known = known_parts(programs.abstract, programs.placement.abstract_batch(shape))
            error.figures = _refusal(verdict, known, target)
            raise error
    try:
        programs.compile_others(plan.eval_batch_size, elsewhere.executable, elsewhere.executables)
    except DoesNotFit as refused:
        raise _does_not_fit(
            refused.name,
            done[refused.name].verdict,
            target,
            "works: a smaller eval_per_device_batch_size",
        ) from None
    executables = {
        name: program.executable for name, program in done.items() if program.executable is not None
    }
    keys = program_keys(config)
    seconds = [done[step_name(shape)].modelled.modelled_step_s for shape in shapes]
    size = (
        save_programs(folder, keys, target.devices, shapes, executables, seconds)
        if is_first()
        else 0
    )
    peak = mfu_peak(target.chip, config.quantization, config.peak_tflops_per_device)
    if is_first() and not is_json:
        _show(done, target, peak, folder, size)
    steps = [done[step_name(shape)] for shape in shapes]
    return _figures(max(steps, key=lambda program: program.verdict.needed_bytes or 0)) | {
        "target": target.name,
        "devices": device_facts(target.devices),
        "mfu_peak": peak and peak._asdict(),
        "programs": {name: _figures(program) for name, program in done.items()},
        "output": str(folder),
        "saved_bytes": size,
    }


def _made_folder(path: str | None) -> Path | None:
    """Makes and returns the folder of `--hlo`, before anything is compiled; None without the
    flag.
    """
    if path is None:
        return None
    folder = Path(os.path.expanduser(path))
    with writing(f"--hlo {path}"):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def _does_not_fit(what: str, verdict: Verdict, target: Target, advice: str) -> TrainingError:
    from maxbatch.run.compile.compiler import HBM

    return TrainingError(
        f"{what} does not fit {target.name}: {verdict.wants}; "
        f"{advice if verdict.lacks.space == HBM else 'works: libtpu_flags=none'}"
    )


def _figures(program: Compiled) -> dict[str, object]:
    return _memory_figures(program.verdict) | program.modelled.to_dict()


def _memory_figures(verdict: Verdict) -> dict[str, object]:
    from maxbatch.run.compile.compiler import LACKS_HBM

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

    The TPU compiler names one figure: arguments are computed from their shapes, and the rest counts
    as temporary.
    """
    arguments, needed = known.parameters + known.optimizer + known.batch, verdict.needed_bytes
    sizes = {
        "argument_bytes": arguments,
        "temp_bytes": None if needed is None else max(0, needed - arguments),
        "alias_bytes": known.parameters + known.optimizer,
    }
    return sizes | _memory_figures(verdict) | {"target": target.name}


def _show(
    done: Mapping[str, Compiled], target: Target, peak: Peak | None, folder: AnyPath, size: int
) -> None:
    from rich.table import Table

    from maxbatch.run.compile.memory import gigabytes
    from maxbatch.system.terminal.terminal import PipeConsole

    columns = ("program", "arguments", "temporaries", "needed", "available", "compiled in")
    table = Table(*columns, title=target.name)
    for name, program in done.items():
        verdict, memory = program.verdict, program.verdict.memory
        sizes = (memory.argument_bytes, memory.temp_bytes) if memory else (None, None)
        cells = (*sizes, verdict.needed_bytes, verdict.available_bytes)
        table.add_row(name, *map(gigabytes, cells), f"{verdict.seconds:.1f} s")
    PipeConsole().print(table)
    if target.devices[0].platform == "cpu":
        print(printable(f"available: {target.memory_source}"))
    show_time({name: program.modelled for name, program in done.items()})
    if peak:
        print(f"MFU refers to {peak.in_words()}")
    sums = [name for name, program in done.items() if program.executable is None]
    if sums:
        print(
            f"{' and '.join(sums)}: the time of all programs of an update, and the memory of the "
            "largest among the other arrays of the update"
        )
    num_saved = len(done) - len(sums)
    print(printable(f"saved {num_saved} programs ({gigabytes(size)}) in {folder}"))
