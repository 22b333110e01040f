"""Configs of Hugging Face's Trainer, and of TRL's trainers of preference pairs.

Facts from the documentation of transformers' TrainingArguments and of TRL's DPOConfig and ORPOConfig.
"""

from __future__ import annotations

import math

from maxbatch.commands.import_config.steps import take_dataset, take_parameters
from maxbatch.commands.import_config.trainer_words import (
    adapters,
    batch_per_device,
    length,
    optimizer,
    per_device_equation,
    precision,
    rates,
    seeds,
    when,
)
from maxbatch.commands.import_config.translation import Translation

DEFAULTS = {
    "per_device_train_batch_size": "8", "gradient_accumulation_steps": "1", "num_train_epochs": "3.0",
    "learning_rate": "5e-5", "lr_scheduler_type": "linear", "warmup_steps": "0", "weight_decay": "0.0",
    "adam_beta1": "0.9", "adam_beta2": "0.999", "adam_epsilon": "1e-8", "max_grad_norm": "1.0", "optim": "adamw_torch",
    "seed": "42", "save_steps": "500", "logging_steps": "500", "eval_strategy": "no",
}  # fmt: skip


def translate(t: Translation) -> None:
    """Takes the words of TrainingArguments."""
    old_words(t)
    _preferences(t)
    batch_per_device(t, "per_device_train_batch_size")
    arguments(t)


def arguments(t: Translation) -> None:
    """Takes the words of TrainingArguments that state no batch, and those of the model and its adapters."""
    steps = length(t, "max_steps", "num_train_epochs")
    rates(t, "lr_scheduler_type", steps, math.ceil)
    if "model_name_or_path" in t:
        take_parameters(t, "model_name_or_path", t.text("model_name_or_path"))
    adapters(t, t.is_true("use_peft"), "use_peft", {"lora_r": "16", "lora_alpha": "32", "lora_dropout": "0.05"})
    word = "average_tokens_across_devices"
    if word in t and not t.is_true(word):
        t.refuse(word, "true: the loss is the mean over the tokens of the global batch, not of the devices' means")
    optimizer(t, "optim")
    seeds(t, "seed", "data_seed")
    precision(t)
    when(t)
    if "dataset_name" in t and t.is_left("dataset_name"):
        form = "pairs" if t.settings.get("use_dpo") else "texts (use_sft=true for conversations)"
        take_dataset(t, f"records are {form}", {"dataset_type": t.settings.get("dataset_type", "jsonl")})


# Words of TRL's DPOConfig and ORPOConfig (docs: dpo_trainer, orpo_trainer), and of its trainers of generated responses.
_OF_PAIRS = ("beta", "loss_type", "label_smoothing", "precompute_ref_log_probs", "reference_free", "max_prompt_length")
_OF_RESPONSES = ("num_generations", "generation_batch_size", "steps_per_generation", "temperature")
_PAIR_DEFAULTS = {"learning_rate": "1e-6", "max_length": "1024", "beta": "0.1", "bf16": "true"}
_OF_THE_REFERENCE = ("precompute_ref_log_probs", "precompute_ref_batch_size")


def _preferences(t: Translation) -> None:
    """Takes TRL's DPOConfig, or its ORPOConfig, which the name of the output tells from it."""
    if not any(word in t for word in _OF_PAIRS) or any(word in t for word in _OF_RESPONSES):
        return
    named = [word for word in ("output_dir", "run_name", "hub_model_id") if "orpo" in t.text(word).lower()]
    losses = t.items("loss_type") or ["sigmoid"]
    t.assume(_PAIR_DEFAULTS)
    step = "records with prompt, chosen and rejected in that file; a batch counts pairs, as there"
    data = {"use_dpo": "true", "dataset_type": "jsonl", "dataset_path": "pairs.jsonl", "packing": "false"}
    if named and "loss_type" not in t:
        t.need("beta", f"{step}; orpo by the name in {named[0]}", dpo_algo="orpo", orpo_lambda=t.text("beta"), **data)
    else:
        t.need("beta", step, dpo_algo="dpo", dpo_beta=t.text("beta"), **data)
        if "label_smoothing" in t:
            t.map("label_smoothing", dpo_label_smoothing=t.text("label_smoothing"))
    if losses != ["sigmoid"]:
        t.refuse("loss_type", "sigmoid", is_essential=True)
    elif "loss_type" in t:
        t.map("loss_type", dpo_algo="dpo")
    if t.text("max_length").lower() in ("null", "none"):
        t.refuse("max_length", "a number: rows have one length", is_essential=True)
    if "max_prompt_length" in t:
        t.refuse("max_prompt_length", "prompt and answer together have max_target_length tokens")
    if t.text("truncation_mode") == "keep_start":
        t.map("truncation_mode", overlong="truncate")
    elif "truncation_mode" in t:
        t.refuse("truncation_mode", "keep_start, which overlong=truncate is", is_essential=True)
    for word in _OF_THE_REFERENCE:
        if word in t:
            t.ignore(word, "the reference is always computed before the first update, and stored")
    if "disable_dropout" in t:
        t.ignore("disable_dropout", "there is no dropout")
    if "padding_free" in t:
        t.ignore("padding_free", "padding has no weight")


def old_words(t: Translation) -> None:
    """Takes the older names of words for newer ones."""
    for old, new in (("per_gpu_train_batch_size", "per_device_train_batch_size"),
                     ("evaluation_strategy", "eval_strategy")):  # fmt: skip
        if old in t:
            t.rename(old, new)


def equation(t: Translation) -> tuple[str, str]:
    """Returns the batch as an equation in their words and in ours."""
    return per_device_equation(t, "per_device_train_batch_size", "gradient_accumulation_steps")
