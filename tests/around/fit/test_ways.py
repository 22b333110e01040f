"""The ways to a stated batch are compiled while there is time, the likely best first."""

from __future__ import annotations

import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from maxbatch.around.compile.modelled import Modelled
from maxbatch.around.fit import ways
from maxbatch.around.fit.choices import POLICIES, Choice
from maxbatch.data.feed.placement import BatchShape
from maxbatch.plan.mesh_shape import AXES, MeshShape
from maxbatch.run.compile.memory import Parts, Verdict

ONE_DEVICE = MeshShape(dict.fromkeys(AXES, 1), dict.fromkeys(AXES, 1))


class Compiler:
    """A compiler that takes the same time for every program."""

    def __init__(self, seconds_each: float) -> None:
        self.now, self.seconds_each, self.asked = 0.0, seconds_each, list[tuple[str, int]]()

    def choose(self, oracle: Any, sizes: object, rows: int = 64, **_: object) -> Choice | None:
        policy = oracle.config.remat_policy
        self.now += self.seconds_each
        self.asked.append((policy, rows))
        seconds = {"minimal": 2.0, "full": 3.0, "none": 4.0}[policy] + rows / 1000
        parts, verdict = Parts(0, 0, 0, 0, 0), Verdict(True, 1, 1, None, 0.0)
        modelled = Modelled(modelled_step_s=seconds)
        return Choice(
            policy,
            ONE_DEVICE,
            BatchShape(rows, 64 // rows),
            {"per_device_batch_size": rows},
            verdict,
            None,
            parts,
            modelled,
            64,
        )


def way_of(policy: str, mesh: str = "") -> ways.Way:
    oracle: Any = SimpleNamespace(config=SimpleNamespace(remat_policy=policy))
    sizes: Any = None
    return ways.Way(oracle, sizes, mesh)


def ways_within(
    monkeypatch: pytest.MonkeyPatch,
    seconds_each: float,
    meshes: tuple[str, ...] = ("",),
    cuts: bool = True,
) -> tuple[Compiler, list[Choice], list[str]]:
    compiler = Compiler(seconds_each)
    monkeypatch.setattr(ways, "Stopwatch", lambda watch=ways.Stopwatch: watch(lambda: compiler.now))
    monkeypatch.setattr(ways, "choose", compiler.choose)
    monkeypatch.setattr(
        ways, "choose_smaller", lambda oracle, sizes, _: compiler.choose(oracle, sizes, rows=32)
    )
    tried = [way_of(policy, mesh) for mesh in meshes for policy in POLICIES]
    found, skipped = ways.find_ways(tried, True, cuts, lambda _: None)
    return compiler, found, skipped


def test_all_ways_are_compiled_if_there_is_time_and_the_fastest_comes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler, found, skipped = ways_within(monkeypatch, 1.0)
    assert skipped == [] and len(compiler.asked) == 2 * len(POLICIES)
    assert (found[0].remat_policy, found[0].shape.micro_batch) == ("minimal", 32)


def test_a_way_that_would_not_be_done_in_time_is_left_out_and_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler, found, skipped = ways_within(monkeypatch, 150.0)
    assert compiler.asked == [("minimal", 64), ("full", 64)]
    assert (len(found), skipped, compiler.now) == (2, ["none"], 300.0)


def test_one_way_is_always_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    _, found, skipped = ways_within(monkeypatch, 1000.0)
    assert [choice.remat_policy for choice in found] == ["minimal"] and skipped == ["full", "none"]


def test_every_mesh_is_compiled_before_a_second_policy_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler, found, skipped = ways_within(monkeypatch, 100.0, ("a=1", "b=2"), cuts=False)
    assert [policy for policy, _ in compiler.asked] == ["minimal", "minimal", "full"]
    assert skipped == ["b=2 remat_policy=full", "a=1 remat_policy=none", "b=2 remat_policy=none"]
    assert [choice.remat_policy for choice in found] == ["minimal", "minimal", "full"]


def test_a_ctrl_c_does_not_wait_for_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, main_thread = threading.Event(), threading.main_thread().ident
    assert main_thread is not None

    def choose(*_: object, **__: object) -> None:
        signal.pthread_kill(main_thread, signal.SIGINT)
        compiled.wait(120)

    monkeypatch.setattr(ways, "choose", choose)
    # which what runs in the background lacks
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            ways.find_ways([way_of("full")], True, True, lambda _: None)
        assert time.monotonic() - started < 60
    finally:
        compiled.set()
        signal.signal(signal.SIGINT, before)
