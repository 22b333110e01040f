"""The batch of reinforcement learning: prompts, responses, pairs, chunks. No JAX.

A batch is `batch_size` prompts, each with G = `num_generations` responses: the effective batch of prompt-response
pairs, on which an update trains. Generation and training may go through it in chunks of whole groups; the update does
not depend on them. A batch serves `num_iterations` updates, and `samples_seen` counts its prompts after the last.

The names are MaxText's (`configs/post_train/rl.yml`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from fractions import Fraction

from ml_collections import ConfigDict

from maxbatch.config.values import exact, plain_number
from maxbatch.plan.mesh_shape import MeshShape
from maxbatch.plan.microbatches import MicrobatchUnit
from maxbatch.system.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class RLBatch:
    """Every number of a batch of prompt-response pairs.

    Attributes:
      batch_size: prompts.
      num_generations: G, responses per prompt.
      effective_batch_size: pairs, batch_size x G.
      micro_batch_size: pairs per chunk of training.
      num_micro_batches: chunks of training.
      train_micro_batch_size: prompts per chunk of training.
      rollout_micro_batch_size: prompts per chunk of generation.
      num_iterations: updates per batch.
      num_trainer_devices: devices that train.
      num_sampler_devices: devices that sample: the same ones, or as many others.
    """

    batch_size: int
    num_generations: int
    effective_batch_size: int
    micro_batch_size: int
    num_micro_batches: int
    train_micro_batch_size: int
    rollout_micro_batch_size: int
    num_iterations: int
    num_trainer_devices: int
    num_sampler_devices: int

    @classmethod
    def from_config(cls, config: ConfigDict, num_devices: int = 1, num_slices: int = 1) -> RLBatch:
        """Take the batch from the config.

        Args:
          config: the run's config, with a `batch_size`.
          num_devices: N, those that train and those that sample.
          num_slices: slices that the devices span.

        Raises:
          ConfigError: devices that cannot be shared out, a chunk that cuts a group, does not divide the batch, or that
            the devices cannot split; the message names the nearest that works.
        """
        _check_other_keys(config)
        trainers, samplers = shared_out(config, num_devices)
        mesh = MeshShape.from_config(config, trainers, num_slices)
        divisor = MicrobatchUnit.from_config(config, trainers, mesh)
        rollout_shards = MeshShape.from_config(config, samplers, num_slices).batch_shards
        batch_shards = divisor.rows
        batch, group = config.batch_size, config.num_generations
        pairs = batch * group
        micro = config.micro_batch_size
        in_prompts = {"train_micro_batch_size": batch_shards, "rollout_micro_batch_size": rollout_shards}
        if micro == -1:
            prompts = batch
            _check_whole_batch(config, in_prompts)
        else:
            needed = math.lcm(group, *(shards for name, shards in in_prompts.items() if config[name] == -1))
            _check(
                "micro_batch_size", micro, pairs, needed,
                f"a multiple of num_generations={group} (groups stay whole)"
                + (f" and divisible by {needed // group} x {group}" if needed != group else "")
                + f" that divides the effective batch of {batch} prompts x {group} = {pairs} pairs",
            )  # fmt: skip
            prompts = micro // group
        chunks = {}
        for name, shards in in_prompts.items():
            stated = config[name]
            if stated != -1:
                needed = shards // math.gcd(shards, group)
                _check(
                    name, stated, batch, needed,
                    f"a number of prompts that divides batch_size={batch}"
                    + (f", whose pairs are divisible by {shards} batch shards" if shards > 1 else ""),
                )  # fmt: skip
            chunks[name] = prompts if stated == -1 else stated
        train = chunks["train_micro_batch_size"]
        return cls(
            batch_size=batch,
            num_generations=group,
            effective_batch_size=pairs,
            micro_batch_size=train * group,
            num_micro_batches=batch // train,
            num_iterations=config.num_iterations,
            num_trainer_devices=trainers,
            num_sampler_devices=samplers,
            **chunks,
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is allowed and hardly meant."""
        if self.num_generations > 1:
            return ()
        return (
            "num_generations=1: a response without others to compare with has the advantage 0, so nothing is learned",
        )


def shared_out(config: ConfigDict, num_devices: int) -> tuple[int, int]:
    """Return how many devices train and how many sample: all do both, or the two fractions each have their own.

    Raises:
      ConfigError: the fractions do not give whole numbers of devices, or together more than there are.
    """
    shares = {name: exact(config[name]) for name in ("trainer_devices_fraction", "sampler_devices_fraction")}
    if all(share == 1 for share in shares.values()):
        return num_devices, num_devices
    counts = []
    for name, share in shares.items():
        count = share * num_devices
        if count.denominator != 1 or not 0 < count < num_devices:
            works = (
                1 if num_devices == 1 else Fraction(min(max(round(count), 1), num_devices - 1), num_devices)
            )
            both = " (for both fractions: they share the device)" if num_devices == 1 else ""
            raise ConfigError(
                f"{name}={plain_number(share)}: x {num_devices} devices = {plain_number(count)} must be a whole number "
                f"that leaves devices to the others; works: {name}={works}{both}"
            )
        counts.append(int(count))
    trainers, samplers = counts
    if trainers + samplers > num_devices:
        name = "sampler_devices_fraction"
        raise ConfigError(
            f"{name}={plain_number(shares[name])}: with trainer_devices_fraction="
            f"{plain_number(shares['trainer_devices_fraction'])} must be at most 1 together, or both be 1; "
            f"works: {name}={Fraction(num_devices - trainers, num_devices)}"
        )
    return trainers, samplers


def _check_other_keys(config: ConfigDict) -> None:
    """What states a length or a batch in the samples of pre-training says nothing here."""
    for name in ("train_tokens", "reference_batch_size"):
        if config[name] is not None:
            raise ConfigError(
                f"{name}={config[name]}: must not be stated beside batch_size, since a sample is a prompt; "
                f"works: {name}=null"
            )
    if config.steps is not None and config.steps % config.num_iterations:
        works = max(1, round(config.steps / config.num_iterations)) * config.num_iterations
        raise ConfigError(
            f"steps={config.steps}: must be a multiple of num_iterations={config.num_iterations}, the updates per "
            f"batch; works: steps={works}"
        )
    room = config.max_target_length - config.max_prefill_predict_length
    if room < 1:
        raise ConfigError(
            f"max_prefill_predict_length={config.max_prefill_predict_length}: must be less than max_target_length="
            f"{config.max_target_length}, which holds prompt and response; "
            f"works: max_target_length={2 * config.max_prefill_predict_length}"
        )
    if exact(config.expansion_factor_real_data) not in (1, -1):
        raise ConfigError(
            f"expansion_factor_real_data={config.expansion_factor_real_data}: must be -1 beside batch_size, since "
            "every host reads the prompts; works: expansion_factor_real_data=-1"
        )


def _check_whole_batch(config: ConfigDict, shards_of: Mapping[str, int]) -> None:
    """Without chunks all pairs go at once, and the devices must split them evenly."""
    group = config.num_generations
    for name, shards in shards_of.items():
        if config[name] == -1 and config.batch_size * group % shards:
            step = shards // math.gcd(shards, group)
            works = max(1, round(config.batch_size / step)) * step
            raise ConfigError(
                f"batch_size={config.batch_size}: x num_generations={group} = {config.batch_size * group} pairs must "
                f"be divisible by {shards} batch shards; works: batch_size={works}"
            )


def _check(name: str, value: int, whole: int, unit: int, rule: str) -> None:
    """Raise ConfigError unless value is a multiple of unit that divides whole."""
    if value % unit == 0 and whole % value == 0:
        return
    fitting = [d for d in range(1, whole + 1) if whole % d == 0 and d % unit == 0]
    works = f"; works: {name}={min(fitting, key=lambda d: abs(d - value))}" if fitting else ""
    raise ConfigError(f"{name}={value}: must be {rule}{works}")
