"""Damage to a checkpoint's files."""

from __future__ import annotations

from pathlib import Path


def flip_a_parameter(checkpoint: Path) -> None:
    """Flips a bit of a checkpoint's parameters."""
    largest = max((checkpoint / "params").glob("*.bin"), key=lambda file: file.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 4
    largest.write_bytes(content)
