"""The whole update, equal to the last bit on any number of devices (`reproducible_sums`).

It has the arguments and the results of the usual step (`maxbatch.update.step`), but is not one
program. Numbers are rounded only in programs for one device, which every layout compiles from the
same source: those of an atom, of the batch's figures, and of a piece of the optimizer's update.
Programs on the mesh add without rounding and move numbers.

    atoms on each device -> exact sums -> their sum over devices -> figures -> pieces -> hashes

The state is given up, as by donation. After the atoms, a band of parameters (`pieces`) at a time is
in memory twice.

Shapes: N devices, F figures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, SingleDeviceSharding

from maxbatch.config.combined import UpdateConfig
from maxbatch.data.feed.placement import Batch, BatchShape
from maxbatch.parallel.hosts import gather
from maxbatch.parallel.sharding import shard_bytes
from maxbatch.parallel.trees import State, Tree
from maxbatch.plan.update_settings import UpdateSettings
from maxbatch.update.balance import (
    Balance,
    BalancedState,
    RoutingMetrics,
    Scale,
    learned,
    routers_bias,
    with_learned,
)
from maxbatch.update.gradients import NoiseParts, Objective
from maxbatch.update.reproducible.atoms import (
    Atoms,
    AtomSums,
    BatchFigures,
    Figures,
    FigureSums,
    RoutingCounts,
    Weights,
)
from maxbatch.update.reproducible.exact_sums import ExactSum
from maxbatch.update.reproducible.hashes import StateHasher, named_arrays
from maxbatch.update.reproducible.pieces import (
    Band,
    Columns,
    MomentsApart,
    NewPiece,
    Pieces,
    step_piece,
)
from maxbatch.update.reproducible.programs import (
    DevicePrograms,
    MakeExecutable,
    MakeExecutables,
    OnDevices,
    form,
    free,
    on,
)
from maxbatch.update.reproducible.rows import AtomRows, RowPlacement
from maxbatch.update.reproducible.uses import Held, Use, uses_of
from maxbatch.update.spikes import SpikeWindow, judge
from maxbatch.update.state import TrainState
from maxbatch.update.step import StepMetrics, abstract_settings, may_overflow, moved_average

T = TypeVar("T")


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
    routing: RoutingMetrics | None  # of a model with experts


class Decided(NamedTuple):
    """What becomes of an update, on one device."""

    applies: jax.Array  # bool
    skipped: jax.Array  # bool
    is_spike: jax.Array | None
    window: SpikeWindow | None


class BalancedPart(NamedTuple):
    """What an update with experts changes besides the optimizer's parameters."""

    bias: State  # of the routers
    average: State | None  # of the bias
    last_counts_NxE: jax.Array


class BandPrograms(NamedTuple):
    """The programs of a band."""

    reduce: jax.stages.Compiled  # sums of all devices -> gradient in shards, and whole or nothing
    squares: OnDevices  # whole gradient -> of each array, the sum of the mean gradient's squares
    cut: jax.stages.Compiled  # columns -> pieces
    step: OnDevices  # a piece -> `NewPiece`
    join: jax.stages.Compiled  # pieces -> columns


class SumsHere(NamedTuple):
    """The sums of an update's atoms so far, on each of this host's devices."""

    models: dict[jax.Device, tuple[State, State | None]]  # trained and frozen, whole
    scale: dict[jax.Device, Scale | None]
    sums: dict[jax.Device, AtomSums]


class ReproducibleUpdate:
    """The update for a batch shape, with its programs compiled.

    Args:
      abstract: shapes and shardings of the state.
      shape: of the batches.
      rows_of_atom: rows whose gradient one program computes.
      executable: compiles a program.
      executables: compiles a program for the first of some devices, and loads it on all.

    Attributes:
      uses: the use of each program by an update, by its name. Only the names of the programs that
        take rows from a batch, `take` and `arrange`, depend on the shape.
    """

    def __init__(
        self,
        config: UpdateConfig,
        mesh: Mesh,
        abstract: TrainState,
        placement: RowPlacement,
        shape: BatchShape,
        rows_of_atom: int,
        objective: Objective,
        executable: MakeExecutable,
        executables: MakeExecutables,
    ) -> None:
        self._config = config
        self._programs = programs = DevicePrograms(mesh, executable, executables)
        self._atoms = atoms = Atoms(config, programs.devices[0], objective, abstract)
        self._stepped_params = learned(abstract.params, atoms.balance)
        self._structure = jax.tree.structure(self._stepped_params)
        leaves, model = jax.tree.flatten(abstract.params)
        places = jax.tree.unflatten(model, range(len(leaves)))
        self._places: list[int] = jax.tree.leaves(learned(places, atoms.balance))
        self._apart = MomentsApart(_optimizer_state(abstract.opt_state), self._structure)
        self._pieces = Pieces(config.optimizer, self._stepped_params, mesh)
        self._hasher = StateHasher(abstract, mesh)
        self._rows = AtomRows(programs, placement, shape, rows_of_atom)
        sums = self._compile_atoms(abstract)
        self._compile_figures(abstract)
        self._compile_bands(abstract, [sums.gradient[place] for place in self._places])
        if self._atoms.balance is not None:
            self._compile_balanced(abstract, self._atoms.balance)
        self._hash = programs.lowered_on_mesh("hash", self._hasher.lower)
        self.uses = self._find_uses(abstract, placement.abstract_batch(shape))

    def _find_uses(self, abstract: TrainState, batch: Batch) -> dict[str, Use]:
        """Returns the uses of the programs."""
        programs, models = self._programs, (abstract.params, abstract.frozen)

        def whole_bytes(tree: Tree) -> int:
            return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))

        held = Held(
            state=shard_bytes((abstract.saved, abstract.frozen)),
            batch=shard_bytes(batch),
            model=whole_bytes(models) if programs.mesh.size > 1 else 0,
            sums=whole_bytes(jax.eval_shape(self._atoms.nothing)),
            gradient=4 * sum(map(self._pieces.num_values, self._pieces.bands)),
            band=self._largest_band,
        )
        return uses_of(programs.names, held, self._rows.num_atoms, self._num_pieces)

    def _compile_atoms(self, abstract: TrainState) -> AtomSums:
        """Compiles the programs that add atoms up; returns the forms of all devices' sums."""
        programs, atoms = self._programs, self._atoms
        models = abstract.params, abstract.frozen
        self._models = jax.tree.structure(models)
        self._gather = programs.on_mesh(
            "gather", _same, jax.tree.leaves(models), out=programs.whole
        )
        scale: Scale | None = None
        self._weigh: OnDevices | None = None
        if atoms.balance is not None and atoms.balance.has_terms:
            scale = self._compile_scale(atoms.balance)
        nothing = jax.eval_shape(atoms.nothing)
        self._nothing = programs.on_devices("nothing", atoms.nothing, ())
        self._add = programs.on_devices(
            "atom", atoms.add, (*models, scale, nothing, self._rows.form), donated=(3,)
        )
        sums: AtomSums = self._of_all(nothing)
        figures = jax.eval_shape(FigureSums.reduced, sums.figures)
        out = jax.tree.map(lambda _: programs.whole, figures)
        self._reduce = programs.on_mesh("figures", FigureSums.reduced, sums.figures, out=out)
        return sums

    def _compile_scale(self, balance: Balance) -> Scale:
        """Compiles the programs that find the facts of a batch for the terms of balance; returns
        the form of these.
        """
        programs, atoms = self._programs, self._atoms
        no_weights = jax.eval_shape(atoms.no_weights)
        last_counts = jax.eval_shape(balance.no_counts)
        self._no_weights: Weights = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), no_weights)
        self._weigh = programs.on_devices("weigh", atoms.weigh, (no_weights, self._rows.form))
        weights = self._of_all(no_weights)
        self._gather_weights = programs.on_mesh("weights", _same, weights, out=programs.whole)
        self._scale = programs.on_devices(
            "scale", Weights.scale, (weights, last_counts), only_first=True
        )
        scale: Scale = jax.eval_shape(Weights.scale, weights, last_counts)
        return scale

    def _of_all(self, sums: T) -> T:
        """Returns the forms of all devices' sums from those of one."""
        programs = self._programs
        forms: T = jax.tree.map(
            lambda x: form((programs.mesh.size, *x.shape[1:]), x.dtype, programs.split), sums
        )
        return forms

    def _compile_figures(self, abstract: TrainState) -> None:
        """Compiles the programs that measure a batch and decide about its update."""
        programs, optimizer, atoms = self._programs, self._config.optimizer, self._atoms
        balance = atoms.balance

        def measure(
            squares: list[jax.Array], figures: BatchFigures, last_counts_NxE: jax.Array | None
        ) -> Measured:
            of_all = Figures(*figures.figures_F[: len(Figures._fields)])
            loss, weight, gradient_squares, weight_squares = of_all
            denominator = _denominator(figures.figures_F)
            norm = jnp.sqrt(sum(squares, jnp.float32(0)))
            threshold = optimizer.gradient_clipping_threshold
            shrink = jnp.minimum(1.0, threshold / jnp.maximum(norm, 1e-30))
            is_finite = jnp.isfinite(norm) & jnp.isfinite(loss)
            routing = atoms.routing_of(figures)
            return Measured(
                loss / denominator,
                weight,
                denominator,
                norm,
                shrink,
                is_finite,
                NoiseParts(gradient_squares, weight, weight_squares),
                atoms.others_of(figures.figures_F),
                balance.metrics(routing, last_counts_NxE)
                if balance is not None and routing is not None and last_counts_NxE is not None
                else None,
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

        squares = [form((), jnp.float32)] * len(jax.tree.leaves(self._stepped_params))
        figures, last_counts = self._figures_form(), _last_counts(abstract)
        self._measure = programs.on_devices(
            "measure", measure, (squares, figures, last_counts), only_first=True
        )
        measured = jax.eval_shape(measure, squares, figures, last_counts)
        flag = form((), jnp.bool_)
        window = jax.tree.map(lambda x: form(x.shape, x.dtype), abstract.spikes)
        self._decide = programs.on_devices(
            "decide", decide, (measured, flag, window), only_first=True
        )

    def _figures_form(self) -> BatchFigures:
        nothing = jax.eval_shape(self._atoms.nothing)
        figures: BatchFigures = jax.eval_shape(FigureSums.reduced, nothing.figures)
        return figures

    def _compile_balanced(self, abstract: TrainState, balance: Balance) -> None:
        """Compiles the programs that step the routers' bias and keep the choices."""
        programs = self._programs

        def rebalance(
            before: BalancedPart,
            counts_NxE: jax.Array,
            applies: jax.Array,
            settings: UpdateSettings,
        ) -> BalancedPart:
            bias = balance.with_bias_stepped(before.bias, counts_NxE)
            average = moved_average(before.average, bias, settings)
            after = BalancedPart(bias, average, counts_NxE)
            kept: BalancedPart = jax.tree.map(
                lambda new, old: jnp.where(applies, new, old), after, before
            )
            return kept

        part = _balanced_part(abstract)
        counts, flag = jax.eval_shape(balance.no_counts), form((), jnp.bool_)
        self._gather_balanced = programs.on_mesh("gather-bias", _same, part, out=programs.whole)
        self._rebalance = programs.on_devices(
            "bias", rebalance, (part, counts, flag, abstract_settings()), only_first=True
        )
        whole = jax.tree.map(lambda x: form(x.shape, x.dtype, programs.whole), part)
        shardings = jax.tree.map(lambda x: x.sharding, part)
        self._place_balanced = programs.on_mesh("place-bias", _same, whole, out=shardings)

    def _compile_bands(self, abstract: TrainState, sums: list[ExactSum]) -> None:
        """Compiles the programs of each band."""
        moments, scalars = self._apart.split(_optimizer_state(abstract.opt_state))
        self._num_moments = len(moments)
        gradient = [
            form(x.shape, jnp.float32, x.sharding) for x in jax.tree.leaves(self._stepped_params)
        ]
        columns = self._columns(abstract, gradient, moments)
        scalar_forms = [form(x.shape, x.dtype) for x in scalars]
        steps: dict[tuple[Any, bool], tuple[str, OnDevices]] = {}
        self._bands = []
        self._num_pieces: Counter[str] = Counter()  # of all bands, by the program that steps them
        self._largest_band = 0  # bytes of its pieces on a device
        for number, band in enumerate(self._pieces.bands):
            of_band = _of_band(band, columns)
            kind = band.dtype, band.decays
            if kind not in steps:
                dtypes = [column[0].dtype for column in of_band]
                name = f"piece-{len(steps)}"
                steps[kind] = name, self._compile_step(name, band.decays, dtypes, scalar_forms)
            name, step = steps[kind]
            self._bands.append(
                self._compile_band(
                    str(number), band, [sums[place] for place in band.places], of_band, step
                )
            )
            num_pieces = self._pieces.num_pieces(band)
            self._num_pieces[name] += num_pieces
            of_value = sum(column[0].dtype.itemsize for column in of_band)
            in_pieces = num_pieces * self._pieces.size * of_value
            self._largest_band = max(self._largest_band, in_pieces)

    def _compile_step(
        self,
        name: str,
        decays: bool,
        dtypes: Sequence[Any],
        scalars: list[Any],
    ) -> OnDevices:
        """Compiles the update of a piece, whose columns have these types."""
        piece = _as_columns([form((1, self._pieces.size), d) for d in dtypes], self._num_moments)
        factor, flag = form((), jnp.float32), form((), jnp.bool_)
        return self._programs.on_devices(
            name,
            partial(step_piece, self._config.optimizer, decays),
            (piece, scalars, factor, factor, flag, abstract_settings()),
        )

    def _compile_band(
        self,
        name: str,
        band: Band,
        sums: list[ExactSum],
        columns: list[list[Any]],
        step: OnDevices,
    ) -> BandPrograms:
        programs, gradient, split = self._programs, columns[0], self._programs.split
        has_copies = programs.mesh.size > 1

        def reduce(sums: list[ExactSum]) -> tuple[list[jax.Array], list[jax.Array]]:
            gradient = self._pieces.reduce(band, sums)
            return gradient, gradient if has_copies else []

        def squares(gradient: list[jax.Array], figures_F: jax.Array) -> list[jax.Array]:
            denominator = _denominator(figures_F)
            return [jnp.sum(jnp.square(g / denominator)) for g in gradient]

        cut = partial(self._pieces.cut, band)
        pieces = [
            [form(x.shape, x.dtype, split) for x in piece[1:]]
            for piece in jax.eval_shape(cut, columns)
        ]
        out = [x.sharding for x in gradient], [programs.whole] * len(gradient) * has_copies
        whole = [form(x.shape, x.dtype) for x in gradient]
        return BandPrograms(
            programs.on_mesh(f"reduce-{name}", reduce, sums, out=out),
            programs.on_devices(
                f"squares-{name}", squares, (whole, self._figures_form().figures_F), only_first=True
            ),
            programs.on_mesh(f"cut-{name}", cut, columns, out=split),
            step,
            programs.on_mesh(
                f"join-{name}",
                partial(self._pieces.join, band),
                pieces,
                out=[[x.sharding for x in column] for column in columns[1:]],
            ),
        )

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
        scale = self._scale_of(state, batch, int(num_micro_batches))
        sums = self.begin(state, scale)
        self.add(sums, batch, int(num_micro_batches))
        return self.step(state, sums, settings)

    def begin(self, state: TrainState, scale: dict[jax.Device, Scale | None]) -> SumsHere:
        """Returns the sums of no atom.

        Args:
          scale: the balance terms' facts of the whole batch, on each of this host's devices.
        """
        programs, leaves = self._programs, jax.tree.leaves((state.params, state.frozen))
        whole = leaves if programs.mesh.size == 1 else programs.run(self._gather, leaves)
        models = {
            device: jax.tree.unflatten(self._models, on(device, whole))
            for device in programs.devices
        }
        nothing = {device: self._nothing[device]() for device in programs.devices}
        return SumsHere(models, scale, nothing)

    def add(self, sums: SumsHere, batch: Any, num_micro_batches: int) -> None:
        """Adds the atoms of a batch's first micro-batches."""
        for atoms in self._rows.of(batch, num_micro_batches):
            for device, atom in atoms.items():
                sums.sums[device] = self._add[device](
                    *sums.models[device], sums.scale[device], sums.sums[device], atom
                )

    def step(
        self, state: TrainState, sums_here: SumsHere, settings: UpdateSettings
    ) -> tuple[TrainState, StepMetrics]:
        """Returns the state after the update and its metrics, from the sums of its batch.

        Args:
          settings: numbers of numpy.
        """
        programs, first = self._programs, self._programs.devices[0]
        sums_here.models.clear()  # free
        sums: AtomSums = programs.of_devices([sums_here.sums[d] for d in programs.devices])
        figures: BatchFigures = on(first, programs.run(self._reduce, sums.figures))
        stepped = [sums.gradient[place] for place in self._places]
        gradient, squares = self._reduced(stepped, figures)
        measured: Measured = self._measure[first](squares, figures, on(first, _last_counts(state)))

        moments, scalars = self._apart.split(_optimizer_state(state.opt_state))
        columns = self._columns(state, gradient, moments)
        step = partial(self._step_pieces, scalars=scalars, measured=measured, settings=settings)
        is_state_finite = True
        if may_overflow(self._config.optimizer, settings, np):
            applies = jax.device_put(np.bool_(True), first)
            here = [
                new[device].is_finite
                for band, of_band in zip(self._pieces.bands, self._bands, strict=True)
                for new in step(of_band, _of_band(band, columns), applies=applies)
                for device in programs.devices
            ]
            is_state_finite = all(gather(bool(np.all(jax.device_get(here)))))
        decided: Decided = self._decide[first](
            measured, np.bool_(is_state_finite), on(first, state.spikes)
        )
        state = self._stepped(state, columns, partial(step, applies=decided.applies))
        state = self._balanced(state, figures.counts, decided.applies, settings)
        state = state._replace(spikes=programs.everywhere(decided.window))
        hashes = programs.run(self._hash, list(named_arrays(state).values()))
        return state, StepMetrics(
            measured.loss,
            measured.weight,
            measured.grad_norm,
            decided.skipped,
            measured.noise_parts,
            figures.fingerprint_4,
            figures.tokens,
            measured.others,
            measured.routing,
            decided.is_spike,
            on(first, hashes),
        )

    def _scale_of(
        self, state: TrainState, batch: Batch, num_micro_batches: int
    ) -> dict[jax.Device, Scale | None]:
        """Returns the balance terms' facts of the whole batch on each device; None without such
        terms.
        """
        programs, first = self._programs, self._programs.devices[0]
        if self._weigh is None:
            return dict.fromkeys(programs.devices)
        weights = {device: jax.device_put(self._no_weights, device) for device in programs.devices}
        for atoms in self._rows.of(batch, num_micro_batches):
            for device, atom in atoms.items():
                weights[device] = self._weigh[device](weights[device], atom)
        parts = programs.of_devices([weights[device] for device in programs.devices])
        whole = on(first, programs.run(self._gather_weights, parts))
        scale = self._scale[first](whole, on(first, _last_counts(state)))
        return {d: jax.device_put(scale, SingleDeviceSharding(d)) for d in programs.devices}

    def _reduced(
        self, sums: list[ExactSum], figures: BatchFigures
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Returns the gradient of the batch's sum, in the shards of the parameters, and the sum of
        squares of each array of the mean gradient; frees the sums.
        """
        first = self._programs.devices[0]
        gradient: dict[int, jax.Array] = {}
        squares: dict[int, jax.Array] = {}
        for band, of_band in zip(self._pieces.bands, self._bands, strict=True):
            of_places = [sums[place] for place in band.places]
            shards, whole = self._programs.run(of_band.reduce, of_places)
            free(of_places)
            gradient.update(zip(band.places, shards, strict=True))
            of_arrays = of_band.squares[first](on(first, whole or shards), figures.figures_F)
            squares.update(zip(band.places, of_arrays, strict=True))
        places = range(len(sums))
        return [gradient[place] for place in places], [squares[place] for place in places]

    def _step_pieces(
        self,
        band: BandPrograms,
        columns: list[list[jax.Array]],
        scalars: list[Any],
        measured: Measured,
        settings: UpdateSettings,
        applies: jax.Array,
    ) -> Iterator[dict[jax.Device, NewPiece]]:
        """Yields the pieces of a band after the update, on this host's devices."""
        devices = self._programs.devices
        factors = measured.denominator, measured.shrink, applies
        factors_here = {d: jax.device_put(factors, SingleDeviceSharding(d)) for d in devices}
        for piece in self._programs.run(band.cut, columns):
            yield {
                device: band.step[device](
                    _as_columns(on(device, piece), self._num_moments),
                    on(device, scalars),
                    *factors_here[device],
                    settings,
                )
                for device in devices
            }
            free(piece)

    def _stepped(
        self,
        state: TrainState,
        columns: list[list[jax.Array]],
        step: Callable[[BandPrograms, list[list[jax.Array]]], Iterator[dict[jax.Device, NewPiece]]],
    ) -> TrainState:
        """Returns the state after the update; frees its columns."""
        programs, first = self._programs, self._programs.devices[0]
        new: list[dict[int, jax.Array]] = [{} for _ in columns[1:]]
        scalars: list[jax.Array] = []
        for band, of_band in zip(self._pieces.bands, self._bands, strict=True):
            old = _of_band(band, columns)
            pieces = list(step(of_band, old))
            free(old)
            scalars = pieces[0][first].scalars
            arrays = [
                programs.of_devices([_arrays(piece[device]) for device in programs.devices])
                for piece in pieces
            ]
            for arrays_of, column in zip(new, programs.run(of_band.join, arrays), strict=True):
                arrays_of.update(zip(band.places, column, strict=True))
            free(arrays)
        joined = [
            jax.tree.unflatten(self._structure, [column[place] for place in range(len(column))])
            for column in new
        ]
        balance = self._atoms.balance
        average = state.average
        if average is not None:
            average = with_learned(average, joined.pop(), balance)
        params, *moments = joined
        opt_state = self._apart.joined(moments, programs.everywhere(scalars))
        if isinstance(state.opt_state, BalancedState):
            opt_state = state.opt_state._replace(optimizer=opt_state)
        return state._replace(
            params=with_learned(state.params, params, balance),
            opt_state=opt_state,
            average=average,
        )

    def _balanced(
        self,
        state: TrainState,
        counts: RoutingCounts | None,
        applies: jax.Array,
        settings: UpdateSettings,
    ) -> TrainState:
        """Returns the state with the routers' bias and the choices of this update."""
        programs, balance = self._programs, self._atoms.balance
        if balance is None or counts is None:
            return state
        first = programs.devices[0]
        before = on(first, programs.run(self._gather_balanced, _balanced_part(state)))
        after = self._rebalance[first](before, counts.choices_1xNxE, applies, settings)
        bias, average, last_counts = programs.run(self._place_balanced, programs.everywhere(after))
        if average is not None and state.average is not None:
            average = with_learned(average, learned(state.average, balance), balance)
        return state._replace(
            params=with_learned(bias, learned(state.params, balance), balance),
            opt_state=state.opt_state._replace(last_counts_NxE=last_counts),
            average=average,
        )

    def _columns(
        self, state: TrainState, gradient: list[jax.Array], moments: list[Any]
    ) -> list[list[jax.Array]]:
        """Returns what each parameter has in a state, with its gradient, in the order of
        `Columns`.
        """
        trees = [state.params, *moments, *([] if state.average is None else [state.average])]
        balance = self._atoms.balance
        return [gradient, *(jax.tree.leaves(learned(tree, balance)) for tree in trees)]


def _denominator(figures_F: jax.Array) -> jax.Array:
    """Returns the weight of a batch, or 1 for one without weight."""
    weight = figures_F[Figures._fields.index("weight")]
    return jnp.where(weight > 0, weight, 1.0)


def _same(tree: T) -> T:
    return tree


def _optimizer_state(opt_state: optax.OptState) -> optax.OptState:
    """Returns the optimizer's own state."""
    return opt_state.optimizer if isinstance(opt_state, BalancedState) else opt_state


def _last_counts(state: TrainState) -> jax.Array | None:
    """Returns the choices of the update before, of a model with experts."""
    if not isinstance(state.opt_state, BalancedState):
        return None
    last_counts: Any = state.opt_state.last_counts_NxE
    counts: jax.Array = last_counts
    return counts


def _balanced_part(state: TrainState) -> BalancedPart:
    average = None if state.average is None else routers_bias(state.average)
    return BalancedPart(routers_bias(state.params), average, state.opt_state.last_counts_NxE)


def _of_band(band: Band, columns: list[list[Any]]) -> list[list[Any]]:
    return [[column[place] for place in band.places] for column in columns]


def _arrays(piece: NewPiece) -> list[jax.Array]:
    """Returns the columns of a new piece."""
    return [piece.params, *piece.moments, *([] if piece.average is None else [piece.average])]


def _as_columns(arrays: Sequence[Any], num_moments: int) -> Columns:
    """Returns the columns of arrays in their order."""
    gradient, params, *others = arrays
    average = others[num_moments:]
    return Columns(gradient, params, others[:num_moments], average[0] if average else None)
