"""The hosts of a run: processes that share one mesh, usually one per machine.

Their messages here (facts, failures) are small. They go through the key-value store of JAX's
coordination service and not through the devices: no program runs, nothing compiles, and no timeout
of a collective applies while a host tokenises its data. All hosts call `broadcast` and `gather` in
the same order, the calls of each channel by themselves; the values are sent as JSON.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any, TypeVar

import jax

from maxbatch.parallel.deaths import LastSaved
from maxbatch.parallel.devices import start_devices
from maxbatch.parallel.heartbeats import Heartbeats, backstop_of, leave
from maxbatch.parallel.jax_internals import coordination, initialize_after
from maxbatch.parallel.rendezvous import Address, meet
from maxbatch.system.errors import ConfigError, TrainingError, one_line
from maxbatch.system.storage.proxies import leave_out_proxies
from maxbatch.system.terminal import warning

T = TypeVar("T")
R = TypeVar("R")

# Errors of a computation from which another host has disappeared.
_OF_PEERS = re.compile(
    r"(?i)gloo|connection|peer|socket|unavailable|deadline|heartbeat|coordination"
)
_LONGEST_WAIT_MS = 7 * 24 * 3600 * 1000  # a host may tokenise for long; one that dies ends the wait
_ADDRESS, _COUNT, _INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
_BIND_ADDRESS = "JAX_COORDINATOR_BIND_ADDRESS"
_CONNECTED_S = 60  # for hosts that are all there to connect
_REFUSAL, _REFUSED_TIMEOUT_S, _REFUSED_WAIT_S = "maxbatch/refusal/", 30, 60.0


class _Channels:
    """The keys of this host's messages in the store, by channel."""

    def __init__(self) -> None:
        self._numbers: defaultdict[str, Iterator[int]] = defaultdict(count)
        # the keys of the last gathered values, which other hosts may still read
        self._gathered: dict[str, str] = {}

    def next_key(self, channel: str = "") -> str:
        """Returns the key of the channel's next message, the same on all hosts."""
        return "/".join(filter(None, ("maxbatch", channel, str(next(self._numbers[channel])))))

    def gathered(self, channel: str, key: str) -> str | None:
        """Records the key of a gathered value; returns the key before it, which no host reads any
        more.
        """
        before, self._gathered[channel] = self._gathered.get(channel), key
        return before


_CHANNELS = _Channels()


def join(heartbeat_timeout_s: int, host_wait_s: float, is_silent: bool = False) -> None:
    """Joins the other hosts of the run, if there are any; must come before any device is touched.

    `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID` name them. Without these,
    JAX looks for a TPU pod, SLURM, Open MPI or Kubernetes. If none of these is present, the run has
    a single process.

    Args:
      host_wait_s: how long the others may take to come.
      is_silent: whether to print nothing about the wait.

    Raises:
      ConfigError: the variables are incomplete, or one cannot be used, such as a port that is
        taken.
      TrainingError: a host has not come.
    """
    if jax.distributed.is_initialized():
        return
    variables = {name: os.environ.get(name, "") for name in (_ADDRESS, _COUNT, _INDEX)}
    for name in (_ADDRESS, _BIND_ADDRESS):
        if os.environ.get(name):
            Address.parsed(os.environ[name], name)
    timeouts = {
        "heartbeat_timeout_seconds": backstop_of(heartbeat_timeout_s),
        "initialization_timeout": max(_CONNECTED_S, math.ceil(host_wait_s)),
    }
    meet_all = partial(_meet, host_wait_s, is_silent)
    if variables[_COUNT] or variables[_INDEX]:
        num_processes, index = _checked(variables)
        arguments = {
            "coordinator_address": variables[_ADDRESS],
            "num_processes": num_processes,
            "process_id": index,
        }
        initialize_after(meet_all, **arguments, **timeouts)
    elif os.environ.get("SLURM_NTASKS") != "1":  # a single task keeps all devices of its node
        try:
            initialize_after(meet_all, **timeouts)
        except (ValueError, RuntimeError) as error:
            if variables[_ADDRESS]:
                raise ConfigError(
                    f"{_ADDRESS}={variables[_ADDRESS]}: needs {_COUNT} and {_INDEX} as well where no "
                    f"cluster is found ({error}); works: {_COUNT}=1 {_INDEX}=0"
                ) from error
            # Nothing names other hosts, or a program has used its devices already: there is one
            # process.
            if not ("coordinator_address" in str(error) or "must be called before" in str(error)):
                raise


def _meet(
    host_wait_s: float, is_silent: bool, address: str, host: int, num_hosts: int, bind: str | None
) -> None:
    first = Address.parsed(address, _ADDRESS)
    leave_out_proxies(first.host)
    listens_at = None if bind is None else Address.parsed(bind, _BIND_ADDRESS)
    meet(first, host, num_hosts, host_wait_s, listens_at, is_silent)


def _checked(variables: dict[str, str]) -> tuple[int, int]:
    works = {_ADDRESS: "localhost:8476", _COUNT: "1", _INDEX: "0"}
    for name, value in variables.items():
        if not value or (name != _ADDRESS and not (value.isascii() and value.isdecimal())):
            rule = "HOST:PORT of process 0" if name == _ADDRESS else "a whole number"
            raise ConfigError(
                f"environment variable {name}={value}: must be {rule}, since another of "
                f"{', '.join(variables)} is set; works: {name}={works[name]}"
            )
    num_processes, index = int(variables[_COUNT]), int(variables[_INDEX])
    if index >= num_processes:
        raise ConfigError(
            f"environment variable {_INDEX}={index}: must be less than {_COUNT}={num_processes}; "
            f"works: {_INDEX}={max(0, num_processes - 1)}"
        )
    return num_processes, index


def refuse_together(code: int, message: str) -> None:
    """Tells the other hosts why this one refuses its config, then ends this process.

    Without the message the others would wait minutes for it to join. Returns if the environment
    names no other hosts, or if they cannot be joined.
    """
    # The variables may be incomplete, and no other host may come.
    with contextlib.suppress(ConfigError, TrainingError, RuntimeError):
        join(_REFUSED_TIMEOUT_S, _REFUSED_WAIT_S, is_silent=True)
        if len(_refusals(message)) > 1:
            leave(code, _is_keeper())


def _refusals(refusal: str) -> list[str]:
    """Exchanges the refusals of all hosts, "" for a host that accepts its config; touches no
    device.
    """
    state = coordination()
    if (state.num_processes or 1) == 1:
        return [refusal]
    store = _store()
    store.key_value_set(f"{_REFUSAL}{state.process_id}", refusal)
    hosts = range(state.num_processes)
    return [store.blocking_key_value_get(f"{_REFUSAL}{host}", _LONGEST_WAIT_MS) for host in hosts]


@contextlib.contextmanager
def together(
    report: Callable[[BaseException], int],
    heartbeat_timeout_s: int,
    host_wait_s: float,
    last_saved: LastSaved,
) -> Iterator[None]:
    """Joins the hosts for the duration of a run, and ends it on all of them together.

    If the run fails on one host, or its devices do not start, the others print its message and end
    as well, within seconds. If a host dies, the others name it and end within
    `heartbeat_timeout_s`, with exit code 75 if a checkpoint is saved. If there are several hosts,
    `report` prints the failure and returns the exit code, because the usual exit of the process
    would wait for hosts that wait for this one.

    Args:
      report: prints an error and returns the exit code.
      heartbeat_timeout_s: seconds in which the others have ended.
      host_wait_s: seconds that the hosts wait for each other at the start.
      last_saved: returns the newest step that is saved.
    """
    join(heartbeat_timeout_s, host_wait_s)
    refusals = [f"host {host}: {why}" for host, why in enumerate(_refusals("")) if why]
    if refusals:
        leave(report(ConfigError(refusals[0])), _is_keeper())
    if (coordination().num_processes or 1) == 1:
        start_devices()
        yield
        return
    _keep_the_output_to_python()
    # Before the devices start: the hosts wait for each other's, and one that fails must end the
    # others.
    heartbeats = Heartbeats(_store(), _address(), heartbeat_timeout_s, last_saved)
    heartbeats.start()
    try:
        start_devices()
        yield
    except BaseException as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and _OF_PEERS.search(str(error)):
            # perhaps another host has failed or died, whose report ends this process
            heartbeats.wait_for_report()
        heartbeats.own_report()
        code = report(error)
        heartbeats.fail(one_line(error, 2000), code)
        leave(code, _is_keeper())
    heartbeats.close()


def is_first() -> bool:
    """Returns whether this is the host that writes the run's files and prints for its user."""
    return jax.process_index() == 0


def warn(message: str) -> None:
    """Prints a warning on the first host alone."""
    if is_first():
        warning.warn(message)


def broadcast(make: Callable[[], T]) -> T:
    """Returns on every host the result of `make` on the first one."""
    if jax.process_count() == 1:
        return make()
    key = _CHANNELS.next_key()
    if is_first():
        value = make()
        _store().key_value_set(key, json.dumps(value))
        return value
    agreed: T = json.loads(_store().blocking_key_value_get(key, _LONGEST_WAIT_MS))
    return agreed


def gather(value: T, channel: str = "") -> list[T]:
    """Returns the values of all hosts, by their index.

    Args:
      channel: a name for the calls of a thread that runs beside others, whose order differs between
        hosts.
    """
    if jax.process_count() == 1:
        return [value]
    key, store = _CHANNELS.next_key(channel), _store()
    store.key_value_set(f"{key}/{jax.process_index()}", json.dumps(value))
    keys = [f"{key}/{host}" for host in range(jax.process_count())]
    values = [json.loads(store.blocking_key_value_get(key, _LONGEST_WAIT_MS)) for key in keys]
    # Every host has written this value, so every host has read the one that was gathered before.
    if before := _CHANNELS.gathered(channel, f"{key}/{jax.process_index()}"):
        store.key_value_delete(before)
    return values


def report_to_first(value: T, act: Callable[[list[T]], R], channel: str) -> R:
    """Hands the values of all hosts to the first one, and returns the result of its `act` on every
    host.

    Unlike those of `gather`, the values reach the first host alone, so they may be large.
    """
    if jax.process_count() == 1:
        return act([value])
    key, store = _CHANNELS.next_key(channel), _store()
    store.key_value_set(f"{key}/{jax.process_index()}", json.dumps(value))
    if not is_first():
        result_of_first: R = json.loads(
            store.blocking_key_value_get(f"{key}/result", _LONGEST_WAIT_MS)
        )
        return result_of_first
    values = [
        json.loads(store.blocking_key_value_get(f"{key}/{host}", _LONGEST_WAIT_MS))
        for host in range(jax.process_count())
    ]
    # Every host has written this value, so every host has read the result before.
    if before := _CHANNELS.gathered(channel, key):
        store.key_value_delete(before)
    result = act(values)
    for host in range(jax.process_count()):
        store.key_value_delete(f"{key}/{host}")
    store.key_value_set(f"{key}/result", json.dumps(result))
    return result


def _store() -> Any:
    return coordination().client


def _is_keeper() -> bool:
    """Returns whether this host keeps the store, before any device is touched."""
    return bool(coordination().process_id == 0)


def _address() -> str:
    address: str | None = coordination().coordinator_address
    assert address is not None, "the hosts have joined"
    return address


def _keep_the_output_to_python() -> None:
    # Native code shares standard output: gloo, which joins hosts without accelerators, prints every
    # peer there.
    sys.stdout.flush()
    descriptor = os.dup(1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    sys.stdout = open(descriptor, "w", buffering=1, encoding=sys.stdout.encoding)  # noqa: SIM115  for good
