"""The config keys that a decoder reads."""

from __future__ import annotations

from maxbatch.config.sections import ModelConfig, RematConfig


class DecoderConfig(ModelConfig):
    """The model's keys, the longest row, and the rematerialisation."""

    max_target_length: int
    remat: RematConfig
