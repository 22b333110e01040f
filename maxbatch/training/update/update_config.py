"""The config keys of an update."""

from __future__ import annotations

from maxbatch.config.sections import AdapterConfig, MeshConfig, OptimizerConfig
from maxbatch.model.decoder_config import DecoderConfig


class UpdateConfig(DecoderConfig):
    """Keys of the decoder, mesh, adapters and optimizer."""

    mesh: MeshConfig
    adapters: AdapterConfig
    optimizer: OptimizerConfig
