"""Configs of Hugging Face's Trainer, Axolotl and DeepSpeed.

Facts from their documentation: transformers' TrainingArguments, Axolotl's config reference, DeepSpeed's config JSON.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping

from maxbatch.commands.import_config.hub import hub_step, is_hub_name
from maxbatch.commands.import_config.steps import take_parameters
from maxbatch.commands.import_config.translation import Translation

HF_DEFAULTS = {
    "per_device_train_batch_size": "8", "gradient_accumulation_steps": "1", "num_train_epochs": "3.0",
    "learning_rate": "5e-5", "lr_scheduler_type": "linear", "warmup_steps": "0", "weight_decay": "0.0",
    "adam_beta1": "0.9", "adam_beta2": "0.999", "adam_epsilon": "1e-8", "max_grad_norm": "1.0", "optim": "adamw_torch",
    "seed": "42", "save_steps": "500", "logging_steps": "500", "eval_strategy": "no",
}  # fmt: skip
AXOLOTL_DEFAULTS = {
    "micro_batch_size": "1", "num_epochs": "1", "learning_rate": "5e-5", "lr_scheduler": "cosine",
    "warmup_ratio": "0.03", "weight_decay": "0.0", "optimizer": "adamw_torch", "max_grad_norm": "1.0", "seed": "42",
    "adam_beta1": "0.9",
    "adam_beta2": "0.999", "adam_epsilon": "1e-8", "sample_packing": "false",
}  # fmt: skip
DEEPSPEED_DEFAULTS: dict[str, str] = {}
_OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "fusedadam": "adamw", "cpuadam": "adamw", "onebitadam": "",
               "lion": "lion", "adafactor": "adafactor", "sgd": "sgd", "muon": "muon"}  # fmt: skip
_AUTO = "auto is filled in from the Trainer's arguments; needed: the value"


def hf(t: Translation) -> None:
    """Takes the words of TrainingArguments."""
    old_words(t)
    _preferences(t)
    _batch_per_device(t, "per_device_train_batch_size")
    arguments(t)


def arguments(t: Translation) -> None:
    """Takes the words of TrainingArguments that state no batch, and those of the model and its adapters."""
    steps = _length(t, "max_steps", "num_train_epochs")
    _rates(t, "lr_scheduler_type", steps, math.ceil)
    if "model_name_or_path" in t:
        take_parameters(t, "model_name_or_path", t.text("model_name_or_path"))
    _adapters(t, t.is_true("use_peft"), "use_peft", {"lora_r": "16", "lora_alpha": "32", "lora_dropout": "0.05"})
    word = "average_tokens_across_devices"
    if word in t and not t.is_true(word):
        t.refuse(word, "true: the loss is the mean over the tokens of the global batch, not of the devices' means")
    optimizer(t, "optim")
    seeds(t, "seed", "data_seed")
    precision(t)
    _when(t)


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


def axolotl(t: Translation) -> None:
    """Takes the words of an Axolotl config."""
    if "batch_size" in t and "gradient_accumulation_steps" not in t:
        passes = (t.number("batch_size") or 1) // (t.number("micro_batch_size") or 1)
        t.map("batch_size", "batch_size / micro_batch_size passes", gradient_accumulation_steps=f"{max(1, passes):g}")
    elif "gradient_accumulation_steps" not in t:
        t.settings["gradient_accumulation_steps"] = "1"
    _batch_per_device(t, "micro_batch_size", "; its loss is the mean of the devices' means, here that over all tokens")
    steps = _length(t, "max_steps", "num_epochs")
    _rates(t, "lr_scheduler", steps, math.floor)
    optimizer(t, "optimizer")
    seeds(t, "seed", "")
    precision(t)
    _when(t)
    _axolotl_data(t)


def _axolotl_data(t: Translation) -> None:
    size = t.number("val_set_size")
    if "val_set_size" in t and size is not None and 0 < size < 1:
        t.map("val_set_size", eval_fraction=t.text("val_set_size"))
    elif size == 0:
        t.map("val_set_size", eval_fraction="0")
    if t.text("rl").lower() in ("dpo", "orpo"):
        _axolotl_pairs(t)
    else:
        _axolotl_sources(t)
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
    _adapters(t, adapter == "lora", "adapter", {})
    for word, end in (("model_type", "ForCausalLM"), ("tokenizer_type", "Tokenizer")):
        if word in t and re.search(rf"{end}(Fast)?$", t.text(word)):
            t.ignore(word, "the files of base_model say it")
    if t.is_left("rl") and "rl" in t:
        t.refuse("rl", "dpo or orpo", is_essential=True)


def _axolotl_sources(t: Translation) -> None:
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
        _axolotl_template(t)
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


def _axolotl_pairs(t: Translation) -> None:
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
    _axolotl_template(t)
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


def _axolotl_template(t: Translation) -> None:
    for word in ("chat_template", "chat_template_jinja"):
        if word in t and t.text(word) != "tokenizer_default":
            t.need(word, "put that template into chat_template.jinja beside the tokenizer")
        elif word in t:
            t.ignore(word, "the tokenizer's own template makes the tokens")


_TARGETS = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "out", "gate_proj": "gate",
            "up_proj": "up", "down_proj": "down"}  # fmt: skip


def _adapters(t: Translation, is_on: bool, switch: str, defaults: Mapping[str, str]) -> None:
    """Takes LoRA, as `switch` turns it on; `defaults` are those of its words."""
    if not is_on:
        for word in t.left():
            if word.startswith("lora_") and (switch == "adapter" or switch in t or word not in t):
                t.ignore(word, f"{switch} is not on")
            elif word.startswith("lora_"):
                t.refuse(word, f"{switch}=true beside it", is_essential=True)
        return
    t.assume(defaults)
    t.map(switch, lora_rank=t.text("lora_r"))
    t.map("lora_r", lora_rank=t.text("lora_r"))
    if t.text("lora_alpha"):
        t.map("lora_alpha", lora_alpha=t.text("lora_alpha"))
    names = t.items("lora_target_modules")
    t.settings["lora_targets"] = "query,value"  # PEFT's where no module is stated
    if t.is_true("lora_target_linear") or names == ["all-linear"]:
        for word in ("lora_target_linear", "lora_target_modules"):
            if word in t:
                t.map(word, lora_targets="all")
    elif not set(names) <= set(_TARGETS):
        t.refuse("lora_target_modules", f"a list of {', '.join(_TARGETS)}", is_essential=True)
    elif names:
        targets = ",".join(ours for name, ours in _TARGETS.items() if name in names)
        t.map("lora_target_modules", lora_targets=targets)
    if (t.number("lora_dropout") or 0) > 0:
        t.refuse("lora_dropout", "0: there is no dropout")
    for word in t.left():
        if word.startswith("lora_") and (word.endswith("_kernel") or word == "lora_fan_in_fan_out"):
            t.ignore(word, "how the same is computed")
        elif word.startswith("lora_") and t.text(word).lower() in ("", "null", "false", "0", "0.0", "[]"):
            t.ignore(word, f"{t.text(word) or 'empty'} says nothing")
        elif word.startswith("lora_"):
            t.refuse(word, "adapters that are new, and that alone are trained", is_essential=True)


def deepspeed(t: Translation) -> None:
    """Takes the words of a DeepSpeed config."""
    batch, micro, steps = (t.text(word) for word in (
        "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"))  # fmt: skip
    for word in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
                 "gradient_clipping"):  # fmt: skip
        if t.text(word) == "auto":
            t.refuse(word, _AUTO, is_essential=word != "gradient_clipping")
    if batch and "auto" not in (batch, micro, steps):
        t.map("train_batch_size", "kept on any number of devices", global_batch_size=batch)
        if micro:
            t.map("train_micro_batch_size_per_gpu", per_device_batch_size=micro)
            if steps:
                t.ignore("gradient_accumulation_steps", "it follows: train_batch_size / (micro x GPUs)")
    elif micro and micro != "auto" and not steps:
        t.settings["gradient_accumulation_steps"] = "1"
    _deepspeed_optimizer(t)
    for word in list(t.left()):
        if word.startswith(("zero_optimization.", "zero_")):
            t.ignore(word, "where parameters and moments lie: ici_fsdp_parallelism")
        elif word.startswith(("activation_checkpointing.", "comms_logger.", "flops_profiler.", "tensorboard.", "aio.",
                              "wandb.", "csv_monitor.", "autotuning.", "communication_data_type")):  # fmt: skip
            t.ignore(word, "how it computes or logs")
    if t.is_true("bf16.enabled"):
        t.map("bf16.enabled", dtype="bfloat16", weight_dtype="float32")
    if t.is_true("fp16.enabled"):
        t.map("fp16.enabled", "bfloat16 needs no loss scale", dtype="bfloat16", weight_dtype="float32")
    for word in list(t.left()):
        if word.startswith(("fp16.", "bf16.", "amp.")):
            t.ignore(word, "of the loss scale, which float32 and bfloat16 do not need")


def _deepspeed_optimizer(t: Translation) -> None:
    optimizer(t, "optimizer.type")
    for name, key in (("lr", "learning_rate"), ("weight_decay", "adam_weight_decay"), ("eps", "adam_eps")):
        word = f"optimizer.params.{name}"
        if t.text(word) == "auto":
            t.refuse(word, _AUTO)
        elif word in t:
            t.map(word, **{key: t.text(word)})
    betas(t, "optimizer.params.betas")
    total, warmup = t.number("scheduler.params.total_num_steps"), t.number("scheduler.params.warmup_num_steps")
    kind = {"WarmupCosineLR": "cosine", "WarmupDecayLR": "wsd", "WarmupLR": "constant"}.get(t.text("scheduler.type"))
    if "scheduler.type" not in t:
        return
    if kind is None or (total is None and warmup):
        t.refuse("scheduler.type", "WarmupLR, WarmupDecayLR or WarmupCosineLR with total_num_steps")
        return
    share = (warmup or 0) / total if total else 0.0
    schedule = {"learning_rate_schedule": kind, "warmup_steps_fraction": f"{share:.12g}"}
    if kind == "wsd":
        schedule |= {"wsd_decay_steps_fraction": f"{1 - share:.12g}", "learning_rate_final_fraction": "0"}
    t.map("scheduler.type", **schedule)
    if total:
        t.map("scheduler.params.total_num_steps", steps=str(int(total)))
    if "scheduler.params.warmup_num_steps" in t:
        t.map("scheduler.params.warmup_num_steps", warmup_steps_fraction=f"{share:.12g}")
    if "scheduler.params.warmup_max_lr" in t and t.text("scheduler.params.warmup_max_lr") != "auto":
        t.map("scheduler.params.warmup_max_lr", learning_rate=t.text("scheduler.params.warmup_max_lr"))
    if t.number("scheduler.params.warmup_min_lr") == 0:
        t.ignore("scheduler.params.warmup_min_lr", "a warmup starts from 0")


# --- what they share ----------------------------------------------------------------------------------------


def _batch_per_device(t: Translation, word: str, differs: str = "") -> None:
    t.map(word, f"rows of a device in one pass{differs}", per_device_batch_size=t.text(word))
    if t.text("gradient_accumulation_steps"):
        t.map("gradient_accumulation_steps", gradient_accumulation_steps=t.text("gradient_accumulation_steps"))


def _length(t: Translation, steps: str, epochs: str) -> float | None:
    """Takes the length of the run; returns its updates, if they are stated."""
    number = t.number(steps)
    if number is not None and number > 0:
        t.map(steps, steps=t.text(steps))
        if epochs in t:
            t.ignore(epochs, f"{steps} says the length")
        else:
            t.drop(epochs)
        return number
    if steps in t:
        t.ignore(steps, "the epochs say the length")
    t.map(epochs, num_epochs=t.text(epochs))
    return None


def _rates(t: Translation, word: str, steps: float | None, whole: Callable[[float], int]) -> None:
    """Takes the schedule of the learning rate and its warmup, whose share of the steps `whole` rounds there."""
    kind = t.text(word).lower()
    warmup = _warmup(t, steps, whole)
    schedule = {
        "linear": {"learning_rate_schedule": "wsd", "learning_rate_final_fraction": "0",
                   "wsd_decay_steps_fraction": f"{1 - warmup:.12g}"},
        "cosine": {"learning_rate_schedule": "cosine", "learning_rate_final_fraction": "0"},
        "constant": {"learning_rate_schedule": "constant", "warmup_steps_fraction": "0"},
        "constant_with_warmup": {"learning_rate_schedule": "constant"},
    }.get(kind)  # fmt: skip
    if schedule is None:
        t.refuse(word, "linear, cosine, constant or constant_with_warmup")
    else:
        t.map(word, "after the warmup, to the end of the run", **schedule)
    ratio = t.number("cosine_min_lr_ratio")
    if "cosine_min_lr_ratio" in t and ratio is not None and kind == "cosine":
        t.map("cosine_min_lr_ratio", learning_rate_final_fraction=t.text("cosine_min_lr_ratio"))


def _warmup(t: Translation, steps: float | None, whole: Callable[[float], int]) -> float:
    """Takes the warmup; returns it as a share of the run."""
    updates, ratio = t.number("warmup_steps") or 0.0, t.number("warmup_ratio") or 0.0
    if updates >= 1:
        if steps is None:
            t.refuse("warmup_steps", "a share of the run: state warmup_ratio, or max_steps beside it")
            return 0.0
        share = min(1.0, updates / steps)
        t.map("warmup_steps", "warmup steps / steps", warmup_steps_fraction=f"{share:.12g}")
        if "warmup_ratio" in t:
            t.ignore("warmup_ratio", "warmup_steps says it")
        else:
            t.drop("warmup_ratio")
        return share
    share, why = min(1.0, updates or ratio), ""
    if share and steps:
        share = min(1.0, whole(share * steps) / steps)
        why = f"rounded {'up' if whole is math.ceil else 'down'} to whole steps, as there"
    elif share:
        why = f"there rounded {'up' if whole is math.ceil else 'down'} to whole steps; max_steps would fix it here"
    source = "warmup_ratio" if ratio and not updates else "warmup_steps"
    for word in ("warmup_steps", "warmup_ratio"):
        if word in t or word == source:
            t.map(word, why, warmup_steps_fraction=f"{share:.12g}")
        else:
            t.drop(word)
    return share


def optimizer(t: Translation, word: str) -> None:
    """Takes the name of an optimizer: adamw_torch_fused and its like are adamw."""
    name = t.text(word).lower()
    if not name:
        return
    ours = next((_OPTIMIZERS[known] for known in sorted(_OPTIMIZERS, key=len, reverse=True)
                 if re.match(rf"(distributed_?)?(fused_?)?{known}(_|$|8bit)", name)), "")  # fmt: skip
    if not ours or "8bit" in name:
        t.refuse(word, "adamw, lion, adafactor, muon or sgd, with moments of the parameters' dtype")
        return
    t.map(word, opt_type=ours)


def betas(t: Translation, word: str) -> None:
    """Takes a pair of decays."""
    pair = t.items(word)
    if len(pair) == 2:
        t.map(word, adam_b1=pair[0], adam_b2=pair[1])
    elif word in t:
        t.refuse(word, "two numbers")


def seeds(t: Translation, word: str, of_data: str) -> None:
    """Takes the seeds of the parameters and of the data's order."""
    seed = t.text(word)
    data = t.text(of_data) if of_data and of_data in t else seed
    t.map(word, init_weights_seed=seed, data_shuffle_seed=data)


def precision(t: Translation) -> None:
    """Takes bf16 and fp16: float32 parameters, computed in bfloat16."""
    asked = False
    for word, why in (("bf16", ""), ("fp16", "bfloat16 needs no loss scale")):
        if t.is_true(word) or (word in t and t.text(word) in ("auto", "full")):
            t.map(word, why, dtype="bfloat16", weight_dtype="float32")
            asked = True
        elif word in t:
            t.ignore(word, "false says nothing")
    if not asked:
        t.settings |= {"dtype": "float32", "weight_dtype": "float32"}
    if "gradient_checkpointing" in t:
        policy = "none" if t.text("gradient_checkpointing").lower() == "false" else "full"
        t.map("gradient_checkpointing", remat_policy=policy)


def _when(t: Translation) -> None:
    """Takes when it evaluates and saves, which change nothing that is trained."""
    every = {word: t.text(word) for word in ("eval_steps", "save_steps", "logging_steps")}
    evaluates, saves = t.text("eval_strategy"), t.text("save_strategy")
    for word, ours in (("save_steps", "checkpoint_period"), ("logging_steps", "log_period")):
        number = t.number(word)
        if number is not None and number >= 1:
            t.map(word, **{ours: str(int(number))})
        elif every[word]:
            t.ignore(word, "a share of the run; it changes nothing that is trained")
    if saves == "no":
        t.map("save_strategy", enable_checkpointing="false")
    elif "save_strategy" in t:
        t.ignore("save_strategy", "checkpoint_period says when")
    period = t.number("eval_steps") or t.number("logging_steps")
    if evaluates == "steps" or (not evaluates and "eval_steps" in t):
        t.map("eval_strategy" if evaluates else "eval_steps", eval_interval=str(max(1, int(period or 1))))
    elif evaluates:
        t.map("eval_strategy", "" if evaluates == "no" else "eval_interval says when", eval_interval="-1")
    if "eval_steps" in t and t.is_left("eval_steps"):
        t.ignore("eval_steps", "eval_interval says when")
    for word in ("evals_per_epoch", "saves_per_epoch"):
        if word in t:
            t.ignore(word, "eval_interval and checkpoint_period count updates; it changes nothing that is trained")
    if "eval_batch_size" in t:
        t.map("eval_batch_size", eval_per_device_batch_size=t.text("eval_batch_size"))
    if "resume_from_checkpoint" in t:
        t.ignore("resume_from_checkpoint", "a checkpoint in run_dir is resumed by itself")


def per_device_equation(t: Translation, p: str, g: str) -> tuple[str, str]:
    """Returns the batch as an equation in their words and in ours."""
    rows, steps = t.settings.get("per_device_batch_size", "?"), t.settings.get("gradient_accumulation_steps")
    batch = t.settings.get("global_batch_size")
    if batch:
        there = f"train_batch_size {batch} = {p} x {g} x GPUs"
        here = f"global_batch_size {batch}, in passes of at most per_device_batch_size {rows} x devices"
        return there, here
    there = f"{p} {rows} x {g} {steps} x GPUs"
    return there, f"per_device_batch_size {rows} x devices x gradient_accumulation_steps {steps}"
