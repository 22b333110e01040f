"""The gradients of an update, summed over micro-batches and reduced once.

Shapes: M rows in a micro-batch, L tokens in a row, d shards of the data axis.

`optax.MultiSteps` accumulates sums and never emits: its state exists inside one update, so no NaN
outlives it and no checkpoint has it. Layers in a loop sum their gradients in their own backward
pass (`SummingLayers`). Each data shard has its own partial gradient, so there is one reduction over
the data axis, after the last micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxbatch.config.combined import UpdateConfig
from maxbatch.data.feed.placement import TokenRows
from maxbatch.families.matrices import num_layers
from maxbatch.families.parameter import LAST_LAYERS, LAYERS
from maxbatch.model.decoder import Decoder
from maxbatch.model.experts.routing import RoutingSums, carried
from maxbatch.model.loss import loss_sums_of
from maxbatch.parallel.remat import Remat
from maxbatch.parallel.sharding import parameter_shardings
from maxbatch.parallel.trees import State, Tree
from maxbatch.plan.mesh_shape import BATCH_AXES
from maxbatch.system.hashing import carry, limb_sums, row_hashes
from maxbatch.update.balance import Balance, Scale
from maxbatch.update.layer_gradients import AddLayer, SummingLayers, add_rounded
from maxbatch.update.lora import adapters_of
from maxbatch.update.model_on_mesh import ModelOnMesh
from maxbatch.update.packed_rows import SHARDS, may_be_on_several_shards, sample_hashes
from maxbatch.update.state import ModelMaker

if TYPE_CHECKING:
    from maxbatch.update.reference import Reference

# axes that split the rows of a data shard
PARTIAL_AXES = tuple(axis for axis in BATCH_AXES if axis != "data")
_NEVER = 2**31 - 1  # micro-batches after which the accumulator would emit


class ObjectiveSums(NamedTuple):
    """The sums of an objective over a micro-batch: float32 scalars, and the decoder's routing."""

    loss: jax.Array
    weight: jax.Array
    others: dict[str, jax.Array]  # by name
    routing: RoutingSums | None  # of a model with experts


def sum_of_weights(rows: TokenRows) -> jax.Array:
    return jnp.sum(rows.weights)


class Objective(NamedTuple):
    """The loss to minimise: `sums(decoder, rows, batch_shards) -> ObjectiveSums`.

    Rows are a NamedTuple, and all its arrays are [M, L].
    """

    sums: Callable[[Decoder, Any, int], ObjectiveSums]
    others: tuple[str, ...] = ()  # names of the other sums
    weigh: Callable[[Any], jax.Array] = sum_of_weights  # weight_sum of rows, for the balance terms
    make_model: ModelMaker | None = None  # makes the trained model; None: the config's Decoder
    reference: Reference | None = None  # figures of the first parameters, beside the rows
    rows_per_sample: int = 1  # that a sample has on its own where samples share rows


def _next_token(decoder: Decoder, rows: TokenRows, batch_shards: int) -> ObjectiveSums:
    begins_MxL = getattr(rows, "begins", None)
    x_MxLxD, routing = decoder.hidden(rows.tokens, rows.segments, begins_MxL)
    loss, weight = loss_sums_of(
        decoder, x_MxLxD, rows.tokens, rows.weights, batch_shards=batch_shards
    )
    return ObjectiveSums(loss, weight, {}, routing)


NEXT_TOKEN = Objective(_next_token)  # pre-training: the cross-entropy of each token


class NoiseParts(NamedTuple):
    """The input of the gradient noise scale from the first micro-batch: float32 sums over its parts.

    These are its data shards; where a sample may lie on several of them, it is one part. One
    micro-batch gives an unbiased estimate; reading the gradients of all would slow the update.
    """

    gradient_squares: jax.Array  # of the squared norm of a part's summed gradient
    weights: jax.Array  # of a part's loss weight; 0 if the batch is a single part
    weight_squares: jax.Array  # of its square


class Sums(NamedTuple):
    """Sums over an update's micro-batches so far, one row per shard of the data axis."""

    accumulator: optax.MultiStepsState  # its `acc_grads` are the gradients of the summed losses
    layers: State  # sums of the layers, float32, if their backward pass sums them; else empty
    losses_d: jax.Array
    weights_d: jax.Array
    others_d: dict[str, jax.Array]
    noise_parts_d: NoiseParts
    fingerprints_dx4: jax.Array
    tokens_d: jax.Array  # uint32
    routing_d: RoutingSums | None  # of a model with experts


class Weights(NamedTuple):
    """The parameters at which gradients are taken."""

    trained: State
    frozen: State | None  # parameters of the model below trained adapters


class Totals(NamedTuple):
    """Sums of a global batch, reduced over the data axis."""

    gradient: State  # of the summed losses
    loss: jax.Array
    weight: jax.Array
    others: dict[str, jax.Array]
    noise_parts: NoiseParts
    fingerprint: jax.Array  # uint32[4], 16-bit limbs of the sum of row hashes
    tokens: jax.Array  # uint32, tokens of the rows; padding is none
    routing: RoutingSums | None  # of a model with experts


class Accumulation:
    """Accumulation of an objective's sums over micro-batches, inside a program.

    Args:
      remat: of layers that sum their gradients; None: the config's.
    """

    def __init__(
        self,
        config: UpdateConfig,
        mesh: Mesh,
        objective: Objective,
        remat: Remat | None = None,
    ) -> None:
        self._objective = objective
        self._model = model = ModelOnMesh(
            config, config.mesh, mesh, PARTIAL_AXES, objective.make_model
        )
        kept = remat or Remat.of(config.remat)
        self._adapters = adapters = adapters_of(config.adapters, config.quantization)
        is_own = objective.make_model is not None
        # otherwise most layers and the last ones are two loops
        loops_once = num_layers(config, LAST_LAYERS) == 0
        self.can_sum_layers = loops_once and not model.has_pipeline and not is_own and not adapters
        self._sums_layers = config.scan_layers and self.can_sum_layers
        self.data_shards = mesh.shape["data"]
        self.balance = balance = None if is_own else Balance.from_config(config)
        trained_shape = adapters.abstract(model.abstract) if adapters else model.abstract
        self._partial_sharding = jax.tree.map(
            lambda s: NamedSharding(mesh, P("data", *s.spec)),
            parameter_shardings(trained_shape, mesh),
        )
        self._accumulator = optax.MultiSteps(
            optax.identity(), every_k_schedule=lambda _: jnp.int32(_NEVER), use_grad_mean=False
        )

        def loss_fn(
            params: State,
            layer_sums: State,
            others: State,
            scale: Scale | None,
            rows: Tree,
            add: AddLayer = add_rounded,
        ) -> tuple[jax.Array, ObjectiveSums]:
            summing = (
                SummingLayers(layer_sums[LAYERS], kept, model.constrain, add)
                if layer_sums
                else None
            )
            whole = (
                model.staged(adapters.applied(others, params))
                if adapters
                else nnx.merge_state(params, others)
            )
            sums = objective.sums(model.module(whole, summing), rows, model.row_shards)
            minimised = sums.loss
            if scale is not None:
                assert balance is not None and sums.routing is not None, (
                    "terms of balance need experts"
                )
                minimised += balance.term(sums.routing, scale)
            return minimised, sums

        self._gradients = jax.value_and_grad(loss_fn, argnums=(0, 1), has_aux=True)
        self._partial_gradients = jax.vmap(
            self._gradients,
            in_axes=(None, 0, None, None, 0),
            axis_name=SHARDS,
            spmd_axis_name="data",
        )

        def add_fingerprint(limbs_4: jax.Array, rows: TokenRows) -> jax.Array:
            if getattr(rows, "begins", None) is None:
                hashes = row_hashes(jnp, rows.tokens, rows.segments, rows.weights)
            else:
                hashes = sample_hashes(rows, objective.rows_per_sample)
            limbs: jax.Array = carry(jnp, limbs_4 + limb_sums(jnp, hashes))
            return limbs

        self._add_fingerprints = jax.vmap(add_fingerprint, axis_name=SHARDS, spmd_axis_name="data")

    def staged(self, params: State, frozen: State | None = None) -> Weights:
        """Returns the parameters in the running order of the layers, for `start` and `add`.

        Adapters keep their own order; the merged model is put in order.
        """
        return Weights(params if self._adapters else self._model.staged(params), frozen)

    def start(self, weights: Weights, sums_layers: bool = True) -> Sums:
        """Returns empty sums for `staged` parameters.

        With `sums_layers`, layers in a loop sum their gradients in the backward pass.
        """
        shards = self.data_shards
        zeros = jax.tree.map(lambda p: jnp.zeros((shards, *p.shape), p.dtype), weights.trained)
        zeros = jax.lax.with_sharding_constraint(zeros, self._partial_sharding)
        nothing = jnp.zeros(shards, jnp.float32)
        others = dict.fromkeys(self._objective.others, nothing)
        limbs, tokens = jnp.zeros((shards, 4), jnp.uint32), jnp.zeros(shards, jnp.uint32)

        layers, rest = self._apart(zeros, sums_layers and self._sums_layers)
        layers = jax.tree.map(lambda x: x.astype(jnp.float32), layers)
        noise_parts = NoiseParts(nothing, nothing, nothing)
        routing = None
        if self.balance is not None:
            of_shard = RoutingSums.nothing(self.balance.num_layers, self.balance.num_experts)
            routing = jax.tree.map(lambda x: jnp.zeros((shards, *x.shape), x.dtype), of_shard)
        return Sums(
            self._accumulator.init(rest),
            layers,
            nothing,
            nothing,
            others,
            noise_parts,
            limbs,
            tokens,
            routing,
        )

    def _apart(self, params: State, sums_layers: bool) -> tuple[State, State]:
        """Splits parameters into those of layers that sum their gradients in the backward pass, and
        the rest.

        First layers without experts belong to the rest.
        """
        if not sums_layers:
            return nnx.State({}), params
        layers, rest = nnx.split_state(params, nnx.PathContains(LAYERS), ...)
        return layers, rest

    def add(
        self,
        weights: Weights,
        sums: Sums,
        rows: Tree,
        measures_noise: jax.Array | bool,
        scale: Scale | None = None,
    ) -> Sums:
        """Returns the sums with one more micro-batch, for `staged` parameters.

        Args:
          rows: [M, L] arrays, as the objective takes them.
          measures_noise: whether to take the noise scale's parts from it; only for an update's
            first micro-batch.
          scale: for the balance terms; None: the loss has none.
        """
        shards = self._shards(rows)
        of_layers, rest = self._apart(weights.trained, bool(sums.layers))
        others = of_layers if weights.frozen is None else weights.frozen

        (_, (loss_d, weight_d, others_d, routing_d)), (gradients, layers) = self._partial_gradients(
            rest, sums.layers, others, scale, shards
        )
        with jax.numpy_dtype_promotion("standard"):  # MultiSteps mixes its counters into float32
            _, accumulator = self._accumulator.update(gradients, sums.accumulator)
        noise_parts_d = sums.noise_parts_d
        if measures_noise is not False:  # first micro-batch: the sums are its gradients
            first = (accumulator.acc_grads, layers)
            measure = _noise_part if may_be_on_several_shards(rows) else _noise_parts
            noise_parts_d = jax.lax.cond(
                measures_noise, measure, lambda *_: sums.noise_parts_d, first, weight_d
            )
        return Sums(
            accumulator,
            layers,
            sums.losses_d + loss_d,
            sums.weights_d + weight_d,
            jax.tree.map(jnp.add, sums.others_d, others_d),
            noise_parts_d,
            self._add_fingerprints(sums.fingerprints_dx4, shards),
            sums.tokens_d + _num_tokens(shards),
            None if sums.routing_d is None or routing_d is None else sums.routing_d.plus(routing_d),
        )

    def alone(
        self,
        weights: Weights,
        rows: Tree,
        layers: State,
        add: AddLayer,
        scale: Scale | None = None,
    ) -> tuple[Totals, State]:
        """Returns the sums of rows on a mesh of one device, for `staged` parameters, without an
        accumulator, and the sums of the layers with their gradients.

        It measures no parts of the noise scale.

        Args:
          layers: sums of the layers, which the gradient then lacks, as `add` takes them; or empty.
        """
        of_layers, rest = self._apart(weights.trained, bool(layers))
        others = of_layers if weights.frozen is None else weights.frozen
        gradients = jax.vmap(  # the rows are a single shard
            partial(self._gradients, add=add),
            in_axes=None,
            out_axes=None,
            axis_name=SHARDS,
            axis_size=1,
        )
        (_, sums), (gradient, layers) = gradients(rest, layers, others, scale, rows)
        nothing, shards = jnp.float32(0), self._shards(rows)
        totals = Totals(
            gradient,
            sums.loss,
            sums.weight,
            sums.others,
            NoiseParts(nothing, nothing, nothing),
            self._add_fingerprints(jnp.zeros((1, 4), jnp.uint32), shards)[0],
            _num_tokens(shards)[0],
            sums.routing,
        )
        return totals, layers

    def total(self, sums: Sums) -> Totals:
        """Returns the sums over all shards, the gradient in the order of the parameters."""
        gradients = nnx.merge_state(sums.accumulator.acc_grads, sums.layers)
        totals = Totals(
            *jax.tree.map(lambda x: x.sum(axis=0, dtype=x.dtype), (gradients, *sums[2:]))
        )
        if totals.routing is not None:
            totals = totals._replace(
                routing=totals.routing._replace(limbs_4=carried(totals.routing.limbs_4))
            )
        if not self._adapters:
            totals = totals._replace(gradient=self._model.unstaged(totals.gradient))
        return totals._replace(fingerprint=carry(jnp, totals.fingerprint))

    def _shards(self, rows: Tree) -> Any:
        return jax.tree.map(lambda x: x.reshape(self.data_shards, -1, x.shape[-1]), rows)


def _num_tokens(shards: TokenRows) -> jax.Array:
    return jnp.sum(shards.segments != 0, axis=(1, 2), dtype=jnp.uint32)


def _noise_parts(gradients: Tree, weight_d: jax.Array) -> NoiseParts:
    squares = [
        jnp.sum(jnp.square(g.astype(jnp.float32)), range(1, g.ndim))
        for g in jax.tree.leaves(gradients)
    ]
    return NoiseParts(jnp.stack(squares).sum(axis=0), weight_d, jnp.square(weight_d))


def _noise_part(gradients: Tree, weight_d: jax.Array) -> NoiseParts:
    """Returns `_noise_parts` of all shards as one part, on the first of them; its gradient is summed
    over the shards for that.
    """
    whole = jax.tree.map(lambda x: x.sum(axis=0, keepdims=True), (gradients, weight_d))
    missing = (0, weight_d.size - 1)
    return NoiseParts(*(jnp.pad(x, missing) for x in _noise_parts(*whole)))
