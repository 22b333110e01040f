"""Small YAML texts that expand to large values."""

from __future__ import annotations


def bomb(levels: int = 12) -> str:
    """A task file of some 700 bytes whose aliases, written out, are 9^levels words."""
    lines = ["task: bomb", "a0: &a0 [" + ", ".join(["lol"] * 9) + "]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, levels)]
    return "\n".join(lines) + "\n"
