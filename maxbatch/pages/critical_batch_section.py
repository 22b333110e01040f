"""Critical batch sizes on a page: loss against batch size, the table of branches, the command that follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from maxbatch.pages.page import Page
from maxbatch.pages.plots import BatchCurve, loss_against_batch


def add_critical_batch(page: Page, found: Mapping[str, Any]) -> None:
    """Adds a measurement, as `critical_batch.json` holds it, to a page."""
    page.heading(f"Critical batch size along {found['run']}")
    checkpoints = found["checkpoints"]
    page.figures([loss_against_batch([_curve(checkpoint, found["tolerance"]) for checkpoint in checkpoints])])
    page.table(
        ["checkpoint", "samples", "batch", "learning rate", "updates", "loss", "against base"],
        [row for checkpoint in checkpoints for row in _rows(checkpoint)],
    )
    for checkpoint in checkpoints:
        page.paragraph(checkpoint["in_words"])
    page.paragraph(f"Tolerance: {found['tolerance']:g} {found['tolerance_unit']}. Next: {found['command']}")


def _rows(checkpoint: Mapping[str, Any]) -> list[list[Any]]:
    names = ("batch_size", "learning_rate", "updates", "loss", "difference")
    return [
        [checkpoint["step"], checkpoint["samples_seen"], *(branch[name] for name in names)]
        for branch in checkpoint["branches"]
    ]


def _curve(checkpoint: Mapping[str, Any], tolerance: float) -> BatchCurve:
    branches: Sequence[Mapping[str, Any]] = checkpoint["branches"]
    losses = {branch["batch_size"]: branch["loss"] for branch in branches}
    start = losses[checkpoint["batch_size"]]
    if checkpoint["is_below_base"] or start is None:
        start = next(loss for loss in losses.values() if loss is not None)
    return BatchCurve(
        label=f"step {checkpoint['step']:,}",
        batch_sizes=list(losses),
        losses=list(losses.values()),
        tolerated_loss=start + tolerance,
        critical_batch_size=checkpoint["critical_batch_size"],
    )
