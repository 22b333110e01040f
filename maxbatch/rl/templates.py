"""`prompt_template`: a prompt's text from a record's fields, by the rules of `str.format`."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping

from maxbatch.config.values import nearest_name, shown
from maxbatch.system.errors import ConfigError


class Template:
    """A text with fields in braces, such as "Q: {question}\\nA:".

    Literal braces are doubled. `{messages[0][content]}` reaches into lists and objects. An invalid template, or one
    without a field, raises ConfigError.
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

        Raises:
          ConfigError: a field is missing or null, or its value does not fit its format.
        """
        for name in self._fields:
            if name not in record:
                known = shown(", ".join(map(repr, record)), 200) or "none"
                nearest = nearest_name(name, record)
                works = f"; nearest: {{{nearest}}}" if nearest else ""
                raise self._error(f"{place} has no field {shown(repr(name))}; its fields: {known}{works}")
            if record[name] is None:
                raise self._error(f"{place}: field {name!r} is null")
        try:
            return self.text.format_map(record)
        except (LookupError, AttributeError, ValueError, TypeError) as error:
            raise self._error(f"cannot be filled by {place} ({type(error).__name__}: {error})") from None

    def _error(self, problem: str) -> ConfigError:
        return ConfigError(f"prompt_template={shown(repr(self.text))}: {problem}")
