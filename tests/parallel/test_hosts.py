"""One stream from any number of hosts: real processes, real collectives, the same updates."""

from __future__ import annotations

import json
import os
import re
import signal
import textwrap
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxbatch import ConfigError
from maxbatch.data.store.cache_folder import cache_folder
from maxbatch.parallel import hosts
from maxbatch.run import pretraining
from maxbatch.run.compile.cache import use_persistent_cache
from maxbatch.testing import Pod, run
from tests.helpers.command import Hold, maxbatch, recorded, start
from tests.helpers.forks import Fork
from tests.helpers.processes import wait_for
from tests.helpers.tiny import (
    ONE_LAYER,
    SAME,
    TINY_RUN,
    UNSAVED,
    assert_same_run,
    one_layer_config,
    read_metrics,
)

KEYS = (*TINY_RUN, ONE_LAYER)
RAMP = ("batch_size_schedule=0:8 32:16 96:24", "eval_fraction=0.1", "eval_interval=6", "steps=12")


def train(run_dir: Path, *arguments: str, **more: str) -> Fork:
    """Starts the command in a process group of its own."""
    return start("train", *KEYS, f"run_dir={run_dir}", *arguments, own_group=True, **more)


def finish(process: Fork, timeout: float = 600) -> tuple[int, str]:
    output, _ = process.communicate(timeout=timeout)
    return process.returncode, output


@pytest.mark.processes
def test_any_hosts_train_on_the_same_samples_to_the_same_losses(tmp_path: Path) -> None:
    """Ramp, accumulation and eval included."""
    layouts = (
        (),
        ("expansion_factor_real_data=2", "ici_tensor_parallelism=4"),  # a row lies on two hosts
    )
    folders = [tmp_path / str(number) for number in range(len(layouts))]
    configs = [
        one_layer_config(*RAMP, UNSAVED, "per_device_batch_size=1", *more, f"run_dir={folder}")
        for folder, more in zip(folders, layouts, strict=True)
    ]
    run(
        lambda _: [pretraining.train(config) for config in configs], devices=4, hosts=2, timeout=600
    )
    one = one_layer_config(*RAMP, UNSAVED, "per_device_batch_size=2", f"run_dir={tmp_path / 'one'}")
    pretraining.train(one, jax.devices()[:1])
    for folder in folders:
        assert_same_run(
            read_metrics(folder), read_metrics(tmp_path / "one"), (*SAME, "learning_rate")
        )
        assert len({m["compiles"] for m in read_metrics(folder)[1:]}) == 1, (
            "nothing compiles after the first step"
        )


@pytest.mark.processes
def test_hosts_on_cpus_compile_no_program_that_the_first_has_cached_or_compiles() -> None:
    """The first host compiles late in the first round, and finds the program cached in the
    second.
    """
    number = float(time.time_ns() % 2**24)  # of no program that an earlier test has cached

    def compiled(_: Pod) -> list[int]:
        events: list[str] = []
        jax.monitoring.register_event_listener(
            lambda event, **_: events.append(event.rpartition("/")[2])
        )
        use_persistent_cache("", cache_folder("", "xla"))
        split, counts = NamedSharding(jax.make_mesh((2,), ("x",)), P("x")), []
        for round_ in range(2):
            jax.clear_caches()
            x = jax.make_array_from_callback((2,), split, lambda _: np.ones(1))
            time.sleep(jax.process_index() == round_ == 0)
            events.clear()
            jax.jit(lambda x: jnp.sum(x) * number)(x).block_until_ready()
            counts.append(events.count("compile_requests_use_cache") - events.count("cache_hits"))
        return counts

    assert run(compiled, devices=2, hosts=2, timeout=100) == [[1, 0], [0, 0]]


@pytest.mark.processes
@pytest.mark.parametrize("host_without", [0, 1])
def test_a_host_without_a_cache_keeps_no_other_waiting(host_without: int) -> None:
    def seconds(_: Pod) -> float:
        begin = time.monotonic()
        has_none = jax.process_index() == host_without
        use_persistent_cache("none" if has_none else "", cache_folder("", "xla"))
        split = NamedSharding(jax.make_mesh((2,), ("x",)), P("x"))
        x = jax.make_array_from_callback((2,), split, lambda _: np.ones(1, np.float32))
        jax.jit(lambda x: jnp.sum(x) * 7.5)(x).block_until_ready()
        return time.monotonic() - begin

    assert max(run(seconds, devices=2, hosts=2, timeout=200)) < 60


@pytest.mark.processes
def test_a_program_that_the_first_host_cannot_compile_keeps_no_other_waiting() -> None:
    def refused(_: Pod) -> str:
        use_persistent_cache("", cache_folder("", "xla"))
        split = NamedSharding(jax.make_mesh((2,), ("x",)), P("x"))
        x = jax.make_array_from_callback((2,), split, lambda _: np.ones(1, np.float32))
        with pytest.raises(jax.errors.JaxRuntimeError) as error:
            jax.jit(
                lambda x: jax.ffi.ffi_call("nowhere", jax.ShapeDtypeStruct((), x.dtype))(jnp.sum(x))
            )(x)
        return str(error.value)

    assert all("nowhere" in message for message in run(refused, devices=2, hosts=2, timeout=60))


@pytest.mark.processes
def test_killed_and_stopped_in_the_ramp_and_resumed_on_other_hosts_nobody_can_tell(
    tmp_path: Path,
) -> None:
    """Two hosts, one process, two hosts of which one loads, and one process."""
    run_dir, reference = tmp_path / "run", tmp_path / "reference"
    ramp = ("batch_size_schedule=0:8 50:16 200:24", "steps=22", "checkpoint_period=4")
    whole = (*KEYS, *ramp, "per_device_batch_size=4")  # on one device
    done = maxbatch("train", *whole, f"run_dir={reference}")
    assert done.returncode == 0, done.stderr

    def resume(*arguments: str, until: int) -> tuple[Fork, Hold]:
        hold = Hold(until, tmp_path)
        process = train(run_dir, *ramp, "per_device_batch_size=2", *arguments, **hold.variables)
        wait_for(lambda: recorded(run_dir) >= until, process)
        return process, hold

    two = ("--simulate-devices", "4", "--simulate-hosts", "2")
    killed, _ = resume(*two, until=6)
    os.kill(killed.pid, signal.SIGKILL)  # the command alone; its hosts must not outlive it
    code, _ = finish(killed, timeout=60)  # the pipe of its output closes with the last of them
    assert code == -signal.SIGKILL

    one, _ = resume("expansion_factor_real_data=0.5", "--simulate-devices", "8", until=12)
    os.killpg(one.pid, signal.SIGKILL)
    finish(one)

    stopped, hold = resume("expansion_factor_real_data=2", "ici_data_parallelism=2", *two, until=17)
    stopped.send_signal(signal.SIGTERM)
    time.sleep(3)  # from the command to its hosts, also where they have few cores
    hold.release()
    code, output = finish(stopped)
    assert code == 75 and "saved" in output and recorded(run_dir) < 22, output

    done = maxbatch("train", *whole, f"run_dir={run_dir}")
    assert done.returncode == 0, done.stderr
    assert_same_run(read_metrics(run_dir), read_metrics(reference), (*SAME, "learning_rate"))


@pytest.mark.processes
def test_a_host_that_dies_ends_the_run_within_a_minute_and_is_named(tmp_path: Path) -> None:
    process = train(
        tmp_path / "run", "steps=100000", "checkpoint_period=2", "--simulate-hosts", "3"
    )
    wait_for((tmp_path / "run" / "checkpoints" / "2").exists, process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    start = time.monotonic()
    os.kill(int(children[2]), signal.SIGKILL)
    code, output = finish(process, timeout=120)
    assert code == 75 and time.monotonic() - start < 60
    said = output.splitlines()[-1]
    assert (
        "host 2 of 3 was killed by SIGKILL" in said
        and "is saved, and the same command continues" in said
    )


# Runs in every Python process of a test: gives each host a home of its own, and notes the data
# files it opens.
SITECUSTOMIZE = """
    import os, sys
    host = os.environ.get("JAX_PROCESS_ID")
    if host is not None:
        os.environ["HOME"] = os.path.join(os.environ["HOMES"], host)
        os.environ["XDG_CACHE_HOME"] = os.path.join(os.environ["HOME"], "cache")
        log = os.open(os.path.join(os.environ["HOMES"], "log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

        def note(event, arguments):
            if event == "open" and isinstance(arguments[0], str):
                if arguments[0].endswith((".jsonl", "tokens.bin", "offsets.npy", "manifest.json")):
                    os.write(log, f"{host} {arguments[0]}\\n".encode())

        sys.addaudithook(note)
"""


@pytest.fixture
def homes(tmp_path: Path) -> dict[str, str]:
    """Two hosts with a file system of their own each; the variables that make it so."""
    for host in range(2):
        home = tmp_path / "homes" / str(host)
        home.mkdir(parents=True)
        lines = [json.dumps({"text": f"document {i} says {i * i}"}) for i in range(200)]
        (home / "data.jsonl").write_text("\n".join(lines))
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(textwrap.dedent(SITECUSTOMIZE))
    return {"PYTHONPATH": str(tmp_path / "site"), "HOMES": str(tmp_path / "homes")}


DATA = ("dataset_type=jsonl", "dataset_path=~/data.jsonl", "per_device_batch_size=2", "steps=3")


@pytest.mark.processes
def test_hosts_that_do_not_load_never_touch_the_data(tmp_path: Path, homes: dict[str, str]) -> None:
    (tmp_path / "homes" / "1" / "data.jsonl").unlink()
    expanded = (
        "expansion_factor_real_data=2",
        "eval_fraction=0.1",
        "eval_interval=2",
        "--simulate-hosts",
        "2",
    )
    code, output = finish(train(tmp_path / "run", *DATA, *expanded, **homes))
    assert code == 0, output
    readers = {line.split()[0] for line in (tmp_path / "homes" / "log").read_text().splitlines()}
    assert readers == {"0"}


@pytest.mark.processes
def test_what_one_host_cannot_read_ends_all_with_its_message(
    tmp_path: Path, homes: dict[str, str]
) -> None:
    (tmp_path / "homes" / "1" / "data.jsonl").unlink()
    start = time.monotonic()
    code, output = finish(
        train(tmp_path / "run", *DATA, "--simulate-hosts", "2", **homes), timeout=120
    )
    assert code == 2 and time.monotonic() - start < 60
    assert (
        output.count("\n") == 1 and "host 1: dataset_path='~/data.jsonl': no such file" in output
    ), output


@pytest.mark.processes
def test_hosts_that_see_different_data_are_refused(tmp_path: Path, homes: dict[str, str]) -> None:
    data = tmp_path / "homes" / "1" / "data.jsonl"
    data.write_text(data.read_text().replace("document 7 ", "document 8 "))
    code, output = finish(train(tmp_path / "run", *DATA, "--simulate-hosts", "2", **homes))
    assert code == 2 and re.search(
        r"content: .* on host 0 \| .* on host 1", output.splitlines()[0]
    ), output


def test_hosts_that_do_not_divide_the_devices_are_refused_with_the_nearest() -> None:
    refused = maxbatch("train", "--simulate-devices", "4", "--simulate-hosts", "3")
    assert refused.returncode == 2 and refused.stderr.endswith("works: --simulate-hosts 2\n")


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}, "JAX_COORDINATOR_ADDRESS"),
        ({"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_PROCESS_ID": "0"}, "JAX_NUM_PROCESSES"),
        ({"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2"}, "JAX_PROCESS_ID"),
        (
            {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2"},
            "works: .*=1$",
        ),
        (
            {"JAX_COORDINATOR_ADDRESS": "a", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"},
            "works: a:8476$",
        ),
        ({"JAX_COORDINATOR_ADDRESS": "a:1"}, "JAX_NUM_PROCESSES"),
    ],
)
def test_half_a_cluster_in_the_environment_is_refused(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, Any], said: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=said):
        hosts.join(30, host_wait_s=10)


def test_one_process_tells_itself() -> None:
    assert (
        hosts.is_first()
        and hosts.broadcast(lambda: [1, "a"]) == [1, "a"]
        and hosts.gather(3) == [3]
    )
