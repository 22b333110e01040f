"""The devices and the batch plan of a reported run, and the keys in which configs differ, as tables."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from maxbatch.commands.report.runs import ReportedRun
from maxbatch.config.loading import keys, load_config
from maxbatch.data.stream.sources import samples_per_epoch_if_cached
from maxbatch.data.stream.stream_config import StreamConfig
from maxbatch.pages.page import details, heading, paragraph, table
from maxbatch.plan.batch import BatchPlan
from maxbatch.plan.view import equation
from maxbatch.runs.devices import DevicesUsed
from maxbatch.system.errors import ConfigError

_STAGES = {
    "from sample": "first_sample", "from step": "first_step", "steps": "num_steps", "samples": "num_samples",
    "p": "per_device_batch_size", "g": "gradient_accumulation_steps", "micro": "micro_batch_size_to_train_on",
    "global": "global_batch_size", "lr scale": "learning_rate_scale",
}  # fmt: skip
_MOST_STAGES = 200


def plan_of(run: ReportedRun, is_open: bool) -> str:
    """Returns the devices of a run, its batch plan there and its table of stages, under a fold, as HTML."""
    if run.config is None:
        return ""
    parts = [_devices_table(run.devices)] if run.devices else []
    now = run.devices[-1] if run.devices else DevicesUsed(1, "", 1, 1, 1, {})
    try:
        plan = BatchPlan.from_config(
            run.config, now.num_devices, now.num_hosts, num_slices=now.num_slices,
            samples_per_epoch=samples_per_epoch_if_cached(StreamConfig.of(run.config)),
        )  # fmt: skip
    except ConfigError as error:
        return details(run.name, *parts, paragraph(f"cannot be planned here: {error}"), is_open=is_open)
    parts.append(paragraph(equation(plan)))
    if not run.devices:
        parts.append(paragraph("Planned for 1 device: the run did not record its devices. The global batch and the "
                               "steps are the same on any number."))  # fmt: skip
    found = plan.to_dict()
    stages = found.pop("stages")
    rows = [[i, *(stage[key] for key in _STAGES.values())] for i, stage in enumerate(stages[:_MOST_STAGES])]
    parts.append(table(("stage", *_STAGES), rows))
    if len(stages) > _MOST_STAGES:
        parts.append(paragraph(f"The first {_MOST_STAGES} of {len(stages)} stages."))
    numbers = [[name, value] for name, value in found.items() if name != "warnings"]
    half = -(-len(numbers) // 2)
    pairs = itertools.zip_longest(numbers[:half], numbers[half:], fillvalue=["", ""])
    parts.append(table(("",) * 4, [[*left, *right] for left, right in pairs]))
    return details(run.name, *parts, is_open=is_open)


def _devices_table(history: Sequence[DevicesUsed]) -> str:
    rows = [
        [used.first_step, used.device_kind, used.num_devices, used.num_hosts, used.num_slices,
         ", ".join(f"{axis} {size}" for axis, size in used.mesh.items() if size > 1) or "one device"]
        for used in history
    ]  # fmt: skip
    return table(("from step", "device", "devices", "hosts", "slices", "mesh"), rows)


def config_differences(runs: Sequence[ReportedRun]) -> str:
    """Returns the keys in which the runs' configs differ, for one run those that differ from base.yml, as HTML."""
    configs = [(run.name, run.config) for run in runs if run.config is not None]
    title = "where the runs differ"
    if len(configs) == 1:
        title, configs = "where it differs from base.yml", [("base.yml", load_config()), *configs]
    texts = {
        name: [key.write(config[name]) for _, config in configs] for name, key in keys().items() if name != "run_dir"
    }
    rows = [[name, *values] for name, values in texts.items() if len(set(values)) > 1]
    found = table(["key", *(name for name, _ in configs)], rows) if rows else paragraph("No key differs.")
    return heading(f"Config, {title}") + found if configs else ""
