"""Reading ahead by time."""

from __future__ import annotations

import itertools
import threading
import time
from types import SimpleNamespace

import pytest

from maxbatch.data.stream.reader import ReadAheadByTime
from tests.helpers.processes import wait_for


class Slow:
    """Elements that take a while; counts those that were asked for."""

    def __init__(self, size: int, seconds: float = 0.0) -> None:
        self._size, self._seconds = size, seconds
        self.asked: list[int] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> int:
        with self._lock:
            self.asked.append(index)
        time.sleep(self._seconds)
        if index == 90:
            raise ValueError("of element 90")
        return index


def test_elements_come_in_order_and_all() -> None:
    ahead = ReadAheadByTime(Slow(50, 0.002), seconds=1, least=4, most=8)
    assert list(ahead) == list(range(50))
    ahead.close()


def test_what_a_store_that_stops_for_a_while_has_delivered_lasts_as_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # each element is returned and the next one asked for: 5 ms each
    seconds = itertools.count(0.0, 0.005)
    monkeypatch.setattr(
        "maxbatch.data.stream.reader.time", SimpleNamespace(monotonic=lambda: next(seconds))
    )
    blocks = Slow(10**6)
    ahead = ReadAheadByTime(blocks, seconds=0.4, least=2, most=1000)
    for _ in range(85):
        next(ahead)
    wait_for(lambda: len(blocks.asked) >= 85 + 78)
    assert max(blocks.asked) - 85 <= 82, "eighty steps of 5 ms"
    ahead.close()


@pytest.mark.parametrize(("seconds", "most"), [(0.0, 100), (100.0, 3)])
def test_no_more_is_read_ahead_than_is_wanted(seconds: float, most: int) -> None:
    blocks = Slow(10**6)
    ahead = ReadAheadByTime(blocks, seconds, least=3, most=most)
    for _ in range(20):
        next(ahead)
    time.sleep(0.05)
    assert max(blocks.asked) < 20 + 3
    ahead.close()


def test_a_failure_is_raised_where_its_element_is_wanted() -> None:
    ahead = ReadAheadByTime(Slow(100), seconds=1, least=20, most=20)
    found = [next(ahead) for _ in range(90)]
    assert found == list(range(90))
    with pytest.raises(ValueError, match="of element 90"):
        next(ahead)
    ahead.close()
