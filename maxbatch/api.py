"""The Python API: training with one's own parts, and batches for a loop of one's own.

import maxbatch

config = maxbatch.load_config("run.yml", global_batch_size=256)
outcome = maxbatch.train(config, model=MyModel, objective=my_loss, outputs=[my_logger])

with maxbatch.open_feed(config, mesh) as feed:
    for batch in feed:
        state = my_step(state, batch, rate(batch.samples_seen))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import cache
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from maxbatch.config.config import Config, as_config
from maxbatch.config.own_parts import refuse_own_parts
from maxbatch.config.recipes import slots_per_sample
from maxbatch.data.feed.feed import Feed
from maxbatch.data.feed.placement import Batch, BatchShape, Placement, is_loading
from maxbatch.data.stream.own import Samples, as_stream
from maxbatch.data.stream.stream import Stream, open_stream
from maxbatch.parallel.absent_tpu import leave_out_absent_tpu
from maxbatch.parallel.hosts import broadcast
from maxbatch.parallel.mesh import make_mesh, num_slices
from maxbatch.parallel.sharding import num_shards
from maxbatch.plan.batch import BatchPlan, ResumePoint, check_batch_keys, expansion_factor
from maxbatch.plan.mesh_shape import BATCH_AXES
from maxbatch.plan.place import Place
from maxbatch.run import pretraining
from maxbatch.run.folder.metrics import Record
from maxbatch.run.own import Loss, MakeModel, Optimizer, Parts
from maxbatch.run.record.recorder import Output
from maxbatch.run.session import Outcome
from maxbatch.system.code_names import code_name
from maxbatch.system.errors import ConfigError


def train(
    config: Config | ConfigDict,
    *,
    model: MakeModel | None = None,
    objective: Loss | None = None,
    optimizer: Optimizer | None = None,
    stream: Samples | Stream | None = None,
    eval_stream: Samples | Stream | None = None,
    outputs: Sequence[Output | Callable[[Record], object]] = (),
    devices: Sequence[jax.Device] | None = None,
) -> Outcome:
    """Trains a config's run, from the newest checkpoint of `run_dir` if there is one.

    The given parts replace the config's own; batch, ramp, accumulation, sharding, checkpoints,
    resume and metrics stay as they are. Every host must give the same.

    Args:
      config: a resolved config (`maxbatch.load_config`).
      model: a class of `flax.nnx.Module`, or a function, that is called as `model(config,
        rngs=...)`. The module takes tokens and segments, int32[M, L], and returns logits [M, L, V].
        All its variables are `nnx.Param`.
      objective: the loss (`maxbatch.Loss`); the cross-entropy of the next token by default.
      optimizer: a function of the update's learning rate that returns an
        `optax.GradientTransformation`, such as `optax.adamw` or `functools.partial(optax.adamw,
        b1=0.9)`; the rate follows the config's schedule. Or a `GradientTransformation`, which has
        rates of its own. It takes averaged, clipped gradients once per update.
      stream: the data (`maxbatch.Samples`). `eval_fraction` holds out some of its rows, evenly
        spread, if it has a length.
      eval_stream: held-out data (`maxbatch.Samples` with a length), of which evals read every row
        once, or the first `eval_samples`.
      outputs: further loggers (`maxbatch.Output`), or functions of a record; they are called by the
        first host.
      devices: those to train on, all by default.

    Returns:
      The run's position, its folder, the records of its updates (`history`, `last`), and the signal
      that stopped it, if one did.

    Raises:
      ConfigError: the config, the data, the model, the loss, the optimizer or the checkpoint cannot
        be used.
      TrainingError: `max_consecutive_skips` updates in a row were not finite, or the disk is full.
    """
    config = as_config(config)
    check_batch_keys(config.plan)
    _check_outputs(outputs)
    with ExitStack() as stack:  # also of a run that is refused, or complete already
        loggers = tuple(stack.enter_context(closing(_Logger(output))) for output in outputs)
        return pretraining.train(
            config, devices, Parts(model, objective, optimizer, stream, loggers, eval_stream)
        )


def _check_outputs(outputs: object) -> None:
    if not isinstance(outputs, Sequence):
        raise ConfigError("outputs: must be a list of loggers; works: outputs=[my_logger]")
    for output in outputs:
        if not callable(output) and not callable(getattr(output, "append", None)):
            kind = type(output).__name__
            raise ConfigError(
                f"outputs: {kind} is neither a function of a record nor an object with "
                "append(record)"
            )


class _Logger(Output):
    """A user's logger: a function of a record, or an object with at least `append(record)`."""

    def __init__(self, output: Any) -> None:
        self._output, self._is_closed = output, False
        self.name = code_name(output)

    def append(self, record: Record) -> None:
        append = getattr(self._output, "append", self._output)
        append(record)

    def sync(self) -> None:
        getattr(self._output, "sync", lambda: None)()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            getattr(self._output, "close", lambda: None)()


class FedBatch(NamedTuple):
    """A global batch on its devices, rows split over them: `stream[samples_seen : samples_seen +
    num_rows]`.
    """

    tokens: jax.Array  # int32[B, L]
    segments: jax.Array  # int32[B, L], 1.. per document within a row, 0 at padding
    weights: jax.Array  # float32[B, L], loss weight of each token as a target; 0 at padding
    samples_seen: int  # the position before it
    num_rows: int  # real rows; those after them, in the last batch of a run, have no weight
    step: int  # updates with this one, from 1

    @property
    def end(self) -> int:
        """The position after it: save it, and pass it as `start` to continue."""
        return self.samples_seen + self.num_rows


class BatchFeed:
    """The batches of a run from a position on, as an iterator and a context manager; made by
    `open_feed`.

    Attributes:
      mesh: the mesh of the devices that hold the batches.
      plan: the batch plan of the run.
    """

    def __init__(
        self, plan: BatchPlan, placement: Placement, stream: Stream | None, first_step: int
    ) -> None:
        self.plan, self.mesh, self._placement = plan, placement.mesh, placement
        self._feed = Feed(
            stream,
            plan.manager,
            lambda stage, _: BatchShape(stage.global_batch_size, 1),
            placement,
            first_step,
        )
        self._rows = cache(self._make_rows)

    def _make_rows(self, batch_size: int) -> Callable[[Batch], Batch]:
        """Returns the program that turns a staged batch into rows [B, L]."""
        arrange = self._placement.arrange(batch_size)
        sharding = NamedSharding(self.mesh, P(*self._placement.spec[1:]))
        return jax.jit(
            lambda staged: arrange(jax.tree.map(lambda x: x.reshape(x.shape[1:]), staged)),
            out_shardings=sharding,
        )

    def __iter__(self) -> Iterator[FedBatch]:
        return self

    def __next__(self) -> FedBatch:
        staged = next(self._feed)
        planned = staged.planned
        rows = self._rows(staged.shape.micro_batch)(staged.batch)
        return FedBatch(
            rows.tokens,
            rows.segments,
            rows.weights,
            planned.first_sample,
            planned.num_rows,
            planned.step,
        )

    def close(self) -> None:
        """Ends the threads and processes that read ahead."""
        self._feed.__exit__()

    def __enter__(self) -> BatchFeed:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def open_feed(
    config: Config | ConfigDict,
    mesh: Mesh | None = None,
    *,
    start: int = 0,
    stream: Samples | Stream | None = None,
) -> BatchFeed:
    """Opens the batches that a run of this config trains on, for a loop of one's own.

    A batch is the whole global batch, [B, L], for any accumulation in the config, and two of them
    wait on the devices while one is in use. In a ramp B grows, and a jitted step is compiled for
    each size.

    Args:
      config: a resolved config (`maxbatch.load_config`).
      mesh: the devices. Rows are split over its axes "data" and "fsdp", or over its first axis if
        it has neither, and tokens over "context". None: the mesh that the config describes, over
        all devices.
      start: the position (`samples_seen`) to begin at, such as a saved `FedBatch.end`.
      stream: one's own data instead of the config's.

    Returns:
      An iterator of `FedBatch` that ends with the run; close it, or use it in a `with`.

    Raises:
      ConfigError: the config or the data cannot be used, or the mesh does not divide a batch.
      ValueError: `start` is negative.
    """
    if start < 0:
        raise ValueError(f"start={start}: must be at least 0")
    config = as_config(config)
    refuse_own_parts(config.own_parts, ["stream"], given=["stream"] if stream is not None else [])
    if config.max_tokens_per_pass is not None:
        rule = "null for open_feed, whose batches have a sample a row"
        raise config.fault("max_tokens_per_pass", rule, "null per_device_batch_size=1")
    check_batch_keys(config.plan)
    leave_out_absent_tpu()
    mesh = make_mesh(config) if mesh is None else mesh
    num_hosts = len({device.process_index for device in mesh.devices.flat})
    expansion = max(1, int(expansion_factor(config.plan, num_hosts)))
    opened: Stream | None = None
    if is_loading(jax.process_index(), expansion):
        opened = open_stream(config) if stream is None else as_stream(stream, config.stream)
    samples_per_epoch = broadcast(lambda: opened.samples_per_epoch if opened else None)

    def planned(resume: ResumePoint) -> BatchPlan:
        return BatchPlan.from_config(
            config,
            mesh.size,
            num_hosts,
            num_slices=num_slices(list(mesh.devices.flat)),
            samples_per_epoch=samples_per_epoch,
            resume=resume,
        )

    first_step = planned(ResumePoint()).manager.step_at(start)
    plan = planned(ResumePoint(first_step, Place(start)))
    axes = tuple(axis for axis in BATCH_AXES if axis in mesh.axis_names) or mesh.axis_names[:1]
    _check_divides(plan, mesh, axes)
    sharding = NamedSharding(
        mesh, P(None, axes, "context" if "context" in mesh.axis_names else None)
    )
    return BatchFeed(
        plan, Placement(sharding, slots_per_sample(config), expansion), opened, first_step
    )


def _check_divides(plan: BatchPlan, mesh: Mesh, axes: tuple[str, ...]) -> None:
    shards = num_shards(mesh, axes)
    for stage in plan.stages:
        batch = stage.global_batch_size
        if batch % shards:
            raise ConfigError(
                f"global_batch_size={batch}: must be divisible by the {shards} parts that the "
                f"mesh's axes {', '.join(axes)} split it into; works: "
                f"global_batch_size={max(1, round(batch / shards)) * shards}"
            )
