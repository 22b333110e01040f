"""The config keys that a decoder reads."""

from __future__ import annotations

import dataclasses

from maxbatch.config.sections import ModelConfig, RematConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """The model's keys, the longest row, and the rematerialisation."""

    max_target_length: int
    remat: RematConfig
