"""Changes by a resume: keys and files that differ from the last session's, and the batch on other
devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress

from maxbatch.config.combined import PlanConfig
from maxbatch.config.config import Config
from maxbatch.config.pins import THE_CUT, changed_since, read_written, states_batch
from maxbatch.config.sections import KEYS, THE_BATCH
from maxbatch.config.values import Value, shown, value_text
from maxbatch.plan.batch import BatchPlan
from maxbatch.plan.skip_samples import holes_of
from maxbatch.plan.stages import data_end
from maxbatch.run.folder.devices import read_devices
from maxbatch.run.folder.run_id import RunIdentity
from maxbatch.run.folder.sessions import Changed
from maxbatch.system.errors import ConfigError
from maxbatch.system.storage.storage import AnyPath

_OF_A_START = ("run_dir", "overwrite_run")  # keys of one start, not of the updates


def changes_since(
    run_dir: AnyPath, config: Config, plan: BatchPlan, samples_seen: int
) -> list[str]:
    """Returns a line per change with this start of a run.

    Args:
      run_dir: its folder, with the last session's `config.yml` and `devices.json`.
    """
    before = read_written(run_dir / "config.yml")
    if before is None:
        return []
    old = _plan_before(run_dir, before.plan, plan)
    same = old is not None and _same_batches(old, plan, samples_seen)
    lines = changed_since(before, config, THE_CUT if same else THE_BATCH)
    changes = list(lines.values())
    if old and not same and not any(map(states_batch, lines)):
        changes.append(_batch_line(old, samples_seen))
    changes += _length_line(before.plan, config.plan, plan)
    return changes


def keys_changed(run_dir: AnyPath, config: Mapping[str, Value]) -> Changed | None:
    """Returns the keys whose values differ from those of the last session, for `sessions.jsonl`.

    The folder itself is no change: a moved run is the same run. None: `config.yml` cannot be read.
    """
    written = run_dir / "config.yml"
    if not written.is_file():
        return {}  # a new run
    before = read_written(written)
    if before is None:
        return None
    return {
        name: [None if keys[name] is None else value_text(keys[name]) for keys in (before, config)]
        for name in KEYS
        if before[name] != config[name] and name not in _OF_A_START
    }


def changed_reads(before: RunIdentity, reads: Mapping[str, str]) -> list[str]:
    """Returns a line about inputs with other content than in the last session; empty if there are
    none.

    Args:
      before: the run's identity after the last session.
    """
    now = before.reading(reads).reads
    changed = [name for name in reads if before.reads.get(name, now[name]) != now[name]]
    return [f"changed since the last session: {'; '.join(changed)}"] if changed else []


def changed_software(before: RunIdentity, software: Mapping[str, str]) -> list[str]:
    """Returns a line for each version or setting that differs from the last session's."""
    return [
        f"{name}: {shown(before.software[name]) or '(none)'} before, {shown(now) or '(none)'} now: "
        "changes programs, and updates by rounding"
        for name, now in software.items()
        if name in before.software and before.software[name] != now
    ]


def _plan_before(run_dir: AnyPath, before: PlanConfig, plan: BatchPlan) -> BatchPlan | None:
    """Returns the last session's plan of the batch; None if prompts state it, or if unknown."""
    used = read_devices(run_dir)
    if plan.rl is not None or not used:
        return None
    last = used[-1]
    epoch = plan.samples_per_epoch
    try:
        return BatchPlan.from_config(
            before.replaced({"skip_samples": ""}),  # its file may be gone
            last.num_devices,
            last.num_hosts,
            num_slices=last.num_slices,
            samples_per_epoch=epoch,
        )
    except ConfigError:  # from a version with other rules
        return None


def _length_line(before: PlanConfig, config: PlanConfig, plan: BatchPlan) -> Iterator[str]:
    """Yields a line on the samples of the run, if other holes change a length in epochs."""
    if config.length.num_epochs is None or plan.samples_per_epoch is None:
        return
    with suppress(ConfigError):  # the file of the former holes is gone
        holes = holes_of(before, is_kept=False)
        end = data_end(config, plan.samples_per_epoch, holes)
        if end != plan.manager.data_end:
            yield f"the run ends after {plan.manager.data_end} samples; it was to end after {end}"


def _same_batches(old: BatchPlan, new: BatchPlan, samples_seen: int) -> bool:
    """Returns whether two plans have the same batches from a position on."""
    begins = {stage.first_sample for plan in (old, new) for stage in plan.stages}
    positions = {samples_seen, *(begin for begin in begins if begin > samples_seen)}
    return all(
        old.manager.batch_size_at(position) == new.manager.batch_size_at(position)
        for position in positions
    )


def _batch_line(old: BatchPlan, samples_seen: int) -> str:
    """Returns a line on the last session's batch, if the same keys state another batch on these
    devices.
    """
    batch = old.manager.batch_size_at(samples_seen)
    keeps = f"global_batch_size={batch}"
    if len(old.stages) > 1:
        stages = " ".join(f"{stage.first_sample}:{stage.global_batch_size}" for stage in old.stages)
        keeps = f'enable_rampup_batch_size=false batch_size_schedule="{stages}"'
    return f"the batch was {batch} before; {keeps} keeps it"
