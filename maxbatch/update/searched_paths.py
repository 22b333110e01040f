"""The paths that the patterns of `adamw_mask` are searched in: a parameter's path here and in other
programs, such as MaxText.
"""

from __future__ import annotations

from collections.abc import Sequence

from maxbatch.config.model_forms import model_forms


def searched_paths(names: Sequence[str], decoder_block: str) -> list[str]:
    """Returns a parameter's path here and, where another program has such a parameter, there;
    parts are joined by slashes.

    Args:
      names: the names that lead to it here, such as layers, attention, query.
      decoder_block: the family of the model.
    """
    foreign_paths = (form.parameter_path(names, decoder_block) for form in model_forms().values())
    return ["/".join(names), *(path for path in foreign_paths if path is not None)]
