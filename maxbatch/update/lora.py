"""The adapters of a config, if it has any; a run without `lora_rank` loads none of their code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from maxbatch.config.sections import AdapterConfig, Quantization
from maxbatch.families.matrices import adapted_names

if TYPE_CHECKING:
    from maxbatch.update.adapters import Adapters


def adapters_of(config: AdapterConfig, quantization: Quantization = "") -> Adapters | None:
    """Returns the adapters of a config, for products of a type; None without `lora_rank`."""
    if not config.lora_rank:
        return None
    from maxbatch.update.adapters import Adapters

    targets, alpha = adapted_names(config), float(config.lora_alpha)
    return Adapters(config.lora_rank, alpha, targets, bool(quantization))
