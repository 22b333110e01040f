"""The optimizers, by name, from optax: a direction, decoupled weight decay, the learning rate.

None of them holds the learning rate; it is an argument of the step. Those that look at the shape of a parameter see
each layer by itself, though layers are stacked.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from maxbatch.config.matrices import MATRICES
from maxbatch.config.sections import OptimizerConfig
from maxbatch.parallel.trees import KeyPath, Tree
from maxbatch.system.errors import ConfigError


def make_optimizer(
    config: OptimizerConfig, learning_rate: jax.typing.ArrayLike, batch_ratio: jax.typing.ArrayLike = 1.0
) -> optax.GradientTransformation:
    """Returns the optimizer that `opt_type` names, at one update's learning rate and batch.

    update = -learning_rate * (direction + adam_weight_decay * parameter), the decay on matrices only (Loshchilov and
    Hutter 2019, https://arxiv.org/abs/1711.05101). The directions have one scale, so a learning rate for adamw is a
    first guess for muon and adafactor; lion needs a 3 to 10 times smaller one.

    Args:
      config: the optimizer and its constants.
      learning_rate: a scalar, traced or not. It is no part of the state, so make one optimizer inside the step for
        its update, and one with any rate for `init`.
      batch_ratio: the update's batch over the reference batch, which `adam_scaling=sde` goes by.

    Returns:
      A transformation of gradients that are already averaged and clipped. Of the state, every array but counts
      and Muon's coefficients belongs to one parameter; stacked layers have stacked state.

    Raises:
      ConfigError: there is no optimizer of that name.
    """
    if config.opt_type not in DIRECTIONS:
        raise ConfigError(f"opt_type={config.opt_type!r} is not one of {', '.join(DIRECTIONS)}; works: adamw")
    by_sde = config.adam_scaling == "sde"
    return _with_standard_promotion(
        optax.chain(
            _adam_by_sde(config, batch_ratio) if by_sde else DIRECTIONS[config.opt_type](config),
            optax.add_decayed_weights(config.adam_weight_decay, mask=_is_matrix),
            optax.scale_by_learning_rate(learning_rate),
        )
    )


def _adam(config: OptimizerConfig) -> optax.GradientTransformation:
    """Makes Adam (Kingma and Ba 2015, https://arxiv.org/abs/1412.6980): 8 bytes of state per float32 parameter."""
    return optax.scale_by_adam(config.adam_b1, config.adam_b2, config.adam_eps)


def _adam_by_sde(config: OptimizerConfig, batch_ratio: jax.typing.ArrayLike) -> optax.GradientTransformation:
    """Makes Adam whose moments span the same samples at any batch: the square root rule of Malladi et al. 2022.

    At k times the batch (https://arxiv.org/abs/2205.10287, definition 4): rate x sqrt(k), which is
    `learning_rate_scaling`'s, 1 - beta x k, epsilon / sqrt(k). The correction of the moments' bias takes the betas of
    the update for those of all updates, so for some 1 / (1 - beta) updates after a change it is approximate.
    """
    k = jnp.asarray(batch_ratio, jnp.float32)
    return optax.scale_by_adam(
        1 - k * (1 - config.adam_b1), 1 - k * (1 - config.adam_b2), config.adam_eps / jnp.sqrt(k)
    )


def _lion(config: OptimizerConfig) -> optax.GradientTransformation:
    """Makes Lion (Chen et al. 2023, https://arxiv.org/abs/2302.06675): 4 bytes; `adam_eps` has no place in it."""
    return optax.scale_by_lion(config.adam_b1, config.adam_b2)


def _adafactor(config: OptimizerConfig) -> optax.GradientTransformation:
    """Makes Adafactor (Shazeer and Stern 2018, https://arxiv.org/abs/1804.04235) as in Zhai et al. 2021.

    That is (https://arxiv.org/abs/2106.04560, section 3.4): steps not scaled by the parameter, a momentum
    (`adam_b1`) in bfloat16, left out where it is 0, and a second moment whose decay grows to `adam_b2` at most.
    `adam_eps` squared is added to the squared gradient. 2 bytes, and two vectors, per matrix.
    """

    def decay(step: jax.Array, exponent: float) -> jax.Array:
        return jnp.minimum(1.0 - (step + 1.0) ** -exponent, config.adam_b2)

    momentum = optax.ema(config.adam_b1, debias=False, accumulator_dtype=jnp.bfloat16)
    one_layer = optax.chain(
        optax.scale_by_factored_rms(epsilon=config.adam_eps**2, decay_rate_fn=decay),
        optax.clip_by_block_rms(1.0),
        momentum if config.adam_b1 else optax.identity(),
    )
    by_layer = _one_by_one(one_layer)
    return optax.partition({0: one_layer, 1: by_layer, 2: _one_by_one(by_layer)}, _num_stacked)


def _muon(config: OptimizerConfig) -> optax.GradientTransformation:
    """Makes Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon), momentum `adam_b1`; Adam elsewhere.

    Scaled to Adam's usual root mean square, 0.2 (Liu et al. 2025, https://arxiv.org/abs/2502.16982). 4 bytes per
    parameter, 8 where Adam works.
    """
    muon = optax.contrib.muon(
        1.0,
        beta=config.adam_b1,
        eps=config.adam_eps,
        adam_b1=config.adam_b1,
        adam_b2=config.adam_b2,
        muon_weight_dimension_numbers=_muon_matrices,
        consistent_rms=0.2,
    )
    # Its output is a step downhill at rate 1; negated it is a direction.
    return optax.chain(muon, optax.scale(-1.0))


def _sgd(config: OptimizerConfig) -> optax.GradientTransformation:
    """Makes SGD with momentum `adam_b1` (Sutskever et al. 2013): 4 bytes, without `adam_b2` and `adam_eps`."""
    return optax.trace(config.adam_b1)


DIRECTIONS: dict[str, Callable[[OptimizerConfig], optax.GradientTransformation]] = {
    "adamw": _adam,
    "lion": _lion,
    "adafactor": _adafactor,
    "muon": _muon,
    "sgd": _sgd,
}


def _names(path: KeyPath) -> list[object]:
    return [getattr(entry, "key", None) for entry in path]


def _in_stack(path: KeyPath) -> bool:
    """Returns whether a parameter has a leading axis of layers; a user's list of layers (`layers`, 0, ...) has none."""
    names = _names(path)
    return "layers" in names[:-1] and not isinstance(names[names.index("layers") + 1], int)


def _num_stacked(parameters: Tree) -> Tree:
    """Returns how many axes of each parameter count layers, or layers and experts."""

    def count(path: KeyPath, value: jax.Array) -> int:
        rows = [MATRICES[str(name)] for name in _names(path) if name in MATRICES]
        is_expert = any(row.per_expert and value.ndim == 1 + len(row.axes) for row in rows)
        return _in_stack(path) * (1 + is_expert)

    return jax.tree.map_with_path(count, parameters)


def _is_matrix(parameters: Tree) -> Tree:
    """Returns whether each parameter, stacked or not, is a matrix and not a vector (norm scales, biases).

    Those of the heads have two axes.
    """

    def is_matrix(path: KeyPath, value: jax.Array) -> bool:
        is_vector = any(str(name).endswith(("scale", "bias")) for name in _names(path))
        return not is_vector and value.ndim - _in_stack(path) > 1

    return jax.tree.map_with_path(is_matrix, parameters)


def _muon_matrices(parameters: Tree) -> Tree:
    """Returns a tree of dimension numbers; None where Adam takes the parameter."""

    def dimension_numbers(path: KeyPath, value: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
        for name in _names(path):
            # A user's parameter of that name may have another rank.
            if name in MATRICES and len(MATRICES[name].axes) + _in_stack(path) == value.ndim:
                inputs, outputs = (tuple(i + _in_stack(path) for i in axes) for axes in MATRICES[name].groups)
                return optax.contrib.MuonDimensionNumbers(inputs, outputs)
        return None

    return jax.tree.map_with_path(dimension_numbers, parameters)


def _one_by_one(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Maps an optimizer over the first axis of parameters, gradients and state, where there are any."""

    def mapped(function: Callable[..., object], tree: Tree) -> Callable[..., object]:
        return jax.vmap(function) if jax.tree.leaves(tree) else function

    return optax.GradientTransformation(
        lambda parameters: mapped(optimizer.init, parameters)(parameters),
        lambda gradients, *others: mapped(optimizer.update, gradients)(gradients, *others),
    )


def _with_standard_promotion(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Lets optax mix counts and rates into other dtypes, also where the program around it promotes nothing."""

    def init(parameters: Tree) -> Tree:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return optimizer.init(parameters)

    def update(gradients: Tree, state: Tree, parameters: Tree = None) -> tuple[Tree, Tree]:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            updates, state = optimizer.update(gradients, state, parameters)
        return optax.tree.cast_like(updates, gradients), state

    return optax.GradientTransformation(init, update)
