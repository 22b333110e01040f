"""The user's reward functions, inside worker processes."""

from __future__ import annotations

import contextlib
import copy
import inspect
import resource
from collections.abc import Callable, Mapping
from typing import NamedTuple

from maxbatch.config.user_function import import_function, source_hash
from maxbatch.system.errors import one_line

_LONGEST_PROBLEM = 400

RewardFunction = Callable[[str, str, dict[str, object]], object]


class ResponseToScore(NamedTuple):
    """A response for reward functions: texts without special tokens, the record's fields."""

    prompt: str
    response: str
    record: dict[str, object]


class RewardChanged(ImportError):
    """A function whose source is no longer that of the start; the message is one line."""


class RewardError(Exception):
    """A function's failure on a response; the message is one line."""


def scorer(sources: Mapping[str, str]) -> Callable[[ResponseToScore], tuple[float, ...]]:
    """Returns a scorer by the functions of `sources`.

    Args:
      sources: of each function ("module:function", "path/FILE.py:function") the hash of its source
        at the start, which a worker that replaces another one must find again.

    Raises:
      RewardChanged: a source has another hash.
      ImportError: a function cannot be imported; the message gives the reason in one line.
    """
    functions = [_import_function(spec) for spec in sources]
    # after the import, so that what was imported is what was hashed
    for spec, source in sources.items():
        if source_hash(spec) != source:
            raise RewardChanged(
                f"{spec.rpartition(':')[0]} has changed since this start, and all responses must "
                "be scored by one source; put the former one back, or start again"
            )
    return lambda question: tuple(_score(function, question) for function in functions)


def _score(function: RewardFunction, question: ResponseToScore) -> float:
    """Returns a function's number, finite or not; raises RewardError if it raised, even SystemExit,
    or has none.
    """
    name = getattr(function, "__name__", type(function).__name__)
    try:
        value = function(question.prompt, question.response, copy.deepcopy(question.record))
        if hasattr(value, "__float__"):
            return float(value)
        problem = f"{name} returned {value!r:.80}, which is no number"
    except MemoryError:
        most = resource.getrlimit(resource.RLIMIT_DATA)[0] / 1e9
        problem = f"{name} raised MemoryError: a reward worker may use {most:.3g} GB of memory"
    except BaseException as error:
        problem = f"{name} raised {type(error).__name__}: {error}"
    raise RewardError(one_line(problem, _LONGEST_PROBLEM))


def _import_function(spec: str) -> RewardFunction:
    try:
        function: RewardFunction = import_function(spec)
    except ImportError as error:
        raise ImportError(one_line(error, _LONGEST_PROBLEM)) from error
    with contextlib.suppress(ValueError):  # functions in C may lack a signature
        try:
            inspect.signature(function).bind("prompt", "response", {})
        except TypeError as error:
            raise ImportError(
                f"{spec.rpartition(':')[2]} must take (prompt, response, record) ({error})"
            ) from error
    return function
