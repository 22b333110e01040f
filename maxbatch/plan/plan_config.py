"""The keys of a config that the plan reads."""

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
    """The keys of the batch, its stages, rates and mesh, and the dimensions of the model that mesh axes divide."""

    length: LengthConfig
    batch: BatchConfig
    ramp: RampConfig
    prompts: PromptBatchConfig
    rates: RatesConfig
    optimizer: OptimizerConfig
    model: ModelConfig
    mesh: MeshConfig
    evaluation: EvaluationConfig
