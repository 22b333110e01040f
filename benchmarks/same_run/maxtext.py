"""MaxText's training, from a command line of its own, and its checkpoints as arrays of ours."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.same_run import ours
from benchmarks.same_run.cases import PRE_TRAINING, Case, Rows, make_rows
from benchmarks.same_run.environments import run
from benchmarks.same_run.figures import Update
from benchmarks.same_run.run_pair import Pair
from maxbatch.around.maxtext.checkpoints.reading import MaxTextCheckpoint

_PROGRAM = Path(__file__).with_name("maxtext_program.py")
_TRAINERS = "maxtext.trainers"
MACHINE = {  # what keeps it on this machine and in float32
    "run_name": "theirs",
    "hardware": "cpu",
    "skip_jax_distributed_system": "true",
    "override_model_config": "true",
    "dtype": "float32",
    "weight_dtype": "float32",
    "matmul_precision": "highest",
    "attention": "dot_product",
    "dataset_type": "synthetic",
    "enable_checkpointing": "true",
    "async_checkpointing": "false",
    "checkpoint_period": "1000",
}


def train_both(case: Case, python: Path, folder: Path, updates: int, seed: int) -> Pair:
    """Runs MaxText on random rows, imports its command, and runs ours from MaxText's start on the
    same rows.

    Our rows have one token more than MaxText's `max_target_length`: its rows are inputs and the
    targets that follow them, ours are tokens. The last one is no input there, so here it has no
    segment.
    """
    settings = {
        **MACHINE,
        "steps": str(updates),
        "max_target_length": str(case.length),
        **case.settings,
    }
    texts = [f"{name}={value}" for name, value in settings.items()]
    import_words(texts, folder / "imported.yml", case.module)

    batch = int(settings["per_device_batch_size"]) * int(
        settings.get("gradient_accumulation_steps", "1")
    )
    rows = make_rows(case.rows, batch * updates, case.length, seed)
    np.savez(folder / "rows.npz", **rows)
    theirs = train(texts, python, folder, case.module, case.whole_embedding)

    length = f"max_target_length={case.length + 1}"
    if case.taken_over:
        begins = folder / "theirs" / "checkpoints" / str(case.taken_over - 1)
        begin = [f"load_full_state_path={begins}", f"global_batch_size={batch}"]
    else:
        begins = folder / "start" / "0"
        begin = [f"load_parameters_path={begins}"]
    keys = [length, *begin, "tokenizer_type=byte", "tokenizer_path="]  # rows need no other
    our_run = ours.train(folder / "imported.yml", folder / "ours", as_ours(rows), keys)
    model, state = our_run.config.model, ours.abstract(our_run.config)
    start = MaxTextCheckpoint(begins).open(model, state.params)(state.params)
    end = MaxTextCheckpoint(folder / "theirs")
    squares = None
    if case.settings.get("opt_type", "adamw") == "adamw":
        squares = ours.squares_of(end.read_state(model, state.params, state.opt_state)[1])
    our_end = ours.end_of(our_run, state.params)
    their_end = ours.arrays_of(end.open(model, state.params)(state.params))
    theirs = theirs[case.taken_over :]
    return Pair(our_run.updates, theirs, ours.arrays_of(start), our_end, their_end, squares, texts)


def import_words(texts: Sequence[str], output: Path, module: str = PRE_TRAINING) -> None:
    """Imports a command of MaxText."""
    command = output.with_name("maxtext.sh")
    command.write_text(shlex.join(["python3", "-m", f"{_TRAINERS}.{module}", *texts]) + "\n")
    ours.import_config("maxtext", command, output)


def train(
    texts: Sequence[str],
    python: Path,
    folder: Path,
    module: str = PRE_TRAINING,
    has_whole_embedding: bool = False,
    name: str = "theirs",
) -> list[Update]:
    """Runs a command of MaxText on the rows in the folder; returns its updates.

    Its first parameters are in `start` of the folder, its checkpoints in a folder of the run's
    name.
    """
    begins = "start" if name == "theirs" else f"{name}_start"
    whole = ["--whole-embedding"] if has_whole_embedding else []
    places = [
        f"run_name={name}",
        f"base_output_directory={folder}",
        f"metrics_file={folder}/{name}.jsonl",
    ]
    words = [text for text in texts if not text.startswith("run_name=")]
    program = [python, "-P", _PROGRAM, *whole, folder / "rows.npz", folder / begins]
    run([*program, f"{_TRAINERS}.{module}", *words, *places], folder / f"{name}.log")
    lines = (folder / f"{name}.jsonl").read_text().splitlines()
    return [_update(json.loads(line)) for line in lines]


def as_ours(rows: Rows) -> Rows:
    """Returns MaxText's rows as ours: its last token is a target alone."""
    segments = rows["segments"].copy()
    segments[:, -1] = 0
    return {**rows, "segments": segments}


def _update(line: dict[str, float]) -> Update:
    return Update(
        line["learning/lm_loss"] - line["learning/z_loss"],  # the tokens' alone
        line["learning/raw_grad_norm"],
        line["learning/current_learning_rate"],
    )
