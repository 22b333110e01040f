"""Trainers that keep state elsewhere, or answer with something odd: a right verdict, or one line
and exit code 2.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import maxbatch
from maxbatch.around.auditing.trainer import Layout
from maxbatch.cli import main
from tests.around.auditing.numpy_trainer import Trainer, V

ODD = "import os\nimport numpy as np\nfrom tests.around.auditing.numpy_trainer import Trainer\n"
COUNTER = """
count = 0
class Counting(Trainer):
    def init(self):
        global count
        count = 0
        return super().init()
    def step(self, state, batch):
        global count
        count += 1
        return super().step(state | {"updates": count - 1}, batch)
make = Counting
"""
STORE = """
store = {}
class Stored(Trainer):
    def init(self):
        store[len(store)] = super().init()
        return len(store) - 1
    def step(self, key, batch):
        store[len(store)], metrics = super().step(store[key], batch)
        return len(store) - 1, metrics
    def params(self, key):
        return super().params(store[key])
make = Stored
"""
REPORTS = "class Odd(Trainer):\n    def step(self, state, batch):\n        {}\nmake = Odd\n"
RETURNS = "return super().step(state, batch)[0], {{'loss': {}}}"


def audited(file: str) -> int:
    Path("trainer.py").write_text(ODD + file)
    return main(["audit", "trainer.py:make"])


@pytest.mark.parametrize(
    ("file", "where"),
    [(COUNTER, ", saved after 1; "), (STORE, ", saved after 1, resumed in a new process; ")],
    ids=["counter", "store"],
)
def test_a_resume_is_broken_if_it_needs_a_global_of_its_process(
    file: str, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audited(file) == 1
    out = capsys.readouterr().out
    assert where in out and out.endswith("broken: resume\n"), out


def test_a_resume_is_broken_by_a_generator_of_its_process() -> None:
    rates: Iterator[int] = iter(())

    class Drawing(Trainer):
        def init(self) -> Any:
            nonlocal rates
            rates = iter(range(100))
            return super().init()

        def step(self, state: Any, batch: Any) -> Any:
            return super().step(state | {"updates": next(rates)}, batch)

    found = maxbatch.audit(Drawing)
    assert [each.promise for each in found.broken] == ["resume"]


def test_a_resume_is_broken_by_a_count_of_its_class() -> None:
    class Counting(Trainer):
        count = 0

        def init(self) -> Any:
            type(self).count = 0
            return super().init()

        def step(self, state: Any, batch: Any) -> Any:
            type(self).count += 1
            return super().step(state | {"updates": self.count - 1}, batch)

    assert [each.promise for each in maxbatch.audit(Counting).broken] == ["resume"]


def test_a_state_that_cannot_be_saved_makes_no_resume_hold() -> None:
    class Unsaved(Trainer):
        def init(self) -> Any:
            return super().init() | {"lock": threading.Lock()}

        def _updated(self, state: Any, gradient: Any) -> Any:
            return super()._updated(state, gradient) | {"lock": state["lock"]}

    found = {each.promise: each for each in maxbatch.audit(Unsaved).verdicts}
    assert (
        found["resume"].status == "not applicable"
        and "cannot be pickled (TypeError" in found["resume"].reason
    )
    assert {each.status for name, each in found.items() if name != "resume"} == {"holds"}


def test_a_state_that_can_only_be_copied_does_not_move_with_its_original() -> None:
    class Drawing(Trainer):
        draws = False

        def init(self) -> Any:
            numbers = iter(range(100))
            return super().init() | {"next": lambda: next(numbers)}

        def _updated(self, state: Any, gradient: Any) -> Any:
            state = state | {"updates": state["next"]() if self.draws else state["updates"]}
            return super()._updated(state, gradient) | {"next": state["next"]}

    class Wrong(Drawing):
        draws = True

    assert [each.promise for each in maxbatch.audit(Wrong).broken] == ["resume"]
    found = next(each for each in maxbatch.audit(Drawing).verdicts if each.promise == "resume")
    assert (
        found.status == "holds"
        and "no new one could try: the state cannot be pickled" in found.reason
    )


def test_a_resume_that_no_new_process_could_try_says_so() -> None:
    found = {each.promise: each for each in maxbatch.audit(lambda layout: Trainer(layout)).verdicts}
    assert found["resume"].status == "holds" and "no new one could try: " in found["resume"].reason
    found = {each.promise: each for each in maxbatch.audit(Trainer).verdicts}
    assert (found["resume"].status, found["resume"].reason) == ("holds", "")


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("rows", [[0, 1], [5]])
def test_a_part_of_an_array_that_is_wrong_breaks_the_promise(
    optimizer: str, rows: list[int]
) -> None:
    """These rows of the table keep the gradient of the last micro-batch, as that of the whole
    batch.
    """

    class Partly(Trainer):
        def _mean(self, params: Any, batch: Any, number: int) -> Any:
            loss, count, gradient, statistics = super()._mean(params, batch, number)
            passes = self.layout.gradient_accumulation_steps
            gradient["table"][rows] *= passes if number == passes - 1 else passes == 1
            return loss, count, gradient, statistics

    found = {
        each.promise: each
        for each in maxbatch.audit(lambda layout: Partly(layout, optimizer=optimizer)).verdicts
    }
    assert (found["cut"].status, found["cut"].array) == ("broken", "table")


@pytest.mark.parametrize("scale", [0.5, 1e-4, 0.0])
def test_a_loss_close_to_0_is_held_to_its_rounding(scale: float) -> None:
    """The loss less that of chance, in float32: at first it is the rounding of a sum."""

    class Centred(Trainer):
        def init(self) -> Any:
            state = super().init()
            return state | {
                "params": {
                    name: array * np.float32(scale) for name, array in state["params"].items()
                }
            }

        def step(self, state: Any, batch: Any) -> Any:
            state, metrics = super().step(state, batch)
            return state, {"loss": np.float32(metrics["loss"]) - np.float32(np.log(V))}

    for optimizer in ("sgd", "adamw"):
        found = maxbatch.audit(lambda layout: Centred(layout, optimizer=optimizer))  # noqa: B023
        assert found.holds, (optimizer, str(found))
    wrong = maxbatch.audit(lambda layout: Centred(layout, fault="last micro-batch's loss"))
    assert {"cut", "uneven"} <= {each.promise for each in wrong.broken}


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (
            RETURNS.format("10 ** 400"),
            "metrics['loss'] is a int, not a number (OverflowError: int too large",
        ),
        (
            RETURNS.format("np.array([1., 2.])"),
            "metrics['loss'] is a ndarray, not a number (TypeError",
        ),
        (RETURNS.format("'3.5'"), "metrics['loss'] is a str, not a number"),
        (RETURNS.format("Trainer"), "metrics['loss'] is a type, not a number"),
        (
            RETURNS.format("type('Lost', (), {{'__float__': lambda self: 1 / 0}})()"),
            "a Lost, not a number (ZeroDiv",
        ),
        ("os._exit(0)", "trainer.py:make: the trainer ended its process ("),
        ("os.kill(os.getpid(), 9)", "trainer.py:make: the trainer ended its process ("),
        ("raise BaseException", "cannot be trained on (BaseException, trainer.py:6)"),
        (
            "raise type('Mute', (Exception,), {{'__str__': lambda self: 1 / 0}})",
            "trained on (Mute, trainer.py:6)",
        ),
        ("return self.step(state, batch)", "cannot be trained on (RecursionError"),
        (
            "return super().step(state, batch)\n    def params(self, state):\n        return "
            "{{'w': np.ones(3) * 1j}}",
            "params: w holds complex numbers; works: w.real and w.imag under two names",
        ),
        (
            "return super().step(state, batch)\n    def params(self, state):\n        return "
            "{{'w': np.array([{{}}])}}",
            "params: w is an array that holds no numbers (TypeError",
        ),
        (
            "return super().step(state, batch)\n    def params(self, state):\n        return "
            "{{'w': np.ones((0, 3))}}",
            "step: changed no parameter in 4 updates",
        ),
        (
            "pass\n    @property\n    def init(self):\n        raise OSError('gone')",
            "trained on (OSError: gone, trainer.py:9)",
        ),
    ],
)
def test_an_odd_answer_is_one_line_and_exit_code_2(
    file: str, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert audited(REPORTS.format(file.replace("{{", "{").replace("}}", "}"))) == 2
    out, err = capfd.readouterr()
    assert out == "" and said in err and err.count("\n") == 1, err


def _scalars(state: Any, metrics: Any) -> Any:
    others = {
        "half": np.float16(1),
        "text": "none",
        "nan": np.nan,
        "huge": 10**400,
        3: None,
        "list": [1],
        "of": [[]],
    }
    return state, {"loss": np.array([metrics["loss"]]).astype(np.float32)[0], **others}


def _threaded(trainer: Trainer, state: Any, batch: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(Trainer.step, trainer, state, batch).result()


def _mutating(trainer: Trainer, state: Any, batch: Any) -> Any:
    found = Trainer.step(trainer, state, batch)
    for array in batch.values():
        array[...] = 0
    batch.clear()
    return found


STEPS: dict[str, Callable[..., Any]] = {
    "odd scalars": lambda trainer, state, batch: _scalars(*Trainer.step(trainer, state, batch)),
    "in a thread": _threaded,
    "mutates the batch": _mutating,
    "in place": lambda trainer, state, batch: _in_place(trainer, state, batch),
}
PARAMS: dict[str, Callable[[Any, Any], Any]] = {
    "alias": lambda params, state: params | {"again": params["out"], "view": params["out"].T},
    "of no size": lambda params, state: params | {"none": np.ones((0, 3)), "flat": np.zeros(0)},
    "whole numbers": lambda params, state: (
        params | {"updates": np.int64(state["updates"]), "is": np.ones(3, bool)}
    ),
    "objects": lambda params, state: params | {"bias": params["bias"].astype(object)},
}


def _in_place(trainer: Trainer, state: Any, batch: Any) -> Any:
    new, metrics = Trainer.step(trainer, state, batch)
    for name, array in state["params"].items():
        array[...] = new["params"][name]
    return state | {name: new[name] for name in ("m", "v", "updates")}, metrics


@pytest.mark.runs
@pytest.mark.parametrize("odd", [*STEPS, *PARAMS])
def test_a_sound_trainer_with_odd_habits_breaks_no_promise_and_a_wrong_one_does(odd: str) -> None:
    class Odd(Trainer):
        def step(self, state: Any, batch: Any) -> Any:
            return STEPS[odd](self, state, batch) if odd in STEPS else super().step(state, batch)

        def params(self, state: Any) -> Any:
            return (
                PARAMS[odd](super().params(state), state)
                if odd in PARAMS
                else super().params(state)
            )

    def make(fault: str) -> Callable[[Layout], Trainer]:
        return lambda layout: Odd(layout, fault=fault)

    sound, wrong = maxbatch.audit(make("")), maxbatch.audit(make("mean of means"))
    assert sound.holds, str(sound)
    assert {each.promise: each.cause for each in wrong.broken}.get("uneven") == "mean of means", (
        str(wrong)
    )
