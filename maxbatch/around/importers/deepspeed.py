"""Rules of DeepSpeed's table."""

from __future__ import annotations

from maxbatch.around.importers.table import Format
from maxbatch.around.importers.trainer_words import TRAINER, per_device_equation
from maxbatch.around.importers.translation import Translation

_SCHEDULES = {"WarmupCosineLR": "cosine", "WarmupDecayLR": "wsd", "WarmupLR": "constant"}


# Its updates in warm-up, and the last rate of WarmupCosineLR as a share of the peak, where a file
# does not state them.
_WARMUP, _LAST_OF_COSINE = "1000", "0.0001"
_OF_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def _is_no_batch(t: Translation, _: str) -> bool:
    """Returns whether no number of GPUs gives the stated batch: it is no multiple of micro-batch x
    passes.
    """
    batch, micro, passes = (t.number(word) if word in t else 1.0 for word in _OF_BATCH)
    return (
        batch is not None
        and bool(micro)
        and bool(passes)
        and batch % ((micro or 1) * (passes or 1)) != 0
    )


def _schedule(t: Translation, word: str) -> None:
    """Takes the schedule; its warmup and length are in updates."""
    total_word, warmup_word = (f"scheduler.params.{name}_num_steps" for name in ("total", "warmup"))
    autos = [name for name in (total_word, warmup_word) if t.text(name) == "auto"]
    for name in autos:
        why = (
            "auto is filled in from the Trainer's arguments, which this file does not have; "
            "needed: the value"
        )
        t.refuse(name, why, is_essential=name == total_word)
    if warmup_word not in t:
        t.assume({warmup_word: _WARMUP})
    total, warmup = t.number(total_word), t.number(warmup_word)
    kind = _SCHEDULES.get(t.text(word))
    if autos:
        t.refuse(word, f"needs updates in place of auto in {', '.join(autos)}")
    elif kind is None or total is None or warmup is None:
        t.refuse(
            word,
            "must be WarmupLR, WarmupDecayLR or WarmupCosineLR with total_num_steps, the updates of the "
            "run",
        )
    else:
        _take_schedule(t, word, kind, warmup / total)
        t.map(total_word, steps=str(int(total)))
        why = "warmup / total; linear here, logarithmic there unless warmup_type is linear"
        t.map(warmup_word, why, warmup_steps_fraction=f"{min(1.0, warmup / total):.12g}")
    FORMAT.translate(t, "warmups")


def _take_schedule(t: Translation, word: str, kind: str, share: float) -> None:
    """Takes the form of the schedule; `share` of the run is warm-up."""
    last = "scheduler.params.cos_min_ratio"
    schedule = {"learning_rate_schedule": kind}
    if kind == "wsd":
        rest = f"{max(0.0, 1 - share):.12g}"
        schedule |= {"wsd_decay_steps_fraction": rest, "learning_rate_final_fraction": "0"}
    t.map(word, **schedule)
    if kind == "cosine":
        if last not in t:
            t.assume({last: _LAST_OF_COSINE})
        t.map(last, learning_rate_final_fraction=t.text(last))


FORMAT = Format(
    "deepspeed",
    per_device_equation("train_micro_batch_size_per_gpu"),
    {"schedule": _schedule},
    {"is_no_batch": _is_no_batch},
    parent=TRAINER,
)
