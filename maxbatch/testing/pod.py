"""The pod as seen by a test: its hosts, a mesh of its devices, and points where all hosts meet."""

from __future__ import annotations

import hashlib
import math
import os
import pickle
import re
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from maxbatch.testing.messages import Exchange, Exchanged, Refused, Signal

if TYPE_CHECKING:
    import jax

_MOST_SHOWN = 3  # differences between hosts
_LONGEST_TEXT = 80  # characters of a value that differs
_MOST_DEPTH = 8  # of an object's attributes
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class PodError(Exception):
    """A host failed, died or hung, or did not reach a point where the others wait."""


class Pod:
    """The pod of a test, as seen by one of its hosts.

    Attributes:
      host: index of this host.
      num_hosts: number of hosts.
      folder: a folder of this test that all hosts share, empty at the start.
    """

    def __init__(self, host: int, num_hosts: int, connection: Connection) -> None:
        self.host, self.num_hosts = host, num_hosts
        self.folder = Path()
        self._connection, self._lock = connection, threading.Lock()
        self._process = os.getpid()

    def __repr__(self) -> str:
        return f"<Pod: host {self.host} of {self.num_hosts}>"

    def mesh(self, **axes: int) -> jax.sharding.Mesh:
        """Returns a mesh over all devices of the pod, such as `pod.mesh(data=4, model=2)`, with
        axes of type Auto.

        Raises:
          ValueError: the axes do not hold all devices.
        """
        import jax

        __tracebackhide__ = True
        num_devices = jax.device_count()
        if math.prod(axes.values()) != num_devices:
            given = ", ".join(f"{name}={size}" for name, size in axes.items())
            first = next(iter(axes), "data")
            raise ValueError(
                f"mesh({given}): the pod has {num_devices} devices; works: "
                f"mesh({first}={num_devices})"
            )
        types = (jax.sharding.AxisType.Auto,) * len(axes)
        return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types)

    def barrier(self) -> None:
        """Waits until every living host has reached this point.

        Raises:
          PodError: a host ended the test without reaching this point, or waits at another one.
        """
        __tracebackhide__ = True
        self._exchange("barrier()", None)

    def same(self, x: object) -> None:
        """Checks that all hosts hold the same values, bit by bit.

        Args:
          x: a number, a text, an array, another object, or a tree of them. For a `jax.Array` the
            copies of each shard are compared, so an array may be replicated over all hosts or some
            of them. Objects are compared by their type and attributes, or else by their `repr`, and
            functions by their name.

        Raises:
          AssertionError: they differ; the message names the hosts and the difference.
        """
        __tracebackhide__ = True
        leaves = _leaves(x)
        hashes = {
            name: {part: _hashed(value) for part, value in shards.items()}
            for name, shards in leaves.items()
        }
        by_host: dict[int, dict[str, dict[str, _Hashed]]] = self._exchange("same()", hashes)
        names = {host: set(of_host) for host, of_host in by_host.items()}
        if len(set(map(frozenset, names.values()))) > 1:
            every = set.union(*names.values())
            lacks = "; ".join(
                f"{named([h])} has no x{min(every - held)}"
                for h, held in names.items()
                if every - held
            )
            raise AssertionError(f"the hosts hold trees of different structure: {lacks}")
        different = [
            (name, part)
            for name in leaves
            for part in sorted({part for of_host in by_host.values() for part in of_host[name]})
            if len({of_host[name][part] for of_host in by_host.values() if part in of_host[name]})
            > 1
        ]
        if different:
            shown = different[:_MOST_SHOWN]
            mine = {key: leaves[key[0]][key[1]] for key in shown if key[1] in leaves[key[0]]}
            values: dict[int, dict[tuple[str, str], object]] = self._exchange("same()", mine)
            lines = [
                difference(key, {host: v[key] for host, v in values.items() if key in v})
                for key in shown
            ]
            more = (
                [f"and {len(different) - len(shown)} more"] if len(different) > len(shown) else []
            )
            raise AssertionError("\n".join(["the hosts disagree:", *lines, *more]))

    def kill(self, host: int) -> None:
        """Kills a host (SIGKILL) and returns once it is dead. The test continues and may pass
        without it.

        Host 0 keeps JAX's coordination service: as on a real pod, JAX ends the others when it dies.
        """
        self._signal(host, None)
        if host == self.host:
            time.sleep(math.inf)

    def stop(self, host: int, seconds: float) -> None:
        """Stops a host (SIGSTOP) and continues it after `seconds`; returns at once."""
        self._signal(host, seconds)

    def _signal(self, host: int, stopped_s: float | None) -> None:
        if not 0 <= host < self.num_hosts:
            raise ValueError(f"host {host}: the pod has hosts 0 to {self.num_hosts - 1}")
        self._ask(Signal(host, stopped_s))

    def _exchange(self, point: str, value: object) -> dict[int, Any]:
        __tracebackhide__ = True
        answer = self._ask(Exchange(point, pickle.dumps(value)))
        if isinstance(answer, Refused):
            raise PodError(answer.why)
        assert isinstance(answer, Exchanged)
        return {host: pickle.loads(pickled) for host, pickled in answer.values.items()}

    def _ask(self, message: object) -> object:
        __tracebackhide__ = True
        if os.getpid() != self._process:
            raise PodError(
                f"a process that host {self.host} forked is no host: it cannot meet, kill or stop "
                "hosts"
            )
        with self._lock:
            self._connection.send(message)
            return self._connection.recv()


class _Told(NamedTuple):
    """An object that is no array, as text that is equal on all hosts for equal objects."""

    kind: str
    text: str


class _Hashed(NamedTuple):
    kind: str  # dtype and shape of an array, else the type
    digest: bytes


def _hashed(value: object) -> _Hashed:
    import numpy as np

    if isinstance(value, np.ndarray):
        data = np.ascontiguousarray(value).tobytes()
        return _Hashed(
            f"{value.dtype}[{', '.join(map(str, value.shape))}]", hashlib.sha256(data).digest()
        )
    told = value if isinstance(value, _Told) else _Told(type(value).__name__, _text_of(value))
    return _Hashed(told.kind, hashlib.sha256(told.text.encode("utf-8", "surrogatepass")).digest())


def _text_of(value: object, depth: int = 0) -> str:
    """Returns a text of a value without addresses, orders of sets and other things of one
    process.
    """
    import numpy as np

    if isinstance(value, np.ndarray) or hasattr(value, "addressable_shards"):
        array = np.asarray(value)
        return (
            f"{array.dtype}{list(array.shape)} "
            f"{hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()}"
        )
    if depth > _MOST_DEPTH:
        return type(value).__qualname__
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(_text_of(item, depth + 1) for item in value))}}}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({', '.join(_text_of(item, depth + 1) for item in value)})"
    if isinstance(value, dict):
        items = [
            f"{_text_of(key, depth + 1)}: {_text_of(item, depth + 1)}"
            for key, item in value.items()
        ]
        return f"{{{', '.join(items)}}}"
    if isinstance(value, str | bytes):
        return repr(value)
    name = getattr(value, "__qualname__", None)
    if isinstance(name, str):  # a function or a class
        return f"{getattr(value, '__module__', '')}.{name}"
    if type(value).__repr__ is object.__repr__ and hasattr(value, "__dict__"):
        attributes = [
            f"{key}={_text_of(item, depth + 1)}" for key, item in sorted(vars(value).items())
        ]
        return f"{type(value).__qualname__}({', '.join(attributes)})"
    return _ADDRESS.sub("", repr(value))


def _leaves(x: object) -> dict[str, dict[str, object]]:
    """Returns the leaves of a tree by path, each as parts by their slices: arrays, or other
    objects.
    """
    import jax
    import numpy as np

    leaves: dict[str, dict[str, object]] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(x)[0]:
        name = jax.tree_util.keystr(path)
        if isinstance(leaf, jax.Array):
            leaves[name] = _shards(name, leaf)
        elif isinstance(leaf, np.ndarray | np.generic | int | float | complex):
            leaves[name] = {"": np.asarray(leaf)}
        else:
            leaves[name] = {"": _Told(type(leaf).__name__, _text_of(leaf))}
    return leaves


def _shards(name: str, array: jax.Array) -> dict[str, object]:
    import jax
    import jax.numpy as jnp
    import numpy as np

    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    shards: dict[str, object] = {}
    for shard in array.addressable_shards:
        slices = [
            f"{s.start or 0}:{s.stop or n}" for s, n in zip(shard.index, array.shape, strict=True)
        ]
        part = "" if shard.data.shape == array.shape else f"[{', '.join(slices)}]"
        value = np.asarray(shard.data)
        if part in shards and _hashed(shards[part]) != _hashed(value):
            raise AssertionError(
                f"devices of one host disagree: x{name}{part}, on {shard.device} and before it"
            )
        shards[part] = value
    return shards


def difference(key: tuple[str, str], values: Mapping[int, Any]) -> str:
    """Returns a line with the hosts and their values."""
    import numpy as np

    name = f"x{key[0]}{key[1]}"
    kinds = {host: _hashed(value).kind for host, value in values.items()}
    if len(set(kinds.values())) > 1 or not all(
        isinstance(value, np.ndarray) for value in values.values()
    ):
        unlike = len(set(kinds.values())) > 1
        return f"{name}: {_grouped(kinds if unlike else _where_they_differ(values))}"
    first = next(iter(values.values()))
    bits = [
        value.reshape(-1).view(f"V{first.dtype.itemsize}").reshape(first.shape)
        for value in values.values()
    ]
    places = np.argwhere(np.any([other != bits[0] for other in bits[1:]], axis=0))
    place = tuple(int(i) for i in places[0])
    at = str(list(place)) if place else ""
    line = f"{name}{at}: {_grouped({host: str(value[place]) for host, value in values.items()})}"
    if first.size == 1:
        return line
    kind = np.complex128 if first.dtype.kind == "c" else np.float64
    wide = np.stack([value.astype(kind) for value in values.values()])
    largest = np.nanmax(np.abs(wide - wide[0])) if np.isfinite(wide).any() else math.nan
    return f"{line}; {len(places)} of {first.size} values differ, by at most {largest:.3g}"


def _where_they_differ(values: Mapping[int, _Told]) -> dict[int, str]:
    """Returns the text of each host, long ones cut around the first difference."""
    texts = {host: value.text for host, value in values.items()}
    if max(map(len, texts.values())) <= _LONGEST_TEXT:
        return texts
    shortest = min(map(len, texts.values()))
    letters = enumerate(zip(*texts.values(), strict=False))
    first = next((place for place, of_hosts in letters if len(set(of_hosts)) > 1), shortest)
    begin = max(0, first - _LONGEST_TEXT // 2)
    end = begin + _LONGEST_TEXT
    return {
        host: f"{'...' * (begin > 0)}{text[begin:end]}{'...' * (end < len(text))} ({len(text)} "
        "characters)"
        for host, text in texts.items()
    }


def _grouped(texts: Mapping[int, str]) -> str:
    groups: dict[str, list[int]] = {}
    for host, text in texts.items():
        groups.setdefault(text, []).append(host)
    return " | ".join(f"{text} on {named(hosts)}" for text, hosts in groups.items())


def named(hosts: Sequence[int]) -> str:
    """Returns `host 1` or `hosts 0, 2`."""
    return f"host {hosts[0]}" if len(hosts) == 1 else f"hosts {', '.join(map(str, hosts))}"
