"""Axolotl's configs. Facts from its config reference."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from maxbatch.commands.import_config.hub import hub_step, is_hub_name
from maxbatch.commands.import_config.steps import take_parameters
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
    "micro_batch_size": "1", "num_epochs": "1", "learning_rate": "5e-5", "lr_scheduler": "cosine",
    "warmup_ratio": "0.03", "weight_decay": "0.0", "optimizer": "adamw_torch", "max_grad_norm": "1.0", "seed": "42",
    "adam_beta1": "0.9",
    "adam_beta2": "0.999", "adam_epsilon": "1e-8", "sample_packing": "false",
}  # fmt: skip


def translate(t: Translation) -> None:
    """Takes the words of an Axolotl config."""
    if "batch_size" in t and "gradient_accumulation_steps" not in t:
        passes = (t.number("batch_size") or 1) // (t.number("micro_batch_size") or 1)
        t.map("batch_size", "batch_size / micro_batch_size passes", gradient_accumulation_steps=f"{max(1, passes):g}")
    elif "gradient_accumulation_steps" not in t:
        t.settings["gradient_accumulation_steps"] = "1"
    batch_per_device(t, "micro_batch_size", "; its loss is the mean of the devices' means, here that over all tokens")
    steps = length(t, "max_steps", "num_epochs")
    rates(t, "lr_scheduler", steps, math.floor)
    optimizer(t, "optimizer")
    seeds(t, "seed", "")
    precision(t)
    when(t)
    for word in t.left():
        if why := next((why for start, why in _UNTRAINED.items() if word.startswith(start)), ""):
            t.ignore(word, why)
    _data(t)


# Words that change nothing that is learned, by their beginnings.
_UNTRAINED = {
    "attn_implementation": "how attention is computed",
    "gradient_checkpointing_kwargs": "how the backward pass computes again; remat_policy says what",
    "loss_watchdog_": "when a run is stopped; an update that is not finite is skipped here",
}


def _data(t: Translation) -> None:
    size = t.number("val_set_size")
    if "val_set_size" in t and size is not None and 0 < size < 1:
        t.map("val_set_size", eval_fraction=t.text("val_set_size"))
    elif size == 0:
        t.map("val_set_size", eval_fraction="0")
    if t.text("rl").lower() in ("dpo", "orpo"):
        _pairs(t)
    else:
        _sources(t)
        t.map("sample_packing", packing="true" if t.is_true("sample_packing") else "false")
    if "eval_sample_packing" in t:
        t.ignore("eval_sample_packing", "the loss of held-out data is the mean over their tokens, however packed")
    base = t.text("base_model")
    if base:
        take_parameters(t, "base_model", base)
        t.settings |= {"tokenizer_type": "huggingface", "tokenizer_path": base}
    adapter = t.text("adapter") if "adapter" in t else ""
    if adapter not in ("", "lora"):
        t.refuse("adapter", "lora, over parameters of float32 or bfloat16", is_essential=True)
    adapters(t, adapter == "lora", "adapter", {})
    for word, end in (("model_type", "ForCausalLM"), ("tokenizer_type", "Tokenizer")):
        if word in t and re.search(rf"{end}(Fast)?$", t.text(word)):
            t.ignore(word, "the files of base_model say it")
    if t.is_left("rl") and "rl" in t:
        t.refuse("rl", "dpo or orpo", is_essential=True)


def _sources(t: Translation) -> None:
    """Takes the data sets: documents of plain text, or conversations in `messages`."""
    sources = t.mappings("datasets")
    if not sources or not all(isinstance(item.get("path"), str) and item["path"] for item in sources):
        return
    kinds = {str(item.get("type", "completion")) for item in sources}
    settings = {"dataset_path": ";".join(item["path"] for item in sources), "dataset_type": "jsonl"}
    if kinds <= {"completion", "pretrain"}:
        for word in ("train_on_inputs", "chat_template"):
            if word in t:
                t.ignore(word, "documents are plain text, and every token of them is trained on")
    elif kinds == {"chat_template"} and not (others := _unlike_ours(_without_sharegpt(sources))):
        on_answers = "false" if t.is_true("train_on_inputs") else "true"
        settings |= {"use_sft": "true", "sft_train_on_completion_only": on_answers}
        if all(_is_sharegpt(item) for item in sources):
            settings["sft_format"] = "sharegpt"
        if "train_on_inputs" in t:
            t.map("train_on_inputs", sft_train_on_completion_only=on_answers)
        _template(t)
    elif kinds == {"alpaca"}:
        on_answers = "false" if t.is_true("train_on_inputs") else "true"
        settings |= {"use_sft": "true", "sft_format": "alpaca", "sft_train_on_completion_only": on_answers}
        t.map("train_on_inputs", sft_train_on_completion_only=on_answers)
        _take_sources(t, sources, settings, _ALPACA)
        return
    elif kinds == {"chat_template"}:
        t.refuse(
            "datasets", f"records with messages of role and content, without {', '.join(others)}", is_essential=True
        )
        return
    else:
        rule = f"type {', '.join(sorted(kinds))}: completion, chat_template or alpaca"
        t.refuse("datasets", rule, is_essential=True)
        return
    _take_sources(t, sources, settings)


# What its prompter writes around a record.
_ALPACA = (
    "write Alpaca's text (Below is an instruction ..., ### Instruction:, ### Response:) as chat_template.jinja beside "
    "the tokenizer; an input, there under ### Input:, follows the instruction after an empty line"
)


def _take_sources(t: Translation, sources: list[dict[str, str]], settings: Mapping[str, str], step: str = "") -> None:
    """Takes the data sets; `step` is left to the reader, besides what a data set of the hub needs."""
    hub = [item["path"] for item in sources if is_hub_name(item["path"])]
    if hub or step:
        steps = [" and ".join(hub_step(name, "dataset") for name in hub), step]
        steps.append("dataset_type=parquet if the files are")
        t.need("datasets", "; ".join(filter(None, steps)), **settings)
    else:
        t.map("datasets", "its files, at that path; state dataset_type if they are not jsonl", **settings)


_PAIR_KINDS = ("chat_template.default", "chat_template.argilla")
_BETAS = ("trl.beta", "rl_beta", "dpo_beta", "orpo_alpha")  # the first that is stated holds


def _pairs(t: Translation) -> None:
    """Takes `rl: dpo` and `rl: orpo`, whose batch counts pairs; defaults are those of TRL's trainers."""
    algo = t.text("rl").lower()
    beta = next((word for word in _BETAS if word in t), "")
    weight = {"dpo_beta" if algo == "dpo" else "orpo_lambda": t.text(beta) if beta else "0.1"}
    data = {"use_dpo": "true", "packing": "false", "dataset_type": "jsonl"}
    t.map("rl", "a batch counts pairs, as there", dpo_algo=algo, **weight, **data)
    for word in _BETAS:
        if word in t and word == beta:
            t.map(word, **weight)
        elif word in t:
            t.ignore(word, f"{beta} goes first there")
    if "dpo_label_smoothing" in t:
        t.map("dpo_label_smoothing", dpo_label_smoothing=t.text("dpo_label_smoothing"))
    if "dpo_loss_type" in t and t.items("dpo_loss_type") == ["sigmoid"]:
        t.map("dpo_loss_type", dpo_algo=algo)
    for word in ("dpo_loss_type", "dpo_loss_weights", "dpo_use_weighting"):
        if t.is_left(word) and word in t and t.text(word).lower() != "false":
            t.refuse(word, "the loss of DPO (sigmoid) alone", is_essential=True)
    for word in ("precompute_ref_log_probs", "dpo_padding_free", "dpo_use_liger_kernel", "remove_unused_columns"):
        if word in t:
            t.ignore(word, "how the same is computed")
    if t.is_true("sample_packing"):
        t.refuse("sample_packing", "false: pairs are not packed", is_essential=True)
    else:
        t.map("sample_packing", packing="false")
    sources = t.mappings("datasets")
    if not sources or not all(isinstance(item.get("path"), str) and item["path"] for item in sources):
        return
    kinds = {str(item.get("type")) for item in sources}
    if not kinds <= set(_PAIR_KINDS):
        rule = f"type {', '.join(sorted(kinds))}: {' or '.join(_PAIR_KINDS)}"
        t.refuse("datasets", rule, is_essential=True)
        return
    _template(t)
    fields = sorted({str(item.get("field_messages", "messages")) for item in sources})
    step = "write its records as lists of messages of role and content: chosen and rejected"
    if "chat_template.default" in kinds:
        step += f" (there one message each), and prompt (there {', '.join(fields)})"
    _take_sources(t, sources, data | {"dataset_path": ";".join(item["path"] for item in sources)}, step)


_OURS_OF_A_SOURCE = {
    "type": ("chat_template",), "field_messages": ("messages",), "roles_to_train": (["assistant"],),
    "train_on_eos": ("turn",), "split": ("train",),
    "message_property_mappings": ({"role": "role", "content": "content"},),
    "chat_template": ("tokenizer_default",), "ds_type": ("json",),
}  # fmt: skip


_SHAREGPT = {"field_messages": "conversations", "message_property_mappings": {"role": "from", "content": "value"}}


def _is_sharegpt(source: Mapping[str, object]) -> bool:
    return all(source.get(name) == value for name, value in _SHAREGPT.items())


def _without_sharegpt(sources: list[dict[str, str]]) -> list[dict[str, str]]:
    """Returns the data sets, without the settings of ShareGPT's form where all of them have it."""
    if not all(_is_sharegpt(source) for source in sources):
        return sources
    return [{name: value for name, value in source.items() if name not in _SHAREGPT} for source in sources]


def _unlike_ours(sources: list[dict[str, str]]) -> list[str]:
    """Returns the settings of chat data sets that would change records or weights, and that have no counterpart."""
    stated = ((name, value) for item in sources for name, value in item.items() if name not in ("path", "name"))
    return sorted({name for name, value in stated if value and value not in _OURS_OF_A_SOURCE.get(name, ())})


def _template(t: Translation) -> None:
    for word in ("chat_template", "chat_template_jinja"):
        if word in t and t.text(word) != "tokenizer_default":
            t.need(word, "put that template into chat_template.jinja beside the tokenizer")
        elif word in t:
            t.ignore(word, "the tokenizer's own template makes the tokens")


def equation(t: Translation) -> tuple[str, str]:
    """Returns the batch as an equation in their words and in ours."""
    return per_device_equation(t, "micro_batch_size", "gradient_accumulation_steps")
