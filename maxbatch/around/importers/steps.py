"""Tokenizers, data sets, models, checkpoints and rewards, with the user's step that each needs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from maxbatch.around.importers.hub import hub_step, is_hub_name
from maxbatch.around.importers.translation import Translation
from maxbatch.config.paths import presets

_OF_A_CHAT = re.compile(r"[-_](instruct|it|chat|base|hf|pt|bf16)\b", re.I)


def take_tokenizer(t: Translation, word: str, path: str) -> None:
    if is_hub_name(path):
        t.need(word, hub_step(path), tokenizer_type="huggingface", tokenizer_path=path)
    else:
        t.map(word, tokenizer_path=path)


def take_dataset(t: Translation, step: str, settings: Mapping[str, str]) -> None:
    """Takes TRL's `dataset_name`, a hub data set or a path, with its config and split.

    `step` is the required form of its records. `settings` hold the path for a data set without a
    name.
    """
    name, ours = t.text("dataset_name"), dict(settings)
    if is_hub_name(name):
        subset, split = t.text("dataset_config"), t.text("dataset_train_split", "train")
        path = "/".join(filter(None, (name, subset, f"{split}*.parquet")))
        ours |= {"dataset_type": "parquet", "dataset_path": path}
        step = f"{hub_step(name, 'dataset')}: {step}"
    elif name:
        ours["dataset_path"] = name
    t.need("dataset_name", step, **ours)
    for word in ("dataset_config", "dataset_train_split"):
        if word in t and is_hub_name(name):
            t.map(word, dataset_path=ours["dataset_path"])


def take_parameters(t: Translation, word: str) -> None:
    """Takes a word as the initial model, a folder or a hub name."""
    path = t.text(word)
    model = _preset_of(path)
    if os.path.isfile(f"{path}/config.json"):
        t.map(word, load_parameters_path=path, model_name="auto")
    elif is_hub_name(path):
        form = {"model_name": model} if model else {}
        then = "" if model else "; then maxbatch train FILE model_name=auto"
        t.need(word, f"{hub_step(path)}{then}", load_parameters_path=path, **form)
    else:
        step = "its folder at that path, with config.json; then maxbatch train FILE model_name=auto"
        t.need(word, step, load_parameters_path=path)


def _preset_of(path: str) -> str | None:
    """Returns our preset for a hub model's name, or None."""
    name = path.rpartition("/")[2]
    while _OF_A_CHAT.search(name):
        name = _OF_A_CHAT.sub("", name)
    return {_plain(preset): preset for preset in presets()}.get(_plain(name).removeprefix("meta"))


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.lower())


def take_checkpoint(t: Translation, word: str) -> None:
    """Takes a MaxText checkpoint, or a Hugging Face folder, as it is."""
    path = t.text(word)
    if t.text("rope_type").startswith("llama3.1") and t.text("rope_use_scale").lower() == "false":
        # Its queries and keys are stored interleaved, as only rope_type=llama3.1 says here.
        t.refuse(
            word,
            "stored for rope_type=llama3.1, which no key of ours states without rope_use_scale",
        )
        return
    t.map(word, **{word: path})


def take_rewards(
    t: Translation, word: str, file: str, functions: Sequence[str], weights: Sequence[str] = ()
) -> None:
    """Takes the rewards, functions of the user, with optional `weights`, one per function."""
    reward = f"{file}:{functions[0]}"
    if len(functions) > 1 or weights:
        pairs = zip(functions, weights or ["1"] * len(functions), strict=True)
        reward = ";".join(f"{file}:{name},{weight}" for name, weight in pairs)
    step = f"{file} with {', '.join(functions)}(prompt, response, record), which returns a number"
    t.need(word, step, reward=reward)


def without_balance(t: Translation, _: str) -> None:
    """Switches off the router losses of a preset; reinforcement learning has none."""
    if "model_name" in t.settings:
        t.settings["load_balance_loss_weight"] = "0"
