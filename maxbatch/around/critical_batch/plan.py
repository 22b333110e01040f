"""The plan of a measurement: checkpoints, batches, and the length of a branch. Refuses
uninformative plans.

A fork is a checkpoint that branches start from; a branch is a run from there with another batch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from maxbatch.around.critical_batch.measured_run import Fork, MeasuredRun
from maxbatch.config.values import plain_number
from maxbatch.plan.mesh_shape import MeshShape
from maxbatch.plan.microbatches import MicrobatchUnit
from maxbatch.plan.rate_shape import warm_up_end
from maxbatch.plan.stages import stated_stages
from maxbatch.system.errors import ConfigError

DEFAULT_FACTORS = tuple(map(Fraction, ("1/2", "1", "2", "4", "8")))
DEFAULT_UPDATES, LEAST_UPDATES = 32, 8  # of the largest batch, in a branch
MOST_FORKS = 4  # chosen by default
_COMPARED = 4  # the last 1 / this of a branch is compared


@dataclasses.dataclass(frozen=True)
class Branch:
    """A run of `samples` samples from a fork on, with another batch."""

    fork: Fork
    batch_size: int
    samples: int

    @property
    def name(self) -> str:
        return f"step-{self.fork.step}-batch-{self.batch_size}"

    @property
    def end(self) -> int:
        return self.fork.samples_seen + self.samples

    @property
    def updates(self) -> int:
        return self.samples // self.batch_size


@dataclasses.dataclass(frozen=True)
class MeasurementPlan:
    forks: tuple[Fork, ...]  # in order
    factors: tuple[Fraction, ...]  # of the batch at the fork, rising; 1 is among them
    scaling: str  # how the learning rate follows the batch: `none`, `linear` or `sqrt`
    samples: int  # of every branch
    chunk: int  # samples of a chunk: a multiple of every batch
    decays: bool = False  # whether the rate of a branch falls to 0 at its end

    @property
    def compared(self) -> int:
        """Samples at the end of a branch over which its loss is averaged: a quarter, in whole
        chunks.
        """
        return -(-(self.samples // self.chunk) // _COMPARED) * self.chunk

    def branches(self, fork: Fork) -> list[Branch]:
        """Returns a fork's branches, the smallest batch first."""
        return [Branch(fork, int(f * fork.batch_size), self.samples) for f in self.factors]

    def to_json(self) -> dict[str, object]:
        return {**dataclasses.asdict(self), "factors": [str(factor) for factor in self.factors]}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> MeasurementPlan:
        forks = tuple(Fork(**fork) for fork in record["forks"])
        factors = tuple(Fraction(text) for text in record["factors"])
        return cls(
            forks,
            factors,
            record["scaling"],
            record["samples"],
            record["chunk"],
            record.get("decays", False),
        )


def make_plan(
    run: MeasuredRun,
    steps: Sequence[int] | None,
    factors: Sequence[Fraction] | None,
    samples: int | None,
    scaling: str,
    decays: bool = False,
) -> MeasurementPlan:
    """Returns the plan of a measurement.

    Args:
      run: the run.
      steps: checkpoints; None: up to `MOST_FORKS`, evenly over the logarithm of the position.
      factors: of the batch at the checkpoint; None: `DEFAULT_FACTORS`, as far as run and devices
        allow them.
      samples: samples of a branch, rounded up; None: `DEFAULT_UPDATES` updates of the largest
        batch.
      scaling: how the learning rate follows the batch.
      decays: whether the rate of a branch falls to 0 at its end; else it is constant.
    """
    of_run = run.config.learning_rate_scaling
    if len(stated_stages(run.config.plan, run.num_devices)) > 1 and of_run != scaling:
        raise ConfigError(
            f"--scaling {scaling}: must be {of_run}, the learning_rate_scaling of {run.path}, whose "
            f"batch changes: a config states one rule for all of its rates; works: --scaling {of_run}"
        )
    forks = _forks(run, steps)
    chosen = _held(run, forks, factors)
    half = run.samples_seen // 2
    while factors is None and chosen[-1] > 2 and _fault(forks, chosen, samples, half):
        chosen = chosen[:-1]
    chunk, largest = _chunk(forks, chosen), _largest(forks, chosen)
    plan = MeasurementPlan(forks, chosen, scaling, _rounded(forks, chosen, samples), chunk, decays)
    fault = _fault(forks, chosen, samples, half)
    if not fault:
        return plan
    works = _working(forks, chosen, samples, half)
    if fault == "few":
        rule = (
            f"a branch must be at least {LEAST_UPDATES} updates of its largest batch, {largest:,}"
        )
        raise ConfigError(f"--samples {samples}: {rule}; {works}")
    raise ConfigError(
        f"{run.path}: too short to tell: a branch is {plan.samples:,} samples "
        f"({plan.samples // largest} updates of its largest batch, {largest:,}), more than half "
        f"of the {run.samples_seen:,} that the run was trained on; {works}"
    )


def check_plan(run: MeasuredRun, plan: MeasurementPlan) -> bool:
    """Returns whether an earlier plan matches the current run, on devices that hold its batches."""
    _held(run, plan.forks, plan.factors)
    return all(
        run.fork_at(fork.step) == fork for fork in plan.forks if fork.step in run.checkpoints
    )


def _chunk(forks: Sequence[Fork], factors: Sequence[Fraction]) -> int:
    return math.lcm(*(int(factor * fork.batch_size) for fork in forks for factor in factors))


def _largest(forks: Sequence[Fork], factors: Sequence[Fraction]) -> int:
    return int(max(fork.batch_size for fork in forks) * max(factors))


def _in_chunks(samples: int, chunk: int) -> int:
    return -(-samples // chunk) * chunk


def _rounded(forks: Sequence[Fork], factors: Sequence[Fraction], samples: int | None) -> int:
    """Returns the samples of a branch, in whole updates of every batch; not stated: 32 updates of
    the largest.
    """
    return _in_chunks(samples or DEFAULT_UPDATES * _largest(forks, factors), _chunk(forks, factors))


def _least(forks: Sequence[Fork], factors: Sequence[Fraction]) -> int:
    return _in_chunks(LEAST_UPDATES * _largest(forks, factors), _chunk(forks, factors))


def _fault(
    forks: Sequence[Fork], factors: Sequence[Fraction], samples: int | None, most: int
) -> str:
    """Returns "few" or "many" for branches of too few samples or of more than `most`, "" for
    others.
    """
    rounded = _rounded(forks, factors, samples)
    return "few" if rounded < _least(forks, factors) else "many" if rounded > most else ""


def _working(
    forks: Sequence[Fork], factors: Sequence[Fraction], samples: int | None, most: int
) -> str:
    """Returns the advice for a fault: all flags that have to change, or a longer run if no flags
    help.
    """
    least = _least(forks, factors)
    if _fault(forks, factors, samples, most) == "few" and least <= most:
        return f"works: --samples {least}"
    fewer = [factors[:end] for end in range(len(factors) - 1, 0, -1) if factors[end - 1] > 1]
    for left in fewer:
        if not _fault(forks, left, samples, most):
            return f"works: --factors {joined(left)}"
    for left in (factors, *fewer):
        if _least(forks, left) <= most:
            flag = "" if left == factors else f"--factors {joined(left)} "
            return f"works: {flag}--samples {most // _chunk(forks, left) * _chunk(forks, left)}"
    return f"train it on; works: train_samples={2 * _rounded(forks, factors, None)}"


def _forks(run: MeasuredRun, steps: Sequence[int] | None) -> tuple[Fork, ...]:
    if not run.checkpoints:
        raise ConfigError(
            f"{run.path}: has no checkpoints to fork from; train with enable_checkpointing=true"
        )
    for step in steps or ():
        if step not in run.checkpoints:
            nearest = min(run.checkpoints, key=lambda there: abs(there - step))
            raise ConfigError(
                f"--checkpoints {step}: {run.path} has checkpoints "
                f"{', '.join(map(str, run.checkpoints))} (max_num_checkpoints_to_keep=null keeps "
                f"them all); works: --checkpoints {nearest}"
            )
    forks = tuple(run.fork_at(step) for step in (steps or _spread(run)))
    for fork in forks:
        if not fork.learning_rate > 0:
            others = [step for step in run.checkpoints if run.fork_at(step).learning_rate > 0]
            works = f"; works: --checkpoints {others[-1]}" if others else ""
            raise ConfigError(
                f"--checkpoints {fork.step}: the learning rate there is 0, so no branch would "
                f"move{works}"
            )
    return forks


def _spread(run: MeasuredRun) -> list[int]:
    """Returns up to MOST_FORKS steps, evenly over the logarithm of their position.

    Steps within the warmup of the learning rate and the last step of the run are left out if there
    are others.
    """
    total = run.total_samples
    warmup = 0 if total is None else warm_up_end(run.config.rates, total)
    everywhere = {step: saved.position.samples_seen for step, saved in run.checkpoints.items()}
    within = {
        s: at for s, at in everywhere.items() if warmup <= at and (total is None or at < total)
    }
    places = within or everywhere
    first, last = min(places.values()), max(places.values())
    chosen: list[int] = []
    for i in range(number := min(MOST_FORKS, len(places))):
        wanted = first * (last / first) ** (i / max(1, number - 1))
        left = [step for step in places if step not in chosen]
        chosen.append(min(left, key=lambda step: abs(math.log(places[step] / wanted))))
    return sorted(chosen)


def _held(
    run: MeasuredRun, forks: Sequence[Fork], wanted: Sequence[Fraction] | None
) -> tuple[Fraction, ...]:
    """Returns the factors whose batches are whole and divide over the devices; refuses stated ones
    that do not.
    """
    config = run.config.plan
    unit = MicrobatchUnit.from_config(config, MeshShape.from_config(config, run.num_devices))

    def fault(factor: Fraction) -> str | None:
        for fork in forks:
            batch = factor * fork.batch_size
            if batch % unit.rows:
                rule = "whole" if batch.denominator != 1 else f"divisible by {unit.rows} ({unit})"
                at = f"{factor} x the batch of {fork.batch_size} at step {fork.step}"
                return f"{at} = {plain_number(batch)} samples must be {rule}"
        return None

    faults = {factor: fault(factor) for factor in sorted(wanted or DEFAULT_FACTORS)}
    fitting = tuple(factor for factor, reason in faults.items() if reason is None)
    if of_base := faults[Fraction(1)]:
        raise ConfigError(
            f"--factors 1: {of_base}; works: --simulate-devices 1, or the devices of the run"
        )
    for factor, reason in faults.items():
        if wanted is not None and reason is not None:
            works = fitting if len(fitting) > 1 else (1, 2)
            raise ConfigError(f"--factors {factor}: {reason}; works: --factors {joined(works)}")
    return fitting


def joined(values: Sequence[object]) -> str:
    """Returns values as text for a flag of the command."""
    return ",".join(map(str, values))
