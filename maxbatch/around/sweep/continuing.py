"""Checks that a sweep matches its folder, so that it can resume."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

from maxbatch.around.sweep.folder import SweepFolder, Trial
from maxbatch.around.sweep.sweep_file import SweepFile
from maxbatch.config.values import shown
from maxbatch.system.errors import ConfigError


def check_settings(sweep: SweepFile, folder: SweepFolder) -> None:
    """Compares a sweep file with its folder, refuses another sweep, and records the file's
    settings.
    """
    settings: dict[str, object] = {
        "sampler": sweep.sampler,
        "metric": sweep.metric,
        "seed": sweep.seed,
        "parameters": {parameter.key.name: parameter.to_json() for parameter in sweep.parameters},
        "log_keys": [parameter.key.name for parameter in sweep.parameters if parameter.is_log],
    }
    if before := folder.read():
        _compare(sweep, before, settings)
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.write(settings)


def _compare(sweep: SweepFile, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    fixed = {
        "grid": ("sampler",),
        "random": ("sampler", "seed"),
        "optuna": ("sampler", "seed", "metric"),
    }
    for name in fixed[sweep.sampler]:
        if before[name] != now[name]:
            raise _changed(sweep, f"{name}: {before[name]}, not {now[name]}")
    old, new = before["parameters"], now["parameters"]
    for key in dict.fromkeys([*old, *new]):
        if key not in old or key not in new:
            raise _changed(sweep, f"parameters {'with' if key in old else 'without'} {key}")
        # A grid may grow; its trials are compared one by one.
        if old[key] != new[key] and sweep.sampler != "grid":
            was, is_now = (
                shown(str(parameters[key]).replace("'", "")) for parameters in (old, new)
            )
            raise _changed(sweep, f"{key}: {was}, not {is_now}")


def check_recorded(
    sweep: SweepFile, recorded: Sequence[Trial], grid: Container[frozenset[tuple[str, str]]] | None
) -> None:
    """Refuses recorded trials that the sweep now makes differently; `grid` holds the items of its
    combinations.
    """
    for trial in recorded:
        if grid is not None and frozenset(trial.overrides.items()) not in grid:
            raise _changed(
                sweep, f"{trial.title} (trial {trial.number}), which parameters no longer hold"
            )
    if sweep.sampler == "random" and len(recorded) > (sweep.trials or 0):
        raise _changed(
            sweep, f"{len(recorded)} trials, not {sweep.trials}, but trials may only be raised"
        )
    for trial in recorded:
        config = sweep.resolved(trial.overrides) if trial.config is not None else {}
        for key, text in (trial.config or {}).items():
            if config.get(key, text) != text:
                raise _changed(
                    sweep, f"{key}={shown(text)}, not {shown(config[key])} (trial {trial.number})"
                )


def _changed(sweep: SweepFile, difference: str) -> ConfigError:
    return ConfigError(
        f"sweep_dir={sweep.sweep_dir}: was made with {difference}; give another sweep_dir, or its "
        "settings"
    )
