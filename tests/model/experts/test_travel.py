"""Tokens that travel to experts on other devices come back as if the experts were here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from maxbatch.model.experts.experts import _computed_by, _gated, _sum_of_held
from maxbatch.model.experts.travel import sum_over_axis

_DEVICES, _EXPERTS, _TOKENS, _K, _WIDTH, _HIDDEN = 4, 8, 128, 2, 8, 16
_CHOICES = {
    "as many for each": np.arange(_TOKENS * _K) % _EXPERTS,
    "at random": np.random.default_rng(0).integers(0, _EXPERTS, _TOKENS * _K),
    "all to one": np.full(_TOKENS * _K, 5),
    "some to none": np.where(np.arange(_TOKENS * _K) % 3 == 0, _EXPERTS, np.arange(_TOKENS * _K) % 5),
    "all to none": np.full(_TOKENS * _K, _EXPERTS),
}


@pytest.fixture(scope="module")
def sums():
    """Two functions of (choices, tokens, shares, weights) to the sums and all their gradients: one device, and four.

    The one computes as a GPU does, where the shares stand before the last product.
    """
    compute = _computed_by(lambda gate, up: _gated(gate, up, activation=jax.nn.silu), "cpu")

    elsewhere = _computed_by(lambda gate, up: _gated(gate, up, activation=jax.nn.silu), "gpu")

    def on_one(experts, x, shares, *weights):
        return _sum_of_held(x, experts, shares, *weights, axis=None, compute=elsewhere)

    mesh = Mesh(np.array(jax.devices()[:_DEVICES]), ("expert",))

    def here(experts, x, shares, *weights):
        return sum_over_axis(
            x, experts, shares, *weights, num_experts=_EXPERTS, axis="expert", mesh=mesh, compute=compute
        )

    split = PartitionSpec("expert")
    on_four = jax.shard_map(here, mesh=mesh, in_specs=(split,) * 6, out_specs=split, check_vma=False)

    def with_gradients(function):
        def loss(experts, *arrays):
            y = function(experts, *arrays)
            return jnp.sum(jnp.sin(y)), y

        return jax.jit(jax.grad(loss, argnums=(1, 2, 3, 4, 5), has_aux=True))

    return with_gradients(on_one), with_gradients(on_four)


@pytest.mark.parametrize("choices", _CHOICES)
def test_however_uneven_the_choices_are_nothing_is_dropped(sums, choices):
    """The fullest pair of devices needs up to three rounds; the sums and their gradients are those of one device."""
    rng = np.random.default_rng(1)
    shapes = (_TOKENS, _WIDTH), (_TOKENS * _K,), *((_EXPERTS, _WIDTH, _HIDDEN),) * 2, (_EXPERTS, _HIDDEN, _WIDTH)
    arrays = [0.4 * rng.standard_normal(shape, dtype=np.float32) for shape in shapes]
    experts = jnp.asarray(_CHOICES[choices], jnp.int32)
    expected, got = (of(experts, *arrays) for of in sums)
    for one, four in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(four, one, rtol=1e-5, atol=1e-5)
    assert bool(np.any(np.asarray(expected[1]))) == (choices != "all to none")


def test_a_device_may_have_fewer_choices_than_there_are_devices(sums):
    """As in sampling, where it has one token of a row."""
    rng = np.random.default_rng(2)
    shapes = (_DEVICES, _WIDTH), (_DEVICES,), *((_EXPERTS, _WIDTH, _HIDDEN),) * 2, (_EXPERTS, _HIDDEN, _WIDTH)
    arrays = [0.4 * rng.standard_normal(shape, dtype=np.float32) for shape in shapes]
    expected, got = (of(jnp.asarray([7, 7, 0, 3], jnp.int32), *arrays)[1] for of in sums)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
