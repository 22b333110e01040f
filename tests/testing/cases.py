"""Tests of pods that end in every way; tests/testing/test_plugin.py runs them in a session of their
own.
"""

import os
import subprocess
import sys
import time
import unittest

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

pytestmark = pytest.mark.pod(devices=4, hosts=2, timeout=6)
SETUPS = []


def total(pod):
    rows = NamedSharding(pod.mesh(data=4), PartitionSpec("data"))
    x = jax.make_array_from_callback((4,), rows, lambda index: np.arange(4.0)[index])
    return jax.jit(jnp.sum)(x)


@pytest.fixture(scope="module")
def mesh(pod):
    SETUPS.append(pod.host)
    yield pod.mesh(data=2, model=2)
    (pod.folder / "torn down").touch()


@pytest.fixture(params=["a", "b"])
def letter(request):
    return request.param


class TestMethods:
    @pytest.fixture(autouse=True)
    def number(self):
        self.number = 3

    @pytest.mark.parametrize("n", [1, 2])
    def test_fixtures_and_parameters(self, pod, mesh, letter, n, tmp_path, monkeypatch):
        assert (
            pod.num_hosts,
            jax.process_count(),
            jax.local_device_count(),
            jax.device_count(),
        ) == (2, 2, 2, 4)
        assert self.number == 3 and letter in "ab" and n in (1, 2)
        assert mesh.shape == {"data": 2, "model": 2} and [pod.host] == SETUPS
        (pod.folder / f"{letter}{n}{pod.host}").touch()
        pod.barrier()
        assert len(list(pod.folder.iterdir())) == 2 and not list(tmp_path.iterdir())


class TestUnittest(unittest.TestCase):
    def test_of_unittest(self):
        self.assertEqual(jax.process_count(), 2)


def test_collective(pod):
    found = total(pod)
    pod.same(found)
    assert found == 6


def test_assert_on_host_1(pod):
    print("printed on", pod.host)
    expected = {"host": 0}
    assert {"host": pod.host} == expected


def test_assert_while_the_other_waits(pod):
    assert pod.host == 0
    total(pod).block_until_ready()


def test_same_everywhere():
    raise RuntimeError("everywhere")


class Unpicklable(Exception):
    def __init__(self, first, second):
        self.function = lambda: first

    def __reduce__(self):
        raise TypeError("cannot be pickled")


def test_unpicklable_error(record_property):
    record_property("function", lambda: 0)
    raise Unpicklable(1, 2)


def test_sys_exit():
    sys.exit(4)


def test_os_exit(pod):
    if pod.host == 1:
        os._exit(3)
    pod.barrier()


def test_killed(pod):
    if pod.host == 1:
        print("before", flush=True)
        subprocess.Popen(["sleep", "600"])
        os.kill(os.getpid(), 9)
    total(pod).block_until_ready()


def test_hang(pod):
    if pod.host == 1:
        time.sleep(600)


def test_deadlock(pod):
    if pod.host == 0:
        total(pod).block_until_ready()


@pytest.fixture
def slow(pod):
    if pod.host == 0:
        time.sleep(600)


def test_slow_fixture(slow):
    pass


@pytest.fixture
def bad_end(pod):
    yield
    assert pod.host == 0


def test_bad_end(bad_end):
    pass


def test_forgotten_barrier(pod):
    if pod.host == 0:
        pod.barrier()


@pytest.mark.xfail(strict=True)
def test_expected_on_host_1(pod):
    assert pod.host == 0


@pytest.mark.xfail(strict=True)
def test_unexpected_pass():
    pass


@pytest.mark.xfail(raises=ValueError)
def test_unexpected_error():
    raise TypeError("another")


@pytest.mark.skip(reason="not now")
def test_skipped():
    pass


def test_skips_itself(pod):
    pytest.skip("nor now")


def test_host_1_skips(pod):
    if pod.host == 1:
        pytest.skip("host 0 does")


def test_loses_a_host(pod):
    if pod.host == 0:
        pod.kill(1)
        pod.barrier()  # of those that live
    else:
        time.sleep(600)


def test_waits_for_a_stopped_host(pod):
    start = time.monotonic()
    pod.barrier()
    if pod.host == 0:
        pod.stop(1, 0.5)
        time.sleep(0.1)
    pod.barrier()
    pod.barrier()
    assert pod.host == 1 or time.monotonic() - start >= 0.5


def test_after_all_of_them(pod):
    assert total(pod) == 6
