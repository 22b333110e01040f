"""The paths that the patterns of `adamw_mask` are searched in: a parameter's path here and in
MaxText.
"""

from __future__ import annotations

from collections.abc import Sequence

from maxbatch.around.maxtext.checkpoints.names import scanned_name


def searched_paths(names: Sequence[str], decoder_block: str) -> list[str]:
    """Returns a parameter's path here and, if MaxText has such a parameter, there; parts are joined
    by slashes.

    Args:
      names: the names that lead to it here, such as layers, attention, query.
      decoder_block: the family of the model.
    """
    theirs = scanned_name(names, decoder_block)
    return ["/".join(names)] + ([] if theirs is None else [theirs.replace(".", "/")])
