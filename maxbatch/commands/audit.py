"""`maxbatch audit`: tests whether a trainer's update depends on cut, padding, devices or a
resume.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from maxbatch.around.auditing.audit import LEAST, Audit, Verdict, audit
from maxbatch.around.auditing.junit import junit_xml, junit_xml_of_error
from maxbatch.around.auditing.resuming import ImportMake
from maxbatch.around.auditing.trainer import Make
from maxbatch.commands.arguments import add_simulated_devices, simulate_devices, whole
from maxbatch.config.user_function import import_function
from maxbatch.config.values import shown
from maxbatch.system.errors import EXIT_DONE, EXIT_FAILED, ConfigError
from maxbatch.system.processes.worker_pool import WorkerEnded, WorkerPool
from maxbatch.system.storage.atomic_files import write_atomically
from maxbatch.system.terminal.folding import folded, terminal_width
from maxbatch.system.terminal.terminal import PipeConsole, PlainTable

_LONGEST_PROBLEM = 400


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "make", metavar="FILE.py:make", help="a function of a layout that returns a trainer"
    )
    length = whole(LEAST["length"], works=8)
    parser.add_argument(
        "--length", type=length, default=8, metavar="L", help="tokens of a row (default 8)"
    )
    vocabulary = whole(LEAST["vocab_size"], works=8)
    tokens = "size of the vocabulary; the tokens are 1 to V - 1 (default 8)"
    parser.add_argument("--vocab-size", type=vocabulary, default=8, metavar="V", help=tokens)
    updates = whole(LEAST["updates"], works=4)
    parser.add_argument(
        "--updates", type=updates, default=4, metavar="U", help="updates of a run (default 4)"
    )
    parser.add_argument(
        "--seed", type=whole(0), default=0, metavar="S", help="seed of the rows (default 0)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    junit = "write a JUnit XML file, with a test case for each promise"
    parser.add_argument("--junit", type=Path, metavar="FILE", help=junit)
    add_simulated_devices(parser, "make N CPU devices for a trainer in JAX")


def run(args: argparse.Namespace) -> int:
    """Prints a verdict on every promise; returns 0 if none is broken, else 1."""
    place, colon, name = args.make.rpartition(":")
    if not (place and colon and name):
        raise ConfigError(
            f"{shown(args.make)}: must be FILE.py:FUNCTION; works: maxbatch audit trainer.py:make"
        )
    if args.junit:  # a folder that is not there is told before the audit
        write_atomically(args.junit, junit_xml_of_error(args.make, "the audit did not end"))
    try:
        outcome = _audit_of(args)
    except ConfigError as error:
        if args.junit:
            write_atomically(args.junit, junit_xml_of_error(args.make, str(error)))
        raise
    if args.junit:
        write_atomically(args.junit, junit_xml(args.make, outcome))
    if args.json:
        print(json.dumps(outcome.to_json()))
    else:
        _print(outcome)
    return EXIT_DONE if outcome.holds else EXIT_FAILED


def _audit_of(args: argparse.Namespace) -> Audit:
    settings = {name: getattr(args, name) for name in LEAST}
    setup = functools.partial(_auditing, args.make, args.simulate_devices, sys.path)
    try:
        with WorkerPool(setup, 1) as pool:
            pool.wait_for_setup()
            outcome: Audit = pool.submit([settings])[0].result()
            return outcome
    except WorkerEnded as error:
        raise ConfigError(f"{shown(args.make)}: the trainer ended its process ({error})") from error


def _auditing(
    spec: str, devices: int | None, path: list[str]
) -> Callable[[Mapping[str, int]], Audit]:
    """Returns the audit of a trainer, in a process of its own: the trainer may end it, or print."""
    sys.path[:] = path
    simulate_devices(devices)
    try:
        make = import_function(spec)
    except ImportError as error:
        raise ConfigError(
            f"{shown(spec)}: {' '.join(str(error).split())[:_LONGEST_PROBLEM]}"
        ) from error
    return functools.partial(_audited, make, functools.partial(import_function, spec))


def _audited(make: Make, import_make: ImportMake, settings: Mapping[str, int]) -> Audit:
    return audit(make, import_make=import_make, **settings)


def _print(outcome: Audit) -> None:
    console, width = PipeConsole(highlight=False, soft_wrap=True), terminal_width()
    table = PlainTable("promise", "verdict", "parameters", "loss", "smallest case")
    for verdict in outcome.verdicts:
        by = map(_percent, (verdict.by, verdict.loss_by))
        table.add_row(verdict.promise, verdict.status, *by, str(verdict.case or ""))
    console.print(table)
    console.print()
    for line in _lines(outcome):
        console.print(folded(line, 2, width))


def _lines(outcome: Audit) -> Iterator[str]:
    """Yields the reasons of verdicts, the tolerances, the effect of a NaN, and the broken
    promises.
    """
    promises: dict[str, list[str]] = {}
    for verdict in outcome.verdicts:
        if verdict.status != "holds" or verdict.reason:
            promises.setdefault(_reason(verdict), []).append(verdict.promise)
    yield from (f"{', '.join(names)}: {reason}" for reason, names in promises.items())
    spread = (
        f"parameters may differ by {outcome.tolerance:.1e} (by {outcome.spread:.1e} over permutations "
        "of the rows)"
    )
    has_loss = outcome.loss_tolerance is not None
    of_loss = (
        f", losses by {outcome.loss_tolerance:.1e} ({outcome.loss_spread:.1e})" if has_loss else ""
    )
    yield f"tolerance: {spread}{of_loss}"
    yield f"a NaN among the weights of a batch: {outcome.nan} (no promise is about this)"
    names = ", ".join(verdict.promise for verdict in outcome.broken)
    yield f"broken: {names}" if names else "no promise is broken"


def _percent(share: float | None) -> str:
    """Returns a share as a percentage of at least two digits; "" for None."""
    return "" if not share else f"{100 * share:,.0f}%" if share >= 0.1 else f"{100 * share:.2g}%"


def _reason(verdict: Verdict) -> str:
    if verdict.status != "broken":
        return verdict.reason
    reasons = [verdict.cause, verdict.explanation, verdict.reason]
    if verdict.array is None and not verdict.reason:
        reasons.append("of the reported loss alone")
    if verdict.terms:
        reasons.append(f"it changes {', '.join(verdict.terms)}")
    return "; ".join(filter(None, reasons))
