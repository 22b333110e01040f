"""The micro-batches that `fit` may try, and the largest that fits under a remat policy."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from functools import cached_property
from typing import Any

from ml_collections import ConfigDict

from maxbatch.commands.fit.costs import Cost, cost
from maxbatch.commands.fit.oracle import CompilerOracle
from maxbatch.commands.fit.search import Questions, largest_fitting
from maxbatch.config.values import exact, plain_number
from maxbatch.data.feed.placement import BatchShape
from maxbatch.data.stream.fingerprint import MAX_ROWS
from maxbatch.plan.batch import BatchPlan
from maxbatch.plan.microbatches import MicrobatchUnit
from maxbatch.training.compile.memory import Parts, Verdict


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The micro-batches that a config may have, numbered from 1, the smallest.

    `per_device_batch_size` grows by one sample per device. It grows by less if the batch has fewer shards than there
    are devices (tensor, context and pipeline axes share their rows), and by the ramp's increment in a ramp. If the
    global batch is stated, only the micro-batches that divide it count.

    Attributes:
      first: rows of size 1.
      step: rows between one size and the next; what all divisors are a multiple of, if the global batch is stated.
      global_batch: as stated, else None.
      most_rows: rows that a step takes in one pass at most.
    """

    num_devices: int
    first: int
    step: int
    global_batch: int | None
    accumulation: int
    most_rows: int

    @classmethod
    def of(cls, config: ConfigDict, plan: BatchPlan) -> Sizes:
        """Returns the sizes on the plan's devices."""
        rows = MicrobatchUnit.from_config(config, plan.mesh).rows
        most, accumulation = MAX_ROWS * plan.mesh.sizes["data"], plan.gradient_accumulation_steps
        if config.enable_rampup_batch_size and exact(config.per_device_batch_size_increment) > 0:
            start, step = (
                int(exact(config[f"per_device_batch_size_{key}"]) * plan.num_devices)
                for key in ("start", "increment")
            )
            return cls(plan.num_devices, start + step, step, None, accumulation, most)
        stated = config.gradient_accumulation_steps is None
        step = math.lcm(rows, plan.num_devices) if rows % plan.num_devices == 0 else rows
        batch = plan.global_batch_size_to_train_on if stated else None
        return cls(plan.num_devices, step, step, batch, accumulation, most)

    @property
    def count(self) -> int:
        """The number of sizes."""
        if self.global_batch:
            return len(self._divisors)
        return max(0, (self.most_rows - self.first) // self.step + 1)

    @cached_property
    def _divisors(self) -> list[int]:
        assert self.global_batch is not None
        units = self.global_batch // self.step
        most = min(units, self.most_rows // self.step)
        return [d * self.step for d in range(1, most + 1) if units % d == 0]

    def rows_at(self, size: int) -> int:
        """Returns the rows of the micro-batch of a size."""
        return self._divisors[size - 1] if self.global_batch else self.first + (size - 1) * self.step

    def shape(self, rows: int) -> BatchShape:
        """Returns the shape of the batch whose micro-batches have that many rows."""
        return BatchShape(rows, self.global_batch // rows if self.global_batch else self.accumulation)

    def per_device(self, rows: int) -> int | float | Fraction:
        """Returns the `per_device_batch_size` of a micro-batch."""
        return plain_number(Fraction(rows, self.num_devices))


@dataclasses.dataclass(frozen=True)
class Choice:
    """The largest micro-batch that fits under one remat policy.

    Attributes:
      cost: the modelled time of an update; None if the chip's figures are not known.
      next_verdict: the verdict on the next larger micro-batch; None if there is no larger one.
    """

    remat_policy: str
    shape: BatchShape
    per_device_batch_size: int | float | Fraction
    verdict: Verdict
    next_verdict: Verdict | None
    parts: Parts
    cost: Cost | None

    def to_dict(self) -> dict[str, Any]:
        """Returns the choice as `--json` prints it."""
        batch = self.shape.micro_batch * self.shape.max_micro_batches
        number = self.per_device_batch_size
        return {
            "per_device_batch_size": float(number) if isinstance(number, Fraction) else number,
            "gradient_accumulation_steps": self.shape.max_micro_batches,
            "micro_batch_size_to_train_on": self.shape.micro_batch,
            "global_batch_size_to_train_on": batch,
            "remat_policy": self.remat_policy,
            "hbm_bytes_needed": self.verdict.needed_bytes,
            "hbm_bytes_available": self.verdict.available_bytes,
            "memory": {f"{kind}_bytes": size for kind, size in dataclasses.asdict(self.parts).items()},
            "cost": None
            if self.cost is None
            else {**dataclasses.asdict(self.cost), "step_s": self.cost.step_s},
        }


def choose(oracle: CompilerOracle, plan: BatchPlan, sizes: Sizes, limit: int, at_once: int) -> Choice | None:
    """Returns the largest micro-batch that fits under the oracle's config; None if none does.

    Args:
      oracle: says what fits.
      plan: the batch plan, for its mesh.
      sizes: the micro-batches that may be tried.
      limit: bytes of a device.
      at_once: sizes to ask about at a time.
    """
    questions = Questions(
        lambda numbers: oracle.ask(*map(sizes.shape, numbers)),
        at_once,
        refusals_are_cheap=oracle.target.devices[0].platform == "tpu",
    )
    size = largest_fitting(sizes.rows_at, sizes.count, limit, oracle.estimate(), questions)
    if not size:
        return None
    rows = sizes.rows_at(size)
    shape = sizes.shape(rows)
    (verdict,) = oracle.ask(shape)
    has_next = size < sizes.count
    chip = oracle.target.chip
    temp = (verdict.needed_bytes or 0) - (verdict.memory.argument_bytes if verdict.memory else 0)
    return Choice(
        oracle.config.remat_policy,
        shape,
        sizes.per_device(rows),
        verdict,
        oracle.ask(sizes.shape(sizes.rows_at(size + 1)))[0] if has_next else None,
        oracle.parts(shape, verdict),
        cost(oracle.config, plan.mesh, chip, shape, oracle.num_parameters, temp) if chip else None,
    )
