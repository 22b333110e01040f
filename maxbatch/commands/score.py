"""`maxbatch score`: the log-probabilities that a model gives to texts, tokens or conversations."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from maxbatch.commands.arguments import (
    add_model,
    add_simulated_devices,
    check_overrides,
    model_of,
    simulate_devices,
)
from maxbatch.config.file_formats import file_format, has_records
from maxbatch.config.rules import likely_type
from maxbatch.config.values import shown
from maxbatch.data.store.documents import DocumentSource
from maxbatch.data.store.duplicates import EQUAL
from maxbatch.data.store.files import list_files
from maxbatch.data.store.skipped import kind_of, skipped_text
from maxbatch.run.folder.json_file import finite
from maxbatch.system.errors import EXIT_DONE
from maxbatch.system.terminal.folding import counted
from maxbatch.system.terminal.terminal import PipeConsole
from maxbatch.system.terminal.warning import note

if TYPE_CHECKING:
    from maxbatch.around.loaded_model import Scores


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(
        parser,
        file="jsonl, json, csv, tsv or parquet: records with text, tokens (ids), messages, or "
        "prompt and completion",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_simulated_devices(parser, "compute on N CPU devices made in this process")


def run(args: argparse.Namespace) -> int:
    """Prints the log-probabilities of every record, or the loss of each; returns the exit code."""
    check_overrides(args.overrides, "score takes one MODEL and one FILE")
    kind = likely_type(args.file)
    kind = kind if has_records(kind) else "jsonl"
    form = file_format(kind)
    files = list_files("FILE", args.file, form.names, form.suffixes).files
    simulate_devices(args.simulate_devices)
    from maxbatch.around.loaded_model import LoadedModel, RecordFault

    model = LoadedModel(model_of(args), args.overrides, args.averaged)
    data = model.config
    source = DocumentSource(
        kind,
        "FILE",
        args.file,
        files,
        (),
        None,
        "",
        data.skip_bad_records,
        record_fields=data.record_fields,
    )
    documents = list(source.documents())
    kept = [document for document in documents if document.utf8]
    if not kept:
        raise source.error("holds no record")
    try:
        scores = model.score([json.loads(document.utf8) for document in kept])
    except RecordFault as fault:
        raise source.bad_record(kept[fault.number - 1], fault.problem) from fault
    skipped = [
        (source.record_number(document), document.reason)
        for document in documents
        if not document.utf8
    ]
    reasons = Counter(kind_of(reason) for _, reason in skipped)
    for record in scores.skipped:
        reason = record.reason
        if record.equal_to:
            first = kept[record.equal_to - 1]
            reason = f"equal to record {source.record_number(first)} of {first.piece.file.path}"
        reasons[EQUAL if record.equal_to else kind_of(reason)] += 1
        skipped.append((source.record_number(kept[record.number - 1]), reason))
    if skipped:
        note(f"FILE={shown(repr(args.file))}: {skipped_text(len(skipped), reasons)}")
    numbers = [source.record_number(kept[score.number - 1]) for score in scores.records]
    if args.json:
        print(json.dumps(_figures(scores, numbers, sorted(skipped))))
    else:
        _print(scores, numbers)
    return EXIT_DONE


def _figures(
    scores: Scores, numbers: Sequence[int], skipped: Sequence[tuple[int, str]]
) -> dict[str, object]:
    """Returns the object of `--json`; a loss without weight, or one that is not finite, is null."""
    rows = [
        {
            "record": number,
            "logprobs": [finite(x) for x in score.logprobs.tolist()],
            "weights": score.weights.tolist(),
            "loss": score.loss,
        }
        for number, score in zip(numbers, scores.records, strict=True)
    ]
    left_out = [{"record": number, "reason": reason} for number, reason in skipped]
    return {
        "records": rows,
        "loss": scores.loss,
        "perplexity": scores.perplexity,
        "skipped_records": left_out,
    }


def _print(scores: Scores, numbers: Sequence[int]) -> None:
    console = PipeConsole(highlight=False, soft_wrap=True)
    tokens = 0.0
    for number, record in zip(numbers, scores.records, strict=True):
        trained = sum(record.weights.tolist())
        tokens += trained
        console.print(f"record {number}  tokens {trained:g}  loss {_number(record.loss)}")
    names = f"{counted(len(scores.records), 'record')}  tokens {tokens:,.0f}"
    console.print(f"{names}  loss {_number(scores.loss)}  perplexity {_number(scores.perplexity)}")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
