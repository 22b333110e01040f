"""The batch plan: every number of a run's batch, exact, before the first device is touched.

N devices, H hosts, p = `per_device_batch_size`, g = `gradient_accumulation_steps`, e =
`expansion_factor_real_data`, M = micro-batch = p x N, B = global batch = M x g.
"""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

from maxbatch.config.combined import PlanConfig
from maxbatch.config.config import Config, as_plan
from maxbatch.config.recipes import slots_per_row
from maxbatch.config.values import Number, exact, plain_number
from maxbatch.plan.divisors import largest_divisor
from maxbatch.plan.experts import ExpertGroups
from maxbatch.plan.holes import Holes
from maxbatch.plan.long_rows import LongRows
from maxbatch.plan.mesh_shape import (
    BATCH_AXES,
    MOST_DEVICES,
    MeshShape,
    RunMeshes,
    check_model_fits,
    check_sampler_fits,
)
from maxbatch.plan.microbatches import MicrobatchUnit
from maxbatch.plan.place import Place
from maxbatch.plan.program import check_attention, check_context_strategy
from maxbatch.plan.rampup import RampupBatchManager, Stage
from maxbatch.plan.refusal import Refusal, accepted, in_words
from maxbatch.plan.reproducible import check_reproducible, whole_bytes
from maxbatch.plan.rl_batch import RLBatch
from maxbatch.plan.skip_samples import holes_of
from maxbatch.plan.stages import MOST_ROWS, increments, nearest_multiple, pass_rows, stated_batches
from maxbatch.plan.unused_keys import unused_keys
from maxbatch.plan.update_settings import DecayPlan, Decays
from maxbatch.system.errors import ConfigError
from maxbatch.system.terminal.folding import counted

if TYPE_CHECKING:
    from ml_collections import ConfigDict


class ResumePoint(NamedTuple):
    """The point from which a run continues, and the hosts of the run that wrote its checkpoint."""

    step: int = 0
    place: Place = Place()
    hosts: int | None = None  # None: unknown
    loading_hosts: int | None = None  # the hosts among them that read the data


NEW_RUN = ResumePoint()


def check_batch_keys(config: PlanConfig) -> None:
    """Raises ConfigError for batch keys of pre-training that break a rule on any devices."""
    if config.recipe.is_sampled:
        rule = (
            "counts prompts, which maxbatch rl trains on; the samples of an update are "
            "global_batch_size"
        )
        prompts = config.prompts.batch_size
        works = (
            f"batch_size=null global_batch_size={prompts} and a dataset of documents, or maxbatch "
            "rl"
        )
        raise ConfigError(f"batch_size={prompts}: {rule}; works: {works}")
    expansion_factor(config, num_hosts=None)
    if config.ramp.enable_rampup_batch_size:
        increments(config)
    else:
        stated_batches(config)


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    """Every number of the batch of one run on given devices and hosts; its fields are those of
    `to_dict`.

    Top-level numbers are the last stage's. Counts are samples (rows) unless stated otherwise. In
    reinforcement learning (`rl`) rows are prompt-response pairs, while the length of the run
    (`total_samples`, epochs, positions) counts prompts.
    """

    num_devices: int
    num_hosts: int
    per_device_batch_size: Number
    gradient_accumulation_steps: int
    expansion_factor_real_data: Number
    micro_batch_size_to_train_on: int
    global_batch_size_to_train_on: int
    num_replicas: int
    per_replica_batch_size: Number
    samples_per_host: Number
    rows_per_loading_host: Number
    global_batch_size_to_load: int
    num_loading_hosts: int
    batch_shards: int
    num_pipeline_stages: int
    num_pipeline_microbatches: int
    pipeline_microbatch_size: int
    num_pipeline_repeats: int
    pipeline_bubble: float
    eval_per_device_batch_size: Number
    eval_batch_size: int
    max_target_length: int
    slots_per_sample: int
    tokens_per_step: int
    padded_slots_per_step: int
    padded_share: float
    whole_bytes_per_device: int | None  # with `reproducible_sums`
    total_steps: int | None
    total_samples: int | None
    total_tokens: int | None
    samples_per_epoch: int | None
    steps_per_epoch: int | None
    epochs: float | None
    samples_left_out: int | None
    num_increments: int | None
    samples_per_increment: Number | None
    rampup_end_step: int
    rampup_end_sample: int
    warnings: tuple[str, ...]
    rl: RLBatch | None
    experts: ExpertGroups | None  # None: a dense model
    long_rows: LongRows | None  # None: no row is split
    sample: str  # what the run counts, in a word
    decays: tuple[Decays, ...]
    manager: RampupBatchManager
    meshes: RunMeshes

    @classmethod
    def from_config(
        cls,
        config: Config | ConfigDict | PlanConfig,
        num_devices: int = 1,
        num_hosts: int = 1,
        *,
        num_slices: int = 1,
        samples_per_epoch: int | None = None,
        resume: ResumePoint = NEW_RUN,
    ) -> BatchPlan:
        """Plans the batch of a run.

        Args:
          config: the run's config.
          num_devices: N, over all hosts.
          num_hosts: H; divides N.
          num_slices: slices that the devices span.
          samples_per_epoch: samples in one pass over the training split, where it is known.
          resume: the point from which the run continues.

        Raises:
          ConfigError: a rule of the batch is broken; the message names values that keep it.
        """

        def plan(tried: PlanConfig) -> BatchPlan:
            meshes = RunMeshes.from_config(tried, num_devices, num_slices, num_hosts)
            return cls._on(tried, meshes, num_hosts, samples_per_epoch, resume)

        return accepted(as_plan(config), plan)

    @classmethod
    def _on(
        cls,
        config: PlanConfig,
        meshes: RunMeshes,
        num_hosts: int,
        samples_per_epoch: int | None,
        resume: ResumePoint,
    ) -> BatchPlan:
        if config.evaluation.eval_tasks and num_hosts > 1:
            rule = (
                f"must be empty on {num_hosts} hosts, since one host scores tasks; maxbatch "
                "evaluate scores checkpoints"
            )
            raise Refusal(config, "eval_tasks", rule, {"eval_tasks": ""})

        e = expansion_factor(config, num_hosts, resume)
        check_model_fits(config, meshes.training)
        check_sampler_fits(config, meshes.sampling)
        check_attention(config, meshes.training.sizes["context"])
        check_context_strategy(config, meshes.training.sizes)

        unit = MicrobatchUnit.from_config(config, meshes.training)
        rl = RLBatch.if_stated(config, meshes, unit)
        manager = RampupBatchManager.on_devices(
            config, unit, rl, samples_per_epoch, resume.step, resume.place
        )

        check_reproducible(config, meshes.training, manager)

        # The plan's numbers are those of the last stage.
        last, total = manager.stages[manager.listed[-1]], manager.total_samples
        holes = holes_of(config)
        filters = rl is not None and rl.max_prompts_per_batch is not None
        if filters:
            total = samples_per_epoch = None  # the prompts read are known only afterwards

        batch, micro = last.global_batch_size, last.micro_batch_size_to_train_on
        slots = config.slots_per_sample
        pipeline_parts, repeats = unit.num_pipeline_microbatches, config.mesh.num_pipeline_repeats
        eval_batch = _eval_batch(config, unit, micro if rl else None)
        epoch_batches = samples_per_epoch and -(
            -samples_per_epoch * manager.rows_per_sample // batch
        )

        is_ramp, ramp = len(manager.stages) > 1, config.ramp.enable_rampup_batch_size and not rl
        return cls(
            num_devices=meshes.num_devices,
            num_hosts=num_hosts,
            per_device_batch_size=last.per_device_batch_size,
            gradient_accumulation_steps=last.gradient_accumulation_steps,
            expansion_factor_real_data=plain_number(e),
            micro_batch_size_to_train_on=micro,
            global_batch_size_to_train_on=batch,
            num_replicas=meshes.training.num_replicas,
            per_replica_batch_size=plain_number(Fraction(batch, meshes.training.num_replicas)),
            samples_per_host=plain_number(Fraction(batch, num_hosts)),
            rows_per_loading_host=plain_number(
                _rows_per_loading_host(last, meshes.training, num_hosts, e, rl)
            ),
            global_batch_size_to_load=rl.batch_size if rl else int(batch * max(Fraction(1), e)),
            num_loading_hosts=num_hosts // int(e) if e > 1 else num_hosts,
            batch_shards=unit.batch_shards,
            num_pipeline_stages=unit.num_pipeline_stages,
            num_pipeline_microbatches=pipeline_parts,
            pipeline_microbatch_size=micro // pipeline_parts,
            num_pipeline_repeats=repeats,
            pipeline_bubble=_bubble(unit.num_pipeline_stages, pipeline_parts, repeats),
            eval_per_device_batch_size=plain_number(Fraction(eval_batch, unit.num_devices)),
            eval_batch_size=eval_batch,
            max_target_length=config.length.max_target_length,
            slots_per_sample=config.slots_per_sample,
            tokens_per_step=batch // manager.num_minibatches * slots,
            padded_slots_per_step=last.padded_slots_per_step,
            padded_share=last.padded_slots_per_step
            / (batch // manager.num_minibatches + last.padded_slots_per_step),
            whole_bytes_per_device=whole_bytes(config),
            total_steps=manager.total_steps,
            total_samples=total,
            total_tokens=None if total is None else total * manager.rows_per_sample * slots,
            samples_per_epoch=samples_per_epoch,
            steps_per_epoch=epoch_batches and epoch_batches * manager.updates_per_batch,
            epochs=_epochs(config, holes, total, samples_per_epoch),
            samples_left_out=None if total is None else holes.position_after(total) - total,
            num_increments=increments(config) if ramp else None,
            samples_per_increment=plain_number(manager.stages[1].threshold) if ramp else None,
            rampup_end_step=last.first_step if is_ramp else 0,
            rampup_end_sample=last.first_sample if is_ramp else 0,
            warnings=(
                *_warnings(manager),
                *_repeats(manager, samples_per_epoch, config.recipe.unit),
                *unused_keys(config, meshes.training, manager, resumes=resume != NEW_RUN),
                *(rl.warnings if rl else ()),
            ),
            rl=rl,
            experts=ExpertGroups.if_any(
                config.model, meshes.training, micro // pipeline_parts, slots_per_row(config)
            ),
            long_rows=LongRows.if_any(
                config.model, meshes.training, micro // pipeline_parts, slots_per_row(config)
            ),
            sample=config.recipe.unit,
            decays=tuple(
                map(DecayPlan.from_config(config, manager).of_stage, range(len(manager.stages)))
            ),
            manager=manager,
            meshes=meshes,
        )

    @property
    def is_packed(self) -> bool:
        """Whether the samples of an update share rows, and passes follow from their lengths."""
        return self.manager.split_stages[-1].is_packed

    @property
    def mesh(self) -> MeshShape:
        """The mesh shape of the devices that train."""
        return self.meshes.training

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of the run; a single one without a ramp."""
        return self.manager.stages

    def tokens_of(self, stage: int) -> int:
        """Returns the tokens (slots) of an update in a stage."""
        return (
            self.stages[stage].global_batch_size
            // self.manager.num_minibatches
            * self.slots_per_sample
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the object of `maxbatch plan --json`: whole numbers as int, fractions as
        float.
        """
        names = [field.name for field in dataclasses.fields(self) if field.name not in _NOT_NUMBERS]
        plan: dict[str, Any] = {name: _json(getattr(self, name)) for name in names}
        groups: list[RLBatch | ExpertGroups | LongRows | None]
        groups = [self.rl, self.experts, self.long_rows]
        for group in groups:
            if group is not None:
                plan |= {name: _json(value) for name, value in group._asdict().items()}
        plan["warnings"] = list(self.warnings)
        plan["stages"] = [
            {
                name: _json(value)
                for name, value in self.stages[number]._asdict().items()
                if name != "threshold"
            }
            | {"tokens_per_step": self.tokens_of(number)}
            | self.decays[number]._asdict()
            for number in self.manager.listed
        ]
        return plan

    def samples_of(self, stage: int, micro_batch: int, shard: int) -> tuple[int, int]:
        """Returns (first, end): a batch shard of a micro-batch of a stage holds `stream[s + first :
        s + end]`.

        Micro-batch j holds `stream[s + j*M : s + (j+1)*M]`, and batch shard d its contiguous d-th
        part. In reinforcement learning they are pairs of the batch, and every mini-batch has
        micro-batches of its own.
        """
        plan_of_stage, updates = self.stages[stage], self.manager.num_minibatches
        rows = plan_of_stage.micro_batch_size_to_train_on // self.batch_shards
        update, micro_batch = divmod(
            micro_batch, plan_of_stage.gradient_accumulation_steps // updates
        )
        pairs = plan_of_stage.global_batch_size // updates  # of an update; behind them is padding
        first = (micro_batch * self.batch_shards + shard) * rows
        return update * pairs + min(first, pairs), update * pairs + min(first + rows, pairs)

    def layout(self) -> list[list[tuple[int, int]]]:
        """Returns `samples_of` for each micro-batch and each batch shard of the last stage."""
        steps = self.stages[-1].gradient_accumulation_steps
        return [[self.samples_of(-1, j, d) for d in range(self.batch_shards)] for j in range(steps)]


_NOT_NUMBERS = ("sample", "decays", "manager", "meshes", "warnings", "rl", "experts", "long_rows")


def _json(number: Number | None) -> int | float | None:
    if isinstance(number, Fraction | float):
        return int(number) if number == int(number) else float(number)
    return number


def expansion_factor(
    config: PlanConfig, num_hosts: int | None, resume: ResumePoint = NEW_RUN
) -> Fraction:
    """Returns e, checked against the present hosts (None: unknown) and those that wrote the
    checkpoint.

    Raises:
      ConfigError: e is invalid, or invalid with these hosts; the message names a valid one.
    """
    key, works = "expansion_factor_real_data", Fraction(-1)
    e, hosts = exact(config[key]), num_hosts or 1
    hosts_then = resume.loading_hosts or resume.hosts or hosts
    if e <= 0 and e != -1:
        rule = "must be -1, a whole number from 1 on, or 1 / a whole number"
    elif e > 1 and e.denominator > 1:
        rule = "above 1 it must be whole (one host in e loads)"
        works = Fraction(largest_divisor(hosts, int(e)))
    elif 0 < e < 1 and e.numerator > 1:
        rule = "below 1 it must be 1 / a whole number (hosts now / hosts then)"
        works = Fraction(1, round(1 / e)) if 1 / e < MOST_DEVICES else works
    elif e > 1 and num_hosts and num_hosts % e:
        rule = f"must divide the {num_hosts} hosts, of which one in {e} loads"
        works = Fraction(largest_divisor(num_hosts, int(e)))
    elif 0 < e < 1 and resume.hosts not in (None, num_hosts) and hosts != e * hosts_then:
        rule = f"must be hosts now / loading hosts of the checkpoint = {hosts}/{hosts_then}"
        works = (
            Fraction(hosts, hosts_then) if hosts_then > hosts and hosts_then % hosts == 0 else works
        )
    else:
        return e
    raise Refusal(config, key, rule, {key: works})


def _rows_per_loading_host(
    stage: Stage, mesh: MeshShape, num_hosts: int, e: Fraction, rl: RLBatch | None
) -> Fraction:
    """Returns the rows that the first loading host reads per update: the batch shards on its
    devices.

    Other hosts may read fewer if the last pass ends in padding. With load expansion it reads e
    times its share. In reinforcement learning every host reads all prompts of a batch.
    """
    if rl:
        return Fraction(rl.batch_size)
    batch = stage.global_batch_size
    if e > 1:
        return batch * e / num_hosts

    # Neighbouring devices along the other axes hold the same rows. On one slice the devices of all
    # axes are neighbours; over slices those of the ici axes are.
    near = mesh.ici if mesh.num_slices > 1 else mesh.sizes
    devices_per_shard = math.prod(size for axis, size in near.items() if axis not in BATCH_AXES)
    shards = min(mesh.batch_shards, -(-mesh.num_devices // num_hosts // devices_per_shard))

    # Padding ends the last pass, so the shards of the first host are full in all others.
    of_host = Fraction(stage.micro_batch_size_to_train_on * shards, mesh.batch_shards)
    full_passes = stage.gradient_accumulation_steps - 1
    in_last = Fraction(batch - full_passes * stage.micro_batch_size_to_train_on)
    return full_passes * of_host + min(of_host, in_last)


def _bubble(stages: int, microbatches: int, repeats: int) -> float:
    """Returns the share of its time that a stage waits, S - 1 of M x R + S - 1 ticks.

    Reference: Narayanan et al. 2021 (https://arxiv.org/abs/2104.04473), section 2.2, as a share of
    all ticks.
    """
    return (stages - 1) / (microbatches * repeats + stages - 1)


def _eval_batch(config: PlanConfig, unit: MicrobatchUnit, chunk: int | None) -> int:
    """Returns the samples of one eval pass: the stated number, else a training pass (a chunk, or p
    x N).
    """
    key = "eval_per_device_batch_size"
    if not config[key]:
        most = chunk or math.floor(pass_rows(config, unit.num_devices))
        return max(1, most // unit.rows) * unit.rows
    p = exact(config[key])
    rows = p * unit.num_devices
    if rows % unit.rows:
        rule = (
            f"x {unit.num_devices} devices = {in_words(rows)} samples must be divisible by {unit}"
        )
        raise Refusal(
            config, key, rule, {key: nearest_multiple(p, unit.rows_per_device, MOST_ROWS)}
        )
    return int(rows)


def _epochs(
    config: PlanConfig, holes: Holes, total_samples: int | None, samples_per_epoch: int | None
) -> float | None:
    if total_samples is not None and samples_per_epoch is not None:
        return holes.position_after(total_samples) / samples_per_epoch
    return None if config.length.num_epochs is None else float(config.length.num_epochs)


def _repeats(
    manager: RampupBatchManager, samples_per_epoch: int | None, unit: str
) -> tuple[str, ...]:
    """Returns a warning about a batch that holds the same samples several times."""
    most = (
        max(manager.stages[number].global_batch_size for number in manager.listed)
        // manager.rows_per_sample
    )
    if not samples_per_epoch or most <= samples_per_epoch:
        return ()
    times = most // samples_per_epoch
    often = "some of them twice" if times == 1 else f"each of them {times} times or more"
    epoch = counted(samples_per_epoch, unit)
    return (
        f"a batch of {most:,} {unit}s is larger than an epoch of {epoch}: an update holds {often}",
    )


def _warnings(manager: RampupBatchManager) -> tuple[str, ...]:
    last, total = manager.stages[manager.listed[-1]], manager.total_samples
    if total is None or total >= last.threshold:
        return ()
    ends = f"the run ends inside its ramp after {manager.total_steps} updates ({total} samples)"
    begins = f"begins after {last.first_step} updates ({last.first_sample} samples)"
    return (f"{ends}: its last stage of {last.global_batch_size} samples per update {begins}",)
