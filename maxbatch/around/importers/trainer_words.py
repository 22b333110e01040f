"""Rules shared by the tables of several trainers: length, rates, optimizer, seeds, LoRA, evals."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from maxbatch.around.importers.table import Equation, Format
from maxbatch.around.importers.translation import Translation
from maxbatch.families.matrices import OF_PEFT

_OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "fusedadam": "adamw", "cpuadam": "adamw", "onebitadam": "",
               "lion": "lion", "adafactor": "adafactor", "sgd": "sgd", "muon": "muon"}  # fmt: skip


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
    if "max_steps" in t and t.number("max_steps") is None:
        t.refuse("max_steps", "must be a number of updates", is_essential=True)
    elif "max_steps" in t:
        t.ignore("max_steps", "the epochs set the length")
    why = (
        "prompts of an epoch that fill no batch are left out there; here batches go on into the "
        "next epoch"
        if "batch_size" in t.settings
        else "an epoch's last batch has the rows that are left there; here batches go on into the "
        "next epoch"
    )
    t.map(epochs, why, num_epochs=t.text(epochs))


def rates(
    t: Translation, word: str, whole: Callable[[float], int], most: int | None = None
) -> None:
    """Takes the learning-rate schedule and its warmup.

    `whole` rounds the warmup to steps as the other program does; `most` bounds a warmup that the
    file does not state.
    """
    kind = t.text(word).lower()
    warmup = _no_warmup(t) if kind == "constant" else _warmup(t, kind, whole, most)
    if kind == "cosine_with_min_lr":
        _cosine_to_least_rate(t, word)
        return
    schedule = {
        "linear": {"learning_rate_schedule": "wsd", "learning_rate_final_fraction": "0",
                   "wsd_decay_steps_fraction": f"{1 - warmup:.12g}"},
        "cosine": {"learning_rate_schedule": "cosine", "learning_rate_final_fraction": "0"},
        "constant": {"learning_rate_schedule": "constant", "warmup_steps_fraction": "0"},
        "constant_with_warmup": {"learning_rate_schedule": "constant"},
    }.get(kind)  # fmt: skip
    if schedule is None:
        t.refuse(
            word, "must be linear, cosine, cosine_with_min_lr, constant or constant_with_warmup"
        )
    else:
        t.map(word, "after the warmup, to the end of the run", **schedule)
    ratio = t.number("cosine_min_lr_ratio")
    if "cosine_min_lr_ratio" in t and ratio is not None and kind == "cosine":
        t.map("cosine_min_lr_ratio", learning_rate_final_fraction=t.text("cosine_min_lr_ratio"))


_OF_SCHEDULE = "lr_scheduler_kwargs"


def _cosine_to_least_rate(t: Translation, word: str) -> None:
    """Takes Hugging Face's cosine_with_min_lr; its last rate is one of the schedule's arguments."""
    t.expand(_OF_SCHEDULE)
    rate, share, peak = (f"{_OF_SCHEDULE}.min_lr", f"{_OF_SCHEDULE}.min_lr_rate", "learning_rate")
    names = [name for name in (rate, share) if name in t]
    least, most = t.number(names[0]) if len(names) == 1 else None, t.number(peak)
    if least is None or not most:
        t.refuse(
            word, f"needs min_lr or min_lr_rate in {_OF_SCHEDULE}, a number, beside learning_rate"
        )
        return
    fraction = f"{least if names == [share] else least / most:.12g}"
    final = {"learning_rate_schedule": "cosine", "learning_rate_final_fraction": fraction}
    t.map(word, "after the warmup, to the end of the run", **final)
    t.map(names[0], "last rate / peak", learning_rate_final_fraction=fraction)
    half = f"{_OF_SCHEDULE}.num_cycles"
    if half in t and t.number(half) == 0.5:
        t.ignore(half, "half a wave")
    elif half in t:
        t.refuse(half, "must be 0.5, half a wave")


_OF_WARMUP = ("warmup_steps", "warmup_ratio")


def _no_warmup(t: Translation) -> float:
    """Ignores the words of a warmup, which the schedule does not have; returns its share, 0."""
    for word in _OF_WARMUP:
        if word in t:
            t.ignore(word, "constant has no warmup there; constant_with_warmup has one")
        else:
            t.drop(word)
    return 0.0


def _warmup(t: Translation, kind: str, whole: Callable[[float], int], most: int | None) -> float:
    """Takes the warmup; returns it as a share of the run."""
    steps, updates, ratio = (
        _steps_of(t),
        t.number("warmup_steps") or 0.0,
        t.number("warmup_ratio") or 0.0,
    )
    if updates >= 1:
        if "warmup_ratio" in t:
            t.ignore("warmup_ratio", "warmup_steps states it")
        else:
            t.drop("warmup_ratio")
        if steps is None:
            _need_share(t, updates, is_linear=kind == "linear")
            return 0.0
        share = min(1.0, updates / steps)
        t.map("warmup_steps", "warmup steps / steps", warmup_steps_fraction=f"{share:.12g}")
        return share
    unread = [word for word in _OF_WARMUP if word in t and t.number(word) is None]
    if unread:
        for word in unread:
            t.refuse(word, "must be a number")
        return 0.0
    share, why = min(1.0, updates or ratio), ""
    is_default = not updates and "warmup_ratio" not in t
    if share and steps:
        share = min(1.0, whole(share * steps) / steps)
        share = min(share, most / steps) if most and is_default else share
        why = f"rounded {'up' if whole is math.ceil else 'down'} to whole steps, as there"
    elif share:
        end = "at most one update later" if whole is math.ceil else "at most one update sooner"
        bound = f", and after {most} updates at the latest" * bool(most and is_default)
        why = f"there it ends with a whole update, {end}{bound}; max_steps beside it makes it exact"
    source = "warmup_ratio" if ratio and not updates else "warmup_steps"
    for word in _OF_WARMUP:
        if word in t or word == source:
            t.map(word, why, warmup_steps_fraction=f"{share:.12g}")
        else:
            t.drop(word)
    return share


def _need_share(t: Translation, updates: float, is_linear: bool) -> None:
    """Asks for the share of a warmup in updates, if the file does not state those of the run."""
    rest = ", and wsd_decay_steps_fraction, which is 1 - that share" if is_linear else ""
    step = (
        f"no warmup until you state its share, {updates:g} / total_steps, which maxbatch plan "
        f"prints{rest}; or state max_steps in the file"
    )
    t.need("warmup_steps", step, warmup_steps_fraction="0")


def optimizer(t: Translation, word: str) -> None:
    """Takes an optimizer's name; variants such as adamw_torch_fused are adamw."""
    name = t.text(word).lower()
    if not name:
        return
    ours = next((_OPTIMIZERS[known] for known in sorted(_OPTIMIZERS, key=len, reverse=True)
                 if re.match(rf"(distributed_?)?(fused_?)?{known}(_|$|8bit)", name)), "")  # fmt: skip
    if not ours or "8bit" in name:
        t.refuse(
            word,
            "must be adamw, lion, adafactor, muon or sgd, with moments of the parameters' dtype",
        )
        return
    t.map(word, opt_type=ours)


def betas(t: Translation, word: str) -> None:
    pair = t.items(word)
    if len(pair) == 2:
        t.map(word, adam_b1=pair[0], adam_b2=pair[1])
    elif word in t:
        t.refuse(word, "must be two numbers")


def seeds(t: Translation, word: str) -> None:
    """Takes the seed of parameters and data order; Hugging Face has an optional data seed."""
    seed = t.text(word)
    data = t.text("data_seed") if t.framework in ("hf", "trl") and "data_seed" in t else seed
    t.map(word, init_weights_seed=seed, data_shuffle_seed=data)


def _period(t: Translation, word: str) -> int | None:
    """Returns a period in updates; a number below 1 is a share of them, rounded up. None: no
    number, or no length.
    """
    period, steps = t.number(word), _steps_of(t)
    if period is None or period <= 0:
        return None
    if period >= 1:
        return int(period)
    return math.ceil(period * steps) if steps else None


def _periods(t: Translation, _: str) -> None:
    """Takes the periods of checkpoints and logs, which do not affect training."""
    for word, key in (("save_steps", "checkpoint_period"), ("logging_steps", "log_period")):
        number, period = t.number(word), _period(t, word)
        if period is not None:
            share = number is not None and number < 1
            t.map(
                word,
                "a share of max_steps, rounded up as there" if share else "",
                **{key: str(period)},
            )
        elif t.text(word):
            t.ignore(
                word, f"a share of the updates, whose number is unknown here: {key} counts them"
            )


def _evaluation(t: Translation, word: str) -> None:
    """Takes the period of evals, which does not affect training."""
    strategy = t.text("eval_strategy")
    if strategy == "steps" or (not strategy and "eval_steps" in t):
        given = "eval_steps" if "eval_steps" in t else "logging_steps"
        source, period = "eval_strategy" if strategy else "eval_steps", _period(t, given)
        if period is None and given in t:
            why = "a share of the updates, whose number is unknown here: state eval_interval"
            t.need(source, why, eval_interval="-1")
        else:
            t.map(source, eval_interval=str(period or 1))
    elif strategy:
        t.map(
            "eval_strategy",
            "" if strategy == "no" else "evals run every eval_interval updates",
            eval_interval="-1",
        )


def _targets(t: Translation, _: str) -> None:
    names = t.items("lora_target_modules")
    t.settings["lora_targets"] = "query,value"  # PEFT's default
    if t.is_true("lora_target_linear") or names == ["all-linear"]:
        for word in ("lora_target_linear", "lora_target_modules"):
            if word in t:
                t.map(word, lora_targets="all")
    elif not set(names) <= set(OF_PEFT):
        t.refuse(
            "lora_target_modules", f"must be a list of {', '.join(OF_PEFT)}", is_essential=True
        )
    elif names:
        targets = ",".join(ours for name, ours in OF_PEFT.items() if name in names)
        t.map("lora_target_modules", lora_targets=targets)


def per_device_equation(p: str) -> Equation:
    """Returns the equation of a batch stated by rows per device (`p`) and passes."""

    def equation(t: Translation) -> tuple[str, str]:
        """Raises KeyError if the batch is not known."""
        rows = t.settings.get("per_device_batch_size", "?")
        replicas = "GPUs" if t.replica == 1 else f"GPUs / {t.replica} of a replica"
        if batch := t.settings.get("global_batch_size"):
            there = f"train_batch_size {batch} = {p} x gradient_accumulation_steps x {replicas}"
            return (
                there,
                f"global_batch_size {batch}, in passes of at most per_device_batch_size {rows} x devices",
            )
        steps = t.settings["gradient_accumulation_steps"]
        there = f"{p} {t.text(p)} x gradient_accumulation_steps {steps} x {replicas}"
        return (
            there,
            f"per_device_batch_size {rows} x devices x gradient_accumulation_steps {steps}",
        )

    return equation


def _of_no_batch(t: Translation) -> tuple[str, str]:
    raise KeyError("batch")


TRAINER = Format(
    "trainer", _of_no_batch,
    {
        "optimizer": optimizer, "betas": betas, "seeds": seeds, "evaluation": _evaluation, "periods": _periods,
        "targets": _targets,
    },
)  # fmt: skip
