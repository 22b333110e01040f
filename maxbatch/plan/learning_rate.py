"""The learning rate as a function of samples seen, so that a batch ramp does not distort it.

With `learning_rate_schedule_by=updates` it is a function of the updates that are complete at that
position.

Without a ramp it is the usual schedule per step (optax.warmup_cosine_decay_schedule and its like):
step k is `samples_seen` = k x B. Pure Python: one float per step, computed on the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, overload

from maxbatch.config.combined import PlanConfig
from maxbatch.config.config import Config, as_plan
from maxbatch.config.sections import RatesConfig
from maxbatch.plan.rampup import RampupBatchManager
from maxbatch.plan.rate_shape import rate_shape, rate_shape_by_updates, warm_up_end
from maxbatch.plan.refusal import Refusal
from maxbatch.plan.seesaw import Seesaw

if TYPE_CHECKING:
    import numpy as np
    from ml_collections import ConfigDict


class LearningRate(NamedTuple):
    """Warmup from 0, then a schedule (`rate_shape`), times the scale of the stage."""

    rates: RatesConfig
    manager: RampupBatchManager  # gives each stage's scale
    total_samples: int  # of the whole run; 0: the schedule does not need them
    # a seesaw: after the warm-up only the scale of the stage changes the rate
    falls_by_stages: bool = False

    @classmethod
    def from_config(
        cls,
        config: Config | ConfigDict | PlanConfig,
        manager: RampupBatchManager | None = None,
        *,
        num_devices: int = 1,
        samples_per_epoch: int | None = None,
    ) -> LearningRate:
        """Takes the rate's keys from the config and the run's length from the manager.

        Args:
          config: the run's config.
          manager: the plan of its batch; None: planned from the config on `num_devices`.
          num_devices: devices that train.
          samples_per_epoch: samples in one pass over the training split, which a length in epochs
            needs.

        Raises:
          ConfigError: the schedule depends on the run's length, which is unknown (epochs of unknown
            data).
        """
        config = as_plan(config)
        if manager is None:
            manager = RampupBatchManager.from_config(
                config, num_devices, samples_per_epoch=samples_per_epoch
            )
        schedule = config.rates.learning_rate_schedule
        if manager.total_samples is None and (
            schedule != "constant" or config.rates.warmup_steps_fraction
        ):
            rule = (
                f"learning_rate_schedule={schedule} needs the run's length, but the samples of an "
                "epoch are unknown"
            )
            raise Refusal(
                config, "num_epochs", rule, {"num_epochs": None, "train_samples": 100_000}
            )
        return cls(
            config.rates, manager, manager.total_samples or 0, Seesaw.if_stated(config) is not None
        )

    @overload
    def __call__(self, samples_seen: int) -> float: ...

    @overload
    def __call__(self, samples_seen: np.ndarray) -> np.ndarray: ...

    def __call__(self, samples_seen: int | np.ndarray) -> float | np.ndarray:
        """Returns the rate of the step that starts at samples_seen; for an array of positions, an
        array of rates.
        """
        if not getattr(samples_seen, "shape", ()):
            return self.at(int(samples_seen))
        import numpy as np

        positions = np.asarray(samples_seen)
        return np.array([self.at(int(position)) for position in positions.flat]).reshape(
            positions.shape
        )

    def at(self, samples_seen: int) -> float:
        """Returns the rate of the step that starts at samples_seen."""
        peak: float = self.rates.learning_rate
        return (
            peak
            * self.manager.learning_rate_scales[self.manager.stage_at(samples_seen)]
            * self._shape(samples_seen)
        )

    def batch_ratio_at(self, samples_seen: int) -> float:
        """Returns the batch of the step that starts at samples_seen over the reference batch."""
        reference: int = (
            self.rates.reference_batch_size or self.manager.stages[-1].global_batch_size
        )
        return self.manager.batch_size_at(samples_seen) / reference

    def _shape(self, samples_seen: int) -> float:
        """Returns the rate over the peak of its stage, from 0 to 1."""
        if self.falls_by_stages and samples_seen >= warm_up_end(self.rates, self.total_samples):
            return 1.0
        if self.rates.learning_rate_schedule_by == "updates":
            total = self.manager.total_steps or 0
            return rate_shape_by_updates(self.rates, total, self.manager.step_at(samples_seen))
        return rate_shape(self.rates, self.total_samples, samples_seen)
