"""The decoder: a causal transformer in the standard form of LLaMA, in flax NNX.

Pre-normalised residual blocks (RMSNorm), rotary grouped-query attention, a gated SiLU MLP, tied or
untied embeddings: LLaMA (Touvron et al. 2023, https://arxiv.org/abs/2302.13971).

Shapes: M micro-batch, L length, D model, F MLP, V vocabulary; while sampling, B rows and T new
tokens.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxbatch.config.combined import DecoderConfig
from maxbatch.families.cycle import (
    LayerForm,
    cycle_length,
    cycle_of,
    local_layers,
    places_of_shared_keys,
)
from maxbatch.families.family import FAMILIES
from maxbatch.families.matrices import (
    DENSE_LAYERS,
    KV_SHARED_LAYERS,
    LAYERS,
    layer_paths,
    num_layers,
    num_stacked,
)
from maxbatch.model.attention import Attention, KeysValues
from maxbatch.model.cache import Cache, Caches, StateCache
from maxbatch.model.delta_net import GatedDeltaNet
from maxbatch.model.experts.experts import Experts
from maxbatch.model.experts.routing import RoutingSums, Slots, slot_hashes
from maxbatch.model.latent_attention import LatentAttention
from maxbatch.model.layer_inputs import LayerInputs
from maxbatch.model.mlp import ACTIVATIONS, MLP
from maxbatch.model.norms import norm_of
from maxbatch.model.parameters import Later, add_parameters, drawn
from maxbatch.model.products import features_last, product
from maxbatch.model.rope import Rope, RopeKeys, Ropes
from maxbatch.model.scores import soft_capped
from maxbatch.model.segments import lengths_in_segments, places_in_segments
from maxbatch.model.stacked import Stacked, Static
from maxbatch.parallel.pipeline import Layers
from maxbatch.parallel.remat import Remat, checkpointed
from maxbatch.parallel.sharding import Constrain, unconstrained
from maxbatch.parallel.trees import State

_STREAM = ("batch", "length", "embed")
SharedKeys: TypeAlias = dict[int, KeysValues]  # by place in the cycle of layers


class Hidden(NamedTuple):
    """The stream of a micro-batch after the final norm, with the routing sums of every layer's
    experts.
    """

    x_MxLxD: jax.Array  # in the compute dtype
    sums: RoutingSums | None  # a row per layer; None without experts


class LayerRunner(Protocol):
    """A way to run the layers other than a plain loop over them."""

    @property
    def constrain(self) -> Constrain:
        """The constraint on activations inside of the layers."""

    def order(self, num_stacked: int) -> np.ndarray:
        """Returns the numbers of the layers, or cycles, in the order in which their parameters come
        stacked.
        """

    def __call__(
        self,
        layers: Layers[RoutingSums | None],
        stacked: Stacked,
        x_MxLxD: jax.Array,
        slots: Slots,
        /,
    ) -> tuple[jax.Array, RoutingSums | None]:
        """Returns x after all layers and their sums, stacked alike; `layers` runs as many as are
        stacked.
        """


class DecoderLayer(nnx.Module):
    """One residual block: attention, then the MLP or experts, normalised before or after, or both.

    `decoder_block` decides which.
    """

    mlp: MLP  # if the layer has no experts, or has them beside it
    experts: Experts  # if it has
    shared_experts: MLP  # of every token
    input_gate: nnx.Param[jax.Array]  # if layers have inputs besides the stream (`LayerInputs`)
    input_out: nnx.Param[jax.Array]
    layer_scale: nnx.Param[jax.Array]  # [1]; if the family has one

    def __init__(
        self,
        config: DecoderConfig,
        name: str,
        form: LayerForm,
        *,
        rngs: nnx.Rngs,
        constrain: Constrain,
    ):
        family = FAMILIES[config.decoder_block]
        attention: type[Attention | LatentAttention | GatedDeltaNet]
        attention = LatentAttention if family.has_latents else Attention
        if form.has_delta_rule:
            attention = GatedDeltaNet
        self.attention_norm = norm_of(config, f"{name}.attention_norm")
        self.attention = attention(config, f"{name}.attention", rngs=rngs, constrain=constrain)
        self.attention_post_norm = norm_of(config, f"{name}.attention_post_norm")
        self.mlp_norm = norm_of(config, f"{name}.mlp_norm")
        self.has_experts, self.is_local, self.has_rope = (
            form.has_experts,
            form.is_local,
            form.has_rope,
        )
        if self.has_experts:
            self.experts = Experts(config, f"{name}.experts", rngs=rngs, constrain=constrain)
        self.mlp_own_norm, self.experts_norm, self.experts_own_norm = (
            norm_of(config, f"{name}.{part}_norm") for part in ("mlp_own", "experts", "experts_own")
        )
        self.is_beside_mlp = self.has_experts and family.has_experts_beside_mlp
        if self.is_beside_mlp or not self.has_experts:
            self.mlp = MLP(config, f"{name}.mlp", rngs=rngs, constrain=constrain)
        if self.has_experts and config.shared_experts:
            self.shared_experts = MLP(
                config, f"{name}.shared_experts", rngs=rngs, constrain=constrain
            )
        self.mlp_post_norm = norm_of(config, f"{name}.mlp_post_norm")
        names = (f"{name}.{part}" for part in ("input_gate", "input_out", "layer_scale"))
        add_parameters(self, config, *names, rngs=rngs)
        self.input_norm = norm_of(config, f"{name}.input_norm")
        self.activation = ACTIVATIONS[config.mlp_activations.partition(",")[0]]
        self.constrain, self.quantization = constrain, config.quantization

    def __call__(
        self,
        x_MxLxD: jax.Array,
        slots: Slots,
        rope: Rope | None,
        is_local: jax.Array | bool,
        number: jax.Array | int | None = None,
        input_MxLxP: jax.Array | None = None,
        shared: KeysValues | None = None,
    ) -> tuple[jax.Array, RoutingSums | None]:
        """Returns the residual stream after this layer, [M, L, D] in x's dtype, and the sums of its
        experts.

        Args:
          input_MxLxP: its input besides the stream, if it has one.
          shared: the keys and values of its attention; None: it makes its own.
        """
        inner_MxLxD = self.attention_norm(x_MxLxD)
        if shared is None:
            attended_MxLxD = self.attention(inner_MxLxD, slots.segments_MxL, rope, is_local)
        else:
            assert isinstance(self.attention, Attention), "latents and states are not shared"
            attended_MxLxD = self.attention(inner_MxLxD, slots.segments_MxL, rope, is_local, shared)
        x_MxLxD, inner_MxLxD = self._attended(x_MxLxD, attended_MxLxD)
        sums = None
        if self.has_experts:
            assert number is not None, "layers with experts are numbered"
            out_MxLxD, sums = self.experts(
                self._of_experts(x_MxLxD, inner_MxLxD), slots, number, x_MxLxD
            )
            out_MxLxD = self._with_mlp(inner_MxLxD, out_MxLxD)
        else:
            out_MxLxD = self.mlp(inner_MxLxD)
        return features_last(self._add(x_MxLxD, out_MxLxD, input_MxLxP), self.constrain), sums

    def keys_values(self, x_MxLxD: jax.Array, rope: Rope | None) -> KeysValues:
        """Returns the keys and values of its attention, for itself and for layers without their
        own.
        """
        assert isinstance(self.attention, Attention), "latents and states are not shared"
        return self.attention.keys_values(self.attention_norm(x_MxLxD), rope)

    def with_cache(
        self,
        x_BxTxD: jax.Array,
        positions_BxT: jax.Array,
        rope: Rope | None,
        cache: Cache | StateCache,
        layer: jax.Array | int,
        is_local: jax.Array | bool,
        input_BxTxP: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache | StateCache]:
        """Returns the stream of T more tokens of each row, and the cache with them in it; see
        `Attention`.
        """
        attended_BxTxD, cache = self.attention.with_cache(
            self.attention_norm(x_BxTxD), positions_BxT, rope, cache, layer, is_local
        )
        x_BxTxD, inner_BxTxD = self._attended(x_BxTxD, attended_BxTxD)
        if self.has_experts:
            out_BxTxD = self.experts.of_each(self._of_experts(x_BxTxD, inner_BxTxD), x_BxTxD)
            out_BxTxD = self._with_mlp(inner_BxTxD, out_BxTxD)
        else:
            out_BxTxD = self.mlp(inner_BxTxD)
        return self._add(x_BxTxD, out_BxTxD, input_BxTxP), cache

    def _of_experts(self, x_MxLxD: jax.Array, inner_MxLxD: jax.Array) -> jax.Array:
        """Returns the input of the experts, from the stream and the input of an MLP."""
        return self.experts_norm(x_MxLxD) if self.is_beside_mlp else inner_MxLxD

    def _with_mlp(self, inner_MxLxD: jax.Array, out_MxLxD: jax.Array) -> jax.Array:
        """Returns the output of the experts with that of the MLP beside them, or of shared
        experts.
        """
        if self.is_beside_mlp:
            return self.mlp_own_norm(self.mlp(inner_MxLxD)) + self.experts_own_norm(out_MxLxD)
        return (
            out_MxLxD + self.shared_experts(inner_MxLxD)
            if hasattr(self, "shared_experts")
            else out_MxLxD
        )

    def _attended(
        self, x_MxLxD: jax.Array, attended_MxLxD: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the stream after attention, and the input of the MLP or the experts."""
        x_MxLxD = self.constrain(x_MxLxD + self.attention_post_norm(attended_MxLxD), _STREAM)
        return x_MxLxD, self.mlp_norm(x_MxLxD)

    def _add(
        self, x_MxLxD: jax.Array, out_MxLxD: jax.Array, input_MxLxP: jax.Array | None
    ) -> jax.Array:
        x_MxLxD += self.mlp_post_norm(out_MxLxD)
        if input_MxLxP is not None:
            gate_MxLxP = self.activation(
                product(x_MxLxD, self.input_gate[...], "mld,dp->mlp", self.quantization)
            )
            gated_MxLxP = self.constrain(
                gate_MxLxP * input_MxLxP, ("batch", "length", "gated_input")
            )
            x_MxLxD += self.input_norm(
                product(gated_MxLxP, self.input_out[...], "mlp,pd->mld", self.quantization)
            )
        if hasattr(self, "layer_scale"):
            x_MxLxD *= self.layer_scale[...].astype(x_MxLxD.dtype)[None, None]
        return self.constrain(x_MxLxD, _STREAM)


class LayerCycle(nnx.Module):
    """One cycle of layers of several forms. Its attributes are their places: "0", "1" and so on."""

    def __init__(self, config: DecoderConfig, stack: str, *, rngs: nnx.Rngs, constrain: Constrain):
        self.length = cycle_length(config)
        for path, form in zip(layer_paths(config, stack), cycle_of(config), strict=True):
            setattr(
                self,
                path[-1],
                DecoderLayer(config, ".".join(path), form, rngs=rngs, constrain=constrain),
            )

    @property
    def layers(self) -> list[DecoderLayer]:
        """The layers, in order."""
        return [getattr(self, str(place)) for place in range(self.length)]


class NumberedLayer(NamedTuple):
    """A layer, and what distinguishes it from the layers that share its program."""

    module: DecoderLayer
    is_local: jax.Array | bool
    number: jax.Array | int | None  # among all layers; None in a model without experts
    input_MxLxP: jax.Array | None  # besides the stream; None in most families


LayerDef: TypeAlias = nnx.GraphDef[Any]  # of a layer or of a cycle of layers
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
    # stacked: the last layers, if they share keys and values
    kv_shared_layers: DecoderLayer | LayerCycle
    layer_inputs: LayerInputs  # if layers have inputs besides the stream

    def __init__(
        self,
        config: DecoderConfig,
        *,
        rngs: nnx.Rngs,
        constrain: Constrain = unconstrained,
        layer_runner: LayerRunner | None = None,
    ):
        # The logits of a tied model start at a variance of about 1, so its loss starts at most half
        # a nat above ln V. Smaller tables start nearer to it and learn slower (0.1 to 0.35 nats
        # after 100 updates of the default model).
        add_parameters(self, config, "embedding", "positions", rngs=rngs)

        self.num_dense = config.first_num_dense_layers
        if self.num_dense:
            dense = partial(
                DecoderLayer,
                config,
                DENSE_LAYERS,
                LayerForm(has_experts=False),
                constrain=constrain,
            )
            self.dense_layers = _stack_of(dense, self.num_dense, DENSE_LAYERS, rngs)

        # Inside of a pipeline activations are of one stage, so its own constraint places them.
        inside, cycle = layer_runner.constrain if layer_runner else constrain, cycle_of(config)
        self.num_stacked, self.cycle_length = num_stacked(config), cycle_length(config)

        def stack_of_cycles(stack: str) -> DecoderLayer | LayerCycle:
            if self.cycle_length == 1:
                layer = partial(DecoderLayer, config, stack, cycle[0], constrain=inside)
                return _stack_of(layer, num_stacked(config, stack), stack, rngs)
            return _stack_of(
                partial(LayerCycle, config, stack, constrain=inside),
                num_stacked(config, stack),
                stack,
                rngs,
            )

        self.layers = stack_of_cycles(LAYERS)
        self.shares_keys = config.num_kv_shared_layers > 0
        self.places_of_keys = places_of_shared_keys(cycle)  # for each place of the cycle
        if self.shares_keys:
            self.kv_shared_layers = stack_of_cycles(KV_SHARED_LAYERS)
        self.has_layer_inputs = FAMILIES[config.decoder_block].layer_input_width > 0
        if self.has_layer_inputs:
            self.layer_inputs = LayerInputs(config, rngs=rngs, constrain=constrain)
        self.final_norm = norm_of(config, "final_norm")
        add_parameters(self, config, "output", rngs=rngs)
        self.constrain = constrain
        self.dtype = jnp.dtype(config.dtype)
        scale = (
            math.sqrt(config.base_emb_dim)
            if FAMILIES[config.decoder_block].scales_embedding
            else None
        )
        # multiplies the embedding where it enters the stream
        self.embedding_scale = None if config.gemma_weights_scaled else scale
        # is a factor of the embedding's weights, so it divides tied logits
        self.held_scale = scale if config.gemma_weights_scaled else None
        self.logits_soft_cap: float = config.final_logits_soft_cap
        self.z_loss: float = config.z_loss_multiplier
        self.rope_keys = (
            None if config.trainable_position_size > 0 else RopeKeys.from_config(config)
        )
        self.local_layers = local_layers(config, num_layers(config))
        self.has_experts = any(form.has_experts for form in cycle)
        self.scan_layers = config.scan_layers
        self.remat = Remat.of(config.remat)
        self.layer_runner = layer_runner

    def __call__(self, tokens_MxL: jax.Array, segments_MxL: jax.Array) -> jax.Array:
        """Returns the logits of the token after each, float32[M, L, V]; `hidden` has the
        arguments.
        """
        return self.logits(self.hidden(tokens_MxL, segments_MxL).x_MxLxD)

    def logits(self, x_MxLxD: jax.Array) -> jax.Array:
        """Returns the logits of the token after each, float32[M, L, V], from the stream after the
        final norm.
        """
        return product(x_MxLxD, self.output_projection(), "mld,dv->mlv", out_dtype=jnp.float32)

    def hidden(self, tokens_MxL: jax.Array, segments_MxL: jax.Array) -> Hidden:
        """Returns the stream after the final norm, and the routing sums of all layers.

        Tokens are in [0, V). A token sees the tokens before it of its own segment, and only those.
        """
        x_MxLxD = self._embedded(tokens_MxL, partial(places_in_segments, segments_MxL))
        ropes = None if self.rope_keys is None else Ropes(self.rope_keys, tokens_MxL.shape[-1])
        inputs, inputs_of_shared = self._layer_inputs(tokens_MxL, x_MxLxD)

        # The functions below run one element of a stack; the stacks run after them.
        def through(
            layerdef: LayerDef,
            shared: SharedKeys,
            x_MxLxD: jax.Array,
            slots: Slots,
            element: Stacked,
        ) -> tuple[jax.Array, list[RoutingSums], SharedKeys]:
            """Returns x after one element of a stack, the sums of its experts, and keys and values
            to be shared.
            """
            all_sums: list[RoutingSums] = []
            new_keys: SharedKeys = {}
            for place, (module, is_local, number, input_MxLxP) in enumerate(
                self._in_order(layerdef, element)
            ):
                lengths = partial(lengths_in_segments, slots.segments_MxL)
                rope = ropes.of(is_local, lengths) if ropes and module.has_rope else None
                keys_values = shared[self.places_of_keys[place]] if shared else None
                if self.shares_keys and not shared and place in self.places_of_keys:
                    keys_values = new_keys[place] = module.keys_values(x_MxLxD, rope)
                x_MxLxD, sums = module(
                    x_MxLxD, slots, rope, is_local, number, input_MxLxP, keys_values
                )
                all_sums += [] if sums is None else [sums]
            return x_MxLxD, all_sums, new_keys

        def layers_of(
            layerdef: LayerDef, shared: SharedKeys | None = None
        ) -> Layers[RoutingSums | None]:
            def layer(
                x_MxLxD: jax.Array, slots: Slots, element: Stacked
            ) -> tuple[jax.Array, RoutingSums | None]:
                x_MxLxD, all_sums, _ = through(layerdef, shared or {}, x_MxLxD, slots, element)
                if self.cycle_length > 1:
                    return x_MxLxD, jax.tree.map(
                        lambda *of_layers: jnp.stack(of_layers), *all_sums
                    ) if all_sums else None
                return x_MxLxD, all_sums[0] if all_sums else None

            return layer

        def sharing_layers_of(layerdef: LayerDef) -> Layers[SharedKeys]:
            def layer(
                x_MxLxD: jax.Array, slots: Slots, element: Stacked
            ) -> tuple[jax.Array, SharedKeys]:
                x_MxLxD, _, new_keys = through(layerdef, {}, x_MxLxD, slots, element)
                return x_MxLxD, new_keys

            return layer

        def plainly(
            layers: Layers[RoutingSums | None], x_MxLxD: jax.Array, stacked: Stacked
        ) -> tuple[jax.Array, RoutingSums | None]:
            layer = checkpointed(
                layers, self.remat, in_loop=self.scan_layers and stacked.num_layers > 1
            )
            return _run_layers(layer, self.scan_layers, x_MxLxD, slots, stacked)

        slots = Slots(
            segments_MxL, slot_hashes(tokens_MxL, segments_MxL) if self.has_experts else None
        )

        # First layers without experts.
        if self.num_dense:
            layerdef, parameters = _split(self.dense_layers)
            x_MxLxD, _ = plainly(layers_of(layerdef), x_MxLxD, Stacked(parameters))

        # Two stacks, of which the second reads the keys and values of the first one's last cycle.
        layerdef, parameters = _split(self.layers)
        if self.shares_keys:
            layer = checkpointed(
                sharing_layers_of(layerdef), self.remat, self.scan_layers and self.num_stacked > 1
            )
            stacked = Stacked(parameters, inputs=inputs)
            nothing = self._no_keys(x_MxLxD.shape[:2])
            x_MxLxD, shared = _run_to_last(
                layer, self.scan_layers, x_MxLxD, slots, stacked, nothing
            )
            layerdef, parameters = _split(self.kv_shared_layers)
            x_MxLxD, _ = plainly(
                layers_of(layerdef, shared), x_MxLxD, Stacked(parameters, inputs=inputs_of_shared)
            )
            return Hidden(self.final_norm(x_MxLxD), None)

        # A pipeline, or the layers that sum their gradients: it takes them in an order of its own.
        if self.layer_runner is not None:
            order = self.layer_runner.order(self.num_stacked)
            run = partial(_run_layers, layers_of(layerdef), self.scan_layers)
            stacked = self._stacked(parameters, order)._replace(inputs=inputs)
            x_MxLxD, sums = self.layer_runner(run, stacked, x_MxLxD, slots)
            sums = self._by_layer(
                jax.tree.map(lambda of_layers: of_layers[np.argsort(order)], sums)
            )
            return Hidden(self.final_norm(self.constrain(x_MxLxD, _STREAM)), sums)

        stacked = self._stacked(parameters)._replace(inputs=inputs)
        x_MxLxD, sums = plainly(layers_of(layerdef), x_MxLxD, stacked)
        return Hidden(self.final_norm(x_MxLxD), self._by_layer(sums))

    def _by_layer(self, sums: RoutingSums | None) -> RoutingSums | None:
        """Returns the sums of all layers with experts in order, from those of each cycle."""
        if self.cycle_length == 1:
            return sums
        by_layer: RoutingSums | None = jax.tree.map(
            lambda of_cycles: of_cycles.reshape(-1, *of_cycles.shape[2:]), sums
        )
        return by_layer

    def _layer_inputs(
        self, tokens_MxL: jax.Array, x_MxLxD: jax.Array
    ) -> tuple[jax.Array | None, jax.Array | None]:
        """Returns the inputs that layers have besides the stream, as `Stacked` holds them: of most,
        and of the last.
        """
        if not self.has_layer_inputs:
            return None, None
        inputs_NxMxLxP = self.layer_inputs(tokens_MxL, x_MxLxD)
        by_cycle = inputs_NxMxLxP.reshape(-1, self.cycle_length, *inputs_NxMxLxP.shape[1:])
        return by_cycle[: self.num_stacked], by_cycle[self.num_stacked :]

    def _no_keys(self, shape: tuple[int, ...]) -> SharedKeys:
        """Returns zeros in the form of the keys and values that layers share, for M rows of L
        tokens.
        """

        def zeros(layer: DecoderLayer) -> KeysValues:
            assert isinstance(layer.attention, Attention), "latents and states are not shared"
            kv_heads, *widths = layer.attention.cache_shape
            return KeysValues(
                *(jnp.zeros((*shape, kv_heads, width), self.dtype) for width in widths)
            )

        layers = self.layers.layers if isinstance(self.layers, LayerCycle) else [self.layers]
        return {place: zeros(layers[place]) for place in set(self.places_of_keys)}

    def empty_caches(self, num_rows: int, length: int, ends_B: jax.Array | None = None) -> Caches:
        """Returns caches in the compute dtype with room for `length` tokens in each of B rows.

        Args:
          ends_B: int32: tokens from this position of a row on change no state of it (`StateCache`);
            None: all do.
        """
        layers = self.layers.layers if isinstance(self.layers, LayerCycle) else [self.layers]

        def empty(layer: DecoderLayer) -> Cache | StateCache:
            if isinstance(layer.attention, GatedDeltaNet):
                return layer.attention.empty_cache(self.num_stacked, num_rows, self.dtype, ends_B)
            kv_heads, *widths = layer.attention.cache_shape
            shapes = [
                (self.num_dense + self.num_stacked, num_rows, kv_heads, length, width)
                for width in widths
            ]
            zeros = (jnp.zeros(shape, self.dtype) for shape in shapes)
            keys, values = (
                self.constrain(x, (None, "batch", "kv_heads", None, "head_dim")) for x in zeros
            )
            return Cache(keys, values)

        return Caches(tuple(map(empty, layers)))

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
        inputs, inputs_of_shared = self._layer_inputs(tokens_BxT, x_BxTxD)

        def run(
            carried: tuple[jax.Array, Caches],
            layerdef: LayerDef,
            stacked: Stacked,
            first: int,
            shares: bool = False,
        ) -> tuple[jax.Array, Caches]:
            def layer(
                carried: tuple[jax.Array, Caches], numbered: tuple[jax.Array | int, Stacked]
            ) -> tuple[tuple[jax.Array, Caches], None]:
                (x_BxTxD, caches), (index, element) = carried, numbered
                place_caches = list(caches.places)
                for place, (module, is_local, _, input_BxTxP) in enumerate(
                    self._in_order(layerdef, element)
                ):
                    rope = None
                    if ropes is not None and module.has_rope:
                        rope = ropes.of(is_local, lambda: lengths_Bx1, positions_BxT)
                    # a layer without keys of its own reads the slots of the cycle before it
                    read, of_layer = (
                        (self.places_of_keys[place], first) if shares else (place, index)
                    )
                    x_BxTxD, place_caches[read] = module.with_cache(
                        x_BxTxD,
                        positions_BxT,
                        rope,
                        place_caches[read],
                        of_layer,
                        is_local,
                        input_BxTxP,
                    )
                return (x_BxTxD, Caches(tuple(place_caches))), None

            if self.scan_layers:
                after_all, _ = jax.lax.scan(
                    layer, carried, (first + jnp.arange(stacked.num_layers), stacked)
                )
                return after_all
            for numbered in enumerate(stacked.one_by_one(), first):
                carried, _ = layer(carried, numbered)
            return carried

        carried = (x_BxTxD, caches)
        if self.num_dense:
            layerdef, parameters = _split(self.dense_layers)
            carried = run(carried, layerdef, Stacked(parameters), 0)
        layerdef, parameters = _split(self.layers)
        carried = run(
            carried, layerdef, self._stacked(parameters)._replace(inputs=inputs), self.num_dense
        )
        if self.shares_keys:
            layerdef, parameters = _split(self.kv_shared_layers)
            stacked = Stacked(parameters, inputs=inputs_of_shared)
            carried = run(carried, layerdef, stacked, self.num_stacked - 1, shares=True)
        x_BxTxD, caches = carried
        return self.final_norm(x_BxTxD), caches

    def _stacked(self, parameters: State, order: np.ndarray | None = None) -> Stacked:
        """Returns the layers to run, in order or in the order of a layer runner."""
        order = np.arange(self.num_stacked) if order is None else order
        numbers = (
            self.num_dense + self.cycle_length * order.astype(np.int32)
            if self.has_experts
            else None
        )
        if self.cycle_length > 1 or len(set(self.local_layers)) == 1:
            return Stacked(parameters, number=numbers)
        return Stacked(parameters, np.asarray(self.local_layers)[order], numbers)

    def _in_order(self, layerdef: LayerDef, element: Stacked) -> list[NumberedLayer]:
        """Returns the layers of one element of a stack: a layer, or those of a cycle."""
        module = nnx.merge(layerdef, element.parameters)
        inputs = [None] * self.cycle_length if element.inputs is None else element.inputs
        if isinstance(module, DecoderLayer):
            return [NumberedLayer(module, self._is_local(element), element.number, inputs[0])]
        numbers = [
            None if element.number is None else element.number + place
            for place in range(module.length)
        ]
        return [
            NumberedLayer(layer, bool(layer.is_local), number, layer_input)
            for layer, number, layer_input in zip(module.layers, numbers, inputs, strict=True)
        ]

    def _is_local(self, element: Stacked) -> jax.Array | bool:
        if element.is_local is None:
            return self.local_layers[0]
        return element.is_local.value if isinstance(element.is_local, Static) else element.is_local

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
        return self.constrain(x_MxLxD, _STREAM)

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


def _run_layers(
    layer: Layers[RoutingSums | None],
    scanned: bool,
    x_MxLxD: jax.Array,
    slots: Slots,
    stacked: Stacked,
) -> tuple[jax.Array, RoutingSums | None]:
    """Returns x after all stacked layers, which run in a loop or one by one, and their sums,
    stacked alike.
    """
    if scanned and stacked.num_layers > 1:
        x_MxLxD, sums = jax.lax.scan(lambda x, element: layer(x, slots, element), x_MxLxD, stacked)
        return x_MxLxD, sums
    sums_of_layers = []
    for element in stacked.one_by_one():
        x_MxLxD, of_layer = layer(x_MxLxD, slots, element)
        sums_of_layers.append(of_layer)
    return x_MxLxD, jax.tree.map(lambda *of_layers: jnp.stack(of_layers), *sums_of_layers)


def _run_to_last(
    layer: Layers[SharedKeys],
    scanned: bool,
    x_MxLxD: jax.Array,
    slots: Slots,
    stacked: Stacked,
    nothing: SharedKeys,
) -> tuple[jax.Array, SharedKeys]:
    """Returns x after all stacked layers, and what the last one shares, in the form of
    `nothing`.
    """
    if scanned and stacked.num_layers > 1:

        def run(
            carried: tuple[jax.Array, SharedKeys], element: Stacked
        ) -> tuple[tuple[jax.Array, SharedKeys], None]:
            return layer(carried[0], slots, element), None

        (x_MxLxD, nothing), _ = jax.lax.scan(run, (x_MxLxD, nothing), stacked)
        return x_MxLxD, nothing
    for element in stacked.one_by_one():
        x_MxLxD, nothing = layer(x_MxLxD, slots, element)
    return x_MxLxD, nothing
