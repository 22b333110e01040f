"""Each optimizer trains, sees each layer by itself, and holds no learning rate."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from maxbatch import load_config
from maxbatch.config.combined import DecoderConfig
from maxbatch.config.config import Config
from maxbatch.model.decoder import Decoder
from maxbatch.plan.update_settings import UpdateSettings
from maxbatch.system.errors import ConfigError
from maxbatch.update.optimizers import AT_REST, DIRECTIONS, make_optimizer
from tests.helpers.tiny import TINY_MODEL

NUM_LAYERS = 2
ALL = sorted(DIRECTIONS)


def optimizer_config(opt_type: str, *overrides: str) -> Config:
    sizes = ("base_emb_dim=128", "base_mlp_dim=160", f"base_num_decoder_layers={NUM_LAYERS}")
    return load_config(overrides=[*TINY_MODEL, *sizes, f"opt_type={opt_type}", *overrides])


def parameters_of(config: Config) -> nnx.State:
    return _parameters_of(config.decoder)


@partial(jax.jit, static_argnums=0)
def _parameters_of(config: DecoderConfig) -> nnx.State:
    return nnx.state(Decoder(config, rngs=nnx.Rngs(params=0)), nnx.Param)


@partial(jax.jit, static_argnums=1)
def random_like(tree: Any, seed: int) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    noise = [jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(treedef, noise)


def has_experts(parameters: Any) -> bool:
    return any(
        "expert_" in jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(parameters)
    )


@partial(jax.jit, static_argnums=0)
def state_of(opt: tuple[str, ...], parameters: Any) -> Any:
    return make_optimizer(optimizer_config(*opt).optimizer, AT_REST, has_experts(parameters)).init(
        parameters
    )


@partial(jax.jit, static_argnums=0)
def update_of(
    opt: tuple[str, ...], settings: UpdateSettings, gradient: Any, state: Any, parameters: Any
) -> tuple[Any, Any]:
    optimizer = make_optimizer(optimizer_config(*opt).optimizer, settings, has_experts(parameters))
    return optimizer.update(gradient, state, parameters)


@partial(jax.jit, static_argnums=0)
def updated(
    opt: tuple[str, ...], parameters: Any, state: Any, gradient: Any, learning_rate: Any
) -> tuple[Any, Any]:
    updates, state = update_of(opt, UpdateSettings(learning_rate), gradient, state, parameters)
    return optax.apply_updates(parameters, updates), state


def after_two_updates(opt: tuple[str, ...], parameters: Any, gradients: list[Any]) -> Any:
    state = state_of(opt, parameters)
    for gradient in gradients:
        parameters, state = updated(opt, parameters, state, gradient, jnp.float32(0.01))
    return parameters


def unstacked(tree: nnx.State) -> dict[str, Any]:
    """The same values as separate layers, under names that say nothing of a stack."""
    pure = nnx.to_pure_dict(tree)
    layers = pure.pop("layers")
    return pure | {
        f"layer_{i}": jax.tree.map(lambda x, i=i: x[i], layers) for i in range(NUM_LAYERS)
    }


@pytest.mark.runs
@pytest.mark.parametrize("opt_type", ALL)
def test_stacked_layers_are_updated_as_separate_ones(opt_type: str) -> None:
    parameters = parameters_of(optimizer_config(opt_type))
    gradients = [random_like(parameters, seed) for seed in (1, 2)]
    stacked = after_two_updates((opt_type,), parameters, gradients)
    separate = after_two_updates(
        (opt_type,), unstacked(parameters), [unstacked(g) for g in gradients]
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), unstacked(stacked), separate
    )


@pytest.mark.parametrize("opt_type", ALL)
def test_every_parameter_moves_and_a_toy_loss_falls(opt_type: str) -> None:
    parameters = parameters_of(optimizer_config(opt_type))
    target = random_like(parameters, 3)

    @jax.jit
    def loss(parameters: Any) -> jax.Array:
        return sum(
            0.5 * jnp.sum(jnp.square(a - b))
            for a, b in zip(jax.tree.leaves(parameters), jax.tree.leaves(target), strict=True)
        )

    moved, state, gradient = parameters, state_of((opt_type,), parameters), jax.jit(jax.grad(loss))
    for _ in range(5):
        moved, state = updated((opt_type,), moved, state, gradient(moved), jnp.float32(0.05))
    assert loss(moved) < 0.95 * loss(parameters)
    for a, b in zip(jax.tree.leaves(moved), jax.tree.leaves(parameters), strict=True):
        assert not np.array_equal(a, b)


@pytest.mark.parametrize("opt_type", ALL)
def test_weight_decay_is_decoupled_and_spares_norm_scales(opt_type: str) -> None:
    parameters = parameters_of(optimizer_config(opt_type))
    gradients = [random_like(parameters, 1)]
    with_decay, without = (
        after_two_updates((opt_type, f"adam_weight_decay={decay}"), parameters, gradients)
        for decay in (0.5, 0.0)
    )

    def check(path: Any, a: jax.Array, b: jax.Array, before: jax.Array) -> None:
        decay = 0.0 if "scale" in jax.tree_util.keystr(path) else 0.01 * 0.5
        np.testing.assert_allclose(b - a, decay * before, atol=1e-6)

    jax.tree.map_with_path(check, with_decay, without, parameters)


@pytest.mark.parametrize("opt_type", ALL)
def test_the_rate_is_an_argument_and_no_part_of_the_state(opt_type: str) -> None:
    parameters = parameters_of(optimizer_config(opt_type, "adam_weight_decay=0"))
    gradient, opt = random_like(parameters, 1), (opt_type, "adam_weight_decay=0")
    start = state_of(opt, parameters)
    one, state_one = updated(opt, parameters, start, gradient, jnp.float32(0.01))
    two, state_two = updated(opt, parameters, start, gradient, jnp.float32(0.02))
    jax.tree.map(np.testing.assert_array_equal, state_one, state_two)
    jax.tree.map(
        lambda a, b, p: np.testing.assert_allclose(b - p, 2 * (a - p), atol=1e-6),
        one,
        two,
        parameters,
    )
    assert jax.tree.structure(state_one) == jax.tree.structure(start)
    assert [x.shape for x in jax.tree.leaves(state_one)] == [
        x.shape for x in jax.tree.leaves(start)
    ]


@pytest.mark.parametrize(
    ("opt_type", "least", "most"),
    [("adamw", 8, 8), ("lion", 4, 4), ("sgd", 4, 4), ("muon", 4, 6), ("adafactor", 2, 4)],
)
def test_state_takes_the_promised_bytes_per_parameter(opt_type: str, least: int, most: int) -> None:
    config = optimizer_config(opt_type)
    parameters = jax.eval_shape(lambda: parameters_of(config))
    state = jax.eval_shape(make_optimizer(config.optimizer, AT_REST).init, parameters)
    size = sum(x.size for x in jax.tree.leaves(parameters))
    state_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    assert least * size <= state_bytes <= most * size + 64


def test_muon_orthogonalises_each_layers_matrices_and_nothing_else() -> None:
    opt = ("muon", "adam_weight_decay=0")
    parameters = parameters_of(optimizer_config(*opt))
    moved = after_two_updates(opt, parameters, [random_like(parameters, 1)])
    updates = nnx.to_pure_dict(jax.tree.map(lambda a, b: a - b, moved, parameters))
    layers = updates["layers"]
    matrices = {
        name: layers["attention"][name].reshape(NUM_LAYERS, 128, -1)
        for name in ("query", "key", "value")
    }
    matrices |= {"out": layers["attention"]["out"].reshape(NUM_LAYERS, -1, 128), **layers["mlp"]}
    for name, update in matrices.items():
        values = np.linalg.svd(update, compute_uv=False)
        assert values.max() / values.min() < 4, name
    embedding = np.linalg.svd(updates["embedding"], compute_uv=False)
    assert embedding.max() / embedding.min() > 4


@pytest.mark.runs
@pytest.mark.parametrize("opt_type", ["muon", "adafactor"])
def test_stacked_experts_are_updated_as_separate_matrices(opt_type: str) -> None:
    sizes = {"gate": (128, 136), "up": (128, 136), "down": (136, 128)}

    def numbers(seed: int) -> tuple[Any, Any]:
        """The matrices of 2 layers of 3 experts, stacked and each by itself."""
        rng = np.random.default_rng(seed)
        stacked = {
            name: rng.normal(size=(2, 3, *shape)).astype(np.float32)
            for name, shape in sizes.items()
        }
        places = [(layer, expert) for layer in range(2) for expert in range(3)]
        separate = {
            f"{place}": {name: array[place] for name, array in stacked.items()} for place in places
        }
        return {
            "layers": {"experts": {f"expert_{name}": array for name, array in stacked.items()}}
        }, separate

    (stacked, separate), *gradients = (numbers(seed) for seed in range(3))
    moved = after_two_updates((opt_type,), stacked, [both[0] for both in gradients])["layers"][
        "experts"
    ]
    expected = after_two_updates((opt_type,), separate, [both[1] for both in gradients])
    for place, matrices in expected.items():
        layer, expert = int(place[1]), int(place[4])
        for name, matrix in matrices.items():
            np.testing.assert_allclose(moved[f"expert_{name}"][layer, expert], matrix, atol=2e-6)


def test_a_model_without_experts_has_no_state_for_them() -> None:
    """Its checkpoints are those of before there were any."""
    config, value = optimizer_config("adafactor").optimizer, np.ones((2, 3, 128, 128), np.float32)
    # a user's may have such a name
    for parameters in ({"layers": {"up": value[0]}}, {"layers": {"expert_up": value}}):
        state = jax.eval_shape(make_optimizer(config, AT_REST).init, parameters)
        assert set(state[0].inner_states) == {False, True}


@pytest.mark.runs
def test_bfloat16_parameters_keep_their_dtype() -> None:
    for opt_type in ALL:
        opt = (opt_type, "weight_dtype=bfloat16")
        parameters = parameters_of(optimizer_config(*opt))
        moved = after_two_updates(opt, parameters, [random_like(parameters, 1)])
        assert {x.dtype for x in jax.tree.leaves(moved)} == {jnp.dtype("bfloat16")}


def test_an_unknown_name_is_refused() -> None:
    config = optimizer_config("adamw").optimizer.replaced({"opt_type": "adam"})
    with pytest.raises(ConfigError, match=r"opt_type='adam'.*adamw"):
        make_optimizer(config, UpdateSettings(0.1))


def test_adam_by_the_sde_rule_is_adam_with_the_rules_constants() -> None:
    """Four times the batch: 1 - beta times 4, epsilon halved (Malladi et al. 2022, definition
    4).
    """
    scaled = (
        "adamw",
        "adam_scaling=sde",
        "learning_rate_scaling=sqrt",
        "adam_b1=0.95",
        "adam_b2=0.99",
    )
    plain = ("adamw", "adam_b1=0.8", "adam_b2=0.96", "adam_eps=5e-9")
    gradients = [random_like(parameters_of(optimizer_config(*plain)), 1)] * 3
    found = updates_of(scaled, [UpdateSettings(0.1, 4.0)] * 3, gradients)[-1]
    expected = updates_of(plain, [UpdateSettings(0.1)] * 3, gradients)[-1]
    for ours, wanted in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=2e-5)


def updates_of(
    opt: tuple[str, ...], settings: list[UpdateSettings], gradients: list[Any]
) -> list[Any]:
    """Returns the updates of the first parameters by gradients, each with its settings."""
    parameters = parameters_of(optimizer_config(*opt))
    state, found = state_of(opt, parameters), []
    for own, gradient in zip(settings, gradients, strict=True):
        updates, state = update_of(opt, own, gradient, state, parameters)
        found.append(updates)
    return found


@pytest.mark.runs
@pytest.mark.parametrize("opt_type", ALL)
def test_with_one_batch_half_lives_are_decays(opt_type: str) -> None:
    """An update of 500 tokens and half-lives of 1,000 and 10,000: b1 = 2^-0.5, b2 = 2^-0.05."""
    gradients = [random_like(parameters_of(optimizer_config(opt_type)), seed) for seed in range(3)]
    settings = UpdateSettings(0.1, 1.0, 0.5, 0.05, 0.3)
    in_tokens = ("adam_b1_half_life=1000", "adam_b2_half_life=10Kt", "weight_decay_timescale=1Mt")
    per_update = (f"adam_b1={2**-0.5}", f"adam_b2={2**-0.05}", "adam_weight_decay=0.3")
    found = updates_of((opt_type, *in_tokens), [settings] * 3, gradients)
    wanted = updates_of((opt_type, *per_update), [settings] * 3, gradients)
    tolerance = 2e-3 if opt_type == "adafactor" else 2e-6  # of which the momentum is bfloat16
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=tolerance)


def test_the_correction_of_the_bias_goes_by_the_decays_that_were_applied() -> None:
    """Norm scales against float64; the second update has four times the batch."""
    stated = ("adamw", "adam_b1=0.8", "adam_b2_half_life=1Mt")
    gradients = [random_like(parameters_of(optimizer_config("adamw")), seed) for seed in range(3)]
    halvings = [0.001, 0.004, 0.002]
    settings = [UpdateSettings(1.0, 1.0, -float(np.log2(0.8)), x) for x in halvings]
    found = updates_of(stated, settings, gradients)
    m = v = np.zeros(())
    for index, own in enumerate(halvings):
        g = np.asarray(gradients[index]["final_norm"]["scale"], np.float64)
        m, v = 0.8 * m + 0.2 * g, 2**-own * v + (1 - 2**-own) * g * g
        wanted = -m / (1 - 0.8 ** (index + 1)) / np.sqrt(v / (1 - 2 ** -sum(halvings[: index + 1])))
        np.testing.assert_allclose(found[index]["final_norm"]["scale"], wanted, rtol=2e-5)
