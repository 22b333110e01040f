"""Hosts that share the reading of MaxText's checkpoints: every form of chunk, every place of a
parameter, bytes read, memory, damages.
"""

from __future__ import annotations

import importlib.util
import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
import pytest
import tensorstore
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxbatch.around.maxtext.checkpoints.exchange import read_parameter, round_bytes
from maxbatch.around.maxtext.checkpoints.folder import open_items
from maxbatch.around.maxtext.checkpoints.names import Place
from maxbatch.around.maxtext.checkpoints.stored import StoredArray, open_arrays
from maxbatch.system.errors import ConfigError

pytestmark = [pytest.mark.processes, pytest.mark.pod(devices=8, hosts=4)]
MESH = {"data": 2, "fsdp": 4}
SHAPES = {"whole": (6, 4, 10), "by_rows": (16, 3), "uneven": (10, 6), "vector": (8,)}
CHUNKS = {"whole": (6, 4, 10), "by_rows": (2, 3), "uneven": (4, 4), "vector": (8,)}
SPECS = {
    "whole": P(None, "fsdp", "data"),
    "by_rows": P(("data", "fsdp")),
    "uneven": P("data"),
    "vector": P(),
}
FORMS = ["zstd", "raw", "zarr3 zstd", "zarr3 raw", "gzip"]  # the last is read by TensorStore alone
UNCHANGED = (1.0, 0.0)


def write(folder: Path, values: Mapping[str, np.ndarray], chunks: dict, form: str) -> None:
    """Writes arrays as Orbax does."""
    *version, codec = form.split()
    for name, value in values.items():
        kvstore = {"driver": "ocdbt", "base": f"file://{folder}/", "path": f"params.{name}/"}
        if not version:
            compressor = None if codec == "raw" else {"id": codec.replace("gzip", "zlib")}
            metadata = {"shape": value.shape, "chunks": chunks[name], "compressor": compressor}
            spec = {"driver": "zarr", "kvstore": kvstore, "metadata": metadata}
            spec["metadata"]["dtype"] = value.dtype.str
        else:
            codecs: list[dict] = [{"name": "bytes", "configuration": {"endian": "little"}}]
            codecs += [] if codec == "raw" else [{"name": codec}]
            sharding = {"chunk_shape": chunks[name], "codecs": codecs}
            grid = {"name": "regular", "configuration": {"chunk_shape": chunks[name]}}
            metadata = {"shape": value.shape, "chunk_grid": grid, "data_type": value.dtype.name}
            metadata["codecs"] = [{"name": "sharding_indexed", "configuration": sharding}]
            spec = {"driver": "zarr3", "kvstore": kvstore, "metadata": metadata}
        tensorstore.open(spec, create=True).result().write(value).result()
    entries = {
        str(("params", name)): {"value_metadata": {"value_type": "jax.Array"}} for name in values
    }
    (folder / "_METADATA").write_text(
        json.dumps({"tree_metadata": entries, "use_ocdbt": True, "use_zarr3": bool(version)})
    )


def opened(folder: Path, names: Any) -> dict[str, StoredArray]:
    items = open_items(str(folder), "load_parameters_path")
    arrays = open_arrays(items, [f"params.{name}" for name in names])
    return {name.removeprefix("params."): array for name, array in arrays.items()}


class Counted(NamedTuple):
    """A key-value store that counts the bytes read from it."""

    store: Any
    sizes: list[int]

    def read(self, key: str, byte_range: slice) -> Any:
        future = self.store.read(key, byte_range=byte_range)
        self.sizes.append(len(future.result().value))
        return future


def assert_parts(made: jax.Array, expected: np.ndarray, name: str) -> None:
    for shard in made.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), expected[shard.index], err_msg=name)


@pytest.mark.parametrize("most", [64 << 20, 200])
@pytest.mark.parametrize("form", FORMS)
def test_hosts_read_each_chunk_once_between_them(
    pod: Any, form: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(pod.folder) / f"{form}-{most}"
    values = {
        name: np.random.default_rng(7).normal(size=shape).astype(np.float32)
        for name, shape in SHAPES.items()
    }
    if pod.host == 0:
        write(folder, values, CHUNKS, form)
    pod.barrier()

    sizes: list[int] = []
    whole_read = StoredArray.read

    def counted(array: StoredArray, spans: Any) -> np.ndarray:
        part = whole_read(array, spans)
        sizes.append(part.nbytes)
        return part

    monkeypatch.setattr(StoredArray, "read", counted)
    mesh = pod.mesh(**MESH)
    for name, array in opened(folder, SHAPES).items():
        is_streamed = form.endswith("raw") or bool(importlib.util.find_spec("zstandard"))
        assert (array.encoding is not None) == (is_streamed and form != "gzip")
        if array.encoding is not None:
            encoding = array.encoding
            array = array._replace(encoding=encoding._replace(store=Counted(encoding.store, sizes)))
        abstract = jax.ShapeDtypeStruct(
            array.shape, np.float32, sharding=NamedSharding(mesh, SPECS[name])
        )
        made = read_parameter({name: array}, Place((name,), ()), abstract, UNCHANGED, most)
        assert_parts(made, values[name], name)

    total = int(multihost_utils.process_allgather(np.array([sum(sizes)])).sum())
    # Chunks at an end are stored as large as the others; small ones gain nothing by compression,
    # and each has an index in zarr 3.
    stored = {"whole": 240, "by_rows": 48, "uneven": 6 * 16, "vector": 8}
    chunks = 1 + 8 + 6 + 1
    most_read = sum(stored.values()) * 4 + chunks * 40
    assert 0 < total <= most_read
    assert jax.process_count() == 4


class Case(NamedTuple):
    """A parameter of ours and the arrays that hold it."""

    place: Place
    shapes: dict[str, tuple[int, ...]]  # of the arrays
    shape: tuple[int, ...]
    spec: P
    scale: tuple[float, float] = UNCHANGED
    dtype: Any = np.float32


CASES = {
    "layers in one array": Case(
        Place(("a",) * 4, (0, 1, 2, 3)), {"a": (8, 4, 6)}, (4, 8, 6), P(None, "fsdp", "data")
    ),
    "a split axis of layers": Case(
        Place(("a",) * 4, (0, 1, 2, 3)), {"a": (8, 4, 6)}, (4, 8, 6), P("data", "fsdp")
    ),
    "an array of each layer": Case(
        Place(("a", "b"), (None, None)), {"a": (8, 6), "b": (8, 6)}, (2, 8, 6), P(None, "fsdp")
    ),
    "layers of two arrays in turns": Case(
        Place(("a", "b", "a", "b"), (0, 0, 1, 1)),
        {"a": (8, 2, 6), "b": (8, 2, 6)},
        (4, 8, 6),
        P(None, "fsdp", "data"),
    ),
    "one layer beside others": Case(
        Place(("b", "a", "a"), (None, 0, 1)), {"a": (8, 2), "b": (8,)}, (3, 8), P(None, "fsdp")
    ),
    "interleaved columns": Case(
        Place(("a",) * 2, (0, 1), is_interleaved=True),
        {"a": (8, 2, 2, 16)},
        (2, 8, 2, 16),
        P(None, "data", None, "fsdp"),
    ),
    "interleaved columns in one axis with heads": Case(
        Place(("a",) * 2, (0, 1), is_interleaved=True, is_flat=True),
        {"a": (32, 2)},
        (2, 4, 8),
        P(None, "data", "fsdp"),
    ),
    "a scale and another type": Case(
        Place(("a",), ()), {"a": (8, 6)}, (8, 6), P("fsdp"), (0.3, 1.0), ml_dtypes.bfloat16
    ),
}


def expected_of(case: Case, stored: Mapping[str, np.ndarray]) -> np.ndarray:
    place = case.place
    value = stored[place.arrays[0]]
    if place.is_stacked:
        layers = zip(place.arrays, place.numbers, strict=True)
        value = np.stack(
            [
                stored[name] if number is None else np.take(stored[name], number, axis=1)
                for name, number in layers
            ]
        )
    value = value.reshape(case.shape)
    if place.is_interleaved:
        value = np.concatenate([value[..., 0::2], value[..., 1::2]], axis=-1)
    if case.scale != UNCHANGED:
        value = value * np.float32(case.scale[0]) + np.float32(case.scale[1])
    return value.astype(case.dtype)


@pytest.mark.parametrize("most", [64 << 20, 200])
@pytest.mark.parametrize("name", CASES)
def test_every_place_of_a_parameter_is_read_by_several_hosts(
    pod: Any, name: str, most: int
) -> None:
    case = CASES[name]
    rng = np.random.default_rng(3)
    values = {one: rng.normal(size=shape).astype("f4") for one, shape in case.shapes.items()}
    folder = Path(pod.folder) / f"{name}-{most}"
    if pod.host == 0:
        chunks = {one: (3, *shape[1:]) for one, shape in case.shapes.items()}
        write(folder, values, chunks, "zarr3 raw")
    pod.barrier()

    sharding = NamedSharding(pod.mesh(**MESH), case.spec)
    abstract = jax.ShapeDtypeStruct(case.shape, case.dtype, sharding=sharding)
    made = read_parameter(opened(folder, values), case.place, abstract, case.scale, most)

    assert_parts(made, expected_of(case, values), name)


@pytest.mark.parametrize("form", ["zstd", "zarr3 raw"])
def test_a_chunk_that_one_host_cannot_read_is_one_line_on_all(pod: Any, form: str) -> None:
    folder = Path(pod.folder) / form
    values = {"a": np.random.default_rng(1).normal(size=(64, 64)).astype(np.float32)}
    if pod.host == 0:
        write(folder, values, {"a": (16, 64)}, form)
        file = max((folder / "d").iterdir(), key=lambda file: file.stat().st_size)
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2])
    pod.barrier()

    sharding = NamedSharding(pod.mesh(**MESH), P(None, "fsdp"))
    abstract = jax.ShapeDtypeStruct((64, 64), np.float32, sharding=sharding)
    with pytest.raises(ConfigError, match=r"its array params\.a cannot be read") as caught:
        read_parameter(opened(folder, values), Place(("a",), ()), abstract, UNCHANGED, 2000)
    assert "\n" not in str(caught.value)


class Peak:
    """The most memory of this process while the context lasts, beside what it had before."""

    def __enter__(self) -> Peak:
        self._before = self.num_bytes = _resident()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self.num_bytes -= self._before

    def _watch(self) -> None:
        while not self._is_over.is_set():
            self.num_bytes = max(self.num_bytes, _resident())
            time.sleep(0.002)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_host_holds_little_more_than_its_share_of_the_arrays(pod: Any) -> None:
    form = "zarr3 zstd" if importlib.util.find_spec("zstandard") else "zarr3 raw"
    folder = Path(pod.folder)
    # Each array is one chunk, larger than a host's share of all.
    shapes = dict.fromkeys("abc", (512, 8, 4096))
    if pod.host == 0:
        rng = np.random.default_rng(0)
        write(folder, {name: rng.random(shapes[name], np.float32) for name in shapes}, shapes, form)
    pod.barrier()

    arrays = opened(folder, shapes)
    sharding = NamedSharding(pod.mesh(**MESH), P(None, "fsdp", "data"))

    def read(name: str) -> jax.Array:
        rows, layers, columns = shapes[name]
        abstract = jax.ShapeDtypeStruct((layers, rows, columns), np.float32, sharding=sharding)
        place = Place((name,) * layers, tuple(range(layers)))
        return read_parameter(arrays, place, abstract, UNCHANGED, 1 << 20)

    read("a")  # compiles, connects the hosts and starts threads, which a small array does not
    with Peak() as peak:
        made = [read(name) for name in shapes]
    share = sum(shard.data.nbytes for array in made for shard in array.addressable_shards)
    assert share == 3 * 4 * np.prod(shapes["a"]) // 4
    of_threads = 16 << 20  # that they still take at first; a chunk is four times as large
    assert peak.num_bytes <= 1.2 * share + of_threads, peak.num_bytes / share


@pytest.mark.parametrize(("share", "most"), [(0, 256 << 10), (2**30, 2**24), (2**40, 2**28)])
def test_a_round_is_a_small_part_of_a_share(pod: Any, share: int, most: int) -> None:
    sharding = NamedSharding(pod.mesh(**MESH), P("fsdp", "data"))
    abstract = jax.ShapeDtypeStruct((4, share), np.uint8, sharding=sharding)
    assert round_bytes([abstract]) == most
