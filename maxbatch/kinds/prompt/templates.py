"""`prompt_template`: a prompt's text from a record's fields, by the rules of `str.format`."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from maxbatch.config.values import nearest_name, shown
from maxbatch.system.errors import ConfigError


class _NotText(Exception):
    """A value of a record that would be written as Python writes it; the message is the reason."""


class _Texts(string.Formatter):
    """The rules of `str.format`, but null, lists, objects and truth values are no texts."""

    def get_field(
        self, field_name: str, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> tuple[object, object]:
        value, name = super().get_field(field_name, args, kwargs)
        return _Value(value, field_name), name

    def convert_field(self, value: object, conversion: str | None) -> object:
        assert isinstance(value, _Value)
        plain = value.value
        if conversion is None and (plain is None or isinstance(plain, bool | list | dict)):
            kind = "null" if plain is None else f"a {type(plain).__name__}, not a text"
            raise _NotText(f"field {value.name!r} is {kind}")
        return super().convert_field(plain, conversion)


class _Value(NamedTuple):
    """A value of a record, and its name in the template."""

    value: object
    name: str


class Template:
    """A text with fields in braces, such as "Q: {question}\\nA:".

    Literal braces are doubled. `{messages[0][content]}` reaches into lists and objects. An invalid
    template, or one without a field, raises ConfigError.
    """

    def __init__(self, text: str):
        self.text = text
        try:
            names = [name for _, name, _, _ in string.Formatter().parse(text) if name is not None]
        except ValueError as error:
            doubled = re.sub(r"[{}]", lambda brace: brace[0] * 2, text)
            twice = f"a brace that is text is written twice: {shown(repr(doubled))}"
            raise self._error(f"not a template ({error}); {twice}") from None
        # The field of a template such as "{messages}"; its value may be a conversation.
        self.only_field = text[1:-1] if names == [text[1:-1]] and text == f"{{{names[0]}}}" else ""
        self._fields = [re.split(r"[.\[]", name, maxsplit=1)[0] for name in names]
        if not names:
            problem = "has no field, so that all prompts would be the same"
            raise self._error(f'{problem}; works: prompt_template="{{prompt}}"')
        if "" in self._fields or any(name.isdigit() for name in self._fields):
            raise self._error('fields go by their names; works: prompt_template="{prompt}"')

    def fill(self, record: Mapping[str, object], place: str) -> str:
        """Fills the template from a record; `place` names the record in messages.

        A number is written only beside other text, or by a format of the template's own (`{x:.2f}`,
        `{x!r}`).

        Raises:
          ConfigError: a field is missing, null, or no text, all fields are empty, or a value does
            not fit its format.
        """
        for name in self._fields:
            if name not in record:
                known = shown(", ".join(map(repr, record)), 200) or "none"
                nearest = nearest_name(name, record)
                works = f"; nearest: {{{nearest}}}" if nearest else ""
                raise self._error(
                    f"{place} has no field {shown(repr(name))}; its fields: {known}{works}"
                )
            if record[name] is None:
                raise self._error(f"{place}: field {name!r} is null")
        if self.only_field and not isinstance(record.get(self.only_field, ""), str):
            kind = type(record[self.only_field]).__name__
            raise self._error(f"{place}: field {self.only_field!r} is a {kind}, not a text")
        if all(record[name] == "" for name in self._fields):
            raise self._error(f"{place}: field {self._fields[0]!r} is empty")
        try:
            return _Texts().vformat(self.text, (), record)
        except _NotText as error:
            raise self._error(f"{place}: {error}") from None
        except (LookupError, AttributeError, ValueError, TypeError) as error:
            raise self._error(
                f"cannot be filled by {place} ({type(error).__name__}: {error})"
            ) from None

    def _error(self, problem: str) -> ConfigError:
        return ConfigError(f"prompt_template={shown(repr(self.text))}: {problem}")
