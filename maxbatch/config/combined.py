"""The sections that rooms take: keys of several sections of the table, each combination for one
computation.
"""

from __future__ import annotations

from fractions import Fraction

from maxbatch.config.keys import Section
from maxbatch.config.recipes import Recipe, slots_per_sample
from maxbatch.config.sections import (
    AdapterConfig,
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    LengthConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PreferenceConfig,
    PromptBatchConfig,
    RampConfig,
    RatesConfig,
    RematConfig,
    RLConfig,
)


class PlanConfig(Section):
    """The keys of the batch, its stages, rates and mesh, and the dimensions of the model that mesh
    axes divide.
    """

    length: LengthConfig
    batch: BatchConfig
    ramp: RampConfig
    prompts: PromptBatchConfig
    rates: RatesConfig
    optimizer: OptimizerConfig
    adapters: AdapterConfig
    model: ModelConfig
    mesh: MeshConfig
    evaluation: EvaluationConfig
    skip_samples: str
    recipe: Recipe

    @property
    def slots_per_sample(self) -> int:
        """Tokens that a sample has room for."""
        return slots_per_sample(self)


class StoreConfig(DataConfig):
    """The data's keys, and the kind of sample, which determines the documents of a record."""

    recipe: Recipe


class StreamConfig(StoreConfig):
    """The keys of a store, the length of a row, the vocabulary, and for messages model and
    epochs.
    """

    max_target_length: int
    vocab_size: int
    load_parameters_path: str
    num_epochs: int | float | Fraction | None


class PromptConfig(StreamConfig):
    """The keys of a stream, the template of a prompt, and the bound of its tokens."""

    prompt_template: str
    max_prefill_predict_length: int


class DecoderConfig(ModelConfig):
    """The model's keys, the longest row, and the rematerialisation."""

    max_target_length: int
    remat: RematConfig


class TextConfig(DecoderConfig):
    """The keys of the decoder, of a text's first token, and of the mesh."""

    add_bos: bool
    recipe: Recipe
    mesh: MeshConfig


class ModelOptimizerConfig(OptimizerConfig):
    """Keys of the optimizer, and the model's family: MaxText's names of its parameters are searched
    by `adamw_mask`.
    """

    decoder_block: str


class UpdateConfig(DecoderConfig):
    """Keys of the decoder, mesh, adapters and optimizer."""

    mesh: MeshConfig
    adapters: AdapterConfig
    optimizer: ModelOptimizerConfig


class ProgramsConfig(UpdateConfig):
    """The keys of the update and the objective, and the keys of evals and checkpoints that shape a
    run's programs.
    """

    preferences: PreferenceConfig
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    recipe: Recipe
    max_tokens_per_pass: int | None


class LearnerConfig(UpdateConfig):
    """The keys of the update and of the policy's loss, and the compiler's flags."""

    rl: RLConfig
    libtpu_flags: str


class RolloutConfig(DecoderConfig):
    """Keys of the decoder, its adapters, the responses, the model with their end tokens, and the
    compiler's flags.
    """

    rl: RLConfig
    adapters: AdapterConfig
    max_prefill_predict_length: int
    load_parameters_path: str
    libtpu_flags: str


class RecordConfig(Section):
    """The config keys of a recorder."""

    max_target_length: int
    log_period: int
    recipe: Recipe
    optimizer: OptimizerConfig
