"""Configs of a test: files, keys in Python, and the error that a config ends in."""

from __future__ import annotations

from pathlib import Path

import pytest

from maxbatch import ConfigError, load_config
from maxbatch.config.config import Config


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def config_of(*overrides: str) -> Config:
    return load_config(overrides=overrides)


def error_of(path: Path | None = None, overrides: tuple[str, ...] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500
    return message


def works_of(message: str, name: str) -> list[str]:
    """Returns the overrides that the refusal of a key says work."""
    words = message.rpartition("works: ")[2].split()
    return [word if "=" in word else f"{name}={word}" for word in words]
