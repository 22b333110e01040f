"""Text as UTF-8."""

from __future__ import annotations

from maxbatch.config.values import shown
from maxbatch.system.errors import ConfigError


def utf8_of(text: str) -> bytes:
    """Returns a text as UTF-8; raises ConfigError for half of a surrogate pair, as in an argument that is not UTF-8."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"the text {shown(ascii(text))} cannot be encoded: character {error.start} is half of a surrogate pair, "
            "or the text was not given as UTF-8"
        ) from error
