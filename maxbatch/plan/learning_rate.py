"""The learning rate as a function of samples seen, so that a batch ramp does not distort it.

Without a ramp it is the usual schedule per step (optax.warmup_cosine_decay_schedule and its like): step k is
`samples_seen` = k x B. Pure Python: one float per step, computed on the host.
"""

from __future__ import annotations

import dataclasses
import math

from ml_collections import ConfigDict

from maxbatch.plan.rampup import RampupBatchManager
from maxbatch.plan.refusal import Refusal


@dataclasses.dataclass(frozen=True)
class LearningRate:
    """Warmup from 0, then cosine, wsd or constant, times the scale of the stage.

    Attributes:
      peak: the rate after the warmup, before the stage's scale.
      schedule: `cosine` (Loshchilov and Hutter 2017, https://arxiv.org/abs/1608.03983), `wsd` (warmup,
        stable, linear decay: Hu et al. 2024, https://arxiv.org/abs/2404.06395) or `constant`.
      total_samples: samples of the whole run; 0 where the schedule does not need them.
      warmup_fraction: share of the samples in the warmup.
      decay_fraction: share of the samples in wsd's decay.
      final_fraction: last rate over peak, for cosine and wsd.
      reference_batch_size: global batch that the rate was tuned for.
      manager: gives each stage's scale.
    """

    peak: float
    schedule: str
    total_samples: int
    warmup_fraction: float
    decay_fraction: float
    final_fraction: float
    reference_batch_size: int
    manager: RampupBatchManager

    @classmethod
    def from_config(cls, config: ConfigDict, manager: RampupBatchManager) -> LearningRate:
        """Takes the rate's keys from the config and the run's length from the manager.

        Raises:
          ConfigError: the schedule depends on the run's length, which is unknown (epochs of unknown data).
        """
        total = manager.total_samples
        needs_total = config.learning_rate_schedule != "constant" or config.warmup_steps_fraction > 0
        if total is None and needs_total:
            raise Refusal(
                config,
                "num_epochs",
                f"learning_rate_schedule={config.learning_rate_schedule} needs the run's length, but the samples of an "
                "epoch are unknown",
                {"num_epochs": None, "train_samples": 100_000},
            )
        return cls(
            peak=config.learning_rate,
            schedule=config.learning_rate_schedule,
            total_samples=total or 0,
            warmup_fraction=config.warmup_steps_fraction,
            decay_fraction=config.wsd_decay_steps_fraction,
            final_fraction=config.learning_rate_final_fraction,
            reference_batch_size=config.reference_batch_size or manager.stages[-1].global_batch_size,
            manager=manager,
        )

    def at(self, samples_seen: int) -> float:
        """Returns the rate of the step that starts at samples_seen."""
        stage = self.manager.stages[self.manager.stage_at(samples_seen)]
        return self.peak * stage.learning_rate_scale * self._shape(samples_seen)

    def batch_ratio_at(self, samples_seen: int) -> float:
        """Returns the batch of the step that starts at samples_seen over the reference batch."""
        return self.manager.batch_size_at(samples_seen) / self.reference_batch_size

    def _shape(self, samples_seen: int) -> float:
        """Returns the rate over its peak, from 0 to 1."""
        warmup = self.warmup_fraction * self.total_samples
        if samples_seen < warmup:
            return samples_seen / warmup
        left = max(0.0, self.total_samples - samples_seen)
        if self.schedule == "constant":
            return 1.0
        if self.schedule == "wsd":
            decay = self.decay_fraction * self.total_samples
            return 1.0 if left >= decay else self.final_fraction + (1 - self.final_fraction) * left / decay
        span = self.total_samples - warmup
        cosine = 0.5 * (1 - math.cos(math.pi * left / span)) if span > 0 else 1.0
        return self.final_fraction + (1 - self.final_fraction) * cosine
