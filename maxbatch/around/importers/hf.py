"""Rules of the table for Hugging Face's Trainer and TRL's trainers of preference pairs."""

from __future__ import annotations

import math

from maxbatch.around.importers.python_file import CLASS
from maxbatch.around.importers.steps import take_dataset, take_parameters
from maxbatch.around.importers.table import Format
from maxbatch.around.importers.trainer_words import TRAINER, length, per_device_equation, rates
from maxbatch.around.importers.translation import Translation

# Words of TRL's DPOConfig and ORPOConfig (docs: dpo_trainer, orpo_trainer), and of its trainers of
# generated responses.
_OF_PAIRS = (
    "beta",
    "loss_type",
    "label_smoothing",
    "precompute_ref_log_probs",
    "reference_free",
    "max_prompt_length",
)
_CLASSES_OF_PAIRS = ("DPOConfig", "ORPOConfig")
_OF_RESPONSES = ("num_generations", "generation_batch_size", "steps_per_generation", "temperature")


def _states_pairs(t: Translation, word: str) -> bool:
    if CLASS in t:
        return t.text(CLASS) in _CLASSES_OF_PAIRS
    return any(word in t for word in _OF_PAIRS) and not any(word in t for word in _OF_RESPONSES)


def _name_of_orpo(t: Translation) -> str:
    """Returns the word that identifies ORPOConfig; "" for DPOConfig."""
    if CLASS in t:
        return CLASS if t.text(CLASS) == "ORPOConfig" else ""
    named = [
        word
        for word in ("output_dir", "run_name", "hub_model_id")
        if "orpo" in t.text(word).lower()
    ]
    return named[0] if named and "loss_type" not in t else ""


def _weight(t: Translation, word: str) -> None:
    """Takes the weight of the pairs' loss, and their data."""
    step = "records with prompt, chosen and rejected in that file; a batch counts pairs, as there"
    data = {
        "use_dpo": "true",
        "dataset_type": "jsonl",
        "dataset_path": "pairs.jsonl",
        "packing": "false",
    }
    if named := _name_of_orpo(t):
        t.need(
            word,
            f"{step}; orpo by the name in {named}",
            dpo_algo="orpo",
            orpo_lambda=t.text(word),
            **data,
        )
    else:
        t.need(word, step, dpo_algo="dpo", dpo_beta=t.text(word), **data)


def _dataset(t: Translation, word: str) -> None:
    form = "pairs" if t.settings.get("use_dpo") else "texts (use_sft=true for conversations)"
    take_dataset(
        t, f"records are {form}", {"dataset_type": t.settings.get("dataset_type", "jsonl")}
    )


FORMAT = Format(
    "hf",
    per_device_equation("per_device_train_batch_size"),
    {
        "length": lambda t, word: length(t, "num_train_epochs"),
        "rates": lambda t, word: rates(t, word, math.ceil),
        "parameters": take_parameters,
        "weight": _weight,
        "dataset": _dataset,
    },
    {
        "states_pairs": _states_pairs,
        "is_dpo": lambda t, word: not _name_of_orpo(t),
        "is_another_loss": lambda t, word: t.items(word) not in ([], ["sigmoid"]),
    },
    TRAINER,
)
