"""Damage to a checkpoint's files."""

from __future__ import annotations

from pathlib import Path


def flip_a_parameter(checkpoint: Path) -> None:
    """Flips a bit of a checkpoint's parameters.

    It lies in the middle of the largest file. Small parameters are stored twice, in files of about one size of which
    only one is read, so a bit of each of them is flipped.
    """
    sizes = {file: file.stat().st_size for file in (checkpoint / "params").rglob("*") if file.is_file()}
    for file in [file for file, size in sizes.items() if 2 * size > max(sizes.values())]:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 4
        file.write_bytes(content)
