"""The batch of reinforcement learning: prompts, responses, pairs, chunks. No JAX.

A batch is `batch_size` prompts, each with G = `num_generations` responses: the effective batch of
prompt-response pairs. It is cut in stream order into `num_minibatches` updates, `num_iterations`
times over, and `samples_seen` counts its prompts after the last. Generation and training may go
through it in chunks of whole groups; the updates do not depend on them. With `filter_groups` a
batch is made of the next groups whose rewards differ.

The names are MaxText's (`configs/post_train/rl.yml`).
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

from maxbatch.config.combined import PlanConfig
from maxbatch.config.sections import PromptBatchConfig
from maxbatch.config.values import Number, exact, plain_number
from maxbatch.plan.divisors import nearest_divisor
from maxbatch.plan.mesh_shape import RunMeshes
from maxbatch.plan.microbatches import MicrobatchUnit, SplitStage, held_rows
from maxbatch.plan.refusal import Refusal
from maxbatch.plan.stages import MOST_SAMPLES, nearest_multiple


class RLBatch(NamedTuple):
    """Every number of a batch of prompt-response pairs."""

    batch_size: int  # prompts
    num_generations: int  # G, responses per prompt
    effective_batch_size: int  # pairs, batch_size x G
    micro_batch_size: int  # pairs per chunk of training
    num_micro_batches: int  # chunks of training in one pass over the batch
    # prompts per chunk of training; a fraction where padding cuts a group
    train_micro_batch_size: Number
    rollout_micro_batch_size: int  # prompts per chunk of generation
    num_iterations: int  # passes over a batch
    num_minibatches: int  # updates per pass
    minibatch_size: int  # prompts per update
    updates_per_batch: int  # num_minibatches x num_iterations
    # most prompts read for a batch; None: groups are not filtered
    max_prompts_per_batch: int | None
    off_policy_steps: int  # batches between sampling and training
    num_trainer_devices: int  # devices that train
    num_sampler_devices: int  # devices that sample: the same ones, or as many others
    rollout_data_parallelism: int  # parts into which the responses of a chunk are split
    rollout_tensor_parallelism: int  # devices that share the weights of one such part
    # tokens of a device in a chunk of training whose pairs share rows: micro_batch_size counts its
    # rows, and num_micro_batches are those of a row a pair; None: a row a pair
    max_tokens_per_pass: int | None = None

    @classmethod
    def if_stated(
        cls, config: PlanConfig, meshes: RunMeshes, unit: MicrobatchUnit
    ) -> RLBatch | None:
        """Returns the batch of the config, or None if its samples are no prompts; `unit` is that of
        training devices.

        Raises:
          ConfigError: a chunk cuts a group, does not divide the batch, or cannot be split by the
            devices.
        """
        if not config.recipe.is_sampled:
            return None
        batch, group = config.prompts.batch_size, config.prompts.num_generations
        assert batch is not None, "prompts are chosen by their number"
        _check_other_keys(config, batch)
        minibatch = batch // config.prompts.num_minibatches
        budget = config.batch.max_tokens_per_pass
        if budget is not None:
            train, passes, rollout = _packed_chunks(config, batch, unit)
        elif config.batch.batch_padding:
            train, passes, rollout = _padded_chunks(config.prompts, batch, unit.rows)
        else:
            train, rollout = _chunks(config.prompts, batch, unit.rows, meshes.sampling.batch_shards)
            train, passes = train * group, minibatch // train
        return cls(
            batch_size=batch,
            num_generations=group,
            effective_batch_size=batch * group,
            micro_batch_size=train,
            num_micro_batches=passes * config.prompts.num_minibatches,
            train_micro_batch_size=plain_number(Fraction(train, group)),
            rollout_micro_batch_size=rollout,
            num_iterations=config.prompts.num_iterations,
            num_minibatches=config.prompts.num_minibatches,
            minibatch_size=minibatch,
            updates_per_batch=_updates_per_batch(config.prompts),
            max_prompts_per_batch=_most_prompts(config.prompts, batch),
            off_policy_steps=config.prompts.off_policy_steps,
            num_trainer_devices=meshes.training.num_devices,
            num_sampler_devices=meshes.sampling.num_devices,
            rollout_data_parallelism=meshes.sampling.batch_shards,
            rollout_tensor_parallelism=meshes.sampling.sizes["tensor"],
            max_tokens_per_pass=budget,
        )

    @property
    def stage(self) -> SplitStage:
        """The one stage of the run, in prompts."""
        chunk = Fraction(self.micro_batch_size, self.num_generations)
        is_packed = self.max_tokens_per_pass is not None
        return SplitStage(
            Fraction(0), self.batch_size, chunk, self.num_micro_batches, is_packed=is_packed
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about values that are allowed but probably unintended."""
        alone = "num_generations=1: a single response has the advantage 0, so nothing is learned"
        return (alone,) if self.num_generations == 1 else ()

    @property
    def chunks_per_update(self) -> int:
        """Chunks of training of one update."""
        return self.num_micro_batches // self.num_minibatches


def _packed_chunks(config: PlanConfig, batch: int, unit: MicrobatchUnit) -> tuple[int, int, int]:
    """Returns the rows of a pass, the most passes of an update, and the prompts per chunk of
    generation.
    """
    prompts = config.prompts
    for name in ("micro_batch_size", "train_micro_batch_size"):
        if prompts[name] != -1:
            rule = (
                "must be -1 beside max_tokens_per_pass, from which chunks of training follow "
                "(rollout_micro_batch_size states those of generation)"
            )
            raise Refusal(config, name, rule, {name: -1})
    pairs = batch // prompts.num_minibatches * prompts.num_generations
    rows = held_rows(config, unit, pairs)
    rollout = prompts.rollout_micro_batch_size
    return rows, -(-pairs // rows), batch if rollout == -1 else min(batch, rollout)


def _check_other_keys(config: PlanConfig, batch: int) -> None:
    """Raises Refusal for values that mean nothing beside a batch of prompts, and for more pairs
    than machines hold.
    """
    length, prompt = config.length.max_target_length, config.prompts.max_prefill_predict_length
    group, updates = config.prompts.num_generations, _updates_per_batch(config.prompts)
    if batch % config.prompts.num_minibatches:
        rule = f"must divide batch_size={batch}: all updates train on equally many prompts"
        nearest = nearest_divisor(batch, config.prompts.num_minibatches) or 1
        raise Refusal(config, "num_minibatches", rule, {"num_minibatches": nearest})
    _check_filter(config, batch, updates)

    a_sample = "must not be stated beside batch_size, since a sample is a prompt"
    if config.length.train_tokens is not None:
        in_samples = {
            "train_tokens": None,
            "train_samples": -(-config.length.train_tokens // length),
        }
        raise Refusal(config, "train_tokens", a_sample, in_samples)
    if config.rates.reference_batch_size is not None:
        raise Refusal(config, "reference_batch_size", a_sample, {"reference_batch_size": None})
    if config.length.steps is not None and config.length.steps % updates:
        product = f"num_iterations={config.prompts.num_iterations}"
        if config.prompts.num_minibatches > 1:
            product = f"num_minibatches={config.prompts.num_minibatches} x {product} = {updates}"
        rule = f"must be a multiple of {product}, the updates per batch"
        raise Refusal(
            config, "steps", rule, {"steps": nearest_multiple(config.length.steps, updates)}
        )

    if prompt >= length:
        rule = f"must be less than max_target_length={length}, which holds prompt and response"
        longer, shorter = (
            {"max_target_length": 2 * prompt},
            {"max_prefill_predict_length": length // 2},
        )
        works = longer if prompt < 2**31 else shorter
        raise Refusal(config, "max_prefill_predict_length", rule, works)
    if exact(config.batch.expansion_factor_real_data) not in (1, -1):
        key, rule = (
            "expansion_factor_real_data",
            "must be -1 beside batch_size, since every host reads the prompts",
        )
        raise Refusal(config, key, rule, {key: -1})
    if batch * group > MOST_SAMPLES:
        rule = f"x num_generations={group} must be at most {MOST_SAMPLES} pairs"
        works = {"batch_size": min(batch, 32), "num_generations": min(group, 8)}
        raise Refusal(config, "batch_size", rule, works)


def _updates_per_batch(prompts: PromptBatchConfig) -> int:
    return prompts.num_minibatches * prompts.num_iterations


def _most_prompts(prompts: PromptBatchConfig, batch: int) -> int | None:
    """Returns the most prompts that are read for a batch; None if groups are not filtered."""
    if not prompts.filter_groups:
        return None
    return 4 * batch if prompts.max_prompts_per_batch is None else prompts.max_prompts_per_batch


def _check_filter(config: PlanConfig, batch: int, updates: int) -> None:
    """Raises Refusal for settings that conflict with `filter_groups`."""
    prompts, length = config.prompts, config.length
    most = prompts.max_prompts_per_batch
    if not prompts.filter_groups:
        return
    if prompts.num_generations == 1:
        rule = "replaces groups of equal rewards, and num_generations=1 gives no others"
        raise Refusal(config, "filter_groups", rule, {"num_generations": 8})
    if most is not None and most < batch:
        rule = f"must be at least batch_size={batch}, the prompts of a batch"
        raise Refusal(config, "max_prompts_per_batch", rule, {"max_prompts_per_batch": batch})
    for name in ("train_samples", "num_epochs"):
        if length[name] is not None:
            batches = 100 if length.train_samples is None else -(-length.train_samples // batch)
            rule = (
                "must not be stated beside filter_groups=true, which reads as many prompts as it "
                "needs"
            )
            raise Refusal(config, name, rule, {name: None, "steps": batches * updates})


def _chunks(
    prompts: PromptBatchConfig, batch: int, train_shards: int, rollout_shards: int
) -> tuple[int, ...]:
    """Returns the prompts per chunk of training and of generation, whose pairs are split into a
    number of parts.

    A chunk of training divides the prompts of an update, one of generation those of a batch.
    """
    shards_of = {"train_micro_batch_size": train_shards, "rollout_micro_batch_size": rollout_shards}
    group, pairs_per_chunk = prompts.num_generations, prompts.micro_batch_size
    updates = prompts.num_minibatches
    whole_of = {"train_micro_batch_size": batch // updates, "rollout_micro_batch_size": batch}
    # The fewest prompts whose pairs the shards divide.
    units = {name: shards // math.gcd(shards, group) for name, shards in shards_of.items()}
    most = MOST_SAMPLES // group
    other_batch = {"batch_size": nearest_multiple(batch, math.lcm(*units.values()) * updates, most)}

    def check(name: str, rule: str, whole: int, unit: int) -> None:
        if prompts[name] % unit or whole % prompts[name]:
            nearest = nearest_divisor(whole, prompts[name], unit)
            raise Refusal(
                prompts, name, f"must be {rule}", {name: nearest} if nearest else other_batch
            )

    # A chunk that is not stated is as large as the stated pairs of a chunk, or as the whole.
    unless = " unless batch_padding=true"
    unstated = [name for name in shards_of if prompts[name] == -1]
    if pairs_per_chunk != -1:
        unit = math.lcm(*(units[name] for name in unstated))
        split = f" and divisible by {unit} x {group}" if unit > 1 else ""
        whole = min((whole_of[name] for name in unstated), default=batch)
        of = (
            "the effective batch"
            if whole == batch
            else f"an update (batch_size={batch} / num_minibatches={updates})"
        )
        rule = (
            f"a multiple of num_generations={group} (groups stay whole){split} that divides {of} "
            f"of {whole} prompts x {group} = {whole * group} pairs"
        )
        check("micro_batch_size", rule, whole * group, unit * group)
        whole_of |= dict.fromkeys(unstated, pairs_per_chunk // group)

    for name, shards in shards_of.items():
        whole = whole_of[name]
        if name not in unstated:
            split = f", whose pairs are divisible by {shards} batch shards" if shards > 1 else ""
            of = f"batch_size={batch}" if whole == batch else f"the {whole} prompts of an update"
            check(name, f"a number of prompts that divides {of}{split}", whole, units[name])
        elif whole % units[name] and updates > 1 and not batch % units[name]:
            rule = (
                f"leaves {whole} x {group} pairs per update, which must be divisible by {shards} "
                f"batch shards{unless}"
            )
            works = nearest_divisor(batch // units[name], updates) or 1
            raise Refusal(prompts, "num_minibatches", rule, {"num_minibatches": works})
        elif whole % units[name]:
            rule = (
                f"x num_generations={group} = {batch * group} pairs must be divisible by {shards} "
                f"batch shards{unless}"
            )
            raise Refusal(prompts, "batch_size", rule, other_batch)
    return tuple(whole_of[name] if name in unstated else prompts[name] for name in shards_of)


def _padded_chunks(
    prompts: PromptBatchConfig, batch: int, train_shards: int
) -> tuple[int, int, int]:
    """Returns the pairs per chunk of training, the chunks of an update, and the prompts per chunk
    of generation.

    As in pre-training, an update takes the fewest passes, with the fewest rows per pass that hold
    its pairs. Stated chunks are upper bounds.
    """
    group, pairs = (
        prompts.num_generations,
        batch // prompts.num_minibatches * prompts.num_generations,
    )
    name, unit, most = (
        "micro_batch_size",
        1,
        pairs if prompts.micro_batch_size == -1 else prompts.micro_batch_size,
    )
    if prompts.train_micro_batch_size != -1:
        name, unit, most = "train_micro_batch_size", group, prompts.train_micro_batch_size * group
    if prompts[name] == -1:
        most = -(-pairs // train_shards) * train_shards  # one pass, whatever the devices
    if most < train_shards:
        rule = f"must hold a pair for each of {train_shards} batch shards"
        raise Refusal(prompts, name, rule, {name: -(-train_shards // unit)})
    passes = -(-pairs // (most // train_shards * train_shards))
    rollout = prompts.rollout_micro_batch_size
    if rollout == -1:
        rollout = (
            batch if prompts.micro_batch_size == -1 else max(1, prompts.micro_batch_size // group)
        )
    return -(-pairs // (passes * train_shards)) * train_shards, passes, min(batch, rollout)
