"""The batch plan of a reported run, and what the configs of several runs differ in, as tables."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from ml_collections import ConfigDict

from maxbatch.commands.report.runs import ReportedRun
from maxbatch.config.loading import keys, load_config
from maxbatch.config.values import exact
from maxbatch.data.stream.epoch_length import samples_per_epoch_if_cached
from maxbatch.pages.page import Page, paragraph, table
from maxbatch.plan.batch import BatchPlan
from maxbatch.plan.view import equation
from maxbatch.system.errors import ConfigError

_STAGE_HEADS = (
    "stage",
    "from sample",
    "from step",
    "steps",
    "samples",
    "p",
    "g",
    "micro",
    "global",
    "lr scale",
)
_STAGE_KEYS = (
    "first_sample", "first_step", "num_steps", "num_samples", "per_device_batch_size",
    "gradient_accumulation_steps", "micro_batch_size_to_train_on", "global_batch_size", "learning_rate_scale",
)  # fmt: skip
_MOST_STAGES = 200
_NOT_COMPARED = ("run_dir",)


def add_plan(page: Page, run: ReportedRun, is_open: bool) -> None:
    """Add a run's batch plan and its table of stages, under a fold."""
    if run.config is None:
        return
    try:
        devices = devices_of(run)
        plan = BatchPlan.from_config(
            run.config, devices or 1, samples_per_epoch=samples_per_epoch_if_cached(run.config)
        )
    except ConfigError as error:
        page.details(run.name, paragraph(f"cannot be planned here: {error}"), is_open=is_open)
        return
    parts = [paragraph(equation(plan))]
    if devices is None:
        parts.append(paragraph("Planned for 1 device: the run's metrics do not tell how many it had. The global "
                               "batch and the steps are the same on any number."))  # fmt: skip
    found = plan.to_dict()
    stages = found.pop("stages")
    rows = [[i, *(stage[key] for key in _STAGE_KEYS)] for i, stage in enumerate(stages[:_MOST_STAGES])]
    parts.append(table(_STAGE_HEADS, rows))
    if len(stages) > _MOST_STAGES:
        parts.append(paragraph(f"The first {_MOST_STAGES} of {len(stages)} stages."))
    numbers = [[name, value] for name, value in found.items() if name != "warnings"]
    half = -(-len(numbers) // 2)
    padded = [*numbers[half:], *[["", ""]] * (2 * half - len(numbers))]
    parts.append(table(("", "", "", ""), [[*a, *b] for a, b in zip(numbers[:half], padded, strict=True)]))
    page.details(run.name, *parts, is_open=is_open)


def devices_of(run: ReportedRun) -> int | None:
    """Return how many devices a run had, where its batch tells: B = p x devices x g, with p and g stated."""
    config = run.config
    if config is None or not run.records:
        return None
    if any(config[name] is not None for name in ("global_batch_size", "batch_size_schedule", "batch_size")):
        return None
    first = run.records[0]
    p = exact(
        config.per_device_batch_size_start
        if config.enable_rampup_batch_size
        else config.per_device_batch_size
    )
    devices = Fraction(first["global_batch_size"]) / (p * (config.gradient_accumulation_steps or 1))
    is_first_stage = first["stage"] == 0 and len(run.records) > 1
    return int(devices) if is_first_stage and devices.denominator == 1 else None


def add_config_differences(page: Page, runs: Sequence[ReportedRun]) -> None:
    """Add what the runs' configs differ in; for one run, in what it differs from base.yml."""
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
        page.paragraph("In nothing.")
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
