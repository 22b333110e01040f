"""Tables of what the core is extended by: objects by name, each with the place of its module.

`maxbatch/__init__.py` states them (`maxbatch/registered.py`), so the core loads a kind of sample or
a form of model without naming its module. An object is imported when it is first asked for.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from enum import Enum


class Table(Enum):
    """The tables that extend the core."""

    KINDS = "kinds of sample"
    FORMATS = "formats of files"
    TRACKERS = "experiment trackers"
    WORDS = "words of other programs"
    IMPORTERS = "formats of other programs' configs"
    MODEL_FORMS = "forms of other programs' models"
    SOURCES = "functions that open a model, by its form"
    OBSERVERS = "observers of a run's model"
    STATES = "functions that open a training state, by its form"


_PLACES: dict[Table, Mapping[str, str]] = {}


def state(tables: Mapping[Table, Mapping[str, str]]) -> None:
    """States the places ("module:NAME") of the objects of each table, by their names."""
    _PLACES.update(tables)


def names(table: Table) -> tuple[str, ...]:
    """Returns the names in a table, in its order."""
    return tuple(_PLACES[table])


@functools.cache
def load(table: Table, name: str) -> object:
    """Imports an object of a table."""
    module, _, attribute = _PLACES[table][name].partition(":")
    return getattr(importlib.import_module(module), attribute)
