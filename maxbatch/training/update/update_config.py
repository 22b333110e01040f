"""The keys of a config that an update reads."""

from __future__ import annotations

from maxbatch.config.sections import AdapterConfig, MeshConfig, OptimizerConfig
from maxbatch.model.decoder_config import DecoderConfig


class UpdateConfig(DecoderConfig):
    """The decoder's keys, and those of its mesh, its adapters and its optimizer."""

    mesh: MeshConfig
    adapters: AdapterConfig
    optimizer: OptimizerConfig
