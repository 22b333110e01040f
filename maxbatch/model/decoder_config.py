"""The keys of a config that a decoder knows."""

from __future__ import annotations

from maxbatch.config.sections import ModelConfig, RematConfig


class DecoderConfig(ModelConfig):
    """The model's keys, the longest row, and what the backward pass computes again."""

    max_target_length: int
    remat: RematConfig
