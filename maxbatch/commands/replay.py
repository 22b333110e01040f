"""`maxbatch replay`: an update of a run, taken again and shown sample by sample."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from maxbatch.commands.arguments import (
    add_simulated_devices,
    count,
    place,
    simulate_devices,
    whole,
)
from maxbatch.config.values import first_of
from maxbatch.system.errors import EXIT_DONE, EXIT_FAILED
from maxbatch.system.terminal.terminal import PipeConsole, PlainTable
from maxbatch.system.terminal.warning import note

if TYPE_CHECKING:
    from maxbatch.around.replay.replayed import Replayed

_MOST_DOCUMENTS = 3  # named in a row of the table


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
        help="show the N samples with the largest share of the gradient, the largest first",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_simulated_devices(parser, "compute on N CPU devices made in this process")


def run(args: Namespace) -> int:
    """Takes the update again and prints it; returns 1 where it differs from the recorded one."""
    from maxbatch.around.replay.recorded_run import RecordedRun

    recorded = RecordedRun(args.run)
    checkpoint = recorded.checkpoint_before(args.step, args.checkpoint)
    recorded.line(args.step)
    recorded.segments((checkpoint or 0) + 1, args.step)
    simulate_devices(args.simulate_devices)
    from maxbatch.around.replay.replayed import replay

    replayed = replay(recorded, checkpoint, args.step, args.top)
    for difference in replayed.differences:
        note(difference)
    for store in replayed.stores:
        note(f"{store}: does not state the files of its documents; they are named by their numbers")
    if args.json:
        print(json.dumps(replayed.to_json()))
    else:
        _print(replayed)
    return EXIT_FAILED if replayed.differences else EXIT_DONE


def _print(replayed: Replayed) -> None:
    console, update = PipeConsole(highlight=False, soft_wrap=True), replayed.update
    console.print(
        f"update {update.step}, taken again from {replayed.start}\n"
        f"loss {_figure(update.loss)}, recorded {_figure(update.recorded_loss)}\n"
        f"grad_norm {_figure(update.grad_norm)}, recorded {_figure(update.recorded_grad_norm)}\n"
        f"data_fingerprint {update.data_fingerprint}, recorded "
        f"{update.recorded_data_fingerprint}"
    )
    table = PlainTable("sample", "loss", "weight", "grad_norm", "share", "documents")
    for sample, documents in replayed.samples:
        figures = map(_figure, (sample.loss, sample.weight, sample.grad_norm, sample.share))
        places = first_of(
            [str(document) for document in documents if str(document)], _MOST_DOCUMENTS
        )
        table.add_row(str(sample.index), *figures, places)
    console.print(table)
    console.print(f'their rows, here and ahead: skip_samples="{replayed.skip_samples}"')


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
