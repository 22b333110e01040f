"""The keys of a config that the plan reads."""

from __future__ import annotations

from maxbatch.config.keys import Section
from maxbatch.config.recipes import Recipe, slots_per_sample
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
    recipe: Recipe

    @property
    def slots_per_sample(self) -> int:
        """Tokens that a sample has room for."""
        return slots_per_sample(self)
