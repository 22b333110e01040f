"""Models in other programs' forms, such as Hugging Face folders: the facts that need no JAX.

A form is an object of `Table.MODEL_FORMS`; `maxbatch.run.weights.foreign` opens what it holds.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from maxbatch.config.combined import DecoderConfig
from maxbatch.system.registry import Table, load, names

ModelPath = str | os.PathLike[str]
# in the identity of prompts, and in what hosts compare
END_TOKENS = "end tokens of load_parameters_path"


class ModelForm:
    """A form of models; by default it states none of the config's keys.

    Attributes:
      phrase: names a model in this form in messages: "a Hugging Face folder".
    """

    phrase = ""

    def holds(self, path: ModelPath) -> bool:
        """Returns whether a path holds a model in this form."""
        raise NotImplementedError

    def keys(self, path: ModelPath) -> Mapping[str, str] | None:
        """Returns the texts of the config keys that a model states; None if the path holds no
        model that states any.

        Raises:
          ConfigError: a family, or a setting of one, that is not supported.
        """
        return None

    def file_of_keys(self, path: ModelPath) -> str:
        """Returns the file that states them, for messages."""
        return str(path)

    def end_tokens(self, path: ModelPath) -> tuple[int, ...]:
        """Returns the ids that end a text; none for a path that holds no such model.

        Raises:
          ConfigError: the file cannot be read, or its value is not ids.
        """
        return ()

    def context_length(self, path: ModelPath) -> int:
        """Returns the stated context length in tokens; 0 if none is.

        Raises:
          ConfigError: the file that states it cannot be read.
        """
        return 0

    def parameter_path(self, names: Sequence[str], decoder_block: str) -> str | None:
        """Returns the path of one of our parameters in the other program, its parts joined by
        slashes; None if it has none.

        Args:
          names: the names that lead to it here, such as layers, attention, query.
          decoder_block: the family of the model.
        """
        return None


def model_forms() -> dict[str, ModelForm]:
    """Returns the forms by name, in the order of their table."""
    forms = {}
    for name in names(Table.MODEL_FORMS):
        form = load(Table.MODEL_FORMS, name)
        assert isinstance(form, ModelForm), f"{name} is a form of models"
        forms[name] = form
    return forms


def is_foreign_model(path: str | Path) -> bool:
    """Returns whether a path holds a model of another program."""
    return any(form.holds(path) for form in model_forms().values())


def end_tokens(path: ModelPath) -> tuple[int, ...]:
    """Returns the ids that end a text of the model at a path; none for a model of ours.

    Models of conversations may end a turn by another token than the tokenizer's end of text.

    Raises:
      ConfigError: the file that states them cannot be read, or its value is not ids.
    """
    return next(
        (ids for form in model_forms().values() if path and (ids := form.end_tokens(path))), ()
    )


def context_length(config: DecoderConfig, path: str) -> int:
    """Returns the context length of a model: a training row's, or more if the model at `path`
    states more.

    Raises:
      ConfigError: the file that states it cannot be read.
    """
    longest = max((form.context_length(path) for form in model_forms().values() if path), default=0)
    if config.trainable_position_size > 0:
        longest = min(longest, config.trainable_position_size)
    return max(config.max_target_length, longest)
