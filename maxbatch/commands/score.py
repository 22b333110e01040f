"""`maxbatch score`: the log-probabilities that a model gives to texts, tokens or conversations."""

from __future__ import annotations

import argparse
import json
import math
from typing import TYPE_CHECKING

from maxbatch.commands.arguments import add_model, add_simulated_devices, check_overrides, model_of, simulate_devices
from maxbatch.config.values import shown
from maxbatch.data.store.documents import DocumentSource
from maxbatch.data.store.files import list_files
from maxbatch.data.store.formats import FOLDER_FILES
from maxbatch.system.errors import EXIT_DONE, ConfigError
from maxbatch.system.folding import counted
from maxbatch.system.terminal import PipeConsole

if TYPE_CHECKING:
    from maxbatch.loaded_model import Scores


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, file="jsonl: records with text, tokens (ids), messages, or prompt and completion")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_simulated_devices(parser, "compute on N CPU devices made in this process")


def run(args: argparse.Namespace) -> int:
    """Prints the log-probabilities of every record, or the loss of each; returns the exit code."""
    check_overrides(args.overrides, "score takes one MODEL and one FILE")
    lines = _lines(args.file)
    simulate_devices(args.simulate_devices)
    from maxbatch.loaded_model import LoadedModel, RecordFault

    try:
        found = LoadedModel(model_of(args), args.overrides, args.averaged).score(lines)
    except RecordFault as error:
        raise ConfigError(f"FILE={shown(repr(args.file))}: {error}") from error
    if args.json:
        print(json.dumps(_figures(found)))
    else:
        _print(found)
    return EXIT_DONE


def _lines(path: str) -> list[dict[str, object]]:
    """Returns the records of a file.

    Raises:
      ConfigError: the file cannot be read, has no record, or a line is not a JSON object.
    """
    files = list_files("FILE", path, *FOLDER_FILES["jsonl"]).files
    source = DocumentSource("jsonl", "FILE", path, files, (), text_field=None, record_format="", skip_bad_records=False)
    lines = [json.loads(document.utf8) for document in source.documents()]
    if not lines:
        raise source.error("holds no record")
    return lines


def _figures(found: Scores) -> dict[str, object]:
    """Returns the object of `--json`; a loss without weight, or one that is not finite, is null."""
    rows = [
        {"logprobs": [_finite(x) for x in one.logprobs.tolist()], "weights": one.weights.tolist(), "loss": one.loss}
        for one in found.records
    ]
    return {"records": rows, "loss": found.loss, "perplexity": found.perplexity}


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _print(found: Scores) -> None:
    console = PipeConsole(highlight=False, soft_wrap=True)
    tokens = 0.0
    for number, record in enumerate(found.records, 1):
        trained = sum(record.weights.tolist())
        tokens += trained
        console.print(f"record {number}  tokens {trained:g}  loss {_number(record.loss)}")
    names = f"{counted(len(found.records), 'record')}  tokens {tokens:,.0f}"
    console.print(f"{names}  loss {_number(found.loss)}  perplexity {_number(found.perplexity)}")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
