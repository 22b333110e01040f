"""Which trials a sweep has, and which of them may start now."""

from __future__ import annotations

import itertools
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

from maxbatch.commands.sweep.sweep_file import SweepFile
from maxbatch.config.loading import keys, load_config
from maxbatch.config.values import shown
from maxbatch.plan.batch import check_batch_keys
from maxbatch.runs.sweep_folder import Result, SweepFolder, Trial, claim, config_texts
from maxbatch.system.errors import ConfigError

MOST_COMBINATIONS = 100_000
_Overrides = dict[str, str]


class Claimed(NamedTuple):
    """A trial that this process, and no other, may run."""

    trial: Trial
    hold: IO[bytes]  # open for as long as it runs


class TrialSource(Protocol):
    """Where a sweep's next trial comes from."""

    def next(self) -> Claimed | None:
        """Return a trial to start now, or None."""
        ...

    def is_exhausted(self) -> bool:
        """Whether there is nothing left to start, now or later."""
        ...

    def should_prune(self, trial: Trial) -> str | None:
        """Return why a running trial is not worth its end, or None."""
        ...

    def finished(self, result: Result) -> None:
        """Take note of how a trial ended."""
        ...


class Resolver:
    """Resolves overrides over a sweep's base.

    Raises:
      ConfigError: the base cannot be read.
    """

    def __init__(self, sweep: SweepFile) -> None:
        self._sweep = sweep

    def __call__(self, overrides: _Overrides) -> dict[str, str]:
        """Return the config of a combination as texts.

        Raises:
          ConfigError: the config refuses it.
        """
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "base.yml"
            path.write_text(self._sweep.base, encoding="utf-8")
            try:
                config = load_config(path, [f"{key}={text}" for key, text in overrides.items()])
                check_batch_keys(config)
            except ConfigError as error:
                place = rf"(config file )?{re.escape(str(path))}(:\d+)?"
                raise ConfigError(re.sub(place, f"{self._sweep.path}, base", str(error))) from None
        if self._sweep.metric == "eval_loss" and config.eval_interval == -1:
            raise ConfigError(
                f"{self._sweep.path}: metric=eval_loss needs evals, but eval_interval=-1; works: metric: loss"
            )
        return config_texts(config, keys())


def check_settings(sweep: SweepFile, folder: SweepFolder) -> None:
    """Compare a sweep file with the records of its folder and write what it says.

    Raises:
      ConfigError: the trials that are there are not of this sweep.
    """
    settings = {
        "sampler": sweep.sampler,
        "metric": sweep.metric,
        "seed": sweep.seed,
        "parameters": {parameter.key.name: parameter.to_json() for parameter in sweep.parameters},
        "log_keys": [parameter.key.name for parameter in sweep.parameters if parameter.is_log],
    }
    before = folder.read()
    for name in ("sampler", "seed", "metric") if before else ():
        free = (name == "metric" and sweep.sampler != "optuna") or (
            name == "seed" and sweep.sampler == "grid"
        )
        if before[name] != settings[name] and not free:
            raise _changed(sweep, f"{name}: {before[name]}, not {settings[name]}")
    was: dict[str, Any] = before.get("parameters", {})
    now: dict[str, Any] = settings["parameters"]  # type: ignore[assignment]
    for key in dict.fromkeys([*was, *now]) if before else ():
        if key not in was or key not in now:
            raise _changed(sweep, f"parameters {'with' if key in was else 'without'} {key}")
        if (
            was[key] != now[key] and sweep.sampler != "grid"
        ):  # a grid may grow; its trials are compared one by one
            raise _changed(sweep, f"{key}: {_shown(was[key])}, not {_shown(now[key])}")
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.write(settings)


def _shown(parameter: Any) -> str:
    return shown(str(parameter).replace("'", ""))


def _changed(sweep: SweepFile, difference: str) -> ConfigError:
    return ConfigError(
        f"sweep_dir={sweep.sweep_dir}: was made with {difference}; give another sweep_dir, or what it was made with"
    )


def check_config(sweep: SweepFile, trial: Trial, config: dict[str, str]) -> None:
    """Compare a recorded trial's config with what the sweep makes of it now.

    Raises:
      ConfigError: they differ; names the first key that does.
    """
    for key, text in (trial.config or {}).items():
        if config.get(key, text) != text:
            raise _changed(sweep, f"{key}={shown(text)}, not {shown(config[key])} (trial {trial.number})")


class PlannedTrials:
    """The trials of a grid or of the random sampler: all are known, recorded and checked before one starts.

    Raises:
      ConfigError: the records in sweep_dir are of another sweep, or the config refuses every combination.
    """

    def __init__(self, sweep: SweepFile, folder: SweepFolder) -> None:
        combinations = _grid(sweep) if sweep.sampler == "grid" else _random(sweep)
        recorded = folder.trials()
        found = _matched(sweep, combinations, recorded)
        resolve = Resolver(sweep)
        configs = [_try(resolve, overrides) for overrides in combinations]
        refusals = [config for config in configs if isinstance(config, ConfigError)]
        if len(refusals) == len(configs):
            raise ConfigError(f"{refusals[0]}" + (
                f" (so is every one of the {len(configs)} combinations)" if len(configs) > 1 else ""))  # fmt: skip
        for trial, config in zip(found, configs, strict=True):
            if trial is not None and isinstance(config, dict):
                check_config(sweep, trial, config)
        check_settings(sweep, folder)
        self._folder, self._trials = folder, [trial for trial in found if trial]
        number = max((trial.number for trial in recorded), default=-1) + 1
        for trial, config, overrides in zip(found, configs, combinations, strict=True):
            if trial is None:
                refused = isinstance(config, ConfigError)
                trial = folder.add(number, overrides, None if refused else config)  # type: ignore[arg-type]
                self._trials.append(trial)
                number += 1
            if isinstance(config, ConfigError) and not folder.is_finished(trial):
                folder.finish(trial, "failed", str(config))
        self._left = [trial for trial in self._trials if not folder.is_finished(trial)]

    def next(self) -> Claimed | None:
        return claim_first(self._folder, self._left)

    def is_exhausted(self) -> bool:
        self._left = [trial for trial in self._left if not self._folder.is_finished(trial)]
        return not self._left

    def should_prune(self, trial: Trial) -> str | None:
        return None

    def finished(self, result: Result) -> None:
        pass


def claim_first(folder: SweepFolder, trials: Sequence[Trial]) -> Claimed | None:
    """Return the first trial that is neither finished nor claimed by another process or by this one."""
    for trial in trials:
        if folder.is_finished(trial) or (hold := claim(trial)) is None:
            continue
        if not folder.is_finished(trial):  # it may have ended just before it was let go
            return Claimed(trial, hold)
        hold.close()
    return None


def _grid(sweep: SweepFile) -> list[_Overrides]:
    names = [parameter.key.name for parameter in sweep.parameters]
    axes = [parameter.grid() for parameter in sweep.parameters]
    count = 1
    for axis in axes:
        count *= len(axis)
    if count > MOST_COMBINATIONS:
        raise ConfigError(
            f"{sweep.path}: parameters make {count:,} combinations, more than {MOST_COMBINATIONS:,}; "
            "works: sampler: random"
        )
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*axes)]


def _random(sweep: SweepFile) -> list[_Overrides]:
    return [draw(sweep, number) for number in range(sweep.trials or 0)]


def draw(sweep: SweepFile, number: int) -> _Overrides:
    """Return the random sampler's combination of a number: a function of the seed and the number."""
    return {parameter.key.name: parameter.draw(sweep.seed, number) for parameter in sweep.parameters}


def _matched(
    sweep: SweepFile, combinations: Sequence[_Overrides], recorded: Sequence[Trial]
) -> list[Trial | None]:
    """Return the record of each combination, None for a new one; a grid may grow, trials may become more."""
    if sweep.sampler == "grid":
        by_values = {tuple(sorted(trial.overrides.items())): trial for trial in recorded}
        found = [by_values.pop(tuple(sorted(overrides.items())), None) for overrides in combinations]
        for trial in by_values.values():
            raise _changed(sweep, f"{trial.title} (trial {trial.number}), which parameters no longer hold")
        return found
    if len(recorded) > len(combinations):
        raise _changed(sweep, f"{len(recorded)} trials, not {len(combinations)} (more are welcome)")
    for trial in recorded:
        if trial.overrides != combinations[trial.number]:
            raise _changed(sweep, f"{trial.title} as trial {trial.number}, where parameters and seed now say "
                                  + " ".join(f"{k}={v}" for k, v in combinations[trial.number].items()))  # fmt: skip
    by_number = {trial.number: trial for trial in recorded}
    return [by_number.get(number) for number in range(len(combinations))]


def _try(
    resolve: Callable[[_Overrides], dict[str, str]], overrides: _Overrides
) -> dict[str, str] | ConfigError:
    try:
        return resolve(overrides)
    except ConfigError as error:
        return error
