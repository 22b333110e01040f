"""Hosts that are lost with kill -9, and restarts on as many hosts or on fewer, from their local
checkpoints.
"""

from __future__ import annotations

import os
import shutil
import signal
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from maxbatch.run.weights.local_files import run_name
from tests.helpers.command import maxbatch, recorded, start
from tests.helpers.forks import Fork
from tests.helpers.processes import wait_for
from tests.helpers.tiny import ONE_LAYER, SAME, TINY_RUN, assert_same_run, read_metrics

pytestmark = pytest.mark.processes

# Of widths that 2 and 3 hosts divide: each of them holds a part of every matrix.
KEYS = (
    *TINY_RUN,
    ONE_LAYER,
    "base_emb_dim=48",
    "base_mlp_dim=96",
    "steps=24",
    "global_batch_size=8",
    "per_device_batch_size=2",
    "checkpoint_period=1000",
    "local_checkpoint_period=3",
)
# Runs in every Python process of a test: gives each host a home, that is a disk, of its own.
SITECUSTOMIZE = """
    import os
    host = os.environ.get("JAX_PROCESS_ID")
    if host is not None:
        os.environ["HOME"] = os.path.join(os.environ["DISKS"], host)
"""


def train(run_dir: Path, *arguments: str, **variables: str) -> Fork:
    return start("train", *KEYS, f"run_dir={run_dir}", *arguments, own_group=True, **variables)


def hosts(number: int) -> tuple[str, ...]:
    return "--simulate-devices", str(number), "--simulate-hosts", str(number)


def finish(process: Fork) -> str:
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    return output


def lose(process: Fork, run_dir: Path, at: int) -> tuple[int, str]:
    """Kills all hosts once so many updates are recorded; returns the number that were, and the
    output.
    """
    wait_for(lambda: recorded(run_dir) >= at, process)
    os.killpg(process.pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    return recorded(run_dir), output


def resumed_at(output: str) -> int:
    (line,) = (line for line in output.splitlines() if "resumed at step" in line)
    assert line.endswith("from local checkpoints"), line
    return int(line.partition("resumed at step ")[2].partition(",")[0])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing disturbs, on one device."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    done = maxbatch("train", *KEYS, f"run_dir={run_dir}", "local_checkpoint_period=0")
    assert done.returncode == 0, done.stderr
    return run_dir


def test_hosts_that_share_a_path_are_lost_on_3_and_1_of_them_and_2_go_on_and_nobody_can_tell(
    tmp_path: Path, whole: Path
) -> None:
    run_dir, place = tmp_path / "run", f"local_checkpoint_directory={tmp_path / 'ram'}"
    padded = ("batch_padding=true", place)
    before, _ = lose(train(run_dir, *padded, *hosts(3)), run_dir, 7)
    done, output = lose(train(run_dir, *padded, "--simulate-devices", "1"), run_dir, before + 5)
    assert before - resumed_at(output) <= 3
    output = finish(train(run_dir, *padded, *hosts(2)))
    assert done - resumed_at(output) <= 3
    assert_same_run(read_metrics(run_dir), read_metrics(whole), (*SAME, "learning_rate"))
    assert not list((tmp_path / "ram").glob("run-*/*")), (
        "a run that is complete leaves nothing there"
    )


# --- hosts with a disk of their own each ---

OWN_DISKS = ("local_checkpoint_directory=~/ram", "batch_padding=true", "checkpoint_period=5")


def variables_of(folder: Path) -> dict[str, str]:
    # compiled once for all hosts
    programs = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return {
        "PYTHONPATH": str(folder / "site"),
        "DISKS": str(folder / "disks"),
        "XDG_CACHE_HOME": programs,
    }


@pytest.fixture(scope="module")
def lost_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on three hosts with a disk each, killed after update 8 or a little later."""
    folder = tmp_path_factory.mktemp("lost")
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(textwrap.dedent(SITECUSTOMIZE))
    lose(train(folder / "run", *OWN_DISKS, *hosts(3), **variables_of(folder)), folder / "run", 8)
    return folder


@pytest.fixture
def lost(lost_once: Path, tmp_path: Path) -> Path:
    """A copy of its own for each test."""
    folder = tmp_path / "lost"
    shutil.copytree(lost_once, folder)
    for states in folder.glob("disks/*/ram/run-*"):
        states.rename(states.with_name(run_name(folder / "run")))
    return folder


def lose_a_disk(disks: Path) -> None:
    shutil.rmtree(disks / "1")


def swap_the_disks(disks: Path) -> None:
    """The hosts come back in another order, the one of the second disk not at all."""
    shutil.rmtree(disks / "1")
    (disks / "2").rename(disks / "1")


def flip_bits(disks: Path) -> None:
    """Of the own blocks of the second host; its neighbour has copies of them."""
    for file in (disks / "1").rglob("blocks-*.bin"):
        content = bytearray(file.read_bytes())
        content[100] ^= 4
        file.write_bytes(content)


@pytest.mark.parametrize(
    ("number", "damage"), [(3, lose_a_disk), (2, swap_the_disks), (3, flip_bits)]
)
def test_a_host_that_is_lost_with_its_disk_is_made_up_for_by_the_copy_at_the_next_one(
    lost: Path, whole: Path, number: int, damage: Callable[[Path], None]
) -> None:
    run_dir = lost / "run"
    done = recorded(run_dir)
    damage(lost / "disks")
    output = finish(train(run_dir, *OWN_DISKS, *hosts(number), **variables_of(lost)))
    assert done - resumed_at(output) <= 3
    assert ("do not match their checksums" in output) == (damage is flip_bits)
    assert_same_run(read_metrics(run_dir), read_metrics(whole), (*SAME, "learning_rate"))


def test_both_copies_gone_is_told_and_the_run_goes_on_from_its_folder(
    lost: Path, whole: Path
) -> None:
    run_dir = lost / "run"
    for host in ("1", "2"):
        shutil.rmtree(lost / "disks" / host)
    output = finish(train(run_dir, *OWN_DISKS, *hosts(2), **variables_of(lost)))
    assert "cannot be used (no host has the whole of" in output and ", from checkpoints" in output
    assert_same_run(read_metrics(run_dir), read_metrics(whole), (*SAME, "learning_rate"))
