"""Hosts that would train otherwise than the first one are refused at start, by name, on every
host.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from maxbatch.parallel.agreement import differences
from tests.helpers.tiny import TINY_RUN
from tests.programs.differing_hosts import OTHER_VALUES, refused_start, start_hosts


@pytest.mark.processes
@pytest.mark.parametrize("number", range(3))
def test_a_real_start_of_two_hosts_with_one_key_changed_is_refused(
    tmp_path: Path, number: int
) -> None:
    stated = random.Random(f"of three {number}").choice(OTHER_VALUES)
    assert refused_start(tmp_path / "run", stated) < 60, (
        "hosts that miss each other wait for minutes"
    )


@pytest.mark.processes
@pytest.mark.parametrize(("bad", "by_slurm"), [(0, False), (1, False), (1, True)])
def test_a_config_that_one_host_refuses_ends_the_others_too(
    tmp_path: Path, bad: int, by_slurm: bool
) -> None:
    """They would wait for that host to join."""
    own = [["stepz=3"] if host == bad else [] for host in range(2)]
    ends = start_hosts(
        [*TINY_RUN, f"run_dir={tmp_path / 'run'}", "per_device_batch_size=1"],
        own,
        by_slurm=by_slurm,
    )
    for host, (code, output) in enumerate(ends):
        named = "" if host == bad else f"host {bad}: "
        assert (
            code == 2 and f"error: {named}unknown key stepz" in output and output.count("\n") == 1
        ), ends


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
        (
            "JAX_DEFAULT_MATMUL_PRECISION: None on host 0 | highest",
            [[run], [run]],
            {"JAX_DEFAULT_MATMUL_PRECISION": "highest"},
        ),
        ("adam_b1: 0.9 on host 0 | 0.5 on host 1;", [[run], [run]], {"MAXBATCH_ADAM_B1": "0.5"}),
        (
            "must be one folder that all hosts see, and host 1 does not see the one of host 0",
            [[run], [f"run_dir={tmp_path / 'other'}"]],
            {},
        ),
    ]
    for said, own, variables in cases:
        ends = start_hosts(base, own, {1: variables})
        for code, output in ends:
            assert code == 2 and said in output, (said, ends)
    assert not (tmp_path / "run").exists() and not list((tmp_path / "other").iterdir())


def test_facts_that_differ_far_into_a_long_text_are_shown_where_they_differ() -> None:
    same = "a" * 300
    (line,) = differences(
        [{"flags": f"{same}1 b"}, {"flags": f"{same}2 b"}, {"flags": f"{same}1 b"}]
    )
    assert line == f"flags: ...{'a' * 20}1 b on hosts 0, 2 | ...{'a' * 20}2 b on host 1"
    assert differences([{"a": "", "b": "1"}, {"b": "1"}]) == ["a: '' on host 0 | none on host 1"]
    values = [{"a": str(host == 6)} for host in range(7)]
    assert differences(values) == ["a: False on hosts 0, 1, 2, 3 and 2 more | True on host 6"]
