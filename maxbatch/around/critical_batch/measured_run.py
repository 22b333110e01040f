"""The run that is measured: its config, its updates and its checkpoints, read from its folder."""

from __future__ import annotations

import dataclasses

from maxbatch.config.config import Config
from maxbatch.config.loading import load_config
from maxbatch.config.own_parts import refuse_own_parts
from maxbatch.plan.rampup import RampupBatchManager
from maxbatch.plan.stages import stated_stages
from maxbatch.run.folder.metrics import Record, read_metrics
from maxbatch.run.folder.metrics_schema import Metric
from maxbatch.run.folder.old_forms import is_old, refuse_old_run
from maxbatch.run.folder.position import (
    CheckpointRecord,
    DamagedError,
    committed_steps,
    read_record,
)
from maxbatch.run.folder.run_folder import config_file
from maxbatch.system.errors import ConfigError
from maxbatch.system.storage.storage import AnyPath


@dataclasses.dataclass(frozen=True)
class Fork:
    """A checkpoint that branches start from."""

    step: int  # updates done there; names the checkpoint
    samples_seen: int
    batch_size: int  # samples of the run's next update there
    learning_rate: float  # of that update
    # of the checkpoint's arrays; tells it from the checkpoint of another run in the same folder
    checksum: int


@dataclasses.dataclass(frozen=True)
class MeasuredRun:
    path: AnyPath
    config: Config
    records: list[Record]  # its updates
    checkpoints: dict[int, CheckpointRecord]  # committed checkpoints, by step
    num_devices: int  # of the branches

    @classmethod
    def read(cls, path: AnyPath, num_devices: int) -> MeasuredRun:
        config, records = load_config(str(config_file(path))), read_metrics(path)
        refuse_own_parts(config.own_parts)
        if config.recipe.is_sampled:
            raise ConfigError(
                f"{path}: a run of maxbatch rl, whose batch counts prompts; only runs of maxbatch "
                "train are measured"
            )
        if not records:
            raise ConfigError(f"{path}: this run has made no update yet; train it first")
        refuse_old_run(path)
        stored = {step: _read_checkpoint(path, step) for step in reversed(committed_steps(path))}
        checkpoints = {step: record for step, record in stored.items() if record is not None}
        return cls(path, config, records, checkpoints, num_devices)

    @property
    def samples_seen(self) -> int:
        seen: int = self.records[-1][Metric.SAMPLES_SEEN]
        return seen

    @property
    def total_samples(self) -> int | None:
        """Samples of the whole run; None if its length is stated in epochs."""
        state = {"step": self.records[-1][Metric.STEP], "samples_seen": self.samples_seen}
        return RampupBatchManager.from_state(
            self.config.plan, state, self.num_devices
        ).total_samples

    @property
    def first_batch_size(self) -> int:
        size: int = self.records[0][Metric.GLOBAL_BATCH_SIZE]
        return size

    @property
    def reference_batch_size(self) -> int:
        """The batch for which `learning_rate` is the peak."""
        stages = stated_stages(self.config.plan, self.num_devices)
        last = int(stages[-1].batch) if len(stages) > 1 else self.first_batch_size
        return self.config.reference_batch_size or last

    def scale(self, batch_size: int, scaling: str) -> float:
        """Returns the factor on the learning rate that a rule gives a batch."""
        settings = (
            f"global_batch_size={batch_size}",
            f"learning_rate_scaling={scaling}",
            f"reference_batch_size={self.reference_batch_size}",
            f"train_samples={batch_size}",
        )
        config = load_config(str(self.path / "config.yml"), settings)
        return (
            RampupBatchManager.from_config(config, self.num_devices).stages[0].learning_rate_scale
        )

    def fork_at(self, step: int) -> Fork:
        """Returns the fork at a checkpoint, with batch and rate of the next update, or of the last
        one.
        """
        index = next(
            (i for i, record in enumerate(self.records) if record[Metric.STEP] == step), None
        )
        if index is None:
            raise ConfigError(
                f"{self.path}: metrics.jsonl holds no update {step}, but there is a checkpoint of "
                "it"
            )
        at = self.records[min(index + 1, len(self.records) - 1)]
        # a run's last update may be a partial one
        near = self.records[max(0, index - 1) : index + 2]
        batches = [
            record[Metric.GLOBAL_BATCH_SIZE]
            for record in near
            if record[Metric.STAGE] == at[Metric.STAGE]
        ]
        saved = self.checkpoints[step]
        return Fork(
            step,
            saved.position.samples_seen,
            max(batches),
            at[Metric.LEARNING_RATE],
            saved.checksum,
        )


def _read_checkpoint(path: AnyPath, step: int) -> CheckpointRecord | None:
    """Returns the record of a checkpoint; None if the run, which still trains, has just
    removed it, or if it is in an old form.
    """
    folder = path / "checkpoints" / str(step)
    try:
        return None if is_old(folder) else read_record(folder)
    except DamagedError as error:
        if folder.exists():
            raise ConfigError(f"{folder}: cannot be forked ({error}); move it away") from None
        return None
