"""The batch plan: every number of a run's batch, exact, before the first device is touched.

N devices, H hosts, p = `per_device_batch_size`, g = `gradient_accumulation_steps`, e =
`expansion_factor_real_data`, M = micro-batch = p x N, B = global batch = M x g.
"""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Any

from ml_collections import ConfigDict

from maxbatch.config.values import exact, plain_number
from maxbatch.plan.mesh_shape import MeshShape, check_layers_fit
from maxbatch.plan.microbatches import MicrobatchUnit
from maxbatch.plan.rampup import RampupBatchManager, Stage
from maxbatch.plan.rl_batch import RLBatch
from maxbatch.plan.stages import increments, nearest_multiple, stated_batches
from maxbatch.system.errors import ConfigError

Number = int | float | Fraction


def check_batch_keys(config: ConfigDict) -> None:
    """Check what pre-training's batch keys say without knowing any device; `BatchPlan.from_config` checks the rest.

    Raises:
      ConfigError: the expansion factor, the ramp or the schedule breaks its rule, or the batch is one of prompts.
    """
    if config.batch_size is not None:
        raise ConfigError(
            f"batch_size={config.batch_size}: states a batch of prompts, which maxbatch rl trains on; "
            "works: batch_size=null and a dataset of documents, or maxbatch rl"
        )
    _check_expansion(config)
    if config.enable_rampup_batch_size:
        increments(config)
    else:
        stated_batches(config)


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    """Every number of the batch of one run on given devices and hosts; its fields are those of `to_dict`.

    Top-level numbers are the last stage's. Counts are samples (rows) unless they say otherwise. In reinforcement
    learning (`rl`) rows are prompt-response pairs, and what counts along the run (`total_samples`, epochs, positions)
    prompts.
    """

    num_devices: int
    num_hosts: int
    per_device_batch_size: Number
    gradient_accumulation_steps: int
    expansion_factor_real_data: Number
    micro_batch_size_to_train_on: int
    global_batch_size_to_train_on: int
    per_replica_batch_size: Number
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
    tokens_per_step: int
    total_steps: int | None
    total_samples: int | None
    total_tokens: int | None
    samples_per_epoch: int | None
    steps_per_epoch: int | None
    epochs: float | None
    rampup_end_step: int
    rampup_end_sample: int
    warnings: tuple[str, ...]
    rl: RLBatch | None
    manager: RampupBatchManager
    mesh: MeshShape

    @classmethod
    def from_config(
        cls,
        config: ConfigDict,
        num_devices: int = 1,
        num_hosts: int = 1,
        *,
        num_slices: int = 1,
        samples_per_epoch: int | None = None,
        anchor: tuple[int, int] = (0, 0),
        checkpoint_hosts: tuple[int, int] | None = None,
    ) -> BatchPlan:
        """Plan the batch of a run.

        Args:
          config: the run's config.
          num_devices: N, over all hosts.
          num_hosts: H; divides N.
          num_slices: slices that the devices span.
          samples_per_epoch: samples in one pass over the training split, where it is known.
          anchor: (step, samples_seen) of the checkpoint that the run resumes from.
          checkpoint_hosts: (hosts, loading hosts) of the run that wrote that checkpoint; None: there is none.

        Raises:
          ConfigError: a rule of the batch is broken; the message names a value that works.
        """
        _check_machine(num_devices, num_hosts, samples_per_epoch)
        e = expansion_factor(config, num_hosts, checkpoint_hosts)
        rl = None if config.batch_size is None else RLBatch.from_config(config, num_devices, num_slices)
        trainers = rl.num_trainer_devices if rl else num_devices
        mesh = MeshShape.from_config(config, trainers, num_slices)
        check_layers_fit(config, mesh)
        divisor = MicrobatchUnit.from_config(config, trainers, mesh)
        manager = RampupBatchManager.from_config(
            config,
            num_devices,
            num_slices=num_slices,
            samples_per_epoch=samples_per_epoch,
            anchor=anchor,
        )
        last = manager.stages[-1]
        batch, micro = last.global_batch_size, last.micro_batch_size_to_train_on
        pass_rows = Fraction(micro) if rl else exact(config.per_device_batch_size) * num_devices
        eval_batch = _eval_batch(config, trainers, divisor, pass_rows)
        total = manager.total_samples
        rows, updates = (rl.num_generations, rl.num_iterations) if rl else (1, 1)  # of a sample, of a batch
        return cls(
            num_devices=num_devices,
            num_hosts=num_hosts,
            per_device_batch_size=last.per_device_batch_size,
            gradient_accumulation_steps=last.gradient_accumulation_steps,
            expansion_factor_real_data=plain_number(e),
            micro_batch_size_to_train_on=micro,
            global_batch_size_to_train_on=batch,
            per_replica_batch_size=plain_number(Fraction(batch, trainers)),
            global_batch_size_to_load=int(batch * e) if e > 1 else batch,
            num_loading_hosts=num_hosts // int(e) if e > 1 else num_hosts,
            batch_shards=mesh.batch_shards,
            num_pipeline_stages=mesh.num_pipeline_stages,
            num_pipeline_microbatches=divisor.num_pipeline_microbatches,
            pipeline_microbatch_size=micro // divisor.num_pipeline_microbatches,
            num_pipeline_repeats=config.num_pipeline_repeats,
            pipeline_bubble=_bubble(
                mesh.num_pipeline_stages, divisor.num_pipeline_microbatches, config.num_pipeline_repeats
            ),
            eval_per_device_batch_size=plain_number(Fraction(eval_batch, trainers)),
            eval_batch_size=eval_batch,
            max_target_length=config.max_target_length,
            tokens_per_step=batch * config.max_target_length,
            total_steps=manager.total_steps,
            total_samples=total,
            total_tokens=None if total is None else total * rows * config.max_target_length,
            samples_per_epoch=samples_per_epoch,
            steps_per_epoch=None
            if samples_per_epoch is None
            else -(-samples_per_epoch // (batch // rows)) * updates,
            epochs=_epochs(config, total, samples_per_epoch),
            rampup_end_step=last.first_step if len(manager.stages) > 1 else 0,
            rampup_end_sample=last.first_sample if len(manager.stages) > 1 else 0,
            warnings=(*_warnings(manager), *(rl.warnings if rl else ())),
            rl=rl,
            manager=manager,
            mesh=mesh,
        )

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of the run, one where there is no ramp."""
        return self.manager.stages

    def to_dict(self) -> dict[str, Any]:
        """Return what `maxbatch plan --json` prints: whole numbers as int, fractions as float."""
        plan = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in _NOT_PRINTED}
        plan |= dataclasses.asdict(self.rl) if self.rl else {}
        plan["warnings"] = list(self.warnings)
        plan["stages"] = [
            {
                f.name: _json(getattr(stage, f.name))
                for f in dataclasses.fields(stage)
                if f.name != "threshold"
            }
            for stage in self.stages
        ]
        return {name: _json(value) for name, value in plan.items()}

    def samples_of(self, stage: int, micro_batch: int, shard: int) -> tuple[int, int]:
        """Return which samples of an update a batch shard holds in a micro-batch of a stage.

        Micro-batch j holds `stream[s + j*M : s + (j+1)*M]`, and batch shard d its contiguous d-th part.

        Returns:
          (first, end): the shard holds `stream[s + first : s + end]`.
        """
        micro = self.stages[stage].micro_batch_size_to_train_on
        rows = micro // self.batch_shards
        first = micro_batch * micro + shard * rows
        return first, first + rows

    def layout(self, stage: int = -1) -> list[list[tuple[int, int]]]:
        """Return `samples_of` for each micro-batch and each batch shard of a stage."""
        steps = self.stages[stage].gradient_accumulation_steps
        return [[self.samples_of(stage, j, d) for d in range(self.batch_shards)] for j in range(steps)]


_NOT_PRINTED = ("manager", "mesh", "warnings", "rl")


def _json(value: Any) -> Any:
    """Return a value as JSON writes it: whole numbers as int, others as float."""
    if isinstance(value, Fraction | float):
        return int(value) if value == int(value) else float(value)
    return value


def _check_machine(num_devices: int, num_hosts: int, samples_per_epoch: int | None) -> None:
    for name, value in (("num_devices", num_devices), ("num_hosts", num_hosts)):
        if value < 1:
            raise ConfigError(f"{name}={value}: must be at least 1; works: {name}=1")
    if num_devices % num_hosts:
        nearest = max(h for h in range(1, min(num_hosts, num_devices) + 1) if num_devices % h == 0)
        raise ConfigError(
            f"num_hosts={num_hosts}: must divide the {num_devices} devices; works: num_hosts={nearest}"
        )
    if samples_per_epoch is not None and samples_per_epoch < 1:
        raise ConfigError(
            f"samples_per_epoch={samples_per_epoch}: must be at least 1; works: samples_per_epoch=1"
        )


def _check_expansion(config: ConfigDict, num_hosts: int = 1) -> Fraction:
    """Return e, or raise ConfigError where it has no meaning whatever the hosts."""
    key, e = "expansion_factor_real_data", exact(config.expansion_factor_real_data)
    if e == -1 or (e >= 1 and e.denominator == 1) or (0 < e < 1 and e.numerator == 1):
        return e
    if e <= 0:
        rule, works = "must be -1, a whole number from 1 on, or 1 / a whole number", "-1"
    elif e > 1:
        rule, works = "above 1 it must be whole (one host in e loads)", str(_divisor_below(num_hosts, e))
    else:
        rule, works = "below 1 it must be 1 / a whole number (hosts now / hosts then)", f"1/{round(1 / e)}"
    raise ConfigError(f"{key}={plain_number(e)}: {rule}; works: {key}={works}")


def expansion_factor(
    config: ConfigDict, num_hosts: int, checkpoint_hosts: tuple[int, int] | None = None
) -> Fraction:
    """Return e, checked against the hosts that are here and those that wrote the checkpoint.

    Args:
      config: the run's config.
      num_hosts: H.
      checkpoint_hosts: (hosts, loading hosts) of the run that wrote the newest checkpoint; None: there is none.

    Raises:
      ConfigError: e has no meaning, or none with these hosts; the message names one that has.
    """
    key, e = "expansion_factor_real_data", _check_expansion(config, num_hosts)
    if e > 1 and num_hosts % e:
        raise ConfigError(
            f"{key}={e}: must divide the {num_hosts} hosts, of which one in {e} loads; "
            f"works: {key}={_divisor_below(num_hosts, e)}"
        )
    if checkpoint_hosts is None or checkpoint_hosts[0] == num_hosts:
        return e
    loading_then = checkpoint_hosts[1]
    if 0 < e < 1 and num_hosts != e * loading_then:
        share = Fraction(num_hosts, loading_then)
        works = share if share.numerator == 1 and share < 1 else -1
        raise ConfigError(
            f"{key}={plain_number(e)}: must be hosts now / loading hosts of the checkpoint = {num_hosts}/"
            f"{loading_then}; works: {key}={works}"
        )
    return e


def _divisor_below(number: int, most: Fraction) -> int:
    return max(d for d in range(1, number + 1) if number % d == 0 and d <= most)


def _bubble(stages: int, microbatches: int, repeats: int) -> float:
    """Return the share of its time that a stage waits: S - 1 of M x R + S - 1 ticks.

    Reference: Narayanan et al. 2021 (https://arxiv.org/abs/2104.04473), section 2.2, as a share of all ticks.
    """
    return (stages - 1) / (microbatches * repeats + stages - 1)


def _eval_batch(config: ConfigDict, num_devices: int, divisor: MicrobatchUnit, pass_rows: Fraction) -> int:
    """Return the samples of one eval pass: stated, or those of a pass of training cut down to what the devices hold
    evenly."""
    stated = config.eval_per_device_batch_size
    if stated is None:
        return max(1, math.floor(pass_rows / divisor.rows)) * divisor.rows
    rows = exact(stated) * num_devices
    if rows % divisor.rows:
        key = "eval_per_device_batch_size"
        nearest = nearest_multiple(exact(stated), Fraction(divisor.rows, num_devices))
        raise ConfigError(
            f"{key}={plain_number(stated)}: x {num_devices} devices = {plain_number(rows)} samples "
            f"must be divisible by {divisor}; works: {key}={plain_number(nearest)}"
        )
    return int(rows)


def _epochs(config: ConfigDict, total_samples: int | None, samples_per_epoch: int | None) -> float | None:
    if total_samples is not None and samples_per_epoch is not None:
        return total_samples / samples_per_epoch
    return None if config.num_epochs is None else float(config.num_epochs)


def _warnings(manager: RampupBatchManager) -> tuple[str, ...]:
    last, total = manager.stages[-1], manager.total_samples
    if total is None or total >= last.threshold:
        return ()
    return (
        f"the run ends inside its ramp after {manager.total_steps} updates ({total} samples): its last stage "
        f"of {last.global_batch_size} samples per update begins after {last.first_step} updates "
        f"({last.first_sample} samples)",
    )
