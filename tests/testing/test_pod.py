"""The pod as a test sees it, and what it says where hosts differ."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from maxbatch.testing import Pod, PodError
from maxbatch.testing.pod import difference


@pytest.fixture(scope="module")
def mesh(pod: Pod) -> jax.sharding.Mesh:
    return pod.mesh(data=2, model=2)


def placed(mesh: jax.sharding.Mesh, *axes: str | None) -> jax.Array:
    values = np.arange(8.0, dtype=np.float32).reshape(4, 2)
    return jax.make_array_from_callback(
        (4, 2), NamedSharding(mesh, PartitionSpec(*axes)), lambda index: values[index]
    )


@pytest.mark.processes
@pytest.mark.pod(devices=4, hosts=2)
def test_same_values_are_the_same_however_they_are_placed(
    pod: Pod, mesh: jax.sharding.Mesh
) -> None:
    pod.same(
        [
            placed(mesh),
            placed(mesh, "data"),
            placed(mesh, None, "model"),
            placed(mesh, "data", "model"),
        ]
    )
    pod.same(
        {
            "key": jax.random.key(0),
            "number": 3,
            "text": "a",
            "nan": jnp.nan,
            "bf16": jnp.bfloat16(1.5),
        }
    )


@pytest.mark.processes
@pytest.mark.pod(devices=4, hosts=2)
def test_values_that_differ_are_named_with_their_hosts(pod: Pod, mesh: jax.sharding.Mesh) -> None:
    x = np.arange(4.0)
    x[2] += pod.host

    def check(value: Any, said: str) -> None:
        with pytest.raises(AssertionError, match=said):
            pod.same(value)

    check(
        {"w": x, "b": 3},
        r"x\['w'\]\[2\]: 2.0 on host 0 \| 3.0 on host 1; 1 of 4 values differ, by at most 1$",
    )
    check(pod.host, r"x: 0 on host 0 \| 1 on host 1$")
    check("ab"[pod.host], r"x: 'a' on host 0 \| 'b' on host 1$")
    check(
        np.zeros(2, ("f4", "f8")[pod.host]), r"x: float32\[2\] on host 0 \| float64\[2\] on host 1$"
    )
    check(
        {"ab"[pod.host]: 1}, r"different structure: host 0 has no x\['b'\]; host 1 has no x\['a'\]$"
    )
    whole = NamedSharding(mesh, PartitionSpec())
    wrong = jax.make_array_from_callback(
        (2,), whole, lambda index: np.full(2, pod.host, np.float32)[index]
    )
    check(wrong, r"x\[0\]: 0.0 on host 0 \| 1.0 on host 1; 2 of 2 values differ")
    check([i + pod.host for i in range(5)], r"(?s)x\[0\].*x\[1\].*x\[2\].*and 2 more")


@pytest.mark.processes
@pytest.mark.pod(devices=4, hosts=2)
def test_hosts_at_different_points_are_told_apart(pod: Pod) -> None:
    with pytest.raises(PodError, match=r"host 0 in pod.same\(\); host 1 in pod.barrier\(\)"):
        if pod.host == 0:
            pod.same(1)
        else:
            pod.barrier()
    pod.barrier()
    with pytest.raises(
        ValueError, match=r"mesh\(data=3\): the pod has 4 devices; works: mesh\(data=4\)"
    ):
        pod.mesh(data=3)
    with pytest.raises(ValueError, match="host 2: the pod has hosts 0 to 1"):
        pod.kill(2)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([-0.0, 0.0], "x: -0.0 on host 0 | 0.0 on host 1"),
        ([np.nan, 1.0], "x: nan on host 0 | 1.0 on host 1"),
        (
            [[1.0, np.nan], [1.0, 2.0]],
            "x[1]: nan on host 0 | 2.0 on host 1; 1 of 2 values differ, by at most 0",
        ),
        (
            [[True, False], [True, True]],
            "x[1]: False on host 0 | True on host 1; 1 of 2 values differ, by at most 1",
        ),
    ],
)
def test_bits_that_differ_are_shown(values: list[Any], said: str) -> None:
    assert (
        difference(("", ""), {host: np.array(value) for host, value in enumerate(values)}) == said
    )


def test_values_of_bfloat16_that_differ_are_shown() -> None:
    values = {host: np.array([[1, 2 + host]], jnp.bfloat16) for host in range(3)}
    said = (
        "x['w'][0, 1]: 2 on host 0 | 3 on host 1 | 4 on host 2; 1 of 2 values differ, by at most 2"
    )
    assert difference(("['w']", ""), values) == said
