"""Critical batch sizes on a page: loss against batch size, the table of branches, the command that
follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from maxbatch.around.pages.page import Page, heading, paragraph, table
from maxbatch.around.pages.plots import BatchCurve, loss_against_batch


def add_critical_batch(page: Page, measured: Mapping[str, Any]) -> None:
    """Adds the measurement of a `critical_batch.json` to a page."""
    checkpoints = measured["checkpoints"]
    page.add(heading(f"Critical batch size along {measured['run']}"))
    page.figures(
        [
            loss_against_batch(
                [_curve(each, measured["tolerance"]) for each in checkpoints if each["branches"]]
            )
        ]
    )
    names = ("batch_size", "learning_rate", "updates", "loss", "difference")
    rows = [
        [checkpoint["step"], checkpoint["samples_seen"], *(branch[name] for name in names)]
        for checkpoint in checkpoints
        for branch in checkpoint["branches"]
    ]
    page.add(
        table(
            ["checkpoint", "samples", "batch", "learning rate", "updates", "loss", "against base"],
            rows,
        ),
        *(paragraph(checkpoint["in_words"]) for checkpoint in checkpoints),
        paragraph(
            f"Tolerance: {measured['tolerance']:g} {measured['tolerance_unit']}. Next: {measured['command']}"
        ),
    )


def _curve(checkpoint: Mapping[str, Any], tolerance: float) -> BatchCurve:
    losses = {branch["batch_size"]: branch["loss"] for branch in checkpoint["branches"]}
    start = losses.get(checkpoint["batch_size"])
    if checkpoint["is_below_base"] or start is None:
        start = next((loss for loss in losses.values() if loss is not None), None)
    return BatchCurve(
        label=f"step {checkpoint['step']:,}",
        batch_sizes=list(losses),
        losses=list(losses.values()),
        tolerated_loss=None if start is None else start + tolerance,
        critical_batch_size=checkpoint["critical_batch_size"],
        errors=[branch.get("standard_error") for branch in checkpoint["branches"]],
    )
