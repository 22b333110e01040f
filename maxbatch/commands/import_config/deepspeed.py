"""DeepSpeed's configs. Facts from the documentation of its config JSON."""

from __future__ import annotations

from maxbatch.commands.import_config.trainer_words import betas, optimizer, per_device_equation
from maxbatch.commands.import_config.translation import Translation

DEFAULTS: dict[str, str] = {}
_AUTO = "auto is filled in from the Trainer's arguments; needed: the value"


def translate(t: Translation) -> None:
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
    _optimizer(t)
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


def _optimizer(t: Translation) -> None:
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


def equation(t: Translation) -> tuple[str, str]:
    """Returns the batch as an equation in their words and in ours."""
    return per_device_equation(t, "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
