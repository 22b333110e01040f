"""Errors of records that cannot become tokens. A module of its own, so that runs on texts load no
chat templates.
"""

from __future__ import annotations


class ConversationError(ValueError):
    """An unusable conversation; the message is the reason."""
