"""Messages of a record: a list of objects with `role` and `content`, and what a chat template sees
beside them.
"""

from __future__ import annotations

from collections.abc import Mapping

from maxbatch.config.values import shown
from maxbatch.data.tokenizers.errors import RecordError
from maxbatch.system.storage.bounded import RefusedContent, read_json

# of ShareGPT; others keep their names
_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}
# Roles whose messages may be empty: no instructions, and a tool that returned nothing.
_MAY_BE_EMPTY = ("system", "developer", "tool", "function", "ipython")
# fields of an assistant's message that may have no content
_CALLS = ("tool_calls", "function_call")


def messages_of(value: object, field: str) -> list[dict[str, object]]:
    """Returns the messages of a field, without the empty fields that tables have; raises
    RecordError.
    """
    if not isinstance(value, list) or not value:
        raise RecordError(f"field {field} is {kind_of_value(value)}, not a list of messages")
    return [
        _message(message, f"message {number} of field {field}")
        for number, message in enumerate(value, 1)
    ]


def _message(message: object, where: str) -> dict[str, object]:
    """Returns a message with `role` and `content`, which ShareGPT calls `from` and `value`."""
    if not isinstance(message, dict):
        raise RecordError(f"{where} is not an object")
    kept = {
        key: value
        for key, value in message.items()
        if value is not None or key in ("role", "content")
    }
    if "role" not in kept and "from" in kept:
        role = kept.pop("from")
        kept["role"] = _ROLES.get(role, role) if isinstance(role, str) else role
        kept["content"] = kept.pop("value", None)
    role = kept.get("role")
    if not isinstance(role, str):
        raise RecordError(f"{where} is not an object with a role, which is a text")
    kept["content"] = _content(kept, role, where)
    return kept


def _content(message: Mapping[str, object], role: str, where: str) -> str | None:
    """Returns the text of a message; None only beside calls of tools. Parts of text are joined."""
    content = message.get("content")
    if isinstance(content, list) and content:
        content = "".join(_part_text(part, where) for part in content)
    has_calls = role == "assistant" and any(message.get(name) for name in _CALLS)
    if has_calls and not content:
        return None
    if not isinstance(content, str):
        raise RecordError(f"{where}: content is {kind_of_value(content)}, not a text")
    if not content.strip() and role not in _MAY_BE_EMPTY:
        raise RecordError(f"{where}: content is empty")
    return content


def _part_text(part: object, where: str) -> str:
    """Returns the text of a part of a content, as OpenAI's messages have; raises RecordError
    for other parts.
    """
    if not isinstance(part, dict):
        raise RecordError(
            f"{where}: a part of content is {kind_of_value(part)}, not an object of type text"
        )
    if part.get("type") != "text":
        kind = shown(repr(part.get("type")))
        raise RecordError(
            f"{where}: content has a part of type {kind}, and only parts of text can be trained on"
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise RecordError(
            f"{where}: the text of a part of content is {kind_of_value(text)}, not a text"
        )
    return text


def extras_of(record: Mapping[str, object]) -> dict[str, object]:
    """Returns the fields of a record that a chat template sees besides the messages."""
    tools, more = record.get("tools"), record.get("chat_template_kwargs")
    if isinstance(tools, str):
        try:
            tools = read_json(tools, "field tools, a text,")
        except RefusedContent as error:
            raise RecordError(str(error)) from error
    if tools is not None and not isinstance(tools, list):
        raise RecordError(f"field tools is {kind_of_value(tools)}, not a list")
    if more is not None and not isinstance(more, dict):
        raise RecordError(f"field chat_template_kwargs is {kind_of_value(more)}, not an object")
    return {**(more or {}), "tools": tools or None}


def kind_of_value(value: object) -> str:
    """Names a value that is no text, for messages: `null`, `empty`, `a list`."""
    if value is None:
        return "null"
    return f"a {type(value).__name__}" if value or not isinstance(value, list) else "empty"
