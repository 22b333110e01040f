"""Connections between the testing process and its hosts."""

from __future__ import annotations

import os
import pickle
import struct
import sys
from multiprocessing.connection import Connection

from maxbatch.testing.messages import Raised, Reported

_PIECE_BYTES = 1 << 20
# the length of a message, as `multiprocessing` sends it
_SHORT, _LONG = struct.Struct("!i"), struct.Struct("!Q")


class Channel:
    """The testing process's end of a connection, which never waits: the host at the other end may
    be stopped.

    The other end is a `multiprocessing` connection.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._unsent, self._received = bytearray(), bytearray()
        self.is_closed = False  # at the other end
        os.set_blocking(connection.fileno(), False)

    def fileno(self) -> int:
        return self._connection.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether a message waits until the other end reads."""
        return bool(self._unsent)

    def send(self, message: object) -> None:
        """Sends a message, now or with later calls of `flush`."""
        data = pickle.dumps(message)
        is_short = len(data) < 1 << 31
        self._unsent += (
            _SHORT.pack(len(data)) if is_short else _SHORT.pack(-1) + _LONG.pack(len(data))
        )
        self._unsent += data
        self.flush()

    def flush(self) -> None:
        """Sends as much as the other end takes."""
        while self._unsent:
            try:
                sent = os.write(self.fileno(), self._unsent[:_PIECE_BYTES])
            except BlockingIOError:
                return
            except OSError:  # the other end has closed
                self._unsent.clear()
                return
            del self._unsent[:sent]

    def receive(self) -> list[object]:
        """Returns the messages that have arrived as a whole."""
        while True:
            try:
                data = os.read(self.fileno(), _PIECE_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.is_closed = True
                break
            self._received += data
        messages = []
        while (message := self._next()) is not None:
            messages.append(pickle.loads(message))
        return messages

    def poll(self) -> bool:
        """Returns whether there is anything to receive."""
        return self._connection.poll()

    def close(self) -> None:
        self._connection.close()

    def _next(self) -> bytes | None:
        """Returns the next whole message; None if it has not arrived yet."""
        head = _SHORT.size
        if len(self._received) < head:
            return None
        (length,) = _SHORT.unpack_from(self._received)
        if length == -1:
            if len(self._received) < head + _LONG.size:
                return None
            (length,) = _LONG.unpack_from(self._received, head)
            head += _LONG.size
        if len(self._received) < head + length:
            return None
        message = bytes(self._received[head : head + length])
        del self._received[: head + length]
        return message


class HostConnection(Connection):
    """A host's end of the connection, used by the host's own process alone.

    A child that a test forks, and that returns from the test, ends instead of answering in its
    host's place.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor)
        self._process = os.getpid()

    def send(self, message: object) -> None:
        if os.getpid() != self._process:
            has_failed = isinstance(message, Raised) or (
                isinstance(message, Reported) and message.has_raised
            )
            _end_child(int(has_failed))
        super().send(message)

    def recv(self) -> object:
        if os.getpid() != self._process:
            _end_child(0)
        return super().recv()


def _end_child(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
