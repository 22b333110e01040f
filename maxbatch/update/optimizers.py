"""Optimizers by name, built from optax: a direction, decoupled weight decay, the learning rate.

The learning rate is an argument of the step, not part of an optimizer. Optimizers that use a
parameter's shape get each layer separately, although layers are stacked.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from maxbatch.config.combined import ModelOptimizerConfig
from maxbatch.config.values import in_brackets
from maxbatch.families.matrices import MATRICES
from maxbatch.families.parameter import DENSE_LAYERS, LAST_LAYERS, LAYERS
from maxbatch.parallel.trees import KeyPath, Tree
from maxbatch.plan.update_settings import UpdateSettings
from maxbatch.system.errors import ConfigError
from maxbatch.update.searched_paths import searched_paths


class OptimizerMaker(Protocol):
    """A function that makes a user's optimizer for one update; all share the form of the state."""

    def __call__(self, learning_rate: float | jax.Array, /) -> optax.GradientTransformation:
        """Returns the optimizer for an update's learning rate, a float32 scalar inside the
        program.
        """


def make_optimizer(
    config: ModelOptimizerConfig,
    settings: UpdateSettings,
    has_experts: bool = False,
    own_optimizer: OptimizerMaker | None = None,
    decays: Callable[[Tree], Tree] | None = None,
) -> optax.GradientTransformation:
    """Makes the optimizer of `opt_type`, or a user's, with one update's settings.

    update = -learning_rate * (direction + adam_weight_decay * parameter) (Loshchilov and Hutter
    2019, https://arxiv.org/abs/1711.05101). Matrices alone decay, or the parameters that
    `adamw_mask` leaves. The directions have one scale, so a learning rate for adamw is a first
    guess for muon and adafactor; lion needs a 3 to 10 times smaller one.

    Args:
      settings: the update's settings. They are not in the state, so make one optimizer inside the
        step for its update, and one with any settings (`AT_REST`) for `init`.
      has_experts: whether some matrices are stacked by layer and by expert.
      own_optimizer: makes a user's optimizer, which replaces `opt_type` and its constants.
      decays: returns whether each parameter of a tree decays; None: as the config states.

    Returns:
      A transformation of averaged and clipped gradients. Every array of the state, except counts,
      halvings and Muon's coefficients, belongs to one parameter; stacked layers have stacked state.

    Raises:
      ConfigError: there is no optimizer of that name.
    """
    if own_optimizer is not None:
        return _with_standard_promotion(own_optimizer(settings.learning_rate))
    if config.opt_type not in DIRECTIONS:
        raise ConfigError(
            f"opt_type={config.opt_type!r} is not one of {', '.join(DIRECTIONS)}; works: "
            "opt_type=adamw"
        )
    if config.adam_b1 is None or config.adam_b2 is None:
        direction = _with_half_lives(config, settings, has_experts)
    elif config.adam_scaling == "sde":
        direction = _adam_by_sde(config, config.adam_b1, config.adam_b2, settings.batch_ratio)
    else:
        direction = _direction(config, config.adam_b1, config.adam_b2, has_experts)

    decay = (
        settings.adam_weight_decay if config.adam_weight_decay is None else config.adam_weight_decay
    )
    return _with_standard_promotion(
        optax.chain(
            direction,
            _decayed(config, decay, decays or partial(is_decayed, config)),
            optax.scale_by_learning_rate(settings.learning_rate),
        )
    )


AT_REST = UpdateSettings(0.0)


def _decayed(
    config: ModelOptimizerConfig, decay: jax.typing.ArrayLike, decays: Callable[[Tree], Tree]
) -> optax.GradientTransformation:
    """Adds the weight decay of each parameter; Muon's matrices may have one of their own."""
    if config.opt_type != "muon" or config.muon_weight_decay is None:
        return optax.add_decayed_weights(decay, mask=decays)

    def of_muon(parameters: Tree, is_muons: bool) -> Tree:
        return jax.tree.map(
            lambda a, b: a and b == is_muons, decays(parameters), _is_muons(parameters)
        )

    return optax.chain(
        optax.add_decayed_weights(decay, mask=partial(of_muon, is_muons=False)),
        optax.add_decayed_weights(config.muon_weight_decay, mask=partial(of_muon, is_muons=True)),
    )


class HalvedState(NamedTuple):
    """State of a direction with decays per token."""

    # float32[2], per moment over all applied updates: their decays' product is 2^-halvings
    halvings: jax.Array
    direction: optax.OptState


def _with_half_lives(
    config: ModelOptimizerConfig, settings: UpdateSettings, has_experts: bool
) -> optax.GradientTransformation:
    """Makes a direction whose moments halve in the stated tokens at any batch.

    The bias correction of the moments uses the product of the applied decays. Reference for
    half-lives in tokens: Marek et al. 2025 (https://arxiv.org/abs/2507.07101).
    """
    halvings = jnp.stack(
        [
            jnp.asarray(x, jnp.float32)
            for x in (settings.adam_b1_halvings, settings.adam_b2_halvings)
        ]
    )
    b1, b2 = jnp.exp2(-halvings)

    def init(parameters: Tree) -> HalvedState:
        direction = _directed(config, b1, b2, halvings, halvings, has_experts)
        return HalvedState(jnp.zeros(2, jnp.float32), direction.init(parameters))

    def update(
        gradients: Tree, state: HalvedState, parameters: Tree = None
    ) -> tuple[Tree, HalvedState]:
        total = state.halvings + halvings
        direction = _directed(config, b1, b2, halvings, total, has_experts)
        updates, after = direction.update(gradients, state.direction, parameters)
        return updates, HalvedState(total, optax.tree.cast_like(after, state.direction))

    return optax.GradientTransformation(init, update)


def _directed(
    config: ModelOptimizerConfig,
    b1: jax.Array,
    b2: jax.Array,
    halvings: jax.Array,
    total: jax.Array,
    has_experts: bool,
) -> optax.GradientTransformation:
    """Returns `opt_type`'s direction for an update of `halvings` per moment, `total` including
    previous updates.
    """
    if config.opt_type == "adamw":
        return _adam_after(config, halvings, total)
    direction = _direction(config, b1, b2, has_experts)
    if config.opt_type != "muon":
        return direction

    adam = _adam_after(config, halvings, total, nesterov=True)  # like Adam in optax.contrib.muon
    # Muon corrects by b1 to the power of its count; a count of updates of this length gives the
    # product.
    count = total[0] / halvings[0] - 1.0
    counted = optax.GradientTransformation(
        lambda parameters: optax.tree.set(direction.init(parameters), count=jnp.float32(0)),
        lambda gradients, state, parameters: direction.update(
            gradients, optax.tree.set(state, count=count), parameters
        ),
    )
    return optax.partition({True: counted, False: adam}, _is_muons)


def _adam_after(
    config: ModelOptimizerConfig, halvings: jax.Array, total: jax.Array, nesterov: bool = False
) -> optax.GradientTransformation:
    """Makes Adam for an update of `halvings` per moment, `total` including previous updates.

    Nesterov's momentum is optax's (Dozat 2016), which assumes the same decay for the next update.
    """

    def lost(halvings: jax.Array) -> jax.Array:
        """Returns 1 - 2^-halvings without cancellation."""
        return -jnp.expm1(-math.log(2) * halvings)

    new, known = lost(halvings), lost(total)

    def first_moment(mu: jax.Array, gradient: jax.Array) -> jax.Array:
        if not nesterov:
            return mu / known[0]
        return (
            jnp.exp2(-halvings[0]) * mu / lost(total[0] + halvings[0])
            + new[0] * gradient / known[0]
        )

    def update(
        gradients: Tree, state: optax.ScaleByAdamState, parameters: Tree = None
    ) -> tuple[Tree, optax.ScaleByAdamState]:
        del parameters
        mu = jax.tree.map(lambda m, g: m + new[0] * (g - m), state.mu, gradients)
        nu = jax.tree.map(lambda v, g: v + new[1] * (g * g - v), state.nu, gradients)
        roots = jax.tree.map(lambda v: _root(config, v / known[1]) + config.adam_eps, nu)
        directions = jax.tree.map(
            lambda m, g, root: first_moment(m, g) / root, mu, gradients, roots
        )
        return directions, optax.ScaleByAdamState(state.count + 1, mu, nu)

    return optax.GradientTransformation(optax.scale_by_adam(mu_dtype=config.mu_dtype).init, update)


def _root(config: ModelOptimizerConfig, second_moment: jax.Array) -> jax.Array:
    """Returns the root of a second moment, with `adam_eps_root` under it."""
    return (
        jnp.sqrt(second_moment + config.adam_eps_root)
        if config.adam_eps_root
        else jnp.sqrt(second_moment)
    )


def _adam(
    config: ModelOptimizerConfig, b1: jax.typing.ArrayLike, b2: jax.typing.ArrayLike
) -> optax.GradientTransformation:
    """Makes Adam (Kingma and Ba 2015, https://arxiv.org/abs/1412.6980): 8 bytes of state per
    float32 parameter.
    """
    return optax.scale_by_adam(b1, b2, config.adam_eps, config.adam_eps_root, config.mu_dtype)


def _adam_by_sde(
    config: ModelOptimizerConfig, b1: float, b2: float, batch_ratio: jax.typing.ArrayLike
) -> optax.GradientTransformation:
    """Makes Adam whose moments span the same samples at any batch: the square root rule of Malladi
    et al. 2022.

    At k times the batch (https://arxiv.org/abs/2205.10287, definition 4): rate x sqrt(k), which is
    `learning_rate_scaling`'s, 1 - beta x k, epsilon / sqrt(k). The bias correction applies the
    current betas to all updates, so it is approximate for some 1 / (1 - beta) updates after a
    change.
    """
    k = jnp.asarray(batch_ratio, jnp.float32)
    return optax.scale_by_adam(
        1 - k * (1 - b1),
        1 - k * (1 - b2),
        config.adam_eps / jnp.sqrt(k),
        config.adam_eps_root,
        config.mu_dtype,
    )


def _lion(
    config: ModelOptimizerConfig, b1: jax.typing.ArrayLike, b2: jax.typing.ArrayLike
) -> optax.GradientTransformation:
    """Makes Lion (Chen et al. 2023, https://arxiv.org/abs/2302.06675): 4 bytes; without
    `adam_eps`.
    """
    return optax.scale_by_lion(b1, b2)


def _adafactor(
    config: ModelOptimizerConfig,
    b1: jax.typing.ArrayLike,
    b2: jax.typing.ArrayLike,
    has_experts: bool = False,
) -> optax.GradientTransformation:
    """Makes Adafactor (Shazeer and Stern 2018, https://arxiv.org/abs/1804.04235) as in Zhai et al.
    2021.

    That is (https://arxiv.org/abs/2106.04560, section 3.4): steps not scaled by the parameter, a
    momentum (`adam_b1`) in bfloat16, left out where it is 0, and a second moment whose decay grows
    to `adam_b2` at most. `adam_eps` squared is added to the squared gradient. 2 bytes, and two
    vectors, per matrix.
    """

    def decay(step: jax.Array, exponent: float) -> jax.Array:
        return jnp.minimum(1.0 - (step + 1.0) ** -exponent, b2)

    momentum = optax.ema(b1, debias=False, accumulator_dtype=jnp.bfloat16)
    one_layer = optax.chain(
        optax.scale_by_factored_rms(epsilon=config.adam_eps**2, decay_rate_fn=decay),
        optax.clip_by_block_rms(1.0),
        optax.identity() if config.adam_b1 == 0 else momentum,
    )
    by_layer = _one_by_one(one_layer)
    # names in checkpoints
    groups: dict[int, optax.GradientTransformation] = {False: one_layer, True: by_layer}
    if not has_experts:
        return optax.partition(
            groups, lambda parameters: jax.tree.map(bool, _num_stacked(parameters))
        )
    groups[2] = _one_by_one(by_layer)
    return optax.partition(groups, _num_stacked)


def _muon(
    config: ModelOptimizerConfig, b1: jax.typing.ArrayLike, b2: jax.typing.ArrayLike
) -> optax.GradientTransformation:
    """Makes Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon), momentum
    `muon_beta`; Adam elsewhere.

    Scaled to Adam's usual root mean square, 0.2 (Liu et al. 2025,
    https://arxiv.org/abs/2502.16982), or as `muon_consistent_rms` states. 4 bytes per parameter, 8
    where Adam works.
    """
    muon = optax.contrib.muon(
        1.0,
        beta=b1 if config.muon_beta is None else config.muon_beta,
        eps=config.adam_eps,
        mu_dtype=config.mu_dtype,
        adam_eps_root=config.adam_eps_root,
        adam_b1=b1,
        adam_b2=b2,
        muon_weight_dimension_numbers=_muon_matrices,
        consistent_rms=config.muon_consistent_rms,
    )
    # Its output is a descent step at rate 1; negate it to get a direction.
    return optax.chain(muon, optax.scale(-1.0))


def _sgd(
    config: ModelOptimizerConfig, b1: jax.typing.ArrayLike, b2: jax.typing.ArrayLike
) -> optax.GradientTransformation:
    """Makes SGD with momentum `adam_b1` (Sutskever et al. 2013): 4 bytes, without `adam_b2` and
    `adam_eps`.
    """
    return optax.trace(b1)


DIRECTIONS: dict[
    str,
    Callable[
        [ModelOptimizerConfig, jax.typing.ArrayLike, jax.typing.ArrayLike],
        optax.GradientTransformation,
    ],
] = {"adamw": _adam, "lion": _lion, "adafactor": _adafactor, "muon": _muon, "sgd": _sgd}


def _direction(
    config: ModelOptimizerConfig,
    b1: jax.typing.ArrayLike,
    b2: jax.typing.ArrayLike,
    has_experts: bool,
) -> optax.GradientTransformation:
    if config.opt_type == "adafactor":  # only its state depends on it
        return _adafactor(config, b1, b2, has_experts)
    return DIRECTIONS[config.opt_type](config, b1, b2)


def _names(path: KeyPath) -> list[object]:
    return [getattr(entry, "key", None) for entry in path]


def _in_stack(path: KeyPath) -> bool:
    """Returns whether a parameter has a leading axis of layers; not in a user's list of layers
    (`layers`, 0, ...).
    """
    names = _names(path)
    if DENSE_LAYERS in names or LAST_LAYERS in names:
        return True
    return LAYERS in names[:-1] and not isinstance(names[names.index(LAYERS) + 1], int)


def _num_stacked(parameters: Tree) -> Tree:
    """Returns each parameter's number of leading axes for layers, or layers and experts."""

    def count(path: KeyPath, value: jax.Array) -> int:
        rows = [MATRICES[str(name)] for name in _names(path) if name in MATRICES]
        is_expert = any(row.per_expert and value.ndim == 1 + len(row.axes) for row in rows)
        return _in_stack(path) * (1 + is_expert)

    return jax.tree.map_with_path(count, parameters)


def is_decayed(config: ModelOptimizerConfig, parameters: Tree) -> Tree:
    """Returns whether each parameter has weight decay: matrices, or those whose paths no pattern is
    found in.
    """
    if config.adamw_mask is None:
        return _is_matrix(parameters)
    patterns = [re.compile(pattern) for pattern in in_brackets(config.adamw_mask)]

    def is_unmasked(path: KeyPath, _: jax.Array) -> bool:
        texts = searched_paths(
            [str(name) for name in _names(path) if name is not None], config.decoder_block
        )
        return not any(pattern.search(text) for pattern in patterns for text in texts)

    return jax.tree.map_with_path(is_unmasked, parameters)


def _is_matrix(parameters: Tree) -> Tree:
    """Returns whether each parameter, stacked or not, is a matrix rather than a vector (norm
    scales, biases).

    Biases of heads have two axes.
    """

    def is_matrix(path: KeyPath, value: jax.Array) -> bool:
        is_vector = any(str(name).endswith(("scale", "bias")) for name in _names(path))
        return not is_vector and value.ndim - _in_stack(path) > 1

    return jax.tree.map_with_path(is_matrix, parameters)


def _muon_matrices(parameters: Tree) -> Tree:
    """Returns a tree of dimension numbers; None for Adam's parameters."""

    def dimension_numbers(
        path: KeyPath, value: jax.Array
    ) -> optax.contrib.MuonDimensionNumbers | None:
        for name in _names(path):
            # A user's parameter with such a name may have another rank.
            if name in MATRICES and len(MATRICES[name].axes) + _in_stack(path) == value.ndim:
                inputs, outputs = (
                    tuple(i + _in_stack(path) for i in axes) for axes in MATRICES[name].groups
                )
                return optax.contrib.MuonDimensionNumbers(inputs, outputs)
        return None

    return jax.tree.map_with_path(dimension_numbers, parameters)


def _is_muons(parameters: Tree) -> Tree:
    """Returns whether Muon, rather than Adam, updates each parameter."""

    def is_leaf(numbers: object) -> bool:
        return numbers is None or isinstance(numbers, optax.contrib.MuonDimensionNumbers)

    return jax.tree.map(
        lambda numbers: numbers is not None, _muon_matrices(parameters), is_leaf=is_leaf
    )


def _one_by_one(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Maps an optimizer over the first axis of parameters, gradients and state, if there are
    any.
    """

    # vmap refuses a tree without arrays, as that of a group of no parameters.
    def mapped(function: Callable[..., object], tree: Tree) -> Callable[..., object]:
        return jax.vmap(function) if jax.tree.leaves(tree) else function

    return optax.GradientTransformation(
        lambda parameters: mapped(optimizer.init, parameters)(parameters),
        lambda gradients, *others: mapped(optimizer.update, gradients)(gradients, *others),
    )


def _with_standard_promotion(
    optimizer: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """Lets optax mix counts and rates with other dtypes, even where implicit promotion is off."""

    def init(parameters: Tree) -> Tree:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return optimizer.init(parameters)

    def update(gradients: Tree, state: Tree, parameters: Tree = None) -> tuple[Tree, Tree]:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            updates, state = optimizer.update(gradients, state, parameters)
        return optax.tree.cast_like(updates, gradients), state

    return optax.GradientTransformation(init, update)
