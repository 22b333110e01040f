"""Folders and files that rows of `table.txt` take for given, by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

GIVEN: dict[str, Callable[[Path], None]] = {}
