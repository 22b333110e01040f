"""A signal is answered at once, also while compiled code runs; the second Ctrl-C is obeyed."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from maxbatch.system.processes.stopping import STOPS, Stopping
from maxbatch.system.storage.patience import patience
from tests.helpers.processes import cpu_seconds, wait_for

PREPARE = (
    "import hashlib, signal, sys, time\nsignal.signal(signal.SIGINT, signal.default_int_handler)  "
    "# a background job of a shell ignores it\nfrom maxbatch.system.processes.stopping import Stopping, "
    "watch_signals\nwatch_signals()\ndef ready(): print('ready', flush=True)\ndef busy(): "
    "hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)  # compiled code: no handler of Python's "
    "runs\n"
)


@contextlib.contextmanager
def started(body: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has printed that it is ready, and has computed since."""
    command = [sys.executable, "-c", PREPARE + body]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        ready = cpu_seconds(process.pid)
        wait_for(lambda: cpu_seconds(process.pid) > ready + 0.1)
        try:
            yield process
        finally:
            process.kill()


def test_compiled_code_does_not_keep_the_answer_and_the_second_ctrl_c_is_recorded_and_obeyed() -> (
    None
):
    body = (
        "with Stopping('after this update') as stop:\n"
        "    stop.record_end = lambda name: print('ended by', name, flush=True)\n"
        "    ready(); busy()\n"
    )
    with started(body) as process:
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert (
            process.stderr.readline()
            == "maxbatch: SIGINT: stopping after this update; again to stop now\n"
        )
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 1
        assert process.stderr.read() == "maxbatch: interrupted\n"
        assert process.stdout is not None and process.stdout.read() == "ended by SIGINT\n"


def test_two_ctrl_c_shortly_after_one_another_are_two() -> None:
    with started("with Stopping('after this update'):\n    ready(); busy()\n") as process:
        process.send_signal(signal.SIGINT)
        time.sleep(0.15)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 1


def test_sigterm_ends_a_command_that_saves_nothing_and_what_it_printed_is_not_lost() -> None:
    with started("ready(); print('printed')\nwhile True: pass\n") as process:
        process.terminate()
        output, error = process.communicate(timeout=60)
        assert (process.returncode, output, error) == (1, "printed\n", "maxbatch: interrupted\n")


def test_sigterm_ends_compiled_code_that_saves_nothing_in_bounded_time() -> None:
    with started("ready(); busy()\n") as process:
        process.terminate()
        assert process.wait(60) == 1
        assert process.stderr is not None and process.stderr.read() == "maxbatch: interrupted\n"


def test_a_command_that_waits_for_nothing_says_so_too() -> None:
    with started("ready(); busy()\n") as process:
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert (
            "as soon as the current work has ended; again to stop now" in process.stderr.readline()
        )
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 1


def test_one_signal_is_answered_once_and_sigterm_names_itself() -> None:
    with started(
        "with Stopping('now') as stop:\n    ready()\n    while not stop.is_asked: pass\n"
    ) as process:
        process.terminate()
        _, error = process.communicate(timeout=60)
        assert (process.returncode, error) == (0, "maxbatch: SIGTERM: stopping now\n")


def test_a_command_that_ends_at_once_has_answered() -> None:
    """The thread that watches gets no turn before the end: the handler answers."""
    body = (
        "sys.setswitchinterval(60)\nwith Stopping('now') as stop:\n    ready()\n    while not "
        "stop.is_asked: pass\n"
    )
    with started(body) as process:
        process.terminate()
        _, error = process.communicate(timeout=60)
        assert (process.returncode, error) == (0, "maxbatch: SIGTERM: stopping now\n")


BUSY = "end = time.monotonic() + 2\nwhile time.monotonic() < end: pass\n"


def test_ctrl_c_while_a_module_loads_ends_the_command_whatever_the_module_makes_of_it(
    tmp_path: Path,
) -> None:
    lines = (
        "import time\nprint('ready', flush=True)\ntry:\n    "
        f"{BUSY.replace(chr(10), chr(10) + '    ').strip()}\n"
    )
    (tmp_path / "slow.py").write_text(
        f"{lines}except BaseException as error:\n    raise ImportError('lost')\n"
    )
    with started(f"sys.path.insert(0, {str(tmp_path)!r})\nimport slow\n") as process:
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
        assert (process.returncode, error) == (1, "maxbatch: interrupted\n")


def test_ctrl_c_while_garbage_is_collected_is_not_lost() -> None:
    """Python drops the exceptions of callbacks of the collector."""
    body = (
        "import gc\n"
        "def callback(phase, info):\n"
        "    if phase == 'start':\n"
        f"        ready()\n        {BUSY.replace(chr(10), chr(10) + '        ').strip()}\n"
        "gc.callbacks.append(callback)\n"
        "try:\n    gc.collect()\n    gc.callbacks.clear()\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    sys.exit(3)\n"
    )
    with started(body) as process:
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=30)
        assert process.returncode == 3 and "KeyboardInterrupt" not in error


def test_threads_do_not_keep_a_command_that_ctrl_c_ended() -> None:
    body = (
        "import threading\nfrom maxbatch.system.processes.stopping import "
        "leave_threads_behind\nthreading.Thread(target=time.sleep, args=(60,)).start()\ntry:\n    "
        "ready()\n    while True: pass\nexcept KeyboardInterrupt:\n    leave_threads_behind(1)\n"
    )
    with started(body) as process:
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 1


def test_a_shells_background_still_ignores_ctrl_c() -> None:
    ignored = PREPARE.replace("signal.default_int_handler)", "signal.SIG_IGN)")
    body = f"{ignored}print(signal.getsignal(signal.SIGINT) == signal.SIG_IGN)\n"
    assert (
        subprocess.run([sys.executable, "-c", body], capture_output=True, text=True).stdout
        == "True\n"
    )


def test_without_a_command_the_second_ctrl_c_is_a_keyboard_interrupt(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(KeyboardInterrupt), Stopping("after this update") as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.signal_name == "SIGINT"
        signal.raise_signal(signal.SIGINT)
    assert "stopping after this update; again to stop now" in capfd.readouterr().err


def test_a_context_inside_one_that_is_asked_to_stop_is_asked_from_the_start() -> None:
    with Stopping("after the branch") as outer:
        signal.raise_signal(signal.SIGTERM)
        with Stopping("after this update") as inner:
            assert inner.is_asked and inner.signal_name == outer.signal_name == "SIGTERM"
    with Stopping() as later:
        assert not later.is_asked


def test_a_command_after_one_that_was_stopped_is_as_patient_with_stores_as_ever() -> None:
    now = time.monotonic()
    with Stopping():
        signal.raise_signal(signal.SIGTERM)
        assert patience().ends(now) <= now + patience().hurried_seconds + 1
    with Stopping():
        assert patience().ends(now) == now + patience().seconds


@pytest.mark.parametrize("number", STOPS)
def test_a_signal_ends_a_command_at_once_that_has_nothing_to_save_yet_and_the_same_command_continues(
    number: signal.Signals,
) -> None:
    body = (
        "from maxbatch.system.processes.stopping import end_unsaved\n"
        "with Stopping('after this update') as stop:\n"
        "    stop.end_at_once = end_unsaved\n    ready(); busy()\n"
    )
    with started(body) as process:
        process.send_signal(number)
        _, error = process.communicate(timeout=60)
    said = (
        f"maxbatch: stopped by {number.name} before there was something to save. The same command "
        "continues.\n"
    )
    assert (process.returncode, error) == (75, said)


@pytest.mark.parametrize("number", STOPS)
def test_a_signal_stops_a_command_as_sigterm_does(number: signal.Signals) -> None:
    with started(
        "with Stopping('now') as stop:\n    ready()\n    while not stop.is_asked: pass\n"
    ) as process:
        process.send_signal(number)
        _, error = process.communicate(timeout=60)
        assert (process.returncode, error) == (0, f"maxbatch: {number.name}: stopping now\n")


def test_a_command_under_nohup_outlives_its_terminal() -> None:
    ignored = PREPARE.replace(
        "watch_signals()", "signal.signal(signal.SIGHUP, signal.SIG_IGN); watch_signals()"
    )
    body = (
        f"{ignored}with Stopping('now') as stop:\n    signal.raise_signal(signal.SIGHUP)\n    "
        "print(stop.is_asked)\n"
    )
    assert (
        subprocess.run([sys.executable, "-c", body], capture_output=True, text=True).stdout
        == "False\n"
    )


def test_a_terminal_that_is_closed_stops_a_command_and_is_no_error_of_its_output(
    tmp_path: Path,
) -> None:
    body = (
        "from maxbatch.system.terminal.terminal import TrainingConsole\nconsole = TrainingConsole()\nwith "
        "Stopping('now') as stop:\n    ready()\n    while not stop.is_asked: console.print('an "
        "update')\nfor _ in range(100): "
        f"console.print('saved')\nsys.stdout.flush()\nopen({str(tmp_path / 'ended')!r}, "
        "'w').write(stop.signal_name)\n"
    )
    opened = (
        "import os, pty, sys\npid, terminal = pty.fork()\n"
        "if pid == 0: os.execv(sys.executable, [sys.executable, '-c', sys.argv[1]])\n"
        "while b'an update' not in os.read(terminal, 4096): pass\n"
        "os.close(terminal)\nsys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    closed = subprocess.run([sys.executable, "-c", opened, PREPARE + body], timeout=120)
    assert (closed.returncode, (tmp_path / "ended").read_text()) == (0, "SIGHUP")
