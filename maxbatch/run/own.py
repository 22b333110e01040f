"""A user's own model, loss and optimizer: protocols and adapters to training.

Shapes: M rows of a micro-batch (or of one device's part of it), L tokens, V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from maxbatch.config.combined import UpdateConfig
from maxbatch.config.config import Config
from maxbatch.config.own_parts import TRAINED
from maxbatch.config.sections import ModelConfig, OptimizerConfig
from maxbatch.data.feed.placement import TokenRows
from maxbatch.data.stream.own import Samples
from maxbatch.data.stream.stream import Stream
from maxbatch.model.decoder import Decoder
from maxbatch.model.experts.routing import RoutingSums
from maxbatch.parallel.hosts import warn
from maxbatch.plan.mesh_shape import MeshShape
from maxbatch.run.record.recorder import Output
from maxbatch.run.task import TaskModel, model_of
from maxbatch.run.weights.checkpoint_reading import OWN_MODEL
from maxbatch.system.code_names import code_name
from maxbatch.system.errors import ConfigError
from maxbatch.update.gradients import Objective, ObjectiveSums
from maxbatch.update.lora import adapters_of
from maxbatch.update.optimizers import AT_REST, OptimizerMaker, make_optimizer
from maxbatch.update.state import ModelMaker, abstract_model, num_parameters


class Rows(NamedTuple):
    """Rows of the stream on a device."""

    tokens: jax.Array  # int32[M, L]
    segments: jax.Array  # int32[M, L], 1.. per document within a row, 0 at padding
    weights: jax.Array  # float32[M, L], loss weight of each token as a target; 0 at padding


class MakeModel(Protocol):
    """A user's model: a class of `flax.nnx.Module`, or a function that makes one, with `nnx.Param`
    variables only.
    """

    def __call__(self, config: Config, *, rngs: nnx.Rngs) -> Any:
        """Returns a module that is called with tokens and segments, int32[M, L], and returns logits
        [M, L, V].
        """


class Loss(Protocol):
    """A user's loss: two sums over rows, so that the update does not depend on the cut of the
    batch.
    """

    def __call__(self, model: Any, rows: Rows, /) -> tuple[jax.Array, jax.Array]:
        """Returns the sum of the losses of these rows, and the sum of their weights: float scalars.

        The loss of an update is the first over the second, both summed over the global batch.
        `model(tokens, segments)` gives the logits, [M, L, V]. Rows of zero weight are padding and
        must add nothing.
        """


Optimizer: TypeAlias = OptimizerMaker | optax.GradientTransformation
# Keys of the config's optimizer without effect on a user's, with the values that switch them off.
_DECAYS = {
    "adam_scaling": "none",
    "adam_b1_half_life": None,
    "adam_b2_half_life": None,
    "weight_decay_timescale": None,
}


class Parts(NamedTuple):
    """A user's replacements of the config's parts; None: the config's."""

    model: MakeModel | None = None
    objective: Loss | None = None
    optimizer: Optimizer | None = None
    stream: Samples | Stream | None = None
    outputs: tuple[Output, ...] = ()
    eval_stream: Samples | Stream | None = None

    @property
    def are_config_rows(self) -> bool:
        """Whether model, loss and stream are the config's."""
        return self.model is None and self.objective is None and self.stream is None

    @property
    def names(self) -> dict[str, str]:
        """The names of the given parts, by argument: `stream: mine.Rows`."""
        given = {argument: getattr(self, argument) for argument in TRAINED}
        names = {argument: code_name(part) for argument, part in given.items() if part is not None}
        if self.outputs:
            names["outputs"] = " ".join(
                str(getattr(output, "name", code_name(output))) for output in self.outputs
            )
        return names


CONFIGURED = Parts()  # no part is the user's own code


def code_of(parts: Parts) -> dict[str, str]:
    """Returns each given part's name and a hash of its source file, by argument."""
    given = {name: getattr(parts, name) for name in TRAINED}
    return {name: _code_of(part) for name, part in given.items()}


def _code_of(part: object) -> str:
    if part is None:
        return "the config's"
    part = part.func if isinstance(part, functools.partial) else part
    part = part.update if isinstance(part, optax.GradientTransformation) else part
    code: Any = part if hasattr(part, "__code__") or isinstance(part, type) else type(part)
    try:
        content = Path(inspect.getfile(code)).read_bytes()
    except (TypeError, OSError):  # of a notebook, or of C
        content = b""
    return f"{name_of(part)} {hashlib.sha256(content).hexdigest()[:16]}"


def check_parts(parts: Parts) -> None:
    """Raises ConfigError for a model, a loss or an optimizer that training cannot call."""
    model, loss, optimizer = parts.model, parts.objective, parts.optimizer
    if isinstance(model, nnx.Module):
        name = type(model).__name__
        raise ConfigError(
            "model: must be a class, or a function that makes the module, not a module; works: "
            f"{name}"
        )
    if model is not None:
        _check_call("model", model, "(config, rngs=rngs)", None, rngs=None)
    if loss is not None:
        _check_call("objective", loss, "(model, rows)", None, None)
    if optimizer is not None and not isinstance(optimizer, optax.GradientTransformation):
        _check_call("optimizer", optimizer, "(learning_rate)", None)


def _check_call(
    argument: str, function: object, call: str, *args: object, **kwargs: object
) -> None:
    if not callable(function):
        raise ConfigError(
            f"{argument}: must be a function or a class, not {type(function).__name__}"
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some callables of C have none
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        name = name_of(function)
        raise ConfigError(
            f"{argument}: is called as {name}{call}, but takes {name}{signature} ({error})"
        ) from None


def name_of(function: object) -> str:
    """Returns the name of a user's function, or of its class if it has none."""
    return str(getattr(function, "__name__", type(function).__name__))


@contextlib.contextmanager
def _naming(part: str) -> Iterator[None]:
    """Adds the name of the part to an error of a user's code."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        error.add_note(f"maxbatch: raised by {part}")
        raise


def module_maker(model: ModelMaker, name: str) -> ModelMaker:
    """Returns a user's model, a function of the random numbers alone, with errors that name it.

    Raises:
      ConfigError: (the function) the result is not a `flax.nnx.Module` with floating-point
        parameters.
    """

    def make(*, rngs: nnx.Rngs) -> nnx.Module:
        with _naming(f"the model, as {name}(config, rngs=rngs)"):
            made = model(rngs=rngs)
        if not isinstance(made, nnx.Module):
            raise ConfigError(
                f"model: {name} returned {type(made).__name__}; it must be a flax.nnx.Module"
            )
        leaves = jax.tree.leaves_with_path(nnx.state(made, nnx.Param))
        if not leaves:
            raise ConfigError(f"model: {name} has no nnx.Param, so there is nothing to train")
        for path, leaf in leaves:
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                where = jax.tree_util.keystr(path)
                raise ConfigError(
                    f"model: the parameter {where} has the type {leaf.dtype}; it must be "
                    "floating-point"
                )
        return made

    return make


def optimizer_maker(optimizer: Optimizer | None, config: OptimizerConfig) -> OptimizerMaker | None:
    """Returns a user's optimizer as a function of the learning rate, or None.

    Raises:
      ConfigError: the config states decays of its own optimizer; (the function) the result is not
        an optax optimizer.
    """
    if optimizer is None:
        return None
    for name, default in _DECAYS.items():
        if config[name] != default:
            works = default or "null"
            raise ConfigError(
                f"{name}={config[name]}: is of the config's own optimizer, and train() was given "
                f"another; works: {name}={works}"
            )
    if isinstance(optimizer, optax.GradientTransformation):
        warn(
            "learning_rate has no effect: train() was given an optimizer with rates of its own; a "
            "function of the rate, such as optimizer=optax.adamw, follows the config's schedule"
        )
        return lambda _: optimizer

    def make(learning_rate: float | jax.Array, /) -> optax.GradientTransformation:
        with _naming(f"the optimizer, as {name_of(optimizer)}(learning_rate)"):
            made = optimizer(learning_rate)
        if not isinstance(made, optax.GradientTransformation):
            raise ConfigError(
                f"optimizer: {name_of(optimizer)} returned {type(made).__name__}; it must be an "
                "optax.GradientTransformation"
            )
        return made

    return make


def objective_of(
    loss: Loss | None, make_model: ModelMaker | None, config: ModelConfig
) -> Objective | None:
    """Returns the objective of a user's loss or model; None without either.

    Raises:
      ConfigError: the config has balance terms, which are added to its own loss only.
    """
    if make_model is None and loss is None:
        return None
    for name in ("load_balance_loss_weight", "router_z_loss_weight", "z_loss_multiplier"):
        if config[name]:
            raise ConfigError(
                f"{name}={config[name]}: is added to the config's own loss only; works: {name}=0"
            )

    def sums(model: Any, rows: TokenRows, _: int) -> ObjectiveSums:
        given = Rows(rows.tokens, rows.segments, rows.weights)
        shape = f"[{', '.join(map(str, given.tokens.shape))}]"
        called = _RoutedModel(model) if isinstance(model, Decoder) and model.has_experts else model
        if loss is None:
            with _naming(f"the model, called with tokens and segments int32{shape}"):
                totals = _next_token_sums(called, given, config.vocab_size)
        else:
            with _naming(
                f"the objective {name_of(loss)} or the model that it calls, with rows of tokens "
                f"int32{shape}"
            ):
                returned = loss(called, given)
            totals = _checked(returned)
        return ObjectiveSums(
            *totals, {}, called.routing if isinstance(called, _RoutedModel) else None
        )

    return Objective(sums, make_model=make_model)


class _RoutedModel:
    """The config's model with experts, for a user's loss; sums the routing of its calls."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._routing: RoutingSums | None = None

    def __call__(self, tokens_MxL: jax.Array, segments_MxL: jax.Array) -> jax.Array:
        """Returns the logits, float32[M, L, V]."""
        x_MxLxD, routing = self._decoder.hidden(tokens_MxL, segments_MxL)
        assert routing is not None, "it has experts"
        self._routing = routing if self._routing is None else self._routing.plus(routing)
        return self._decoder.logits(x_MxLxD)

    @property
    def routing(self) -> RoutingSums:
        """The routing sums of all calls so far; raises ConfigError if there was none."""
        if self._routing is None:
            raise ConfigError("objective: never called the model, so its experts cannot be counted")
        return self._routing


def next_token_loss(
    model: Callable[[jax.Array, jax.Array], object], rows: Rows
) -> tuple[jax.Array, jax.Array]:
    """Returns the weighted sum of the cross-entropies of each next token, and the sum of the
    weights, in float32.

    All logits exist at once, float32[M, L, V]; the config's own loss is fused with the last
    projection and keeps a piece at a time.
    """
    return _next_token_sums(model, rows)


def _next_token_sums(
    model: Callable[[jax.Array, jax.Array], object], rows: Rows, vocab_size: int = 1
) -> tuple[jax.Array, jax.Array]:
    logits, wanted = model(rows.tokens, rows.segments), ", ".join(map(str, rows.tokens.shape))
    if not isinstance(logits, jax.Array):
        raise ConfigError(
            f"model: returned {_described(logits)}; it must be logits, an array [{wanted}, V]"
        )
    if logits.ndim != 3 or logits.shape[:2] != rows.tokens.shape:
        raise ConfigError(
            f"model: returned an array of shape {logits.shape}; it must be logits, ({wanted}, V)"
        )
    if logits.shape[2] < vocab_size:
        raise ConfigError(
            f"model: returned logits of {logits.shape[2]} tokens; must be one for each of "
            f"vocab_size={vocab_size}"
        )
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits[:, :-1].astype(jnp.float32), rows.tokens[:, 1:]
    )
    return jnp.sum(losses * rows.weights[:, 1:]), jnp.sum(rows.weights[:, 1:])


def _checked(returned: Any) -> tuple[jax.Array, jax.Array]:
    """Checks a user's two sums and returns them in float32."""
    parts = list(returned) if isinstance(returned, tuple | list) else [returned]
    is_number = [
        isinstance(part, jax.Array | np.ndarray | np.generic | float | int) for part in parts
    ]
    if len(parts) != 2 or not all(is_number) or any(jnp.shape(part) for part in parts):
        raise ConfigError(
            f"objective: returned {', '.join(map(_described, parts))} in place of two scalars, "
            "the sum of the losses and the sum of their weights"
        )
    loss, weight = map(jnp.asarray, parts)
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise ConfigError(
            f"objective: returned a loss of the type {loss.dtype}, which has no gradient; must be "
            "a float"
        )
    return loss.astype(jnp.float32), weight.astype(jnp.float32)


def _described(value: object) -> str:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return type(value).__name__ if shape is None else f"{dtype}[{', '.join(map(str, shape))}]"


def task_model(
    make_model: ModelMaker | None,
    config: UpdateConfig,
    mesh: MeshShape,
    own_optimizer: OptimizerMaker | None = None,
) -> TaskModel:
    """Returns the model of a run; its identity includes the form of a user's optimizer state.

    Without a user's model it is the config's. A user's model is identified by its parameters'
    shapes. Its FLOPs are 6 per parameter and token, without attention (Kaplan et al. 2020,
    https://arxiv.org/abs/2001.08361, section 2.1).

    Raises:
      ConfigError: the model has variables besides parameters, or the config needs a feature of its
        own model.
    """
    if make_model is None:
        model = model_of(config)
        return model._replace(
            identity={**model.identity, **_optimizer_identity(own_optimizer, config)}
        )

    if mesh.num_pipeline_stages != 1:
        raise ConfigError(
            f"ici_pipeline_parallelism={config.mesh.ici_pipeline_parallelism}: stages of a "
            "pipeline need the layers of the config's own model; works: "
            "ici_pipeline_parallelism=1 dcn_pipeline_parallelism=1"
        )
    if rank := config.adapters.lora_rank:
        raise ConfigError(
            f"lora_rank={rank}: adapters are for the config's own model; works: lora_rank=0"
        )
    if config.quantization:
        raise ConfigError(
            f"quantization={config.quantization}: rounds the products of the config's own model; "
            "works: quantization=''"
        )

    _, params = abstract_model(config, make_model=make_model)
    shapes = {
        jax.tree_util.keystr(path): str(leaf) for path, leaf in jax.tree.leaves_with_path(params)
    }
    shapes = {name: text.removeprefix("ShapeDtypeStruct") for name, text in shapes.items()}
    settings = {key: config[key] for key in ("opt_type", "init_weights_seed")}
    settings |= _optimizer_identity(own_optimizer, config, make_model)
    return TaskModel({"model": OWN_MODEL, **settings, **shapes}, 6 * num_parameters(params))


def _optimizer_identity(
    own_optimizer: OptimizerMaker | None, config: UpdateConfig, make_model: ModelMaker | None = None
) -> dict[str, str]:
    """Returns the identity of a user's optimizer for resumes: a hash of the form of its state."""
    if own_optimizer is None:
        return {}
    _, params = abstract_model(config, make_model=make_model)
    adapters = adapters_of(config.adapters)
    trained = adapters.abstract(params) if adapters else params
    with _naming("the optimizer, as init(parameters)"):
        state = jax.eval_shape(
            make_optimizer(config.optimizer, AT_REST, own_optimizer=own_optimizer).init, trained
        )
    leaves = [
        f"{jax.tree_util.keystr(path)} {x.dtype}{x.shape}"
        for path, x in jax.tree.leaves_with_path(state)
    ]
    return {
        "opt_type": "own",
        "optimizer's state": hashlib.sha256("\n".join(leaves).encode()).hexdigest()[:16],
    }
