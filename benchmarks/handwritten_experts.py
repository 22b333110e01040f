"""The experts of the hand-written update, in place of its layers' MLP, for a CPU and speed alone.

The choices are sorted by expert and cut into blocks of rows of one expert, whose whole MLP is one
step of a loop. The rows hold no padding, and the only other figure is the balance loss of each row.

Shapes: M rows of L tokens; T = M x L tokens, n = T x k choices; D model, E experts of which k are a
token's, F width of an expert, b rows of a block.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

BLOCK_ROWS = 128


def experts_mlp(
    x_MxLxD: jax.Array, layer: dict[str, jax.Array], k: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the weighted sum of the outputs of each token's experts, and its part of the balance
    loss of each row.

    The latter is the sum of E sum(f P) of each row times its tokens.
    """
    rows, length, width = x_MxLxD.shape
    num_experts = layer["router_DxE"].shape[1]
    scores_MxLxE = jax.nn.softmax(x_MxLxD @ layer["router_DxE"])
    shares_MxLxk, experts_MxLxk = jax.lax.top_k(scores_MxLxE, k)
    shares_MxLxk /= jnp.sum(shares_MxLxk, axis=-1, keepdims=True)
    is_chosen = experts_MxLxk[..., None] == jnp.arange(num_experts)
    counts_MxE = jnp.sum(is_chosen, axis=(1, 2), dtype=jnp.float32)
    balance = num_experts / (k * length) * jnp.sum(counts_MxE * jnp.sum(scores_MxLxE, axis=1))
    experts_n = experts_MxLxk.reshape(-1)
    order_n = jnp.argsort(experts_n, stable=True)
    place_n = jnp.zeros_like(order_n).at[order_n].set(jnp.arange(order_n.size), unique_indices=True)
    x_TxD = x_MxLxD.reshape(-1, width)
    y_nxD = _sorted_mlp(
        _in_order(x_TxD, order_n, place_n, k),
        layer["gate_up_ExDx2F"],
        layer["down_ExFxD"],
        experts_n,
    )
    y_TxkxD = _back(y_nxD, order_n, place_n).reshape(-1, k, width)
    y_TxD = jnp.einsum("tkd,tk->td", y_TxkxD, shares_MxLxk.reshape(-1, k))
    return y_TxD.reshape(rows, length, width), balance


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _in_order(x_TxD: jax.Array, order_n: jax.Array, place_n: jax.Array, k: int) -> jax.Array:
    return x_TxD[order_n // k]


_in_order.defvjp(
    lambda x, order, place, k: (x[order // k], place),
    lambda k, place, g: (g[place].reshape(-1, k, g.shape[-1]).sum(axis=1), None, None),
)


@jax.custom_vjp
def _back(y_nxD: jax.Array, order_n: jax.Array, place_n: jax.Array) -> jax.Array:
    return y_nxD[place_n]


_back.defvjp(lambda y, order, place: (y[place], order), lambda order, g: (g[order], None, None))


def _blocks(experts_n: jax.Array, num_experts: int) -> tuple[jax.Array, Any]:
    """Returns the number of blocks, and a function from a block to its expert, its first row and
    the expert's end.
    """
    sizes_E = jnp.sum(experts_n[:, None] == jnp.arange(num_experts), axis=0, dtype=jnp.int32)
    ends_E = jnp.cumsum(sizes_E)
    blocks_E = -(-sizes_E // BLOCK_ROWS)
    last_E = jnp.cumsum(blocks_E)

    def block(i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        expert = jnp.searchsorted(last_E, i, side="right")
        first = (
            ends_E[expert] - sizes_E[expert] + (i - last_E[expert] + blocks_E[expert]) * BLOCK_ROWS
        )
        return expert, first, ends_E[expert]

    return last_E[-1], block


def _padded(x: jax.Array) -> jax.Array:
    return jnp.pad(x, ((0, BLOCK_ROWS), (0, 0)))


def _rows(x: jax.Array, first: jax.Array) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, first, BLOCK_ROWS)


def _put(x: jax.Array, rows: jax.Array, first: jax.Array) -> jax.Array:
    # Rows of the next expert are written again by its own block.
    return jax.lax.dynamic_update_slice_in_dim(x, rows, first, axis=0)


@jax.custom_vjp
def _sorted_mlp(
    x_nxD: jax.Array, gate_up_ExDx2F: jax.Array, down_ExFxD: jax.Array, experts_n: jax.Array
) -> jax.Array:
    return _sorted_forward(x_nxD, gate_up_ExDx2F, down_ExFxD, experts_n)[0]


def _sorted_forward(x_nxD: Any, gate_up_ExDx2F: Any, down_ExFxD: Any, experts_n: Any) -> Any:
    count, block = _blocks(experts_n, down_ExFxD.shape[0])
    x_padded = _padded(x_nxD)

    def step(i: jax.Array, made: Any) -> Any:
        y, both = made
        expert, first, _ = block(i)
        both_bx2F = _rows(x_padded, first) @ gate_up_ExDx2F[expert]
        gate_bxF, up_bxF = jnp.split(both_bx2F, 2, axis=1)
        y_bxD = (jax.nn.silu(gate_bxF) * up_bxF) @ down_ExFxD[expert]
        return _put(y, y_bxD, first), _put(both, both_bx2F, first)

    nothing = (
        jnp.zeros_like(x_padded),
        jnp.zeros((x_padded.shape[0], gate_up_ExDx2F.shape[2]), x_nxD.dtype),
    )
    y, both = jax.lax.fori_loop(0, count, step, nothing)
    return y[: x_nxD.shape[0]], (x_padded, both, gate_up_ExDx2F, down_ExFxD, experts_n)


def _sorted_backward(kept: Any, grad_nxD: jax.Array) -> Any:
    x_padded, both, gate_up_ExDx2F, down_ExFxD, experts_n = kept
    count, block = _blocks(experts_n, down_ExFxD.shape[0])
    grad_padded = _padded(grad_nxD)

    def step(i: jax.Array, made: Any) -> Any:
        grad_x, grad_gate_up, grad_down = made
        expert, first, end = block(i)
        own = (first + jnp.arange(BLOCK_ROWS) < end)[:, None]
        grad_bxD = jnp.where(own, _rows(grad_padded, first), 0.0)
        gate_bxF, up_bxF = jnp.split(_rows(both, first), 2, axis=1)
        sigmoid = jax.nn.sigmoid(gate_bxF)
        silu = gate_bxF * sigmoid
        grad_inner = grad_bxD @ down_ExFxD[expert].T
        grad_gate = grad_inner * up_bxF * (sigmoid + silu * (1 - sigmoid))
        grad_both = jnp.concatenate([grad_gate, grad_inner * silu], axis=1)
        return (
            _put(grad_x, grad_both @ gate_up_ExDx2F[expert].T, first),
            grad_gate_up.at[expert].add(_rows(x_padded, first).T @ grad_both),
            grad_down.at[expert].add((silu * up_bxF).T @ grad_bxD),
        )

    nothing = jnp.zeros_like(x_padded), jnp.zeros_like(gate_up_ExDx2F), jnp.zeros_like(down_ExFxD)
    grad_x, grad_gate_up, grad_down = jax.lax.fori_loop(0, count, step, nothing)
    return grad_x[: grad_nxD.shape[0]], grad_gate_up, grad_down, None


_sorted_mlp.defvjp(_sorted_forward, _sorted_backward)
