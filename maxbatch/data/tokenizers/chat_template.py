"""Chat templates: conversations as text by a tokenizer's Jinja template, with the author of each
part.

The template is in `chat_template.jinja` or `tokenizer_config.json` beside the tokenizer. It is an
untrusted program and runs in its own process, with bounds on time and memory per conversation.

A template may mark the assistant's parts itself, by `{% generation %} ... {% endgeneration %}`.
Else the assistant's part of a turn begins where the prompt for it ends (the conversation so far,
with the generation prompt), and ends with the turn, without the white space that follows its
end-of-turn token. Special tokens spelled out in a message become those tokens, as in transformers;
they do not affect other messages' loss weights.
"""

from __future__ import annotations

import functools
import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import cached_property

from maxbatch.config.values import shown, shown_path
from maxbatch.data.tokenizers.chat_rendering import (
    Conversation,
    Message,
    Rendered,
    Renderer,
    check_syntax,
)
from maxbatch.data.tokenizers.errors import RecordError
from maxbatch.system.errors import ConfigError, reading
from maxbatch.system.processes.worker_pool import TimedOut, WorkerEnded, WorkerPool
from maxbatch.system.storage.bounded import RefusedContent, read_json, read_text
from maxbatch.system.storage.storage import AnyPath

_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_LIMIT_S = 5.0  # per conversation, which usually takes milliseconds
_MEMORY_BYTES = 512 << 20  # of the rendering process
_MOST_SOURCE_BYTES = 1 << 20  # of a template


@dataclass(frozen=True)
class ChatTemplate:
    """The template of a tokenizer.

    Attributes:
      sources: Jinja sources by name; `default`, and perhaps `tool_use` for conversations with
        tools.
      variables: texts of the special tokens by the names in templates (`bos_token`).
      ends: texts of special tokens that may end a turn.
    """

    sources: Mapping[str, str]
    variables: Mapping[str, object]
    ends: tuple[str, ...]

    @property
    def identity(self) -> str:
        """The values that determine the text of every conversation."""
        return json.dumps(
            [dict(self.sources), dict(self.variables), sorted(self.ends)], sort_keys=True
        )

    def refuse_unknown_roles(self, messages: Sequence[Message]) -> None:
        """Raises RecordError for a role that the template does not know.

        Many templates write any role as it is. So a role beside those that all chats have is known
        if the template names it, in quotes.
        """
        for number, message in enumerate(messages, 1):
            role = str(message["role"])
            if role not in self._known and not self._names(role):
                raise RecordError(
                    f"message {number} has the role {shown(repr(role))}, which the chat template "
                    "does not know"
                )
            self._known.add(role)

    @cached_property
    def _known(self) -> set[str]:
        return {"system", "user", "assistant", "tool"}

    def _names(self, role: str) -> bool:
        return any(
            f"{quote}{role}{quote}" in source for source in self.sources.values() for quote in "'\""
        )

    def render(self, questions: Sequence[Conversation]) -> list[Rendered | RecordError]:
        """Renders each conversation to text and the spans of the assistant's messages, or an error.

        Raises:
          ConfigError: the template exceeds the bounds of a conversation.
        """
        return [_answer(future) for future in self._pool.submit(questions)]

    @cached_property
    def _pool(self) -> WorkerPool[Conversation, Rendered]:
        setup = functools.partial(Renderer, dict(self.sources), dict(self.variables), self.ends)
        pool = WorkerPool(setup, 1, limit_s=_LIMIT_S, memory_bytes=_MEMORY_BYTES)
        weakref.finalize(self, pool.close)
        return pool

    def __getstate__(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in ("sources", "variables", "ends")}

    def __setstate__(self, state: Mapping[str, object]) -> None:
        self.__dict__.update(state)


def _answer(future: Future[Rendered]) -> Rendered | RecordError:
    try:
        return future.result()
    except RecordError as refused:
        return refused
    except MemoryError:
        problem = f"takes more than {_MEMORY_BYTES >> 20} MB of memory for one conversation"
    except TimedOut:
        problem = f"takes more than {_LIMIT_S:g} s for one conversation"
    except (WorkerEnded, CancelledError) as end:
        problem = f"cannot be run ({end})"
    raise ConfigError(f"tokenizer_path: the chat template {problem}")


def read_template(
    folder: AnyPath, ends: Sequence[str], error: Callable[[str], ConfigError]
) -> ChatTemplate:
    """Returns the chat template beside a tokenizer.

    Args:
      folder: has `chat_template.jinja` (preferred) or `tokenizer_config.json`.
      ends: texts of the tokenizer's special tokens.
      error: makes the error that blames the tokenizer for a problem.
    """
    settings = read_settings(folder / "special_tokens_map.json", error)
    settings |= read_settings(folder / "tokenizer_config.json", error)
    file = folder / "chat_template.jinja"
    with reading(shown_path(file), blame=error):
        file_text = (
            read_text(file, shown_path(file), _MOST_SOURCE_BYTES) if file.is_file() else None
        )
    sources = _sources(settings.get("chat_template") if file_text is None else file_text)
    if sources is None:
        raise error(
            "has no chat template, which messages need (chat_template.jinja, or "
            "tokenizer_config.json, beside it); plain prompts, and records with prompt and "
            "completion, need none"
        )
    if "default" not in sources:
        raise error(
            f"has no chat template named default, only {shown(', '.join(map(str, sources)))}"
        )
    variables: dict[str, object] = {
        name: text for name in _TOKENS if (text := _text_of(settings.get(name))) is not None
    }
    more = settings.get("additional_special_tokens")
    if isinstance(more, list):
        variables["additional_special_tokens"] = [
            text for token in more if (text := _text_of(token)) is not None
        ]
    template = ChatTemplate(
        sources, variables, tuple(sorted({*ends} - {""}, key=lambda end: (-len(end), end)))
    )
    if sum(map(len, sources.values())) > _MOST_SOURCE_BYTES:
        raise error(
            f"its chat template is larger than {_MOST_SOURCE_BYTES >> 20} MB, the most that is read"
        )
    for source in sources.values():
        try:
            check_syntax(source)
        except ImportError as problem:
            raise ConfigError(
                "chat templates need jinja2, which is not installed; pip install 'maxbatch[text]'"
            ) from problem
        except Exception as problem:  # jinja2's errors of syntax
            raise error(
                f"its chat template cannot be read ({' '.join(str(problem).split())[:400]})"
            ) from problem
    return template


def _sources(value: object) -> dict[str, str] | None:
    """Returns templates by name from a text, an object or a list; None for anything else."""
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        pairs = [
            (entry.get("name"), entry.get("template")) for entry in value if isinstance(entry, dict)
        ]
    else:
        pairs = list(value.items()) if isinstance(value, dict) else []
    texts = {
        name: source for name, source in pairs if isinstance(name, str) and isinstance(source, str)
    }
    return texts if pairs and len(texts) == len(pairs) else None


def read_settings(file: AnyPath, error: Callable[[str], ConfigError]) -> dict[str, object]:
    """Returns the JSON object of a file beside a tokenizer, which may be missing; `error` blames
    the tokenizer.
    """
    if not file.is_file():
        return {}
    try:
        with reading(shown_path(file), blame=error):
            settings = read_json(file, shown_path(file))
    except RefusedContent as problem:
        raise error(str(problem)) from problem
    if not isinstance(settings, dict):
        raise error(
            f"{shown_path(file)} must be a JSON object, and it is a {type(settings).__name__}"
        )
    return settings


def _text_of(token: object) -> str | None:
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None
