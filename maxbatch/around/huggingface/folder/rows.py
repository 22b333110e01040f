"""A row of a Hugging Face `config.json`: a config key and the field that states it; and the rows and
functions of one form of models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from maxbatch.around.huggingface.folder.stated_model import StatedModel
from maxbatch.config.combined import DecoderConfig
from maxbatch.families.record import Family, Json

_REQUIRED = object()


def same(value: Any, _: object) -> object:
    """Returns the value as it is."""
    return value


def always(family: Family) -> bool:
    """A condition that every family meets."""
    return True


def never(family: Family) -> bool:
    """A condition that no family meets."""
    return False


class Row(NamedTuple):
    """A config key, and the field that states it."""

    key: str
    field: str  # its common name; `Family.fields` has a family's own. "": the family states it
    to_key: Callable[[Any, StatedModel], object] = same  # of the field's value
    to_field: Callable[[Any, DecoderConfig], object] = same  # of the key's value
    default: object = _REQUIRED  # of a field that neither the file nor the family states
    # whether a file of the family has the field; an import reads it wherever it stands
    is_written: Callable[[Family], bool] = always

    def read(self, model: StatedModel) -> object:
        """Returns the value of the key; raises KeyError if the file lacks a required field."""
        if not self.field:
            value = None
        elif self.default is _REQUIRED:
            value = model[self.field]
        else:
            value = model.get(self.field, self.default)
        return self.to_key(value, model)


class Form(NamedTuple):
    """The keys and fields of the models that have one form."""

    has_form: Callable[[Family], bool]
    rows: tuple[Row, ...] = ()
    # Keys that several fields state together; they come before those of the rows.
    read: Callable[[StatedModel], dict[str, object]] = lambda model: {}
    write: Callable[[DecoderConfig, Family], Json] = lambda config, family: {}
    # Fields that it alone has: whole numbers, and numbers of layers.
    whole: tuple[str, ...] = ()
    of_layers: tuple[str, ...] = ()
    # Conditions on a model of such a family.
    is_in_file: Callable[[StatedModel], bool] = lambda model: True
    is_in_config: Callable[[DecoderConfig], bool] = lambda config: True

    def keys(self, model: StatedModel) -> dict[str, object]:
        """Returns the keys that a file states; none if its model has another form."""
        if not (self.has_form(model.family) and self.is_in_file(model)):
            return {}
        return self.read(model) | {row.key: row.read(model) for row in self.rows}

    def fields(self, config: DecoderConfig, family: Family) -> Json:
        """Returns the fields of a model by their common names; none if it has another form."""
        if not (self.has_form(family) and self.is_in_config(config)):
            return {}
        rows = (row for row in self.rows if row.field and row.is_written(family))
        fields = {row.field: row.to_field(config[row.key], config) for row in rows}
        return fields | self.write(config, family)


def of_family(value: Callable[[Family], object]) -> Callable[[Any, StatedModel], object]:
    """Returns a conversion of no field: the value that all models of a family have."""
    return lambda _, model: value(model.family)


def flag(value: object, _: object) -> bool:
    """Returns a flag, which null sets to false."""
    return bool(value)


def or_zero(value: Any, _: object) -> object:
    """Returns a number, or 0 for null."""
    return value or 0


def or_null(value: Any, _: object) -> object:
    """Returns a number, or null for 0."""
    return value or None
