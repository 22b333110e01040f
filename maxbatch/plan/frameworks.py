"""A plan in other frameworks' words: the settings there that give the same update.
`docs/batch-size.md` explains them.

R data-parallel replicas (`batch_shards`), N devices, M micro-batch, g accumulation steps, B = M x g
global batch, m pipeline microbatches. Where a model spans several devices, the other frameworks
count replicas, not devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from maxbatch.config.values import plain_number, schedule_text
from maxbatch.plan.batch import BatchPlan
from maxbatch.plan.rampup import Stage
from maxbatch.plan.rl_batch import RLBatch


class FrameworkSettings(NamedTuple):
    """The settings of one framework for the batch of a plan."""

    framework: str
    settings: str  # the settings, by the framework's own names
    update: str  # its name for the samples of one update, and their number
    # ways to write the stages; empty if the batch is constant or cannot ramp
    ramp: tuple[str, ...] = ()


def settings_of(plan: BatchPlan) -> tuple[FrameworkSettings, ...]:
    """Returns the settings of each framework for a plan from the start of its run; for a ramp, its
    last stage.
    """
    replicas, g = plan.batch_shards, plan.gradient_accumulation_steps
    batch, micro = plan.global_batch_size_to_train_on, plan.micro_batch_size_to_train_on
    rows = micro // replicas
    divided = f", {g} x backward(loss / {g}) per step()" if g > 1 else ""
    strategy = f"BATCH_SIZE_PER_REPLICA={rows} GLOBAL_BATCH_SIZE={micro}"
    strategy += f" gradient_accumulation_steps={g}" if g > 1 else ""
    global_batch = f"GLOBAL_BATCH_SIZE x {g}={batch}" if g > 1 else f"GLOBAL_BATCH_SIZE={batch}"
    keras = f"fit(batch_size={micro})" + (f" gradient_accumulation_steps={g}" if g > 1 else "")
    trainer = f"per_device_train_batch_size={rows} gradient_accumulation_steps={g}"
    axolotl = f"micro_batch_size: {rows}, gradient_accumulation_steps: {g}"

    if plan.rl:
        return _of_prompts(plan, plan.rl)
    if _is_padded(plan) or plan.is_packed:
        return (_maxbatch(plan),)  # no other framework pads a batch, or packs it as this one
    return (
        _maxbatch(plan),
        FrameworkSettings(
            "PyTorch DDP", f"DataLoader(batch_size={rows}){divided}", f"batch={batch}"
        ),
        FrameworkSettings(
            "PyTorch DataParallel", f"DataLoader(batch_size={micro}){divided}", f"batch={batch}"
        ),
        FrameworkSettings("Keras fit", keras, global_batch),
        FrameworkSettings("TensorFlow MirroredStrategy", strategy, global_batch),
        FrameworkSettings("Hugging Face Trainer", trainer, f"total train batch size={batch}"),
        FrameworkSettings("Axolotl", axolotl, f"total batch size={batch}"),
        _deepspeed(plan),
        _megatron(plan),
        _nemo(plan),
        _maxtext(plan),
    )


def _of_prompts(plan: BatchPlan, rl: RLBatch) -> tuple[FrameworkSettings, ...]:
    """Returns the settings for a batch of prompts; `docs/rl.md` explains them.

    verl's mini-batch counts prompts. If the plan has filtered groups, mini-batches or sampling
    ahead, frameworks without a setting for them are left out.
    """
    group, iterations = rl.num_generations, rl.num_iterations
    pairs = rl.minibatch_size * group  # of an update
    rows = rl.micro_batch_size // plan.batch_shards  # of a replica in one pass
    passes = f"gradient_accumulation_steps={rl.chunks_per_update}"
    sizes = f"batch_size={rl.batch_size} num_generations={group} num_iterations={iterations}"
    if rl.off_policy_steps:
        sizes += f" off_policy_steps={rl.off_policy_steps}"
    chunks = (
        f"train_micro_batch_size={rl.train_micro_batch_size} "
        f"rollout_micro_batch_size={rl.rollout_micro_batch_size}"
    )
    of_generation = (
        f" steps_per_generation={rl.num_micro_batches}" if rl.num_minibatches > 1 else ""
    )
    trl = (
        f"per_device_train_batch_size={rows} {passes}{of_generation} num_generations={group} "
        f"num_iterations={iterations}"
    )
    axolotl = (
        f"micro_batch_size: {rows}, {passes.replace('=', ': ')}, trl.num_generations: {group}, "
    )
    actor = "actor_rollout_ref.actor.ppo_"
    verl = (
        f"data.train_batch_size={rl.batch_size} actor_rollout_ref.rollout.n={group} "
        f"{actor}mini_batch_size={rl.minibatch_size} {actor}micro_batch_size_per_gpu={rows} "
        f"{actor}epochs={iterations}"
    )

    settings = f"{sizes} micro_batch_size={rl.micro_batch_size}"
    if rl.max_tokens_per_pass is not None:
        settings = f"{sizes} max_tokens_per_pass={rl.max_tokens_per_pass}"
    settings += f" num_minibatches={rl.num_minibatches}" if rl.num_minibatches > 1 else ""
    most = rl.max_prompts_per_batch
    settings += f" filter_groups=true max_prompts_per_batch={most}" if most else ""
    update = (
        f"effective_batch_size / {rl.num_minibatches}"
        if rl.num_minibatches > 1
        else "effective_batch_size"
    )
    settings += " batch_padding=true" if _is_padded(plan) else ""

    frameworks = [FrameworkSettings("maxbatch", settings, f"{update}={pairs}")]
    if _is_padded(plan) or plan.is_packed:
        return tuple(frameworks)  # no other framework pads a batch, or packs it as this one
    if rl.num_minibatches == 1 and not most:
        frameworks.append(FrameworkSettings("MaxText", f"{sizes} {chunks}", f"pairs={pairs}"))
    if not rl.off_policy_steps and not most:
        frameworks.append(FrameworkSettings("TRL GRPO", trl, f"completions={pairs}"))
    if not rl.off_policy_steps and not most and rl.num_minibatches == 1:
        words = f"{axolotl}trl.num_iterations: {iterations}"
        frameworks.append(FrameworkSettings("Axolotl (rl: grpo)", words, f"completions={pairs}"))
    if not rl.off_policy_steps and (not most or most % rl.batch_size == 0):
        # verl bounds whole batches of prompts, so only such a bound has a setting there
        filters = "algorithm.filter_groups."
        verl += (
            f" {filters}enable=true {filters}max_num_gen_batches={most // rl.batch_size}"
            if most
            else ""
        )
        frameworks.append(FrameworkSettings("verl", verl, f"ppo_mini_batch_size x n={pairs}"))
    return tuple(frameworks)


def linear_ramp(stages: Sequence[Stage]) -> tuple[int, int, Fraction] | None:
    """Returns (first batch, increment, samples until the last stage) of a ramp in equal steps; else
    None.
    """
    if len(stages) < 2:
        return None
    start, apart = stages[0].global_batch_size, stages[1].threshold
    rise = stages[1].global_batch_size - start
    regular = all(
        stage.global_batch_size == start + i * rise and stage.threshold == i * apart
        for i, stage in enumerate(stages)
    )
    return (start, rise, stages[-1].threshold) if regular and rise > 0 else None


def _maxbatch(plan: BatchPlan) -> FrameworkSettings:
    """Returns the batch stated globally, valid on any number of devices; p is then the most rows of
    a pass.
    """
    most = max(stage.micro_batch_size_to_train_on for stage in plan.stages)
    rows = Fraction(most, plan.num_devices)
    settings = f"per_device_batch_size={plain_number(rows)}"
    if plan.is_packed:
        settings = f"max_tokens_per_pass={plain_number(rows * plan.max_target_length)}"
    settings += " batch_padding=true" if _is_padded(plan) else ""
    batch = plan.global_batch_size_to_train_on
    ramp: tuple[str, ...] = ()
    if len(plan.stages) == 1:
        settings += f" global_batch_size={batch}"
    else:
        ramp = (f'batch_size_schedule="{_schedule(plan)}"',)
    return FrameworkSettings("maxbatch", settings, f"global_batch_size_to_train_on={batch}", ramp)


def _deepspeed(plan: BatchPlan) -> FrameworkSettings:
    """Returns the settings of DeepSpeed, whose accumulation steps are the microbatches of its
    pipeline.
    """
    steps = plan.gradient_accumulation_steps * _parts(plan)
    batch = plan.global_batch_size_to_train_on
    rows = batch // steps // plan.batch_shards
    update = f"train_batch_size={batch}"
    settings = f"train_micro_batch_size_per_gpu={rows} gradient_accumulation_steps={steps} {update}"
    return FrameworkSettings("DeepSpeed", settings, update)


def _megatron(plan: BatchPlan) -> FrameworkSettings:
    """Returns the settings of Megatron-LM, whose micro-batches are those of its pipeline: one size
    for all stages.
    """
    micro = math.gcd(*(stage.micro_batch_size_to_train_on for stage in plan.stages))
    batch = plan.global_batch_size_to_train_on
    settings = f"--micro-batch-size {micro // _parts(plan) // plan.batch_shards}"
    update = f"global batch size={batch}"
    if len(plan.stages) == 1:
        return FrameworkSettings("Megatron-LM", f"{settings} --global-batch-size {batch}", update)
    ramp = [f'--step-batch-size-schedule "{_schedule(plan, plan.slots_per_sample)}"']
    if linear := linear_ramp(plan.stages):
        start, rise, samples = linear
        older = (
            f"--rampup-batch-size {start} {rise} {math.ceil(samples)} --global-batch-size {batch}"
        )
        ramp.append(f"older releases: {older}")
    return FrameworkSettings("Megatron-LM", settings, update, tuple(ramp))


def _nemo(plan: BatchPlan) -> FrameworkSettings:
    """Returns the settings of NeMo, which runs Megatron-LM but has only the older ramp."""
    micro = math.gcd(*(stage.micro_batch_size_to_train_on for stage in plan.stages))
    batch = plan.global_batch_size_to_train_on
    rows = micro // _parts(plan) // plan.batch_shards
    settings = f"model.micro_batch_size={rows} model.global_batch_size={batch}"
    linear = linear_ramp(plan.stages)
    ramp = (
        f"model.rampup_batch_size=[{linear[0]},{linear[1]},{math.ceil(linear[2])}]"
        if linear
        else ""
    )
    return FrameworkSettings(
        "NeMo", settings, f"global batch size={batch}", (ramp,) if ramp else ()
    )


def _maxtext(plan: BatchPlan) -> FrameworkSettings:
    """Returns the same keys. MaxText loads at least one row per device, and its ramp leaves out
    accumulation.
    """
    devices, steps = plan.num_devices, plan.gradient_accumulation_steps
    batch, micro = plan.global_batch_size_to_train_on, plan.micro_batch_size_to_train_on
    settings = (
        f"per_device_batch_size={_decimal(micro, devices)} gradient_accumulation_steps={steps}"
    )
    if plan.num_pipeline_stages > 1:
        settings += f" num_pipeline_microbatches={plan.num_pipeline_microbatches}"
    update = f"global_batch_size_to_train_on={batch}"
    if micro < devices:
        update += f" (loads {devices * steps})"
    linear = linear_ramp(plan.stages)
    if not linear or any(stage.gradient_accumulation_steps > 1 for stage in plan.stages):
        return FrameworkSettings("MaxText", settings, update)
    start, rise, samples = linear
    # MaxText restarts its count at every stage, so updates must meet each threshold exactly.
    if any(plan.stages[1].threshold % stage.global_batch_size for stage in plan.stages[:-1]):
        return FrameworkSettings("MaxText", settings, update)
    ramp = (
        f"enable_rampup_batch_size=true per_device_batch_size_start={_decimal(start, devices)} "
        f"per_device_batch_size_increment={_decimal(rise, devices)} "
        f"global_rampup_samples={math.ceil(samples)}"
    )
    return FrameworkSettings("MaxText", settings, update, (ramp,))


def _is_padded(plan: BatchPlan) -> bool:
    return any(stage.padded_slots_per_step for stage in plan.stages)


def _parts(plan: BatchPlan) -> int:
    """Returns the microbatches of the pipeline; without one the key has no effect."""
    return plan.num_pipeline_microbatches if plan.num_pipeline_stages > 1 else 1


def _schedule(plan: BatchPlan, unit: int = 1) -> str:
    """Returns the stages as "0:256 100000:512", thresholds in samples, times unit."""
    return schedule_text(
        (math.ceil(stage.threshold) * unit, stage.global_batch_size) for stage in plan.stages
    )


def _decimal(rows: int, devices: int) -> str:
    """Returns rows / devices as the shortest decimal whose product with devices truncates to
    rows.
    """
    value = plain_number(Fraction(rows, devices))
    if isinstance(value, Fraction):
        value = rows / devices
        # MaxText computes int(value * devices): a float just below the quotient would lose a row
        value = value if int(value * devices) == rows else math.nextafter(value, math.inf)
    return str(value)
