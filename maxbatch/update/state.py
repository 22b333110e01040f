"""The state of training: parameters and optimizer state, created in shards.

Accumulation adds nothing to it. The position in the data is two Python integers beside it, since
32-bit counters overflow at 2.1 billion tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxbatch.config.combined import DecoderConfig, UpdateConfig
from maxbatch.families.parameter import LAYERS
from maxbatch.model.decoder import Decoder
from maxbatch.model.walk import LayerRunner
from maxbatch.parallel.sharding import Constrain, parameter_shardings, unconstrained
from maxbatch.parallel.trees import KeyPath, State
from maxbatch.system.errors import ConfigError
from maxbatch.update.balance import Balance, BalancedState, learned
from maxbatch.update.lora import adapters_of
from maxbatch.update.optimizers import AT_REST, OptimizerMaker, make_optimizer
from maxbatch.update.spikes import SpikeWindow, abstract_window, window_of


class ModelMaker(Protocol):
    """A function that makes a user's model, with `nnx.Param` variables only."""

    def __call__(self, *, rngs: nnx.Rngs) -> Any:
        """Returns a module that is called with tokens and segments, int32[M, L], and returns logits
        [M, L, V].
        """


class TrainState(NamedTuple):
    """Parameters (an `nnx.State` of `nnx.Param`) and the optimizer's state for them.

    With experts, the optimizer's state is a `BalancedState`. In a run with adapters, the parameters
    are the adapters, and `frozen` is their base model.
    """

    params: State
    opt_state: optax.OptState
    frozen: State | None = None  # not trained, and in no checkpoint
    average: State | None = None  # float32, of the parameters (`parameter_average_half_life`)
    # figures of the last updates (`skip_step_on_spikes`), in the position of checkpoints
    spikes: SpikeWindow | None = None

    @property
    def saved(self) -> TrainState:
        """The arrays in checkpoints."""
        return self._replace(frozen=None, spikes=None)

    @property
    def averaged(self) -> TrainState:
        """The state with averaged parameters in place of current ones, in the same types; itself
        without an average.
        """
        if self.average is None:
            return self
        return self._replace(
            params=jax.tree.map(lambda p, a: a.astype(p.dtype), self.params, self.average)
        )

    @property
    def model(self) -> State:
        """The model's parameters, without adapters."""
        return self.params if self.frozen is None else self.frozen


@jax.jit
def first_average(params: State) -> State:
    """Returns the initial average: a float32 copy of the parameters.

    Lower precision would round away the small steps of a long half-life.
    """
    average: State = jax.tree.map(lambda p: jnp.array(p, jnp.float32, copy=True), params)
    return average


def average_shapes(params: State) -> State:
    """Returns the shapes and shardings of an average of parameters."""
    shapes: State = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32, sharding=p.sharding), params
    )
    return shapes


def abstract_model(
    config: DecoderConfig,
    constrain: Constrain = unconstrained,
    layer_runner: LayerRunner | None = None,
    make_model: ModelMaker | None = None,
) -> tuple[nnx.GraphDef[nnx.Module], State]:
    """Returns the model's graph and its parameters' shapes, without allocation.

    Without `make_model`, the model is the config's `Decoder`. A user's model handles its
    activations and layers itself.

    Raises:
      ConfigError: a user's model has variables other than parameters.
    """

    def model() -> Any:
        if make_model is not None:
            return make_model(rngs=nnx.Rngs(0))
        return Decoder(config, rngs=nnx.Rngs(0), constrain=constrain, layer_runner=layer_runner)

    module = nnx.eval_shape(model)
    if make_model is not None:
        _, _, *others = nnx.split(module, nnx.Param, ...)
        kinds = {
            type(v).__name__
            for v in jax.tree.leaves(others, is_leaf=lambda x: isinstance(x, nnx.Variable))
        }
        if kinds:
            raise ConfigError(
                f"model: has variables of {', '.join(sorted(kinds))}, and an update depends on "
                "parameters (nnx.Param) and the batch alone; leave out dropout and running "
                "statistics"
            )
    return nnx.split(module, nnx.Param)


def with_layers(params: State, change: Callable[[jax.Array], jax.Array]) -> State:
    """Applies `change` to each stacked array of the layers, in parameters or gradients.

    The separate stack of first layers without experts is unchanged.
    """

    def changed(path: KeyPath, x: jax.Array) -> jax.Array:
        return change(x) if getattr(path[0], "key", None) == LAYERS else x

    state: State = jax.tree.map_with_path(changed, params)
    return state


def with_spike_window(
    state: TrainState, abstract: TrainState, losses: Sequence[float], grad_norms: Sequence[float]
) -> TrainState:
    """Returns the state with the figures of the last updates, if the run skips spikes."""
    if abstract.spikes is None:
        return state
    return state._replace(spikes=window_of(losses, grad_norms, abstract.spikes))


def num_parameters(params: State) -> int:
    """Returns the number of values in parameters or abstract shapes, over all devices."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def abstract_state(
    config: UpdateConfig,
    mesh: Mesh,
    make_model: ModelMaker | None = None,
    own_optimizer: OptimizerMaker | None = None,
) -> TrainState:
    """Returns the train state's shapes, dtypes and shardings, without allocation."""
    _, base = abstract_model(config, make_model=make_model)
    adapters = adapters_of(config.adapters)
    params, frozen = (adapters.abstract(base), base) if adapters else (base, None)
    shardings = parameter_shardings(params, mesh)
    frozen_shardings = parameter_shardings(base, mesh) if adapters else None
    balance = None if make_model else Balance.from_config(config)
    optimizer = make_optimizer(config.optimizer, AT_REST, balance is not None, own_optimizer)
    stepped, stepped_shardings = learned(params, balance), learned(shardings, balance)
    opt_state = jax.eval_shape(optimizer.init, stepped)
    whole = NamedSharding(mesh, P())

    # A moment of a parameter's shape is sharded as the parameter; counts and the like are whole.
    def is_masked(moment: object) -> bool:
        return isinstance(moment, optax.MaskedNode)  # handled by another part of the optimizer

    def place_moment(moment: Any, param: Any, sharding: NamedSharding) -> Any:
        if is_masked(moment):
            return moment
        return sharding if moment.shape == param.shape else whole

    # Shapes are computed again below, without compiling the initial zeros.
    abstract_optimizer = optax.GradientTransformation(
        lambda params: jax.eval_shape(optimizer.init, params), optimizer.update
    )
    opt_shardings = optax.tree.map_params(
        abstract_optimizer,
        place_moment,
        opt_state,
        stepped,
        stepped_shardings,
        transform_non_params=lambda _: whole,
        is_leaf=is_masked,
    )

    def with_sharding(x: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    if balance:
        opt_state = BalancedState(opt_state, jax.eval_shape(balance.no_counts))
        opt_shardings = opt_state._replace(optimizer=opt_shardings, last_counts_NxE=whole)
    state = TrainState(params, opt_state, frozen)
    sharded: TrainState = jax.tree.map(
        with_sharding, state, TrainState(shardings, opt_shardings, frozen_shardings)
    )
    sharded = sharded._replace(spikes=abstract_window(config.optimizer, mesh))
    if config.optimizer.parameter_average_half_life is None:
        return sharded
    return sharded._replace(average=average_shapes(sharded.params))


def first_model(
    config: DecoderConfig, seed: jax.Array, make_model: ModelMaker | None = None
) -> State:
    """Returns the first parameters of a model, inside of a program."""
    key = jax.random.key(seed)
    if make_model is None:
        model: Any = Decoder(config, rngs=nnx.Rngs(params=key))
    else:
        model = make_model(rngs=nnx.Rngs(key))
    params: State = nnx.state(model, nnx.Param)
    return params


def init_state(
    config: UpdateConfig,
    abstract: TrainState,
    make_model: ModelMaker | None = None,
    own_optimizer: OptimizerMaker | None = None,
) -> TrainState:
    """Makes a new state; each device makes its own shard, and none ever has the whole.

    Values depend on `init_weights_seed` only, not on the mesh. The window of spikes, which follows
    from a position, is left out.
    """

    def init(seed: jax.Array) -> TrainState:
        params = first_model(config, seed, make_model)
        return _started(
            config, params, seed, None if make_model else Balance.from_config(config), own_optimizer
        )

    shardings = jax.tree.map(lambda x: x.sharding, abstract._replace(spikes=None))
    state: TrainState = jax.jit(init, out_shardings=shardings)(jnp.uint32(config.init_weights_seed))
    return state


def init_opt_state(
    config: UpdateConfig,
    abstract: TrainState,
    params: State,
    own_optimizer: OptimizerMaker | None = None,
) -> TrainState:
    """Returns a state of given parameters with a fresh optimizer."""
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    balance = Balance.from_config(config) if isinstance(abstract.opt_state, BalancedState) else None
    if abstract.frozen is None:

        def begin(params: State) -> tuple[optax.OptState, State | None]:
            return _first_opt_state(config, balance, params, own_optimizer), _first_average(
                config, params
            )

        opt_state, average = jax.jit(begin, out_shardings=(shardings.opt_state, shardings.average))(
            params
        )
        return TrainState(params, opt_state, average=average)

    def start(seed: jax.Array) -> TrainState:
        return _started(config, abstract.model, seed, balance, own_optimizer).saved

    fresh = jax.jit(start, out_shardings=shardings.saved)(jnp.uint32(config.init_weights_seed))
    return TrainState(fresh.params, fresh.opt_state, params, fresh.average)


def _started(
    config: UpdateConfig,
    model: State,
    seed: jax.Array,
    balance: Balance | None,
    own_optimizer: OptimizerMaker | None,
) -> TrainState:
    """Returns the first state of a run from a model's parameters."""
    adapters = adapters_of(config.adapters)
    params = adapters.init(model, seed) if adapters else model
    opt_state = _first_opt_state(config, balance, params, own_optimizer)
    average = _first_average(config, params)
    return TrainState(params, opt_state, model if adapters else None, average)


def _first_opt_state(
    config: UpdateConfig,
    balance: Balance | None,
    params: State,
    own_optimizer: OptimizerMaker | None,
) -> optax.OptState:
    optimizer = make_optimizer(config.optimizer, AT_REST, balance is not None, own_optimizer)
    opt_state = optimizer.init(learned(params, balance))
    return BalancedState(opt_state, balance.no_counts()) if balance else opt_state


def _first_average(config: UpdateConfig, params: State) -> State | None:
    """Returns a run's initial average, or None."""
    return None if config.optimizer.parameter_average_half_life is None else first_average(params)


def adapted_shapes(config: UpdateConfig, abstract: TrainState) -> State:
    """Returns the shapes of the parameters that an eval reads: those of the model, with its
    adapters.
    """
    adapters = adapters_of(config.adapters, config.quantization)
    return (
        adapters.beside(abstract.model, abstract.params)
        if adapters and adapters.are_apart
        else abstract.model
    )


def compile_adapting(config: UpdateConfig, abstract: TrainState) -> Callable[[State, State], State]:
    """Returns the function (model, adapters) -> adapted model, compiled if it merges them."""
    adapters = adapters_of(config.adapters, config.quantization)
    assert adapters is not None, "the run trains adapters"
    if adapters.are_apart:
        return adapters.beside
    shardings = jax.tree.map(lambda x: x.sharding, abstract.model)
    return (
        jax.jit(adapters.merged, out_shardings=shardings)
        .lower(abstract.model, abstract.params)
        .compile()
    )
