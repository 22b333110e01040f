"""(p) An update of a model with 8 experts, 2 of them a token's, against a dense model with as many active parameters.

The two experts of a token are together as wide as the dense MLP. The vocabulary is small, so that the layers are what
is measured.
"""

from __future__ import annotations

from collections.abc import Callable

import jax

from benchmarks.measurement import Measurement, ratio, seconds_in_turns
from benchmarks.trainer import MODEL, QUICK_MODEL, RUN, TrainerStep, rows_of_documents
from maxbatch.config.loading import load_config
from maxbatch.data.feed.placement import BatchShape, Placement
from maxbatch.parallel.mesh import make_mesh
from maxbatch.parallel.sharding import batch_sharding
from maxbatch.training.update.state import abstract_state
from maxbatch.training.update.step import abstract_settings, make_train_step
from maxbatch.training.update.update_config import UpdateConfig

BAR = 0.75
_EXPERTS = (
    "decoder_block=mixtral",
    "num_experts=8",
    "num_experts_per_tok=2",
    "norm_topk_prob=true",
    "load_balance_loss_weight=0.01",
)


def measure(quick: bool) -> list[Measurement]:
    """The ratio of tokens/s, with experts over dense."""
    rows, turns = (2, 3) if quick else (8, 9)
    model, width = (QUICK_MODEL, 64) if quick else ((*MODEL, "vocab_size=2048"), 1536)
    sides = {
        "dense": _update(rows, *model, f"base_mlp_dim={width}"),
        "experts": _update(rows, *model, *_EXPERTS, f"base_moe_mlp_dim={width // 2}"),
    }
    for side in sides.values():
        side()
    seconds = seconds_in_turns(sides, turns)
    title = f"tokens/s, 8 experts of which 2 active / dense, {rows} rows"
    return [ratio(title, seconds["dense"], seconds["experts"], bar=BAR, sense="at least")]


def _update(num_rows: int, *overrides: str) -> Callable[[], object]:
    """Returns a compiled update of a model, on rows in memory."""
    config = load_config(overrides=[*overrides, *RUN])
    keys, mesh = UpdateConfig.of(config), make_mesh(config)
    abstract, shape = abstract_state(keys, mesh), BatchShape(num_rows, 1)
    batch = Placement(batch_sharding(mesh), config.max_target_length).abstract_batch(shape)
    scalars = jax.ShapeDtypeStruct((), "int32"), abstract_settings()
    lowered = make_train_step(keys, mesh, abstract).lower(abstract, batch, *scalars)
    step, rows = TrainerStep(config, mesh, abstract, lowered.compile(), shape), rows_of_documents(num_rows, config)
    return lambda: step(rows, 1)
