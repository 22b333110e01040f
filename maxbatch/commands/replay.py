"""`maxbatch replay`: an update of a run, taken again and shown sample by sample."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from maxbatch.commands.arguments import (
    add_simulated_devices,
    count,
    place,
    simulate_devices,
    whole,
)
from maxbatch.system.errors import EXIT_DONE, EXIT_FAILED, ConfigError
from maxbatch.system.storage.storage import as_typed
from maxbatch.system.terminal.terminal import PipeConsole, PlainTable
from maxbatch.system.terminal.warning import note

if TYPE_CHECKING:
    from maxbatch.around.replay.replayed import Replayed, ShownUpdate


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", type=place, metavar="RUN", help="the folder of a run")
    parser.add_argument(
        "--step", type=count, required=True, metavar="K", help="the update to take again"
    )
    parser.add_argument(
        "--checkpoint",
        type=whole(0),
        metavar="STEP",
        help="the checkpoint to start from (default: the newest before K)",
    )
    parser.add_argument(
        "--top",
        type=count,
        metavar="N",
        help="show the N samples that pull the most (grad_norm x weight), the largest first",
    )
    parser.add_argument(
        "--around",
        type=whole(0),
        default=0,
        metavar="N",
        help="show the N updates before K, too",
    )
    parser.add_argument(
        "--html",
        type=place,
        metavar="FILE",
        help="write a page of the samples, their tokens coloured by loss",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_simulated_devices(parser, "compute on N CPU devices made in this process")


def run(args: Namespace) -> int:
    """Takes the update again and prints it; returns 1 where it differs from the recorded one."""
    from maxbatch.around.replay.recorded_run import RecordedRun

    page = as_typed(args.html) if args.html else None
    if isinstance(page, Path) and not page.absolute().parent.is_dir():
        raise ConfigError(f"--html {page}: {page.parent} is no folder; make it, or name another")
    recorded = RecordedRun(args.run)
    recorded.line(args.step)
    first = max(min(recorded.lines), args.step - args.around)
    checkpoint = recorded.checkpoint_before(first, args.checkpoint)
    recorded.segments((checkpoint or 0) + 1, args.step)
    simulate_devices(args.simulate_devices)
    from maxbatch.around.replay.replayed import Wanted, replay

    wanted = Wanted(args.step, args.step - first, args.top, has_losses=args.html is not None)
    replayed = replay(recorded, checkpoint, wanted)
    for difference in replayed.differences:
        note(difference)
    for store in replayed.stores:
        note(f"{store}: does not state the files of its documents; they are named by their numbers")
    if args.json:
        print(json.dumps(replayed.to_json()))
    else:
        _print(replayed)
    if page:
        from maxbatch.around.replay.replay_page import page_of

        page_of(replayed, recorded.named).write(page)
    return EXIT_FAILED if replayed.differences else EXIT_DONE


def _print(replayed: Replayed) -> None:
    console = PipeConsole(highlight=False, soft_wrap=True)
    console.print(f"taken again from {replayed.start}")
    for update in replayed.shown:
        _print_update(update, console)
    console.print(
        f'to leave these rows out, here and ahead: skip_samples="{replayed.skip_samples}"'
    )


def _print_update(shown: ShownUpdate, console: PipeConsole) -> None:
    update = shown.figures
    console.print(
        f"update {update.step}\n"
        f"loss {_figure(update.loss)}, recorded {_figure(update.recorded_loss)}\n"
        f"grad_norm {_figure(update.grad_norm)}, recorded {_figure(update.recorded_grad_norm)}\n"
        f"data_fingerprint {update.data_fingerprint}, recorded "
        f"{update.recorded_data_fingerprint}"
    )
    if not shown.samples:
        console.print("it trained on nothing")
        return
    columns = shown.samples[0].content.cells
    table = PlainTable("sample", "loss", "weight", "grad_norm", "share", *columns)
    for sample, content in shown.samples:
        figures = map(_figure, (sample.loss, sample.weight, sample.grad_norm, sample.share))
        table.add_row(str(sample.index), *figures, *content.cells.values())
    console.print(table)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
