"""The process that renders chat templates, which are untrusted programs: Jinja's sandbox with
transformers' settings.

`strftime_now` returns a fixed date, since a stream of samples must not change daily.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from maxbatch.data.tokenizers.errors import RecordError

if TYPE_CHECKING:
    from jinja2 import Template, nodes
    from jinja2.parser import Parser

# The default date of Llama's templates.
_TODAY = datetime(2024, 7, 26)
MOST_CHARACTERS = 32 << 20  # of a conversation as text

Message = Mapping[str, object]
Span = tuple[int, int]


class Rendered(NamedTuple):
    """A conversation as text, with the spans of its trained parts, begin and end in characters."""

    text: str
    spans: list[Span]


class Conversation(NamedTuple):
    """A conversation to render.

    Attributes:
      messages: each has a `role`; the rest is up to the template.
      extras: further variables of the template, such as `tools`.
      first: earlier messages belong to the prompt, in any role.
      untrained: numbers, from 0, of messages without trained parts.
      prompts: add the generation prompt after the last message, and return no spans.
    """

    messages: Sequence[Message]
    extras: Mapping[str, object]
    first: int = 0
    untrained: frozenset[int] = frozenset()
    prompts: bool = False


class NoContent(str):
    """The content of a message that only calls tools: null to a template's tests, nothing in a
    template's text.
    """

    __slots__ = ()


class Renderer:
    """A tokenizer's templates, from `ChatTemplate`, in the rendering process."""

    def __init__(
        self, sources: Mapping[str, str], variables: Mapping[str, object], ends: Sequence[str]
    ) -> None:
        self._sources, self._variables, self._ends = sources, variables, ends
        self._programs: dict[str, Template] = {}

    def __call__(self, conversation: Conversation) -> Rendered:
        """Returns the text of a conversation, and the spans of the assistant's messages.

        Raises:
          RecordError: the template refuses the conversation, or the assistant's parts cannot
            be found in it.
        """
        messages, extras, first, untrained, prompts = conversation
        messages = [_with_text(message) for message in messages]
        conversation = conversation._replace(messages=messages)
        source = self._sources.get("tool_use") if extras.get("tools") else None
        source = source or self._sources.get("default", "")
        text, spans = self._text(source, messages, extras, add_generation_prompt=prompts)
        if prompts:
            return Rendered(text, [])
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if spans is not None:
            if untrained.intersection(turns):
                if len(spans) != len(turns):
                    raise RecordError(
                        f"the chat template marks {len(spans)} parts of {len(turns)} messages of "
                        "the assistant, so that the weight of a message cannot be followed"
                    )
                spans = [
                    span for turn, span in zip(turns, spans, strict=True) if turn not in untrained
                ]
            begin = len(self._text(source, messages[:first], extras).text) if first else 0
            return Rendered(text, [span for span in spans if span[0] >= begin])
        trained = [turn for turn in turns if turn >= first and turn not in untrained]
        return Rendered(text, [self._turn(source, text, conversation, turn) for turn in trained])

    def _turn(self, source: str, text: str, conversation: Conversation, turn: int) -> Span:
        """Returns the span of the assistant's message number `turn`."""
        messages, extras = conversation.messages, conversation.extras
        prompt = self._text(source, messages[:turn], extras, add_generation_prompt=True).text
        so_far = self._text(source, messages[: turn + 1], extras).text
        end_token = next(
            (token for token in self._ends if token and so_far.rstrip().endswith(token)), None
        )
        if not text.startswith(prompt):
            raise RecordError(
                f"the chat template writes message {turn + 1} differently than after the prompt "
                "for it, so its trained tokens cannot be identified; {% generation %} in the "
                "template marks them"
            )
        begin = len(prompt)
        if text.startswith(so_far):
            return begin, max(begin, len(so_far.rstrip()) if end_token else len(so_far))
        # Templates may shorten earlier turns, for example by the assistant's reasoning; their end
        # is the end of turn.
        if end_token and end_token in json.dumps(messages[turn], ensure_ascii=False):
            raise RecordError(
                f"message {turn + 1} writes {end_token} itself, and the chat template shortens it "
                "once others follow, so that the end of its trained tokens cannot be found; {% "
                "generation %} in the template marks them"
            )
        end = text.find(end_token, begin) if end_token else -1
        if end < 0:
            raise RecordError(
                f"the chat template writes message {turn + 1} differently once others follow it, "
                "and ends it with no special token, so its trained tokens cannot be identified; "
                "{% generation %} in the template marks them"
            )
        return begin, end + len(end_token or "")

    def _text(
        self,
        source: str,
        messages: Sequence[Message],
        extras: Mapping[str, object],
        add_generation_prompt: bool = False,
    ) -> _Marked:
        variables = {
            "tools": None,
            "documents": None,
            **self._variables,
            **extras,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        marks = self._environment.marks = _Marks()
        try:
            text = self._compiled(source).render(**variables)
        except (RecordError, MemoryError):
            raise
        except Exception as error:  # a template is a program and may raise anything
            raise RecordError(
                f"the chat template refuses it ({' '.join(str(error).split())[:400]})"
            ) from None
        if len(text) > MOST_CHARACTERS:
            raise RecordError(
                f"the chat template makes more than {MOST_CHARACTERS:,} characters of it"
            )
        return marks.removed_from(text)

    def _compiled(self, source: str) -> Template:
        if source not in self._programs:
            self._programs[source] = self._environment.from_string(source)
        return self._programs[source]

    @cached_property
    def _environment(self) -> Any:
        return environment()


def _with_text(message: Message) -> Message:
    """Returns a message whose content, if it is null, is never written as the text "None"."""
    is_null = "content" in message and message["content"] is None
    return {**message, "content": NoContent()} if is_null else message


class _Marked(NamedTuple):
    """A text without marks, and its marked spans; None if the template marks nothing."""

    text: str
    spans: list[Span] | None


class _Marks:
    """Marks around generated parts, random per rendering, so that no text contains them."""

    def __init__(self) -> None:
        self._name = f"maxbatch-{secrets.token_hex(16)}"
        self._is_used = False

    def around(self, text: str) -> str:
        """Returns a text between two marks."""
        self._is_used = True
        return f"<{self._name}>{text}</{self._name}>"

    def removed_from(self, text: str) -> _Marked:
        """Removes the marks from a rendered text; raises RecordError for unpaired marks."""
        if not self._is_used:
            return _Marked(text, None)
        texts, spans, length, begin = [], [], 0, None
        for part in re.split(f"(</?{self._name}>)", text):
            opens, closes = part == f"<{self._name}>", part == f"</{self._name}>"
            if self._name not in part:
                texts.append(part)
                length += len(part)
            elif opens and begin is None:
                begin = length
            elif closes and begin is not None:
                spans.append((begin, length))
                begin = None
            else:
                raise RecordError(
                    "the chat template nests or changes the content of its {% generation %}"
                )
        if begin is not None:
            raise RecordError("the chat template cuts off the content of its {% generation %}")
        return _Marked("".join(texts), spans)


def check_syntax(source: str) -> None:
    """Parses a template without running it.

    Raises:
      ImportError: jinja2 is not installed.
      Exception: it is not a Jinja template.
    """
    environment().parse(source)


def environment() -> Any:
    """Returns Jinja's sandbox with transformers' functions for chat templates."""
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """The tag `{% generation %} ... {% endgeneration %}`, which puts marks around its text."""

        tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Callable[[], str]) -> str:
            return str(self.environment.marks.around(caller()))  # type: ignore[attr-defined]

    class PlainNamespace(Namespace):
        """A namespace without names with a leading underscore."""

        def __setitem__(self, name: str, value: object) -> None:
            if str(name).startswith("_"):
                raise SecurityError(f"a namespace cannot hold {name!r}")
            super().__setitem__(name, value)

    def namespace(*arguments: object, **values: object) -> PlainNamespace:
        made = PlainNamespace()
        for name, value in dict(*arguments, **values).items():
            made[name] = value
        return made

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = _to_json
    made.tests["none"] = lambda value: value is None or isinstance(value, NoContent)
    made.tests["string"] = lambda value: isinstance(value, str) and not isinstance(value, NoContent)
    made.globals |= {
        "raise_exception": _refuse,
        "strftime_now": _TODAY.strftime,
        "namespace": namespace,
    }
    made.globals["dict"] = lambda *arguments, **values: dict(*arguments, **values)
    return made


def _refuse(message: str) -> None:
    raise RecordError(f"the chat template refuses it ({str(message)[:400]})")


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
