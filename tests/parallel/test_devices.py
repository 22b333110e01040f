"""Devices that do not start are one line, in every command and on every host."""

from __future__ import annotations

import pytest

from maxbatch.parallel.devices import failure_of_devices
from tests.helpers.command import maxbatch
from tests.helpers.tiny import ONE_LAYER, TINY_RUN
from tests.programs.differing_hosts import start_hosts


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [("train", *TINY_RUN), ("fit", *TINY_RUN), ("compile", *TINY_RUN, "--output", "x")]
)
def test_a_platform_that_is_not_there_is_one_line_of_every_command(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    done = maxbatch(*command)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith(
        "maxbatch: error: environment variable JAX_PLATFORMS=cuda: "
    )
    assert "works: JAX_PLATFORMS=cpu" in done.stderr and "Traceback" not in done.stderr


def test_other_errors_are_not_taken_for_a_failure_of_devices() -> None:
    try:
        raise RuntimeError("Unable to initialize backend")
    except RuntimeError as error:
        assert failure_of_devices(error) is None


@pytest.mark.processes
def test_devices_of_one_host_that_do_not_start_end_all_hosts_with_its_message() -> None:
    """The others would wait for its devices for minutes. The commands do not make devices of their
    own here.
    """
    keys = [*TINY_RUN, ONE_LAYER, "run_dir=never"]
    ends = start_hosts(keys, [[], []], {1: {"JAX_PLATFORMS": "cuda"}}, makes_devices=False)
    said = "environment variable JAX_PLATFORMS=cuda: the devices do not start"
    assert [code for code, _ in ends] == [2, 2], ends
    assert f"error: host 1: {said}" in ends[0][1] and f"error: {said}" in ends[1][1], ends
