"""Chat templates: conversations as text, by the Jinja template that a tokenizer brings along, and who wrote which part.

The template is that of `chat_template.jinja` or `tokenizer_config.json` beside the tokenizer, rendered in Jinja's
sandbox with the settings and functions that Hugging Face transformers gives it. `strftime_now` answers one fixed date,
since a stream of samples must not change from day to day.

A template may mark what the assistant says itself, by `{% generation %} ... {% endgeneration %}`. Else the assistant's
part of a turn begins where the prompt for it ends (the conversation so far, with the generation prompt), and ends with
the turn, without the white space that follows its end-of-turn token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, NamedTuple

from maxbatch.config.values import shown
from maxbatch.system.errors import ConfigError
from maxbatch.system.storage import AnyPath

# Noncharacters of Unicode, which no text holds: around what a template marks as the assistant's.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
# The date that Llama's templates take where no other is given.
_TODAY = datetime(2024, 7, 26)
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

Message = Mapping[str, Any]
Span = tuple[int, int]


class ConversationError(ValueError):
    """A conversation that cannot be used; the message is the reason."""


class Rendered(NamedTuple):
    """A conversation as text, and the parts of it that the assistant says, as begin and end in characters."""

    text: str
    spans: list[Span]


@dataclass(frozen=True)
class ChatTemplate:
    """The template of a tokenizer.

    Attributes:
      sources: Jinja sources by name; `default`, and perhaps `tool_use` for conversations with tools.
      variables: texts of the special tokens, which templates use by name (`bos_token`).
      ends: texts of the special tokens, one of which may end a turn.
    """

    sources: Mapping[str, str]
    variables: Mapping[str, Any]
    ends: tuple[str, ...]

    @property
    def identity(self) -> str:
        """What fixes the text of every conversation."""
        return json.dumps([dict(self.sources), dict(self.variables), sorted(self.ends)], sort_keys=True)

    def render(self, messages: Sequence[Message], extras: Mapping[str, Any], first: int = 0) -> Rendered:
        """Returns the text of a conversation, and the spans of the assistant's messages from message `first` on.

        Args:
          messages: each has a `role`; the rest is up to the template.
          extras: further variables of the template, such as `tools`.
          first: messages before this one belong to the prompt, whoever wrote them.

        Raises:
          ConversationError: the template refuses the conversation, or does not tell the assistant's parts from others.
        """
        source = self.sources.get("tool_use") if extras.get("tools") else None
        source = source or self.sources.get("default", "")
        text = self._text(source, messages, extras)
        if _OPEN in text:
            text, spans = _marked(text)
            begin = len(_marked(self._text(source, messages[:first], extras))[0]) if first else 0
            return Rendered(text, [span for span in spans if span[0] >= begin])
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= first]
        return Rendered(text, [self._turn(source, text, messages, extras, turn) for turn in turns])

    def _turn(self, source: str, text: str, messages: Sequence[Message], extras: Mapping[str, Any], turn: int) -> Span:
        """Returns the span of the assistant's message number `turn`."""
        prompt = self._text(source, messages[:turn], extras, add_generation_prompt=True)
        so_far = self._text(source, messages[: turn + 1], extras)
        end_token = next((token for token in self.ends if token and so_far.rstrip().endswith(token)), None)
        if not text.startswith(prompt):
            raise ConversationError(
                f"the chat template writes message {turn + 1} otherwise than after the prompt for it, so that its "
                "trained tokens cannot be told from the others; {% generation %} in the template marks them"
            )
        begin = len(prompt)
        if text.startswith(so_far):
            return begin, max(begin, len(so_far.rstrip()) if end_token else len(so_far))
        # Templates may shorten earlier turns, as by what the assistant thought; their end is the end of turn.
        end = text.find(end_token, begin) if end_token else -1
        if end < 0:
            raise ConversationError(
                f"the chat template writes message {turn + 1} otherwise once others follow it, and ends it with no "
                "special token, so that its trained tokens cannot be told from the others; {% generation %} in the "
                "template marks them"
            )
        return begin, end + len(end_token or "")

    def _text(
        self, source: str, messages: Sequence[Message], extras: Mapping[str, Any], add_generation_prompt: bool = False
    ) -> str:
        variables = {
            "tools": None, "documents": None, **self.variables, **extras,
            "messages": messages, "add_generation_prompt": add_generation_prompt,
        }  # fmt: skip
        try:
            return self._compiled(source).render(**variables)
        except ConversationError:
            raise
        except Exception as error:  # a template is a program, and its faults are of any kind
            raise ConversationError(f"the chat template refuses it ({' '.join(str(error).split())})") from error

    def _compiled(self, source: str) -> Any:
        if source not in self._programs:
            self._programs[source] = _environment().from_string(source)
        return self._programs[source]

    @cached_property
    def _programs(self) -> dict[str, Any]:
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("sources", "variables", "ends")}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)


def read_template(folder: AnyPath, ends: Sequence[str], error: Callable[[str], ConfigError]) -> ChatTemplate:
    """Returns the chat template beside a tokenizer.

    Args:
      folder: holds `chat_template.jinja` (which goes first) or `tokenizer_config.json`.
      ends: texts of the tokenizer's special tokens.
      error: makes the error that blames the tokenizer for a problem.
    """
    settings = _read_json(folder / "special_tokens_map.json", error) | _read_json(
        folder / "tokenizer_config.json", error
    )
    file = folder / "chat_template.jinja"
    try:
        found = file.read_text("utf-8") if file.is_file() else settings.get("chat_template")
    except (OSError, UnicodeDecodeError) as problem:
        raise error(f"cannot read {file}: {problem}") from problem
    if isinstance(found, list):
        found = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
    sources = {"default": found} if isinstance(found, str) else found
    if not isinstance(sources, dict) or not all(isinstance(source, str) for source in sources.values()):
        raise error(
            "has no chat template, which records with messages need (chat_template.jinja, or tokenizer_config.json, "
            "beside it); records with prompt and completion need none"
        )
    if "default" not in sources:
        raise error(f"has no chat template named default, only {shown(', '.join(map(str, sources)))}")
    variables: dict[str, Any] = {name: text for name in _TOKENS if (text := _text_of(settings.get(name))) is not None}
    more = settings.get("additional_special_tokens")
    if isinstance(more, list):
        variables["additional_special_tokens"] = [text for one in more if (text := _text_of(one)) is not None]
    template = ChatTemplate(sources, variables, tuple(sorted({*ends} - {""}, key=lambda end: (-len(end), end))))
    for source in sources.values():
        try:
            template._compiled(source)
        except ImportError as problem:
            raise ConfigError(
                "use_sft=true: chat templates need jinja2, which is not installed; pip install 'maxbatch[text]'"
            ) from problem
        except Exception as problem:  # jinja2's errors of syntax
            raise error(f"its chat template cannot be read ({' '.join(str(problem).split())})") from problem
    return template


def _read_json(file: AnyPath, error: Callable[[str], ConfigError]) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        settings = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as problem:
        raise error(f"{file} is not JSON ({problem})") from problem
    if not isinstance(settings, dict):
        raise error(f"{file} must be a JSON object, and it is a {type(settings).__name__}")
    return settings


def _text_of(token: Any) -> str | None:
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _marked(text: str) -> tuple[str, list[Span]]:
    """Returns a text without its marks, and the spans that were marked."""
    parts, spans, length, begin = [], [], 0, 0
    for part in text.replace(_CLOSE, _OPEN + _CLOSE).split(_OPEN):
        closes = part.startswith(_CLOSE)
        if closes:
            spans.append((begin, length))
        part = part.removeprefix(_CLOSE)
        if not closes:
            begin = length
        parts.append(part)
        length += len(part)
    return "".join(parts), spans


def _environment() -> Any:
    """Returns Jinja's sandbox with what transformers gives to chat templates."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %} ... {% endgeneration %}`, whose text comes out between two marks."""

        tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Callable[[], str]) -> str:
            return f"{_OPEN}{caller()}{_CLOSE}"

    def raise_exception(message: str) -> None:
        raise ConversationError(f"the chat template refuses it ({message})")

    def to_json(value: Any, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = _TODAY.strftime
    return environment
