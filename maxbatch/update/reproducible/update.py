"""The whole update, equal to the last bit on any number of devices (`reproducible_sums`).

It has the arguments and the results of the usual step (`maxbatch.update.step`), but is not one
program. Numbers are rounded only in programs for one device, which every layout compiles from the
same source: those of an atom, of the batch's figures, and of a piece of the optimizer's update.
Programs on the mesh add without rounding and move numbers.

    atoms on each device -> exact sums -> their sum over devices -> figures -> pieces -> hashes

Shapes: A micro-batches in the array, M rows in a micro-batch, L tokens in a row, N devices, r rows
of an atom, F figures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from maxbatch.config.combined import UpdateConfig
from maxbatch.data.feed.placement import Batch, BatchShape, Placement
from maxbatch.parallel.hosts import gather
from maxbatch.parallel.mesh import must_take_turns
from maxbatch.parallel.trees import State
from maxbatch.plan.update_settings import UpdateSettings
from maxbatch.update.gradients import NoiseParts, Objective
from maxbatch.update.reproducible.atoms import Atoms, AtomSums, Figures
from maxbatch.update.reproducible.exact_sums import ExactSum, rounded
from maxbatch.update.reproducible.hashes import StateHasher, named_arrays
from maxbatch.update.reproducible.pieces import Columns, MomentsApart, NewPiece, Pieces, step_piece
from maxbatch.update.spikes import SpikeWindow, judge
from maxbatch.update.state import TrainState
from maxbatch.update.step import StepMetrics, abstract_settings, may_overflow

T = TypeVar("T")
# (name, function that lowers a program) -> the compiled program
MakeExecutable = Callable[[str, Callable[[], jax.stages.Lowered]], jax.stages.Compiled]

# (name, function that lowers a program for the first device, devices) -> the program on each
MakeExecutables = Callable[
    [str, Callable[[], jax.stages.Lowered], Sequence[jax.Device]],
    dict[jax.Device, jax.stages.Compiled],
]


class Reduced(NamedTuple):
    """The sums of a batch over all devices, rounded once."""

    gradient: list[jax.Array]  # float32, in the shards of the parameters
    whole_gradient: list[jax.Array]  # the same, whole on every device
    figures_F: jax.Array  # float32
    fingerprint_4: jax.Array
    tokens: jax.Array


class Measured(NamedTuple):
    """The figures of a batch, on one device: scalars."""

    loss: jax.Array  # float32, mean
    weight: jax.Array
    denominator: jax.Array
    grad_norm: jax.Array
    shrink: jax.Array  # factor of clipping
    is_finite: jax.Array  # bool: loss and gradient
    noise_parts: NoiseParts
    others: dict[str, jax.Array]  # the objective's other sums


class Decided(NamedTuple):
    """What becomes of an update, on one device."""

    applies: jax.Array  # bool
    skipped: jax.Array  # bool
    is_spike: jax.Array | None
    window: SpikeWindow | None


class ReproducibleUpdate:
    """The update for a batch shape, with its programs compiled.

    Args:
      abstract: shapes and shardings of the state.
      shape: of the batches.
      executable: compiles a program.
      executables: compiles a program for the first of some devices, and loads it on all.
    """

    def __init__(
        self,
        config: UpdateConfig,
        mesh: Mesh,
        abstract: TrainState,
        placement: Placement,
        shape: BatchShape,
        objective: Objective,
        executable: MakeExecutable,
        executables: MakeExecutables,
    ) -> None:
        self._config, self._mesh, self._objective = config, mesh, objective
        self._executable, self._executables = executable, executables
        self._takes_turns = must_take_turns(list(mesh.devices.flat))
        self._devices = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
        self._whole = NamedSharding(mesh, P())
        self._split = NamedSharding(mesh, P(mesh.axis_names))  # the first axis, over all devices
        self._structure = jax.tree.structure(abstract.params)
        self._apart = MomentsApart(abstract.opt_state, self._structure)
        self._pieces = Pieces(config.optimizer, abstract, mesh)
        self._hasher = StateHasher(abstract, mesh)
        atom_rows = config.optimizer.reproducible_rows
        self._atoms_per_pass = shape.micro_batch // mesh.size // atom_rows
        self._compile_atoms(abstract, placement, shape, atom_rows)
        self._compile_rest(abstract)

    def _compile_atoms(
        self, abstract: TrainState, placement: Placement, shape: BatchShape, atom_rows: int
    ) -> None:
        """Compiles the programs that take atoms from batches and add them up."""
        arrange, staged = placement.arrange(shape.micro_batch), placement.abstract_batch(shape)

        def arrange_all(batch: Batch) -> Batch:
            arranged: Batch = jax.lax.map(arrange, batch)
            return arranged

        self._arrange = None
        if isinstance(staged.tokens, tuple):  # of load expansion
            self._arrange = self._on_mesh("arrange", arrange_all, staged)
        rows = (shape.max_micro_batches, shape.micro_batch // self._mesh.size)
        batch, atom = (
            Batch(*(None if x is None else _form((*size, x.shape[-1]), x.dtype) for x in of_slots))
            for of_slots in [[x[0] if isinstance(x, tuple) else x for x in staged]]
            for size in (rows, (atom_rows,))
        )

        # It moves rows alone, so it need not be the same in every layout.
        def take(batch: Batch, j: jax.Array, k: jax.Array) -> Batch:
            taken: Batch = jax.tree.map(
                lambda x: jax.lax.dynamic_slice_in_dim(x[j], k * atom_rows, atom_rows), batch
            )
            return taken

        index = _form((), jnp.int32)
        self._take = self._on_devices("take", take, (batch, index, index))

        leaves = jax.tree.leaves(abstract.params)
        self._gather = self._on_mesh("gather", lambda arrays: arrays, leaves, out=self._whole)
        atoms = Atoms(self._config, self._devices[0], self._objective, abstract)
        nothing = jax.eval_shape(atoms.nothing)
        self._nothing = self._on_devices("nothing", atoms.nothing, ())
        self._add = self._on_devices(
            "atom", atoms.add, (abstract.params, nothing, atom), donated=(1,)
        )

        shardings = [x.sharding for x in leaves]

        def reduce(sums: AtomSums) -> Reduced:
            total = sums.merged()
            placed = jax.lax.with_sharding_constraint(
                total.gradient, [ExactSum(*[s] * 3) for s in shardings]
            )
            gradient = [rounded(sums) for sums in placed]
            return Reduced(
                gradient,
                gradient,
                rounded(total.figures_1xF),
                total.fingerprint_1x4,
                total.tokens_1,
            )

        stacked = jax.tree.map(
            lambda x: _form((self._mesh.size, *x.shape[1:]), x.dtype, self._split), nothing
        )
        whole: Any = self._whole
        out = Reduced(shardings, [whole] * len(leaves), whole, whole, whole)
        self._reduce = self._on_mesh("reduce", reduce, stacked, out=out)

    def _compile_rest(self, abstract: TrainState) -> None:
        """Compiles the programs that follow the sums: figures, pieces of the optimizer, hashes."""
        optimizer = self._config.optimizer
        gradient = [_form(x.shape, jnp.float32) for x in jax.tree.leaves(abstract.params)]
        figures = _form((len(Figures._fields) + len(self._objective.others),), jnp.float32)

        def measure(gradient: list[jax.Array], figures_F: jax.Array) -> Measured:
            loss, weight, squares, weight_squares, *others = figures_F
            denominator = jnp.where(weight > 0, weight, 1.0)
            norm = optax.tree.norm([g / denominator for g in gradient])
            threshold = optimizer.gradient_clipping_threshold
            shrink = jnp.minimum(1.0, threshold / jnp.maximum(norm, 1e-30))
            is_finite = jnp.isfinite(norm) & jnp.isfinite(loss)
            return Measured(
                loss / denominator,
                weight,
                denominator,
                norm,
                shrink,
                is_finite,
                NoiseParts(squares, weight, weight_squares),
                dict(zip(self._objective.others, others, strict=True)),
            )

        def decide(
            measured: Measured, is_state_finite: jax.Array, window: SpikeWindow | None
        ) -> Decided:
            is_finite = measured.is_finite & is_state_finite
            applies = is_finite & (measured.weight > 0)
            if window is None:
                return Decided(applies, ~is_finite, None, None)
            factor = optimizer.skip_step_scaling_factor
            is_spike, window = judge(window, measured.loss, measured.grad_norm, applies, factor)
            return Decided(applies & ~is_spike, ~is_finite | is_spike, is_spike, window)

        self._measure = self._on_devices("measure", measure, (gradient, figures), only_first=True)
        measured, flag = jax.eval_shape(measure, gradient, figures), _form((), jnp.bool_)
        window = jax.tree.map(lambda x: _form(x.shape, x.dtype), abstract.spikes)
        self._decide = self._on_devices("decide", decide, (measured, flag, window), only_first=True)

        moments, scalars = self._apart.split(abstract.opt_state)
        float_gradient = [
            _form(g.shape, g.dtype, x.sharding)
            for g, x in zip(gradient, jax.tree.leaves(abstract.params), strict=True)
        ]
        columns = self._columns(abstract, float_gradient, moments)
        self._cut = self._on_mesh("cut", self._pieces.cut, columns)
        cut = jax.eval_shape(self._pieces.cut, columns)
        scalar_forms = [_form(x.shape, x.dtype) for x in scalars]
        factor = _form((), jnp.float32)
        self._step = [
            self._on_devices(
                f"piece-{number}",
                partial(step_piece, optimizer, group.decays),
                (
                    _as_columns(
                        [_form((1, self._pieces.size), x.dtype) for x in pieces[0]], moments
                    ),
                    scalar_forms,
                    factor,
                    factor,
                    flag,
                    abstract_settings(),
                ),
            )
            for number, (group, pieces) in enumerate(zip(self._pieces.groups, cut, strict=True))
        ]
        without_gradient = [
            [[_form(x.shape, x.dtype, self._split) for x in piece[1:]] for piece in pieces]
            for pieces in cut
        ]
        out = [[x.sharding for x in column] for column in columns[1:]]
        self._join = self._on_mesh("join", self._pieces.join, without_gradient, out=out)
        self._hash = self._executable("hash", self._hasher.lower)

    def __call__(
        self,
        state: TrainState,
        batch: Batch,
        num_micro_batches: int | np.integer[Any],
        settings: UpdateSettings,
    ) -> tuple[TrainState, StepMetrics]:
        """Returns the state after the update and its metrics, scalars on this host's first device.

        Args:
          settings: numbers of numpy.
        """
        first = self._devices[0]
        sums = self._sums(state.params, batch, int(num_micro_batches))
        reduced: Reduced = self._run(self._reduce, sums)
        measured: Measured = self._measure[first](
            _on(first, reduced.whole_gradient), _on(first, reduced.figures_F)
        )

        moments, scalars = self._apart.split(state.opt_state)
        columns = self._columns(state, reduced.gradient, moments)
        pieces = self._run(self._cut, columns)

        def step_pieces(applies: jax.Array) -> dict[jax.Device, list[list[NewPiece]]]:
            new = {}
            for device in self._devices:
                factors = jax.device_put(
                    (measured.denominator, measured.shrink, applies), SingleDeviceSharding(device)
                )
                new[device] = [
                    [
                        step[device](
                            _as_columns(_on(device, piece), moments),
                            _on(device, scalars),
                            *factors,
                            settings,
                        )
                        for piece in of_group
                    ]
                    for step, of_group in zip(self._step, pieces, strict=True)
                ]
            return new

        is_state_finite = True
        if may_overflow(self._config.optimizer, settings, np):
            tried = step_pieces(jax.device_put(np.bool_(True), first))
            here = [
                piece.is_finite
                for groups in tried.values()
                for pieces_of_group in groups
                for piece in pieces_of_group
            ]
            is_state_finite = all(gather(bool(np.all(jax.device_get(here)))))
        decided: Decided = self._decide[first](
            measured, np.bool_(is_state_finite), _on(first, state.spikes)
        )
        new = step_pieces(decided.applies)
        state = self._joined(state, new, decided.window)
        hashes = self._run(self._hash, list(named_arrays(state).values()))
        return state, StepMetrics(
            measured.loss,
            measured.weight,
            measured.grad_norm,
            decided.skipped,
            measured.noise_parts,
            *_on(first, (reduced.fingerprint_4, reduced.tokens)),
            measured.others,
            None,
            decided.is_spike,
            _on(first, hashes),
        )

    def _sums(self, params: State, batch: Batch, num_micro_batches: int) -> AtomSums:
        """Returns the exact sums of each device's atoms, [N, ...]."""
        leaves = jax.tree.leaves(params)
        whole = leaves if self._mesh.size == 1 else self._run(self._gather, leaves)
        rows = batch if self._arrange is None else self._run(self._arrange, batch)
        sums = {device: self._nothing[device]() for device in self._devices}
        params_here = {
            device: jax.tree.unflatten(self._structure, _on(device, whole))
            for device in self._devices
        }
        rows_here = {device: _on(device, rows) for device in self._devices}
        for j in range(num_micro_batches):
            for k in range(self._atoms_per_pass):
                for device in self._devices:
                    atom = self._take[device](rows_here[device], np.int32(j), np.int32(k))
                    sums[device] = self._add[device](params_here[device], sums[device], atom)
        total: AtomSums = self._of_devices([sums[device] for device in self._devices])
        return total

    def _columns(
        self, state: TrainState, gradient: list[jax.Array], moments: list[Any]
    ) -> list[list[jax.Array]]:
        """Returns what each parameter has in a state, with its gradient, in the order of
        `Columns`.
        """
        average = [] if state.average is None else [state.average]
        return [gradient, *map(jax.tree.leaves, (state.params, *moments, *average))]

    def _joined(
        self,
        state: TrainState,
        new: dict[jax.Device, list[list[NewPiece]]],
        window: SpikeWindow | None,
    ) -> TrainState:
        """Returns the state after the update from its pieces on this host's devices."""

        def arrays(piece: NewPiece) -> list[jax.Array]:
            average = [] if piece.average is None else [piece.average]
            return [piece.params, *piece.moments, *average]

        pieces = self._of_devices(
            [[[arrays(piece) for piece in of_group] for of_group in new[d]] for d in self._devices]
        )
        columns = [
            jax.tree.unflatten(self._structure, column) for column in self._run(self._join, pieces)
        ]
        average = None if state.average is None else columns.pop()
        params, *moments = columns
        scalars = self._everywhere(new[self._devices[0]][0][0].scalars)
        return state._replace(
            params=params,
            opt_state=self._apart.joined(moments, scalars),
            average=average,
            spikes=self._everywhere(window),
        )

    def _of_devices(self, trees: list[T]) -> T:
        """Returns arrays [N, ...] of arrays [1, ...] on each of this host's devices."""

        def joined(*parts: jax.Array) -> jax.Array:
            shape = (self._mesh.size, *parts[0].shape[1:])
            return jax.make_array_from_single_device_arrays(shape, self._split, parts)

        tree: T = jax.tree.map(joined, *trees)
        return tree

    def _everywhere(self, tree: T) -> T:
        """Returns arrays whole on every device, from this host's first device."""

        def copied(x: jax.Array) -> jax.Array:
            copies = [jax.device_put(x, SingleDeviceSharding(d)) for d in self._devices]
            return jax.make_array_from_single_device_arrays(x.shape, self._whole, copies)

        copies: T = jax.tree.map(copied, tree)
        return copies

    def _run(self, program: jax.stages.Compiled, *arguments: Any) -> Any:
        """Runs a program on the mesh."""
        result = program(*arguments)
        return jax.block_until_ready(result) if self._takes_turns else result

    def _on_mesh(
        self,
        name: str,
        function: Callable[..., Any],
        *arguments: Any,
        out: Any = None,
    ) -> jax.stages.Compiled:
        """Compiles a program on the mesh for the forms of its arguments."""
        jitted = jax.jit(function, out_shardings=out)
        return self._executable(name, lambda: jitted.lower(*arguments))

    def _on_devices(
        self,
        name: str,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        only_first: bool = False,
        donated: tuple[int, ...] = (),
    ) -> dict[jax.Device, jax.stages.Compiled]:
        """Compiles a program for this host's first device alone, and loads it on the others."""
        first = self._devices[0]
        place = SingleDeviceSharding(first)
        jitted = jax.jit(function, out_shardings=place, donate_argnums=donated)
        forms = jax.tree.map(lambda x: _form(x.shape, x.dtype, place), arguments)
        devices = self._devices[:1] if only_first else self._devices
        return self._executables(name, lambda: jitted.lower(*forms), devices)


def _form(shape: tuple[int, ...], dtype: Any, sharding: Any = None) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _on(device: jax.Device, tree: T) -> T:
    """Returns a device's parts of arrays."""

    def part(x: jax.Array) -> Any:
        return next(shard.data for shard in x.addressable_shards if shard.device == device)

    parts: T = jax.tree.map(part, tree)
    return parts


def _as_columns(arrays: Sequence[Any], moments: Sequence[Any]) -> Columns:
    """Returns the columns of arrays in their order, for a state with these moments."""
    gradient, params, *others = arrays
    average = others[len(moments) :]
    return Columns(gradient, params, others[: len(moments)], average[0] if average else None)
