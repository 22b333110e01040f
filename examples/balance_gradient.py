"""The gradient of a balance loss under accumulation, as several trainers add it to an update.

python examples/balance_gradient.py

One batch of 16 rows is cut into 1 to 16 micro-batches. Each line compares the router's gradient of
the balance loss alone with the loss's own definition over the batch, whose value is 1 for even
loads: E sum(f P) of each row, or of the whole batch. Rows are full, or have 4, 8, ... 64 tokens.
Others' formulas are restated here from their sources, of which each function names version and
file; maxbatch's is called.

Shapes: B rows of the batch, L tokens of a row, D width, E experts, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import maxbatch
from maxbatch.model.experts.routing import RoutingSums, choose, routed_slots, within_rows
from maxbatch.update.balance import Balance, Scale

ROWS, LENGTH, WIDTH, NUM_EXPERTS, CHOICES = 16, 64, 32, 8, 2
CUTS = (1, 2, 4, 8, 16)
TOKENS_BEFORE = 2**23  # of the update before, so that its counts are its shares to float32's digits
KEYS = (
    "decoder_block=qwen3_moe",
    f"num_experts={NUM_EXPERTS}",
    f"num_experts_per_tok={CHOICES}",
    "base_num_decoder_layers=1",
    "load_balance_loss_weight=1",
)

Gradient = Callable[[int], jax.Array]  # of the router, from the number of micro-batches


class Case(NamedTuple):
    """The batch and the router that all formulas are compared on."""

    w_DxE: jax.Array
    x_BxLxD: jax.Array
    last_shares_E: jax.Array  # f of the update before
    lengths_B: jax.Array  # tokens of each row; padding is behind them


def parts_of(count: int) -> Iterator[jax.Array]:
    """Yields which rows are in each micro-batch: bool[B]."""
    for part in range(count):
        yield jnp.arange(ROWS) // (ROWS // count) == part


def strided_parts_of(count: int) -> Iterator[jax.Array]:
    """Yields which rows are in each micro-batch of MaxText, every count-th one: bool[B]."""
    for part in range(count):
        yield jnp.arange(ROWS) % count == part


def shares_and_scores(w_DxE: jax.Array, x_BxLxD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns f and P of each row: the share of its choices that each expert gets, and its mean
    score, [B, E].
    """
    scores_BxLxE = jax.nn.softmax(x_BxLxD @ w_DxE)
    _, chosen_BxLxk = jax.lax.top_k(scores_BxLxE, CHOICES)
    return jax.nn.one_hot(chosen_BxLxk, NUM_EXPERTS).mean(axis=(1, 2)), scores_BxLxE.mean(axis=1)


def of_rows(w_DxE: jax.Array, x_BxLxD: jax.Array, in_part_B: jax.Array) -> jax.Array:
    """Returns the mean over the rows of a micro-batch of E sum(f P) of each row."""
    shares_BxE, scores_BxE = shares_and_scores(w_DxE, x_BxLxD)
    return NUM_EXPERTS * (shares_BxE * scores_BxE).sum(axis=1).mean(where=in_part_B)


def of_all(
    w_DxE: jax.Array, x_BxLxD: jax.Array, in_part_B: jax.Array, shares_E: jax.Array | None = None
) -> jax.Array:
    """Returns E sum(f P) of the rows of a micro-batch together, with their own f or with
    another.
    """
    shares_BxE, scores_BxE = shares_and_scores(w_DxE, x_BxLxD)
    own_E, scores_E = (
        of_rows.mean(axis=0, where=in_part_B[:, None]) for of_rows in (shares_BxE, scores_BxE)
    )
    return NUM_EXPERTS * ((own_E if shares_E is None else shares_E) * scores_E).sum()


rows_gradient, all_gradient = (jax.jit(jax.grad(loss)) for loss in (of_rows, of_all))


def maxtext(case: Case) -> Gradient:
    """Returns the gradient of a mean of rows times the tokens of its micro-batch, over the tokens
    of the batch.

    MaxText 0.2.5: `_add_aux_loss` of trainers/pre_train/train.py and
    utils/gradient_accumulation.py; the mean counts every row and every position alike
    (`load_balance_loss` of layers/moe.py).
    """

    def gradient(count: int) -> jax.Array:
        parts = list(strided_parts_of(count))
        gradients = (
            rows_gradient(case.w_DxE, case.x_BxLxD, part) * case.lengths_B.sum(where=part)
            for part in parts
        )
        return sum(gradients) / case.lengths_B.sum()

    return gradient


def mean_of_parts(part_gradient: Callable[..., jax.Array], case: Case) -> Gradient:
    """Returns the mean over equal micro-batches: Megatron-LM's, and torchtitan's, which weighs them
    by tokens.

    Megatron-LM of autumn 2026, `aux_loss` and `seq_aux_loss` of core/transformer/moe/router.py;
    torchtitan of autumn 2026, `MicrobatchWiseLoadBalanceLoss` of models/common/moe: the tokens of
    one forward of a data-parallel rank.
    """
    return lambda count: (
        sum(part_gradient(case.w_DxE, case.x_BxLxD, part) for part in parts_of(count)) / count
    )


def megatron_global(case: Case) -> Gradient:
    """Returns the gradient with f of all micro-batches of the update so far: Megatron-LM's
    `global_aux_loss`.
    """

    def gradient(count: int) -> jax.Array:
        shares_BxE, total = (
            shares_and_scores(case.w_DxE, case.x_BxLxD)[0],
            jnp.zeros_like(case.w_DxE),
        )
        so_far_B = jnp.zeros(ROWS, bool)
        for part in parts_of(count):
            so_far_B |= part
            shares_E = shares_BxE.mean(axis=0, where=so_far_B[:, None])
            total += all_gradient(case.w_DxE, case.x_BxLxD, part, shares_E)
        return total / count

    return gradient


def ours(case: Case, scope: str) -> Gradient:
    """Returns maxbatch's: sums over tokens, divided once by the tokens of the batch. Other rows are
    padding to it.
    """
    config = maxbatch.load_config(overrides=[*KEYS, f"load_balance_scope={scope}"])
    balance, keys = Balance.from_config(config.decoder), config.model
    assert balance is not None
    last_counts_NxE = jnp.round(case.last_shares_E * TOKENS_BEFORE * CHOICES).astype(jnp.int32)[
        None
    ]

    @jax.jit
    @jax.grad
    def part_gradient(w_DxE: jax.Array, part: jax.Array) -> jax.Array:
        segments_BxL = (part[:, None] & (jnp.arange(LENGTH) < case.lengths_B[:, None])).astype(
            jnp.int32
        )
        slots = routed_slots(segments_BxL, segments_BxL)
        logits_BxLxE = case.x_BxLxD @ w_DxE
        routes, scores_BxLxE = choose(keys, logits_BxLxE, None)
        _, sums = within_rows(keys, routes, scores_BxLxE, logits_BxLxE, slots, 0)
        return balance.term(
            RoutingSums(*(array[None] for array in sums)), Scale(jnp.float32(1), last_counts_NxE)
        )

    return lambda count: (
        sum(part_gradient(case.w_DxE, part) for part in parts_of(count)) / case.lengths_B.sum()
    )


def some_case() -> Case:
    """Returns full rows with topics, whose tokens go to similar experts."""
    keys = jax.random.split(jax.random.key(0), 4)
    topics = jax.random.normal(keys[0], (ROWS, 1, WIDTH))
    last_shares_E = jax.random.uniform(keys[3], (NUM_EXPERTS,), minval=1, maxval=4)
    return Case(
        w_DxE=jax.random.normal(keys[2], (WIDTH, NUM_EXPERTS)) / WIDTH**0.5,
        x_BxLxD=topics + jax.random.normal(keys[1], (ROWS, LENGTH, WIDTH)),
        last_shares_E=last_shares_E / last_shares_E.sum(),
        lengths_B=jnp.full(ROWS, LENGTH),
    )


def main() -> dict[str, list[tuple[float, float]]]:
    """Prints the table; returns, by formula and for each cut, the length of its gradient and its
    distance.

    Both are relative to the length of the definition's gradient.
    """
    case, whole = some_case(), next(parts_of(1))
    batch = case.w_DxE, case.x_BxLxD, whole
    by_row, by_batch, by_last = (
        rows_gradient(*batch),
        all_gradient(*batch),
        all_gradient(*batch, case.last_shares_E),
    )
    uneven = case._replace(lengths_B=LENGTH // ROWS * jnp.arange(1, ROWS + 1))
    ours_uneven = ours(uneven, "sequence")
    compared: list[tuple[str, jax.Array, Gradient]] = [
        ("MaxText (each row)", by_row, maxtext(case)),
        ("MaxText, rows of 4 to 64 (each row)", by_row, maxtext(uneven)),
        ("Megatron-LM seq_aux_loss (each row)", by_row, mean_of_parts(rows_gradient, case)),
        ("maxbatch, sequence (each row)", by_row, ours(case, "sequence")),
        ("maxbatch, rows of 4 to 64 (each row)", ours_uneven(1), ours_uneven),
        ("Megatron-LM aux_loss, torchtitan (batch)", by_batch, mean_of_parts(all_gradient, case)),
        ("Megatron-LM global_aux_loss (batch)", by_batch, megatron_global(case)),
        ("maxbatch, global (f of the update before)", by_last, ours(case, "global")),
    ]
    print(
        f"{'length of the gradient, and its distance':42}"
        + "".join(f"{f'{count} parts':>16}" for count in CUTS)
    )
    found: dict[str, list[tuple[float, float]]] = {}
    for name, definition, gradient in compared:
        size, found[name] = np.linalg.norm(definition), []
        for count in CUTS:
            cut = np.asarray(gradient(count))
            found[name].append(
                (float(np.linalg.norm(cut) / size), float(np.linalg.norm(cut - definition) / size))
            )
        print(
            f"{name:42}"
            + "".join(f"{f'{length:.4f} {distance:.2g}':>16}" for length, distance in found[name])
        )
    return found


if __name__ == "__main__":
    main()
