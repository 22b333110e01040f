from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxbatch.data.stream.fingerprint import fingerprint
from maxbatch.system.hashing import carry, limb_sums, row_hashes, to_hex

Rows = dict[str, np.ndarray]


def some_rows(count: int = 12, length: int = 20, seed: int = 0) -> Rows:
    rng = np.random.default_rng(seed)
    filled = np.arange(length) < rng.integers(2, length + 1, (count, 1))
    segments = np.where(filled, 1 + (np.arange(length) > 7), 0)
    return {
        "tokens": np.where(filled, rng.integers(0, 2**31 - 1, (count, length)), 258).astype(
            np.int32
        ),
        "segments": segments.astype(np.int32),
        "weights": (filled & (np.arange(length) > 0)).astype(np.float32),
    }


def edited(rows: Rows, name: str, row: int, slot: int, value: float) -> Rows:
    changed = {key: array.copy() for key, array in rows.items()}
    changed[name][row, slot] = value
    return changed


def hashes_in(xp, rows: Rows):
    return row_hashes(xp, *(xp.asarray(rows[name]) for name in ("tokens", "segments", "weights")))


@pytest.mark.parametrize("compiled", [False, True])
def test_numpy_and_jax_give_the_same_bits(compiled: bool) -> None:
    rows = some_rows(300, 33)

    def summed(tokens, segments, weights):
        hashes = row_hashes(jnp, tokens, segments, weights)
        limbs = limb_sums(jnp, hashes)
        return hashes, limbs, carry(jnp, limbs)

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        arguments = [jnp.asarray(rows[name]) for name in ("tokens", "segments", "weights")]
        on_device = (jax.jit(summed) if compiled else summed)(*arguments)
    hashes = hashes_in(np, rows)
    for here, there in zip(
        (hashes, limb_sums(np, hashes), carry(np, limb_sums(np, hashes))), on_device, strict=True
    ):
        assert here.dtype == there.dtype == np.uint32
        assert np.array_equal(here, np.asarray(there))
    assert to_hex(on_device[1]) == fingerprint([rows])


def test_the_value_is_pinned() -> None:
    assert fingerprint([some_rows()]) == "ba82bd9f5dc0ea38"


def test_it_is_the_sum_of_row_hashes_modulo_two_to_the_64() -> None:
    rows = some_rows(5000, 3)
    hashes = hashes_in(np, rows).astype(object)
    total = sum(int(low) + (int(high) << 32) for low, high in hashes) % (1 << 64)
    assert fingerprint([rows]) == f"{total:016x}"


def test_order_and_grouping_of_rows_do_not_matter() -> None:
    rows = some_rows()
    order = np.random.default_rng(1).permutation(12)
    shuffled = {name: array[order] for name, array in rows.items()}
    blocks = [
        {name: array[part] for name, array in rows.items()}
        for part in (slice(0, 5), slice(5, 5), slice(5, 12))
    ]
    assert fingerprint([rows]) == fingerprint([shuffled]) == fingerprint(blocks)


@pytest.mark.parametrize(
    ("name", "value"),
    [("tokens", 7), ("segments", 2), ("weights", 0), ("weights", 0.5), ("weights", 1 + 2**-23)],
)
@pytest.mark.parametrize("slot", [1, 5])
def test_any_change_of_one_slot_changes_it(name: str, value: float, slot: int) -> None:
    rows = edited(some_rows(), "segments", 3, slot, 1)
    rows = edited(edited(rows, "tokens", 3, slot, 5), "weights", 3, slot, 1)
    assert fingerprint([rows]) != fingerprint([edited(rows, name, 3, slot, value)])


def test_tokens_swapped_between_rows_or_slots_change_it() -> None:
    rows = some_rows()
    for one, other in (((2, 1), (3, 1)), ((2, 0), (2, 1))):
        swapped = edited(rows, "tokens", *one, rows["tokens"][other])
        swapped = edited(swapped, "tokens", *other, rows["tokens"][one])
        assert fingerprint([rows]) != fingerprint([swapped])


def test_a_row_twice_is_not_a_row_never() -> None:
    rows = some_rows(1)
    twice = {name: np.repeat(array, 2, axis=0) for name, array in rows.items()}
    values = {fingerprint([]), fingerprint([rows]), fingerprint([twice])}
    assert len(values) == 3
    assert int(fingerprint([twice]), 16) == 2 * int(fingerprint([rows]), 16) % (1 << 64)


def test_padding_rows_do_not_count() -> None:
    rows = some_rows()
    padded = {
        name: np.concatenate([array, np.zeros((3, 20), array.dtype)])
        for name, array in rows.items()
    }
    assert fingerprint([padded]) == fingerprint([rows])
    assert fingerprint([]) == "0" * 16


def test_hashes_are_spread_over_all_bits() -> None:
    counting = {
        "tokens": np.arange(40_000, dtype=np.int32).reshape(-1, 2),
        "segments": np.ones((20_000, 2), np.int32),
        "weights": np.ones((20_000, 2), np.float32),
    }
    hashes = hashes_in(np, counting)
    assert len(np.unique(hashes, axis=0)) == 20_000
    ones = [
        float(np.mean(hashes[:, lane] >> bit & 1))
        for lane in (0, 1)
        for bit in np.arange(32, dtype=np.uint32)
    ]
    assert min(ones) > 0.48 and max(ones) < 0.52


@pytest.mark.parametrize("xp", [np, jnp])
def test_the_largest_sums_carry_without_loss(xp) -> None:
    limbs = xp.full(4, 0xFFFFFFFF, dtype=xp.uint32)
    carried = np.asarray(carry(xp, limbs))
    assert (carried < 1 << 16).all()
    assert (
        to_hex(carried)
        == to_hex(limbs)
        == f"{sum(0xFFFFFFFF << 16 * place for place in range(4)) % (1 << 64):016x}"
    )
    largest = xp.full((65536, 2), 0xFFFFFFFF, dtype=xp.uint32)
    assert to_hex(limb_sums(xp, largest)) == f"{65536 * (2**64 - 1) % (1 << 64):016x}"


@pytest.mark.parametrize("xp", [np, jnp])
@pytest.mark.parametrize("rows", [65_537, 200_000])
def test_any_number_of_rows_is_summed_without_loss(xp, rows: int) -> None:
    largest = xp.full((rows, 2), 0xFFFFFFFF, dtype=xp.uint32)
    assert to_hex(limb_sums(xp, largest)) == f"{rows * (2**64 - 1) % (1 << 64):016x}"
