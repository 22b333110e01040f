"""The keys of a config that an update reads."""

from __future__ import annotations

import dataclasses

from maxbatch.config.sections import AdapterConfig, MeshConfig, OptimizerConfig
from maxbatch.model.decoder_config import DecoderConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateConfig(DecoderConfig):
    """The decoder's keys, and those of its mesh, its adapters and its optimizer."""

    mesh: MeshConfig
    adapters: AdapterConfig
    optimizer: OptimizerConfig
