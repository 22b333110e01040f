"""The rows of docs/batch-size.md on gradients and optimizers, computed both ways: by hand as there,
and by our step.

A row's id leads to its check. Gradients there are written as loops over replicas and passes; what
the page says to write here is read from the page, done with the real train step, and compared:
equal, or different where it says so.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from maxbatch.data.feed.placement import BatchShape, Placement
from maxbatch.parallel.mesh import make_mesh
from maxbatch.parallel.sharding import batch_sharding
from maxbatch.plan.update_settings import UpdateSettings
from maxbatch.update.state import TrainState, abstract_model, abstract_state, init_state
from maxbatch.update.step import make_train_step
from tests.helpers.batch_page import Checks
from tests.helpers.tiny import LENGTH, some_rows, tiny_config

check = Checks("The gradient", "The optimizer")

# replicas, passes per update, samples per update: two rows to each replica in each pass
W, G, B = 4, 2, 16
RATE, K = 0.1, 8
MODEL = ("base_num_decoder_layers=1",)
SGD = (*MODEL, "opt_type=sgd", "adam_b1=0", "adam_weight_decay=0", "gradient_clipping_threshold=0")
THRESHOLD = 0.5
CLIPPED = (*SGD[:-1], f"gradient_clipping_threshold={THRESHOLD}")
# The first step of Adam does not depend on its betas; `betas-per-update` looks at the moments.
BETAS, EPSILON, DECAY = (0.25, 0.81), 1e-4, 0.5
ADAM = (
    *MODEL,
    f"adam_b1={BETAS[0]}",
    f"adam_b2={BETAS[1]}",
    f"adam_eps={EPSILON}",
    "gradient_clipping_threshold=0",
)
UNDECAYED, DECAYED = (*ADAM, "adam_weight_decay=0"), (*ADAM, f"adam_weight_decay={DECAY}")

Rows = dict[str, np.ndarray]
Vector = np.ndarray


def test_every_row_has_a_check_and_every_check_a_row() -> None:
    assert set(check) == set(check.rows)


@pytest.mark.runs
@pytest.mark.parametrize("row", check.rows)
def test_what_the_page_says_to_write_here_gives_the_update_there(row: str) -> None:
    check[row]()


# --- vectors, and how two of them compare


def flat(tree: Any) -> Vector:
    return np.concatenate(
        [np.ravel(leaf) for leaf in jax.tree.leaves(jax.device_get(tree))]
    ).astype(float)


def apart(one: Vector, other: Vector) -> float:
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


def assert_same_change(one: Vector, other: Vector, tolerance: float = 1e-3) -> None:
    assert apart(one, other) < tolerance


def assert_no_rate_makes_them_the_same(one: Vector, other: Vector) -> None:
    best_rate = np.dot(one, other) / np.dot(other, other)
    assert apart(best_rate * other, one) > 0.02


# --- here


@cache
def _program(overrides: tuple[str, ...]) -> tuple[Any, Any, Any, Any]:
    """The mesh, the train step, the state's shardings and a new state, which lies on the host and
    can be used again.
    """
    config = tiny_config(*overrides)
    mesh = make_mesh(config, jax.devices()[:W])
    abstract = abstract_state(config.update, mesh)
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    return (
        mesh,
        make_train_step(config.update, mesh, abstract),
        shardings,
        jax.device_get(init_state(config.update, abstract)),
    )


def update(rows: Rows, rate: float, overrides: tuple[str, ...] = SGD) -> TrainState:
    """The state after one update of the real train step, on four devices, in passes of eight
    rows.
    """
    mesh, step, shardings, state = _program(overrides)
    batch = Placement(batch_sharding(mesh), LENGTH).stage(
        rows, len(rows["tokens"]), BatchShape(B // G, G)
    )
    passes = np.int32(-(-len(rows["tokens"]) // (B // G)))
    after, _ = step(
        jax.device_put(state, shardings), batch, passes, UpdateSettings(np.float32(rate))
    )
    return jax.device_get(after)


def here(rows: Rows, rate: float, overrides: tuple[str, ...] = SGD) -> Vector:
    """What one update takes from the parameters."""
    return start() - flat(update(rows, rate, overrides).params)


def parameters() -> Any:
    return _program(SGD)[-1].params


@cache
def start() -> Vector:
    return flat(parameters())


@cache
def is_matrix() -> Vector:
    """1 for entries of matrices, 0 for those of norm scales."""
    leaves = jax.tree_util.tree_leaves_with_path(parameters())
    return np.concatenate(
        [np.full(leaf.size, "scale" not in jax.tree_util.keystr(path)) for path, leaf in leaves]
    )


# --- there: plain JAX on two rows at a time, and loops


@partial(jax.jit, static_argnames="reduction")
def _gradient(params: Any, rows: Rows, reduction: str) -> Any:
    graphdef, _ = abstract_model(tiny_config(*MODEL).decoder)

    def loss(params: Any) -> jax.Array:
        decoder = nnx.merge(graphdef, params)
        logits = (
            decoder.hidden(rows["tokens"], rows["segments"]).x_MxLxD @ decoder.output_projection()
        )
        weights = rows["weights"][:, 1:]
        losses = weights * optax.softmax_cross_entropy_with_integer_labels(
            logits[:, :-1], rows["tokens"][:, 1:]
        )
        if reduction == "sum":
            return losses.sum()
        if reduction == "mean":
            return losses.sum() / weights.sum()
        return (losses.sum(axis=1) / weights.sum(axis=1)).sum()  # the sum of each row's mean

    return jax.grad(loss)(params)


def gradient(rows: Rows, reduction: str) -> Vector:
    return flat(_gradient(parameters(), rows, reduction))


def weight(rows: Rows) -> float:
    return float(rows["weights"].sum())


def part(rows: Rows, index: slice) -> Rows:
    return {name: array[index] for name, array in rows.items()}


def cut(rows: Rows) -> list[list[Rows]]:
    """passes[j][d]: the rows of replica d in pass j."""
    two = [part(rows, slice(i, i + 2)) for i in range(0, len(rows["tokens"]), 2)]
    return [two[j : j + W] for j in range(0, len(two), W)]


def equal_rows(count: int = B) -> Rows:
    rng = np.random.default_rng(1)
    weights = np.ones((count, LENGTH), np.float32)
    weights[:, 0] = 0
    tokens = rng.integers(0, 256, (count, LENGTH)).astype(np.int32)
    tokens[:2] = 7  # one replica's rows are very unlike the others'
    return {"tokens": tokens, "segments": np.ones((count, LENGTH), np.int32), "weights": weights}


def of_each(rows: Rows, reduction: str) -> list[list[Vector]]:
    return [[gradient(own, reduction) for own in replicas] for replicas in cut(rows)]


def check_gradient(row: str, there: Vector, rows: Rows) -> None:
    """Compare with the update here at the learning rate that the page's last cell says."""
    said = check.rows[row][-1]
    at_the_same_rate = here(rows, RATE)
    if said == "none":
        assert_no_rate_makes_them_the_same(there, at_the_same_rate)
        return
    numbers = {"rate": RATE, "W": W, "g": G, "r": 1, "T": weight(rows)}
    rate = eval(said.replace("×", "*"), {"__builtins__": {}}, numbers)
    assert_same_change(here(rows, rate), RATE * there)
    if said != "rate":
        assert apart(at_the_same_rate, RATE * there) > 0.1


@check("ddp-mean")
def _() -> None:
    rows = equal_rows(B // G)
    (one_pass,) = of_each(rows, "mean")
    check_gradient("ddp-mean", sum(one_pass) / W, rows)


@check("ddp-sum")
def _() -> None:
    rows = some_rows(B)
    there = sum(sum(one_pass) / W for one_pass in of_each(rows, "sum"))
    check_gradient("ddp-sum", there, rows)


@check("sum-over-replicas")
def _() -> None:
    rows = equal_rows(B // G)
    (one_pass,) = of_each(rows, "mean")
    check_gradient("sum-over-replicas", sum(one_pass), rows)


@check("times-world-size")
def _() -> None:
    rows = equal_rows(B // G)
    (one_pass,) = of_each(rows, "mean")
    averaged = sum(one_pass) / W
    check_gradient("times-world-size", averaged * W, rows)


@check("tf-global")
def _() -> None:
    rows = equal_rows(B // G)
    (one_pass,) = of_each(rows, "rows")
    global_batch_size = B // G
    check_gradient("tf-global", sum(own / global_batch_size for own in one_pass), rows)


@check("ddp-global-batch")
def _() -> None:
    rows = some_rows(B // G)
    (one_pass,) = of_each(rows, "sum")
    there = sum(own / weight(rows) for own in one_pass) / W
    check_gradient("ddp-global-batch", there, rows)
    assert_same_change(here(rows, RATE), RATE * there * W)  # and times the world size it is G


@check("sum-times-world-size")
def _() -> None:
    rows = some_rows(B // G)
    (one_pass,) = of_each(rows, "sum")
    check_gradient("sum-times-world-size", sum(own * W for own in one_pass) / W, rows)


@check("unequal-workers")
def _() -> None:
    rows = equal_rows(B // G)
    workers = [slice(0, 2), slice(2, 5), slice(5, 8)]
    there = sum(gradient(part(rows, own), "mean") for own in workers) / len(workers)
    check_gradient("unequal-workers", there, rows)


@check("tf-rebatched")
def _() -> None:
    rows = equal_rows(B // G)
    (replicas,) = of_each(rows, "rows")  # `dataset.batch(B // G)`, two rows for each
    check_gradient("tf-rebatched", sum(own / (B // G) for own in replicas), rows)


@check("tf-rebatched-twice")
def _() -> None:
    rows = equal_rows(B // G)
    (replicas,) = of_each(rows, "rows")
    check_gradient("tf-rebatched-twice", sum(own / (B // G * W) for own in replicas), rows)


@check("tf-mean")
def _() -> None:
    rows = equal_rows(B // G)
    (one_pass,) = of_each(rows, "rows")
    check_gradient("tf-mean", sum(own / 2 for own in one_pass), rows)


@check("accumulate-mean")
def _() -> None:
    rows = equal_rows()
    there = np.zeros_like(start())
    for one_pass in of_each(rows, "mean"):
        there += sum(own / G for own in one_pass) / W
    check_gradient("accumulate-mean", there, rows)


@check("accumulate-sum")
def _() -> None:
    rows = equal_rows()
    there = np.zeros_like(start())
    for one_pass in of_each(rows, "mean"):
        there += sum(one_pass) / W
    check_gradient("accumulate-sum", there, rows)


@check("divided-twice")
def _() -> None:
    rows = equal_rows()
    there = np.zeros_like(start())
    for one_pass in of_each(rows, "mean"):
        by_hand = [own / G for own in one_pass]
        there += sum(own / G for own in by_hand) / W
    check_gradient("divided-twice", there, rows)


@check("mean-of-means")
def _() -> None:
    rows = some_rows(B)
    there = np.mean([np.mean(one_pass, axis=0) for one_pass in of_each(rows, "mean")], axis=0)
    check_gradient("mean-of-means", there, rows)


@check("rank-weighted")
def _() -> None:
    rows = some_rows(B)
    passes, sums = cut(rows), of_each(rows, "sum")
    there = np.zeros_like(start())
    for d in range(W):
        items_of_the_rank = sum(weight(passes[j][d]) for j in range(G))
        there += sum(sums[j][d] for j in range(G)) / items_of_the_rank / W
    check_gradient("rank-weighted", there, rows)


@check("token-weighted")
def _() -> None:
    rows = some_rows(B)
    items = weight(rows)
    trainer = np.zeros_like(start())
    for one_pass in of_each(rows, "sum"):
        trainer += sum(own / items * W for own in one_pass) / W  # x W, since DDP divides by it
    megatron = sum(sum(one_pass) for one_pass in of_each(rows, "sum")) / items
    strided = {
        name: np.concatenate([array[j::G] for j in range(G)]) for name, array in rows.items()
    }  # MaxText's passes take every g-th row
    maxtext = sum(sum(one_pass) for one_pass in of_each(strided, "sum")) / items
    for there in (trainer, megatron, maxtext):
        check_gradient("token-weighted", there, rows)


@check("last-window")
def _() -> None:
    rows = equal_rows(B // G)  # r = 1 pass is left
    (one_pass,) = of_each(rows, "mean")
    check_gradient("last-window", sum(own / G for own in one_pass) / W, rows)


@check("last-batch")
def _() -> None:
    rows, left = equal_rows(), B - 2
    left_over = part(rows, slice(left))
    filled_up = {name: np.concatenate([array, array[:2]]) for name, array in left_over.items()}
    there = np.mean([np.mean(one_pass, axis=0) for one_pass in of_each(filled_up, "mean")], axis=0)
    check_gradient("last-batch", there, left_over)
    assert_same_change(here(filled_up, RATE), RATE * there)
    alone = np.mean(
        [gradient(part(left_over, slice(i, i + 2)), "mean") for i in range(0, left, 2)], axis=0
    )
    assert_same_change(here(left_over, RATE), RATE * alone)


# --- the optimizer


def mean_gradient(rows: Rows) -> Vector:
    return sum(sum(one_pass) for one_pass in of_each(rows, "sum")) / weight(rows)


def clipped(vector: Vector, threshold: float) -> Vector:
    return vector * min(1.0, threshold / float(np.linalg.norm(vector)))


def first_adam_step(vector: Vector, epsilon: float) -> Vector:
    """Both moments' bias corrections leave the gradient and its square."""
    return vector / (np.abs(vector) + epsilon)


@check("adam-of-a-sum")
def _() -> None:
    rows = some_rows(B)
    mean = mean_gradient(rows)
    there = first_adam_step(K * mean, EPSILON * K)
    assert_same_change(here(rows, RATE, UNDECAYED), RATE * there, tolerance=1e-2)
    assert apart(first_adam_step(mean, EPSILON * K), there) > 0.1
    # against which the gradients of so small a model are large, as a large model's are against 1e-8
    usual = 1e-12
    assert_same_change(first_adam_step(mean, usual), first_adam_step(K * mean, usual))


@check("clip-the-mean")
def _() -> None:
    rows = some_rows(B)
    mean = mean_gradient(rows)
    assert np.linalg.norm(mean) > 2 * THRESHOLD
    assert_same_change(here(rows, RATE, CLIPPED), RATE * clipped(mean, THRESHOLD))


@check("clip-the-sum")
def _() -> None:
    rows = some_rows(B)
    there = RATE * clipped(K * mean_gradient(rows), K * THRESHOLD)
    assert_same_change(here(rows, RATE * K, CLIPPED), there)
    assert apart(here(rows, RATE, CLIPPED), there) > 0.1


@check("clip-each-pass")
def _() -> None:
    rows = equal_rows()
    passes = [clipped(own, THRESHOLD) for one_pass in of_each(rows, "mean") for own in one_pass]
    assert_no_rate_makes_them_the_same(np.mean(passes, axis=0), here(rows, RATE, CLIPPED))


@check("decay-matrices")
def _() -> None:
    rows = some_rows(B)
    direction = first_adam_step(mean_gradient(rows), EPSILON)
    there = start() - (start() * (1 - RATE * DECAY * is_matrix()) - RATE * direction)
    assert_same_change(here(rows, RATE, DECAYED), there, tolerance=5e-3)


@check("decay-everything")
def _() -> None:
    rows = some_rows(B)
    direction = first_adam_step(mean_gradient(rows), EPSILON)
    there = start() - (start() * (1 - RATE * DECAY) - RATE * direction)
    ours, matrices = here(rows, RATE, DECAYED), is_matrix()
    assert_same_change(ours[matrices], there[matrices], tolerance=5e-3)
    assert_same_change((there - ours)[~matrices], RATE * DECAY * start()[~matrices], tolerance=2e-2)


@check("decay-in-the-gradient")
def _() -> None:
    rows = some_rows(B)
    there = first_adam_step(mean_gradient(rows) + DECAY * start(), EPSILON)
    assert_no_rate_makes_them_the_same(there, here(rows, RATE, DECAYED))


@check("decay-per-update")
def _() -> None:
    """What the decay alone takes: k updates' shrinking of the matrices there, the difference that
    it makes here.
    """
    rows, k = some_rows(B), 2
    taken = here(rows, RATE, DECAYED) - here(rows, RATE, UNDECAYED)

    def there(rate: float, decay: float) -> Vector:
        return start() * is_matrix() * (1 - (1 - rate * decay) ** k)

    # decay x k at the same rate
    assert_same_change(taken, there(RATE, DECAY / k), tolerance=RATE * DECAY)
    # the same decay at rate x k
    assert_same_change(taken, there(RATE / k, DECAY), tolerance=RATE * DECAY)
    assert apart(taken, there(RATE, DECAY)) > 0.4


@check("betas-per-update")
def _() -> None:
    """The moments after k updates on one gradient, with the parameters where they are, and after
    one with beta**k.
    """
    rows, k = some_rows(B), 2
    mean = mean_gradient(rows)
    adam = next(s for s in update(rows, 0.0, UNDECAYED).opt_state if hasattr(s, "nu"))
    for moment, power, beta in ((adam.mu, 1, BETAS[0]), (adam.nu, 2, BETAS[1])):
        there = np.zeros_like(mean)
        for _ in range(k):
            there = beta ** (1 / k) * there + (1 - beta ** (1 / k)) * mean**power
        assert_same_change(flat(moment), there)
