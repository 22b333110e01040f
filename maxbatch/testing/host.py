"""One host of a pod: a process with some CPU devices, joined to the other hosts, that serves the
testing process.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from maxbatch.system.hardware.cpu_devices import make_cpu_devices, variables_of_host
from maxbatch.system.processes.child_process import end_with_parent
from maxbatch.system.storage.proxies import leave_out_proxies
from maxbatch.testing.channel import HostConnection
from maxbatch.testing.messages import Answer, Call, Close, Phase, Raised, Returned, Start, Started
from maxbatch.testing.pod import Pod, PodError

if TYPE_CHECKING:
    from maxbatch.testing.host_session import HostSession

# JAX's own timeout: long, since a test may stop a host and the testing process watches them all
_SILENCE_S = 3600
_SHUTDOWN_S = 5


def main(connected: int, dump: int) -> None:
    """Serves a connection until this process is killed.

    Args:
      connected: file descriptor of the connection.
      dump: file descriptor to which SIGQUIT writes the stacks of this process.
    """
    faulthandler.register(signal.SIGQUIT, file=dump, all_threads=True)
    for descriptor in (connected, dump):
        os.set_inheritable(descriptor, False)
    parent = os.dup(0)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    end_with_parent(parent, with_group=True)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    with HostConnection(connected) as connection:
        serve(connection)


def serve(connection: Connection) -> None:
    """Answers the messages of a connection, the first of which is `Start`, until this process is
    killed.
    """
    start: Start = connection.recv()
    pod = Pod(start.host, start.num_hosts, connection)
    session: HostSession | None = None
    try:
        session = _start(start, pod, connection)
        connection.send(Started(threading.main_thread().ident or 0))
    except PodError as error:
        connection.send(Raised(str(error)))
    except BaseException:
        connection.send(Raised(traceback.format_exc()))
    while True:
        message: Phase | Call | Close = connection.recv()
        if isinstance(message, Close):
            connection.send(_closed(session))
            continue
        pod.folder = message.folder
        if isinstance(message, Call):
            connection.send(_called(message, pod))
        else:
            assert session is not None
            connection.send(session.run(message))


def _start(start: Start, pod: Pod, connection: Connection) -> HostSession | None:
    """Joins the hosts; pytest's configuration may import JAX before, but not use its devices."""
    os.environ.update(variables_of_host(start.port, start.num_hosts, start.host))
    make_cpu_devices(start.num_devices)
    session = None
    if start.session is not None:
        from maxbatch.testing.host_session import HostSession

        session = HostSession(start.session, pod, connection)
    make_cpu_devices(start.num_devices)  # a conftest.py may have asked for other devices
    _join(start)
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        os.environ.pop(name, None)  # a process started by a test is not one of the hosts
    if session is not None:
        session.collect()
    return session


def _join(start: Start) -> None:
    is_loaded = "jax" in sys.modules
    import jax
    import jax.extend

    if is_loaded:
        jax.extend.backend.clear_backends()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", -1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # a warning about proxies, which loopback does not use
    jax.config.update("jax_check_proxy_envs", False)
    leave_out_proxies("localhost")
    jax.distributed.initialize(
        f"localhost:{start.port}",
        start.num_hosts,
        start.host,
        cluster_detection_method="deactivate",
        coordinator_bind_address=f"localhost:{start.port}",
        heartbeat_timeout_seconds=_SILENCE_S,
        shutdown_timeout_seconds=_SHUTDOWN_S,
    )
    jax.devices()  # creates the devices, which no later setting changes


def _closed(session: HostSession | None) -> Answer:
    try:
        if session is not None:
            session.close()
        return Returned(b"")
    except BaseException:
        return Raised(traceback.format_exc())


def _called(message: Call, pod: Pod) -> Answer:
    import cloudpickle

    try:
        os.chdir(message.working_folder)
        for name in os.environ.keys() - message.variables.keys():
            del os.environ[name]
        os.environ.update(message.variables)
        function = pickle.loads(message.function)
        return Returned(cloudpickle.dumps(function(pod)))
    except BaseException as error:
        error.__traceback__ = error.__traceback__ and (
            error.__traceback__.tb_next or error.__traceback__
        )
        return Raised("".join(traceback.format_exception(error)))
