"""A place in the stream of a run."""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """A place in the stream: what was read before it, and what the plan counts before it.

    The two are one number, unless groups are filtered (`filter_groups`): a batch then reads as many
    prompts as it needs to be full, while the plan counts those of a full batch.
    """

    seen: int = 0  # samples of the stream that were read: `samples_seen`
    # samples of the batches; None: not stated, as for every run that filters no groups
    planned: int | None = None
