"""An update that was taken again, beside the line that the run recorded of it."""

from __future__ import annotations

from typing import NamedTuple

from maxbatch.config.config import Config
from maxbatch.run.folder.json_file import finite
from maxbatch.run.folder.metrics import Record
from maxbatch.run.folder.metrics_schema import Metric

TOLERANCE = 2e-4  # of a loss or norm in float32: absolute up to 1, relative above


class Compared(NamedTuple):
    """The figures of an update, taken again and recorded; a number that is not finite is None."""

    step: int
    loss: float | None
    recorded_loss: float | None
    grad_norm: float | None
    recorded_grad_norm: float | None
    data_fingerprint: str
    recorded_data_fingerprint: str

    @classmethod
    def of(cls, taken: Record, recorded: Record) -> Compared:
        """Compares the line of an update that was taken again with that of the run."""
        return cls(
            taken[Metric.STEP],
            finite(taken[Metric.LOSS]),
            recorded[Metric.LOSS],
            finite(taken[Metric.GRAD_NORM]),
            recorded.get(Metric.GRAD_NORM),
            taken[Metric.DATA_FINGERPRINT],
            str(recorded.get(Metric.DATA_FINGERPRINT)),
        )

    def difference(self, is_exact: bool) -> str | None:
        """Returns the differences beyond rounding, in words; None if there are none.

        Args:
          is_exact: whether the run computes in float32, so that layouts differ by little.
        """
        if self.data_fingerprint != self.recorded_data_fingerprint:
            return (
                f"data_fingerprint {self.data_fingerprint}, recorded "
                f"{self.recorded_data_fingerprint}"
            )
        pairs = {
            "loss": (self.loss, self.recorded_loss),
            "grad_norm": (self.grad_norm, self.recorded_grad_norm),
        }
        for name, (computed, recorded) in pairs.items():
            if is_exact and not _is_close(computed, recorded):
                return f"{name} {computed}, recorded {recorded}"
        return None


def computes_exactly(config: Config) -> bool:
    """Returns whether the layouts of a run differ by rounding of float32 alone."""
    return config.dtype == config.weight_dtype == "float32" and not config.quantization


def _is_close(computed: float | None, recorded: float | None) -> bool:
    if computed is None or recorded is None:
        return computed is recorded
    return abs(computed - recorded) <= TOLERANCE * max(1.0, abs(recorded))
