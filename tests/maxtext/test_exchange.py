"""Hosts that share the reading of MaxText's checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tensorstore
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxbatch.maxtext.checkpoints import exchange
from maxbatch.maxtext.checkpoints.folder import open_items
from maxbatch.maxtext.checkpoints.stored import StoredArray, open_arrays

pytestmark = [pytest.mark.processes, pytest.mark.pod(devices=8, hosts=4)]
SHAPES = {"whole": (6, 4, 10), "by_rows": (16, 3), "uneven": (10, 6), "vector": (8,)}
CHUNKS = {"whole": (6, 4, 10), "by_rows": (2, 3), "uneven": (4, 4), "vector": (8,)}


@pytest.mark.parametrize("most", [64 << 20, 200])
def test_hosts_read_each_chunk_once_between_them(
    pod: Any, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "_ROUND_BYTES", most)
    folder = Path(pod.folder) / f"items-{most}"
    values = {
        name: np.random.default_rng(7).normal(size=shape).astype(np.float32)
        for name, shape in SHAPES.items()
    }
    if pod.host == 0:
        for name, value in values.items():
            grid = {"name": "regular", "configuration": {"chunk_shape": CHUNKS[name]}}
            metadata = {"shape": value.shape, "data_type": "float32", "chunk_grid": grid}
            kvstore = {"driver": "ocdbt", "base": f"file://{folder}/", "path": f"params.{name}/"}
            spec = {"driver": "zarr3", "kvstore": kvstore, "metadata": metadata}
            tensorstore.open(spec, create=True).result().write(value).result()
        entries = {
            str(("params", name)): {"value_metadata": {"value_type": "jax.Array"}}
            for name in SHAPES
        }
        (folder / "_METADATA").write_text(
            json.dumps({"tree_metadata": entries, "use_ocdbt": True, "use_zarr3": True})
        )
    pod.barrier()

    read: list[int] = []
    whole_read = StoredArray.read

    def counted(array: StoredArray, spans: Any) -> np.ndarray:
        part = whole_read(array, spans)
        read.append(part.nbytes)
        return part

    monkeypatch.setattr(StoredArray, "read", counted)
    mesh = pod.mesh(data=2, fsdp=4)
    specs = {
        "whole": P(None, "fsdp", "data"),
        "by_rows": P(("data", "fsdp")),
        "uneven": P("data"),
        "vector": P(),
    }
    arrays = open_arrays(
        open_items(str(folder), "load_parameters_path"), [f"params.{name}" for name in SHAPES]
    )
    for name, value in values.items():
        made = exchange.read_shared(arrays[f"params.{name}"], NamedSharding(mesh, specs[name]))
        for shard in made.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), value[shard.index], err_msg=name)

    totals = multihost_utils.process_allgather(np.array([sum(read)]))
    assert int(totals.sum()) == sum(value.nbytes for value in values.values())
    assert jax.process_count() == 4
