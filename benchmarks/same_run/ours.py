"""Our side: another program's config as `maxbatch import` converts it, trained on given rows from a
given start.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import jax
import numpy as np

import maxbatch
from benchmarks.measurement import BenchmarkError
from benchmarks.same_run.cases import Rows
from benchmarks.same_run.figures import Update
from benchmarks.same_run.given_completions import Completions, sampler_of
from maxbatch.config.config import Config
from maxbatch.kinds.prompt import rollout
from maxbatch.kinds.prompt.run import train_policy
from maxbatch.model.parameters import parameter_path
from maxbatch.parallel.mesh import make_mesh
from maxbatch.parallel.trees import State
from maxbatch.run.session import Outcome
from maxbatch.run.weights.parameters import open_parameters, open_source
from maxbatch.update.state import TrainState, abstract_state


class Trained(NamedTuple):
    """A run of ours."""

    config: Config
    updates: list[Update]
    path: str  # of its last checkpoint


def import_config(form: str, file: Path, output: Path) -> None:
    """Runs `maxbatch import`; raises BenchmarkError if it refuses the file."""
    command = [sys.executable, "-m", "maxbatch", "import", form, file, "--output", output]
    done = subprocess.run(
        [*map(str, command), "--devices", "1"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise BenchmarkError(
            f"maxbatch import {form} ended with {done.returncode}: {done.stderr.strip()}"
        )


def train(imported: Path, run_dir: Path, rows: Rows | None, overrides: Sequence[str]) -> Trained:
    """Trains what an import wrote, on given rows or on its own data."""
    config = _config(imported, run_dir, overrides)
    stream = rows and [
        {name: array[row] for name, array in rows.items()} for row in range(len(rows["tokens"]))
    ]
    return _trained(config, maxbatch.train(config, stream=stream, devices=jax.devices()[:1]))


def train_on_completions(
    imported: Path, run_dir: Path, completions: Completions, overrides: Sequence[str]
) -> Trained:
    """Trains the policy of an import on given completions."""
    config = _config(imported, run_dir, overrides)
    with mock.patch.object(rollout, "Sampler", sampler_of(completions)):
        return _trained(config, train_policy(config, jax.devices()[:1]))


def _config(imported: Path, run_dir: Path, overrides: Sequence[str]) -> Config:
    keys = [f"run_dir={run_dir}", "enable_checkpointing=true", "log_period=1000", *overrides]
    return maxbatch.load_config(str(imported), overrides=keys)


def _trained(config: Config, outcome: Outcome) -> Trained:
    updates = [
        Update(line["loss"], line["grad_norm"], line["learning_rate"]) for line in outcome.history
    ]
    return Trained(config, updates, f"{config.run_dir}/checkpoints/{outcome.position.step}")


def abstract(config: Config) -> TrainState:
    """Returns the shapes of a run's state, on one device."""
    return abstract_state(config.update, make_mesh(config, jax.devices()[:1]))


def arrays_of(params: State) -> dict[str, np.ndarray]:
    """Returns parameters by their names."""
    return {
        ".".join(parameter_path(keys)): np.asarray(value)
        for keys, value in jax.tree.leaves_with_path(params)
    }


def written_updates(file: Path) -> list[Update]:
    """Reads a file with a JSON object per update: loss, grad_norm, rate."""
    return [Update(**json.loads(line)) for line in file.read_text().splitlines()]


def end_of(trained: Trained, abstract_params: State) -> dict[str, np.ndarray]:
    """Returns the parameters of a run's last checkpoint, by their names."""
    read = open_parameters(open_source(trained.path), trained.config.model, abstract_params)
    return arrays_of(read(abstract_params))


def squares_of(opt_state: object) -> dict[str, np.ndarray]:
    """Returns Adam's second moments by parameter."""
    squares = {}
    for keys, value in jax.tree.leaves_with_path(opt_state):
        if any(getattr(entry, "name", "") == "nu" for entry in keys):
            squares[".".join(parameter_path(keys))] = np.asarray(value)
    return squares
