"""Errors of records that cannot become tokens. A module of its own, so that runs on texts load no
chat templates.
"""

from __future__ import annotations


class RecordError(ValueError):
    """An unusable record; the message is the reason."""
