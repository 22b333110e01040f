"""Rules of MaxText's table on reinforcement learning (`train_rl`): its batch of prompts, length,
data and rewards.

Facts from MaxText's `configs/post_train/rl.yml` and its documentation of the batch size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction

from maxbatch.around.importers.hub import hub_step, is_hub_name
from maxbatch.around.importers.steps import take_rewards, take_tokenizer, without_balance
from maxbatch.around.importers.table import Condition, Rule
from maxbatch.around.importers.translation import Translation
from maxbatch.around.words import look_up
from maxbatch.config.rules import PRETRAINING_BATCH
from maxbatch.config.sections import KEYS
from maxbatch.config.values import exact, shown
from maxbatch.system.errors import ConfigError

_BLOCK = "rl."
_OF_BLOCK = ("eval_batch_size", "train_split", "eval_split")  # words missing in the table of words
# their product is the number of updates
_LENGTHS = ("num_batches", "num_iterations", "train_fraction", "num_epoch")


def _is_rl(t: Translation, _: str) -> bool:
    return "batch_size" in t or any(word.startswith(_BLOCK) for word in t.left())


def _unblock(t: Translation, word: str) -> None:
    """Takes a word below `rl` by its last name."""
    name = word.removeprefix(_BLOCK)
    if name in KEYS or name in _OF_BLOCK or look_up(name, "maxtext"):
        t.rename(word, name)
    else:
        t.refuse(word, "maxbatch rl has no such setting", is_essential=True)


def _pretraining(t: Translation, _: str) -> None:
    for name in PRETRAINING_BATCH:
        if name in t:
            t.ignore(name, "batch_size states the batch, in prompts")
        t.drop(name)


def _sampling_mesh(t: Translation, _: str) -> None:
    """Takes the sampling mesh's expert axis as part of its tensor axis, which splits experts
    too.
    """
    tensor, expert = "rollout_tensor_parallelism", "rollout_expert_parallelism"
    sizes = [_number(t, name) for name in (tensor, expert) if name in t]
    product = -1 if -1 in sizes else math.prod(sizes)
    why = f"{tensor} x {expert}: the tensor axis splits the experts' matrices as well"
    for name in (tensor, expert):
        if name in t:
            t.map(name, why, rollout_tensor_parallelism=str(product))


def _number(t: Translation, name: str) -> Fraction:
    number = t.number(name)
    if number is None:
        raise ConfigError(f"{name}={shown(t.text(name))}: must be a number")
    return exact(number)


def _updates(t: Translation, word: str) -> None:
    updates = math.prod(_number(t, name) for name in _LENGTHS)
    t.map(word, f"{' x '.join(_LENGTHS)} updates", steps=str(max(1, int(updates))))


def _held_out(t: Translation, word: str) -> None:
    batches, start = _number(t, "num_test_batches"), t.number("test_batch_start_index") or 0
    rows = _number(t, "eval_batch_size")
    prompts = int(batches * (rows if rows > 0 else _number(t, "batch_size"))) - int(start)
    if prompts > 0:
        t.map(
            word, "num_test_batches x eval_batch_size held-out prompts", eval_samples=str(prompts)
        )
    else:
        t.map(word, "no held-out prompts are read", eval_interval="-1")


def _files(t: Translation, _: str) -> None:
    """Takes the data sets, by hub names or by files."""
    subset = t.text("hf_subset") if "hf_subset" in t else ""
    sides = (
        ("dataset_name", "train_split", "dataset_path", "hf_train_files"),
        ("eval_dataset_name", "eval_split", "eval_dataset_path", "hf_eval_files"),
    )
    for word, split, key, named in sides:
        source = t.text(word)
        if named in t:
            kind = "jsonl" if "json" in t.text(named) else "parquet"
            t.map(named, **{"dataset_type": kind, key: t.text(named)})
            for other in (word, split):
                t.ignore(other, f"{named} names the files")
            continue
        path = "/".join(filter(None, (source, subset, f"{t.text(split)}*.parquet")))
        settings = {"dataset_type": "parquet", key: path}
        step = (
            hub_step(source, "dataset") if is_hub_name(source) else "its parquet files at that path"
        )
        t.need(word, step, **settings)
        t.map(split, **{key: path})
    if subset and t.is_left("hf_subset"):
        t.map("hf_subset", dataset_path=t.settings["dataset_path"])


def _tokenizer(t: Translation, word: str) -> None:
    if word in t:
        take_tokenizer(t, word, t.text(word))
    t.settings.setdefault("tokenizer_type", "huggingface")
    t.settings.setdefault("tokenizer_path", f"tokenizers/{t.text('model_name') or 'default'}")


def _template(t: Translation, word: str) -> None:
    step = "prompt_template is the text of a prompt, with {question} and other fields of a record"
    t.need(word, step, prompt_template="{question}")


def _rewards(t: Translation, word: str) -> None:
    functions = [
        name.strip() for name in t.text("reward_functions").split(",") if name.strip()
    ] or ["score"]
    take_rewards(t, word, t.text(word) if word in t else "rewards.py", functions)


RL_RULES: Mapping[str, Rule] = {
    "unblock": _unblock,
    "pretraining": _pretraining,
    "sampling_mesh": _sampling_mesh,
    "updates": _updates,
    "held_out": _held_out,
    "files": _files,
    "tokenizer": _tokenizer,
    "template": _template,
    "rewards": _rewards,
    "drop": lambda t, word: t.drop(word),
    "router": without_balance,
}
RL_CONDITIONS: Mapping[str, Condition] = {
    "is_rl": _is_rl,
    "starts_later": lambda t, word: bool(t.number(word)),
    "is_no_key": lambda _, word: word not in KEYS,
}
