"""Calls of one function that wait for storage, at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def in_threads(do: Callable[[T], R], items: Iterable[T], num_threads: int) -> list[R]:
    """Applies a function to items in parallel; re-raises the first failure, and cancels calls that have not begun."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(num_threads, "maxbatch-files") as threads:
        return list(threads.map(do, items))
