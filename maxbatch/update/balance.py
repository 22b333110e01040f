"""The balance of experts over the global batch: terms of the loss, the step of the routers' bias,
the metrics.

Every term is a sum over the real tokens of the global batch, divided once by their number and by
the layers with experts, so terms and gradients do not depend on the cut of the batch. References:
Fedus et al. 2022 (https://arxiv.org/abs/2101.03961), section 2.2; Zoph et al. 2022
(https://arxiv.org/abs/2202.08906), section 3; Wang et al. 2024 (https://arxiv.org/abs/2408.15664);
on the loads of a whole batch Qiu et al. 2025 (https://arxiv.org/abs/2501.11873).

Shapes: N layers with experts, C cycles of layers, S of whose layers have experts, E experts, k
experts of a token.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from maxbatch.config.combined import DecoderConfig
from maxbatch.families.cycle import cycle_of
from maxbatch.families.forms.experts import ROUTED_BIAS
from maxbatch.families.matrices import layer_paths, num_sparse_layers
from maxbatch.families.parameter import ParameterPath
from maxbatch.model.experts.routing import RoutingSums, carried
from maxbatch.model.parameters import parameter_path
from maxbatch.parallel.trees import KeyPath, State, Tree

_IS_BIAS = nnx.PathContains(ROUTED_BIAS)


class RoutingMetrics(NamedTuple):
    """Routing metrics of one update, on device; scalars except the first."""

    choices_E: jax.Array  # uint32[E]: choices of each expert over all layers
    load_balance_loss: jax.Array  # float32, without its weight
    router_z_loss: jax.Array  # float32, without its weight
    # float32: an expert's largest count over the mean count, in the worst layer
    load_max: jax.Array
    dropped: jax.Array  # int32: choices beyond a capacity
    fingerprint: jax.Array  # uint32[4], 16-bit limbs of the sum of the routes' hashes


class Scale(NamedTuple):
    """Facts of the whole update for the terms of a micro-batch."""

    ratio: jax.Array  # float32: loss weight of the global batch over its tokens
    last_counts_NxE: jax.Array  # int32: choices of the previous update, initially 0


@dataclasses.dataclass(frozen=True)
class Balance:
    """The balance keys of a model with experts."""

    num_layers: int  # with experts
    sparse_layers: tuple[ParameterPath, ...]  # the paths of a cycle's layers with experts
    num_experts: int
    num_experts_per_tok: int
    loss_weight: float
    is_global: bool  # whether loads are the previous update's
    z_weight: float
    bias_rate: float

    @classmethod
    def from_config(cls, config: DecoderConfig) -> Balance | None:
        """Returns the balance of a config; None without experts."""
        if config.num_experts == 1:
            return None
        return cls(
            num_sparse_layers(config),
            tuple(
                p
                for p, form in zip(layer_paths(config), cycle_of(config), strict=True)
                if form.has_experts
            ),
            config.num_experts,
            config.num_experts_per_tok,
            config.load_balance_loss_weight,
            config.load_balance_scope == "global",
            config.router_z_loss_weight,
            config.routed_bias_update_rate,
        )

    @property
    def has_terms(self) -> bool:
        """Whether the loss has any term besides the tokens' loss."""
        return self.loss_weight > 0 or self.z_weight > 0

    def no_counts(self) -> jax.Array:
        """Returns the counts before the first update."""
        return jnp.zeros((self.num_layers, self.num_experts), jnp.int32)

    def term(self, sums: RoutingSums, scale: Scale) -> jax.Array:
        """Returns the addition to the summed token losses of some rows, to be divided by the same
        weight.
        """
        weighted = self.loss_weight * self._even(
            sums, scale.last_counts_NxE
        ) + self.z_weight * jnp.sum(sums.squares)
        return weighted * scale.ratio / self.num_layers

    def _even(self, sums: RoutingSums, last_counts_NxE: jax.Array) -> jax.Array:
        """Returns the sum over tokens and layers of E sum(f P), which is 1 for even loads."""
        if not self.is_global:
            return jnp.sum(sums.sequence)
        totals_Nx1 = jnp.sum(last_counts_NxE, axis=1, keepdims=True)
        uniform = jnp.float32(1 / self.num_experts)
        shares_NxE = last_counts_NxE.astype(jnp.float32) / jnp.maximum(totals_Nx1, 1).astype(
            jnp.float32
        )
        shares_NxE = jnp.where(totals_Nx1 > 0, shares_NxE, uniform)
        return self.num_experts * jnp.sum(shares_NxE * sums.scores_E)

    def metrics(self, sums: RoutingSums, last_counts_NxE: jax.Array) -> RoutingMetrics:
        """Returns the metrics of an update from the sums of its whole batch."""
        counts_NxE = sums.counts_E
        tokens = jnp.maximum(jnp.sum(counts_NxE[0]) // self.num_experts_per_tok, 1).astype(
            jnp.float32
        )
        means_N = jnp.sum(counts_NxE, axis=1).astype(jnp.float32) / self.num_experts
        largest_N = jnp.max(counts_NxE, axis=1).astype(jnp.float32)
        return RoutingMetrics(
            jnp.sum(counts_NxE, axis=0, dtype=jnp.uint32),
            self._even(sums, last_counts_NxE) / (tokens * self.num_layers),
            jnp.sum(sums.squares) / (tokens * self.num_layers),
            jnp.max(largest_N / jnp.maximum(means_N, 1e-30)),
            jnp.sum(sums.dropped),
            carried(jnp.sum(sums.limbs_4, axis=0, dtype=jnp.uint32)),
        )

    def with_bias_stepped(self, params: State, counts_NxE: jax.Array) -> State:
        """Steps the routers' bias, if any, towards even counts; returns the parameters."""
        if not self.bias_rate:
            return params
        bias, rest = nnx.split_state(params, _IS_BIAS, ...)
        mean_Nx1, over_Nx1 = jnp.divmod(
            jnp.sum(counts_NxE, axis=1, keepdims=True), self.num_experts
        )
        # The sign of mean - count in whole numbers; of the mean's fraction only its existence
        # matters.
        below_NxE = mean_Nx1 - counts_NxE
        sign_NxE = jnp.where(below_NxE == 0, jnp.sign(over_Nx1), jnp.sign(below_NxE))
        step_NxE = self.bias_rate * sign_NxE.astype(jnp.float32)
        step_CxSxE = step_NxE.reshape(-1, len(self.sparse_layers), self.num_experts)

        def with_step(path: KeyPath, bias_CxE: jax.Array) -> jax.Array:
            return bias_CxE + step_CxSxE[:, self.sparse_layers.index(parameter_path(path)[:-2])]

        stepped: State = jax.tree.map_with_path(with_step, bias)
        return nnx.merge_state(stepped, rest)


class BalancedState(NamedTuple):
    """The optimizer's state of a model with experts, and the previous update's choices."""

    optimizer: Tree
    last_counts_NxE: Tree  # int32 array, its shape or its sharding


def learned(params: State, balance: Balance | None) -> State:
    """Returns the optimizer's parameters: with experts, all except the routers' bias."""
    if balance is None:
        return params
    _, rest = nnx.split_state(params, _IS_BIAS, ...)
    state: State = rest
    return state


def routers_bias(params: State) -> State:
    """Returns the routers' bias, which no optimizer steps."""
    bias, _ = nnx.split_state(params, _IS_BIAS, ...)
    state: State = bias
    return state


def with_learned(params: State, learned: State, balance: Balance | None) -> State:
    """Returns parameters with the optimizer's ones replaced."""
    if balance is None:
        return learned
    state: State = nnx.merge_state(learned, routers_bias(params))
    return state
