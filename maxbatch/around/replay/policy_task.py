"""Updates of `maxbatch rl`, taken again: their rows are prompts with responses.

Responses are taken from the run's transcripts where these have their tokens, from the checkpoint
where they were sampled ahead, and else drawn again by the policy that had sampled them.

Shapes: A chunks of M pairs, L tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxbatch.around.replay.recorded_run import RecordedRun, Segment
from maxbatch.around.replay.task import (
    Measuring,
    OpenedTask,
    Pieces,
    ReplayedTask,
    TaskKind,
    UpdateRows,
    recorded_plan,
)
from maxbatch.around.replay.token_losses import pieces_of_text
from maxbatch.config.sections import KEYS
from maxbatch.config.values import Value, shown
from maxbatch.data.feed.placement import BatchShape
from maxbatch.data.stream.rows import RowArrays
from maxbatch.kinds.prompt.collecting import TrainedResponse
from maxbatch.kinds.prompt.kept_responses import KeptResponses
from maxbatch.kinds.prompt.objective import Pairs, policy_objective
from maxbatch.kinds.prompt.run import (
    OpenedPolicy,
    PlannedPolicy,
    PolicyBatch,
    RunningPolicy,
    open_policy_training,
)
from maxbatch.plan.batch import ResumePoint
from maxbatch.plan.mesh_shape import BATCH_AXES
from maxbatch.run.context import RunContext
from maxbatch.run.folder.metrics_schema import Metric
from maxbatch.run.folder.position import Position
from maxbatch.run.folder.run_folder import WARM_START
from maxbatch.run.weights.origin import RunOrigin
from maxbatch.update.state import TrainState

_LONGEST_TEXT = 60  # characters of a response in the table
# How the run was laid out; responses and updates do not depend on it.
_LAYOUT = (
    "trainer_devices_fraction",
    "sampler_devices_fraction",
    "rollout_data_parallelism",
    "rollout_tensor_parallelism",
)


class Response(NamedTuple):
    """A response that is trained on (`maxbatch.around.replay.task.Content`)."""

    number: int  # among the responses to its prompt, from 0
    trained: TrainedResponse
    losses: Pieces  # of its tokens; empty if they are not known

    def to_json(self) -> dict[str, object]:
        """Returns its fields of an object of `maxbatch replay --json`."""
        return {
            "response_number": self.number,
            "prompt": self.trained.prompt,
            "response": self.trained.response,
            "tokens": len(self.trained.tokens),
            "reward": self.trained.reward,
            "rewards": self.trained.rewards,
            "advantage": self.trained.advantage,
        }

    @property
    def cells(self) -> Mapping[str, str]:
        """Its cells of the table on the terminal, by column."""
        return {
            "number": str(self.number),
            "reward": f"{self.trained.reward:.6g}",
            "response": shown(self.trained.response, _LONGEST_TEXT),
        }

    @property
    def title(self) -> str:
        """What the page adds to the number of its prompt."""
        return (
            f", response {self.number}, with the reward {self.trained.reward:.5g} and the "
            f"advantage {self.trained.advantage:.5g}"
        )

    @property
    def texts(self) -> Iterator[tuple[str, Pieces]]:
        """The prompt and the response on the page."""
        yield "Prompt", [(self.trained.prompt, None)]
        yield "Response", self.losses or [(self.trained.response, None)]


@dataclasses.dataclass(frozen=True, eq=False)
class PolicyTask(ReplayedTask):
    """Training of a policy, planned from a position on."""

    segment: Segment
    opened: OpenedPolicy
    planned: PlannedPolicy
    measuring: Measuring

    def before(
        self, running: RunningPolicy, state: TrainState, batch: PolicyBatch
    ) -> tuple[PolicyBatch, UpdateRows]:
        """Returns the batch with its pairs, which are sampled now, and the rows of the update."""
        policy, part = running.policy(state, batch), running.part(batch)
        pairs = running.batches_ahead.take(batch.update, policy)
        chunks = list(pairs.chunks(part, policy))
        size = pairs.num_pairs(part)
        begin = sum(pairs.num_pairs(before) for before in range(part))
        trained = list(pairs.responses())[begin : begin + size]
        stacked: Pairs = jax.tree.map(lambda *arrays: jnp.stack(arrays), *chunks)
        arrays = {
            name: np.asarray(array).reshape(-1, array.shape[-1])[:size]
            for name, array in stacked._asdict().items()
            if array is not None
        }
        rows = UpdateRows(
            self.measuring,
            stacked,
            BatchShape(len(chunks[0].tokens), len(chunks)),
            len(chunks),
            arrays,
            [response.prompt_index for response in trained],
            partial(self._contents, arrays, trained),
        )
        return batch._replace(pairs=pairs), rows

    def _contents(
        self,
        arrays: RowArrays,
        trained: Sequence[TrainedResponse],
        places: Sequence[int],
        losses: np.ndarray | None,
    ) -> list[Response]:
        contents, group = list[Response](), self.planned.workshop.batch.num_generations
        for number, place in enumerate(places):
            pieces: Pieces = []
            if losses is not None:
                mask = arrays["weights"][place] > 0
                tokens = arrays["tokens"][place][mask]
                text = self.planned.workshop.roller.text
                pieces = pieces_of_text(text, tokens, losses[number][mask])
            contents.append(Response(place % group, trained[place], pieces))
        return contents

    def again(self, own_numbers: Sequence[int], first: int, end: int) -> list[int]:
        """Returns the own numbers among `first` to `end` - 1 with the records of some prompts."""
        order = self.opened.prompts.order
        records = {order.place(number).row for number in own_numbers}
        return order.indices_of(records, first, end)

    def total_samples(self, run: RecordedRun) -> int:
        """Returns the prompts of a whole run, as its last session states its length.

        With filtered groups, those that the batches ahead may read at most.
        """
        last = max(run.lines)
        (segment,) = run.segments(last, last)
        seen: int = run.lines[last][Metric.SAMPLES_SEEN]
        plan = recorded_plan(segment, self.opened.data.samples_per_epoch, ResumePoint())
        assert plan.rl is not None and plan.total_steps is not None, "it is a run of prompts"
        if plan.rl.max_prompts_per_batch is None:
            return max(seen, plan.total_samples or 0)
        batches = -(-(plan.total_steps - last) // plan.rl.updates_per_batch)
        return seen + max(0, batches) * plan.rl.max_prompts_per_batch


@dataclasses.dataclass(frozen=True, eq=False)
class OpenedPrompts(OpenedTask):
    """Training of a policy whose prompts and rewards are open."""

    segment: Segment
    opened: OpenedPolicy

    @classmethod
    def of(cls, segment: Segment, context: RunContext) -> OpenedPrompts:
        """Opens the prompts and the rewards of a segment."""
        return cls(segment, open_policy_training(context))

    def source(self, run: RecordedRun) -> tuple[str, str]:
        """Returns the config key and the path of the first parameters; a warm start is in the
        folder of the run.
        """
        key, path = self.opened.source
        return key, str(run.path / WARM_START) if key == "warm_start_steps" else path

    def first_position(self, origin: RunOrigin) -> Position:
        """Returns the position that the run began at: 0."""
        return Position()

    def planned_from(
        self, run: RecordedRun, position: Position, hosts: tuple[int | None, int | None]
    ) -> PolicyTask:
        """Plans the batches of prompts from a position on."""
        opened = self.opened
        planned = opened.plan(ResumePoint(position.step, position.place))
        batch = planned.workshop.batch
        # and the batches that are sampled ahead of the last one
        until = self.segment.last_step + batch.off_policy_steps * batch.updates_per_batch
        kept = KeptResponses(run.path, run.lines, position.step, until)
        workshop = planned.workshop._replace(kept=kept)
        planned = dataclasses.replace(planned, workshop=workshop)
        rows = NamedSharding(planned.mesh, P(None, BATCH_AXES, "context"))
        measuring = Measuring(
            opened.keys,
            planned.mesh,
            policy_objective(opened.keys.rl),
            opened.context.config.max_target_length,
            lambda rows_per_pass: lambda chunk: chunk,
            partial(_staged, rows),
        )
        return PolicyTask(self.segment, opened, planned, measuring)


def _staged(sharding: NamedSharding, rows: RowArrays, shape: BatchShape) -> Pairs:
    """Puts rows on the devices as chunks of pairs; rows of no weight fill the last one."""
    slots = shape.micro_batch * shape.max_micro_batches

    def staged(array: np.ndarray) -> jax.Array:
        filled = np.pad(array, ((0, slots - len(array)), (0, 0)))
        placed: jax.Array = jax.device_put(filled.reshape(*shape[::-1], -1), sharding)
        return placed

    return Pairs(**{name: staged(array) for name, array in rows.items()})


def _keys_here(segment: Segment, num_devices: int) -> dict[str, Value]:
    """Returns the keys of the chunks: as many pairs per device as the run had."""
    batch = recorded_plan(segment, None, ResumePoint()).rl
    assert batch is not None, "it is a run of prompts"
    trained = max(1, batch.micro_batch_size // batch.num_trainer_devices)
    sampled = batch.rollout_micro_batch_size * batch.num_generations / batch.num_sampler_devices
    return {
        **{name: KEYS[name].default_value for name in _LAYOUT},
        "batch_padding": True,
        "max_tokens_per_pass": None,  # a row a pair is the same update as pairs that share rows
        "micro_batch_size": trained * num_devices,
        "train_micro_batch_size": -1,
        "rollout_micro_batch_size": max(1, round(sampled * num_devices / batch.num_generations)),
        "transcript_period": -1,
    }


POLICY = TaskKind(_keys_here, OpenedPrompts.of)
