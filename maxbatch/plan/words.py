"""A plan in the words of other frameworks: what to write there for the same update. `docs/batch-size.md` explains them.

R data-parallel replicas (`batch_shards`), N devices, M micro-batch, g accumulation steps, B = M x g global batch,
m pipeline microbatches. Where a model lies on several devices, the other frameworks count replicas, not devices.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from fractions import Fraction

from maxbatch.config.values import plain_number
from maxbatch.plan.batch import BatchPlan
from maxbatch.plan.rampup import Stage


@dataclasses.dataclass(frozen=True)
class Words:
    """What one framework is told for the batch of a plan.

    Attributes:
      framework: its name.
      settings: what to write there, with its own names.
      update: its name for the samples of one update, and their number.
      ramp: what to write there for the stages, one way or another; none where the batch is constant, or cannot ramp.
    """

    framework: str
    settings: str
    update: str
    ramp: tuple[str, ...] = ()


def words_of(plan: BatchPlan) -> tuple[Words, ...]:
    """Return a plan made from the start of its run in the words of each framework, the last stage's where it ramps."""
    replicas, steps = plan.batch_shards, plan.gradient_accumulation_steps
    batch, micro = plan.global_batch_size_to_train_on, plan.micro_batch_size_to_train_on
    rows = micro // replicas
    divided = f", {steps} x backward(loss / {steps}) per step()" if steps > 1 else ""
    accumulated = f" gradient_accumulation_steps={steps}" if steps > 1 else ""
    return (
        _maxbatch(plan),
        Words("PyTorch DDP", f"DataLoader(batch_size={rows}){divided}", f"batch={batch}"),
        Words(
            "TensorFlow MirroredStrategy",
            f"BATCH_SIZE_PER_REPLICA={rows} GLOBAL_BATCH_SIZE={micro}{accumulated}",
            f"GLOBAL_BATCH_SIZE x {steps}={batch}" if steps > 1 else f"GLOBAL_BATCH_SIZE={batch}",
        ),
        Words(
            "Hugging Face Trainer",
            f"per_device_train_batch_size={rows} gradient_accumulation_steps={steps}",
            f"total train batch size={batch}",
        ),
        Words(
            "Axolotl",
            f"micro_batch_size: {rows}, gradient_accumulation_steps: {steps}",
            f"total batch size={batch}",
        ),
        _deepspeed(plan),
        _megatron(plan),
        _maxtext(plan),
    )


def linear_ramp(stages: Sequence[Stage]) -> tuple[int, int, Fraction] | None:
    """Return (first batch, increment, samples until the last stage) of a ramp in equal steps; None: it is not one."""
    if len(stages) < 2:
        return None
    start, apart = stages[0].global_batch_size, stages[1].threshold
    rise = stages[1].global_batch_size - start
    regular = all(
        stage.global_batch_size == start + i * rise and stage.threshold == i * apart
        for i, stage in enumerate(stages)
    )
    return (start, rise, stages[-1].threshold) if regular and rise > 0 else None


def _maxbatch(plan: BatchPlan) -> Words:
    """The batch stated globally, which holds on any number of devices; p is then the most rows of a pass."""
    most = max(stage.micro_batch_size_to_train_on for stage in plan.stages)
    settings = f"per_device_batch_size={plain_number(Fraction(most, plan.num_devices))}"
    batch = plan.global_batch_size_to_train_on
    ramp: tuple[str, ...] = ()
    if len(plan.stages) == 1:
        settings += f" global_batch_size={batch}"
    else:
        ramp = (f'batch_size_schedule="{_schedule(plan.stages)}"',)
    return Words("maxbatch", settings, f"global_batch_size_to_train_on={batch}", ramp)


def _deepspeed(plan: BatchPlan) -> Words:
    """Its pipeline's microbatches are its accumulation steps."""
    steps = plan.gradient_accumulation_steps * plan.num_pipeline_microbatches
    batch = plan.global_batch_size_to_train_on
    settings = (
        f"train_micro_batch_size_per_gpu={batch // steps // plan.batch_shards} "
        f"gradient_accumulation_steps={steps} train_batch_size={batch}"
    )
    return Words("DeepSpeed", settings, f"train_batch_size={batch}")


def _megatron(plan: BatchPlan) -> Words:
    """The pipeline's microbatches are its micro-batches. A ramp adds some, so one size must divide every stage."""
    micro = math.gcd(*(stage.micro_batch_size_to_train_on for stage in plan.stages))
    batch = plan.global_batch_size_to_train_on
    settings = f"--micro-batch-size {micro // plan.num_pipeline_microbatches // plan.batch_shards}"
    update = f"global batch size={batch}"
    if len(plan.stages) == 1:
        return Words("Megatron-LM", f"{settings} --global-batch-size {batch}", update)
    ramp = [f'--step-batch-size-schedule "{_schedule(plan.stages, plan.max_target_length)}"']
    if linear := linear_ramp(plan.stages):
        start, rise, samples = linear
        older = f"--rampup-batch-size {start} {rise} {math.ceil(samples)} --global-batch-size {batch}"
        ramp.append(f"older releases: {older}")
    return Words("Megatron-LM", settings, update, tuple(ramp))


def _maxtext(plan: BatchPlan) -> Words:
    """The same keys. Below one row per device it loads one all the same; its ramp leaves out accumulation."""
    devices, steps = plan.num_devices, plan.gradient_accumulation_steps
    batch, micro = plan.global_batch_size_to_train_on, plan.micro_batch_size_to_train_on
    settings = f"per_device_batch_size={_decimal(micro, devices)} gradient_accumulation_steps={steps}"
    if plan.num_pipeline_stages > 1:
        settings += f" num_pipeline_microbatches={plan.num_pipeline_microbatches}"
    update = f"global_batch_size_to_train_on={batch}"
    if micro < devices:
        update += f" (loads {devices * steps})"
    linear = linear_ramp(plan.stages)
    ramp: tuple[str, ...] = ()
    if linear and _maxtext_ramps_alike(plan.stages):
        start, rise, samples = linear
        ramp = (
            f"enable_rampup_batch_size=true per_device_batch_size_start={_decimal(start, devices)} "
            f"per_device_batch_size_increment={_decimal(rise, devices)} global_rampup_samples={math.ceil(samples)}",
        )
    return Words("MaxText", settings, update, ramp)


def _maxtext_ramps_alike(stages: Sequence[Stage]) -> bool:
    """Its count starts anew at every stage, so only updates that meet each threshold exactly leave it where ours is."""
    apart = stages[1].threshold
    return (
        all(
            stage.gradient_accumulation_steps == 1 and apart % stage.global_batch_size == 0
            for stage in stages[:-1]
        )
        and stages[-1].gradient_accumulation_steps == 1
    )


def _schedule(stages: Sequence[Stage], unit: int = 1) -> str:
    """Return "0:256 100000:512", thresholds in samples, times unit.

    Positions are whole, so thresholds round up; of stages that begin at the same sample only the last has any.
    """
    batches = {math.ceil(stage.threshold) * unit: stage.global_batch_size for stage in stages}
    return " ".join(f"{threshold}:{batch}" for threshold, batch in batches.items())


def _decimal(rows: int, devices: int) -> str:
    """Return rows / devices as the shortest number that a program which truncates x devices reads as rows."""
    exact = plain_number(Fraction(rows, devices))
    if not isinstance(exact, Fraction):
        return str(exact)
    value = rows / devices
    return str(value if int(value * devices) == rows else math.nextafter(value, math.inf))
