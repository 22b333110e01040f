"""Tasks on the nodes of a Ray cluster. Ray (the extra `ray`) is imported when a command first needs
it.

A task runs in the command's folder if its node has that folder, so relative paths mean the same on
a shared file system. Tasks share the command's config keys in the environment and its access to
object stores. Ray runs a task again if its node is lost, and ends a command's tasks when the
command ends for any reason.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from types import ModuleType
from typing import Any, Generic, ParamSpec, Self, TypeVar

from maxbatch.system.errors import ConfigError
from maxbatch.system.processes.worker_pool import WorkerEnded
from maxbatch.system.storage.stores import STORES
from maxbatch.system.terminal.folding import printable
from maxbatch.system.terminal.warning import note

# Ray's options for the resources that every node has; other resources are the cluster's own.
_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
# Prefixes of environment variables that a command shares with its tasks: config keys, and settings
# of stores' clients.
_SHARED = ("MAXBATCH_", "FSSPEC_")
_LONGEST = 160  # characters of a message of Ray
_ANSWER_S = 10.0
# RFC 9113, 3.4: no settings
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))

Item = TypeVar("Item")
Answer = TypeVar("Answer")
P = ParamSpec("P")


class Cancelled(WorkerEnded):
    """The task was cancelled before it returned."""


class RayCluster:
    """A connection to a Ray cluster; a context manager. A cluster that it started ends with it.

    Args:
      address: `local` to start a cluster on this machine, `auto` for a running one, or an address
        of `ray.init`.
      resources: of each task, by Ray's names, such as {"TPU": 4}; one CPU unless stated.
      retries: times that a task runs again after its node or worker process is lost; -1: no limit.

    Attributes:
      num_slots: tasks that the cluster can now run at a time; 1 if it has no node for them yet.

    Raises:
      ConfigError: Ray is not installed, there is no such cluster, or a new one lacks the resources.
    """

    def __init__(self, address: str, resources: Mapping[str, float], retries: int) -> None:
        try:
            import ray
        except ImportError:
            raise ConfigError("--ray needs Ray; works: pip install 'maxbatch[ray]'") from None
        self._ray: ModuleType = ray
        with _own_handler_of_sigterm():
            _connect(ray, address)
        needed = {"CPU": 1.0, **resources}
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        slots = sum(
            int(min(node.get(name, 0) / amount for name, amount in needed.items()))
            for node in nodes
        )
        if not slots:
            wanted = ",".join(f"{name}={amount:g}" for name, amount in needed.items())
            if address == "local":
                self.close()
                raise ConfigError(
                    f"--resources {wanted}: this machine lacks them; works: --resources CPU=1"
                )
            note(f"no node of the cluster has {wanted} yet; tasks wait for one")
        self.num_slots = max(1, slots)
        named = {_OPTIONS[name]: amount for name, amount in needed.items() if name in _OPTIONS}
        others = {name: amount for name, amount in needed.items() if name not in _OPTIONS}
        self._call = ray.remote(max_retries=retries, resources=others, **named)(_call)
        self._variables = shared_variables(os.environ)

    def start(
        self, function: Callable[P, Answer], *args: P.args, **kwargs: P.kwargs
    ) -> RayTask[Answer]:
        """Queues a call of a function with picklable arguments; it starts when a node has the
        resources.
        """
        return RayTask(
            self._ray, self._call.remote(os.getcwd(), self._variables, function, args, kwargs)
        )

    def put(self, value: object) -> object:
        """Returns a reference to a value, which `ray.get` resolves on every node."""
        return self._ray.put(value)

    def close(self) -> None:
        """Ends the tasks, and the cluster if it was started here."""
        self._ray.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class RayTask(Generic[Answer]):
    """A call of a function on a node."""

    def __init__(self, ray: ModuleType, reference: Any) -> None:
        self._ray, self._reference = ray, reference

    def is_done(self) -> bool:
        """Returns whether `result` returns or raises at once."""
        return bool(self._ray.wait([self._reference], timeout=0)[0])

    def result(self) -> Answer:
        """Returns the result of the call.

        Raises:
          Exception: the function raised it.
          Cancelled: the task was cancelled.
          WorkerEnded: its node or its worker process was lost for good.
        """
        try:
            answer: Answer = self._ray.get(self._reference)
        except Exception as error:
            raise self._meaning(error) from None
        return answer

    def future(self) -> Future[Answer]:
        """Returns a future of the result, or of the exception that `result` raises."""
        future: Future[Answer] = Future()

        def done(answered: Future[Answer]) -> None:
            error = answered.exception()
            future.set_result(answered.result()) if error is None else future.set_exception(
                self._meaning(error)
            )

        self._reference.future().add_done_callback(done)
        return future

    def interrupt(self) -> None:
        """Raises KeyboardInterrupt in the function, or cancels the task if it has not started."""
        self._ray.cancel(self._reference)

    def kill(self) -> None:
        self._ray.cancel(self._reference, force=True)

    def _meaning(self, error: BaseException) -> BaseException:
        exceptions = self._ray.exceptions
        if isinstance(error, exceptions.TaskCancelledError):
            return Cancelled("the task was cancelled")
        if isinstance(error, exceptions.RayTaskError):
            cause: BaseException = error.cause
            return cause
        if isinstance(error, exceptions.RayError):
            return WorkerEnded(" ".join(str(error).split())[:_LONGEST])
        return error


class RayPool(Generic[Item, Answer]):
    """Tasks that call one function, with the interface of `WorkerPool`; a context manager.

    Args:
      setup: called once in each worker process; returns the function that is called for each item.
    """

    def __init__(
        self,
        cluster: RayCluster,
        setup: Callable[[], Callable[[Item], Answer]],
        variables: Mapping[str, str],
    ) -> None:
        self._cluster, self._name = cluster, os.urandom(8).hex()
        # Inside a list, only the first task of a worker process fetches it.
        self._setup = [cluster.put((setup, dict(variables)))]
        self._running: set[RayTask[Answer]] = set()

    def submit(self, items: Sequence[Item]) -> list[Future[Answer]]:
        """Returns futures of the function's results for each item.

        A future raises the error of the function or of the setup, or WorkerEnded if the task's
        workers or nodes are lost for good.
        """
        return [self._submit(item) for item in items]

    def _submit(self, item: Item) -> Future[Answer]:
        task = self._cluster.start(_served, self._name, self._setup, item)
        self._running.add(task)
        future: Future[Answer] = task.future()
        future.add_done_callback(lambda _: self._running.discard(task))
        return future

    def close(self) -> None:
        """Kills the tasks under way."""
        for task in list(self._running):
            task.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@contextlib.contextmanager
def _own_handler_of_sigterm() -> Iterator[None]:
    """Restores the command's handler, which Ray replaces by its own."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def _connect(ray: ModuleType, address: str) -> None:
    """Connects to a cluster, or starts one; raises ConfigError if it cannot be reached."""
    settings = {"include_dashboard": False} if address == "local" else {}
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", address)
    try:
        host, colon, port = address.removeprefix("ray://").rpartition(":")
        if colon:  # Ray would try for minutes
            _await_answer(host, int(port))
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", **settings)
    except Exception as error:  # of Ray, of gRPC, of the system
        problem = " ".join(str(error).split())[:_LONGEST]
        raise ConfigError(
            f"--ray {printable(address)}: no Ray cluster answers ({problem}); works: --ray local"
        ) from None


def _await_answer(host: str, port: int) -> None:
    """Waits until a server answers HTTP/2's greeting, as Ray's servers do; raises OSError if none
    does.
    """
    with socket.create_connection((host, port), _ANSWER_S) as connection:
        connection.sendall(_GREETING)
        connection.recv(1)


def shared_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables that tasks take from the command; the others come from the
    node.
    """
    of_stores = {name for store in STORES.values() for name in store.variables}
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_SHARED) or name in of_stores
    }


def _call(
    folder: str,
    variables: Mapping[str, str],
    function: Callable[..., Answer],
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> Answer:
    """Calls a function, in a worker process of a node."""
    os.environ.update(variables)  # Ray starts worker processes for each command
    # Ray raises KeyboardInterrupt by this handler, which is missing if the command was started in
    # the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # a node without the folder can still use paths in object stores
    with contextlib.suppress(OSError):
        os.chdir(folder)
    return function(*args, **kwargs)


_functions: dict[str, Callable[[object], object]] = {}  # of a worker process: by pool


def _served(name: str, boxed: Sequence[object], item: object) -> Any:
    """Calls a pool's function, which the first task of a worker process sets up."""
    import ray

    if name not in _functions:
        setup, variables = ray.get(boxed[0])
        os.environ.update(variables)
        _functions[name] = setup()
    return _functions[name](item)
