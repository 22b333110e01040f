"""Pipeline parallelism: groups of layers on different devices, and parts of a micro-batch that move
through them.

All devices run one program, in which the stages are an array dimension that the mesh axis
`pipeline` splits. At every tick each stage runs its layers on its part, then all parts move on by
one stage (Huang et al. 2019, GPipe, https://arxiv.org/abs/1811.06965; as one SPMD program: Xu et
al. 2021, GSPMD, https://arxiv.org/abs/2105.04663, section 3.3). With repeats every stage holds
several groups of layers that are not neighbours, and a part passes all stages as many times; stages
then wait less at both ends (Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, section 2.2).

Shapes: B rows, M parts ("microbatches") of b rows, S stages, C = M / S, R repeats, N layers of a
group, L length, D model. Part m's place in a stream of parts [S, C] is (m // C, m % C): the stages
hold equal shares of the waiting parts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from maxbatch.config.sections import MeshConfig, RematConfig
from maxbatch.parallel.remat import Remat
from maxbatch.parallel.sharding import Constrain, activation_constraint, num_shards
from maxbatch.parallel.trees import Tree, TreeOf
from maxbatch.plan.mesh_shape import pipeline_microbatches

Sums = TypeVar("Sums")  # of a layer, or of several, stacked
# (x_bxLxD, slots of [b, L] each, the parameters of one layer, or of several stacked in order) ->
# (x_bxLxD, sums over the rows, if the layers have any, stacked alike)
Layers = Callable[[jax.Array, Any, Any], tuple[jax.Array, Sums]]

_STREAM = ("stage", None, "batch", "length", "embed")


def make_pipeline(
    axes: MeshConfig, remat: RematConfig, mesh: Mesh, batch_axes: tuple[str, ...]
) -> Pipeline | None:
    """Returns the pipeline of a run; None if its mesh has one stage.

    Args:
      batch_axes: split the rows of its parts.
    """
    stages = mesh.shape["pipeline"]
    if stages == 1:
        return None
    return Pipeline(
        num_stages=stages,
        num_repeats=axes.num_pipeline_repeats,
        num_microbatches=pipeline_microbatches(axes, stages),
        batch_shards=num_shards(mesh, batch_axes),
        remat=Remat.of(remat),
        constrain=activation_constraint(mesh, batch_axes),
    )


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """A layer runner that runs the layers of a decoder in stages.

    A tick costs, per device, three permutes of a part's activation (two where M >= S x S): the part
    moves on, the stream moves up, a result moves to its place. Of S x ticks stage runs, S x M x R
    are useful.

    Every pass over a micro-batch fills and drains the pipeline once. If memory allows, one
    micro-batch of g times the size, with g times the microbatches, gives the same update and fills
    and drains only once. Weights that the fsdp axis splits are gathered at every tick. A data axis
    gathers none, and its gradients are reduced once per update.
    """

    num_stages: int  # S, the size of the mesh axis `pipeline`
    num_repeats: int  # R; group r x S + s is the r-th of stage s
    num_microbatches: int  # M, a multiple of S
    batch_shards: int  # devices that split the rows; every part takes its rows from all of them
    remat: Remat  # values that the forward pass of a stage keeps for its backward pass
    constrain: Constrain  # places activations inside of a stage

    @property
    def num_ticks(self) -> int:
        """The ticks of one pass: M x R of work for each stage, and S - 1 to fill and drain."""
        return self.num_microbatches * self.num_repeats + self.num_stages - 1

    def __call__(
        self, layers: Layers[Sums], stacked: Tree, x_BxLxD: jax.Array, slots: TreeOf
    ) -> tuple[jax.Array, Sums]:
        """Returns x after all layers, stacked in `stage_order`, and their sums; B is divisible by
        batch_shards x M.
        """
        S, M = self.num_stages, self.num_microbatches
        columns = M // S
        weights_SxRxN = jax.tree.map(
            lambda w: w.reshape(S, self.num_repeats, -1, *w.shape[1:]), stacked
        )
        stream = self.constrain(self._to_parts(x_BxLxD), _STREAM)
        # Replicated on every stage: they are small, and each stage indexes its own.
        slots_MxbxL = jax.tree.map(
            lambda x_BxL: self._to_parts(x_BxL).reshape(M, -1, x_BxL.shape[-1]), slots
        )
        slots_MxbxL = self._placed(slots_MxbxL, None)
        run_stages = self._stages(layers)
        stage_S = jnp.arange(S)
        # A column of the stream moves up by one whenever its head is taken. When part m leaves the
        # last stage, this has happened equally often for every m, so all results return by the same
        # path.
        home = S - 1 - (S - 1) // columns
        is_first, is_home = (self._per_stage(stage_S == s) for s in (0, home))

        def tick(
            carried: tuple[jax.Array, jax.Array], t: jax.Array
        ) -> tuple[tuple[jax.Array, jax.Array], Tree]:
            stream_SxCxbxLxD, moved_SxbxLxD = carried
            head_SxbxLxD = _column(stream_SxCxbxLxD, t % columns)
            # While the other stages drain, the first one works on zeros: unused, but they must stay
            # finite.
            useful_head = _choose(self._per_stage(t < M * self.num_repeats), head_SxbxLxD)
            x_SxbxLxD = self._place(_choose(is_first, useful_head, moved_SxbxLxD))
            part_S = self.constrain((t - stage_S) % M, ("stage",))
            slots_SxbxL = self._placed(
                jax.tree.map(lambda x_MxbxL: x_MxbxL[part_S], slots_MxbxL), "stage"
            )
            repeat_S = jnp.clip((t - stage_S) // M, 0, self.num_repeats - 1)
            out_SxbxLxD, sums_SxN = run_stages(weights_SxRxN, repeat_S, x_SxbxLxD, slots_SxbxL)
            out_SxbxLxD = self._place(out_SxbxLxD)
            stream_SxCxbxLxD = _with_column(stream_SxCxbxLxD, _roll(head_SxbxLxD, -1), t % columns)
            done = (t - S + 1) % columns
            result = _roll(out_SxbxLxD, home - (S - 1))
            kept = _choose(is_home & (t >= S - 1), result, _column(stream_SxCxbxLxD, done))
            stream_SxCxbxLxD = self.constrain(_with_column(stream_SxCxbxLxD, kept, done), _STREAM)
            return (stream_SxCxbxLxD, self._place(_roll(out_SxbxLxD, 1))), sums_SxN

        nothing_yet = self._place(jnp.zeros_like(stream[:, 0]))
        (stream, _), sums_TxSxN = jax.lax.scan(
            tick, (stream, nothing_yet), jnp.arange(self.num_ticks)
        )
        return self._to_rows(stream), jax.tree.map(self._of_layers, sums_TxSxN)

    def _of_layers(self, sums_TxSxN: jax.Array) -> jax.Array:
        """Returns the sums of the layers in `stage_order` over all parts; a stage that has none
        gives nothing.
        """
        S, M, R = self.num_stages, self.num_microbatches, self.num_repeats
        stage_Sx1x1, part_M = np.arange(S)[:, None, None], np.arange(M)
        ticks_SxRxM = stage_Sx1x1 + np.arange(R)[:, None] * M + part_M
        of_parts_SxRxMxN = sums_TxSxN[ticks_SxRxM, stage_Sx1x1]
        return of_parts_SxRxMxN.sum(axis=2, dtype=sums_TxSxN.dtype).reshape(
            -1, *sums_TxSxN.shape[3:]
        )

    def _placed(self, slots_xbxL: TreeOf, first: str | None) -> TreeOf:
        """Returns arrays of slots with a leading axis of parts or of stages, placed."""
        placed: TreeOf = jax.tree.map(
            lambda x: self.constrain(x, (first, "batch", "length")), slots_xbxL
        )
        return placed

    def order(self, num_layers: int) -> np.ndarray:
        """Returns the numbers of the layers in `stage_order`."""
        return (
            np.arange(num_layers)
            .reshape(self.num_repeats, self.num_stages, -1)
            .swapaxes(0, 1)
            .reshape(-1)
        )

    def _stages(self, layers: Layers[Sums]) -> Callable[..., tuple[jax.Array, Sums]]:
        """Returns a function that runs all stages at once, each on its part with the weights of its
        repeat.
        """

        def of_repeat(weight_RxN: jax.Array, repeat: jax.Array) -> jax.Array:
            if self.num_repeats == 1:
                return weight_RxN[0]
            array: jax.Array = jax.lax.dynamic_index_in_dim(weight_RxN, repeat, keepdims=False)
            return array

        def stage(
            weights_RxN: Tree, repeat: jax.Array, x_bxLxD: jax.Array, slots: Tree
        ) -> tuple[jax.Array, Sums]:
            return layers(
                self.remat.entering(x_bxLxD),
                slots,
                jax.tree.map(lambda w: of_repeat(w, repeat), weights_RxN),
            )

        stages = jax.vmap(stage, spmd_axis_name="pipeline")
        if self.remat.keeps_all and self.num_repeats == 1:
            return stages  # its weights are the same at every tick, and JAX keeps one copy
        # Never keeps a copy of the weights, because there would be one per tick.
        policy = (
            jax.checkpoint_policies.dots_saveable if self.remat.keeps_all else self.remat.policy
        )
        # In a loop the compiler cannot merge the recomputation with the first run, so it needs no
        # barrier.
        return jax.checkpoint(stages, policy=policy, prevent_cse=False)

    def stage_order(self, stacked: TreeOf) -> TreeOf:
        """Returns parameters, stacked in layer order and split over the stages, in the order in
        which stages hold them.

        Without repeats the orders are the same. With repeats every stage sends R - 1 of its R
        groups to others, by one permute each, once per update. State and checkpoints are in layer
        order.
        """
        return self._exchanged(stacked, to_stages=True)

    def layer_order(self, stacked: TreeOf) -> TreeOf:
        """Returns the parameters of `stage_order` in layer order."""
        return self._exchanged(stacked, to_stages=False)

    def _exchanged(self, stacked: TreeOf, to_stages: bool) -> TreeOf:
        S, R = self.num_stages, self.num_repeats
        if R == 1:
            return stacked
        sent_RxS, kept_RxS, ways = _rounds(S, R)
        if not to_stages:
            sent_RxS, kept_RxS = kept_RxS, sent_RxS
            ways = [[(to, of) for of, to in way] for way in ways]
        place_RxS = np.argsort(kept_RxS, axis=0)

        # Each stage is given its number: `axis_index` does not compile for every program that
        # splits other axes too.
        def exchange(own_layers: jax.Array, stage_1: jax.Array) -> jax.Array:
            me = stage_1[0]
            groups_RxN = own_layers.reshape(R, -1, *own_layers.shape[1:])
            received_RxN = jnp.stack(
                [
                    jax.lax.ppermute(groups_RxN[jnp.asarray(sent_S)[me]], "pipeline", way)
                    for sent_S, way in zip(sent_RxS, ways, strict=True)
                ]
            )
            return received_RxN[jnp.asarray(place_RxS)[:, me]].reshape(own_layers.shape)

        mesh, split = self.constrain.mesh, P("pipeline")
        exchange_all = jax.shard_map(
            exchange, mesh=mesh, in_specs=(split, split), out_specs=split, axis_names={"pipeline"}
        )
        stage_S = jnp.arange(S)
        exchanged: TreeOf = jax.tree.map(
            lambda own_layers: exchange_all(own_layers, stage_S), stacked
        )
        return exchanged

    def _to_parts(self, rows_BxL: jax.Array) -> jax.Array:
        """Reshapes [B, ...] to [S, C, b, ...]; of the rows of each device, part m takes the m-th
        share.
        """
        S, columns, rest = (
            self.num_stages,
            self.num_microbatches // self.num_stages,
            rows_BxL.shape[1:],
        )
        shares = rows_BxL.reshape(self.batch_shards, S, columns, -1, *rest)
        return jnp.moveaxis(shares, 0, 2).reshape(S, columns, -1, *rest)

    def _to_rows(self, stream_SxCxbxLxD: jax.Array) -> jax.Array:
        """Reshapes the stream after the last tick to [B, L, D]; its first columns have moved up
        once more.
        """
        S, columns, _, *rest = stream_SxCxbxLxD.shape
        often, more = divmod(S - 1, columns)
        first, others = (
            _roll(stream_SxCxbxLxD[:, :more], often + 1),
            _roll(stream_SxCxbxLxD[:, more:], often),
        )
        columns_SxC = self.constrain(jnp.concatenate([first, others], axis=1), _STREAM)
        return jnp.moveaxis(
            columns_SxC.reshape(S, columns, self.batch_shards, -1, *rest), 2, 0
        ).reshape(-1, *rest)

    def _place(self, x_SxbxLxD: jax.Array) -> jax.Array:
        return self.constrain(x_SxbxLxD, ("stage", "batch", "length", "embed"))

    def _per_stage(self, flag: jax.Array) -> jax.Array:
        return jnp.broadcast_to(flag, self.num_stages).reshape(-1, 1, 1, 1)


def _column(stream_SxC: jax.Array, column: jax.Array) -> jax.Array:
    array: jax.Array = jax.lax.dynamic_index_in_dim(stream_SxC, column, axis=1, keepdims=False)
    return array


def _with_column(stream_SxC: jax.Array, value_S: jax.Array, column: jax.Array) -> jax.Array:
    array: jax.Array = jax.lax.dynamic_update_index_in_dim(stream_SxC, value_S, column, axis=1)
    return array


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _roll(x_S: jax.Array, by: int) -> jax.Array:
    """Moves every stage's part on by some stages: one permute, backward too (JAX's own transpose
    makes two).
    """
    return jnp.roll(x_S, by, axis=0)


_roll.defvjp(
    lambda x_S, by: (_roll(x_S, by), None), lambda by, _, cotangent_S: (_roll(cotangent_S, -by),)
)


@jax.checkpoint
def _choose(flag: jax.Array, if_true: jax.Array, otherwise: jax.Array | None = None) -> jax.Array:
    """Returns `jnp.where`, by default with zero; the backward pass keeps the small flag, not one
    per element.
    """
    return jnp.where(flag, if_true, jnp.zeros_like(if_true) if otherwise is None else otherwise)


def _rounds(S: int, R: int) -> tuple[np.ndarray, np.ndarray, list[list[tuple[int, int]]]]:
    """Returns the R permutes by which S devices exchange R neighbouring groups each for every S-th
    group.

    Group g starts on device g // R and goes to device g % S as its (g // S)-th. A round has the
    group that each device sends, the place of the group that it receives, and the pairs of sender
    and receiver.
    """
    device_S = np.arange(S)
    # Devices that would send to the same device in a round, if all sent their groups in order,
    # start at other groups.
    turn_S = device_S // (S // math.gcd(R, S))
    sent_RxS = (np.arange(R)[:, None] + turn_S) % R
    group_RxS = device_S * R + sent_RxS
    kept_RxS = np.empty_like(sent_RxS)
    np.put_along_axis(kept_RxS, group_RxS % S, group_RxS // S, axis=1)
    ways = [list(enumerate(to_S.tolist())) for to_S in group_RxS % S]
    return sent_RxS, kept_RxS, ways
