"""The experts of a decoder's layer, in place of its MLP.

Every device computes the experts of its own rows by grouped products. With an axis of experts it
holds some of them only, and the rows travel (`travel.py`); where the axis does not split the rows,
a device computes what its experts add.

Shapes: M micro-batch, L length, D model, F hidden width of an expert, E experts, k experts of a
token; T = M x L tokens, n = T x k choices, token by token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from maxbatch.config.sections import ModelConfig, Quantization
from maxbatch.families.family import FAMILIES
from maxbatch.families.matrices import MATRICES
from maxbatch.model.eight_bits import CodedMatrices, MatrixCodes, without_values
from maxbatch.model.experts.grouped import Groups
from maxbatch.model.experts.order import in_order, sorted_by, summed
from maxbatch.model.experts.routing import Routes, RoutingSums, choose, within_rows
from maxbatch.model.experts.travel import Compute, sum_over_axis
from maxbatch.model.mlp import ACTIVATIONS, Activation
from maxbatch.model.norms import of_unit_size
from maxbatch.model.parameters import add_parameters
from maxbatch.model.products import Weight, product
from maxbatch.model.segments import Slots
from maxbatch.parallel.remat import kept
from maxbatch.parallel.sharding import Constrain, num_shards

_AXIS = "expert"
Combine = Callable[[jax.Array, jax.Array], jax.Array]
_Run = Callable[..., jax.Array]
_Codes = tuple[MatrixCodes, ...] | None  # of the gate, up and down matrices, in 8 bits


class Experts(nnx.Module):
    """sum over a token's experts of weight x down(activation(gate(x)) * up(x)).

    References: Shazeer et al. 2017 (https://arxiv.org/abs/1701.06538); Mixtral (Jiang et al. 2024,
    https://arxiv.org/abs/2401.04088).
    """

    router: nnx.Param[jax.Array]
    expert_gate: nnx.Param[jax.Array]
    expert_up: nnx.Param[jax.Array]
    expert_down: nnx.Param[jax.Array]
    router_bias: nnx.Param[jax.Array]  # this and the next three if the family has biases
    expert_gate_bias: nnx.Param[jax.Array]
    expert_up_bias: nnx.Param[jax.Array]
    expert_down_bias: nnx.Param[jax.Array]
    routed_bias: nnx.Param[jax.Array]  # if the model has it
    router_scale: nnx.Param[jax.Array]  # this and the next if they are beside an MLP
    expert_scale: nnx.Param[jax.Array]

    def __init__(self, config: ModelConfig, name: str, *, rngs: nnx.Rngs, constrain: Constrain):
        add_parameters(self, config, name, rngs=rngs)
        self.config = config
        form = FAMILIES[config.decoder_block].experts
        assert form is not None, "the family has experts"
        self.weighs_inputs = form.weigh_inputs
        self.has_biases = form.have_biases
        self.combine = (
            partial(gated, activation=ACTIVATIONS[config.mlp_activations.partition(",")[0]])
            if form.limit is None
            else partial(_clamped, limit=form.limit)
        )
        self.constrain, self.quantization = constrain, config.quantization

    def __call__(
        self, x_MxLxD: jax.Array, slots: Slots, layer: jax.Array | int, stream_MxLxD: jax.Array
    ) -> tuple[jax.Array, RoutingSums]:
        """Returns the output, [M, L, D] in x's dtype, and the sums of this layer, whose number is
        `layer`.

        A router beside an MLP reads the stream, others read x.
        """
        logits_MxLxE = self._logits(x_MxLxD, stream_MxLxD)
        routes, scores_MxLxE = self._chosen(logits_MxLxE)
        routes, sums = within_rows(self.config, routes, scores_MxLxE, logits_MxLxE, slots, layer)
        return self._computed(x_MxLxD, routes), sums

    def of_each(self, x_MxLxD: jax.Array, stream_MxLxD: jax.Array) -> jax.Array:
        """Returns the output of tokens that are all real and whose rows have no capacity, as in
        sampling.
        """
        routes, _ = self._chosen(self._logits(x_MxLxD, stream_MxLxD))
        return self._computed(x_MxLxD, routes)

    @property
    def _bias(self) -> jax.Array | None:
        return (
            jax.lax.stop_gradient(self.routed_bias[...]) if hasattr(self, "routed_bias") else None
        )

    def _chosen(self, logits_MxLxE: jax.Array) -> tuple[Routes, jax.Array]:
        routes, scores_MxLxE = choose(self.config, logits_MxLxE, self._bias)
        if hasattr(self, "expert_scale"):
            scales_MxLxk = self.expert_scale[...].astype(jnp.float32)[routes.experts_MxLxk]
            routes = routes._replace(weights_MxLxk=routes.weights_MxLxk * scales_MxLxk)
        return routes, scores_MxLxE

    def _logits(self, x_MxLxD: jax.Array, stream_MxLxD: jax.Array) -> jax.Array:
        if hasattr(self, "router_scale"):
            scale_D = self.router_scale[...].astype(jnp.float32) * stream_MxLxD.shape[-1] ** -0.5
            x_MxLxD = of_unit_size(
                stream_MxLxD.astype(jnp.float32), self.config.normalization_layer_epsilon
            )
            x_MxLxD *= scale_D[None, None]
        # Whole in D and E, so that no mesh changes the order of the sums.
        x_MxLxD = self.constrain(x_MxLxD, ("batch", "length", "embed"))
        w_DxE = self.constrain(self.router[...].astype(jnp.float32), (None, None))
        logits = jnp.einsum("mld,de->mle", x_MxLxD.astype(jnp.float32), w_DxE, precision="highest")
        if self.has_biases:
            logits += self.router_bias[...].astype(jnp.float32)[None, None]
        return self.constrain(logits, ("batch", "length", None))

    def _computed(self, x_MxLxD: jax.Array, routes: Routes) -> jax.Array:
        """Returns the weighted sum of the outputs of each token's experts."""
        y_MxLxD = self._products(x_MxLxD, routes)
        if not self.has_biases:
            return y_MxLxD
        # The share of each expert in a token, by which its last bias counts.
        is_chosen = (
            routes.experts_MxLxk[..., None] == jnp.arange(self.config.num_experts)[None, None, None]
        )
        shares_MxLxE = jnp.sum(jnp.where(is_chosen, routes.weights_MxLxk[..., None], 0.0), axis=2)
        bias_ExD = self.expert_down_bias[...].astype(x_MxLxD.dtype)
        return y_MxLxD + jnp.einsum("mle,ed->mld", shares_MxLxE.astype(x_MxLxD.dtype), bias_ExD)

    def _products(self, x_MxLxD: jax.Array, routes: Routes) -> jax.Array:
        """Returns `_computed` without the bias of the last product."""
        weights, codes = self._weights(x_MxLxD.dtype)
        if self.has_biases:
            biases = self.expert_gate_bias, self.expert_up_bias
            weights += [bias_ExF[...].astype(x_MxLxD.dtype) for bias_ExF in biases]

        mesh = self.constrain.mesh
        compute_over = partial(
            computed_by,
            self.combine,
            self.constrain.platform,
            self.quantization,
            self.weighs_inputs,
        )
        if mesh is None:
            compute = compute_over(None)
            run: _Run = partial(sum_of_held, axis=None, compute=compute, codes=codes)
            return _by_token(run, x_MxLxD, *routes, *weights)

        # Which axes split the rows, the experts and their hidden width.
        spec = self.constrain.spec(x_MxLxD.shape, ("batch", "length", "embed"))
        rows: tuple[str, ...] = (spec[0],) if isinstance(spec[0], str) else tuple(spec[0] or ())
        rows = rows if x_MxLxD.shape[0] % num_shards(mesh, rows) == 0 else ()
        tensor = self.constrain.spec(weights[0].shape[1:], (None, "moe_mlp"))[1]
        axis, compute = _AXIS if mesh.shape.get(_AXIS, 1) > 1 else None, compute_over(tensor)
        of_rows, into, out_of = (
            P(rows or None, spec[1], None),
            P(axis, None, tensor),
            P(axis, tensor, None),
        )
        of_biases = (P(axis, tensor),) * (len(weights) - 3)

        # If the axis of experts splits rows too, rows travel to the experts; else a device computes
        # what its experts add to all rows that it has.
        if axis in rows:
            num_experts = self.config.num_experts
            run = partial(
                sum_over_axis, num_experts=num_experts, axis=_AXIS, mesh=mesh, compute=compute
            )
        else:
            run = partial(sum_of_held, axis=axis, compute=compute)

        def on_device(codes: _Codes, x_MxLxD: jax.Array, *arrays: jax.Array) -> jax.Array:
            y_MxLxD = _by_token(partial(run, codes=codes), x_MxLxD, *arrays)
            return y_MxLxD if tensor is None else jax.lax.psum(y_MxLxD, tensor)

        of_codes = codes and tuple(
            jax.tree.map(partial(_where_split, spec), code)
            for code, spec in zip(codes, (into, into, out_of), strict=True)
        )
        specs = (of_codes, of_rows, of_rows, of_rows, into, into, out_of, *of_biases)
        y_MxLxD: jax.Array = jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=specs,
            out_specs=of_rows,
            check_vma=False,  # kernels do not say over which axes their results vary
        )(codes, x_MxLxD, *routes, *weights)
        return y_MxLxD

    def _weights(self, dtype: jnp.dtype) -> tuple[list[jax.Array], _Codes]:
        """Returns the matrices in the compute dtype; in 8 bits their codes, and arrays that receive
        their gradients.

        Matrices are quantised where they are stored, so a mesh gathers 8 bits.
        """
        names = "expert_gate", "expert_up", "expert_down"
        weights = [getattr(self, name)[...] for name in names]
        if not self.quantization:
            return [w.astype(dtype) for w in weights], None

        def coded(name: str, w: jax.Array) -> MatrixCodes:
            codes = MatrixCodes.of(w, self.quantization)
            stored = (self.constrain.like_layer(code.values, MATRICES[name].axes) for code in codes)
            return MatrixCodes(
                *(code._replace(values=values) for code, values in zip(codes, stored, strict=True))
            )

        return [without_values(w.astype(dtype)) for w in weights], tuple(map(coded, names, weights))


def _where_split(spec: P, array: jax.Array) -> P:
    """Returns the partition of a matrix's values, or of its scales, which have size 1 along the
    contraction.
    """
    return P(*(None if size == 1 else axis for axis, size in zip(spec, array.shape, strict=True)))


def _by_token(
    run: Callable[..., jax.Array],
    x_MxLxD: jax.Array,
    experts_MxLxk: jax.Array,
    shares_MxLxk: jax.Array,
    *weights: jax.Array,
) -> jax.Array:
    """Applies `run` to flattened tokens and choices, [T, D] and twice [n]."""
    flat = (
        x_MxLxD.reshape(-1, x_MxLxD.shape[-1]),
        experts_MxLxk.reshape(-1),
        shares_MxLxk.reshape(-1),
    )
    return run(*flat, *weights).reshape(x_MxLxD.shape)


def gated(gate_nxF: jax.Array, up_nxF: jax.Array, *, activation: Activation) -> jax.Array:
    """Returns the gated product of an MLP, [n, F]."""
    return activation(gate_nxF) * up_nxF


def _clamped(gate_nxF: jax.Array, up_nxF: jax.Array, *, limit: float) -> jax.Array:
    """Returns the gated product of gpt-oss (https://arxiv.org/abs/2508.10925, section 2.2), of
    values up to a limit.
    """
    gate_nxF = jnp.minimum(gate_nxF, limit)
    return (jnp.clip(up_nxF, -limit, limit) + 1) * gate_nxF * jax.nn.sigmoid(1.702 * gate_nxF)


def sum_of_held(
    x_TxD: jax.Array,
    experts_n: jax.Array,
    shares_n: jax.Array,
    *weights: jax.Array,
    axis: str | None,
    compute: Compute,
    codes: _Codes = None,
) -> jax.Array:
    """Returns the weighted sum of each token's expert outputs, where no axis splits the tokens.

    With an axis, each device computes its own experts for all tokens, and the devices add their
    results.
    """
    num_local = weights[0].shape[0]
    if axis is not None:
        experts_n = experts_n - jax.lax.axis_index(axis) * num_local
    k = experts_n.size // x_TxD.shape[0]
    order = sorted_by(
        jnp.where((experts_n >= 0) & (experts_n < num_local), experts_n, num_local), num_local
    )
    rows = in_order(x_TxD, order, k), in_order(shares_n[:, None], order, 1), order.sizes_E
    y_nxD = compute(*rows, *weights, codes=codes)
    y_TxD = summed(y_nxD, order, k)
    return y_TxD if axis is None else jax.lax.psum(y_TxD, axis)


def computed_by(
    combine: Combine,
    platform: str,
    quantization: Quantization = "",
    weighs_inputs: bool = False,
    tensor: str | None = None,
) -> Compute:
    """Returns the function of an expert's rows: down(share * combine(gate(x), up(x))); `tensor`
    splits hidden widths.

    Shares multiply the input of the last product, so the backward pass does not need that product's
    output. On a CPU, where products are rarely recomputed, they multiply its output, which has
    fewer numbers. With `weighs_inputs` they multiply x, and nothing else.
    """

    def compute(
        x_nxD: jax.Array,
        shares_nx1: jax.Array,
        sizes_E: jax.Array,
        gate_ExDxF: jax.Array,
        up_ExDxF: jax.Array,
        down_ExFxD: jax.Array,
        *biases_ExF: jax.Array,
        codes: _Codes = None,
    ) -> jax.Array:
        into, out_of = (
            Groups(sizes_E, platform, None, tensor),
            Groups(sizes_E, platform, tensor, None),
        )

        matrices: tuple[Weight, ...] = gate_ExDxF, up_ExDxF, down_ExFxD
        if codes:
            matrices = tuple(map(CodedMatrices, (gate_ExDxF, up_ExDxF, down_ExFxD), codes))
        gate, up, down = matrices

        def applied(
            name: str, x: jax.Array, w: Weight, bias_ExF: jax.Array | None = None
        ) -> jax.Array:
            y = product(x, w, out_of if name == "expert_down" else into, quantization)
            if bias_ExF is not None:  # as a product, whose gradient is one too
                y += _one_hot(sizes_E, x.shape[0], y.dtype) @ bias_ExF
            return kept(y, MATRICES[name].kept)

        gate_bias, up_bias = biases_ExF or (None, None)
        if weighs_inputs:
            x_nxD = shares_nx1.astype(x_nxD.dtype) * x_nxD
        gate_nxF = applied("expert_gate", x_nxD, gate, gate_bias)
        inner_nxF = combine(gate_nxF, applied("expert_up", x_nxD, up, up_bias))
        if weighs_inputs:
            return applied("expert_down", inner_nxF, down)
        shares_nx1 = shares_nx1.astype(inner_nxF.dtype)
        if platform == "cpu":
            return shares_nx1 * applied("expert_down", inner_nxF, down)
        return applied("expert_down", shares_nx1 * inner_nxF, down)

    return compute


def _one_hot(sizes_E: jax.Array, num_rows: int, dtype: jnp.dtype) -> jax.Array:
    """Returns the group of each of the sorted rows, as [n, E]; zeros behind the groups."""
    ends_E = jnp.cumsum(sizes_E)
    rows_nx1 = jnp.arange(num_rows, dtype=ends_E.dtype)[:, None]
    return ((rows_nx1 >= (ends_E - sizes_E)[None]) & (rows_nx1 < ends_E[None])).astype(dtype)
