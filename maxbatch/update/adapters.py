"""Low-rank adapters (LoRA): a matrix W of the layers becomes W + alpha / rank x A B, and only A and
B are trained.

Reference: Hu et al. 2021 (https://arxiv.org/abs/2106.09685), section 4.1; A begins as in Hugging
Face PEFT (uniform, within 1 / sqrt(inputs)), B at zero.

The sum is formed in float32 before the layers run, and rounded to `weight_dtype`, so the trained
and exported models are the same. Where products are in 8 bits, those of W are and those of its
adapter are not, so the layers apply both apart. Flax's `nnx.LoRA` and Qwix adapt linear layers; the
matrices here belong to none.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from maxbatch.config.values import nearest_name, shown
from maxbatch.families.matrices import ALL_MATRICES, MATRICES, of_experts
from maxbatch.families.parameter import STACKS, ParameterPath
from maxbatch.model.parameters import parameter_path
from maxbatch.model.products import Adapted
from maxbatch.parallel.trees import KeyPath, State
from maxbatch.system.errors import ConfigError

Axis = TypeVar("Axis", int, str)
_A, _B = "_lora_a", "_lora_b"


class Target(NamedTuple):
    """A stacked matrix with an adapter."""

    path: ParameterPath
    shape: tuple[int, ...]  # layers, inputs, outputs
    logical_axes: tuple[str, ...]
    num_inputs: int  # number of input axes, which precede output axes

    @property
    def a_path(self) -> ParameterPath:
        """The path of A, [layers, inputs, rank]."""
        return (*self.path[:-1], self.path[-1] + _A)

    @property
    def b_path(self) -> ParameterPath:
        """The path of B, [layers, rank, outputs]."""
        return (*self.path[:-1], self.path[-1] + _B)


@dataclass(frozen=True)
class Adapters:
    """The adapters of a run.

    Attributes:
      rank: columns of A.
      alpha: alpha / rank is the factor of A B.
      names: names of the matrices with adapters; empty: all.
      are_apart: whether the layers apply a matrix and its adapter apart.
    """

    rank: int
    alpha: float
    names: frozenset[str]
    are_apart: bool = False

    @property
    def scale(self) -> float:
        """The factor of A B."""
        return self.alpha / self.rank

    def targets(self, base: State) -> list[Target]:
        """Returns the matrices with adapters, in the order of their paths.

        Raises:
          ConfigError: `lora_targets` names a matrix that the model lacks.
        """
        matrices = sorted(_matrices(base))
        known = {target.path[-1] for target in matrices}
        if not known:
            raise ConfigError(
                f"lora_rank={self.rank}: this model has no matrices that adapters know; works: "
                "lora_rank=0"
            )
        if experts := sorted(name for name in self.names & MATRICES.keys() if of_experts(name)):
            raise ConfigError(
                f"lora_targets: {experts[0]} is of experts, which have no adapters; works: "
                f"lora_targets={ALL_MATRICES}"
            )
        for name in sorted(self.names - known):
            works = nearest_name(name, known) or ALL_MATRICES
            raise ConfigError(
                f"lora_targets: {shown(repr(name))} names no matrix of this model, which has "
                f"{', '.join(sorted(known))}; works: lora_targets={works}"
            )
        return [target for target in matrices if not self.names or target.path[-1] in self.names]

    def init(self, base: State, seed: jax.typing.ArrayLike) -> State:
        """Returns initial adapters, which leave the model equal to `base`; uses only the shapes of
        `base`.
        """
        factors: dict[ParameterPath, nnx.Param[jax.Array]] = {}
        for target in self.targets(base):
            layers, inputs, outputs = _parts(target, target.shape)
            key = jax.random.fold_in(
                jax.random.key(seed), zlib.crc32("/".join(target.path).encode())
            )
            most = 1 / math.sqrt(math.prod(inputs))
            a = jax.random.uniform(key, (*layers, *inputs, self.rank), jnp.float32, -most, most)
            layer_axes, input_axes, output_axes = _parts(target, target.logical_axes)
            factors[target.a_path] = nnx.Param(a, logical_axes=(*layer_axes, *input_axes, "rank"))
            b = jnp.zeros((*layers, self.rank, *outputs), jnp.float32)
            factors[target.b_path] = nnx.Param(b, logical_axes=(*layer_axes, "rank", *output_axes))
        return nnx.from_flat_state(factors.items())

    def abstract(self, base: State) -> State:
        """Returns the shapes of the adapters."""
        state: State = jax.eval_shape(lambda: self.init(base, 0))
        return state

    def applied(self, base: State, adapters: State) -> State:
        """Returns the parameters of the adapted model as its layers take them."""
        return self.beside(base, adapters) if self.are_apart else self.merged(base, adapters)

    def beside(self, base: State, adapters: State) -> State:
        """Returns the parameters of `base`, each adapted matrix with its adapter: arrays, shapes or
        shardings.
        """
        factors = {parameter_path(path): part for path, part in jax.tree.leaves_with_path(adapters)}

        def adapted(path: KeyPath, matrix: jax.Array) -> jax.Array | Adapted:
            *folder, name = parameter_path(path)
            a, b = (factors.get((*folder, name + part)) for part in (_A, _B))
            return matrix if a is None or b is None else Adapted(matrix, a, b, self.scale)

        state: State = jax.tree.map_with_path(adapted, base)
        return state

    def merged(self, base: State, adapters: State) -> State:
        """Returns the parameters of the adapted model, in the types of `base`."""

        def summed(adapted: jax.Array | Adapted) -> jax.Array:
            if not isinstance(adapted, Adapted):
                return adapted
            product = jax.vmap(lambda a, b: jnp.tensordot(a, b, axes=1))(adapted.a, adapted.b)
            return (adapted.matrix.astype(jnp.float32) + self.scale * product).astype(
                adapted.matrix.dtype
            )

        state: State = jax.tree.map(
            summed, self.beside(base, adapters), is_leaf=lambda x: isinstance(x, Adapted)
        )
        return state


def _matrices(base: State) -> Iterator[Target]:
    """Yields the stacked matrices of a model's layers, without experts and their routers."""
    leaves = jax.tree.leaves_with_path(base, is_leaf=lambda x: isinstance(x, nnx.Variable))
    for path, variable in leaves:
        names = parameter_path(path)
        axes = variable.get_metadata().get("logical_axes", ())
        if names[0] in STACKS and names[-1] in MATRICES and not of_experts(names[-1]):
            row = MATRICES[names[-1]]
            if len(axes) == 1 + len(row.axes):
                yield Target(names, tuple(variable.get_value().shape), tuple(axes), len(row.inputs))


def _parts(target: Target, axes: tuple[Axis, ...]) -> tuple[tuple[Axis, ...], ...]:
    """Splits values per axis into layers, inputs and outputs of a matrix."""
    return axes[:1], axes[1 : 1 + target.num_inputs], axes[1 + target.num_inputs :]
