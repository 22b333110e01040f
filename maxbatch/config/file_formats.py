"""The file formats of datasets, by their facts: which files of a folder they take, and whether
their records have fields. `maxbatch.data.store.formats` reads them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from maxbatch.system.registry import Table, load, names

# of a file's name: the number of a shard, before or after the suffix
SHARD = r"([-._]\d{3,}-of-\d{3,})?"


@dataclass(frozen=True)
class FileFormat:
    """A format of files, a value of `dataset_type`.

    Attributes:
      open: returns its reader (`maxbatch.data.store.formats.Format`) for a `record_format` and the
        field with the text; None: documents are whole records, as JSON. Raises ConfigError if its
        package is not installed.
      names: matches the names of its files in a folder.
      suffixes: the suffixes of these names, for messages.
      has_records: whether its records are objects with fields, so that one may be a question with
        answers.
      has_text_field: whether `text_field` names a record's text; of objects it does.
      has_record_formats: whether `record_format` says what a record is; `text` has no fields.
    """

    open: Callable[[str, str | None], object]
    names: re.Pattern[str]
    suffixes: str
    has_records: bool = False
    has_text_field: bool = False
    has_record_formats: bool = False

    def record_format(self, stated: str) -> str:
        """Returns a stated `record_format`; "" where it has no effect."""
        return stated if self.has_record_formats else ""

    def names_text(self, record_format: str) -> bool:
        """Returns whether `text_field` names the text of such records."""
        is_plain = self.has_record_formats and record_format == "text"
        return (self.has_records or self.has_text_field) and not is_plain


def file_formats() -> tuple[str, ...]:
    """Returns the values of `dataset_type` that are formats of files."""
    return names(Table.FORMATS)


def file_format(dataset_type: str) -> FileFormat:
    """Loads a format of files; Python's library is files of text."""
    form = load(Table.FORMATS, "text" if dataset_type == "python_stdlib" else dataset_type)
    assert isinstance(form, FileFormat), f"{dataset_type} is a format of files"
    return form


def has_records(dataset_type: str) -> bool:
    """Returns whether a value of `dataset_type` is a format whose records are objects with
    fields.
    """
    return dataset_type in file_formats() and file_format(dataset_type).has_records


def record_types() -> tuple[str, ...]:
    """Returns the formats whose records are objects with fields, for messages: it loads all."""
    return tuple(filter(has_records, file_formats()))
