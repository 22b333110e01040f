"""A state is saved by the owners of its shards, and read by whoever needs them: no byte twice, none
in vain.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxbatch.run.folder.position import COMMITTED_FILE, DamagedError, committed_steps
from maxbatch.run.weights import shard_files, shards
from maxbatch.run.weights.checkpoint_writing import Save, remove_unfinished
from maxbatch.run.weights.shard_files import (
    INDEX,
    OTHER_ARRAYS,
    ArrayForm,
    cut,
    index_of,
    read_index,
)
from maxbatch.run.weights.shards import read_item
from maxbatch.system.errors import LeaseLost, StoreRefused
from maxbatch.system.storage import fences, leases
from maxbatch.system.storage.leases import Lease, take_lease
from maxbatch.system.storage.remote_path import RemotePath
from maxbatch.system.storage.storage import AnyPath, as_path
from tests.helpers.stores import Store

STEP = 3
TYPES = (
    "bfloat16",
    "float32",
    "float16",
    "int8",
    "uint32",
    "int32",
    "bool",
    "float8_e4m3fn",
    "float8_e5m2",
)


def mesh(fsdp: int, tensor: int) -> jax.sharding.Mesh:
    devices = jax.devices()[: fsdp * tensor]
    return jax.make_mesh(
        (fsdp, tensor),
        ("fsdp", "tensor"),
        devices=devices,
        axis_types=(jax.sharding.AxisType.Auto,) * 2,
    )


def values() -> dict[str, np.ndarray]:
    """Arrays of every type and rank, the empty one and a number included."""
    rng = np.random.default_rng(0)
    found = {name: rng.integers(0, 2, (8, 4, 6)).astype(jnp.dtype(name)) for name in TYPES}
    return found | {
        "number": np.array(7, np.int32),
        "empty": np.zeros((0, 4), np.float32),
        "one": np.ones(1, np.uint8),
    }


def sharding_of(name: str, x: np.ndarray, on: jax.sharding.Mesh) -> NamedSharding:
    cuts = (
        P()
        if x.ndim < 2 or not x.size
        else P("fsdp", "tensor")
        if name != "float16"
        else P(None, "tensor")
    )
    return NamedSharding(on, cuts)


def placed(arrays: dict[str, np.ndarray], on: jax.sharding.Mesh) -> dict[str, jax.Array]:
    return {name: jax.device_put(x, sharding_of(name, x, on)) for name, x in arrays.items()}


def shapes(arrays: dict[str, np.ndarray], on: jax.sharding.Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding_of(name, x, on))
        for name, x in arrays.items()
    }


def save(
    folder: AnyPath, state: Any, step: int = STEP, token: str = "token", old: tuple[int, ...] = ()
) -> Save:
    """Returns a save that has copied its blocks and written nothing."""
    return Save(folder, token, step, {"params": state}, {"position": "{}"}, list(old))


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save(folder, placed(values(), mesh(4, 2))).run()
    return folder / str(STEP) / "params"


@pytest.fixture
def saved(saved_once: Path, tmp_path: Path) -> Path:
    """A copy of its own for each test, of files that it may change."""
    for file in saved_once.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def assert_holds(item: AnyPath, on: jax.sharding.Mesh) -> None:
    wanted = shapes(values(), on)
    for name, x in read_item(item, wanted).items():
        expected = values()[name]
        assert (x.dtype, x.shape, x.sharding) == (
            expected.dtype,
            expected.shape,
            wanted[name].sharding,
        )
        assert np.asarray(x).tobytes() == expected.tobytes(), name


@pytest.mark.parametrize(("fsdp", "tensor"), [(4, 2), (1, 1), (2, 2), (8, 1), (2, 1)])
def test_arrays_of_every_type_come_back_bit_by_bit_on_any_mesh(
    saved_once: Path, fsdp: int, tensor: int
) -> None:
    assert_holds(saved_once, mesh(fsdp, tensor))


def test_every_byte_is_stored_once(saved_once: Path) -> None:
    """Of replicas the first one; nothing between blocks."""
    num_bytes = sum(file.stat().st_size for file in saved_once.glob("*.bin"))
    assert num_bytes == sum(x.nbytes for x in values().values())


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each read of a file."""
    sizes, read_range = list[int](), shard_files.read_range

    def noted(path: AnyPath, begin: int, end: int) -> bytes:
        sizes.append(end - begin)
        return read_range(path, begin, end)

    monkeypatch.setattr(shard_files, "read_range", noted)
    return sizes


def test_a_reader_reads_the_blocks_of_its_devices_alone(
    saved_once: Path, read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a host of four does, each of which has one row of devices."""
    monkeypatch.setattr(shards, "targets_here", lambda leaf: {((0, 2), (0, 4), (0, 6))})
    monkeypatch.setattr(shards, "assembled", lambda leaf, blocks: list(blocks))
    wanted = shapes(values(), mesh(4, 2))
    read_item(saved_once, {"float32": wanted["float32"]}, partial=True)
    assert sum(read) == values()["float32"].nbytes // 4


def test_large_shards_are_cut_into_blocks_that_are_views(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_files, "_MOST_BLOCK", 64)
    x = np.arange(5 * 3 * 7, dtype=np.float32).reshape(5, 3, 7)
    blocks = dict(cut(2, ((10, 15), (0, 3), (7, 14)), x))
    assert all(
        block.nbytes <= 64 and block.flags.c_contiguous and np.shares_memory(block, x)
        for block in blocks.values()
    )
    assert (
        np.concatenate([block.ravel() for block in blocks.values()]).tolist() == x.ravel().tolist()
    )
    assert list(blocks)[:2] == ["2:10-11,0-2,7-14", "2:10-11,2-3,7-14"]


def test_neighbouring_blocks_are_read_by_one_request_up_to_a_bound(
    saved_once: Path, read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, _ = read_index(saved_once / INDEX)
    blocks, errors = shard_files.read_blocks(stored, stored.places)
    assert len(read) == 1 and blocks.keys() == stored.places.keys() and not errors
    monkeypatch.setattr(shard_files, "_MOST_READ", 200)
    shard_files.read_blocks(stored, stored.places)
    assert max(read[1:]) <= 200 and sum(read[1:]) == read[0]


def test_the_data_of_a_host_are_files_of_a_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_files, "_MOST_FILE", 300)
    save(tmp_path, placed(values(), mesh(4, 2))).run()
    files = list((tmp_path / str(STEP) / "params").glob("*.bin"))
    assert len(files) > 3 and all(file.stat().st_size <= 300 for file in files)
    assert_holds(tmp_path / str(STEP) / "params", mesh(2, 2))


def flip(item: Path) -> None:
    (file,) = item.glob("*.bin")
    content = bytearray(file.read_bytes())
    content[50] ^= 1
    file.write_bytes(content)


def tear(item: Path) -> None:
    (file,) = item.glob("*.bin")
    os.truncate(file, file.stat().st_size - 1)


def lose(item: Path) -> None:
    (file,) = item.glob("*.bin")
    file.unlink()


def turn_into_a_folder(item: Path) -> None:
    (file,) = item.glob("*.bin")
    file.unlink()
    file.mkdir()


def lose_the_index(item: Path) -> None:
    (item / INDEX).unlink()


def change_the_index(item: Path) -> None:
    content = (item / INDEX).read_text()
    (item / INDEX).write_text(content.replace("bfloat16", "float16"))


def leave_a_block_out(item: Path) -> None:
    content = json.loads((item / INDEX).read_text())
    (blocks,) = content["files"].values()
    blocks.pop()
    del content["checksum"]
    (item / INDEX).write_bytes(shard_files.index_of(content["arrays"], content["files"]))


@pytest.mark.runs
@pytest.mark.slow
def test_the_index_of_an_unrolled_model_on_a_thousand_devices_can_be_read(tmp_path: Path) -> None:
    """126 layers of 9 matrices, as llama3-405b has; its file is larger than one host's part of a
    state ever is.
    """
    num_arrays, num_devices = 126 * 9, 1024
    forms = [ArrayForm(f"[{number}]", (num_devices, 64), "float32") for number in range(num_arrays)]
    files = {
        f"0a1b2c3d-{device}-0.bin": [
            (f"{number}:{device}-{device + 1},0-64", 256 * number, 1 << 31)
            for number in range(num_arrays)
        ]
        for device in range(num_devices)
    }
    (tmp_path / INDEX).write_bytes(index_of(forms, files))
    stored, _ = read_index(tmp_path / INDEX)
    assert len(stored.places) == num_arrays * num_devices


@pytest.mark.parametrize(
    "damage",
    [flip, tear, lose, turn_into_a_folder, lose_the_index, change_the_index, leave_a_block_out],
)
def test_damage_is_found_and_named(saved: Path, damage: Callable[[Path], None]) -> None:
    damage(saved)
    with pytest.raises(DamagedError, match=r"does not match its checksum|is missing|is not whole"):
        read_item(saved, shapes(values(), mesh(1, 1)))


def test_other_arrays_are_told_from_damage(saved_once: Path) -> None:
    wanted = shapes(values(), mesh(1, 1))
    wider = jax.ShapeDtypeStruct((16, 4, 6), jnp.int8, sharding=wanted["int8"].sharding)
    for other in (wanted | {"more": wider}, wanted | {"int8": wider}, {"int8": wanted["int8"]}):
        with pytest.raises(DamagedError, match=OTHER_ARRAYS):
            read_item(saved_once, other)
    assert read_item(saved_once, {"int8": wanted["int8"]}, partial=True).keys() == {"int8"}


def test_old_checkpoints_go_once_the_new_one_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = placed(values(), mesh(1, 1))
    for step in (1, 2):
        save(tmp_path, state, step).run()
    full = partial(monkeypatch.setattr, shard_files, "write_parts")
    write = shard_files.write_parts

    def refuse(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    full(refuse)
    with pytest.raises(Exception, match="no space left"):
        save(tmp_path, state, 3, old=(1,)).run()
    assert {path.name for path in tmp_path.iterdir()} == {"1", "2"}
    full(write)
    save(tmp_path, state, 3, old=(1,)).run()
    assert {path.name for path in tmp_path.iterdir()} == {"2", "3"}


# --- in a store ---


def leased(store: Store, name: str) -> tuple[RemotePath, Lease]:
    """Returns `checkpoints/` of a run, and the lease that this process holds of it."""
    run_dir = as_path(f"{store.bucket()}/{name}")
    assert isinstance(run_dir, RemotePath)
    lease = take_lease(run_dir / ".lease", lambda _: None)
    assert isinstance(lease, Lease)
    return run_dir / "checkpoints", lease


def test_a_checkpoint_in_a_store_is_whole_once_its_mark_is_there(store: Store) -> None:
    folder, lease = leased(store, "run")
    saved = save(folder, placed(values(), mesh(4, 2)))
    with store.failing(denied=COMMITTED_FILE), pytest.raises(StoreRefused):
        saved.run()
    assert not saved.may_be_committed and committed_steps(folder.parent) == []
    remove_unfinished(folder)
    assert not folder.exists()
    save(folder, placed(values(), mesh(4, 2))).run()
    assert committed_steps(folder.parent) == [STEP]
    assert_holds(folder / str(STEP) / "params", mesh(2, 1))
    remove_unfinished(folder)
    save(folder, placed(values(), mesh(4, 2)), STEP + 1, old=(STEP,)).run()
    assert {path.name for path in folder.iterdir()} == {str(STEP + 1)}
    lease.close()


def is_stopped_at(moment: int, store: Store, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Saves, and stops the writer after so many questions for its lease; returns whether there were
    as many.

    While it is stopped, another process takes the lease, removes what is there, and begins to write
    the same step.
    """
    folder, lease = leased(store, f"run-{moment}")
    late, clocks = (
        save(folder, placed({"x": np.ones(8, np.float32)}, mesh(1, 1)), token="late"),
        leases._clocks,
    )
    mark, index = folder / str(STEP) / COMMITTED_FILE, folder / str(STEP) / "params" / INDEX
    fence, left, was_whole = fences.fence_of(mark.url), moment, False
    assert fence is not None
    ask = fence.ask

    def ask_and_stop() -> None:
        nonlocal left, was_whole
        left -= 1
        ask()
        if left == 0:
            was_whole, files = mark.exists(), folder.file_system
            files.pipe_file(f"{folder.parent}/.lease", b'{"token": "of another"}')
            for path, _ in folder.files():
                files.rm_file(path.url)
            files.pipe_file(index.url, b"of the successor")
            patched.setattr(leases, "_clocks", lambda: tuple(one + 3600 for one in clocks()))

    with monkeypatch.context() as patched:
        patched.setattr(fence, "ask", ask_and_stop)
        try:
            late.run()
            assert was_whole or left > 0
        except LeaseLost as lost:
            assert "another process holds its lease now" in str(lost)
            assert index.read_bytes() == b"of the successor"
        if left <= 0:
            assert not mark.exists(), "it is the successor's, and not whole"
        lease.close()
    return left <= 0


def test_a_writer_that_is_suspended_at_any_moment_completes_no_checkpoint_of_its_successor(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = next(moment for moment in count(1) if not is_stopped_at(moment, store, monkeypatch))
    assert moments > 5
