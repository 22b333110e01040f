"""What a resume changes of its run: keys that differ from the last session's, and the batch on other devices."""

from __future__ import annotations

from collections.abc import Mapping

from ml_collections import ConfigDict

from maxbatch.config.pins import changed_since, is_of_batch, read_written
from maxbatch.config.values import Value
from maxbatch.plan.batch import BatchPlan
from maxbatch.runs.devices import read_devices
from maxbatch.system.errors import ConfigError
from maxbatch.system.storage import AnyPath


def changes_since(run_dir: AnyPath, config: ConfigDict, plan: BatchPlan, samples_seen: int) -> list[str]:
    """Returns lines on what changes with this start of a run; none where nothing does.

    Args:
      run_dir: its folder, in which the last session left `config.yml` and `devices.json`.
      config: the config of this start.
      plan: the plan of this start, from `samples_seen` on.
    """
    before = read_written(run_dir / "config.yml")
    if before is None:
        return []
    lines = changed_since(before, config)
    if not any(map(is_of_batch, lines)) and (line := _batch_line(run_dir, before, plan, samples_seen)):
        return [*lines.values(), line]
    return [*lines.values()]


def _batch_line(run_dir: AnyPath, before: Mapping[str, Value], plan: BatchPlan, samples_seen: int) -> str | None:
    """Returns a line that names the last session's batch if the same keys state another one on these devices."""
    used = read_devices(run_dir)
    if plan.rl is not None or not used:
        return None
    last = used[-1]
    try:
        stated = ConfigDict(dict(before))
        old = BatchPlan.from_config(
            stated, last.num_devices, last.num_hosts,
            num_slices=last.num_slices, samples_per_epoch=plan.samples_per_epoch,
        )  # fmt: skip
    except ConfigError:  # of a version whose rules were others
        return None
    batch = old.manager.batch_size_at(samples_seen)
    if batch == plan.manager.batch_size_at(samples_seen):
        return None
    keeps = f"global_batch_size={batch}"
    if len(old.stages) > 1:
        stages = " ".join(f"{stage.first_sample}:{stage.global_batch_size}" for stage in old.stages)
        keeps = f'enable_rampup_batch_size=false batch_size_schedule="{stages}"'
    return f"the batch was {batch} before; {keeps} keeps it"
