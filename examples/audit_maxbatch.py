"""maxbatch's own update, for `maxbatch audit examples/audit_maxbatch.py:make --simulate-devices 4`.

python examples/audit_maxbatch.py
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import numpy as np

import maxbatch
from maxbatch.data.feed.placement import BatchShape, Placement
from maxbatch.parallel.sharding import batch_sharding
from maxbatch.plan.update_settings import UpdateSettings
from maxbatch.update.state import abstract_state, init_state
from maxbatch.update.step import make_train_step

LENGTH = 8
MOST_ROWS = 12  # of a batch of an audit, padding included
CONFIG = [
    f"max_target_length={LENGTH}",
    "vocab_size=256",
    "base_emb_dim=16",
    "base_num_query_heads=2",
    "base_num_kv_heads=1",
    "head_dim=8",
    "base_mlp_dim=32",
    "base_num_decoder_layers=1",
]


@cache
def program(num_devices: int) -> tuple[Any, Any, Any]:
    """Returns the mesh, the first state (on the host) and the compiled update of so many
    devices.
    """
    if num_devices > len(jax.devices()):
        raise ValueError(f"there are {len(jax.devices())} devices; --simulate-devices makes more")
    config = maxbatch.load_config(overrides=CONFIG)
    mesh = maxbatch.make_mesh(config, jax.devices()[:num_devices])
    abstract = abstract_state(config.update, mesh)
    first = jax.device_get(init_state(config.update, abstract))
    return mesh, (first, abstract), make_train_step(config.update, mesh, abstract)


class Loop:
    """The update of one layout."""

    def __init__(self, layout: maxbatch.Layout) -> None:
        self.mesh, (self.first, self.abstract), self.update = program(layout.num_devices)
        self.micro_batch = -(-layout.rows_per_pass // layout.num_devices) * layout.num_devices
        self.placement = Placement(batch_sharding(self.mesh), LENGTH)

    def init(self) -> Any:
        """Returns the parameters and the state of the optimizer."""
        return jax.tree.map(
            lambda x, like: jax.device_put(x, like.sharding), self.first, self.abstract
        )

    def step(self, state: Any, batch: dict[str, np.ndarray]) -> tuple[Any, dict[str, Any]]:
        """Takes one update; slots behind the rows are padded with rows of zero weight."""
        rows = len(batch["tokens"])
        passes = -(-rows // self.micro_batch)
        # one program for every number of passes
        room = max(passes, -(-MOST_ROWS // self.micro_batch))
        staged = self.placement.stage(batch, rows, BatchShape(self.micro_batch, room))
        state, metrics = self.update(
            state, staged, np.int32(passes), UpdateSettings(np.float32(1e-2))
        )
        return jax.block_until_ready(state), {"loss": metrics.loss, "weight": metrics.weight}

    def params(self, state: Any) -> dict[str, np.ndarray]:
        """Returns the parameters as NumPy arrays."""
        leaves = jax.tree_util.tree_leaves_with_path(state.params)
        return {jax.tree_util.keystr(path): np.array(leaf) for path, leaf in leaves}


def make(layout: maxbatch.Layout) -> Loop:
    """Returns the trainer of a layout."""
    return Loop(layout)


if __name__ == "__main__":
    print(maxbatch.audit(make))
