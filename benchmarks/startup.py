"""(e) From the command to the end of its first update, with empty caches and with the previous
run's caches.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.commands import finish, start
from benchmarks.measurement import BenchmarkError, Measurement

BARS = {"cold": 15.0, "warm": 10.0}
_POLL_S = 0.01
_TIMEOUT_S = 300.0
_OVERRIDES = ("steps=1", "eval_interval=-1", "generate_prompt=")
_QUICK = ("dataset_type=synthetic", "base_num_decoder_layers=1")


def measure(quick: bool) -> list[Measurement]:
    """Measures cold and warm starts in seconds, by phase."""
    overrides = (*_OVERRIDES, *(_QUICK if quick else ()))
    seconds: dict[str, list[float]] = {"cold": [], "warm": []}
    phases: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(1 if quick else 3):
            cache = Path(folder, f"cache{repeat}")
            phases_cache = Path(folder, f"phases-cache{repeat}")
            for state in ("cold", "warm"):
                run_dir = Path(folder, f"{state}{repeat}")
                seconds[state].append(_seconds_to_first_update(run_dir, cache, overrides))
                phases[state].append(_phases(run_dir, phases_cache, overrides))
    results = []
    for state, values in seconds.items():
        name = f"command to end of first update, {state}"
        value = statistics.median(values)
        results.append(Measurement(name, value, "s", samples=values, bar=BARS[state]))
        results += [
            Measurement(f"  {state}: {phase}", statistics.median(times), "s", samples=times)
            for phase in phases[state][0]
            for times in [[repeat[phase] for repeat in phases[state]]]
        ]
    return results


def _seconds_to_first_update(run_dir: Path, cache: Path, overrides: tuple[str, ...]) -> float:
    log = run_dir.with_suffix(".log")
    metrics = run_dir / "metrics.jsonl"
    began = time.perf_counter()
    process = start("maxbatch", "train", *overrides, f"run_dir={run_dir}", log=log, cache=cache)
    while not (metrics.exists() and metrics.read_bytes().endswith(b"\n")):
        if process.poll() is not None:
            break
        if time.perf_counter() - began > _TIMEOUT_S:
            process.kill()
            raise BenchmarkError(f"no update within {_TIMEOUT_S:.0f} s")
        time.sleep(_POLL_S)
    seconds = time.perf_counter() - began
    finish(process, log)
    if not metrics.exists():
        raise BenchmarkError(
            f"the command took no update:\n{log.read_text(errors='replace')[-2000:]}"
        )
    return seconds


def _phases(run_dir: Path, cache: Path, overrides: tuple[str, ...]) -> dict[str, float]:
    """Seconds per phase of the same start, in a process of its own."""
    log, output = run_dir.with_suffix(".phases.log"), run_dir.with_suffix(".phases.json")
    arguments = (str(output), str(time.time()), *overrides, f"run_dir={run_dir}-phases")
    finish(start("benchmarks.startup_phases", *arguments, log=log, cache=cache), log)
    return json.loads(output.read_text())
