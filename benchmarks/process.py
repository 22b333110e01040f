"""(n) `maxbatch train` as a process, against the hand-written update in a process of its own, in
turns.

The threads of a run (feed, records, placement) share the cores with its update: only the whole
process shows what they cost. `python -m benchmarks.process OUT.json MICRO_BATCHES UPDATES KEY=VALUE
...` is the hand-written side.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from benchmarks.commands import finish, metrics_of, start
from benchmarks.handwritten import Form, HandwrittenStep, parameters_of_trainer
from benchmarks.measurement import Measurement, ratio
from benchmarks.trainer import LEARNING_RATE, MODEL, QUICK_MODEL, RUN
from maxbatch.config.loading import load_config
from maxbatch.parallel.mesh import make_mesh
from maxbatch.update.state import abstract_state, init_state

BAR = 0.95
_DEVICES, _ROWS = 4, 2
_WARM_UP = 3  # updates that are not counted


def measure(quick: bool) -> list[Measurement]:
    """Ratios of tokens/s, the command over the hand-written update, at accumulation 1 and 4."""
    if quick:
        return [_ratio(1, QUICK_MODEL, turns=1, updates=5)]
    return [_ratio(1, MODEL, turns=5, updates=33), _ratio(4, MODEL, turns=5, updates=13)]


def _ratio(num_micro_batches: int, model: tuple[str, ...], turns: int, updates: int) -> Measurement:
    sides = {"hand-written": _seconds_by_hand, "command": _seconds_of_command}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    keys = (
        *model,
        f"per_device_batch_size={_ROWS}",
        f"gradient_accumulation_steps={num_micro_batches}",
    )
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(turns):
            for name, side in sides.items():
                seconds[name].append(
                    side(Path(folder, f"{name}{turn}"), num_micro_batches, updates, keys)
                )
    name = f"whole process, accumulation {num_micro_batches}"
    return ratio(name, seconds["hand-written"], seconds["command"], bar=BAR, sense="at least")


def _seconds_of_command(
    run_dir: Path, num_micro_batches: int, updates: int, keys: tuple[str, ...]
) -> float:
    """Returns the median seconds of an update of `maxbatch train`."""
    del num_micro_batches  # stands in the keys
    arguments = (
        *RUN,
        *keys,
        f"steps={updates}",
        f"run_dir={run_dir}",
        "--simulate-devices",
        str(_DEVICES),
    )
    log = run_dir.with_suffix(".log")
    finish(start("maxbatch", "train", *arguments, log=log, cache=run_dir.with_name("cache")), log)
    return statistics.median(record["step_time_s"] for record in metrics_of(run_dir)[_WARM_UP:])


def _seconds_by_hand(
    place: Path, num_micro_batches: int, updates: int, keys: tuple[str, ...]
) -> float:
    """Returns the median seconds of a hand-written update with the placement of its rows."""
    output, log = place.with_suffix(".json"), place.with_suffix(".log")
    arguments = (str(output), str(num_micro_batches), str(updates), *keys)
    finish(start("benchmarks.process", *arguments, log=log, cache=place.with_name("cache")), log)
    return statistics.median(json.loads(output.read_text())[_WARM_UP:])


def _update_by_hand(output: str, num_micro_batches: str, updates: str, *keys: str) -> None:
    """Writes the seconds of each update of the hand-written step on new random rows."""
    jax.config.update("jax_num_cpu_devices", _DEVICES)
    config = load_config(overrides=[*RUN, *keys])
    mesh = make_mesh(config)
    shape = (int(num_micro_batches), _ROWS * _DEVICES, config.max_target_length)
    params = parameters_of_trainer(
        jax.device_get(init_state(config.update, abstract_state(config.update, mesh)).params)
    )
    step = HandwrittenStep(params, mesh, Form(config.base_num_query_heads), shape, LEARNING_RATE)
    rng = np.random.default_rng(0)
    seconds = []
    for _ in range(int(updates)):
        began = time.perf_counter()
        tokens = rng.integers(0, config.vocab_size, shape, dtype=np.int32)
        weights = np.ones(shape, np.float32)
        weights[..., 0] = 0.0  # nothing comes before the first token of a row
        step({"tokens": tokens, "segments": np.ones_like(tokens), "weights": weights})
        seconds.append(time.perf_counter() - began)
    Path(output).write_text(json.dumps(seconds))


if __name__ == "__main__":
    _update_by_hand(*sys.argv[1:])
