"""A run that continues a MaxText run: its position in the stream, which MaxText's state lacks."""

from __future__ import annotations

from collections.abc import Callable

from maxbatch.config.combined import PlanConfig
from maxbatch.config.sections import ModelConfig
from maxbatch.plan.batch import BatchPlan
from maxbatch.plan.place import Place
from maxbatch.plan.stages import stated_batches
from maxbatch.run.folder.position import Position
from maxbatch.run.weights.foreign import ForeignState
from maxbatch.system.errors import ConfigError
from maxbatch.update.state import TrainState, first_average


def position_taken_over(
    config: PlanConfig,
    start_samples: int | None,
    source: ForeignState,
    plan_from_start: Callable[[], BatchPlan],
) -> Position:
    """Returns the position after the updates that a MaxText state holds.

    With one constant global batch the updates say how many samples were read. Otherwise the devices
    of the MaxText run decide, and `start_samples` must state it.

    Args:
      start_samples: the samples that its updates read, as the config states them; None: not stated.
      plan_from_start: returns the plan of the whole run on the devices at hand.

    Raises:
      ConfigError: the position must be stated, or the state holds no optimizer state.
    """
    updates = source.updates
    samples = start_samples
    if samples is None:
        samples = _samples_by_the_batch(config, updates)
    if samples is None:
        here = plan_from_start().manager.position_after(updates)
        raise ConfigError(
            f"{source.stated}: its {updates} updates read as many samples as its devices gave, "
            "unless global_batch_size states one batch; state them; on the devices at hand "
            f"works: start_samples={here}"
        )
    return Position(step=updates, place=Place(samples), taken_over=updates)


def state_taken_over(model: ModelConfig, source: ForeignState, abstract: TrainState) -> TrainState:
    """Reads parameters and optimizer state onto the shardings of `abstract`; an average starts as
    the parameters.

    Raises:
      ConfigError: the state is damaged, or of another model or optimizer.
    """
    params, opt_state = source.read_state(model, abstract.params, abstract.opt_state)
    average = None if abstract.average is None else first_average(params)
    return TrainState(params, opt_state, average=average)


def _samples_by_the_batch(config: PlanConfig, updates: int) -> int | None:
    """Returns the samples of a number of updates if the config states one constant global batch;
    else None.
    """
    batches = stated_batches(config)
    if batches is None or len({batch for _, batch in batches}) > 1:
        return None
    return updates * batches[0][1]
