"""Which batches may be tried, and the ways to reach a wanted one."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Any

from ml_collections import ConfigDict

from maxbatch.commands.fit.costs import Cost, cost
from maxbatch.commands.fit.oracle import Judge
from maxbatch.commands.fit.search import largest_fitting
from maxbatch.config.values import exact, plain_number
from maxbatch.data.feed.placement import BatchShape
from maxbatch.data.stream.fingerprint import MAX_ROWS
from maxbatch.plan.batch import BatchPlan
from maxbatch.plan.microbatches import MicrobatchUnit
from maxbatch.training.compile.memory import Parts, Verdict


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The micro-batches that a config may have, from the smallest on.

    Where nothing fixes the batch, per_device_batch_size grows by one sample per device; by less where the batch has
    fewer shards than there are devices (tensor, context and pipeline axes share their rows), and by the ramp's
    increment in a ramp. Where the global batch is stated, only the micro-batches that divide it count.
    """

    num_devices: int
    first: int
    step: int
    global_batch: int | None
    accumulation: int
    most_rows: int  # that a step takes in one pass

    @classmethod
    def of(cls, config: ConfigDict, plan: BatchPlan) -> Sizes:
        """The sizes on the plan's devices."""
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
        """How many there are."""
        if self.global_batch:
            return len(self._divisors)
        return max(0, (self.most_rows - self.first) // self.step + 1)

    @property
    def _divisors(self) -> list[int]:
        assert self.global_batch is not None
        units = self.global_batch // self.step
        return [
            d * self.step for d in range(1, units + 1) if units % d == 0 and d * self.step <= self.most_rows
        ]

    def rows_at(self, size: int) -> int:
        """The rows of the micro-batch of a size, from 1 on."""
        return self._divisors[size - 1] if self.global_batch else self.first + (size - 1) * self.step

    def shape(self, rows: int) -> BatchShape:
        """The batch that has micro-batches of so many rows."""
        return BatchShape(rows, self.global_batch // rows if self.global_batch else self.accumulation)

    def per_device(self, rows: int) -> int | float | Fraction:
        """per_device_batch_size of a micro-batch."""
        return plain_number(Fraction(rows, self.num_devices))


@dataclasses.dataclass(frozen=True)
class Choice:
    """The largest micro-batch that fits under one remat policy.

    Attributes:
      cost: what an update takes by the model; None where the chip's figures are not known.
      next_verdict: the verdict on the next larger micro-batch, None where there is none.
    """

    remat_policy: str
    shape: BatchShape
    per_device_batch_size: int | float | Fraction
    verdict: Verdict
    next_verdict: Verdict | None
    parts: Parts
    cost: Cost | None

    def to_dict(self) -> dict[str, Any]:
        """What `--json` says of it."""
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


def choose(judge: Judge, plan: BatchPlan, sizes: Sizes, limit: int, at_once: int) -> Choice | None:
    """Return the largest that fits under the judge's config; None where nothing does.

    Args:
      judge: whom to ask.
      plan: the batch plan; its mesh counts.
      sizes: what may be tried.
      limit: bytes of a device.
      at_once: how many sizes to ask about at a time.
    """
    size = largest_fitting(
        sizes.rows_at,
        sizes.count,
        limit,
        judge.estimate(),
        lambda numbers: judge.ask(*map(sizes.shape, numbers)),
        at_once,
        refusals_are_cheap=judge.target.devices[0].platform == "tpu",
    )
    if not size:
        return None
    rows = sizes.rows_at(size)
    shape = sizes.shape(rows)
    (verdict,) = judge.ask(shape)
    has_next = size < sizes.count
    chip = judge.target.chip
    temp = (verdict.needed_bytes or 0) - (verdict.memory.argument_bytes if verdict.memory else 0)
    return Choice(
        judge.config.remat_policy,
        shape,
        sizes.per_device(rows),
        verdict,
        judge.ask(sizes.shape(sizes.rows_at(size + 1)))[0] if has_next else None,
        judge.parts(shape, verdict),
        cost(judge.config, plan.mesh, chip, *shape, judge.num_parameters, temp) if chip else None,
    )
