"""Rules shared by the tables of several trainers: length, rates, optimizer, seeds, LoRA, evals."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from maxbatch.commands.import_config.table import Equation, Format
from maxbatch.commands.import_config.translation import Translation

_OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "fusedadam": "adamw", "cpuadam": "adamw", "onebitadam": "",
               "lion": "lion", "adafactor": "adafactor", "sgd": "sgd", "muon": "muon"}  # fmt: skip
_TARGETS = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "out", "gate_proj": "gate",
            "up_proj": "up", "down_proj": "down"}  # fmt: skip


def _steps_of(t: Translation) -> float | None:
    """Returns the updates of a run, or None."""
    number = t.number("max_steps")
    return number if number is not None and number > 0 else None


def length(t: Translation, epochs: str) -> None:
    if _steps_of(t) is not None:
        t.map("max_steps", steps=t.text("max_steps"))
        if epochs in t:
            t.ignore(epochs, "max_steps sets the length")
        else:
            t.drop(epochs)
        return
    if "max_steps" in t:
        t.ignore("max_steps", "the epochs set the length")
    t.map(epochs, num_epochs=t.text(epochs))


def rates(t: Translation, word: str, whole: Callable[[float], int]) -> None:
    """Takes the learning-rate schedule and its warmup; `whole` rounds the warmup to steps as the other program does."""
    kind = t.text(word).lower()
    warmup = _warmup(t, whole)
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


def _warmup(t: Translation, whole: Callable[[float], int]) -> float:
    """Takes the warmup; returns it as a share of the run."""
    steps, updates, ratio = _steps_of(t), t.number("warmup_steps") or 0.0, t.number("warmup_ratio") or 0.0
    if updates >= 1:
        if steps is None:
            t.refuse("warmup_steps", "a share of the run: state warmup_ratio, or max_steps beside it")
            return 0.0
        share = min(1.0, updates / steps)
        t.map("warmup_steps", "warmup steps / steps", warmup_steps_fraction=f"{share:.12g}")
        if "warmup_ratio" in t:
            t.ignore("warmup_ratio", "warmup_steps states it")
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
    """Takes an optimizer's name; variants such as adamw_torch_fused are adamw."""
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
    pair = t.items(word)
    if len(pair) == 2:
        t.map(word, adam_b1=pair[0], adam_b2=pair[1])
    elif word in t:
        t.refuse(word, "two numbers")


def seeds(t: Translation, word: str) -> None:
    """Takes the seed of parameters and data order; Hugging Face has an optional data seed."""
    seed = t.text(word)
    data = t.text("data_seed") if t.framework in ("hf", "trl") and "data_seed" in t else seed
    t.map(word, init_weights_seed=seed, data_shuffle_seed=data)


def _evaluation(t: Translation, word: str) -> None:
    """Takes the period of evals, which does not affect training."""
    strategy = t.text("eval_strategy")
    if strategy == "steps" or (not strategy and "eval_steps" in t):
        period = t.number("eval_steps") or t.number("logging_steps") or 1
        t.map("eval_strategy" if strategy else "eval_steps", eval_interval=str(max(1, int(period))))
    elif strategy:
        t.map("eval_strategy", "" if strategy == "no" else "evals run every eval_interval updates", eval_interval="-1")


def _targets(t: Translation, _: str) -> None:
    names = t.items("lora_target_modules")
    t.settings["lora_targets"] = "query,value"  # PEFT's default
    if t.is_true("lora_target_linear") or names == ["all-linear"]:
        for word in ("lora_target_linear", "lora_target_modules"):
            if word in t:
                t.map(word, lora_targets="all")
    elif not set(names) <= set(_TARGETS):
        t.refuse("lora_target_modules", f"a list of {', '.join(_TARGETS)}", is_essential=True)
    elif names:
        targets = ",".join(ours for name, ours in _TARGETS.items() if name in names)
        t.map("lora_target_modules", lora_targets=targets)


def per_device_equation(p: str) -> Equation:
    """Returns the equation of a batch stated by rows per device (`p`) and passes."""

    def equation(t: Translation) -> tuple[str, str]:
        rows, steps = t.settings.get("per_device_batch_size", "?"), t.settings.get("gradient_accumulation_steps")
        if batch := t.settings.get("global_batch_size"):
            there = f"train_batch_size {batch} = {p} x gradient_accumulation_steps x GPUs"
            return there, f"global_batch_size {batch}, in passes of at most per_device_batch_size {rows} x devices"
        there = f"{p} {rows} x gradient_accumulation_steps {steps} x GPUs"
        return there, f"per_device_batch_size {rows} x devices x gradient_accumulation_steps {steps}"

    return equation


def _of_no_batch(t: Translation) -> tuple[str, str]:
    raise KeyError("batch")


TRAINER = Format(
    "trainer", _of_no_batch,
    {"optimizer": optimizer, "betas": betas, "seeds": seeds, "evaluation": _evaluation, "targets": _targets},
)  # fmt: skip
