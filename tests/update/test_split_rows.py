"""The update of rows over several devices moves keys and values as its strategy says."""

from __future__ import annotations

import re

import jax
import pytest

from maxbatch.data.feed.placement import Batch
from maxbatch.parallel.mesh import make_mesh
from maxbatch.update.state import abstract_state
from maxbatch.update.step import abstract_settings, make_train_step
from tests.helpers.tiny import ONE_LAYER, tiny_config

DEVICES, KV_HEADS, WIDTH = 4, 2, 8
LENGTH = 64  # of rows; not the width of the model, which the matrices of keys and values have


def program(strategy: str) -> str:
    config = tiny_config(
        ONE_LAYER,
        f"max_target_length={LENGTH}",
        f"ici_context_parallelism={DEVICES}",
        "ici_fsdp_parallelism=1",
        f"context_parallel_strategy={strategy}",
    )
    mesh = make_mesh(config, jax.devices()[:DEVICES])
    abstract = abstract_state(config.update, mesh)
    rows = (1, 2, LENGTH)
    batch = Batch(*(jax.ShapeDtypeStruct(rows, dtype) for dtype in ("int32", "int32", "float32")))
    scalars = jax.ShapeDtypeStruct((), "int32"), abstract_settings()
    step = make_train_step(config.update, mesh, abstract)
    return str(step.lower(abstract, batch, *scalars).compile().as_text())


def moved(text: str, collective: str, length: int) -> list[str]:
    """Returns the lines of a collective whose results are keys or values of a length."""
    shape = rf"\[(?:\d+,)*{length},{KV_HEADS},{WIDTH}\]|\[(?:\d+,)*{KV_HEADS},{length},{WIDTH}\]"
    return [
        line
        for line in text.splitlines()
        if re.search(rf" {collective}(-start)?\(", line)
        and re.search(rf"= .*f32(?:{shape}).* {collective}", line)
    ]


@pytest.mark.parametrize(
    ("strategy", "gathers", "permutes"), [("all_gather", True, False), ("ring", False, True)]
)
def test_an_update_gathers_keys_or_passes_them_on(
    strategy: str, gathers: bool, permutes: bool
) -> None:
    text = program(strategy)
    assert bool(moved(text, "all-gather", LENGTH)) == gathers
    assert bool(moved(text, "collective-permute", LENGTH // DEVICES)) == permutes


def test_an_update_exchanges_heads_by_all_to_alls() -> None:
    text = program("ulysses")
    exchanges = re.findall(r" all-to-all\(", text)
    assert len(exchanges) == 8, "queries, keys, values and results, and their gradients"
    assert not moved(text, "all-gather", LENGTH)
