"""Rules of DeepSpeed's table."""

from __future__ import annotations

from maxbatch.commands.import_config.table import Format
from maxbatch.commands.import_config.trainer_words import TRAINER, per_device_equation
from maxbatch.commands.import_config.translation import Translation

_SCHEDULES = {"WarmupCosineLR": "cosine", "WarmupDecayLR": "wsd", "WarmupLR": "constant"}


def _schedule(t: Translation, word: str) -> None:
    """Takes the schedule; its warmup and length are in updates."""
    total, warmup = (t.number(f"scheduler.params.{name}_num_steps") for name in ("total", "warmup"))
    kind = _SCHEDULES.get(t.text(word))
    if kind is None or (total is None and warmup):
        t.refuse(word, "WarmupLR, WarmupDecayLR or WarmupCosineLR with total_num_steps")
        return
    share = (warmup or 0) / total if total else 0.0
    schedule = {"learning_rate_schedule": kind, "warmup_steps_fraction": f"{share:.12g}"}
    if kind == "wsd":
        schedule |= {"wsd_decay_steps_fraction": f"{1 - share:.12g}", "learning_rate_final_fraction": "0"}
    t.map(word, **schedule)
    if total:
        t.map("scheduler.params.total_num_steps", steps=str(int(total)))
    if "scheduler.params.warmup_num_steps" in t:
        t.map("scheduler.params.warmup_num_steps", warmup_steps_fraction=f"{share:.12g}")
    FORMAT.translate(t, "warmups")


FORMAT = Format(
    "deepspeed", per_device_equation("train_micro_batch_size_per_gpu"), {"schedule": _schedule}, parent=TRAINER
)
