"""A reproducible update holds no more than four gradients beside its state, and knows what it
holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest

from maxbatch.data.feed.placement import BatchShape, Placement
from maxbatch.parallel.mesh import make_mesh
from maxbatch.parallel.sharding import batch_sharding
from maxbatch.plan.update_settings import UpdateSettings
from maxbatch.run.compile.background import compile_here
from maxbatch.update.gradients import NEXT_TOKEN
from maxbatch.update.reproducible import pieces, slabs
from maxbatch.update.reproducible.update import ReproducibleUpdate
from maxbatch.update.state import abstract_state, init_state
from tests.helpers.tiny import LENGTH, some_rows, tiny_config

MODEL = (
    "reproducible_sums=true",
    "base_emb_dim=128",
    "base_mlp_dim=512",
    "base_num_decoder_layers=4",
    "head_dim=32",
)


class Peak:
    """The most bytes that are in memory while a program runs, by the compiler's figures."""

    def __init__(self) -> None:
        self.of_program: dict[str, int] = {}
        self.of_arrays: dict[str, int] = {}  # the most bytes of arrays before a program
        self.runs: Counter[str] = Counter()

    def executable(self, name: str, lower: Callable[[], jax.stages.Lowered]) -> Any:
        compiled = compile_here(name, lower)
        figures: Any = compiled.memory_analysis()
        new = figures.output_size_in_bytes - figures.alias_size_in_bytes

        def run(*arguments: Any) -> Any:
            live = live_bytes()
            held = live + new + figures.temp_size_in_bytes
            self.of_program[name] = max(self.of_program.get(name, 0), held)
            self.of_arrays[name] = max(self.of_arrays.get(name, 0), live)
            self.runs[name] += 1
            return compiled(*arguments)

        return run

    def executables(
        self, name: str, lower: Callable[[], jax.stages.Lowered], devices: Sequence[jax.Device]
    ) -> Any:
        return dict.fromkeys(devices, self.executable(name, lower))


def live_bytes() -> int:
    """The bytes of all arrays on devices, each buffer once."""
    buffers = {
        shard.data.unsafe_buffer_pointer(): shard.data.nbytes
        for x in jax.live_arrays()
        for shard in x.addressable_shards
    }
    return sum(buffers.values())


def test_an_update_holds_at_most_four_gradients_beside_its_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # as of a large model
    monkeypatch.setattr(pieces, "_SMALLEST_BAND", 2**18)
    monkeypatch.setattr(slabs, "_VALUES", 2**12)
    config, peak = tiny_config(*MODEL), Peak()
    mesh = make_mesh(config, jax.devices()[:1])
    abstract = abstract_state(config.update, mesh)
    placement, shape = Placement(batch_sharding(mesh), LENGTH), BatchShape(2, 2)
    update = ReproducibleUpdate(
        config.update,
        mesh,
        abstract,
        placement,
        shape,
        1,
        NEXT_TOKEN,
        peak.executable,
        peak.executables,
    )
    before = live_bytes()
    state = init_state(config.update, abstract)
    beside = live_bytes()
    settings = jax.tree.map(np.float32, UpdateSettings(1e-3))
    batch = placement.stage(some_rows(4), 4, shape)
    gradient = 4 * sum(x.size for x in jax.tree.leaves(abstract.params))
    state, metrics = update(state, batch, 2, settings)
    assert not metrics.skipped
    held = {name: (bytes - beside) / gradient for name, bytes in peak.of_program.items()}
    assert 3 < max(held.values()) <= 4, held
    # what `compile` adds to the memory of each program
    arrays = {name: live - before for name, live in peak.of_arrays.items()}
    known = {name: update.uses[name].held_bytes for name in arrays}
    beyond = {name: (live - known[name]) / gradient for name, live in arrays.items()}
    assert max(beyond.values()) < 0.01, beyond
    assert abs(beyond["atom"]) < 0.01
    runs = {name: update.uses[name].runs for name in arrays}
    assert runs == peak.runs
