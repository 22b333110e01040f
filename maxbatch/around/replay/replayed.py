"""One update of a run, taken again: its figures, its samples, and where it differs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax

from maxbatch.around.replay.comparison import Compared, computes_exactly
from maxbatch.around.replay.recorded_run import RecordedRun
from maxbatch.around.replay.sample_gradients import Sample, samples
from maxbatch.around.replay.updates import Before, updates


class Replayed(NamedTuple):
    """An update that was taken again."""

    update: Compared
    samples: list[Sample]  # in the order of the stream, or by their share, the largest first
    differences: list[str]  # from the recorded updates up to this one, in words
    start: str  # what it was taken again from

    def to_json(self) -> dict[str, object]:
        """Returns the object of `maxbatch replay --json`."""
        return {
            **self.update._asdict(),
            "samples": [dataclasses.asdict(sample) for sample in self.samples],
        }


def replay(
    run: RecordedRun,
    checkpoint: int | None,
    step: int,
    top: int | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> Replayed:
    """Takes the updates of a run from a checkpoint to `step` again.

    Args:
      checkpoint: its step; None: the first parameters.
      top: the number of samples to keep, those with the largest share; None: all.
      devices: those to compute on; None: all at hand.

    Raises:
      ConfigError: the run, its data or the checkpoint cannot be used.
    """
    differences, found = [], list[Sample]()
    is_exact = computes_exactly(run.config)
    for update in updates(run, checkpoint, step, devices or jax.devices()):
        if isinstance(update, Before):
            if update.planned.step == step:
                found = list(samples(update))
            continue
        compared = Compared.of(update, run.line(update.planned.step))
        if difference := compared.difference(is_exact):
            differences.append(f"update {compared.step} differs: {difference}")
    if top is not None:
        found = sorted(found, key=_share, reverse=True)[:top]
    start = "the first parameters" if checkpoint is None else f"checkpoint {checkpoint}"
    return Replayed(compared, found, differences, start)


def _share(sample: Sample) -> float:
    return float("-inf") if sample.share is None else sample.share
