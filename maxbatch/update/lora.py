"""The adapters of a config, if it has any; a run without `lora_rank` loads none of their code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from maxbatch.config.sections import AdapterConfig, Quantization

if TYPE_CHECKING:
    from maxbatch.update.adapters import Adapters


def adapters_of(config: AdapterConfig, quantization: Quantization = "") -> Adapters | None:
    """Returns the adapters of a config, for products of a type; None without `lora_rank`."""
    if not config.lora_rank:
        return None
    from maxbatch.update.adapters import ALL, Adapters

    names = [name.strip() for name in config.lora_targets.split(",")]
    targets = frozenset() if names == [ALL] else frozenset(names)
    return Adapters(config.lora_rank, float(config.lora_alpha), targets, bool(quantization))
