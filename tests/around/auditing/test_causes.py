"""An audit names the planted cause, or none; rounding in bfloat16 is not mistaken for a fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import maxbatch
from maxbatch.around.auditing.causes import CAUSES
from maxbatch.cli import main
from tests.around.auditing.numpy_trainer import FAULTS, Trainer, maker

PLANTED = "from tests.around.auditing.numpy_trainer import maker\nmake = maker('{}')\n"
# Sound, and rounded: neither is a fault. The parameters in bfloat16 round by more than the order of
# a sum changes.
SOUND = (
    "",
    "clipping",
    "large epsilon",
    "mean over rows",
    "padding counted",
    "bf16 loss",
    "pure bf16",
    "zero gradient",
)
# Promises whose cause is recognised, so that None is no way out.
RECOGNISED = {
    "mean of means": ("uneven", {"sgd", "adamw"}),
    "sum": ("cut", {"sgd"}),
    "mask ignored": ("weights", {"sgd", "adamw"}),
    "padding trained on": ("padding", {"sgd", "adamw"}),
    "dropout": ("order", {"sgd", "adamw"}),
    "bf16 accumulators": ("cut", {"sgd", "adamw"}),
    "bf16 autocast": ("cut", {"sgd", "adamw"}),
    "state not saved": ("resume", {"sgd", "adamw"}),
}
COMBINED = (
    "clipping per pass and mean of means",
    "clipping and sum",
    "sum and decay per pass",
    "sum and large epsilon",
    "dropout and mean of means",
    "bf16 accumulators and clipping per pass",
    "bf16 autocast and mean of means",
    "bf16 loss and dropout",
    "batch norm and running statistics",
    "mean over rows and padding counted",
    "pure bf16 and mask ignored",
    "0 / 0 and mean of means",
)


@pytest.mark.runs
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_cause_is_the_planted_one_or_none(optimizer: str) -> None:
    for fault in (*FAULTS, *COMBINED):
        found = maxbatch.audit(maker(fault, optimizer), updates=2)
        planted = set[str | None]().union(*(FAULTS[part] for part in fault.split(" and "))) | {None}
        causes = {each.promise: each.cause for each in found.broken}
        assert set(causes.values()) <= planted, (fault, causes)
        promise, optimizers = RECOGNISED.get(fault, ("", set[str]()))
        assert optimizer not in optimizers or causes[promise] is not None, (fault, causes)
        assert found.holds == (fault in SOUND), (fault, causes)


@pytest.mark.runs
def test_a_cause_is_the_planted_one_or_none_without_a_loss() -> None:
    for fault in ("batch norm", "clipping per pass", "dropout", "mean of means", "sum", "0 / 0"):
        causes = {
            each.cause
            for each in maxbatch.audit(maker(fault, "adamw", reports_loss=False), seed=1).broken
        }
        assert causes and causes <= {*FAULTS[fault], None}, (fault, causes)


def test_clipped_passes_are_not_taken_for_updates_of_their_own() -> None:
    """Small steps at a constant rate add up nearly as updates one after the other do."""

    class Constant(Trainer):
        def _updated(self, state: Any, gradient: Any) -> Any:
            return super()._updated(state | {"updates": 0}, gradient)

    found = maxbatch.audit(lambda layout: Constant(layout, "clipping of every pass"), updates=2)
    assert {each.cause for each in found.broken} == {None}
    found = maxbatch.audit(lambda layout: Constant(layout, "optimizer per micro-batch"), updates=2)
    assert {each.cause for each in found.broken} == {"optimizer per micro-batch"}


def test_a_run_that_differs_when_it_is_repeated_is_not_repeatable() -> None:
    rates = iter(range(10**6))

    def make(layout: maxbatch.Layout) -> object:
        trainer = maker()(layout)
        step = trainer.step
        trainer.step = lambda state, batch: step(state | {"updates": next(rates) % 7}, batch)  # type: ignore[method-assign]
        return trainer

    assert {each.cause for each in maxbatch.audit(make).broken} == {"not repeatable"}


def test_json_gives_a_documented_cause_or_null_and_the_text_no_other_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("trainer.py").write_text(
        "from tests.around.auditing.numpy_trainer import maker\nmake = maker('clipping per pass')\n"
    )
    assert main(["audit", "trainer.py:make", "--json"]) == 1
    promises = json.loads(capsys.readouterr().out)["promises"]
    assert {each["cause"] for each in promises} == {None}
    assert main(["audit", "trainer.py:make"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "cut: the cut changes the update; cause not recognised" in out
    assert not any(sentence in out for sentence in CAUSES.values())


def test_a_nan_of_0_over_0_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    Path("trainer.py").write_text(PLANTED.format("0 / 0"))
    assert main(["audit", "trainer.py:make"]) == 1
    said = (
        "empty, padding: a row, a micro-batch or a device without a trained token gives NaN, as 0 "
        "/ 0 does"
    )
    assert said in " ".join(capsys.readouterr().out.split())


def test_the_page_lists_every_cause() -> None:
    page = (Path(maxbatch.__file__).parents[1] / "docs" / "audit.md").read_text()
    assert all(f"| {cause} | {sentence} |" in page for cause, sentence in CAUSES.items())
