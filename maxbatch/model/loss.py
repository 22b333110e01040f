"""The loss: the last projection fused with the cross-entropy, and its gradient computed in the
forward pass.

Logits are the largest array of a small model. Here they are turned at once into the gradients of
their input and weight, so they are computed once and never kept for the backward pass. If they are
large, only one piece of the length exists at a time.

Shapes: M micro-batch, L length, D model, V vocabulary; S shards of the tokens, C pieces of a
shard's length, T tokens of one piece of one shard (M * L / S / C).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxbatch.model.decoder import Decoder
from maxbatch.model.products import exchanges_tokens, product
from maxbatch.model.scores import soft_capped
from maxbatch.parallel.sharding import OVER_ROWS, OVER_TOKENS, Constrain, unconstrained

# Most float32 logits of one shard at a time: 512 MiB, but 16 MiB on a CPU, where fresh pages cost
# more than short products (0.86 of the time of a step with 21M parameters and 512 tokens a shard).
# On a v5e, with 4,096 tokens of a 7B model a shard, half as many would save 0.26 of 1.6 GB and pass
# over w's gradient twice.
MAX_LOGITS = {"tpu": 2**27, "gpu": 2**27, "cpu": 2**22}


class Rules(NamedTuple):
    """The static arguments of the loss."""

    constrain: Constrain = unconstrained
    soft_cap: float = 0.0  # c > 0: logits s become c tanh(s / c)
    z_loss: float = 0.0  # weight of the square of the log of the softmax's sum, in the gradient


_PLAIN = Rules()


def token_losses(
    x_MxLxD: jax.Array,
    w_DxV: jax.Array,
    targets_MxL: jax.Array,
    weights_MxL: jax.Array,
    *,
    batch_shards: int = 1,
    rules: Rules = _PLAIN,
) -> tuple[jax.Array, jax.Array]:
    """Returns the weighted sum of cross-entropies of softmax(x @ w), and the sum of the weights.

    Products take x's dtype and accumulate in float32; softmax statistics, losses and the two sums
    are float32. Differentiable once, in x, w and weights; an evaluation that asks for no gradient
    computes none. The gradient in x and w is that of the cross-entropies with `rules.z_loss`, whose
    term the sum leaves out.

    Args:
      x_MxLxD: the last hidden state; the output projection is cast to its dtype.
      targets_MxL: int32 in [0, V): the token to predict at each position.
      weights_MxL: float32: how much each position counts; 0 leaves it out.
      batch_shards: parts of M on different devices; M is a multiple of it. Each of these, and of
        the shares of a row that the context axis splits, sums its own part of w's gradient, and the
        parts are reduced once, after the last piece.
    """
    constrain = rules.constrain
    weight_sum = jnp.sum(weights_MxL)
    rows, length = targets_MxL.shape
    width, vocabulary = w_DxV.shape

    # Where it moves fewer bytes, devices exchange tokens, and each has a part of the vocabulary.
    axes, shares = Axes(OVER_TOKENS, "vocab"), _shares(length, constrain)
    if exchanges_tokens(targets_MxL.size, vocabulary, constrain):
        axes = Axes("length", OVER_ROWS)
        x_MxLxD, targets_MxL, weights_MxL = (
            constrain(array, (None, "length", "embed")[: array.ndim])
            for array in (x_MxLxD, targets_MxL, weights_MxL)
        )
        vocabulary, batch_shards = vocabulary // batch_shards, 1

    pieces = _num_pieces(
        rows // batch_shards, length // shares, (width, vocabulary), constrain.platform
    )
    cut = partial(_cut, shards=batch_shards, shares=shares, pieces=pieces)
    w_DxV = w_DxV.astype(x_MxLxD.dtype)
    return _loss_sum(
        cut(x_MxLxD), w_DxV, cut(targets_MxL), cut(weights_MxL), rules, axes
    ), weight_sum


def loss_sums_of(
    decoder: Decoder,
    x_MxLxD: jax.Array,
    tokens_MxL: jax.Array,
    weights_MxL: jax.Array,
    *,
    batch_shards: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """Returns the weighted sum of the next-token losses of a micro-batch, and the sum of its
    weights.

    `weights_MxL[:, t]` is the weight of token t as a target, so `weights_MxL[:, 0]` is 0. Both sums
    are float32 scalars.
    """
    # The last position predicts the first token, whose weight is 0.
    targets_MxL, weights_MxL = (
        jnp.roll(array_MxL, -1, axis=1) for array_MxL in (tokens_MxL, weights_MxL)
    )
    rules = Rules(decoder.constrain, decoder.logits_soft_cap, decoder.z_loss)
    w_DxV = decoder.output_projection()
    return token_losses(
        x_MxLxD, w_DxV, targets_MxL, weights_MxL, batch_shards=batch_shards, rules=rules
    )


class TokenScores(NamedTuple):
    """The scores of tokens, each given those before it."""

    logprobs_MxL: jax.Array  # float32, in nats
    entropies_MxL: jax.Array  # float32, in nats, of the distribution that a token is drawn from
    # bool: no other token is likelier, or as likely and before it in the vocabulary
    is_likeliest_MxL: jax.Array


def token_logprobs(
    decoder: Decoder, tokens_MxL: jax.Array, segments_MxL: jax.Array, *, batch_shards: int = 1
) -> TokenScores:
    """Returns the scores of each token of rows; 0 or False at the first token of a row.

    Logits exist for one piece of the length at a time and are recomputed in the backward pass.
    Softmax is float32.
    """
    x_MxLxD = decoder.hidden(tokens_MxL, segments_MxL).x_MxLxD
    return token_logprobs_of(decoder, x_MxLxD, tokens_MxL, batch_shards=batch_shards)


def token_logprobs_of(
    decoder: Decoder, x_MxLxD: jax.Array, tokens_MxL: jax.Array, *, batch_shards: int = 1
) -> TokenScores:
    """Returns `token_logprobs` of rows whose last hidden state is x."""
    scores = target_scores(
        decoder, x_MxLxD, jnp.roll(tokens_MxL, -1, axis=1), batch_shards=batch_shards
    )
    is_first_MxL = jax.lax.broadcasted_iota(jnp.int32, tokens_MxL.shape, 1) == 0

    def after_first(scores_MxL: jax.Array) -> jax.Array:
        return jnp.where(
            is_first_MxL, jnp.zeros((), scores_MxL.dtype), jnp.roll(scores_MxL, 1, axis=1)
        )

    return TokenScores(*map(after_first, scores))


def target_scores(
    decoder: Decoder, x_MxLxD: jax.Array, targets_MxL: jax.Array, *, batch_shards: int = 1
) -> TokenScores:
    """Returns the scores of the token that follows each position, of rows whose last hidden state
    is x.
    """
    w_DxV = decoder.constrain(decoder.output_projection().astype(x_MxLxD.dtype), ("embed", "vocab"))
    rows, length = targets_MxL.shape
    shares = _shares(length, decoder.constrain)
    pieces = _num_pieces(
        rows // batch_shards, length // shares, w_DxV.shape, decoder.constrain.platform
    )

    def cut(array_MxL: jax.Array) -> jax.Array:
        """Reshapes [M, L, ...] to [C, M, T, ...]: each piece has tokens of every share."""
        rest = array_MxL.shape[2:]
        cut = array_MxL.reshape(rows, shares, pieces, length // shares // pieces, *rest)
        return jnp.moveaxis(cut, 2, 0).reshape(pieces, rows, length // pieces, *rest)

    def joined(scores_CxMxT: jax.Array) -> jax.Array:
        """Undoes `cut`."""
        cut = scores_CxMxT.reshape(pieces, rows, shares, -1)
        return jnp.moveaxis(cut, 0, 2).reshape(rows, length)

    @jax.checkpoint
    def piece(x_MxTxD: jax.Array, targets_MxT: jax.Array) -> TokenScores:
        logits_MxTxV = product(x_MxTxD, w_DxV, "mtd,dv->mtv", out_dtype=jnp.float32)
        logprobs_MxTxV = jax.nn.log_softmax(decoder.capped(logits_MxTxV))
        entropies_MxT = -jnp.sum(jnp.exp(logprobs_MxTxV) * logprobs_MxTxV, axis=-1)
        targets_MxTx1 = targets_MxT[..., None]
        logprobs_MxT = jnp.take_along_axis(logprobs_MxTxV, targets_MxTx1, axis=-1)[..., 0]
        return TokenScores(
            logprobs_MxT, entropies_MxT, jnp.argmax(logprobs_MxTxV, axis=-1) == targets_MxT
        )

    _, scores = jax.lax.scan(
        lambda _, xs: (None, piece(*xs)), None, (cut(x_MxLxD), cut(targets_MxL))
    )
    return TokenScores(*map(joined, scores))


def _shares(length: int, constrain: Constrain) -> int:
    """Returns the shares of a row on different devices."""
    (axis,) = constrain.spec((length,), ("length",))
    return constrain.mesh.shape[axis] if constrain.mesh is not None and axis else 1


def _num_pieces(rows: int, length: int, projection: tuple[int, ...], platform: str) -> int:
    """Returns the fewest equal pieces of the length whose logits keep within the limit of one
    shard.

    The limit is `MAX_LOGITS`, but at least the logits of D / 2 tokens: with fewer, summing w's
    gradient over the pieces costs more than it saves. The projection is (D, V), and the rows are
    those of one shard.
    """
    width, vocabulary = projection
    most = max(MAX_LOGITS[platform], width // 2 * vocabulary)
    fits = (
        c for c in range(1, length) if length % c == 0 and rows * (length // c) * vocabulary <= most
    )
    return next(fits, length)


def _cut(array_MxL: jax.Array, shards: int, shares: int, pieces: int) -> jax.Array:
    """Reshapes [M, L, ...] to [C, S, T, ...]; S are shards of the rows x shares of the length.

    Every piece has tokens of all shares. In pieces of whole rows, a piece would be on the devices
    of one share alone, and all others would gather it and compute it as well.
    """
    rows, length, *rest = array_MxL.shape
    tokens = length // shares // pieces
    cut = array_MxL.reshape(shards, rows // shards, shares, pieces, tokens, *rest)
    return jnp.moveaxis(cut, (3, 2), (0, 2)).reshape(pieces, shards * shares, -1, *rest)


def _cross_entropy(
    x_TxD: jax.Array, w_DxV: jax.Array, targets_T: jax.Array, soft_cap: float
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns the losses [T], exp(logits - max) [T, V], its sums over V [T, 1], the logs of the sums
    of exp(logits) [T, 1] and the logits [T, V], in float32.
    """
    logits_TxV = product(x_TxD, w_DxV, "td,dv->tv", out_dtype=jnp.float32)
    logits_TxV = soft_capped(logits_TxV, soft_cap)
    peak_Tx1 = jnp.max(logits_TxV, axis=1, keepdims=True)
    exp_TxV = jnp.exp(logits_TxV - peak_Tx1)
    exp_sum_Tx1 = jnp.sum(exp_TxV, axis=1, keepdims=True)
    target_Tx1 = jnp.take_along_axis(logits_TxV, targets_T[:, None], axis=1)
    log_Tx1 = jnp.log(exp_sum_Tx1) + peak_Tx1
    return (log_Tx1 - target_Tx1)[:, 0], exp_TxV, exp_sum_Tx1, log_Tx1, logits_TxV


def _losses_and_gradients(
    x_TxD: jax.Array, w_DxV: jax.Array, targets_T: jax.Array, weights_T: jax.Array, rules: Rules
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the losses [T], and the gradients of their weighted sum with the z-loss in x [T, D]
    and, in float32, in w [D, V].
    """
    soft_cap = rules.soft_cap
    losses_T, exp_TxV, exp_sum_Tx1, log_Tx1, logits_TxV = _cross_entropy(
        x_TxD, w_DxV, targets_T, soft_cap
    )
    # The gradient of the logits is weight * (exp / sum - 1 at the target) = scale * (exp - sum at
    # the target). The scale multiplies the small factors of the two products, which saves a pass
    # over the large one.
    scale_Tx1 = weights_T[:, None] / exp_sum_Tx1
    is_target_TxV = jax.lax.broadcasted_iota(jnp.int32, exp_TxV.shape, 1) == targets_T[:, None]
    if rules.z_loss:  # whose slope is 2 z log(sum) exp / sum
        exp_TxV *= 1 + 2 * rules.z_loss * log_Tx1
    unscaled_TxV = exp_TxV - jnp.where(is_target_TxV, exp_sum_Tx1, 0.0)
    if soft_cap:
        unscaled_TxV *= 1 - jnp.square(logits_TxV / soft_cap)  # the slope of the cap
    unscaled_TxV = unscaled_TxV.astype(x_TxD.dtype)
    grad_x_TxD = (
        jnp.einsum("tv,dv->td", unscaled_TxV, w_DxV, preferred_element_type=jnp.float32) * scale_Tx1
    )
    scaled_x_TxD = (x_TxD.astype(jnp.float32) * scale_Tx1).astype(x_TxD.dtype)
    grad_w_DxV = jnp.einsum(
        "td,tv->dv", scaled_x_TxD, unscaled_TxV, preferred_element_type=jnp.float32
    )
    return losses_T, grad_x_TxD.astype(x_TxD.dtype), grad_w_DxV


class Axes(NamedTuple):
    """How the devices share the loss: the logical axes of S and of V."""

    shards: str | None
    vocabulary: str


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _loss_sum(
    x_CxSxTxD: jax.Array,
    w_DxV: jax.Array,
    targets_CxSxT: jax.Array,
    weights_CxSxT: jax.Array,
    rules: Rules,
    axes: Axes,
) -> jax.Array:
    # Gathered once, before the loop over the pieces.
    w_DxV = rules.constrain(w_DxV, ("embed", axes.vocabulary))

    def losses(piece: tuple[jax.Array, jax.Array]) -> jax.Array:
        return jax.vmap(
            lambda x_TxD, targets_T: _cross_entropy(x_TxD, w_DxV, targets_T, rules.soft_cap)[0]
        )(*piece)

    _, losses_CxSxT = jax.lax.scan(
        lambda _, piece: (None, losses(piece)), None, (x_CxSxTxD, targets_CxSxT)
    )
    return jnp.sum(losses_CxSxT * weights_CxSxT)


Residuals = tuple[jax.Array, jax.Array, jax.Array]


def _forward(
    x_CxSxTxD: jax.Array,
    w_DxV: jax.Array,
    targets_CxSxT: jax.Array,
    weights_CxSxT: jax.Array,
    rules: Rules,
    axes: Axes,
) -> tuple[jax.Array, Residuals]:
    w_DxV = rules.constrain(w_DxV, ("embed", axes.vocabulary))
    losses_and_gradients = jax.vmap(
        partial(_losses_and_gradients, rules=rules), in_axes=(0, None, 0, 0)
    )

    def add_piece(
        grad_w_SxDxV: jax.Array, piece: Residuals
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        x_SxTxD, targets_SxT, weights_SxT = piece
        losses_SxT, grad_x_SxTxD, more_SxDxV = losses_and_gradients(
            x_SxTxD, w_DxV, targets_SxT, weights_SxT
        )
        return place(grad_w_SxDxV + more_SxDxV), (losses_SxT, grad_x_SxTxD)

    def place(grad_w_SxDxV: jax.Array) -> jax.Array:
        return rules.constrain(grad_w_SxDxV, (axes.shards, "embed", axes.vocabulary))

    nothing_yet = place(jnp.zeros((x_CxSxTxD.shape[1], *w_DxV.shape), jnp.float32))
    grad_w_SxDxV, (losses_CxSxT, grad_x_CxSxTxD) = jax.lax.scan(
        add_piece, nothing_yet, (x_CxSxTxD, targets_CxSxT, weights_CxSxT)
    )
    grad_w_DxV = jnp.sum(grad_w_SxDxV, axis=0).astype(w_DxV.dtype)
    return jnp.sum(losses_CxSxT * weights_CxSxT), (grad_x_CxSxTxD, grad_w_DxV, losses_CxSxT)


def _backward(
    rules: Rules, _axes: Axes, residuals: Residuals, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, None, jax.Array]:
    grad_x, grad_w, grad_weights = (cotangent.astype(kept.dtype) * kept for kept in residuals)
    if rules.constrain.platform == "tpu":
        # Summed over the devices before the layers' backward pass begins. Otherwise every device
        # keeps its own whole gradient of w, in float32, until that pass ends.
        grad_w = rules.constrain.like_parameter(grad_w, ("embed", "vocab"))
        grad_x, grad_w = jax.lax.optimization_barrier((grad_x, grad_w))
    return grad_x, grad_w, None, grad_weights


_loss_sum.defvjp(_forward, _backward)
