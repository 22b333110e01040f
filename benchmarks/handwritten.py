"""The yardstick: an update of the trainer's model, written by hand for one batch cut, one mesh axis
and speed alone.

It computes the trainer's update (token-weighted mean, clipping by the global norm, AdamW with decay
on matrices) and leaves out everything else: it has two metrics, no skipped updates, no
fingerprints, no other mesh axes or cuts, and no configuration.

Chosen by measurement (20M parameters, 4 simulated devices on 2 CPU cores): manual collectives take
0.72 of the time of the same mathematics left to the partitioner; layers unrolled 0.97 of scanned; a
scan over micro-batches 0.74 of an unrolled loop; gathering the parameters once per update and
reducing the gradients once gains nothing over doing both in every micro-batch. The embedding and
the last projection are never gathered: every device looks up its part of D, and makes the logits of
its part of V, for the tokens of all devices.

Shapes: A micro-batches of M rows of L tokens, M / N rows a device; D model, H heads of h, F mlp, V
vocabulary, N devices, T tokens of a micro-batch.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.handwritten_experts import experts_mlp
from maxbatch.data.stream.rows import RowArrays

Params = dict[str, Any]
Gradients = tuple[jax.Array, Params, jax.Array]

PIECE_TOKENS = 512  # tokens of which logits are made at once
_B1, _B2, _EPS, _DECAY, _CLIP = 0.9, 0.95, 1e-8, 0.1, 1.0
_BATCH = P(None, "fsdp", None)
_NEVER_GATHERED = ("embedding_VxD", "output_DxV")
_LAYER_SPECS = {
    "attention_norm": P(),
    "mlp_norm": P(),
    "qkv_Dx3Hh": P("fsdp", None),
    "out_HhxD": P(None, "fsdp"),
    "gate_up_Dx2F": P("fsdp", None),
    "down_FxD": P(None, "fsdp"),
    "router_DxE": P(),
    "gate_up_ExDx2F": P(None, "fsdp", None),
    "down_ExFxD": P(None, None, "fsdp"),
}


class Form(NamedTuple):
    """Facts about a model that the shapes of its parameters do not show."""

    num_heads: int  # H; as many key heads
    experts_per_token: int = 0  # k; 0: a dense model
    balance_weight: float = 0.0  # of the balance loss of each row


def parameters_of_trainer(params: Any) -> Params:
    """The trainer's parameters, on the host, in this file's form: projections joined, layers in a
    list.
    """
    tree = jax.tree.map(np.asarray, params.to_pure_dict())
    layers, attention = tree["layers"], tree["layers"]["attention"]
    num_layers, width = layers["attention_norm"]["scale"].shape
    heads = [attention[name].reshape(num_layers, width, -1) for name in ("query", "key", "value")]
    stacked = {
        "attention_norm": layers["attention_norm"]["scale"],
        "mlp_norm": layers["mlp_norm"]["scale"],
        "qkv_Dx3Hh": np.concatenate(heads, axis=2),
        "out_HhxD": attention["out"].reshape(num_layers, -1, width),
    }
    if "experts" in layers:
        experts = layers["experts"]
        stacked["router_DxE"], stacked["down_ExFxD"] = experts["router"], experts["expert_down"]
        stacked["gate_up_ExDx2F"] = np.concatenate(
            [experts["expert_gate"], experts["expert_up"]], axis=3
        )
    else:
        mlp = layers["mlp"]
        stacked["gate_up_Dx2F"], stacked["down_FxD"] = (
            np.concatenate([mlp["gate"], mlp["up"]], axis=2),
            mlp["down"],
        )
    return {
        "embedding_VxD": tree["embedding"],
        "output_DxV": tree["output"],
        "final_norm": tree["final_norm"]["scale"],
        "layers": [{name: value[i] for name, value in stacked.items()} for i in range(num_layers)],
    }


class HandwrittenStep:
    """The compiled update on a state of its own, fed from rows in memory.

    Args:
      params: as `parameters_of_trainer` makes them.
      mesh: its axis `fsdp` spans all devices.
      form: of the model.
      batch_shape: (A, M, L).
      learning_rate: of every update.
    """

    def __init__(
        self,
        params: Params,
        mesh: Mesh,
        form: Form,
        batch_shape: tuple[int, int, int],
        learning_rate: np.float32,
    ) -> None:
        self._batch_shape, self._learning_rate = batch_shape, learning_rate
        specs = {
            "embedding_VxD": P(None, "fsdp"),
            "output_DxV": P(None, "fsdp"),
            "final_norm": P(),
            "layers": [{name: _LAYER_SPECS[name] for name in layer} for layer in params["layers"]],
        }
        gradients = jax.shard_map(
            partial(_gradients, specs, form),
            mesh=mesh,
            in_specs=(specs, (_BATCH,) * 3),
            out_specs=(P(), specs, P()),
            check_vma=False,
        )

        def placed(spec: P) -> NamedSharding:
            return NamedSharding(mesh, spec)

        sharded = jax.tree.map(placed, specs, is_leaf=lambda x: isinstance(x, P))
        state_sharding = (sharded, sharded, sharded, placed(P()))
        self._batch_sharding = (placed(_BATCH),) * 3
        zeros = jax.tree.map(np.zeros_like, params)
        self.state = jax.device_put((params, zeros, zeros, np.float32(0)), state_sharding)
        batch = (jax.ShapeDtypeStruct(batch_shape, "int32"),) * 2 + (
            jax.ShapeDtypeStruct(batch_shape, "float32"),
        )
        self._executable = (
            jax.jit(
                partial(_update, gradients),
                donate_argnums=0,
                in_shardings=(state_sharding, self._batch_sharding, placed(P())),
                out_shardings=(state_sharding, (placed(P()), placed(P()))),
            )
            .lower(self.state, batch, learning_rate)
            .compile()
        )

    def __call__(self, rows: RowArrays) -> tuple[float, float]:
        """Takes one update; returns its loss and gradient norm once it is done."""
        arrays = tuple(
            rows[name].reshape(self._batch_shape) for name in ("tokens", "segments", "weights")
        )
        batch = jax.device_put(arrays, self._batch_sharding)
        self.state, metrics = self._executable(self.state, batch, self._learning_rate)
        loss, norm = jax.device_get(metrics)
        return float(loss), float(norm)


def _update(gradients: Any, state: Any, batch: Any, learning_rate: jax.Array) -> Any:
    params, first, second, count = state
    loss, gradient, weight = gradients(params, batch)
    norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(gradient))) / weight
    shrink = jnp.minimum(1.0, _CLIP / norm) / weight
    count = count + 1
    first = jax.tree.map(lambda m, g: _B1 * m + (1 - _B1) * (g * shrink), first, gradient)
    second = jax.tree.map(lambda v, g: _B2 * v + (1 - _B2) * (g * shrink) ** 2, second, gradient)
    unbias_first, unbias_second = 1 / (1 - _B1**count), 1 / (1 - _B2**count)

    def stepped(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        decay = _DECAY if p.ndim > 1 else 0.0
        return p - learning_rate * (
            m * unbias_first / (jnp.sqrt(v * unbias_second) + _EPS) + decay * p
        )

    return (jax.tree.map(stepped, params, first, second), first, second, count), (
        loss / weight,
        norm,
    )


def _gradients(specs: Any, form: Form, params: Params, batch: Any) -> Gradients:
    """Loss sum, gradient sums and weight sum of the whole batch; on one device's shards, with its
    own collectives.
    """

    def gather(spec: P, shard: jax.Array) -> jax.Array:
        if "fsdp" not in spec:
            return shard
        return jax.lax.all_gather(shard, "fsdp", axis=spec.index("fsdp"), tiled=True)

    def scatter(spec: P, g: jax.Array) -> jax.Array:
        if "fsdp" not in spec:
            return jax.lax.psum(g, "fsdp")
        return jax.lax.psum_scatter(g, "fsdp", scatter_dimension=spec.index("fsdp"), tiled=True)

    def over_specs(function: Any, tree: Params) -> Params:
        def over(name: str) -> Any:
            return jax.tree.map(
                function, specs[name], tree[name], is_leaf=lambda x: isinstance(x, P)
            )

        return {name: tree[name] if name in _NEVER_GATHERED else over(name) for name in tree}

    # The balance loss is divided by all tokens and by the layers, and the sum of both losses by the
    # weight.
    of_balance = (
        form.balance_weight * jax.lax.psum(jnp.sum(batch[2]), "fsdp") / len(params["layers"])
    )
    of_balance /= jax.lax.psum(jnp.sum(batch[1] != 0), "fsdp")

    def micro_batch(rows: Any) -> Gradients:
        differentiated = jax.value_and_grad(_loss_sums, has_aux=True)
        (_, loss), gradient = differentiated(over_specs(gather, params), rows, form, of_balance)
        return loss, over_specs(scatter, gradient), jnp.sum(rows[2])

    if batch[0].shape[0] == 1:
        loss, gradient, weight = micro_batch(tuple(x[0] for x in batch))
    else:
        nothing = (jnp.float32(0), jax.tree.map(jnp.zeros_like, params), jnp.float32(0))
        (loss, gradient, weight), _ = jax.lax.scan(
            lambda sums, rows: (jax.tree.map(jnp.add, sums, micro_batch(rows)), None),
            nothing,
            batch,
        )
    return jax.lax.psum(loss, "fsdp"), gradient, jax.lax.psum(weight, "fsdp")


def _loss_sums(
    params: Params, rows: Any, form: Form, of_balance: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the sum that is differentiated, and the sum of the token losses."""
    tokens_MxL, segments_MxL, weights_MxL = rows
    x_MxLxD, balance = _hidden(params, tokens_MxL, segments_MxL, form)
    targets_MxL, weights_MxL = (jnp.roll(array, -1, axis=1) for array in (tokens_MxL, weights_MxL))
    loss = _fused_loss(x_MxLxD, params["output_DxV"], targets_MxL, weights_MxL)
    return loss + of_balance * balance, loss


def _hidden(
    params: Params, tokens_MxL: jax.Array, segments_MxL: jax.Array, form: Form
) -> tuple[jax.Array, jax.Array]:
    """Returns the hidden states, and the sum of the balance losses of the layers."""
    rows, length = tokens_MxL.shape
    num_heads, balance = form.num_heads, jnp.float32(0)
    head_dim = params["layers"][0]["out_HhxD"].shape[0] // num_heads
    frequencies = 10000.0 ** (-np.arange(0, head_dim, 2) / head_dim)
    angles = np.outer(np.arange(length), frequencies)[None, :, None, :]
    cos, sin = jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)
    same = segments_MxL[:, :, None] == segments_MxL[:, None, :]
    visible_Mx1xLxL = (same & np.tril(np.ones((length, length), bool)))[:, None]

    def rotated(x: jax.Array) -> jax.Array:
        first, second = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    part = params["embedding_VxD"][jax.lax.all_gather(tokens_MxL, "fsdp", tiled=True)]
    x_MxLxD = jax.lax.all_to_all(part, "fsdp", split_axis=0, concat_axis=2, tiled=True)
    for layer in params["layers"]:
        y_MxLxD = _normed(x_MxLxD, layer["attention_norm"])
        q, k, v = (
            (y_MxLxD @ w).reshape(rows, length, num_heads, head_dim)
            for w in jnp.split(layer["qkv_Dx3Hh"], 3, axis=1)
        )
        logits_MxHxLxL = jnp.einsum("mqnh,mknh->mnqk", rotated(q), rotated(k)) * head_dim**-0.5
        attention_MxHxLxL = jax.nn.softmax(jnp.where(visible_Mx1xLxL, logits_MxHxLxL, -1e30))
        attended = jnp.einsum("mnqk,mknh->mqnh", attention_MxHxLxL, v).reshape(rows, length, -1)
        x_MxLxD = x_MxLxD + attended @ layer["out_HhxD"]
        y_MxLxD = _normed(x_MxLxD, layer["mlp_norm"])
        if form.experts_per_token:
            y_MxLxD, of_layer = experts_mlp(y_MxLxD, layer, form.experts_per_token)
            x_MxLxD, balance = x_MxLxD + y_MxLxD, balance + of_layer
            continue
        inner = jnp.einsum(
            "mld,dgf->mlgf", y_MxLxD, layer["gate_up_Dx2F"].reshape(x_MxLxD.shape[-1], 2, -1)
        )
        x_MxLxD = x_MxLxD + (jax.nn.silu(inner[:, :, 0]) * inner[:, :, 1]) @ layer["down_FxD"]
    return _normed(x_MxLxD, params["final_norm"]), balance


def _normed(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


@jax.custom_vjp
def _fused_loss(
    x_MxLxD: jax.Array, w_DxV: jax.Array, targets_MxL: jax.Array, weights_MxL: jax.Array
) -> jax.Array:
    return _fused_forward(x_MxLxD, w_DxV, targets_MxL, weights_MxL)[0]


def _fused_forward(x_MxLxD: Any, w_DxV: Any, targets_MxL: Any, weights_MxL: Any) -> Any:
    """This device's part of the loss; its gradients in its own rows, and in its own part of V from
    all tokens.
    """
    first_word = jax.lax.axis_index("fsdp") * w_DxV.shape[1]

    def piece(sums: Any, part: Any) -> Any:
        x, targets, weights = part
        logits = x @ w_DxV
        peak = jax.lax.pmax(jnp.max(logits, axis=1, keepdims=True), "fsdp")
        exp = jnp.exp(logits - peak)
        is_target = (
            jax.lax.broadcasted_iota(jnp.int32, exp.shape, 1) == (targets - first_word)[:, None]
        )
        total = jax.lax.psum(jnp.sum(exp, axis=1, keepdims=True), "fsdp")
        of_target = jnp.sum(jnp.where(is_target, logits - peak, 0.0), axis=1)
        loss = jnp.sum((jnp.log(total)[:, 0] / jax.lax.axis_size("fsdp") - of_target) * weights)
        unscaled = exp - jnp.where(is_target, total, 0.0)
        scale = weights[:, None] / total
        return (sums[0] + loss, sums[1] + (x * scale).T @ unscaled), (unscaled @ w_DxV.T) * scale

    arrays = [
        jax.lax.all_gather(array, "fsdp", tiled=True)
        for array in (x_MxLxD, targets_MxL, weights_MxL)
    ]
    pieces = max(1, arrays[1].size // PIECE_TOKENS)
    parts = tuple(a.reshape(pieces, -1, *a.shape[2:]) for a in arrays)
    (loss, grad_w), grad_x = jax.lax.scan(piece, (jnp.float32(0), jnp.zeros_like(w_DxV)), parts)
    grad_x = jax.lax.psum_scatter(
        grad_x.reshape(arrays[0].shape), "fsdp", scatter_dimension=0, tiled=True
    )
    return loss, (grad_x, grad_w)


_fused_loss.defvjp(
    _fused_forward, lambda kept, cotangent: (cotangent * kept[0], cotangent * kept[1], None, None)
)
