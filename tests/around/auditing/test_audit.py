"""An audit finds the faults that trainers had, names them with the smallest case, and finds nothing
in a sound one.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import maxbatch
from maxbatch.around.auditing import compare
from maxbatch.around.auditing.causes import CAUSES
from maxbatch.around.auditing.promises import PROMISES
from maxbatch.around.auditing.trainer import Run
from maxbatch.cli import main
from maxbatch.system.errors import ConfigError
from tests.around.auditing.numpy_trainer import Trainer, maker

NAMES = [promise.name for promise in PROMISES]
# A planted fault, the promise that it breaks first, its cause, and the rows, passes, devices and
# updates of the smallest case: those of plain gradient descent; Adam's first update hardly shows
# the size of a gradient.
PLANTED: dict[str, tuple[str, str | None, tuple[int, int, int, int]]] = {
    "mean of means": ("uneven", "mean of means", (2, 2, 1, 1)),
    "term as a mean": ("cut", None, (2, 2, 1, 1)),
    "mask ignored": ("weights", "mask ignored", (1, 1, 1, 1)),
    "last micro-batch": ("cut", "last micro-batch", (2, 2, 1, 1)),
    "last micro-batch's loss": ("cut", "last micro-batch", (2, 2, 1, 1)),
    "rows dropped": ("remainder", "dropped rows", (3, 2, 1, 1)),
    "padding trained on": ("padding", "mask ignored", (2, 1, 1, 1)),
    "optimizer per micro-batch": ("cut", "optimizer per micro-batch", (2, 2, 1, 1)),
    "dropout by device": ("devices", "random numbers", (2, 1, 2, 1)),
    "dropout of features by device": ("devices", "random numbers", (2, 1, 2, 1)),
    "bf16 accumulators": ("cut", "low precision", (2, 2, 1, 2)),
    "state not saved": ("resume", "state not saved", (1, 1, 1, 2)),
}


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_fault_is_found_with_its_cause_and_smallest_case(
    planted: str, optimizer: str
) -> None:
    promise, cause, (rows, passes, devices, updates) = PLANTED[planted]
    found = maxbatch.audit(maker(fault=planted, optimizer=optimizer))
    verdict = {each.promise: each for each in found.verdicts}[promise]
    assert (verdict.status, verdict.cause) == ("broken", cause)
    assert verdict.case is not None and verdict.case.rows == rows
    assert verdict.case.layout[:2] == (devices, passes)
    assert verdict.case.updates <= (updates if optimizer == "sgd" else 2)
    sentence = CAUSES[cause] if cause else "the cut changes the update; cause not recognised"
    assert not found.holds and f"{promise}: {sentence}" in str(found)


def test_the_reported_loss_is_held_to_every_promise() -> None:
    found = maxbatch.audit(maker(fault="last micro-batch's loss"))
    assert {each.promise for each in found.broken} >= {"cut", "uneven", "devices"}
    assert all(each.array is None and each.by is None and each.loss_by for each in found.broken)


def test_a_term_that_the_metrics_name_is_named() -> None:
    cut = next(
        each
        for each in maxbatch.audit(maker(fault="term as a mean")).verdicts
        if each.promise == "cut"
    )
    assert cut.terms == ("balance",) and cut.array == "out"


def test_a_fault_breaks_no_promise_that_it_does_not_touch() -> None:
    untouched = {
        "mean of means": {"order", "rows", "weights", "cut", "devices", "resume"},
        "mask ignored": {
            "order",
            "rows",
            "cut",
            "uneven",
            "empty",
            "remainder",
            "devices",
            "resume",
        },
        "padding trained on": {*NAMES} - {"padding"},
        "rows dropped": {*NAMES} - {"remainder"},
        "dropout of features by device": {"order", "rows", "weights", "cut", "resume"},
        "state not saved": {*NAMES} - {"resume"},
    }
    for fault, names in untouched.items():
        found = maxbatch.audit(maker(fault=fault, optimizer="adamw"))
        assert names <= {each.promise for each in found.verdicts if each.status == "holds"}, fault


@pytest.mark.runs
def test_fifty_audits_of_sound_trainers_raise_no_alarm() -> None:
    """One parameter's gradient is zero in exact arithmetic: Adam turns its rounding noise into
    whole steps.
    """
    for seed in range(25):
        for optimizer in ("sgd", "adamw"):
            found = maxbatch.audit(maker("zero gradient", optimizer, seed=seed), seed=seed)
            assert [each.status for each in found.verdicts] == ["holds"] * len(NAMES), (
                seed,
                optimizer,
                str(found),
            )


def test_noise_where_a_gradient_is_zero_is_a_whole_step_of_adam() -> None:
    """What the test above is about does happen: the parameter differs between permutations of the
    same rows.
    """
    rows = np.random.default_rng(0).integers(1, 8, (8, 8), dtype=np.int32)
    layout, shifts = maxbatch.Layout(1, 1, 8), []
    for order in (slice(None), slice(None, None, -1)):
        trainer = Trainer(layout, "zero gradient", "adamw")
        state = trainer.init()
        for _ in range(4):
            weights = np.ones((8, 8), np.float32)
            state, _ = trainer.step(
                state, {"tokens": rows[order], "weights": weights, "segments": rows * 0 + 1}
            )
        shifts.append(float(trainer.params(state)["shift"]))
    assert abs(shifts[0] - shifts[1]) > 1e-3


def test_a_first_loss_that_depends_on_the_order_of_the_rows_is_no_rounding() -> None:
    """As with a little dropout, whose parameters differ by less than 2% of their movement."""

    def run(first_loss: float) -> Run:
        return Run([{"w": np.zeros(3)}, {"w": np.ones(3)}], [first_loss], [{}], {"w": 0.0})

    assert compare.tolerance(run(2.1), [run(2.1), run(2.1 + 1e-6)])[1] == 0
    assert compare.tolerance(run(2.1), [run(2.11)])[1] == pytest.approx(0.01 / 2.1)
    assert compare.tolerance(run(2.0), [run(2.015625)])[1] == 0, "the next number of bfloat16"


def test_a_layout_that_is_refused_is_not_applicable() -> None:
    def make(layout: maxbatch.Layout) -> Trainer:
        if layout.num_devices > 1:
            raise ValueError("one\ndevice")
        return Trainer(layout)

    found = {each.promise: each for each in maxbatch.audit(make).verdicts}
    assert found["devices"].status == "not applicable"
    assert re.fullmatch(r"ValueError: one device, test_audit\.py:\d+", found["devices"].reason)
    assert {each.status for name, each in found.items() if name != "devices"} == {"holds"}


def test_a_trainer_without_a_loss_is_judged_by_its_parameters() -> None:
    class Silent(Trainer):
        def step(self, state: Any, batch: Any) -> tuple[Any, Any]:
            return super().step(state, batch)[0], None

    found = maxbatch.audit(lambda layout: Silent(layout, fault="mean of means"))
    assert found.loss_tolerance is None and "uneven" in {each.promise for each in found.broken}


def test_what_a_nan_does_is_reported_and_not_judged() -> None:
    found = maxbatch.audit(maker())
    assert found.holds and found.nan == "the parameters are no longer finite"


class Odd(Trainer):
    """A trainer that answers with something else than it has to."""

    def __init__(self, layout: maxbatch.Layout, answer: str) -> None:
        super().__init__(layout)
        self.answer = answer

    def step(self, state: Any, batch: Any) -> Any:
        if self.answer == "raises":
            raise RuntimeError("out of\nmemory")
        state, metrics = super().step(state, batch)
        answers = {
            "state": state,
            "loss": (state, {"loss": "low"}),
            "shape": (state | {"wide": True}, metrics),
            "no loss": (state, {"loss": np.nan}),
        }
        return answers.get(self.answer, (state, metrics))

    def params(self, state: Any) -> Any:
        params = super().params(state)
        if "wide" in state:
            params["out"] = params["out"].T
        if self.answer == "nan":
            params["out"] = params["out"] * np.nan
        answers = {
            "list": [*params.values()],
            "python": {"out": params["out"].tolist()},
            "text": {"a": np.array("x")},
        }
        return answers.get(self.answer, params)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            "raises",
            "whole on one device, cannot be trained on (RuntimeError: out of memory, "
            "test_audit.py:",
        ),
        ("state", "step: returned a dict; it must return (state, metrics)"),
        ("loss", "step: metrics['loss'] is a str, not a number"),
        (
            "shape",
            "params: out was (6, 8) and is (8, 6); names and shapes must be those of every layout",
        ),
        ("list", "params: returned a list; it must return names and numpy arrays"),
        ("python", "params: out is a list, not a numpy array; works: np.asarray(out)"),
        ("text", "params: a is an array that holds no numbers"),
        ("nan", "params: not finite within 4 updates"),
        ("no loss", "step: metrics['loss'] is not finite within 4 updates of finite parameters"),
    ],
)
def test_a_trainer_that_cannot_be_used_is_one_line(answer: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        maxbatch.audit(lambda layout: Odd(layout, answer))
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_trainer_that_does_not_train_cannot_be_audited() -> None:
    class Still(Trainer):
        def _updated(self, state: Any, gradient: Any) -> Any:
            return state

    with pytest.raises(ConfigError, match="changed no parameter in 4 updates"):
        maxbatch.audit(Still)


@pytest.mark.runs
def test_the_command_prints_a_table_and_its_exit_code_is_the_verdict(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("trainer.py").write_text(
        "from tests.around.auditing.numpy_trainer import maker\n"
        "sound, wrong = maker(reports_loss=False), maker(fault='mean of means')\n"
        "print('a line of the trainer')\n"
    )
    assert main(["audit", "trainer.py:sound"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[:2] for line in out.splitlines()[1:11]] == [
        [name, "holds"] for name in NAMES
    ]
    assert out.endswith("no promise is broken\n") and "a line of the trainer" not in out
    # no tolerance of a loss
    assert re.search(r"^tolerance: parameters .* of the rows\)$", out, re.M)
    assert main(["audit", "trainer.py:wrong"]) == 1
    out = capsys.readouterr().out
    assert "2 rows, 2 passes of 1 on 1 device, 1 update; tokens 7 + 1" in out
    assert f"\nuneven, empty, remainder, padding: mean of means; {CAUSES['mean of means']}\n" in out
    assert (
        "a NaN among the weights of a batch: the parameters are no longer finite (no promise is "
        "about this)\n" in out
    )
    assert out.endswith("broken: uneven, empty, remainder, padding\n")
    assert main(["audit", "trainer.py:wrong", "--json", "--seed", "3"]) == 1
    found = json.loads(capsys.readouterr().out)
    uneven = next(each for each in found["promises"] if each["promise"] == "uneven")
    assert not found["holds"] and found["tolerance"] >= 1e-5 and found["loss_spread"] > 0
    assert uneven["status"] == "broken" and uneven["by"] > 0.1 and uneven["loss_by"] > 0.01
    assert uneven["case"]["layout"] == {
        "num_devices": 1,
        "gradient_accumulation_steps": 2,
        "rows_per_pass": 1,
    }
    assert uneven["case"]["trained_tokens"] == [7, 1]
