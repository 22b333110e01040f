"""The keys of a config that the plan knows."""

from __future__ import annotations

import dataclasses

from maxbatch.config.keys import Section
from maxbatch.config.sections import (
    BatchConfig,
    EvaluationConfig,
    LengthConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PromptBatchConfig,
    RampConfig,
    RatesConfig,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanConfig(Section):
    """What fixes the batch, its stages, its rates and the mesh; of the model, the dimensions that axes divide."""

    length: LengthConfig
    batch: BatchConfig
    ramp: RampConfig
    prompts: PromptBatchConfig
    rates: RatesConfig
    optimizer: OptimizerConfig
    model: ModelConfig
    mesh: MeshConfig
    evaluation: EvaluationConfig
