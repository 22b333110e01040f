"""`maxbatch plan`: the whole batch plan of a run, as text or JSON. Imports no JAX."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from maxbatch.commands.arguments import (
    add_config,
    check_at_most,
    config_arguments,
    config_of,
    count,
    real,
)
from maxbatch.config.own_parts import own_parts_of
from maxbatch.config.values import Bounds
from maxbatch.system.errors import ConfigError
from maxbatch.system.terminal.warning import note, warn

if TYPE_CHECKING:
    import numpy as np

    from maxbatch.commands.surviving import SurvivingMachine
    from maxbatch.config.config import Config
    from maxbatch.data.feed.pass_figures import PassFigures
    from maxbatch.plan.batch import BatchPlan, ResumePoint
    from maxbatch.plan.checkpoint_period import CheckpointPeriod
    from maxbatch.system.hardware.chips import Chip, Peak

_MOST_PARTS = 1_000_000
_MOST_EPOCHS = 100  # of the default data, before a plan asks whether it is meant


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--devices", type=count, metavar="N", help="plan for N devices (default 1)")
    parser.add_argument("--hosts", type=count, metavar="H", help="plan for H hosts (default 1)")
    slices, samples = (
        "slices of the devices (default 1)",
        "samples in one pass over data that is not here",
    )
    parser.add_argument("--slices", type=count, metavar="S", default=1, help=slices)
    parser.add_argument("--samples-per-epoch", type=count, metavar="N", help=samples)
    mean = "tokens of a sample on average, for data that is not here (max_tokens_per_pass)"
    parser.add_argument("--mean-length", type=_positive(512), metavar="T", help=mean)
    survive = (
        "show the same batch on every machine down to K slices fewer (hosts, if there is one slice)"
    )
    parser.add_argument("--survive", type=count, metavar="K", help=survive)
    topology = (
        "plan for a TPU slice: v5p:4x4x4, or v5p-128; with --survive also compile for each machine"
    )
    parser.add_argument("--topology", metavar="T", help=topology)
    failures = "print the checkpoint period for F failures a day"
    parser.add_argument("--failures-per-day", type=_positive(4), metavar="F", help=failures)
    save = "seconds that a checkpoint holds training up (default: as measured in run_dir, else 10)"
    parser.add_argument("--save-seconds", type=_positive(10), metavar="S", help=save)
    step = (
        "seconds of a full update of the last stage (default: by compiled_dir, or as measured in "
        "run_dir)"
    )
    time = parser.add_mutually_exclusive_group()
    time.add_argument("--step-seconds", type=_positive(2), metavar="S", help=step)
    share = "assume a share F of the devices' peak, for the days and device-hours of the run"
    within = real(Bounds(above=0, at_most=1), "above 0, at most 1", 0.4)
    time.add_argument("--mfu", type=within, metavar="F", help=share)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--layout", action="store_true", help="show which device gets which sample")
    words = "print the settings of other frameworks for the same batch"
    parser.add_argument("--words", action="store_true", help=words)


def run(args: argparse.Namespace) -> int:
    """Prints the plan of a config; returns the exit code."""
    from maxbatch.commands.update_time import update_time
    from maxbatch.config.rules import check_dataset
    from maxbatch.plan.batch import BatchPlan
    from maxbatch.plan.mesh_shape import MOST_DEVICES, check_divides
    from maxbatch.plan.reproducible import check_whole_fits
    from maxbatch.plan.run_time import run_time
    from maxbatch.plan.stages import check_epochs
    from maxbatch.run.folder.foreign import refuse_foreign
    from maxbatch.system.storage.storage import is_remote

    config = config_of(args, needs=())
    if not is_remote(config.run_dir):  # a plan asks no bucket
        refuse_foreign(config.run_dir)
    own_parts = own_parts_of(config.own_parts)
    recipe = config.recipe
    has_hosts, args.hosts = args.hosts is not None, args.hosts or 1
    check_dataset(config)
    has_devices = args.devices is not None or bool(args.topology)
    if args.topology:
        config = _take_topology(config, args)
    if recipe.is_sampled and not _may_mean_rows(args):
        from maxbatch.kinds.prompt.refusals import check_policy

        check_policy(config.rl, config.prompting, config.compiled_dir)
    check_at_most("--devices", args.devices or 1, MOST_DEVICES)
    check_divides("--hosts ", args.hosts, args.devices or 1)
    check_divides("--slices ", args.slices, args.devices or 1)
    epoch = (
        args.samples_per_epoch
        if "stream" in own_parts
        else _samples_per_epoch(config, args.samples_per_epoch)
    )
    check_epochs(config.plan, epoch)
    devices, slices = args.devices or 1, args.slices
    resume = _loaded_before(config)
    plan = BatchPlan.from_config(
        config, devices, args.hosts, num_slices=slices, samples_per_epoch=epoch, resume=resume
    )
    if args.topology:
        check_whole_fits(config.plan, _chip(args.topology).hbm_bytes, args.topology)
    whole_layout = {"layout": _whole_layout(plan)} if args.json and args.layout else {}
    if args.devices is None:
        note("planned for 1 device and 1 host; --devices N --hosts H plans for another machine")
    if plan.rl and _may_mean_rows(args):
        from maxbatch.around.words.replacing import three_batches

        meant = three_batches(plan.rl.batch_size, args.hosts if has_hosts else None)
        prompts = f"batch_size={plan.rl.batch_size} counts prompts of reinforcement learning"
        note(f"{prompts}; the batch of pre-training is {meant}")
    warnings = [*plan.warnings, *_epochs_of_default_data(config, plan, args.samples_per_epoch)]
    for warning in warnings:
        warn(warning)
    model = {} if "model" in own_parts else _model(config)
    peak = _known_peak(config, args.topology)
    of_update = _trained_tokens(config, plan) if recipe.has_answers else None
    timed = update_time(
        config,
        plan,
        step_seconds=args.step_seconds,
        mfu=args.mfu,
        peak=peak,
        flops_per_token=model.get("flops_per_token"),
        has_devices=has_devices,
    )
    time = run_time(plan, *timed) if timed else None
    period = _checkpoint_period(config, args, timed.update.seconds if timed else None)
    rows = _survival(config, args, plan, epoch) if args.survive else []
    passes = _pass_figures(config, plan, args.mean_length)
    if args.json:
        import json

        unknown = dict.fromkeys(("num_parameters", "num_active_parameters", "flops_per_token"))
        printed = (
            plan.to_dict() | unknown | model | {"mfu_peak": peak and peak._asdict()} | whole_layout
        )
        printed |= time._asdict() if time else {}
        printed["warnings"] = warnings
        if own_parts:
            printed["own_parts"] = own_parts
        if recipe.has_answers:
            printed["trained_tokens_per_step"] = of_update
        if plan.is_packed:
            printed["passes"] = passes and passes._asdict()
        if rows:
            printed["survive"] = [row.to_dict() for row in rows]
        if period:
            printed["checkpointing"] = period._asdict()
        if args.words:
            from maxbatch.plan.frameworks import settings_of

            printed["words"] = [settings._asdict() for settings in settings_of(plan)]
        print(json.dumps(printed, indent=2))
        return 0
    from maxbatch.plan.view import render_frameworks, render_layout, render_plan
    from maxbatch.system.terminal.terminal import PipeConsole

    console = PipeConsole()
    of_own = "\n".join(
        f"{argument}: {name}, which only maxbatch.train can be given"
        for argument, name in own_parts.items()
    )
    of_model = "\n".join(filter(None, (_in_words(model) if model else "", of_own)))
    of_model = f"{of_model}\n{_peak_in_words(peak, config.quantization)}"
    render_plan(plan, config.plan, of_model, console)
    if time and timed:
        console.print(f"\n{time.in_words(timed.num_devices)}", soft_wrap=True)
    if of_update:
        console.print(
            f"\ntrained tokens per update: {of_update['mean']:,.1f} ± {of_update['std']:,.1f} "
            "(mean ± std)"
        )
    if passes:
        console.print(f"\n{passes.in_words()}", soft_wrap=True)
    if rows:
        from maxbatch.commands.surviving import render_survival

        render_survival(rows, console)
    if period:
        from maxbatch.plan.checkpoint_period import in_words

        console.print(f"\n{in_words(period)}", soft_wrap=True)
    if args.layout:
        render_layout(plan, console)
    if args.words:
        render_frameworks(plan, console)
    return 0


def _loaded_before(config: Config) -> ResumePoint:
    """Returns the hosts that wrote and loaded a checkpoint in run_dir, to which e is relative."""
    from maxbatch.config.values import exact
    from maxbatch.plan.batch import NEW_RUN, ResumePoint

    if not 0 < exact(config.expansion_factor_real_data) < 1:
        return NEW_RUN
    from maxbatch.run.folder.position import newest_record
    from maxbatch.system.storage.storage import as_path

    newest = newest_record(as_path(config.run_dir))
    if newest is None:
        return NEW_RUN
    hosts, loading_hosts = newest.hosts
    return ResumePoint(hosts=hosts, loading_hosts=loading_hosts)


def _take_topology(config: Config, args: argparse.Namespace) -> Config:
    """Sets the devices and hosts of the flags' slices.

    Returns:
      The config; with `--survive`, which compiles, with the flags of the chip.
    """
    from maxbatch.run.compile.topology import stated_slice

    sold = stated_slice(args.topology)
    args.topology = str(sold)
    for flag, value in (
        ("--devices", args.devices),
        ("--hosts", args.hosts if args.hosts > 1 else None),
    ):
        if value is not None:
            raise ConfigError(
                f"{flag} {value}: must not be given beside --topology, which has its own; "
                f"works: --topology {args.topology}"
            )
    args.devices, args.hosts = sold.num_devices * args.slices, sold.num_hosts * args.slices
    if args.survive is None:
        return config
    from maxbatch.commands.surviving import topology_machine

    config, machine = topology_machine(config, args.topology, args.slices)
    args.devices, args.hosts = machine.num_devices, machine.num_hosts
    return config


def _survival(
    config: Config, args: argparse.Namespace, plan: BatchPlan, epoch: int | None
) -> list[SurvivingMachine]:
    from maxbatch.commands.surviving import survivors
    from maxbatch.plan.survival import Machine

    machine = Machine(plan.num_devices, plan.num_hosts, args.slices)
    rows = survivors(config, machine, args.survive, epoch, args.topology)
    batches = {row.plan.global_batch_size_to_train_on for row in rows if row.plan}
    if len(batches) > 1:
        warn(
            "the batch is stated per device, so a smaller machine trains on a smaller batch; "
            f"global_batch_size={plan.global_batch_size_to_train_on} keeps it"
        )
    return rows


def _positive(works: float) -> Callable[[str], object]:
    return real(Bounds(1e-6, 1e9), "from 1e-6 to 1e9", works)


def _checkpoint_period(
    config: Config, args: argparse.Namespace, step_seconds: float | None
) -> CheckpointPeriod | None:
    if args.failures_per_day is None:
        if args.save_seconds is not None:
            raise ConfigError(
                f"--save-seconds {args.save_seconds}: must be given beside --failures-per-day; "
                f"works: --save-seconds {args.save_seconds} --failures-per-day 4"
            )
        return None
    from maxbatch.plan.checkpoint_period import period_for
    from maxbatch.run.folder.sessions import mean_seconds, read_sessions
    from maxbatch.system.storage.storage import as_path

    measured = mean_seconds(read_sessions(as_path(config.run_dir)), config.checkpoint_period)
    period = period_for(args.failures_per_day, args.save_seconds, step_seconds, measured)
    if period.save_seconds_source == "assumed":
        note(
            f"a checkpoint is assumed to hold training up for {period.save_seconds:g} s, since "
            f"{config.run_dir} has no sessions to measure it; --save-seconds states it"
        )
    return period


def _may_mean_rows(args: argparse.Namespace) -> bool:
    """Returns whether only an override makes the config one of reinforcement learning."""
    from maxbatch.config.loading import load_config

    path, overrides = config_arguments(args)
    is_overridden = any(re.match(r"\s*batch_size\s*=", text) for text in overrides)
    return is_overridden and (path is None or not load_config(path).recipe.is_sampled)


def _model(config: Config) -> dict[str, int]:
    """Returns the size of the model and its cost, without adapters."""
    from maxbatch.families.matrices import active_model_size, model_size
    from maxbatch.model.flops import model_flops_per_token

    keys = config.model
    return {
        "num_parameters": model_size(keys),
        "num_active_parameters": active_model_size(keys),
        "flops_per_token": model_flops_per_token(config.decoder),
    }


def _in_words(model: dict[str, int]) -> str:
    size, active = model["num_parameters"], model["num_active_parameters"]
    of_token = f", {active:,} of them active per token" if active != size else ""
    return (
        f"model: {size:,} parameters{of_token}; {model['flops_per_token']:,} FLOPs per token of "
        "training"
    )


def _chip(topology: str) -> Chip:
    """Returns the chip of a slice."""
    from maxbatch.system.hardware.chips import TPUS

    return TPUS[topology.partition(":")[0]]


def _known_peak(config: Config, topology: str | None) -> Peak | None:
    """Returns the peak that MFU refers to, if the topology or the config tells it."""
    from maxbatch.system.hardware.chips import mfu_peak

    chip = _chip(topology) if topology else None
    return mfu_peak(chip, config.quantization, config.peak_tflops_per_device)


def _peak_in_words(peak: Peak | None, quantization: str) -> str:
    if peak:
        return f"MFU refers to {peak.in_words()}"
    where = (
        f"{quantization} peak, or bfloat16's if its chip has none"
        if quantization
        else "bfloat16 peak"
    )
    return f"MFU refers to the device's {where}"


def _samples_per_epoch(config: Config, samples: int | None) -> int | None:
    """Returns the samples of an epoch, if they are stated or known without reading data.

    The stream and NumPy are imported only if the cache does not know, which keeps a plan
    fast.
    """
    from maxbatch.config.sections import STORES
    from maxbatch.data.store.cache_folder import cache_folder

    may_be_mixture = bool(config.dataset_path or config.eval_dataset_path)
    may_be_cached = (
        config.dataset_type in ("synthetic", *STORES)
        or cache_folder(config.data_cache_dir).is_dir()
    )
    if not may_be_mixture and (samples or not may_be_cached):
        return samples
    from maxbatch.data.stream.epoch_lengths import remembered_length

    known = config.stream
    if (remembered := remembered_length(known)) is not None:
        return samples or remembered
    from maxbatch.data.stream.sources import samples_per_epoch_if_cached

    cached = samples_per_epoch_if_cached(known)  # also refuses a mixture that training would refuse
    return samples or cached


def _epochs_of_default_data(config: Config, plan: BatchPlan, samples: int | None) -> list[str]:
    """Returns a warning about many epochs of the default data: the run's own data was not
    stated.
    """
    is_default = (
        config.dataset_type == "python_stdlib" and not config.dataset_path and samples is None
    )
    if (
        not is_default
        or plan.epochs is None
        or plan.samples_per_epoch is None
        or plan.epochs <= _MOST_EPOCHS
    ):
        return []
    size = f"{plan.samples_per_epoch:,} samples"
    return [
        f"the run takes {plan.epochs:,.0f} epochs of dataset_type=python_stdlib, the default data "
        f"of {size}; state dataset_type and dataset_path, or --samples-per-epoch N for data that "
        "is not here"
    ]


def _trained_tokens(config: Config, plan: BatchPlan) -> dict[str, float] | None:
    from maxbatch.data.stream.sources import trained_tokens_if_cached
    from maxbatch.data.stream.trained_tokens import trained_tokens_of_update

    trained = trained_tokens_if_cached(config.stream)
    return (
        trained_tokens_of_update(trained, plan.global_batch_size_to_train_on) if trained else None
    )


def _pass_figures(config: Config, plan: BatchPlan, mean: float | None) -> PassFigures | None:
    """Returns the passes that lengths of the data, or of a mean, give; None if neither is known."""
    length = config.max_target_length
    if not plan.is_packed:
        if mean is not None:
            raise ConfigError(
                f"--mean-length {mean:g}: must be given beside max_tokens_per_pass, whose passes "
                f"it estimates; works: --mean-length {mean:g} max_tokens_per_pass={length} "
                f"global_batch_size={plan.global_batch_size_to_train_on}"
            )
        return None
    from maxbatch.data.feed.pass_figures import lengths_of_mean, num_lengths, pass_figures
    from maxbatch.data.stream.sources import lengths_if_cached

    batch, budget = plan.global_batch_size_to_train_on, config.max_tokens_per_pass
    assert budget is not None, "it packs"
    if mean is not None and mean > plan.slots_per_sample:
        raise ConfigError(
            f"--mean-length {mean:g}: must be at most the {plan.slots_per_sample} slots of a "
            f"sample; works: --mean-length {plan.slots_per_sample}"
        )
    count = num_lengths(batch)
    if mean is not None:
        rows = config.recipe.rows_per_sample
        drawn = lengths_of_mean(mean / rows, length, rows * count)
        lengths: np.ndarray | None = drawn.reshape(count, rows)
    else:  # those of responses are not known
        lengths = None if plan.rl else lengths_if_cached(config.stream, count)
    if lengths is None or not lengths.any():
        return None
    if plan.rl:
        batch //= plan.rl.num_minibatches
    return pass_figures(lengths, batch, length, budget // length, plan.num_devices)


def _whole_layout(plan: BatchPlan) -> list[list[tuple[int, int]]] | None:
    if plan.is_packed:  # rows follow from lengths
        return None
    shards = plan.gradient_accumulation_steps * plan.batch_shards
    if shards > _MOST_PARTS:
        rule = f"prints every part of an update with --layout, and there are {shards}"
        works = "works: --layout without --json, which draws the first and the last"
        raise ConfigError(f"--json: {rule}; they must be at most {_MOST_PARTS}; {works}")
    return plan.layout()
