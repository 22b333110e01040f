"""(p) An update of a model with 8 experts, 2 active per token, against two other updates on the
same rows.

One is the update of a dense model with as many active parameters: its MLP is as wide as the two
experts of a token together. The other is the update of the same model, written by hand. The
vocabulary is small, so that the layers dominate.
"""

from __future__ import annotations

from collections.abc import Callable

import jax

from benchmarks.handwritten import Form, HandwrittenStep, parameters_of_trainer
from benchmarks.measurement import Measurement, ratio, seconds_in_turns
from benchmarks.step import check_equal
from benchmarks.trainer import (
    LEARNING_RATE,
    MODEL,
    QUICK_MODEL,
    RUN,
    TrainerStep,
    rows_of_documents,
)
from maxbatch.config.loading import load_config
from maxbatch.data.feed.placement import BatchShape, Placement
from maxbatch.parallel.mesh import make_mesh
from maxbatch.parallel.sharding import batch_sharding
from maxbatch.update.state import abstract_state
from maxbatch.update.step import abstract_settings, make_train_step

DENSE_BAR, HANDWRITTEN_BAR = 0.75, 0.95
# The first updates of both sides are equal to the bit; later ones differ, as rounding moves tokens
# between experts.
_LATER_UPDATES = 1e-3
_PER_TOKEN, _BALANCE = 2, 0.01
_EXPERTS = (
    "decoder_block=mixtral",
    "num_experts=8",
    f"num_experts_per_tok={_PER_TOKEN}",
    "norm_topk_prob=true",
    f"load_balance_loss_weight={_BALANCE}",
)


def measure(quick: bool) -> list[Measurement]:
    """The ratios of tokens/s, with experts over dense and over the same by hand."""
    rows, turns = (2, 3) if quick else (8, 9)
    model, width = (QUICK_MODEL, 64) if quick else ((*MODEL, "vocab_size=2048"), 1536)
    dense = _Side(rows, *model, f"base_mlp_dim={width}")
    experts = _Side(rows, *model, *_EXPERTS, f"base_moe_mlp_dim={width // 2}")
    by_hand = experts.by_hand()
    check_equal(by_hand, experts, later=_LATER_UPDATES)
    dense()
    seconds = seconds_in_turns({"dense": dense, "experts": experts, "by hand": by_hand}, turns)
    title = f"tokens/s, 8 experts of which {_PER_TOKEN} active / "
    return [
        ratio(
            title + f"dense, {rows} rows",
            seconds["dense"],
            seconds["experts"],
            bar=DENSE_BAR,
            sense="at least",
        ),
        ratio(
            title + f"the same by hand, {rows} rows",
            seconds["by hand"],
            seconds["experts"],
            bar=HANDWRITTEN_BAR,
            sense="at least",
        ),
    ]


class _Side:
    """The compiled update of a model, on rows in memory."""

    def __init__(self, num_rows: int, *overrides: str) -> None:
        self._config = config = load_config(overrides=[*overrides, *RUN])
        keys, self._mesh = config.update, make_mesh(config)
        abstract, shape = abstract_state(keys, self._mesh), BatchShape(num_rows, 1)
        batch = Placement(batch_sharding(self._mesh), config.max_target_length).abstract_batch(
            shape
        )
        scalars = jax.ShapeDtypeStruct((), "int32"), abstract_settings()
        lowered = make_train_step(keys, self._mesh, abstract).lower(abstract, batch, *scalars)
        self._step = TrainerStep(config, self._mesh, abstract, lowered.compile(), shape)
        self._rows = rows_of_documents(num_rows, config)

    def __call__(self) -> tuple[float, float]:
        return self._step(self._rows, 1)

    def by_hand(self) -> Callable[[], tuple[float, float]]:
        """Returns the hand-written update from the same parameters."""
        params = parameters_of_trainer(jax.device_get(self._step.state.params))
        form = Form(self._config.base_num_query_heads, _PER_TOKEN, _BALANCE)
        step = HandwrittenStep(
            params, self._mesh, form, (1, *self._rows["tokens"].shape), LEARNING_RATE
        )
        return lambda: step(self._rows)
