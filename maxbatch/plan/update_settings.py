"""The settings of each update: its rate, and the decays that may be stated in tokens.

A decay stated in tokens follows the batch of the update, so that a ramp does not change the amount
of text that the moments and the weight decay average over: b = 0.5^(tokens / half-life), weight
decay = tokens / (timescale x peak rate). References: Marek et al. 2025
(https://arxiv.org/abs/2507.07101) for half-lives, Wang and Aitchison 2024
(https://arxiv.org/abs/2405.13698) and Bergsma et al. 2025 (https://arxiv.org/abs/2505.13738) for
the timescale.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from maxbatch.config.combined import PlanConfig
from maxbatch.config.sections import OptimizerConfig, RatesConfig
from maxbatch.config.values import in_runs, in_tokens
from maxbatch.plan.learning_rate import LearningRate
from maxbatch.plan.rampup import RampupBatchManager

_MOST_HALVINGS = 100.0  # of one update: nothing older is left


class UpdateSettings(NamedTuple):
    """The numbers of one update; in the compiled step they are float32 scalars."""

    learning_rate: float
    batch_ratio: float = 1.0  # the update's batch over the reference batch, for adam_scaling=sde
    # length of the update in half-lives; its b1 is 2 to the minus these
    adam_b1_halvings: float = 0.0
    adam_b2_halvings: float = 0.0
    adam_weight_decay: float = 0.0
    average_halvings: float = 0.0  # length of the update in half-lives of the parameter average


class Decays(NamedTuple):
    """The decays of an update with a stage's batch, by the names that they have in `maxbatch plan
    --json`.
    """

    adam_b1: float
    adam_b2: float
    adam_weight_decay: float | None  # None: it needs the run's length, which is unknown
    parameter_average: float | None  # None: no average of the parameters is kept


class DecayPlan(NamedTuple):
    """The decays of every update of a run, by its batch."""

    optimizer: OptimizerConfig
    rates: RatesConfig
    manager: RampupBatchManager
    slots_per_sample: int

    @classmethod
    def from_config(cls, config: PlanConfig, manager: RampupBatchManager) -> DecayPlan:
        """Takes the optimizer's keys from the config and the batch from the manager."""
        return cls(config.optimizer, config.rates, manager, config.slots_per_sample)

    def of_stage(self, stage: int) -> Decays:
        """Returns the decays of a whole update of a stage."""
        batch = self.manager.stages[stage].global_batch_size
        tokens = batch // self.manager.num_minibatches * self.slots_per_sample
        ratio = batch / (
            self.rates.reference_batch_size or self.manager.stages[-1].global_batch_size
        )

        def decay(name: str) -> float:
            value: float | None = self.optimizer[name]
            if value is None:
                return float(0.5 ** float(tokens / in_tokens(self.optimizer[f"{name}_half_life"])))
            return 1 - ratio * (1 - value) if self.optimizer.adam_scaling == "sde" else value

        kept = self.optimizer.parameter_average_half_life is not None
        average = 0.5 ** self.average_halvings(tokens) if kept else None
        return Decays(decay("adam_b1"), decay("adam_b2"), self.weight_decay(tokens, stage), average)

    def average_halvings(self, tokens: int) -> float:
        """Returns the length of an update, stated in tokens, in half-lives of the parameter average;
        0: no average.
        """
        half_life = self.optimizer.parameter_average_half_life
        return (
            0.0 if half_life is None else min(_MOST_HALVINGS, float(tokens / in_tokens(half_life)))
        )

    def halvings(self, name: str, tokens: int) -> float:
        """Returns the length of an update, stated in tokens, in half-lives of a moment (`adam_b1`,
        `adam_b2`).
        """
        decay: float | None = self.optimizer[name]
        if decay is None:
            return min(
                _MOST_HALVINGS, float(tokens / in_tokens(self.optimizer[f"{name}_half_life"]))
            )
        return min(_MOST_HALVINGS, -math.log2(decay)) if decay else _MOST_HALVINGS

    def weight_decay(self, tokens: int, stage: int) -> float | None:
        """Returns the weight decay of an update, whose length is stated in tokens; None: the run's
        length is unknown.
        """
        timescale = self.optimizer.weight_decay_timescale
        if timescale is None:
            return self.optimizer.adam_weight_decay
        span, runs = in_tokens(timescale), in_runs(timescale)
        if runs is not None:
            if self.manager.total_samples is None:
                return None
            span = (
                runs
                * self.manager.total_samples
                * self.manager.rows_per_sample
                * self.slots_per_sample
            )
        return float(tokens / span) / (
            self.rates.learning_rate * self.manager.learning_rate_scales[stage]
        )


class UpdatePlan(NamedTuple):
    """The settings of every update of a run, by its position."""

    rate: LearningRate
    decays: DecayPlan

    @classmethod
    def from_config(cls, config: PlanConfig, manager: RampupBatchManager) -> UpdatePlan:
        """Takes the keys of the rate and of the optimizer from the config, the batch from the
        manager.

        Raises:
          ConfigError: the rate depends on the run's length, which is unknown.
        """
        return cls(
            LearningRate.from_config(config, manager), DecayPlan.from_config(config, manager)
        )

    def at(self, samples_seen: int, num_rows: int | None = None) -> UpdateSettings:
        """Returns the settings of the update that starts at samples_seen.

        Args:
          num_rows: its real rows, whose slots are its tokens; None: all.
        """
        manager, decays = self.rate.manager, self.decays
        rows = manager.rows_at(samples_seen) if num_rows is None else num_rows
        tokens = rows * decays.slots_per_sample
        decay = decays.weight_decay(tokens, manager.stage_at(samples_seen))
        assert decay is not None, "a run that trains knows its length"
        return UpdateSettings(
            self.rate.at(samples_seen),
            self.rate.batch_ratio_at(samples_seen),
            decays.halvings("adam_b1", tokens),
            decays.halvings("adam_b2", tokens),
            decay,
            decays.average_halvings(tokens),
        )
