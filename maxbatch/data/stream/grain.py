"""Grain, loaded by a command without Orbax.

Grain imports Orbax where it is installed, for a checkpoint handler that nothing here uses; that
takes a fifth of the start of `maxbatch train`. A user's process, which may use the handler, gets
all of Grain.
"""

from __future__ import annotations

import contextlib

import jax  # noqa: F401  Grain imports it too, and hides why it does not load

from maxbatch.system.processes.command_start import owns_process
from maxbatch.system.processes.hidden_modules import hidden

with hidden("orbax.checkpoint") if owns_process() else contextlib.nullcontext():
    from grain import DatasetIterator, MapDataset, MultiprocessingOptions, ReadOptions
    from grain.experimental import index_shuffle

__all__ = [
    "DatasetIterator",
    "MapDataset",
    "MultiprocessingOptions",
    "ReadOptions",
    "index_shuffle",
]
