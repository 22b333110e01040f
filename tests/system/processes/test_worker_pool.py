"""Worker processes: a call that goes wrong fails alone, and no worker outlives its parent."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import pytest

from maxbatch.system.processes.worker_pool import Killed, TimedOut, WorkerEnded, WorkerPool
from tests.helpers.processes import alive, pids_of, wait_for

FUNCTIONS = """
    import ctypes, functools, gc, os, re, sys, time

    def obey(word):
        if word == "raises":
            raise ValueError("two\\nlines")
        if word == "dies":
            os._exit(3)
        if word == "crashes":
            os.kill(os.getpid(), 11)
        if word == "is killed":
            os.kill(os.getpid(), 9)
        if word == "leaves":
            sys.exit(4)
        if word == "sleeps":
            time.sleep(60)
        if word == "spins":  # and never lets go of the interpreter
            re.match("(a+)+b", "a" * 60)
        if word == "prints":
            print("to standard output")
            os.write(1, b"by its number\\n")
        if word == "comes back twice":
            os.fork()
        if word == "comes back twice in C":
            ctypes.CDLL(None).fork()
        if word == "answers for others":
            for one in gc.get_objects():
                if type(one).__name__ == "Connection":
                    one.send((99, "forged", None))
        if word == "talks nonsense":
            os.write(int(sys.argv[1]), b"\\0\\0\\0\\1x")
        if word == "talks of much":
            os.write(int(sys.argv[1]), b"\\xff" * 12)
        if word == "closes its pipes":
            os.closerange(0, 256)
        if word == "eats":
            bytearray(1 << 36)
        if word == "starts another":
            if not os.fork():
                time.sleep(3)
            os._exit(3)
        return {"lambda": lambda: 0, "process": os.getpid(), "jax": "jax" in sys.modules,
                "variable": os.environ.get("A_VARIABLE")}.get(word, len(word)) if word != "big" else b"x" * (1 << 24)

    def setup(log=None, how="works"):
        if log is not None:
            with open(log, "a") as file:
                file.write("set up\\n")
        obey(how)
        return obey
"""


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """The function above; workers find its module in the folder that they start in."""
    (tmp_path / "functions.py").write_text(textwrap.dedent(FUNCTIONS))
    monkeypatch.syspath_prepend(tmp_path)
    import functions  # type: ignore[import-not-found]

    yield functions.setup
    del sys.modules["functions"]


def outcomes(futures: Sequence[Future[Any]]) -> list[Any]:
    return [future.exception() or future.result() for future in futures]


@pytest.mark.parametrize("workers", [1, 3])
def test_each_item_is_called_once_and_answered_in_its_place(
    setup: Callable[..., Any], workers: int
) -> None:
    with WorkerPool(setup, workers) as pool:
        batches = [pool.submit(["x" * (i + j) for j in range(20)]) for i in range(3)]
        assert [outcomes(batch) for batch in batches] == [
            [i + j for j in range(20)] for i in range(3)
        ]
        assert pool.submit([]) == []
        pids = set(outcomes(pool.submit(["process"] * 20)))
    assert len(pids) <= workers and os.getpid() not in pids


def test_what_goes_wrong_fails_one_call_and_no_other(setup: Callable[..., Any]) -> None:
    ends = {
        "raises": (ValueError, "two\nlines"),
        "dies": (WorkerEnded, "the process ended with exit code 3"),
        "crashes": (WorkerEnded, "the process ended with signal SIGSEGV"),
        "leaves": (WorkerEnded, "the process ended with exit code 4"),
        "spins": (TimedOut, "took more than 2.5 s"),
        "starts another": (WorkerEnded, "the process ended with exit code 3"),
    }
    with WorkerPool(setup, 2, limit_s=2.5) as pool:
        found = outcomes(pool.submit([item for word in ends for item in (word, f"not {word}")]))
    assert [(type(error), str(error)) for error in found[::2]] == list(ends.values())
    assert found[1::2] == [len(f"not {word}") for word in ends]


def test_an_item_whose_worker_is_killed_is_called_again_and_the_last_death_is_its_error(
    setup: Callable[..., Any], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with WorkerPool(functools.partial(setup, log), 1, attempts=2) as pool:
        pool.wait_for_setup()
        os.kill(pids_of(pool)[0], signal.SIGKILL)
        first, never, dies, last = outcomes(pool.submit(["a", "is killed", "dies", "bb"]))
    assert (first, last) == (1, 2)
    assert (type(never), str(never)) == (Killed, "the process ended with signal SIGKILL, 2 times")
    assert str(dies) == "the process ended with exit code 3", "its own end is not tried again"
    assert log.read_text().count("set up") == 5, (
        "at first, after three kills, and after the end of its own"
    )


def test_the_limit_is_per_call_and_kills_its_worker_at_once(setup: Callable[..., Any]) -> None:
    with WorkerPool(setup, 2, limit_s=0.5) as pool:
        pool.wait_for_setup()
        pids = pids_of(pool)
        begin = time.monotonic()
        assert isinstance(pool.submit(["sleeps"])[0].exception(), TimedOut)
        assert time.monotonic() - begin < 30
        wait_for(lambda: sum(map(alive, pids)) == 1)


def test_what_cannot_be_pickled_fails_alone(setup: Callable[..., Any]) -> None:
    with WorkerPool(setup, 1) as pool:
        not_picklable, good = pool.submit([threading.Lock(), "a"])
        assert "cannot pickle" in str(not_picklable.exception()) and good.result() == 1
        answer, big = pool.submit(["lambda", "big"])
        assert isinstance(answer.exception(), WorkerEnded) and len(big.result()) == 1 << 24


@pytest.mark.parametrize("how", ["comes back twice", "comes back twice in C", "answers for others"])
def test_answers_belong_to_their_questions_whoever_else_answers(
    setup: Callable[..., Any], how: str
) -> None:
    with WorkerPool(setup, 1) as pool:
        answers = outcomes(pool.submit([how, "a", how, "bb", "ccc"]))
    assert answers == [len(how), 1, len(how), 2, 3]


def test_a_worker_that_breaks_its_connection_fails_one_call(setup: Callable[..., Any]) -> None:
    for how in ("talks nonsense", "talks of much", "closes its pipes"):
        with WorkerPool(setup, 1, limit_s=20) as pool:
            broken, good = outcomes(pool.submit([how, "a"]))
        assert isinstance(broken, WorkerEnded) and good == 1, how


@pytest.mark.skipif(sys.platform != "linux", reason="the system has no such bound")
def test_a_call_that_eats_memory_fails_alone(setup: Callable[..., Any]) -> None:
    with WorkerPool(setup, 1, memory_bytes=1 << 30) as pool:
        eaten, good = outcomes(pool.submit(["eats", "a"]))
    assert isinstance(eaten, MemoryError) and good == 1


def test_prints_go_to_standard_error(
    setup: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    with WorkerPool(setup, 1) as pool:
        assert outcomes(pool.submit(["prints"] * 2)) == [6, 6]
    out, err = capfd.readouterr()
    assert out == "" and err.count("by its number") == 2 and err.count("to standard output") == 2


def test_a_call_whose_worker_is_stopped_from_outside_is_made_again(
    setup: Callable[..., Any],
) -> None:
    with WorkerPool(setup, 1, limit_s=1, attempts=2) as pool:
        pool.wait_for_setup()
        (pid,) = pids_of(pool)
        os.kill(pid, signal.SIGSTOP)
        assert outcomes(pool.submit(["abc"])) == [3] and pids_of(pool) != [pid]


def test_a_worker_that_ended_is_set_up_anew(setup: Callable[..., Any], tmp_path: Path) -> None:
    log = tmp_path / "log"
    with WorkerPool(functools.partial(setup, log), 1) as pool:
        outcomes(pool.submit(["dies", "a", "dies"]))
        wait_for(lambda: log.read_text() == "set up\n" * 3)
        (tmp_path / "functions.py").unlink()
        outcomes(pool.submit(["dies", "a", "a"]))
        assert all(isinstance(each, WorkerEnded) for each in outcomes(pool.submit(["a", "a"])))


@pytest.mark.parametrize(
    ("how", "raised", "said"),
    [
        ("raises", ValueError, "two\nlines"),
        ("dies", WorkerEnded, "the process ended with exit code 3"),
    ],
)
def test_a_setup_that_fails_is_told(
    setup: Callable[..., Any], how: str, raised: type[Exception], said: str
) -> None:
    with WorkerPool(functools.partial(setup, how=how), 2) as pool:
        with pytest.raises(raised, match=said):
            pool.wait_for_setup()
        assert all(isinstance(each, raised) for each in outcomes(pool.submit(["a", "b"])))


def test_workers_have_their_own_variables_and_no_jax(setup: Callable[..., Any]) -> None:
    with WorkerPool(setup, 1, variables={"A_VARIABLE": "its value"}) as pool:
        assert outcomes(pool.submit(["variable", "jax"])) == ["its value", False]


def test_closing_ends_the_workers_and_whoever_waits(setup: Callable[..., Any]) -> None:
    pool = WorkerPool(setup, 2)
    pool.wait_for_setup()
    pids = pids_of(pool)
    futures = pool.submit(["sleeps"] * 4 + ["a"] * 4)
    threading.Timer(0.2, pool.close).start()
    for future in futures[:4]:
        with pytest.raises(CancelledError):
            future.result()
    wait_for(lambda: all(future.cancelled() for future in futures))
    assert not any(map(alive, pids))
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(["a"])


def test_ctrl_c_does_not_end_a_worker_that_starts(
    setup: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.send_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        monkeypatch.setattr(subprocess, "Popen", Interrupted)
        with WorkerPool(setup, 1) as pool:
            assert outcomes(pool.submit(["abc"])) == [3]
    finally:
        signal.signal(signal.SIGINT, before)


def test_signals_to_the_process_group_are_left_to_the_parent(setup: Callable[..., Any]) -> None:
    with WorkerPool(setup, 1) as pool:
        pool.wait_for_setup()
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pids_of(pool)[0], number)
        assert pool.submit(["process"])[0].result() == pids_of(pool)[0]


SCRIPT = """
import sys, time
import functions
from maxbatch.system.processes.worker_pool import WorkerPool
print("imported", flush=True)
pool = WorkerPool(functions.setup, 2)
if sys.argv[1] != "at once":
    pool.wait_for_setup()
    pool.submit([sys.argv[1]])
    time.sleep(0.2)
while any(worker._process is None for worker in pool._workers):
    time.sleep(0.001)
print(*(worker._process.pid for worker in pool._workers), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("work", ["at once", "a", "sleeps", "spins"])
def test_workers_end_with_a_parent_that_is_killed(
    setup: Callable[..., Any], tmp_path: Path, work: str
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, "script.py", work],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        # Workers do not import a main module that has no guard.
        assert parent.stdout.readline() == "imported\n"
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2 and all(os.getpgid(pid) == os.getpgid(parent.pid) for pid in pids)
        parent.kill()
        assert parent.stdout.read() == ""
    try:
        wait_for(lambda: not any(map(alive, pids)))
    finally:
        for pid in filter(alive, pids):
            os.kill(pid, signal.SIGKILL)
