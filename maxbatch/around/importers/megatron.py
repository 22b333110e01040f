"""Rules of the table for Megatron-LM's arguments and NeMo's configs."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

from maxbatch.around.importers.table import Format
from maxbatch.around.importers.trainer_words import TRAINER
from maxbatch.around.importers.translation import Translation, states_training
from maxbatch.around.words.convert import rampup_schedule, read_number
from maxbatch.around.words.skipped import SKIPPING, Batches, Skipped, skipped
from maxbatch.config.foreign_words import normal
from maxbatch.config.loading import load_config
from maxbatch.config.values import plain_number, shown
from maxbatch.plan.rampup import RampupBatchManager

# Megatron-LM's words by NeMo's, the last name of a path.
_NEMO = {
    "max_steps": "train_iters",
    "gradient_clip_val": "clip_grad",
    "encoder_seq_length": "seq_length",
    "hidden_size": "hidden_size",
    "name": "optimizer",
    "val_check_interval": "eval_interval",
    "limit_val_batches": "eval_iters",
    "log_every_n_steps": "log_interval",
    "lr": "lr",
    "min_lr": "min_lr",
    "warmup_steps": "lr_warmup_iters",
    "splits_string": "split",
    "data_prefix": "data_path",
    "explicit_log_dir": "save",
    "exp_dir": "save",
    "betas": "betas",
}
_SCHEDULES = {
    "CosineAnnealing": "cosine",
    "cosine": "cosine",
    "constant": "constant",
    "linear": "linear",
    "WSD": "WSD",
    "WarmupDecay": "linear",
}

# Scope of its balance loss: a device's rows in a pass (nearest here: a row), each row, or all.
_SCOPES = {
    "aux_loss": "sequence",
    "seq_aux_loss": "sequence",
    "global_aux_loss": "global",
    "none": "",
}


def is_of_nemo(words: Iterable[str]) -> bool:
    """Returns whether words are paths of NeMo's configs."""
    return any(word.startswith(("trainer.", "exp_manager.", "model.")) for word in words)


def _nemo(t: Translation, _: str) -> None:
    """Takes NeMo's paths as Megatron-LM's arguments."""
    for word in list(t.left()):
        if "." not in word or t.is_merged(word) or states_training(word):
            continue
        path, _, last = word.rpartition(".")
        name = _NEMO.get(last, last)
        if last == "name" and not path.endswith("optim"):
            name = "lr_decay_style" if path.endswith("sched") else ""
        if name and normal(name) == name:
            t.rename(word, name)


def _batch(t: Translation, _: str) -> None:
    """Takes micro-batch, global batch and ramp.

    One of its micro-batches is the rows of a replica. Where the global batch is stated, a pass here
    has one of them for each stage of the pipeline, so that the parts in the pipeline are its
    micro-batches.
    """
    micro, batch = t.number("micro_batch_size"), t.text("global_batch_size")
    is_stated = bool(batch) or "step_batch_size_schedule" in t
    if micro and not micro.is_integer():
        t.refuse("micro_batch_size", "must be a whole number of rows", is_essential=True)
    elif micro:
        stages = int(t.settings.get("ici_pipeline_parallelism", "1"))
        in_pass = stages if is_stated else 1
        rows = plain_number(Fraction(int(micro)) * in_pass / t.replica)
        why = "; ".join(
            filter(
                None, (t.replica_in_words(), f"{stages} micro-batches in a pass" * (in_pass > 1))
            )
        )
        t.map("micro_batch_size", why, per_device_batch_size=str(rows))
    ramp = t.items("rampup_batch_size")
    if len(ramp) == 1:
        ramp = ramp[0].strip("[]").replace(",", " ").split()
    if len(ramp) == 3 and batch and all(text.isdigit() for text in (*ramp, batch)):
        start, rise, samples = map(int, ramp)
        schedule = rampup_schedule(start, rise, samples, int(batch))
        if schedule is None:
            t.refuse(
                "rampup_batch_size",
                "must be whole steps from its start to the global batch",
                is_essential=True,
            )
        else:
            t.map("rampup_batch_size", "thresholds in samples", batch_size_schedule=schedule)
            t.ignore("global_batch_size", "the last batch of the schedule")
            return
    elif "rampup_batch_size" in t:
        t.refuse(
            "rampup_batch_size",
            "must be START INCREMENT SAMPLES beside global_batch_size",
            is_essential=True,
        )
    if "step_batch_size_schedule" in t:
        _step_schedule(t)
    elif batch:
        t.map("global_batch_size", "kept on any number of devices", global_batch_size=batch)
    elif micro:
        t.settings["gradient_accumulation_steps"] = "1"


def _step_schedule(t: Translation) -> None:
    """Takes the schedule of steps; Megatron-LM sorts it, and counts thresholds in tokens, as whole
    samples.
    """
    word, length = "step_batch_size_schedule", t.number("seq_length")
    pairs = [entry.partition(":") for entry in t.text(word).replace(",", " ").split()]
    numbers = [(_counted(threshold), _counted(batch)) for threshold, _, batch in pairs]
    if not numbers or any(None in pair for pair in numbers):
        t.refuse(word, "must be TOKENS:BATCH ..., with suffixes K, M, B and T", is_essential=True)
        return
    tokens_of_unit, unit = (int(length), "") if length else (1, "t")
    stages = sorted(
        (threshold // tokens_of_unit, batch)
        for threshold, batch in numbers
        if threshold is not None
    )
    thresholds = [threshold for threshold, _ in stages]
    if thresholds[0] != 0 or len(set(thresholds)) < len(thresholds):
        t.refuse(
            word, "must have thresholds that differ by samples, the first 0", is_essential=True
        )
        return
    schedule = " ".join(
        f"{threshold}{unit if threshold else ''}:{batch}" for threshold, batch in stages
    )
    why = (
        "thresholds in samples: tokens / seq_length, rounded down as there"
        if length
        else "thresholds in tokens"
    )
    t.map(word, why, batch_size_schedule=schedule)
    if "global_batch_size" in t:
        t.refuse("global_batch_size", f"state it or {word}, as in Megatron-LM", is_essential=True)


_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def _counted(text: str) -> int | None:
    """Returns a number with Megatron-LM's suffixes, in any case; None for other text."""
    text = text.strip().upper()
    factor = _SUFFIXES.get(text[-1:], 1)
    number = read_number(text[:-1] if factor > 1 else text) if text != "0" else Fraction(0)
    return None if number is None else int(number * factor)


_LENGTHS = (("train_samples", "samples", "train_samples"), ("train_iters", "iters", "steps"))


def _total(t: Translation) -> tuple[str, float] | None:
    """Returns the length of a run with its unit (iters or samples), without what is skipped."""
    for word, unit, _ in _LENGTHS:
        if number := t.number(word):
            left_out = _skipped(t)
            if left_out is None or not number.is_integer():
                return unit, number
            holes = left_out.iterations if unit == "iters" else left_out.samples
            return unit, holes.kept_before(int(number))
    return None


def _length(t: Translation, _: str) -> None:
    for word, unit, ours in _LENGTHS:
        if (total := _total(t)) and total[0] == unit:
            is_shorter = total[1] != t.number(word)
            text = str(int(total[1])) if is_shorter else t.text(word)
            t.map(word, "those that are not skipped" * is_shorter, **{ours: text})


def _skipped(t: Translation) -> Skipped | None:
    """Returns what all words together skip; None for nothing, or where the batch is not stated."""
    batches, together = _batches(t), None
    if batches is None:
        return None
    for word in SKIPPING:
        if (text := " ".join(t.items(word))) and (part := skipped(word, text, batches)):
            together = part if together is None else together.with_others(part)
    return together


def _batches(t: Translation) -> Batches | None:
    """Returns the batches of the run, once their words are taken."""
    if batch := t.settings.get("global_batch_size", ""):
        return Batches.constant(int(batch)) if batch.isdigit() else None
    if schedule := t.settings.get("batch_size_schedule"):
        length = t.text("seq_length") or "2048"
        keys = (f"batch_size_schedule={schedule}", f"max_target_length={length}")
        manager = RampupBatchManager.from_config(
            load_config(overrides=[*keys, "per_device_batch_size=1"])
        )
        return Batches(manager.position_after, manager.step_at)
    return None


def _skips(t: Translation, word: str) -> None:
    """Takes the iterations and samples that are skipped."""
    batches = _batches(t)
    if not any(map(str.isdigit, t.text(word))):
        t.ignore(word, "nothing is skipped")
    elif batches is None:
        why = "needs global_batch_size beside it: the samples of an iteration"
        t.refuse(word, why, is_essential=True)
    elif skipped(word, " ".join(t.items(word)), batches) is None:
        t.refuse(word, "must be iterations from 1, or FIRST END", is_essential=True)
    else:
        together = _skipped(t)
        assert together is not None, "one of its words is here"
        why = "their samples; the rate's schedule runs over the updates that train"
        t.map(word, why, skip_samples=together.samples.text)


def _rates(t: Translation, _: str) -> None:
    total = _total(t)
    share = _warmup(t, total)
    peak, last = t.number("lr"), t.number("min_lr")
    if peak and last is not None:
        t.map(
            "min_lr",
            "last rate / peak",
            learning_rate_final_fraction=f"{min(1.0, last / peak):.12g}",
        )
    else:
        t.settings["learning_rate_final_fraction"] = "0"
    kind = _SCHEDULES.get(t.text("lr_decay_style"), "")
    if kind in ("cosine", "constant"):
        t.map("lr_decay_style", learning_rate_schedule=kind)
    elif kind == "linear":
        t.map(
            "lr_decay_style",
            "linear from the warmup to the end",
            learning_rate_schedule="wsd",
            wsd_decay_steps_fraction=f"{1 - share:.12g}",
        )
    elif kind == "WSD":
        t.map("lr_decay_style", learning_rate_schedule="wsd")
        for unit in ("iters", "samples"):
            decay = t.number(f"lr_wsd_decay_{unit}")
            if decay and total and total[0] == unit:
                t.map(f"lr_wsd_decay_{unit}", wsd_decay_steps_fraction=f"{decay / total[1]:.12g}")
    else:
        t.refuse("lr_decay_style", "must be cosine, constant, linear or WSD")
    for unit in ("iters", "samples"):
        end = t.number(f"lr_decay_{unit}")
        if end and total and total[0] == unit and end == t.number(f"train_{unit}"):
            t.ignore(f"lr_decay_{unit}", "the schedule ends with the run")


def _warmup(t: Translation, total: tuple[str, float] | None) -> float:
    share = t.number("lr_warmup_fraction")
    if share is not None and "lr_warmup_fraction" in t:
        t.map("lr_warmup_fraction", warmup_steps_fraction=f"{share:.12g}")
        return share
    for unit in ("iters", "samples"):
        number = t.number(f"lr_warmup_{unit}")
        if number is not None and total and total[0] == unit:
            share = min(1.0, number / total[1])
            t.map(
                f"lr_warmup_{unit}",
                f"warmup {unit} / {unit}",
                warmup_steps_fraction=f"{share:.12g}",
            )
            return share
    t.settings["warmup_steps_fraction"] = "0"
    return 0.0


def _dimensions(t: Translation, _: str) -> None:
    hidden, heads = t.number("hidden_size"), t.number("num_attention_heads")
    if heads and "num_query_groups" not in t:
        t.settings["base_num_kv_heads"] = str(int(heads))
    if hidden and heads and "kv_channels" not in t:
        t.settings["head_dim"] = str(int(hidden // heads))
    if hidden and not t.text("ffn_hidden_size"):
        # Megatron-LM's default: 4 x hidden, or the same parameters in the three matrices of a gated MLP.
        width = int(4 * hidden * 2 / 3) // 64 * 64 if "swiglu" in t else int(4 * hidden)
        t.settings["base_mlp_dim"] = str(width)


def _family(t: Translation, _: str) -> None:
    """Takes the experts; the router is Mixtral's, unless it normalises the scores of all experts
    first.

    Megatron-LM sums losses over layers (`router.py`); here they are a mean over the layers.
    """
    word = "num_experts" if "num_experts" in t else "num_moe_experts"
    is_first = t.is_true("moe_router_pre_softmax")
    family, why = (
        ("olmoe", "weights that are not normalised")
        if is_first
        else ("mixtral", "weights of the chosen alone")
    )
    form = {"decoder_block": family, "norm_topk_prob": "false" if is_first else "true"}
    t.map(word, f"in the form of {family}: {why}", num_experts=t.text(word), **form)


def _losses(t: Translation, _: str) -> None:
    kind, layers = t.text("moe_router_load_balancing_type", "aux_loss"), t.number("num_layers")
    scope = _SCOPES.get(kind)
    if scope is None:
        t.refuse("moe_router_load_balancing_type", f"must be {' or '.join(_SCOPES)}")
    elif "moe_router_load_balancing_type" in t:
        t.ignore(
            "moe_router_load_balancing_type",
            f"load_balance_scope={scope}" if scope else "no balance loss",
        )
    why = "x num_layers: a sum over layers there, a mean here"
    balance, squares = t.number("moe_aux_loss_coeff"), t.number("moe_z_loss_coeff")
    if balance and layers and scope:
        weight = f"{balance * layers:.12g}"
        t.map("moe_aux_loss_coeff", why, load_balance_loss_weight=weight, load_balance_scope=scope)
    elif scope == "":
        t.ignore("moe_aux_loss_coeff", "no balance loss")
    if squares and layers:
        t.map("moe_z_loss_coeff", why, router_z_loss_weight=f"{squares * layers:.12g}")


def _parts(t: Translation, word: str) -> list[str]:
    return t.text(word).replace(" ", "").split(",")


def _split(t: Translation, word: str) -> None:
    shares = _parts(t, word)
    total = sum(map(Fraction, shares))
    held_out = float(Fraction(shares[1]) / total) if len(shares) > 1 and total else 0.0
    t.map(word, "the second part", eval_fraction=f"{held_out:.12g}")


def _data(t: Translation, word: str) -> None:
    items = t.items(word)
    if len(items) == 1:
        text = items[0].strip()
        is_list = text.startswith("[") and text.endswith("]")  # of Hydra
        items = [item.strip("'\" ") for item in text[1:-1].split(",")] if is_list else text.split()
    path = ";".join(items)
    if len(items) > 1:
        weights = items[::2]
        if len(items) % 2 or not all(read_number(weight) for weight in weights):
            t.refuse(word, "must be one prefix, or a weight before each", is_essential=True)
            return
        path = ";".join(
            f"{name},{weight}" for name, weight in zip(items[1::2], weights, strict=True)
        )
    why = "read in place; documents are cut into rows before shuffling, so the rows differ"
    t.map(word, why, dataset_path=path, dataset_type="megatron")


def _equation(t: Translation) -> tuple[str, str]:
    """Returns the batch as an equation in Megatron's words and in ours."""
    p = t.settings.get("per_device_batch_size", "?")
    batch = t.settings.get("global_batch_size") or t.settings.get("batch_size_schedule", "")
    micro = t.text("micro_batch_size")
    if not batch:
        size = (
            "data-parallel size" if t.replica == 1 else f"data-parallel size (GPUs / {t.replica})"
        )
        return (
            f"global batch = micro-batch-size {micro} x {size}",
            f"per_device_batch_size {p} x devices",
        )
    batch = shown(batch)
    there = f"global batch {batch} = micro-batch-size {micro} x data-parallel size x microbatches"
    name = "global_batch_size" if "global_batch_size" in t.settings else "batch_size_schedule"
    return there, f"{name} {batch}, in passes of at most per_device_batch_size {p} x devices"


FORMAT = Format(
    "megatron",
    _equation,
    {
        "nemo": _nemo,
        "batch": _batch,
        "length": _length,
        "skips": _skips,
        "rates": _rates,
        "dimensions": _dimensions,
        "family": _family,
        "losses": _losses,
        "split": _split,
        "data": _data,
    },
    {
        "is_full": lambda t, _: (
            (t.text("recompute_granularity") or t.text("activations_checkpoint_granularity"))
            == "full"
        ),
        "is_rmsnorm": lambda t, word: t.text(word).lower() == "rmsnorm",
        "is_of_numbers": lambda t, word: all(
            part.replace(".", "", 1).isdigit() for part in _parts(t, word)
        ),
        "is_saved_there": lambda t, word: t.text(word) == t.text("save"),
    },
    TRAINER,
)
NEMO = Format("nemo", _equation, {}, parent=FORMAT)
