"""What a form of a part of a decoder states, whichever part it is."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from maxbatch.families.parameter import Axes, ModelKeys, Parameter

# (name of a norm, its axis) -> its parameters, in the form of the family's norms
NormRows: TypeAlias = Callable[..., tuple[Parameter, ...]]


class TinySizes(NamedTuple):
    """Sizes of a tiny model of the form of another one."""

    heads: int
    head_dim: int
    length: int  # tokens of a row
    layers: int  # that have all of their parameters


class Form:
    """A form of a part of a decoder. What most forms lack is empty here."""

    layer = ""  # "module:name" of the class or function that computes it
    # the config keys that only families of this form have
    keys: tuple[str, ...] = ()
    # those among them that state a distance: every n-th layer differs; below 1: none does
    steps: tuple[str, ...] = ()
    # The axes that only its parameters have, by what may split them: the tensor axis; nothing; what
    # splits the width of the stream; nothing, and they are computed in float32; the axes of fsdp and
    # tensor, and of its activations fsdp.
    over_tensor: Axes = ()
    whole: Axes = ()
    summed: Axes = ()
    in_float32: Axes = ()
    looked_up: Axes = ()
    values_beside = 0  # of a token, kept for each layer besides the layer's own
    no_pipeline = ""  # why its layers are in no pipeline, in a refusal

    def axis_sizes(self, model: ModelKeys) -> dict[str, int]:
        """Returns the sizes of the axes that only its parameters have."""
        del model
        return {}

    def check(self, config: ModelKeys) -> None:
        """Raises ConfigError for numbers of its keys that exclude each other."""
        del config

    def small_keys(self, config: ModelKeys, sizes: TinySizes) -> dict[str, Any]:
        """Returns values of its own keys for a tiny model."""
        del config, sizes
        return {}

    def in_cycles(
        self, config: ModelKeys, layers: int, length: int, rule: str, works: dict[str, object]
    ) -> tuple[str, dict[str, object]]:
        """Returns the rule and the keys of a refusal of layers that are no whole cycles, with its
        own keys among them if they must change; without keys nothing is refused.

        Args:
          layers: of the decoder, a multiple of `length`.
          length: the layers of a cycle.
          rule: of the refusal.
          works: keys that must change already.
        """
        del config, layers, length
        return rule, works

    def summed_times(self, config: ModelKeys) -> dict[str, int]:
        """Returns, for keys that state a width, how many times it a product of its own sums over
        at most.
        """
        del config
        return {}

    def layer_class(self) -> Any:
        """Imports the class or the function that computes it."""
        return imported(self.layer)


def imported(place: str) -> Any:
    """Imports an object from its place, "module:name"."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def refusal(config: ModelKeys, rule: str, works: Mapping[str, object]) -> Exception:
    """Returns the refusal of a key's value; `works` holds all keys to change, this one first."""
    (name, nearest), *others = works.items()
    text = " ".join([str(nearest), *(f"{key}={value}" for key, value in others)])
    fault: Exception = config.fault(name, rule, text)
    return fault
