"""(l) A small real model: its scores equal those of transformers, and 200 updates teach it a
format, also by LoRA.

The model is SmolLM2-135M-Instruct (`benchmarks.smollm2`); without the packages that hold it there
is nothing to measure. The task is invented: the answer to "Q: river and glass" is " <glass|river>".
The held-out prompts have pairs of words that do not occur in training.
"""

from __future__ import annotations

import json
import random
import re
import sys
import tempfile
import time
from itertools import permutations
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks import smollm2
from benchmarks.commands import finish, metrics_of, start
from benchmarks.measurement import Measurement
from maxbatch.around.sampling.sampler import Sampler, SamplingRules
from maxbatch.data.tokenizers.tokenizers import make_tokenizer
from tests.helpers.parameters import load_parameters

BARS = {"before": 0.1, "after": 0.9, "seconds": 15 * 60.0, "nats": 0.01}
PAGE = (
    "Batch size is one of the few numbers that everyone who trains a neural network has to "
    "choose. A small batch gives a noisy estimate of the gradient, and a large one costs more "
    "than it is worth once the noise is gone. Between the two lies a region in which doubling the "
    "batch halves the number of updates. Where that region ends depends on the model, on the data "
    "and on how far training has come. At the beginning the gradient is large and its noise is "
    "small by comparison, so that small batches do well; later the two change places. This is why "
    "long runs often begin with a small batch and let it grow."
)
PROMPT = "The capital of France is"
_WORDS = (
    "apple",
    "river",
    "stone",
    "glass",
    "garden",
    "music",
    "cat",
    "cloud",
    "bread",
    "train",
    "paper",
    "moon",
    "ship",
    "queen",
    "lamp",
    "tree",
    "horse",
    "salt",
    "bridge",
    "clock",
    "coat",
    "drum",
    "field",
    "flag",
)
_FORMAT = re.compile(r" <[a-z]+\|[a-z]+>")
_HELD_OUT = 40
_NEW_TOKENS = 16
_TASK = (
    "model_name=auto",
    "use_sft=true",
    "dataset_type=jsonl",
    "max_target_length=32",
    "packing=false",
    "global_batch_size=8",
    "per_device_batch_size=8",
    "checkpoint_period=1000",
    "eval_interval=-1",
    "generate_prompt=",
)
WAYS = {
    "sft": ("learning_rate=5e-5",),
    "lora": ("learning_rate=5e-4", "lora_rank=16", "lora_alpha=32"),
}


class Question(NamedTuple):
    """A prompt and its answer."""

    prompt: str
    completion: str


class Accuracy(NamedTuple):
    """Shares of answers."""

    of_format: float
    of_answer: float


def questions() -> tuple[list[Question], list[Question]]:
    """Returns the questions to train on and those held out."""
    pairs = list(permutations(_WORDS, 2))
    random.Random(0).shuffle(pairs)
    every = [Question(f"Q: {a} and {b}\nA:", f" <{b}|{a}>") for a, b in pairs]
    return every[_HELD_OUT:], every[:_HELD_OUT]


def measure(quick: bool) -> list[Measurement]:
    """Differences from transformers; accuracies before and after, and the time of the command
    between them.
    """
    if missing := smollm2.missing_packages():
        print(
            f"benchmarks: finetune: skipped: needs {', '.join(missing)} (see "
            "benchmarks/smollm2.py)",
            file=sys.stderr,
        )
        return []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = folder / "smollm2"
        smollm2.write_folder(model)
        train, held_out = questions()
        (folder / "task.jsonl").write_text(
            "".join(json.dumps(question._asdict()) + "\n" for question in train)
        )
        results = [
            _page(model, folder),
            _english(model, folder),
            *_accuracy("before", model, held_out),
        ]
        for way in WAYS:
            results += _trained(way, model, folder, held_out, steps=2 if quick else 200)
        return results


def _page(model: Path, folder: Path) -> Measurement:
    (folder / "page.jsonl").write_text(json.dumps({"text": PAGE}) + "\n")
    log = folder / "score.json"
    finish(
        start(
            "maxbatch",
            "score",
            str(model),
            str(folder / "page.jsonl"),
            "--json",
            log=log,
            cache=folder,
        ),
        log,
    )
    ours, theirs = json.loads(log.read_text())["loss"], smollm2.score(model, PAGE)
    detail = {"maxbatch": ours, "transformers": theirs}
    name = "score of a page, from transformers'"
    return Measurement(name, abs(ours - theirs), "nats", bar=BARS["nats"], detail=detail)


def _english(model: Path, folder: Path) -> Measurement:
    log = folder / "text.txt"
    rules = ("--prompt", PROMPT, "--temperature", "0", "--max-new-tokens", str(_NEW_TOKENS))
    finish(start("maxbatch", "generate", str(model), *rules, log=log, cache=folder), log)
    ours, theirs = (
        log.read_text().rstrip("\n"),
        smollm2.continuation(model, PROMPT, _NEW_TOKENS).rstrip("\n"),
    )
    print(ours)
    name = "continues a prompt as transformers does (1: word for word)"
    detail = {"maxbatch": ours, "transformers": theirs}
    return Measurement(name, float(ours == theirs), bar=1.0, sense="at least", detail=detail)


def _trained(
    way: str, model: Path, folder: Path, held_out: list[Question], steps: int
) -> list[Measurement]:
    run_dir, log = folder / way, folder / f"{way}.log"
    places = (
        f"load_parameters_path={model}",
        f"dataset_path={folder / 'task.jsonl'}",
        f"run_dir={run_dir}",
    )
    began = time.perf_counter()
    finish(
        start(
            "maxbatch",
            "train",
            *_TASK,
            *places,
            f"steps={steps}",
            *WAYS[way],
            log=log,
            cache=folder,
        ),
        log,
    )
    seconds = time.perf_counter() - began
    losses = [record["loss"] for record in metrics_of(run_dir)]
    detail = {"first_loss": losses[0], "last_loss": losses[-1], "overrides": [*_TASK, *WAYS[way]]}
    took = Measurement(f"{way}: the command", seconds, "s", bar=BARS["seconds"], detail=detail)
    return [took, *_accuracy(way, run_dir, held_out)]


def _accuracy(when: str, model: Path, held_out: list[Question]) -> list[Measurement]:
    found = accuracy(model, held_out)
    bar, sense = (BARS["before"], "at most") if when == "before" else (BARS["after"], "at least")
    return [
        Measurement(
            f"{when}: held-out answers in the format", found.of_format, bar=bar, sense=sense
        ),
        Measurement(f"{when}: held-out answers that are right", found.of_answer),
    ]


def accuracy(model: Path, asked: list[Question]) -> Accuracy:
    """Returns the shares of likeliest answers that have the format, and that are right."""
    config, _, params = load_parameters(
        model, ["max_target_length=32", "scan_layers=true", "dtype=float32"]
    )
    tokenizer = make_tokenizer(config.tokenizer_type, config.tokenizer_path)
    prompts = [tokenizer.encode(question.prompt) for question in asked]
    longest = max(map(len, prompts))
    sampler = Sampler(config.decoder, tokenizer, None, prompt_length=longest)
    rules = SamplingRules(temperature=0, max_new_tokens=_NEW_TOKENS)
    rows = sampler.rows(prompts, np.zeros((len(asked), 3)))
    responses = sampler(params, rows, rules)
    tokens_BxL, ends_B = np.asarray(responses.tokens_BxL), np.asarray(responses.lengths_B)
    answers = []
    for row, (begin, end) in enumerate(zip(rows.lengths_Q, ends_B, strict=True)):
        answers.append(
            tokenizer.decode([int(t) for t in tokens_BxL[row, begin:end] if t != tokenizer.eos_id])
        )
    of_format = np.mean([_FORMAT.fullmatch(answer) is not None for answer in answers])
    return Accuracy(
        float(of_format),
        float(np.mean([a == q.completion for a, q in zip(answers, asked, strict=True)])),
    )
