"""Warnings about allowed values that have no effect, or another one than they suggest."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from maxbatch.config.combined import PlanConfig
from maxbatch.config.sections import KEYS, RampConfig
from maxbatch.config.values import exact
from maxbatch.plan.mesh_shape import MeshShape
from maxbatch.plan.rampup import RampupBatchManager
from maxbatch.plan.refusal import stated
from maxbatch.plan.seesaw import Seesaw

_MOST_TRIES = 200_000  # stages of ramps that are tried


def unused_keys(
    config: PlanConfig, mesh: MeshShape, manager: RampupBatchManager, resumes: bool
) -> Iterator[str]:
    """Yields a warning for each stated value without an effect on the devices that train."""
    scaling = stated(config, "learning_rate_scaling")
    if (
        config.rates.reference_batch_size is not None
        and config.rates.learning_rate_scaling == "none"
    ):
        yield (
            f"{stated(config, 'reference_batch_size')} has no effect without "
            "learning_rate_scaling=linear or sqrt"
        )
    elif (
        config.rates.learning_rate_scaling != "none"
        and len(manager.stages) == 1
        and config.rates.reference_batch_size is None
    ):
        yield (
            f"{scaling} has no effect without reference_batch_size, the batch that learning_rate "
            "was tuned for"
        )

    batches = [
        name
        for name in ("global_batch_size", "batch_size_schedule")
        if config.batch[name] is not None
    ]
    if not config.ramp.enable_rampup_batch_size:
        names = [key.name for key in RampConfig.declared]
        if ramp := [name for name in names if config[name] != KEYS[name].default_value]:
            verb = "have" if len(ramp) > 1 else "has"
            reason = (
                f": {stated(config, *batches)} replaces the ramp"
                if batches
                else (" without enable_rampup_batch_size=true")
            )
            yield f"{stated(config, *ramp)} {verb} no effect{reason}"

    if config.batch.batch_padding and not batches and not config.recipe.is_sampled:
        yield (
            "batch_padding=true has no effect without global_batch_size or batch_size_schedule, "
            "which it pads"
        )

    if 0 < exact(config.batch.expansion_factor_real_data) < 1 and not resumes:
        factor = stated(config, "expansion_factor_real_data")
        yield (
            f"{factor} has no effect on a new run: below 1 it is for a resume, on e x the hosts "
            "that loaded before"
        )

    if config.mesh.num_pipeline_microbatches > 1 and mesh.num_pipeline_stages == 1:
        setting = stated(config, "num_pipeline_microbatches")
        yield (
            f"{setting} has no effect without pipeline stages (ici_pipeline_parallelism or "
            "dcn_pipeline_parallelism)"
        )

    if mesh.sizes["context"] == 1:
        of_rows = ("context_parallel_strategy", "context_parallel_load_balance")
        if names := [name for name in of_rows if config.model[name] != KEYS[name].default_value]:
            verb = "have" if len(names) > 1 else "has"
            yield f"{stated(config, *names)} {verb} no effect without a context axis"

    # A warm-up by samples starts at rate 0: where all updates start at sample 0, none has another.
    before_last = max((manager.total_steps or 1) - 1, manager.anchor[0])
    if (
        manager.total_steps
        and config.rates.warmup_steps_fraction
        and not manager.position_after(before_last)
    ):
        yield (
            "every rate of the run is 0, so nothing is learned: "
            f"{stated(config, 'warmup_steps_fraction')} warms up from 0, and all updates start at "
            "sample 0; works: warmup_steps_fraction=0"
        )

    model = config.model
    weighs_all_alike = (
        model.num_experts > 1 and model.num_experts_per_tok == 1 and model.norm_topk_prob
    )
    if weighs_all_alike and not model.load_balance_loss_weight and not model.router_z_loss_weight:
        yield (
            "the router does not learn: num_experts_per_tok=1 with norm_topk_prob=true gives "
            "every expert the weight 1, whatever its score; works: norm_topk_prob=false, or "
            "num_experts_per_tok=2"
        )

    if config.prompts.max_prompts_per_batch is not None and not config.prompts.filter_groups:
        yield (
            f"{stated(config, 'max_prompts_per_batch')} has no effect without filter_groups=true, "
            "which it bounds"
        )

    if not config.optimizer.skip_step_on_spikes:
        of_spikes = ("skip_step_interval", "skip_step_scaling_factor")
        if names := [
            name for name in of_spikes if config.optimizer[name] != KEYS[name].default_value
        ]:
            verb = "have" if len(names) > 1 else "has"
            yield f"{stated(config, *names)} {verb} no effect without skip_step_on_spikes=true"

    name = "reproducible_rows"
    if (
        not config.optimizer.reproducible_sums
        and config.optimizer[name] != KEYS[name].default_value
    ):
        yield f"{stated(config, name)} has no effect without reproducible_sums=true"

    yield from _stages_without_updates(config, manager)


def _stages_without_updates(config: PlanConfig, manager: RampupBatchManager) -> Iterator[str]:
    """Yields a warning about stages that a single update of an earlier stage skips."""
    if manager.anchor != (0, 0) or Seesaw.if_stated(config):
        return
    total = manager.total_samples
    reached = [stage for stage in manager.stages if total is None or stage.first_sample < total]
    if skipped := [index for index, stage in enumerate(reached) if stage.num_steps == 0]:
        plural, verb = ("s", "have") if len(skipped) > 1 else ("", "has")
        problem = (
            f"stage{plural} {', '.join(map(str, skipped))} of the ramp {verb} no update: earlier "
            "updates pass them"
        )
        works = ""
        if config.ramp.enable_rampup_batch_size:
            batches = [stage.global_batch_size for stage in manager.stages]
            works = f"; works: global_rampup_samples={enough_samples(batches)}"
        yield problem + works


def enough_samples(batches: list[int]) -> int:
    """Returns a `global_rampup_samples` that gives every stage an update: the least one, if few
    have to be tried.
    """
    n = len(batches) - 1
    enough = n * max(batches[:-1])  # then no update passes two thresholds
    # Stage k is entered after at least one batch of each stage before it; a length that puts the
    # next threshold before that entry is too short, so the search begins above these lengths.
    entries = itertools.accumulate(batches[:-2])
    first = max((n * entry // (stage + 2) for stage, entry in enumerate(entries)), default=0) + 1
    tried = range(first, min(enough, first + _MOST_TRIES // n))
    return next((length for length in tried if visits_all(batches, length)), enough)


def visits_all(batches: list[int], length: int) -> bool:
    """Returns whether every stage of a ramp of this length has an update."""
    n, position = len(batches) - 1, 0
    for stage, batch in enumerate(batches[:-1]):
        if position * n >= (stage + 1) * length:
            return False
        position += -(-((stage + 1) * length - position * n) // (batch * n)) * batch
    return True
