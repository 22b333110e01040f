"""The devices and the batch plan of a reported run, and the keys in which configs differ, as tables."""

from __future__ import annotations

from collections.abc import Sequence

from ml_collections import ConfigDict

from maxbatch.commands.report.runs import ReportedRun
from maxbatch.config.loading import keys, load_config
from maxbatch.data.stream.sources import samples_per_epoch_if_cached
from maxbatch.pages.page import Page, paragraph, table
from maxbatch.plan.batch import BatchPlan
from maxbatch.plan.view import equation
from maxbatch.runs.devices import DevicesUsed
from maxbatch.system.errors import ConfigError

_STAGE_HEADS = (
    "stage", "from sample", "from step", "steps", "samples", "p", "g", "micro", "global", "lr scale",
)  # fmt: skip
_STAGE_KEYS = (
    "first_sample", "first_step", "num_steps", "num_samples", "per_device_batch_size",
    "gradient_accumulation_steps", "micro_batch_size_to_train_on", "global_batch_size", "learning_rate_scale",
)  # fmt: skip
_MOST_STAGES = 200
_NOT_COMPARED = ("run_dir",)


def add_plan(page: Page, run: ReportedRun, is_open: bool) -> None:
    """Adds what a run trained on, its batch plan there and its table of stages, under a fold."""
    if run.config is None:
        return
    parts = [_devices_table(run.devices)] if run.devices else []
    now = run.devices[-1] if run.devices else DevicesUsed(1, "", 1, 1, 1, {})
    try:
        plan = BatchPlan.from_config(
            run.config, now.num_devices, now.num_hosts, num_slices=now.num_slices,
            samples_per_epoch=samples_per_epoch_if_cached(run.config),
        )  # fmt: skip
    except ConfigError as error:
        page.details(run.name, *parts, paragraph(f"cannot be planned here: {error}"), is_open=is_open)
        return
    parts.append(paragraph(equation(plan)))
    if not run.devices:
        parts.append(paragraph("Planned for 1 device: the run did not record its devices. The global batch and the "
                               "steps are the same on any number."))  # fmt: skip
    found = plan.to_dict()
    stages = found.pop("stages")
    rows = [[i, *(stage[key] for key in _STAGE_KEYS)] for i, stage in enumerate(stages[:_MOST_STAGES])]
    parts.append(table(_STAGE_HEADS, rows))
    if len(stages) > _MOST_STAGES:
        parts.append(paragraph(f"The first {_MOST_STAGES} of {len(stages)} stages."))
    numbers = [[name, value] for name, value in found.items() if name != "warnings"]
    half = -(-len(numbers) // 2)
    padded = [*numbers[half:], *[["", ""]] * (2 * half - len(numbers))]
    parts.append(table(("",) * 4, [[*a, *b] for a, b in zip(numbers[:half], padded, strict=True)]))
    page.details(run.name, *parts, is_open=is_open)


def _devices_table(history: Sequence[DevicesUsed]) -> str:
    rows = [
        [used.first_step, used.device_kind, used.num_devices, used.num_hosts, used.num_slices,
         ", ".join(f"{axis} {size}" for axis, size in used.mesh.items() if size > 1) or "one device"]
        for used in history
    ]  # fmt: skip
    return table(("from step", "device", "devices", "hosts", "slices", "mesh"), rows)


def add_config_differences(page: Page, runs: Sequence[ReportedRun]) -> None:
    """Adds the keys in which the runs' configs differ; for one run, in which it differs from base.yml."""
    configs = [(run.name, run.config) for run in runs if run.config is not None]
    if not configs:
        return
    if len(configs) == 1:
        page.heading("Config, where it differs from base.yml")
        rows = _differences([("base.yml", load_config()), configs[0]])
    else:
        page.heading("Config, where the runs differ")
        rows = _differences(configs)
    if not rows:
        page.paragraph("No key differs.")
        return
    heads = ["base.yml", configs[0][0]] if len(configs) == 1 else [name for name, _ in configs]
    page.table(["key", *heads], rows)


def _differences(configs: Sequence[tuple[str, ConfigDict]]) -> list[list[str]]:
    rows = []
    for name, key in keys().items():
        texts = [key.write(config[name]) for _, config in configs]
        if len(set(texts)) > 1 and name not in _NOT_COMPARED:
            rows.append([name, *texts])
    return rows
