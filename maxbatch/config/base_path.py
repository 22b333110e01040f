"""The path of the model that a run's adapters adapt, stated anew where that model was moved."""

from __future__ import annotations

from collections.abc import Sequence

BASE_KEY = "load_parameters_path"  # of a run with adapters: the model that they adapt


def stated_base(overrides: Sequence[str]) -> str:
    """Returns the path of an override of `load_parameters_path`, where a run's base model is now;
    "" without one.
    """
    paths = [
        text.partition("=")[2].strip()
        for text in overrides
        if text.partition("=")[0].strip() == BASE_KEY
    ]
    return paths[-1] if paths else ""
