"""Tokens that travel to experts on other devices come back as if the experts were here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from maxbatch.model.experts.experts import computed_by, gated, sum_of_held
from maxbatch.model.experts.travel import sum_over_axis

_DEVICES, _EXPERTS, _TOKENS, _K, _WIDTH, _HIDDEN = 4, 8, 128, 2, 8, 16
_CHOICES = {
    "as many for each": np.arange(_TOKENS * _K) % _EXPERTS,
    "at random": np.random.default_rng(0).integers(0, _EXPERTS, _TOKENS * _K),
    "all to one": np.full(_TOKENS * _K, 5),
    "some to none": np.where(
        np.arange(_TOKENS * _K) % 3 == 0, _EXPERTS, np.arange(_TOKENS * _K) % 5
    ),
    "all to none": np.full(_TOKENS * _K, _EXPERTS),
}


@pytest.fixture(scope="module")
def functions():
    """Functions of (choices, tokens, shares, weights) to the sums, by where they run.

    The first computes on one device, in the form of a CPU, where the shares stand behind the last
    product. The others split the experts over four devices; in the form of a CPU, and in that of
    accelerators with each expert's width split too.
    """
    cpu, elsewhere = (
        computed_by(lambda gate, up: gated(gate, up, activation=jax.nn.silu), platform)
        for platform in ("cpu", "gpu")
    )

    def on_one(experts, x, shares, *weights):
        return sum_of_held(x, experts, shares, *weights, axis=None, compute=cpu)

    def split_over(mesh, compute, tensor):
        def here(experts, x, shares, *weights):
            y = sum_over_axis(
                x,
                experts,
                shares,
                *weights,
                num_experts=_EXPERTS,
                axis="expert",
                mesh=mesh,
                compute=compute,
            )
            return jax.lax.psum(y, tensor) if tensor else y

        rows, into, out_of = P("expert"), P("expert", None, tensor), P("expert", tensor)
        specs = (rows, rows, rows, into, into, out_of)
        return jax.shard_map(here, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=False)

    four = Mesh(np.array(jax.devices()[:_DEVICES]), ("expert",))
    eight = Mesh(np.array(jax.devices()[: 2 * _DEVICES]).reshape(_DEVICES, 2), ("expert", "tensor"))
    return {
        "one": on_one,
        "four": split_over(four, cpu, None),
        "widths split too": split_over(eight, elsewhere, "tensor"),
    }


@pytest.fixture(scope="module")
def sums(functions):
    """The same, to the sums and all their gradients."""

    def with_gradients(function):
        def loss(experts, *arrays):
            y = function(experts, *arrays)
            return jnp.sum(jnp.sin(y)), y

        return jax.jit(jax.grad(loss, argnums=(1, 2, 3, 4, 5), has_aux=True))

    return {name: with_gradients(function) for name, function in functions.items()}


@pytest.mark.runs
@pytest.mark.parametrize("choices", _CHOICES)
def test_however_uneven_the_choices_are_nothing_is_dropped(sums, choices):
    """The fullest pair of devices needs up to three rounds; sums and gradients equal one
    device's.
    """
    rng = np.random.default_rng(1)
    shapes = (
        (_TOKENS, _WIDTH),
        (_TOKENS * _K,),
        *((_EXPERTS, _WIDTH, _HIDDEN),) * 2,
        (_EXPERTS, _HIDDEN, _WIDTH),
    )
    arrays = [0.4 * rng.standard_normal(shape, dtype=np.float32) for shape in shapes]
    experts = jnp.asarray(_CHOICES[choices], jnp.int32)
    expected = sums["one"](experts, *arrays)
    for name in ("four", "widths split too"):
        for one, split in zip(
            jax.tree.leaves(expected), jax.tree.leaves(sums[name](experts, *arrays)), strict=True
        ):
            np.testing.assert_allclose(split, one, rtol=1e-5, atol=1e-5)
    assert bool(np.any(np.asarray(expected[1]))) == (choices != "all to none")


def test_a_device_may_have_fewer_choices_than_there_are_devices(functions):
    """As in sampling, where it has one token of a row."""
    rng = np.random.default_rng(2)
    shapes = (
        (_DEVICES, _WIDTH),
        (_DEVICES,),
        *((_EXPERTS, _WIDTH, _HIDDEN),) * 2,
        (_EXPERTS, _HIDDEN, _WIDTH),
    )
    arrays = [0.4 * rng.standard_normal(shape, dtype=np.float32) for shape in shapes]
    experts = jnp.asarray([7, 7, 0, 3], jnp.int32)
    expected, got = (jax.jit(functions[name])(experts, *arrays) for name in ("one", "four"))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
