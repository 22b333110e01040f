"""A save of several hosts is one checkpoint, or none."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxbatch.parallel.hosts import report_to_first
from maxbatch.run.weights import shard_files
from maxbatch.run.weights.checkpoint_writing import Save
from maxbatch.run.weights.shards import read_item
from maxbatch.system.errors import TrainingError

pytestmark = [pytest.mark.processes, pytest.mark.pod(devices=4, hosts=2)]
VALUES = {
    "split": np.arange(64, dtype=np.float32).reshape(8, 8),
    "copied": np.arange(5, dtype=np.int32),
}


def placed(pod: Any, *cuts: str | None) -> dict[str, jax.Array]:
    places = shapes(pod, *cuts)
    return {
        name: jax.make_array_from_callback(
            x.shape, places[name].sharding, lambda index, x=x: x[index]
        )
        for name, x in VALUES.items()
    }


def shapes(pod: Any, *cuts: str | None) -> dict[str, jax.ShapeDtypeStruct]:
    mesh = pod.mesh(fsdp=2, tensor=2)
    specs = {"split": P(*cuts), "copied": P()}
    return {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, specs[name]))
        for name, x in VALUES.items()
    }


def save(folder: Path, state: Any) -> Save:
    return Save(folder, "token", 3, {"params": state}, {"position": "{}"}, [])


def test_each_host_writes_its_shards_and_reads_what_its_devices_need(pod: Any) -> None:
    folder = Path(pod.folder) / "whole"
    saved = save(folder, placed(pod, "fsdp", "tensor"))
    saved.run()
    assert [path.name for path in folder.iterdir()] == ["3"]
    sizes = {file.name: file.stat().st_size for file in (folder / "3" / "params").glob("*.bin")}
    assert sizes == {"token-0-0.bin": 128 + 20, "token-1-0.bin": 128}, (
        "of copies the first one alone"
    )
    read, read_range = list[int](), shard_files.read_range
    shard_files.read_range = lambda path, begin, end: (
        read.append(end - begin) or read_range(path, begin, end)
    )
    try:
        found = read_item(folder / "3" / "params", shapes(pod, "fsdp", "tensor"))
    finally:
        shard_files.read_range = read_range
    assert sum(read) == 128 + 20
    turned = read_item(folder / "3" / "params", shapes(pod, "tensor", "fsdp"))
    for arrays in (found, turned):
        for name, x in arrays.items():
            for shard in x.addressable_shards:
                np.testing.assert_array_equal(shard.data, VALUES[name][shard.index])


def test_a_host_that_cannot_write_is_named_by_the_others_and_nothing_is_left(pod: Any) -> None:
    folder, write = Path(pod.folder) / "full", shard_files.write_parts

    def refuse(path: Any, parts: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    shard_files.write_parts = refuse if pod.host == 1 else write
    try:
        with pytest.raises(
            TrainingError,
            match="^host 1: .*no space left" if pod.host == 0 else "^/.*no space left",
        ):
            save(folder, placed(pod, "fsdp", "tensor")).run()
    finally:
        shard_files.write_parts = write
    assert not list(folder.iterdir())
    pod.barrier()
    save(folder, placed(pod, "fsdp", "tensor")).run()
    assert [path.name for path in folder.iterdir()] == ["3"]


def test_the_first_host_alone_has_the_values_of_all_and_every_host_the_result(pod: Any) -> None:
    for turn in range(3):
        seen: list[list[int]] = []
        result = report_to_first(
            10 * turn + pod.host, lambda values, seen=seen: seen.append(values) or sum(values), "t"
        )
        assert result == 20 * turn + 1
        assert seen == ([[10 * turn, 10 * turn + 1]] if pod.host == 0 else [])
