"""The folder of a sweep, with a folder for each trial: an ordinary run, its overrides and its
outcome.

    sweep_dir/sweep.json            the sweep: sampler, metric, seed, parameters
    sweep_dir/base.yml              the keys that all trials share
    sweep_dir/trials/0007/          run_dir of trial 7
        trial.json                  its overrides and its resolved config
        log.txt                     the output of the training
        outcome.json                how it ended, once it did

A sweep continues from these files after a stop or a kill. Values of the metric are read from the
trials' own `metrics.jsonl`. If the folder is in an object store, the log of a trial is in the
user's cache while it runs, and is copied to the store at its end.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

from maxbatch.config.sections import KEYS
from maxbatch.config.values import NUMBERS
from maxbatch.run.folder.json_file import checked, read_json, write_json
from maxbatch.run.folder.metrics import Record, is_weightless, scan_metrics
from maxbatch.run.folder.metrics_schema import Metric
from maxbatch.run.folder.outcome import (
    OUTCOME_FILE,
    RecordedOutcome,
    Status,
    read_outcome,
    write_outcome,
)
from maxbatch.system.errors import ConfigError
from maxbatch.system.storage.storage import AnyPath

SWEEP_METRICS: dict[str, str] = {
    Metric.EVAL_LOSS: "eval_loss, the last one of the trial",
    Metric.LOSS: "loss, mean of the last tenth of the trial's updates",
}
UNFINISHED = "unfinished"
_REMEDY = "restore it, or remove its folder"
_SETTINGS = {
    "sampler": str,
    "metric": str,
    "seed": int,
    "parameters": {str: object},
    "log_keys": [str],
}
_TRIAL = {"number": int, "overrides": {str: str}, "config": object}
_BEST_FIRST = (Status.DONE, Status.PRUNED, UNFINISHED, Status.DIVERGED, Status.FAILED)


class Trial(NamedTuple):
    """One combination of a sweep."""

    number: int  # from 0; names the folder
    folder: AnyPath  # its run_dir
    overrides: dict[str, str]  # swept key to the text of its value
    # every key to its text; None for a combination that the config refused
    config: dict[str, str] | None

    @property
    def stated(self) -> list[str]:
        return [f"{key}={text}" for key, text in self.overrides.items()]

    @property
    def title(self) -> str:
        return " ".join(self.stated)

    @property
    def is_finished(self) -> bool:
        return (self.folder / OUTCOME_FILE).exists()


class Result(NamedTuple):
    """How a trial ended."""

    trial: Trial
    status: str  # the status of its outcome, or `unfinished`
    reason: str  # one line, "" for a trial that is done or unfinished
    # the metric (so far, if pruned or unfinished); None if the trial diverged or failed
    value: float | None
    steps: int  # updates that it recorded
    tokens: int  # slots of these updates
    # its metric after the tokens of the shortest finished trial
    at_equal_tokens: float | None = None


def metric_value(records: Sequence[Record], metric: str) -> float | None:
    """Returns the metric of a run as `SWEEP_METRICS` defines it; None if it is missing or not
    finite.
    """
    if metric == Metric.EVAL_LOSS:
        evals = [record[metric] for record in records if metric in record]
        return evals[-1] if evals else None
    last = records[-max(1, len(records) // 10) :]
    losses = [record[metric] for record in last if not is_weightless(record)]
    return None if not losses or None in losses else sum(losses) / len(losses)


@dataclasses.dataclass(frozen=True)
class SweepFolder:
    """The folder of a sweep."""

    path: AnyPath

    @property
    def is_sweep(self) -> bool:
        return (self.path / "sweep.json").is_file()

    @property
    def base(self) -> AnyPath:
        return self.path / "base.yml"

    def read(self) -> dict[str, Any]:
        """Returns the definition: `sampler`, `metric`, `seed`, `parameters`, `log_keys`; {} for a
        new folder.
        """

        def parse(settings: dict[str, Any]) -> dict[str, Any]:
            checked(settings, _SETTINGS)
            if settings["metric"] not in SWEEP_METRICS:
                raise ValueError(f"metric is not one of {', '.join(SWEEP_METRICS)}")
            return settings

        return read_json(self.path / "sweep.json", _REMEDY, parse) or {}

    def write(self, settings: Mapping[str, object]) -> None:
        write_json(self.path / "sweep.json", settings)

    def trial_folder(self, number: int) -> AnyPath:
        return self.path / "trials" / f"{number:04d}"

    def trials(self) -> list[Trial]:
        """Returns the recorded trials, by number."""
        files = self.path.glob("trials/*/trial.json")
        trials = [
            recorded
            for file in files
            if (recorded := read_json(file, _REMEDY, partial(_trial, file.parent)))
        ]
        return sorted(trials, key=lambda trial: trial.number)

    def add(self, number: int, overrides: dict[str, str], config: dict[str, str] | None) -> Trial:
        """Records a trial before it starts."""
        trial = Trial(number, self.trial_folder(number), overrides, config)
        trial.folder.mkdir(parents=True, exist_ok=True)
        write_json(
            trial.folder / "trial.json",
            {"number": number, "overrides": overrides, "config": config},
        )
        return trial

    def finish(self, trial: Trial, status: str, reason: str = "") -> None:
        """Records the end of a trial, which is not started again."""
        write_outcome(trial.folder, RecordedOutcome(Status(status), reason))

    def result(self, trial: Trial, metric: str) -> Result:
        """Returns how a trial ended, or how far it is."""
        return self._result(trial, metric, scan_metrics(trial.folder).records)

    def _result(self, trial: Trial, metric: str, records: Sequence[Record]) -> Result:
        status, reason = read_outcome(trial.folder) or (UNFINISHED, "")
        value = metric_value(records, metric)
        if status == Status.DONE and value is None:
            status, reason = _without_value(records, metric)
        if status in (Status.DIVERGED, Status.FAILED):
            value = None
        tokens = records[-1][Metric.TOKENS_SEEN] if records else 0
        return Result(trial, status, reason, value, len(records), tokens)

    def results(self, metric: str) -> list[Result]:
        """Returns every trial's result, best first; trials that are not done come last."""

        def rank(result: Result) -> tuple[int, float]:
            return _BEST_FIRST.index(
                result.status
            ), math.inf if result.value is None else result.value

        def compared(result: Result, records: Sequence[Record]) -> Result:
            if result.status != Status.DONE:
                return result
            upto = [record for record in records if record[Metric.TOKENS_SEEN] <= fewest]
            return result._replace(at_equal_tokens=metric_value(upto, metric))

        read = [(trial, scan_metrics(trial.folder).records) for trial in self.trials()]
        results = [self._result(trial, metric, records) for trial, records in read]
        done = {result.tokens for result in results if result.status == Status.DONE}
        fewest = min(done, default=0)
        if len(done) > 1:
            results = [
                compared(result, records)
                for result, (_, records) in zip(results, read, strict=True)
            ]
        return sorted(results, key=rank)

    def to_dict(self) -> dict[str, Any]:
        """Returns the sweep as plain data: its settings, folder, the meaning of its metric, and its
        trials.

        Values of keys that take numbers are numbers.
        """
        settings = self.read()
        results = self.results(settings["metric"])
        best = results[0].trial.overrides if results and results[0].status == Status.DONE else {}
        return settings | {
            "parameters": {
                key: _plain_space(key, space) for key, space in settings["parameters"].items()
            },
            "sweep_dir": str(self.path),
            "at_the_edge": at_the_edge(settings["parameters"], best),
            "metric_meaning": SWEEP_METRICS[settings["metric"]],
            "trials": [
                {
                    "number": r.trial.number,
                    "value": r.value,
                    "overrides": {
                        key: _plain(key, text) for key, text in r.trial.overrides.items()
                    },
                    "value_at_equal_tokens": r.at_equal_tokens,
                    "steps": r.steps,
                    "tokens": r.tokens,
                    "status": str(r.status),
                    "reason": r.reason,
                }
                for r in results
            ],
        }


def at_the_edge(parameters: Mapping[str, Any], best: Mapping[str, str]) -> list[str]:
    """Returns a sentence for every key whose value in the best trial is at an end of its swept
    space.

    In a range that is the outer twentieth, of its logarithm where the range is logarithmic; in a
    list of at least two numbers it is the smallest or the largest.
    """
    sentences = []
    for key, text in best.items():
        space, value = parameters.get(key), _plain(key, text)
        if isinstance(value, bool | str | None):
            continue
        end = _end_of(key, space, float(value))
        if end:
            sentences.append(
                f"the best trial has {key}={text}, the {end}: better ones may lie beyond it"
            )
    return sentences


def _end_of(key: str, space: object, value: float) -> str:
    """Returns the end of a space at which a value is; "" inside of it."""
    if isinstance(space, dict):
        numbers = [_plain(key, space["low"]), value, _plain(key, space["high"])]
        what = "its range"
    elif isinstance(space, list):
        numbers, what = [_plain(key, text) for text in space], "its list"
    else:
        return ""
    known = [
        float(number)
        for number in numbers
        if isinstance(number, int | float) and not isinstance(number, bool)
    ]
    low, high = min(known, default=0.0), max(known, default=0.0)
    if low == high:
        return ""
    place = (value - low) / (high - low)
    if isinstance(space, dict) and space.get("log") and low > 0:
        place = math.log(value / low) / math.log(high / low)
    margin = 0.05 if isinstance(space, dict) else 0.0
    if place <= margin:
        return f"smallest of {what}" if not margin else f"low end of {what}"
    return (
        "" if place < 1 - margin else f"largest of {what}" if not margin else f"high end of {what}"
    )


def _plain_space(key: str, space: object) -> object:
    """Returns the swept values of a key as plain data, numbers as numbers."""
    if isinstance(space, list):
        return [_plain(key, text) for text in space]
    if isinstance(space, dict):
        return {
            name: _plain(key, text) if isinstance(text, str) else text
            for name, text in space.items()
        }
    return space


def _plain(key: str, text: str) -> bool | int | float | str | None:
    """Returns the value of an override as JSON has it; the text of a fraction that no float is, and
    of other texts.
    """
    if key not in KEYS or KEYS[key].kind not in (*NUMBERS, "bool"):
        return text
    try:
        value = KEYS[key].read(text)
    except ConfigError:  # of another version's sweep
        return text
    return text if isinstance(value, Fraction) else value


def _trial(folder: AnyPath, content: Any) -> Trial:
    checked(content, _TRIAL)
    if content["config"] is not None:
        checked(content["config"], {str: str}, "config")
    return Trial(content["number"], folder, content["overrides"], content["config"])


def _without_value(records: Sequence[Mapping[str, object]], metric: str) -> tuple[Status, str]:
    if records and metric in records[-1]:
        return Status.DIVERGED, f"its last {metric} is not finite"
    hint = "; is anything held out?" if metric == Metric.EVAL_LOSS else ""
    return Status.FAILED, f"its metrics.jsonl holds no {metric}{hint}"
