"""The decoder: a causal transformer in the standard form of LLaMA, in flax NNX.

Pre-normalised residual blocks (RMSNorm), rotary grouped-query attention, a gated SiLU MLP, tied or
untied embeddings: LLaMA (Touvron et al. 2023, https://arxiv.org/abs/2302.13971).

The way of a token: its row of the embedding (`Decoder._embedded`); the parts of the decoder one
after the other, each a stack of layers that share one program (`_parts`, `_run`); the final norm;
the logits. `maxbatch.model.walk` goes through the layers of a stack, `maxbatch.model.layer` is one
of them. New tokens of rows that are sampled go the same way, with caches (`hidden_with_caches`).

Shapes: M micro-batch, L length, D model, F MLP, V vocabulary; while sampling, B rows and T new
tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxbatch.config.combined import DecoderConfig
from maxbatch.families.cycle import LayerForm, cycle_of, local_layers, places_of_keys
from maxbatch.families.family import FAMILIES
from maxbatch.families.forms.form import imported
from maxbatch.families.matrices import num_layers, num_stacked
from maxbatch.families.parameter import DENSE_LAYERS, LAST_LAYERS, LAYERS
from maxbatch.model.attention import Attention, KeysValues
from maxbatch.model.cache import Caches, Room
from maxbatch.model.experts.routing import RoutingSums, routed_slots
from maxbatch.model.layer import STREAM, DecoderLayer, LayerCycle
from maxbatch.model.norms import norm_of
from maxbatch.model.parameters import Later, add_parameters, drawn
from maxbatch.model.products import product
from maxbatch.model.rope import RopeKeys, Ropes
from maxbatch.model.scores import soft_capped
from maxbatch.model.segments import Slots, places_in_segments
from maxbatch.model.stacked import Stacked
from maxbatch.model.walk import (
    Carried,
    Continued,
    KeysByPlace,
    LayerDef,
    LayerRunner,
    Part,
    loop,
    unrolled,
)
from maxbatch.parallel.remat import Remat, checkpointed
from maxbatch.parallel.sharding import Constrain, unconstrained
from maxbatch.parallel.trees import State


class Hidden(NamedTuple):
    """The stream of a micro-batch after the final norm, with the routing sums of every layer's
    experts.
    """

    x_MxLxD: jax.Array  # in the compute dtype
    sums: RoutingSums | None  # a row per layer; None without experts


StackedModule = TypeVar("StackedModule", DecoderLayer, LayerCycle)


class Decoder(nnx.Module):
    """A causal language model up to its last projection, which the loss fuses with the
    cross-entropy.

    Every parameter is an `nnx.Param` in `weight_dtype` with metadata `logical_axes`, one name per
    axis, from the table in `maxbatch.families.matrices`. Those of the layers are stacked on a leading
    axis "layers", whether the layers then run in a loop or unrolled (`scan_layers`). Layers of
    several forms are stacked as cycles, each run as one. First layers without experts are a stack
    of their own, which runs before the others, outside of a layer runner; and so are last layers
    that take the keys and values of the last layers before them.

    Args:
      config: the model keys, `dtype`, `weight_dtype`, `remat_policy`, `scan_layers`.
      rngs: the stream `params` seeds the values; the same seed gives the same values under any
        sharding.
      constrain: places activations by their logical axes: "batch", "length", "embed" (that of
        activations, which the mesh does not split), "heads", "kv_heads", "head_dim", "mlp",
        "vocab".
      layer_runner: runs the layers in place of a plain loop over them; it sees to their
        rematerialisation.
    """

    embedding: nnx.Param[jax.Array]
    positions: nnx.Param[jax.Array]  # if positions are learned
    output: nnx.Param[jax.Array]  # if it is not the embedding
    # stacked: the first layers, if they have no experts and the others have
    dense_layers: DecoderLayer
    layers: DecoderLayer | LayerCycle  # stacked

    def __init__(
        self,
        config: DecoderConfig,
        *,
        rngs: nnx.Rngs,
        constrain: Constrain = unconstrained,
        layer_runner: LayerRunner | None = None,
    ):
        family, cycle = FAMILIES[config.decoder_block], cycle_of(config)
        # Inside of a pipeline activations are of one stage, so its own constraint places them.
        inside = layer_runner.constrain if layer_runner else constrain

        # The logits of a tied model start at a variance of about 1, so its loss starts at most half
        # a nat above ln V. Smaller tables start nearer to it and learn slower (0.1 to 0.35 nats
        # after 100 updates of the default model).
        add_parameters(self, config, "embedding", "positions", rngs=rngs)

        self.num_dense = config.first_num_dense_layers
        if self.num_dense:
            form = LayerForm(family.attention, has_experts=False)
            make = partial(DecoderLayer, config, DENSE_LAYERS, form, constrain=constrain)
            self.dense_layers = _stack_of(make, self.num_dense, DENSE_LAYERS, rngs)

        self.num_stacked, self.cycle_length = num_stacked(config), len(cycle)
        self.layers = _stack_of_cycles(config, LAYERS, rngs, inside)

        self.shares_keys = num_layers(config, LAST_LAYERS) > 0
        self.places_of_keys = places_of_keys(cycle)  # for each place of the cycle
        if self.shares_keys:
            setattr(self, LAST_LAYERS, _stack_of_cycles(config, LAST_LAYERS, rngs, inside))

        # the module that makes what layers are given besides the stream; empty: nothing does
        self.maker_of_inputs = ""
        for ending in family.endings:
            if ending.module:
                make_inputs = imported(ending.makes_inputs)
                setattr(self, ending.module, make_inputs(config, rngs=rngs, constrain=constrain))
                self.maker_of_inputs = ending.module

        self.final_norm = norm_of(config, "final_norm")
        add_parameters(self, config, "output", rngs=rngs)

        self.dtype = jnp.dtype(config.dtype)
        scale = family.embedding.scale(config)
        # multiplies the embedding where it enters the stream
        self.embedding_scale = None if config.gemma_weights_scaled else scale
        # is a factor of the embedding's weights, so it divides tied logits
        self.held_scale = scale if config.gemma_weights_scaled else None
        self.logits_soft_cap: float = config.final_logits_soft_cap
        self.z_loss: float = config.z_loss_multiplier
        has_rope = config.trainable_position_size <= 0
        self.rope_keys = RopeKeys.from_config(config) if has_rope else None
        self.local_layers = local_layers(config, num_layers(config))
        self.has_experts = any(form.has_experts for form in cycle)

        self.scan_layers, self.remat = config.scan_layers, Remat.of(config.remat)
        self.constrain, self.layer_runner = constrain, layer_runner

    def __call__(self, tokens_MxL: jax.Array, segments_MxL: jax.Array) -> jax.Array:
        """Returns the logits of the token after each, float32[M, L, V]; `hidden` has the
        arguments.
        """
        return self.logits(self.hidden(tokens_MxL, segments_MxL).x_MxLxD)

    def hidden(
        self,
        tokens_MxL: jax.Array,
        segments_MxL: jax.Array,
        begins_MxL: jax.Array | None = None,
    ) -> Hidden:
        """Returns the stream after the final norm, and the routing sums of all layers.

        Tokens are in [0, V). A token sees the tokens before it of its own segment, and only those.

        Args:
          begins_MxL: int32, where samples share rows: 1 + the token that pads a sample's own row at
            its first token, else 0. Experts count within a sample then. None: a row is a sample.
        """
        x_MxLxD = self._embedded(tokens_MxL, partial(places_in_segments, segments_MxL))
        slots = Slots(segments_MxL)
        if self.has_experts:
            slots = routed_slots(tokens_MxL, segments_MxL, begins_MxL)
        ropes = None if self.rope_keys is None else Ropes(self.rope_keys, tokens_MxL.shape[-1])

        carried, sums = Carried(x_MxLxD), None
        for part in self._parts(ropes, self._inputs(tokens_MxL, x_MxLxD)):
            carried, sums_of_part = self._run(part, carried, slots)
            sums = sums_of_part if sums is None else sums  # one part has experts
        return Hidden(self.final_norm(carried.x_MxLxD), self._by_layer(sums))

    def hidden_with_caches(
        self,
        tokens_BxT: jax.Array,
        positions_BxT: jax.Array,
        caches: Caches,
        limits_B: jax.Array | None = None,
    ) -> tuple[jax.Array, Caches]:
        """Returns the stream after the final norm of T more tokens of each row, [B, T, D], and the
        caches with them.

        A token sees those before it in its row, which is one document from its start and whose
        slots are in the caches. The layers run in a plain loop, and experts without a capacity.

        Args:
          positions_BxT: the tokens' neighbouring places in their rows, in [0, L).
          limits_B: the most tokens that each row will have, the same in every call, since LongRoPE
            rotates the keys of long documents differently; None: the length of the caches.
        """
        x_BxTxD = self._embedded(tokens_BxT, lambda: positions_BxT)
        length = caches.num_positions
        lengths_Bx1 = jnp.full((1, 1), length) if limits_B is None else limits_B[:, None]
        longest = length if limits_B is None else sys.maxsize
        ropes = None if self.rope_keys is None else Ropes(self.rope_keys, length, longest)

        carried, run = Carried(x_BxTxD, caches=caches), loop if self.scan_layers else unrolled
        for part in self._parts(ropes, self._inputs(tokens_BxT, x_BxTxD)):
            stacked = part.stacked._replace(in_cache=part.in_cache)
            carried, _ = run(part.step, carried, Continued(positions_BxT, lengths_Bx1), stacked)
        assert carried.caches is not None, "new tokens have caches"
        return self.final_norm(carried.x_MxLxD), carried.caches

    def _embedded(self, tokens_MxL: jax.Array, places: Callable[[], jax.Array]) -> jax.Array:
        # Whole in D for the lookup, so that the rows are placed by the batch, not by the split of
        # the parameter.
        table_VxD = self.constrain(self.embedding[...].astype(self.dtype), ("vocab", "embed"))
        x_MxLxD = table_VxD[tokens_MxL]
        if self.embedding_scale is not None:
            x_MxLxD *= jnp.asarray(self.embedding_scale, self.dtype)
        if self.rope_keys is None:
            table_PxD = self.constrain(
                self.positions[...].astype(self.dtype), ("position", "embed")
            )
            x_MxLxD += table_PxD[places()]
        return self.constrain(x_MxLxD, STREAM)

    def _inputs(self, tokens_MxL: jax.Array, x_MxLxD: jax.Array) -> jax.Array | None:
        """Returns the inputs that layers have besides the stream, [N, M, L, P] or by cycles [N,
        cycle, M, L, P]; None if they have none.
        """
        if not self.maker_of_inputs:
            return None
        inputs_NxMxLxP: jax.Array = getattr(self, self.maker_of_inputs)(tokens_MxL, x_MxLxD)
        return inputs_NxMxLxP.reshape(-1, self.cycle_length, *inputs_NxMxLxP.shape[1:])

    def _parts(self, ropes: Ropes | None, inputs_NxMxLxP: jax.Array | None) -> list[Part]:
        """Returns the parts of the decoder, in order: first layers without experts, if it has some;
        most layers; the last ones without keys of their own, if it has some.
        """
        make = partial(Part, ropes=ropes, is_local=self.local_layers[0])
        parts = []
        if self.num_dense:
            layerdef, parameters = _split(self.dense_layers)
            parts.append(make(layerdef, Stacked(parameters), in_cache=np.arange(self.num_dense)))

        runner, order = self.layer_runner, np.arange(self.num_stacked)
        if runner is not None:
            order = runner.order(self.num_stacked)
        layerdef, parameters = _split(self.layers)
        stacked = self._stacked(parameters, order)
        if inputs_NxMxLxP is not None:
            stacked = stacked._replace(inputs=inputs_NxMxLxP[: self.num_stacked])
        most = make(layerdef, stacked, in_cache=self.num_dense + order, runner=runner)
        if not self.shares_keys:
            return [*parts, most]

        layerdef, parameters = _split(getattr(self, LAST_LAYERS))
        stacked = Stacked(parameters)
        if inputs_NxMxLxP is not None:
            stacked = stacked._replace(inputs=inputs_NxMxLxP[self.num_stacked :])
        last_with_keys = np.full(stacked.num_layers, self.num_stacked - 1)
        last = make(layerdef, stacked, in_cache=last_with_keys)
        sources = self.places_of_keys
        most = most._replace(keys="given", sources=sources)
        return [*parts, most, last._replace(keys="taken", sources=sources)]

    def _stacked(self, parameters: State, order: np.ndarray) -> Stacked:
        """Returns most layers, in an order of their numbers."""
        numbers = (
            self.num_dense + self.cycle_length * order.astype(np.int32)
            if self.has_experts
            else None
        )
        if self.cycle_length > 1 or len(set(self.local_layers)) == 1:
            return Stacked(parameters, number=numbers)
        return Stacked(parameters, np.asarray(self.local_layers)[order], numbers)

    def _run(
        self, part: Part, carried: Carried, slots: Slots
    ) -> tuple[Carried, RoutingSums | None]:
        """Returns the stream after all layers of a part, of whole rows, and the sums of its
        experts.
        """
        x_MxLxD = carried.x_MxLxD
        if part.runner is not None:
            return self._run_by(part.runner, part, x_MxLxD, slots)
        if part.keys == "taken":
            part = part._replace(taken=carried.keys)
        keys = self._no_keys(x_MxLxD.shape[:2]) if part.keys == "given" else None
        is_looped = self.scan_layers and part.stacked.num_layers > 1
        step = checkpointed(part.step, self.remat, in_loop=is_looped)
        run = loop if is_looped else unrolled
        return run(step, Carried(x_MxLxD, keys), slots, part.stacked)

    def _run_by(
        self, runner: LayerRunner, part: Part, x_MxLxD: jax.Array, slots: Slots
    ) -> tuple[Carried, RoutingSums | None]:
        """Returns the same as `_run`, from a pipeline or from layers that sum their gradients. They
        take the layers in an order of their own.
        """

        def layers(
            x_MxLxD: jax.Array, slots: Slots, stacked: Stacked
        ) -> tuple[jax.Array, RoutingSums | None]:
            run = loop if self.scan_layers and stacked.num_layers > 1 else unrolled
            carried, sums = run(part.step, Carried(x_MxLxD), slots, stacked)
            return carried.x_MxLxD, sums

        x_MxLxD, sums = runner(layers, part.stacked, x_MxLxD, slots)
        in_order = np.argsort(runner.order(self.num_stacked))
        sums = jax.tree.map(lambda of_layers: of_layers[in_order], sums)
        return Carried(self.constrain(x_MxLxD, STREAM)), sums

    def _no_keys(self, shape: tuple[int, ...]) -> KeysByPlace:
        """Returns zeros in the form of the keys and values that layers share, for M rows of L
        tokens: those that a loop hands to its first cycle, which reads none.
        """

        def zeros(layer: DecoderLayer) -> KeysValues:
            assert isinstance(layer.attention, Attention), "its keys and values are not shared"
            kv_heads, *widths = layer.attention.cache_shape
            return KeysValues(
                *(jnp.zeros((*shape, kv_heads, width), self.dtype) for width in widths)
            )

        return {place: zeros(self.layers.layers[place]) for place in set(self.places_of_keys)}

    def _by_layer(self, sums: RoutingSums | None) -> RoutingSums | None:
        """Returns the sums of all layers with experts in order, from those of each cycle."""
        if self.cycle_length == 1:
            return sums
        by_layer: RoutingSums | None = jax.tree.map(
            lambda of_cycles: of_cycles.reshape(-1, *of_cycles.shape[2:]), sums
        )
        return by_layer

    def empty_caches(self, num_rows: int, length: int, ends_B: jax.Array | None = None) -> Caches:
        """Returns caches in the compute dtype with room for `length` tokens in each of B rows.

        Args:
          ends_B: int32: tokens from this position of a row on change no state of it (`StateCache`);
            None: all do.
        """
        room = Room(self.num_dense, self.num_stacked, num_rows, length, ends_B)
        attentions = (layer.attention for layer in self.layers.layers)
        return Caches(
            tuple(one.empty_cache(room, self.dtype, self.constrain) for one in attentions)
        )

    def logits(self, x_MxLxD: jax.Array) -> jax.Array:
        """Returns the logits of the token after each, float32[M, L, V], from the stream after the
        final norm.
        """
        return product(x_MxLxD, self.output_projection(), "mld,dv->mlv", out_dtype=jnp.float32)

    def capped(self, logits: jax.Array) -> jax.Array:
        """Returns logits under `final_logits_soft_cap`."""
        return soft_capped(logits, self.logits_soft_cap)

    def output_projection(self) -> jax.Array:
        """Returns the matrix from the stream to the logits, [D, V], in `weight_dtype`."""
        if hasattr(self, "output"):
            return self.output[...]
        table_DxV = self.embedding[...].T
        return table_DxV if self.held_scale is None else table_DxV / self.held_scale


def _split(stack: DecoderLayer | LayerCycle) -> tuple[LayerDef, State]:
    layerdef, parameters = nnx.split(stack)
    return layerdef, parameters


def _stack_of_cycles(
    config: DecoderConfig, stack: str, rngs: nnx.Rngs, constrain: Constrain
) -> DecoderLayer | LayerCycle:
    """Returns the cycles of layers of a stack as one module; layers of one form are no cycles."""
    cycle, size = cycle_of(config), num_stacked(config, stack)
    if len(cycle) > 1:
        make_cycle = partial(LayerCycle, config, stack, constrain=constrain)
        return _stack_of(make_cycle, size, stack, rngs)
    make_layer = partial(DecoderLayer, config, stack, cycle[0], constrain=constrain)
    return _stack_of(make_layer, size, stack, rngs)


def _stack_of(
    make: Callable[..., StackedModule], size: int, stack: str, rngs: nnx.Rngs
) -> StackedModule:
    """Returns `size` layers, or cycles, as one module, whose parameters have a leading axis of the
    stack's name.

    A loop makes one layer after the other, each from its own key: the TPU compiler takes ten times
    as long for all layers at once. Tracing the loop makes the layer that has their form.
    """
    traced: list[LayerDef] = []

    def first_values(key: jax.Array) -> State:
        layerdef, parameters = nnx.split(make(rngs=Later(params=key)))
        traced.append(layerdef)
        return drawn(parameters)

    values = jax.lax.map(first_values, jax.random.split(rngs.params(), size))
    layers: StackedModule = nnx.merge(traced[-1], values)
    _name_axis(layers, stack)
    return layers


def _name_axis(layers: nnx.Module, stack: str) -> None:
    """Names the leading axis of the parameters of stacked layers."""
    for _, parameter in nnx.iter_graph(layers):
        if isinstance(parameter, nnx.Param):
            parameter.set_metadata(logical_axes=(stack, *parameter.get_metadata("logical_axes")))
