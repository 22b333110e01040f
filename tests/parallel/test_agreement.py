"""Hosts that would train otherwise than the first one are refused at start, by name, on every host."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from maxbatch.commands.simulation import free_port
from maxbatch.parallel.agreement import differences
from tests.helpers.command import environment
from tests.helpers.tiny import TINY_RUN


def start_hosts(
    arguments: Sequence[str],
    own: Sequence[Sequence[str]],
    variables: Mapping[int, Mapping[str, str]] = {},
    commands: Sequence[str] = (),
) -> list[tuple[int, str]]:
    """Starts a host for each item of `own`, its own arguments, as a user does by hand; returns codes and outputs."""
    port, hosts = free_port(), []
    for index, more in enumerate(own):
        joined = {
            "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
            "JAX_NUM_PROCESSES": str(len(own)),
            "JAX_PROCESS_ID": str(index),
            "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        }
        command = commands[index] if commands else "train"
        line = [sys.executable, "-m", "maxbatch", command, *arguments, *more, "--simulate-devices", "1"]
        hosts.append(subprocess.Popen(
            line, env=environment() | joined | variables.get(index, {}), stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, stdin=subprocess.DEVNULL, start_new_session=True,
        ))  # fmt: skip
    try:
        outputs = [host.communicate(timeout=90)[0] for host in hosts]
        return [(host.returncode, output) for host, output in zip(hosts, outputs, strict=True)]
    finally:
        for host in hosts:
            host.kill()


# Each with another value than TINY_RUN's, which any config takes.
OTHER_VALUES = (
    "learning_rate=1e-1", "steps=9", "checkpoint_period=7", "eval_interval=2", "heartbeat_timeout_s=77",
    "enable_checkpointing=false", "adam_b2=0.9", "data_shuffle_seed=3", "init_weights_seed=5", "base_mlp_dim=96",
    "log_period=3", "gradient_clipping_threshold=0.5", "dtype=bfloat16", "max_num_checkpoints_to_keep=1",
    "generate_prompt=a", "local_checkpoint_directory=/tmp/nowhere local_checkpoint_period=1", "remat_policy=full",
    "warmup_steps_fraction=0.5", "grain_worker_count=1", "per_device_batch_size=4", "max_target_length=64",
)  # fmt: skip


def refused_start(run_dir: Path, stated: str) -> None:
    """Starts two hosts, the second with another value, and checks how the start is refused."""
    started = time.monotonic()
    base = [*TINY_RUN, f"run_dir={run_dir}", "steps=2", "per_device_batch_size=1"]
    ends = start_hosts(base, [[], stated.split()])
    assert time.monotonic() - started < 60, "half of it to start: two hosts that miss each other wait for minutes"
    for code, output in ends:
        name, _, value = stated.split()[0].partition("=")
        assert code == 2 and f"{name}: " in output and output.count("\n") == 1, (stated, ends)
        assert ("stated" if value.startswith("/") else value) in output or float(value) == 0.1, (stated, output)
    assert not run_dir.exists(), "nothing was written"


@pytest.mark.processes
@pytest.mark.parametrize("number", range(3))
def test_a_real_start_of_two_hosts_with_one_key_changed_is_refused(tmp_path: Path, number: int) -> None:
    refused_start(tmp_path / "run", random.Random(f"of three {number}").choice(OTHER_VALUES))


@pytest.mark.processes
@pytest.mark.parametrize("bad", [0, 1])
def test_a_config_that_one_host_refuses_ends_the_others_too(tmp_path: Path, bad: int) -> None:
    """They would wait for that host to join."""
    own = [["stepz=3"] if host == bad else [] for host in range(2)]
    ends = start_hosts([*TINY_RUN, f"run_dir={tmp_path / 'run'}", "per_device_batch_size=1"], own)
    for host, (code, output) in enumerate(ends):
        named = "" if host == bad else f"host {bad}: "
        assert code == 2 and f"error: {named}stepz" in output and output.count("\n") == 1, ends


@pytest.mark.processes
def test_two_of_four_hosts_that_differ_are_named(tmp_path: Path) -> None:
    base = [*TINY_RUN, f"run_dir={tmp_path / 'run'}", "per_device_batch_size=1"]
    for code, output in start_hosts(base, [["steps=2"], ["steps=3"], ["steps=2"], ["steps=3"]]):
        assert code == 2 and "steps: 2 on hosts 0, 2 | 3 on hosts 1, 3;" in output, output


@pytest.mark.processes
def test_hosts_with_another_command_environment_or_folder_are_refused(tmp_path: Path) -> None:
    base = [*TINY_RUN, "steps=2", "per_device_batch_size=1"]
    run = f"run_dir={tmp_path / 'run'}"
    (tmp_path / "other").mkdir()
    cases = [
        ("JAX_DEFAULT_MATMUL_PRECISION: None on host 0 | highest", [[run], [run]],
         {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}),
        ("adam_b1: 0.9 on host 0 | 0.5 on host 1;", [[run], [run]], {"MAXBATCH_ADAM_B1": "0.5"}),
        ("must be one folder that all hosts see, and host 1 does not see the one of host 0",
         [[run], [f"run_dir={tmp_path / 'other'}"]], {}),
    ]  # fmt: skip
    for said, own, variables in cases:
        ends = start_hosts(base, own, {1: variables})
        for code, output in ends:
            assert code == 2 and said in output, (said, ends)
    assert not (tmp_path / "run").exists() and not list((tmp_path / "other").iterdir())


def test_facts_that_differ_far_into_a_long_text_are_shown_where_they_differ() -> None:
    same = "a" * 300
    (line,) = differences([{"flags": f"{same}1 b"}, {"flags": f"{same}2 b"}, {"flags": f"{same}1 b"}])
    assert line == f"flags: ...{'a' * 20}1 b on hosts 0, 2 | ...{'a' * 20}2 b on host 1"
    assert differences([{"a": "", "b": "1"}, {"b": "1"}]) == ["a: '' on host 0 | none on host 1"]
    values = [{"a": str(host == 6)} for host in range(7)]
    assert differences(values) == ["a: False on hosts 0, 1, 2, 3 and 2 more | True on host 6"]
