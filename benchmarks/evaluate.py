"""(q) Tokens/s of `maxbatch evaluate` on a multiple choice, against `maxbatch score` on the same
texts, in turns.

Both sides begin with a model in memory and end with their figures. One renders, tokenises and
scores the documents of a task and computes its metrics; the other tokenises and scores one text per
choice. Programs are compiled before. Both must have the same accuracy. The model is tiny, so the
harness's work on the host dominates.
"""

from __future__ import annotations

import importlib.util
import json
import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import maxbatch
from benchmarks.measurement import BenchmarkError, Measurement, ratio, seconds_in_turns

BAR = 0.9
_CHOICES = 4
_RUN = (
    "steps=1",
    "warmup_steps_fraction=0",
    "per_device_batch_size=1",
    "eval_interval=-1",
    "generate_prompt=",
    "log_to=none",
)
_MODEL = ("model_name=tiny", "max_target_length=512")
_QUICK_MODEL = (
    "base_emb_dim=32",
    "base_mlp_dim=64",
    "base_num_decoder_layers=1",
    "max_target_length=512",
)


def measure(quick: bool) -> list[Measurement]:
    """Ratios of wall time and of CPU time; nothing without lm-evaluation-harness."""
    if importlib.util.find_spec("lm_eval") is None:
        print("benchmarks: evaluate: lm-eval is not installed: nothing is measured")
        return []
    if quick:
        return _measure(_QUICK_MODEL, documents=4, turns=1)
    return _measure(_MODEL, documents=64, turns=5)


def _measure(keys: tuple[str, ...], documents: int, turns: int) -> list[Measurement]:
    from maxbatch.around.harness.tasks import Tasks

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = maxbatch.load_config(overrides=[*keys, *_RUN, f"run_dir={folder / 'run'}"])
        maxbatch.train(config)
        model = maxbatch.load_model(folder / "run")
        asked = _documents(documents)
        tasks = Tasks([str(_written(folder, asked))], "--tasks ")
    texts = [one["text"] + choice for one in asked for choice in one["choices"]]
    figures: dict[str, float] = {}

    def evaluate() -> None:
        figures["evaluate"] = tasks.scores(model)["results"]["choice"]["acc,none"]

    def score() -> None:
        found = iter(model.score(texts).records)
        right = 0
        for one in asked:
            sums = [
                next(found).logprobs[-len(choice) :].sum(dtype=np.float64)
                for choice in one["choices"]
            ]
            right += int(np.argmax(sums)) == one["answer"]
        figures["score"] = right / len(asked)

    cpu: dict[str, list[float]] = {"score": [], "evaluate": []}

    def timed(name: str, side: Callable[[], None]) -> None:
        began = time.process_time()
        side()
        cpu[name].append(time.process_time() - began)

    sides = {"score": score, "evaluate": evaluate}
    for side in sides.values():
        side()
    if abs(figures["score"] - figures["evaluate"]) > 1e-9:
        raise BenchmarkError(f"not the same accuracy: {figures}")
    wall = seconds_in_turns(
        {name: partial(timed, name, side) for name, side in sides.items()}, turns
    )
    return [
        ratio(
            f"evaluate, tokens/s of {kind}, against score",
            s["score"],
            s["evaluate"],
            bar=BAR,
            sense="at least",
        )
        for kind, s in {"CPU time": cpu, "wall time": wall}.items()
    ]


def _documents(count: int) -> list[dict[str, Any]]:
    """Returns documents of a multiple choice: 150 to 400 bytes of text, and choices of 8 to 64."""
    rng = random.Random(0)
    source = "".join(path.read_text() for path in sorted(Path(json.__file__).parent.glob("*.py")))

    def piece(least: int, most: int) -> str:
        length = rng.randint(least, most)
        begin = rng.randrange(len(source) - length)
        return source[begin : begin + length]

    return [
        {
            "text": f"{number} {piece(150, 400).strip()}",
            "choices": [f" {piece(8, 64)}" for _ in range(_CHOICES)],
            "answer": rng.randrange(_CHOICES),
        }
        for number in range(count)
    ]


def _written(folder: Path, documents: list[dict[str, Any]]) -> Path:
    """Returns the file of a task on the documents."""
    data, task = folder / "choice.jsonl", folder / "choice.yaml"
    data.write_text("".join(json.dumps(one) + "\n" for one in documents))
    stated = {
        "task": "choice",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_target": "answer",
        "doc_to_choice": "choices",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }
    task.write_text(json.dumps(stated))  # JSON is YAML
    return task
