"""The whole config of a run, as `load_config` returns it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from maxbatch.config.combined import (
    DecoderConfig,
    LearnerConfig,
    ModelOptimizerConfig,
    PlanConfig,
    ProgramsConfig,
    PromptConfig,
    RecordConfig,
    RolloutConfig,
    StoreConfig,
    StreamConfig,
    TextConfig,
    UpdateConfig,
)
from maxbatch.config.keys import Section
from maxbatch.config.recipes import Recipe
from maxbatch.config.sections import (
    AdapterConfig,
    AllKeys,
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    MeshConfig,
    ModelConfig,
    PreferenceConfig,
    RatesConfig,
    RematConfig,
    RLConfig,
)
from maxbatch.system.errors import ConfigError

if TYPE_CHECKING:
    from ml_collections import ConfigDict

_S = TypeVar("_S", bound=Section)


class PartOf(Generic[_S]):
    """A section as an attribute of the whole config, made at its first use."""

    def __init__(self, section: type[_S]) -> None:
        self._section = section

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, config: Config, owner: type[Config]) -> _S:
        # read in place of this from now on
        section = config.__dict__[self._name] = self._section.of(config)
        return section


class Config(AllKeys):
    """The whole config: every key as an attribute and as an item, and the sections that rooms
    take.
    """

    recipe = PartOf(Recipe)
    plan, record = PartOf(PlanConfig), PartOf(RecordConfig)
    data, store, stream = PartOf(DataConfig), PartOf(StoreConfig), PartOf(StreamConfig)
    model, decoder, text = PartOf(ModelConfig), PartOf(DecoderConfig), PartOf(TextConfig)
    mesh, remat, adapters = PartOf(MeshConfig), PartOf(RematConfig), PartOf(AdapterConfig)
    update, programs, evaluation = (
        PartOf(UpdateConfig),
        PartOf(ProgramsConfig),
        PartOf(EvaluationConfig),
    )
    rates, optimizer, preferences = (
        PartOf(RatesConfig),
        PartOf(ModelOptimizerConfig),
        PartOf(PreferenceConfig),
    )
    rl, prompting = PartOf(RLConfig), PartOf(PromptConfig)
    checkpoint = PartOf(CheckpointConfig)
    rollout, learner = PartOf(RolloutConfig), PartOf(LearnerConfig)


def as_plan(config: Config | ConfigDict | PlanConfig) -> PlanConfig:
    """Returns the plan's section of a config; returns a section unchanged."""
    return config if isinstance(config, PlanConfig) else as_config(config).plan


def as_config(config: Config | ConfigDict) -> Config:
    """Returns a config of `load_config`, or a frozen copy of the keys of a user's `ConfigDict`.

    Raises:
      ConfigError: it is neither.
    """
    if isinstance(config, Config):
        return config
    from ml_collections import ConfigDict

    if isinstance(config, ConfigDict):
        return Config.of(config)
    works = (
        f"maxbatch.load_config({config!r})"
        if isinstance(config, str)
        else "maxbatch.load_config(...)"
    )
    raise ConfigError(
        f"config: must be a resolved config, not {type(config).__name__}; works: {works}"
    )
