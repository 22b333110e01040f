"""The micro-batches that `fit` may try, and the largest that fits under a remat policy."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from fractions import Fraction

from maxbatch.around.compile.modelled import Modelled
from maxbatch.around.fit.meshes import keys_to_state, mesh_keys
from maxbatch.around.fit.oracle import CompilerOracle
from maxbatch.around.fit.search import largest_fitting
from maxbatch.config.config import Config
from maxbatch.config.sections import REMAT_TENSORS, customised_tensors
from maxbatch.config.values import Value, exact, plain_number
from maxbatch.data.feed.placement import BatchShape
from maxbatch.plan.batch import BatchPlan
from maxbatch.plan.mesh_shape import MeshShape
from maxbatch.plan.microbatches import MicrobatchUnit
from maxbatch.run.compile.memory import Parts, Verdict
from maxbatch.run.compile.target import Target
from maxbatch.system.errors import ConfigError

# From least to most rematerialisation; if the global batch is stated, all and the config's own are
# tried.
POLICIES = ("none", "minimal", "full")
_MOST_ROWS = 1 << 16  # of a micro-batch and data shard that the search tries


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The micro-batches that a config may have.

    `per_device_batch_size` grows by one sample per device. It grows by less if the batch has fewer
    shards than there are devices (tensor, context and pipeline axes share their rows), and by the
    ramp's increment in a ramp. If the global batch is stated, only the micro-batches that divide it
    count. Where samples share rows (`max_tokens_per_pass`), a micro-batch is a pass of whole rows
    per device, up to a row a sample of the largest batch.
    """

    num_devices: int
    rows: Sequence[int]  # of each micro-batch, the smallest first
    global_batch: int | None  # as stated
    accumulation: int  # micro-batches per update if the global batch is not stated
    row_length: int | None = None  # of rows that samples share; None: a row a sample
    rows_per_sample: int = 1  # that a sample has on its own, where they do

    @classmethod
    def of(cls, config: Config, plan: BatchPlan) -> Sizes:
        """Returns the sizes on the plan's devices.

        Raises:
          ConfigError: a step takes none of them in one pass.
        """
        sizes = cls._of(config, plan)
        if not sizes.rows:
            unit = MicrobatchUnit.from_config(config.plan, plan.mesh).rows
            key = "max_tokens_per_pass" if plan.is_packed else "per_device_batch_size"
            raise ConfigError(
                f"{key}={config[key]}: the smallest micro-batch "
                f"on {plan.num_devices:,} devices has {unit:,} rows (a stage of a ramp perhaps "
                f"more), and fit tries at most {_MOST_ROWS * plan.mesh.sizes['data']:,}; works: a "
                "larger data axis (ici_data_parallelism), or a smaller unit "
                "(num_pipeline_microbatches, per_device_batch_size_start)"
            )
        return sizes

    @classmethod
    def _of(cls, config: Config, plan: BatchPlan) -> Sizes:
        n, accumulation = plan.num_devices, plan.gradient_accumulation_steps
        most = _MOST_ROWS * plan.mesh.sizes["data"]
        if config.enable_rampup_batch_size and exact(config.per_device_batch_size_increment) > 0:
            keys = ("per_device_batch_size_start", "per_device_batch_size_increment")
            start, step = (int(exact(config[key]) * n) for key in keys)
            return cls(n, range(start + step, most + 1, step), None, accumulation)
        unit = MicrobatchUnit.from_config(config.plan, plan.mesh).rows
        if plan.is_packed:
            return cls._of_budgets(config, plan, unit, most)
        multiples = range(unit, most + 1, unit)
        if config.gradient_accumulation_steps is not None:
            return cls(n, multiples, None, accumulation)
        batch = plan.global_batch_size_to_train_on

        # rows that hold the batch in as many passes as the plan takes
        def fewest(rows: int) -> int:
            return -(-batch // (-(-batch // rows) * unit)) * unit

        fits = [
            rows
            for rows in multiples
            if (rows == fewest(rows) if config.batch_padding else batch % rows == 0)
        ]
        return cls(n, fits, batch, accumulation)

    @classmethod
    def _of_budgets(cls, config: Config, plan: BatchPlan, unit: int, most: int) -> Sizes:
        """Returns the sizes of passes whose samples share rows; one program runs all stages."""
        n, per_sample = plan.num_devices, config.recipe.rows_per_sample
        batch = max(stage.batch for stage in plan.manager.split_stages)
        largest = -(-per_sample * batch // unit) * unit
        per_device = range(1, -(-min(largest, most) // n) + 1)
        held = {min(largest, rows * n // unit * unit) for rows in per_device}
        return cls(
            n,
            sorted(rows for rows in held if per_sample <= rows <= most and rows),
            batch,
            1,
            config.max_target_length,
            per_sample,
        )

    def shape(self, rows: int) -> BatchShape:
        """Returns the shape of the batch whose micro-batches have that many rows."""
        samples = rows // self.rows_per_sample  # of a pass, if each has rows of its own
        return BatchShape(
            rows, -(-self.global_batch // samples) if self.global_batch else self.accumulation
        )

    def stated(self, rows: int) -> dict[str, Value]:
        """Returns the key that states a micro-batch, and its value."""
        if self.row_length is not None:
            return {"max_tokens_per_pass": -(-rows // self.num_devices) * self.row_length}
        return {"per_device_batch_size": plain_number(Fraction(rows, self.num_devices))}


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A request for a batch: a config, its devices, and the axes and sizes left open."""

    config: Config  # as the user states it
    target: Target
    any_mesh: bool  # the axes that the config does not state may be chosen

    @property
    def states_batch(self) -> bool:
        """Whether the global batch is stated; the cut and the remat policy are then chosen."""
        return self.config.gradient_accumulation_steps is None


@dataclasses.dataclass(frozen=True)
class Choice:
    """A micro-batch that fits under a remat policy, on a mesh."""

    remat_policy: str
    mesh: MeshShape
    shape: BatchShape
    stated: dict[str, Value]  # `per_device_batch_size`, or `max_tokens_per_pass`
    verdict: Verdict
    next_verdict: Verdict | None  # on the next larger micro-batch; None if there is no larger one
    parts: Parts
    modelled: Modelled  # the time of an update, if the target's compiler has a clock
    global_batch: int  # samples per update, without padding

    @property
    def padded_share(self) -> float | None:
        """The share of the slots of an update that are padding; None if it follows from lengths."""
        if "max_tokens_per_pass" in self.stated:
            return None
        slots = self.shape.micro_batch * self.shape.max_micro_batches
        return (slots - self.global_batch) / slots

    @property
    def rank(self) -> tuple[float, int, int]:
        """The sort key of ways: the least modelled time per sample comes first.

        Without a clock the largest micro-batch comes first, then the least rematerialisation.
        """
        order = (
            POLICIES.index(self.remat_policy) if self.remat_policy in POLICIES else len(POLICIES)
        )
        return (
            (self.modelled.modelled_step_s or 0.0) / self.global_batch,
            -self.shape.micro_batch,
            order,
        )

    def keys(self, wanted: Wanted) -> dict[str, Value]:
        """Returns the config keys that the choice changes."""
        changes = dict(self.stated)
        changes |= {"remat_policy": self.remat_policy} if wanted.states_batch else {}
        if self.remat_policy != "custom":  # only it may state where tensors are kept
            changes |= {name: REMAT_TENSORS[name][0] for name in customised_tensors(wanted.config)}
        return changes | (keys_to_state(self.mesh, wanted.config) if wanted.any_mesh else {})

    def to_dict(self) -> dict[str, object]:
        """Returns the choice for `--json`."""
        modelled = self.modelled.to_dict()
        del modelled["operations"]
        stated = {
            name: float(number) if isinstance(number, Fraction) else number
            for name, number in self.stated.items()
        }
        return {
            **dict.fromkeys(("per_device_batch_size", "max_tokens_per_pass")),
            **stated,
            "gradient_accumulation_steps": self.shape.max_micro_batches,
            "micro_batch_size_to_train_on": self.shape.micro_batch,
            "global_batch_size_to_train_on": self.global_batch,
            "padded_share": self.padded_share,
            "remat_policy": self.remat_policy,
            **mesh_keys(self.mesh),
            "hbm_bytes_needed": self.verdict.needed_bytes,
            "hbm_bytes_available": self.verdict.available_bytes,
            "memory": {
                f"{kind}_bytes": size for kind, size in dataclasses.asdict(self.parts).items()
            },
            **modelled,
        }


def choose(oracle: CompilerOracle, sizes: Sizes, at_once: int) -> Choice | None:
    """Returns the largest micro-batch that fits under the oracle's config; None if none fits.

    It compiles `at_once` sizes at a time.
    """
    target, is_tpu = oracle.target, oracle.target.devices[0].platform == "tpu"

    def ask(rows: Sequence[int]) -> list[Verdict]:
        return oracle.ask(*map(sizes.shape, rows))

    size = largest_fitting(
        sizes.rows, target.memory_bytes or 0, oracle.estimate(), ask, at_once, is_tpu
    )
    return _chosen(oracle, sizes, size) if size else None


def choose_smaller(oracle: CompilerOracle, sizes: Sizes, than: Choice) -> Choice | None:
    """Returns the next way to cut the batch below a choice: the largest micro-batch of at most half
    its rows.
    """
    size = bisect.bisect_right(sizes.rows, than.shape.micro_batch // 2)
    if not size:
        return None
    (verdict,) = oracle.ask(sizes.shape(sizes.rows[size - 1]))
    return _chosen(oracle, sizes, size, than.verdict) if verdict.fits else None


def _chosen(
    oracle: CompilerOracle, sizes: Sizes, size: int, following: Verdict | None = None
) -> Choice:
    """Returns the choice of a size that fits; compiles the next larger size if its verdict is
    unknown.
    """
    shape, *larger = (sizes.shape(rows) for rows in sizes.rows[size - 1 : size + 1])
    verdict, *next_verdict = oracle.ask(shape, *([] if following else larger))
    slots = shape.micro_batch * shape.max_micro_batches
    batch = sizes.global_batch or slots
    # of rows that samples share, the share of tokens follows from lengths
    share = 1.0 if sizes.row_length else batch / slots
    return Choice(
        oracle.config.remat_policy,
        oracle.mesh,
        shape,
        sizes.stated(shape.micro_batch),
        verdict,
        following or (next_verdict[0] if next_verdict else None),
        oracle.parts(shape, verdict),
        oracle.asked[shape].modelled.of_samples(share),
        batch,
    )
