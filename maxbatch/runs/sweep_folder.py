"""What a sweep leaves on disk: a folder per trial, each an ordinary run, with what was tried and how it ended.

    sweep_dir/sweep.json            what is swept: sampler, metric, seed, parameters
    sweep_dir/base.yml              the keys that all trials share
    sweep_dir/trials/0007/          run_dir of trial 7
        trial.json                  its overrides and its resolved config
        log.txt                     what the training printed
        outcome.json                how it ended, once it did

Everything that says how far a sweep is lies here, so that a sweep that was killed knows it as well as one that was
not. Values of the metric are read from the trials' own `metrics.jsonl` and stored nowhere else.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from maxbatch.config.keys import Key
from maxbatch.runs.metrics import read_metrics
from maxbatch.system.atomic_files import write_atomically
from maxbatch.system.errors import ConfigError
from maxbatch.system.locks import take_lock

METRICS = {
    "eval_loss": "eval_loss, the last one of the trial",
    "loss": "loss, mean of the last tenth of the trial's updates",
}


@dataclasses.dataclass(frozen=True)
class Trial:
    """One combination of a sweep.

    Attributes:
      number: from 0 on; names the folder.
      folder: its run_dir.
      overrides: swept key to the text of its value.
      config: every key to its text as the config resolved it; None where the config refused the combination.
    """

    number: int
    folder: Path
    overrides: dict[str, str]
    config: dict[str, str] | None

    @property
    def title(self) -> str:
        return " ".join(f"{key}={text}" for key, text in self.overrides.items())


@dataclasses.dataclass(frozen=True)
class Result:
    """How a trial ended.

    Attributes:
      trial: the trial.
      status: `done`, `diverged` (its loss is not finite), `failed`, `pruned`, or `unfinished`.
      reason: one line, for what is not done.
      value: the metric; of a pruned or unfinished trial what it had reached; None of one that diverged or failed.
      steps: updates that it recorded.
    """

    trial: Trial
    status: str
    reason: str
    value: float | None
    steps: int


def metric_value(records: Sequence[Mapping[str, Any]], metric: str) -> float | None:
    """Return the metric of a run (`METRICS` says what that is); None where there is none or it is not finite."""
    if metric == "eval_loss":
        evals = [record["eval_loss"] for record in records if "eval_loss" in record]
        return evals[-1] if evals else None
    losses = [record["loss"] for record in records[-max(1, len(records) // 10) :]]
    if not losses or any(loss is None for loss in losses):
        return None
    return sum(losses) / len(losses)


@dataclasses.dataclass(frozen=True)
class SweepFolder:
    """The folder of a sweep."""

    path: Path

    @classmethod
    def is_one(cls, path: Path) -> bool:
        """Whether a folder is that of a sweep."""
        return (path / "sweep.json").is_file()

    @property
    def base(self) -> Path:
        """The config file that all trials share."""
        return self.path / "base.yml"

    def read(self) -> dict[str, Any]:
        """Return what is swept: `sampler`, `metric`, `seed`, `parameters`; empty for a new folder."""
        return _read_json(self.path / "sweep.json") or {}

    def write(self, settings: Mapping[str, Any]) -> None:
        write_atomically(self.path / "sweep.json", json.dumps(settings, indent=1) + "\n")

    def folder_of(self, number: int) -> Path:
        return self.path / "trials" / f"{number:04d}"

    def trials(self) -> list[Trial]:
        """Return the trials that there are, by number."""
        trials = []
        for path in self.path.glob("trials/*/trial.json"):
            found = _read_json(path)
            if found is not None:
                trials.append(Trial(found["number"], path.parent, found["overrides"], found["config"]))
        return sorted(trials, key=lambda trial: trial.number)

    def add(self, number: int, overrides: dict[str, str], config: dict[str, str] | None) -> Trial:
        """Record a trial before it starts."""
        trial = Trial(number, self.folder_of(number), overrides, config)
        trial.folder.mkdir(parents=True, exist_ok=True)
        record = {"number": number, "overrides": overrides, "config": config}
        write_atomically(trial.folder / "trial.json", json.dumps(record, indent=1) + "\n")
        return trial

    def finish(self, trial: Trial, status: str, reason: str = "") -> None:
        """Record how a trial ended; it is not started again."""
        write_atomically(
            trial.folder / "outcome.json", json.dumps({"status": status, "reason": reason}, indent=1) + "\n"
        )

    def is_finished(self, trial: Trial) -> bool:
        return (trial.folder / "outcome.json").exists()

    def result(self, trial: Trial, metric: str) -> Result:
        """Return how a trial ended or how far it is."""
        outcome = _read_json(trial.folder / "outcome.json") or {"status": "unfinished", "reason": ""}
        status, reason = outcome["status"], outcome["reason"]
        records = read_metrics(trial.folder)
        value = metric_value(records, metric)
        if status == "done" and value is None:
            status, reason = _without_value(records, metric)
        if status in ("diverged", "failed"):
            value = None
        return Result(trial, status, reason, value, len(records))

    def results(self, metric: str) -> list[Result]:
        """Return every trial's result, the best first, those that are not done last."""
        results = [self.result(trial, metric) for trial in self.trials()]
        order = ("done", "pruned", "unfinished", "diverged", "failed")

        def rank(result: Result) -> tuple[int, float, int]:
            value = float("inf") if result.value is None else result.value
            return order.index(result.status), value, result.trial.number

        return sorted(results, key=rank)


def claim(trial: Trial) -> BinaryIO | None:
    """Return the open claim on a trial, or None while another process holds it.

    It goes with the processes that hold it open, also when they are killed.
    """
    return take_lock(trial.folder / ".claim")


def config_texts(config: Mapping[str, Any], keys: Mapping[str, Key]) -> dict[str, str]:
    """Return a config as texts, every key but run_dir: what a trial is compared by."""
    return {name: key.write(config[name]) for name, key in keys.items() if name != "run_dir"}


def _without_value(records: Sequence[Mapping[str, Any]], metric: str) -> tuple[str, str]:
    if records and (metric == "loss" or "eval_loss" in records[-1]):
        return "diverged", f"its last {metric} is not finite"
    return "failed", f"its metrics.jsonl holds no {metric}" + (
        "; is anything held out?" if metric == "eval_loss" else ""
    )


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); restore it, or remove its folder") from None
