"""The lines of `metrics.jsonl`, one per update, as the commands and a resume read them."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple

from maxbatch.config.values import shown_path
from maxbatch.run.folder.metrics_schema import Metric, find_metric
from maxbatch.system.errors import ConfigError, reading
from maxbatch.system.storage.storage import AnyPath, as_path, open_whole

Record = dict[str, Any]  # the fields of a line, by name

METRICS_FILE = "metrics.jsonl"
# The Python types of the schema's kinds; a real that was not finite is null.
_NULL, _NUMBER = type(None), (int, float)
_TYPES = {
    "whole": _NUMBER,
    "real": (*_NUMBER, _NULL),
    "text": (str,),
    "bool": (bool,),
    "map": (dict,),
    "unknown": (*_NUMBER, _NULL, str, bool, dict, list),
}
# The fields that readers take from every line.
_REQUIRED = (
    Metric.STEP,
    Metric.SAMPLES_SEEN,
    Metric.TOKENS_SEEN,
    Metric.GLOBAL_BATCH_SIZE,
    Metric.STAGE,
    Metric.LOSS,
    Metric.LEARNING_RATE,
)
LONGEST_RECORD = 1 << 20  # bytes of a record
LONGEST_TEXTS = 1 << 30  # of a line of texts, such as the responses of a batch
_LARGEST, _MOST_DIGITS = 1e100, 400  # larger than training writes, and small enough to be summed
_STEP = re.compile(rb'\{"step": ([0-9]{1,18}),')  # the beginning of the lines of a run
_UNUSUAL = re.compile(rb"N|I|[0-9]{60}|[eE]\+?[0-9]{3}")


class ScannedMetrics(NamedTuple):
    """The lines of `metrics.jsonl`."""

    records: list[Record]  # one per update
    holes: list[int]  # numbers, from 1, of lines with a value that is not finite or beyond 1e100


class UpdateSeconds(NamedTuple):
    """The wall time of an update."""

    whole: float
    waited: float  # of it, for data


def read_metrics(run_dir: str | os.PathLike[str] | AnyPath) -> list[Record]:
    """Returns the records of a run's `metrics.jsonl`, one dict per update; none before the first.

    A number that was not finite is None.

    Args:
      run_dir: the folder of the run, on this machine or in an object store.

    Raises:
      ConfigError: there is no such folder, the file cannot be read, or a line is no record of an
        update.
    """
    folder = as_path(run_dir)
    records = scan_metrics(folder).records
    if not records and not folder.is_dir():
        raise ConfigError(f"{shown_path(folder)}: no such run folder")
    return records


def scan_metrics(run_dir: AnyPath) -> ScannedMetrics:
    """Reads `metrics.jsonl`, one line per update; nothing if there is no file yet.

    An incomplete last line is left out: the run was killed while writing it, or is writing it now.
    A number that is not finite, or beyond 1e100, becomes None; a line that needs it is left out.

    Raises:
      ConfigError: the file cannot be read, or another line is no record of an update.
    """
    path, records, holes = run_dir / METRICS_FILE, [], []
    lines = read_lines(path)
    for number, line in enumerate(lines, start=1):
        beyond: list[str] = []
        record = parse_line(line, beyond)
        if beyond:
            holes.append(number)
        if beyond and (
            record is None
            or any(record.get(name, 0) is None for name in _REQUIRED if name != Metric.LOSS)
        ):
            continue
        wrong = (
            "must be a JSON object with a whole `step`" if record is None else wrong_field(record)
        )
        if record is not None and not wrong:
            records.append(record)
        elif number < len(lines):
            raise ConfigError(f"{path}:{number}: {wrong}")
    return ScannedMetrics(records, holes)


def is_weightless(record: Mapping[str, object]) -> bool:
    """Returns whether an update's batch had no loss weight, so that its null loss does not mean
    divergence.
    """
    return (
        record[Metric.LOSS] is None
        and record.get(Metric.LOSS_WEIGHT) == 0
        and not record.get(Metric.SKIPPED)
    )


def samples_seen_at(run_dir: AnyPath, step: int) -> list[int]:
    """Returns the positions after a step in the lines of `metrics.jsonl`; usually there is one."""
    records = filter(None, map(parse_line, read_lines(run_dir / METRICS_FILE)))
    return [r["samples_seen"] for r in records if r["step"] == step and not wrong_field(r)]


def upto(lines: Iterable[bytes], step: int) -> list[bytes]:
    """Returns the readable lines of updates until a step."""
    return [line for line in lines if (record := parse_line(line)) and record["step"] <= step]


def lines_until(path: AnyPath, step: int) -> list[bytes]:
    """Returns the lines of a log's updates until a step; none if there is no file."""
    return upto(read_lines(path, LONGEST_TEXTS), step)


def lines_between(path: AnyPath, after: int, until: int) -> Iterator[Record]:
    """Yields the records of a log's updates from `after` + 1 to `until`, one line at a time; leaves
    out damaged ones.

    Raises:
      ConfigError: the file cannot be read.
    """
    with reading(path), contextlib.suppress(FileNotFoundError), open_whole(path) as file:
        for line in _bounded_lines(file, LONGEST_TEXTS):
            step = _STEP.match(line)
            if step and after < int(step[1]) <= until and (record := parse_line(line)):
                yield record


def line_digest(line: bytes) -> str:
    """Returns a hash of a line; it holds measured times, so no other execution of the same update
    has the same.
    """
    return hashlib.blake2b(line, digest_size=16).hexdigest()


def line_digests_at(run_dir: AnyPath, step: int) -> list[tuple[int, str]]:
    """Returns position and `line_digest` of each line of a step in `metrics.jsonl`; usually there
    is one.
    """
    lines = [(line, parse_line(line)) for line in read_lines(run_dir / METRICS_FILE)]
    return [
        (record["samples_seen"], line_digest(line))
        for line, record in lines
        if record and record["step"] == step and not wrong_field(record)
    ]


def update_seconds(run_dir: AnyPath, after: int) -> dict[int, UpdateSeconds]:
    """Returns the times of the updates after step `after` by step, from valid lines of
    `metrics.jsonl`.
    """
    late = (
        line
        for line in read_lines(run_dir / METRICS_FILE)
        if not (step := _STEP.match(line)) or int(step[1]) > after
    )
    times = {}
    for record in filter(None, map(parse_line, late)):
        whole, waited = (record.get(name) for name in (Metric.STEP_TIME_S, Metric.DATA_WAIT_S))
        if (
            record["step"] > after
            and type(whole) is float
            and type(waited) is float
            and min(whole, waited) >= 0
        ):
            times[record["step"]] = UpdateSeconds(whole, min(whole, waited))
    return times


def read_step_log(path: AnyPath) -> list[Record]:
    """Returns the records of a file of JSON lines that each belong to an update; leaves out damaged
    lines.

    Raises:
      ConfigError: the file cannot be read.
    """
    return [record for line in read_lines(path) if (record := parse_line(line)) is not None]


def read_lines(path: AnyPath, longest: int = LONGEST_RECORD) -> list[bytes]:
    """Returns the lines of a file, none if there is no file; cuts lines of more than `longest`
    bytes.

    Raises:
      ConfigError: the file cannot be read.
    """
    with reading(path), contextlib.suppress(FileNotFoundError), open_whole(path) as file:
        return list(_bounded_lines(file, longest))
    return []


def _bounded_lines(file: BinaryIO, longest: int) -> Iterator[bytes]:
    """Yields the lines of a file; cuts those of more than `longest` bytes."""
    while line := file.readline(longest):
        yield line
        while not line.endswith(b"\n") and len(line) == longest:
            line = file.readline(longest)


def parse_line(line: bytes, beyond: list[str] | None = None) -> Record | None:
    """Returns the record of an update, None for a damaged line; appends numbers out of bounds to
    `beyond`.
    """

    def number(text: str, read: Callable[[str], float]) -> float | None:
        if len(text) < _MOST_DIGITS and abs(value := read(text)) < _LARGEST:  # NaN is not
            return value
        if beyond is not None:
            beyond.append(text)
        return None

    # Python calls the hooks for every number, so they are set only if a number may be out of
    # bounds.
    hooks: dict[str, Any] = {}
    if _UNUSUAL.search(line):
        real = functools.partial(number, read=float)
        hooks = {
            "parse_constant": real,
            "parse_float": real,
            "parse_int": functools.partial(number, read=int),
        }
    try:
        record = json.loads(line.decode(), **hooks) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    has_step = isinstance(record, dict) and type(record.get("step")) is int and record["step"] > 0
    return record if has_step else None


def wrong_field(record: Mapping[str, object]) -> str | None:
    """Returns the rule that a record breaks; None for a valid record."""
    missing = [name for name in _REQUIRED if name not in record]
    wrong = [name for name, value in record.items() if type(value) not in _types(name)]
    return f"must have a sound `{(missing + wrong)[0]}`" if missing or wrong else None


@functools.cache
def _types(name: str) -> tuple[type, ...]:
    metric = find_metric(name)
    kind, _, null = metric.kind.partition(" or ") if metric else ("unknown", "", "")
    return (*_TYPES[kind], _NULL) if null else _TYPES[kind]
