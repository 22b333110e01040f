"""Seesaw: where a schedule would lower the rate, the batch grows instead, and the rate falls by the
root only.

Reference: Meterez et al. 2025 (https://arxiv.org/abs/2510.14717).
"""

from __future__ import annotations

import bisect
import math
from fractions import Fraction
from functools import partial
from typing import NamedTuple

from maxbatch.config.combined import PlanConfig
from maxbatch.config.sections import RatesConfig
from maxbatch.config.values import Value, amount, counted
from maxbatch.plan.rate_shape import has_fallen, rate_shape, warm_up_end
from maxbatch.plan.refusal import Refusal

_KEY = "batch_size_schedule"
_EXAMPLE = "seesaw 256 2"


def _is_whole(number: Fraction | None, least: int) -> bool:
    return number is not None and number.denominator == 1 and number >= least


def _falling(rates: RatesConfig, factor: Fraction) -> dict[str, Value]:
    """Returns a setting that lets the rate fall by the factor; it may need a second one."""
    if (
        rates.learning_rate_schedule != "constant"
        and rates.learning_rate_final_fraction * factor >= 1
    ):
        return {"learning_rate_final_fraction": 0}
    if rates.learning_rate_schedule != "cosine":
        return {"learning_rate_schedule": "cosine"}
    return {"warmup_steps_fraction": 0.1}


class Seesaw(NamedTuple):
    """A stated seesaw, such as `seesaw 256 2`: the first batch, and the factor of growth at each
    cut.
    """

    first_batch: int
    factor: int

    @classmethod
    def if_stated(cls, config: PlanConfig) -> Seesaw | None:
        """Returns the seesaw in `batch_size_schedule`; None for any other value.

        Raises:
          ConfigError: the batch or the factor is missing, or the rate does not fall as a seesaw
            needs.
        """
        text = config.batch.batch_size_schedule
        words = [] if text is None else text.split()
        if not words or words[0] != "seesaw":
            return None
        slots = config.slots_per_sample
        first, factor = (
            (counted(words[1], slots), amount(words[2])) if len(words) == 3 else (None, None)
        )
        if not (_is_whole(first, 1) and _is_whole(factor, 2)):
            rule = (
                "must be seesaw BATCH FACTOR: a first batch in samples or tokens, a whole factor "
                "of at least 2"
            )
            works = _EXAMPLE
            if first and words[1].endswith("t") and _is_whole(factor, 2):
                works = f"seesaw {max(1, round(first)) * slots}t {words[2]}"
            raise Refusal(config, _KEY, rule, {_KEY: works})
        assert first is not None and factor is not None, "both were checked above"
        lowest = rate_shape(config.rates, 1, 1)
        if lowest * factor >= 1:
            share = "never falls" if lowest == 1 else f"falls to {lowest:g} of its peak"
            schedule = config.rates.learning_rate_schedule
            rule = (
                f"needs a rate below 1/{factor} of its peak, and "
                f"learning_rate_schedule={schedule} {share}"
            )
            raise Refusal(config, _KEY, rule, _falling(config.rates, factor))
        if config.rates.learning_rate_scaling != "none":
            rule = "must be none beside a seesaw, which scales the rate itself"
            raise Refusal(config, "learning_rate_scaling", rule, {"learning_rate_scaling": "none"})
        return cls(int(first), int(factor))

    def batches(
        self, rates: RatesConfig, total_samples: int, most: int
    ) -> list[tuple[Fraction, int]]:
        """Returns pairs of first sample and batch, up to the last cut at which an update of the run
        begins.

        Cut i is the first sample, after the warm-up, at which the unscaled rate is at most its peak
        / factor^i. A batch without updates, because the previous update passes the next cut, is
        left out.

        Args:
          rates: the schedule of the rate.
          total_samples: of the run.
          most: samples that an update may have.
        """
        warm = math.ceil(warm_up_end(rates, total_samples))
        stages, position, batch = [(0, self.first_batch)], 0, self.first_batch
        for power in range(1, most.bit_length()):
            is_behind = partial(
                has_fallen, rates, total_samples, level=Fraction(1, self.factor**power)
            )
            cut = bisect.bisect_left(range(warm, total_samples), True, key=is_behind) + warm
            # the stage begins with the first update at or after the cut
            begins = position + max(0, -(-(cut - position) // batch)) * batch
            if begins >= total_samples or batch * self.factor > most:
                break
            if begins == position:
                stages.pop()  # the stage before has no update of its own
            position, batch = begins, batch * self.factor
            stages.append((cut, batch))
        return [(Fraction(start), batch) for start, batch in stages]

    def samples_for(self, rates: RatesConfig, steps: int, most: int) -> int:
        """Returns the samples of a run of about `steps` updates; `most` is that of `batches`."""
        # Batches only grow, so a run of that many updates has at least this many samples. Double the
        # end (or more) until it has enough updates, then search between.
        fewest = steps * self.first_batch
        end = fewest
        while self._num_updates(rates, end, most) < steps and end < most:
            end *= self.factor
        updates = partial(self._num_updates, rates, most=most)
        return bisect.bisect_left(range(fewest, end), steps, key=updates) + fewest

    def _num_updates(self, rates: RatesConfig, total_samples: int, most: int) -> int:
        stages = self.batches(rates, total_samples, most)
        ends = [*(int(start) for start, _ in stages[1:]), total_samples]
        position = updates = 0
        for (_, batch), end in zip(stages, ends, strict=True):
            of_stage = max(0, -(-(end - position) // batch))
            updates, position = updates + of_stage, position + of_stage * batch
        return updates

    def rate_scale(self, batch: int) -> float:
        """Returns the factor on the peak rate of a stage: the root of the first batch over the
        stage's.
        """
        return math.sqrt(self.first_batch / batch)
