"""`maxbatch evaluate`: the scores of a model on tasks of lm-evaluation-harness."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from maxbatch.commands.arguments import (
    add_model,
    add_simulated_devices,
    check_overrides,
    count,
    model_of,
    simulate_devices,
    whole,
)
from maxbatch.system.errors import EXIT_DONE
from maxbatch.system.terminal.terminal import PipeConsole, PlainTable

_STDERR = "_stderr"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    tasks = (
        "tasks, groups or tags of lm-evaluation-harness, patterns, task files or folders of them, "
        "joined by commas"
    )
    parser.add_argument("--tasks", required=True, metavar="TASK,...", help=tasks)
    path = "a folder of task files whose names --tasks may use"
    parser.add_argument("--include-path", metavar="DIR", help=path)
    few = "worked examples before each question (as each task states)"
    parser.add_argument("--num-fewshot", type=whole(0), metavar="K", help=few)
    limit = "most documents of a task, for a first look (all)"
    parser.add_argument("--limit", type=count, metavar="N", help=limit)
    batch = "rows in one pass; no score depends on it (by their length)"
    parser.add_argument("--batch-size", type=count, metavar="N", help=batch)
    template = (
        "write requests in the chat template of the model's tokenizer, few-shot examples as "
        "messages"
    )
    parser.add_argument("--apply-chat-template", action="store_true", help=template)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_simulated_devices(parser, "compute on N CPU devices made in this process")


def run(args: argparse.Namespace) -> int:
    """Prints the scores of every task and group; returns the exit code."""
    check_overrides(args.overrides, "evaluate takes one MODEL")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # the harness's bars
    simulate_devices(args.simulate_devices)
    from maxbatch.around.evaluate import evaluate
    from maxbatch.around.harness.tasks import check_installed
    from maxbatch.around.loaded_model import LoadedModel

    check_installed()
    scores = evaluate(
        LoadedModel(model_of(args), args.overrides, args.averaged),
        [name for name in args.tasks.split(",") if name],
        include_path=args.include_path,
        num_fewshot=args.num_fewshot,
        limit=args.limit,
        batch_size=args.batch_size,
        apply_chat_template=args.apply_chat_template,
    )
    if args.json:
        print(json.dumps(scores))
    else:
        _print(scores)
    return EXIT_DONE


def _print(scores: Mapping[str, Any]) -> None:
    table = PlainTable(
        "task", "shots", "documents", "metric", "better", "filter", "value", "standard error"
    )
    for task, metrics in scores["results"].items():
        for name, metric, of_filter, value, error in _rows(metrics):
            shots, documents = (
                scores["n-shot"].get(task, ""),
                scores["n-samples"].get(task, {}).get("effective", ""),
            )
            better = {True: "higher", False: "lower"}.get(
                scores["higher_is_better"].get(task, {}).get(metric), ""
            )
            table.add_row(
                name or task, str(shots), str(documents), metric, better, of_filter, value, error
            )
    PipeConsole(highlight=False, soft_wrap=True).print(table)


def _rows(metrics: Mapping[str, object]) -> Sequence[tuple[str, str, str, str, str]]:
    """Returns alias, metric, filter, value and standard error of each figure of a task."""
    alias = str(metrics.get("alias", ""))
    rows = []
    for key, value in metrics.items():
        metric, comma, of_filter = key.partition(",")
        if comma and not metric.endswith(_STDERR):
            error = metrics.get(f"{metric}{_STDERR},{of_filter}")
            rows.append((alias, metric, of_filter, _number(value), _number(error)))
    return rows


def _number(value: object) -> str:
    return (
        f"{value:.4f}"
        if isinstance(value, int | float)
        else ""
        if value in (None, "N/A")
        else str(value)
    )
