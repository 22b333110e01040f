"""Which environments name other hosts, to which a refused config must be told."""

from __future__ import annotations

import pytest

from maxbatch.commands.refusing import may_have_others

NAMES = (
    "JAX_NUM_PROCESSES",
    "SLURM_NTASKS",
    "OMPI_COMM_WORLD_SIZE",
    "MEGASCALE_NUM_SLICES",
    "TPU_WORKER_HOSTNAMES",
    "TPU_PROCESS_ADDRESSES",
    "TPU_SKIP_MDS_QUERY",
)


@pytest.mark.parametrize(
    ("variables", "is_tpu", "expected"),
    [
        ({}, False, False),
        ({"JAX_NUM_PROCESSES": "2"}, False, True),
        ({"SLURM_NTASKS": "4"}, False, True),
        ({"SLURM_NTASKS": "1", "JAX_NUM_PROCESSES": "x"}, False, False),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, False, True),
        ({"MEGASCALE_NUM_SLICES": "2", "TPU_WORKER_HOSTNAMES": "a"}, True, True),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, True, True),
        ({"TPU_PROCESS_ADDRESSES": "a:1,b:1"}, True, True),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, True, False),
        ({}, True, True),  # a TPU VM, whose metadata JAX asks
        ({"TPU_SKIP_MDS_QUERY": "1"}, True, False),
    ],
)
def test_the_variables_of_launchers_name_other_hosts(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], is_tpu: bool, expected: bool
) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(
        "maxbatch.commands.refusing.tpu_version_here", lambda: "v5p" if is_tpu else None
    )
    assert may_have_others() is expected
