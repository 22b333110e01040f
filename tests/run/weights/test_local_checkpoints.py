"""Local checkpoints of one host: a restart takes the newest state that is whole, and says which."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxbatch import ConfigError
from maxbatch.run.context import RunContext
from maxbatch.run.newest import newest_saved
from maxbatch.run.own import Parts
from maxbatch.run.pretraining import open_pretraining, train
from maxbatch.run.record.recorder import Output, Record
from maxbatch.run.session import Session
from maxbatch.run.weights import local_checkpoints, local_files, shard_files
from maxbatch.run.weights.local_files import saved_here
from maxbatch.run.weights.shards import blocks_here
from maxbatch.update.balance import BalancedState
from maxbatch.update.state import TrainState
from tests.helpers.tiny import assert_same_run, one_layer_config, read_metrics

ONE = jax.devices()[:1]
STEPS, PERIOD, LOST_AT = 10, 2, 8


class Lost(BaseException):
    """The end of a machine."""


class EndsAt(Output):
    """Ends a run once it has recorded a step, without a last checkpoint."""

    def __init__(self, step: int) -> None:
        self._step = step

    def append(self, record: Record) -> None:
        if record["step"] == self._step:
            raise Lost


def config_of(folder: Path, *overrides: str) -> Any:
    return one_layer_config(
        f"run_dir={folder / 'run'}",
        f"steps={STEPS}",
        "checkpoint_period=5",
        f"local_checkpoint_period={PERIOD}",
        f"local_checkpoint_directory={folder / 'disk'}",
        "global_batch_size=8",
        *overrides,
    )


def lose(folder: Path, at: int, *overrides: str) -> None:
    with pytest.raises(Lost):
        train(config_of(folder, *overrides), ONE, Parts(outputs=[EndsAt(at)]))


@pytest.fixture(scope="module")
def lost_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was lost after update 8, the last local checkpoint after update 6, the last in its
    folder after 5.
    """
    folder = tmp_path_factory.mktemp("lost")
    lose(folder, LOST_AT)
    return folder


def local_states(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("disk/run-*/host-*/[0-9]*"))


@pytest.fixture
def lost(lost_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of its own for each test, at the same path as seen by the run."""
    shutil.copytree(lost_once, tmp_path / "lost")
    (disk,) = (tmp_path / "lost" / "disk").glob("run-*")
    for module in (local_checkpoints, local_files):
        monkeypatch.setattr(module, "run_name", lambda run_dir: disk.name)
    return tmp_path / "lost"


def restart(
    folder: Path, devices: list[jax.Device] = ONE, *overrides: str
) -> tuple[int, TrainState | None]:
    """Returns the step that a restart continues from, and its state."""
    with ExitStack() as stack:
        context = RunContext(config_of(folder, *overrides), devices, stack)
        session = Session(context, open_pretraining(context))
        return session.position.step, session._restored


@pytest.mark.runs
def test_a_run_goes_on_from_its_local_checkpoint_as_if_nothing_had_happened(
    lost: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert local_states(lost) == ["6"], "the one before goes once the next one is whole"
    train(config_of(lost), ONE)
    said = capsys.readouterr()
    assert (
        "resumed at step 6, after 48 samples, from local checkpoints" in said.out and not said.err
    )
    train(
        one_layer_config(f"run_dir={tmp_path / 'whole'}", f"steps={STEPS}", "global_batch_size=8"),
        ONE,
    )
    assert_same_run(read_metrics(lost / "run"), read_metrics(tmp_path / "whole"))
    assert len({line["compiles"] for line in read_metrics(lost / "run")[LOST_AT:]}) == 1
    assert not local_states(lost), "a run that is complete has its last checkpoint in run_dir"


@pytest.mark.processes  # it compiles as much as those
def test_the_average_and_the_bias_and_counts_of_experts_come_back_from_a_local_checkpoint(
    tmp_path: Path,
) -> None:
    keys = (
        "decoder_block=mixtral",
        "num_experts=4",
        "num_experts_per_tok=2",
        "norm_topk_prob=true",
        "base_moe_mlp_dim=48",
        "routed_bias=true",
        "routed_bias_update_rate=0.01",
        "load_balance_loss_weight=0.1",
        "load_balance_scope=global",
        "parameter_average_half_life=500t",
    )
    lose(tmp_path, 3, *keys)
    step, state = restart(tmp_path, ONE, *keys)
    assert step == 2 and state is not None and isinstance(state.opt_state, BalancedState)
    (bias,) = (
        x
        for path, x in jax.tree.leaves_with_path(state.params)
        if "bias" in jax.tree_util.keystr(path)
    )
    assert np.abs(bias).max() == np.float32(0.02), "two steps of one expert the same way"
    assert np.sum(state.opt_state.last_counts_NxE) > 0
    pairs = zip(jax.tree.leaves(state.params), jax.tree.leaves(state.average), strict=True)
    assert any(np.abs(x - np.asarray(average)).max() > 0 for x, average in pairs)


def test_a_local_checkpoint_is_resharded_onto_another_mesh(lost: Path) -> None:
    step, one = restart(lost)
    other_step, four = restart(
        lost, jax.devices()[:4], "per_device_batch_size=1", "ici_tensor_parallelism=2"
    )
    assert (step, other_step) == (6, 6)
    assert one is not None and four is not None
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(four), strict=True):
        np.testing.assert_array_equal(x, y)
    assert any(
        len(x.sharding.device_set) == 4 and not x.is_fully_replicated for x in jax.tree.leaves(four)
    )


def flip_a_bit(state: Path) -> None:
    content = bytearray((state / "blocks-0.bin").read_bytes())
    content[len(content) // 2] ^= 4
    (state / "blocks-0.bin").write_bytes(content)


def tear(state: Path) -> None:
    content = (state / "blocks-0.bin").read_bytes()
    (state / "blocks-0.bin").write_bytes(content[: len(content) // 2])


def lose_the_blocks(state: Path) -> None:
    (state / "blocks-0.bin").unlink()


def tear_the_json(state: Path) -> None:
    content = (state / "state.json").read_bytes()
    (state / "state.json").write_bytes(content[: len(content) // 2])


def change_the_json(state: Path) -> None:
    content = (state / "state.json").read_text()
    (state / "state.json").write_text(content.replace('"samples_seen": 48', '"samples_seen": 40'))


def swap_blocks(state: Path) -> None:
    """As of another state, with checksums that hold: the checksum of the whole state tells."""
    record, arrays = local_files.read_part(state)
    blocks, _ = shard_files.read_blocks(arrays, arrays.places)
    changed = {name: block + block.dtype.type(1) for name, block in blocks.items()}
    local_files.write_part(state, record, arrays.forms, changed)


def lose_the_line_of_metrics(state: Path) -> None:
    metrics = next(state.parents[3].glob("run/metrics.jsonl"))
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:5]))


@pytest.mark.parametrize(
    "damage",
    [
        flip_a_bit,
        tear,
        lose_the_blocks,
        tear_the_json,
        change_the_json,
        swap_blocks,
        lose_the_line_of_metrics,
    ],
)
def test_a_damaged_local_checkpoint_is_named_and_the_newest_in_run_dir_is_taken(
    lost: Path, damage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    (state,) = lost.glob("disk/run-*/host-0/6")
    damage(state)
    assert restart(lost)[0] == 5
    said = capsys.readouterr().err.splitlines()
    assert "local checkpoint 6 cannot be used (" in said[-1] and said[-1].endswith(
        "training continues from step 5"
    )
    assert not local_states(lost), "update 6 is made again: no later start may take the old one"


@pytest.mark.parametrize("damage", [flip_a_bit, tear_the_json])
@pytest.mark.parametrize("has_saved", [True, False])
def test_a_start_whose_only_local_state_is_damaged_does_not_begin_anew(
    lost: Path, has_saved: bool, damage: Callable[[Path], None]
) -> None:
    """With a `checkpoints/` that is not mounted, and before the first checkpoint was due."""
    (state,) = lost.glob("disk/run-*/host-0/6")
    damage(state)
    (lost / "run" / "checkpoints").rename(lost / "elsewhere")
    (session,) = map(json.loads, (lost / "run" / "sessions.jsonl").read_text().splitlines())
    if not has_saved:
        (lost / "run" / "sessions.jsonl").write_text(
            json.dumps(session | {"saved_step": None}) + "\n"
        )
    before = (lost / "run" / "metrics.jsonl").read_bytes()
    named = (
        "sessions.jsonl states a checkpoint of step 5"
        if has_saved
        else "the local checkpoint of step 6, cannot be"
    )
    with pytest.raises(
        ConfigError, match=rf"run_dir=.*{named}.* works: run_dir=.*-2, or overwrite_run=true$"
    ):
        restart(lost)
    assert (lost / "run" / "metrics.jsonl").read_bytes() == before and local_states(lost) == ["6"]
    if has_saved:
        (lost / "elsewhere").rename(lost / "run" / "checkpoints")
        assert restart(lost)[0] == 5
    else:
        assert restart(lost, ONE, "overwrite_run=true")[0] == 0
        assert not local_states(lost) and not (lost / "run" / "metrics.jsonl").exists()


def test_a_local_checkpoint_counts_as_saved_where_a_host_dies(lost: Path) -> None:
    assert saved_here(str(lost / "disk"), lost / "run") == 6
    shutil.copytree(*(next(lost.glob("disk/run-*/host-0")) / step for step in ("6", "8")))
    assert saved_here(str(lost / "disk"), lost / "run") == 6, (
        "another host may not have written the newer one"
    )
    (note,) = lost.glob("disk/run-*/host-0/newest-whole")
    note.rename(lost / "note")
    assert saved_here(str(lost / "disk"), lost / "run") is None, "not even the first"
    (lost / "note").rename(note)
    config, run_dir = config_of(lost), str(lost / "run")
    unsaved = config.replaced({"enable_checkpointing": False})
    assert newest_saved(run_dir, config.checkpoint) == 6
    for state in lost.glob("disk/run-*/host-0/?"):
        shutil.rmtree(state)
    assert newest_saved(run_dir, config.checkpoint) == 6, "the others hold it, and this host is new"
    restart(lost)
    assert newest_saved(run_dir, config.checkpoint) == 5, "none of them does"
    shutil.rmtree(lost / "disk")
    assert newest_saved(run_dir, config.checkpoint) == 5
    assert newest_saved(run_dir, unsaved.checkpoint) is None


def test_a_damaged_checkpoint_in_run_dir_gives_way_to_an_older_local_one(lost: Path) -> None:
    # it states step 5
    shutil.copytree(lost / "run" / "checkpoints" / "5", lost / "run" / "checkpoints" / "7")
    assert restart(lost)[0] == 6


def test_a_local_checkpoint_that_is_half_written_does_not_count(lost: Path) -> None:
    (host,) = lost.glob("disk/run-*/host-0")
    (host / "6").rename(host / ".building-0")
    assert restart(lost)[0] == 5
    assert not list(host.iterdir())


def test_a_new_run_in_an_emptied_folder_takes_no_state_of_the_old_one(lost: Path) -> None:
    shutil.rmtree(lost / "run")
    assert restart(lost)[0] == 0
    assert not local_states(lost)


@pytest.mark.runs
def test_a_state_whose_updates_were_trained_again_elsewhere_is_not_taken(
    lost: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Machine 2 goes on from step 5 at another rate, past the step of the state of machine 1."""
    (disk,) = lost.glob("disk/run-*")
    disk.rename(lost / "machine-1")
    lose(lost, LOST_AT, "learning_rate=1e-3")
    shutil.rmtree(disk)
    (lost / "machine-1").rename(disk)
    assert local_states(lost) == ["6"] and len(read_metrics(lost / "run")) == LOST_AT
    capsys.readouterr()
    assert restart(lost, ONE, "learning_rate=1e-3")[0] == 5
    assert (
        "local checkpoint 6 cannot be used (its updates were trained again"
        in capsys.readouterr().err
    )
    assert not local_states(lost)


def dangling(host: Path) -> None:
    host.symlink_to(host.with_name("gone"))


def a_file(host: Path) -> None:
    host.write_text("no folder")


def marks_that_are_folders(host: Path) -> None:
    for name in ("newest-whole", "9/state.json", "8/blocks-0.bin"):
        (host / name).mkdir(parents=True)
    (host / "7").write_text("no folder")


def a_note_of_bytes(host: Path) -> None:
    host.mkdir()
    (host / "newest-whole").write_bytes(b"\xff" * 30)


@pytest.mark.parametrize("leave", [dangling, a_file, marks_that_are_folders, a_note_of_bytes])
def test_remains_of_a_host_that_is_gone_do_not_hide_the_whole_state(
    lost: Path, leave: Callable[[Path], None]
) -> None:
    (run,) = lost.glob("disk/run-*")
    leave(run / "host-1")
    assert saved_here(str(lost / "disk"), lost / "run") == 6
    assert restart(lost)[0] == 6


def test_a_state_of_another_run_that_had_the_same_run_dir_is_not_adopted(
    lost: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its step and position are those of a line of the new run, which kept no local checkpoints."""
    shutil.rmtree(lost / "run")
    lose(
        lost,
        LOST_AT,
        "learning_rate=1e-3",
        "local_checkpoint_directory=",
        "local_checkpoint_period=0",
    )
    capsys.readouterr()
    assert restart(lost, ONE, "learning_rate=1e-3")[0] == 5
    assert capsys.readouterr().err.count("of another run that had this run_dir (step 6)") == 1
    assert not local_states(lost)
    assert restart(lost, ONE, "learning_rate=1e-3")[0] == 5 and not capsys.readouterr().err


def test_a_full_disk_costs_one_warning_and_the_state_before_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sound, calls = local_files.write_blocks, []

    def full(folder: Path, name: str, blocks: Any) -> Any:
        calls.append(folder)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return sound(folder, name, blocks)

    monkeypatch.setattr(local_files, "write_blocks", full)
    lose(tmp_path, LOST_AT)
    said = capsys.readouterr().err
    assert len(calls) == 3 and said.count("warning") == 1
    assert (
        "the local checkpoint of step 4 is not kept" in said and "No space left on device" in said
    )
    assert local_states(tmp_path) == ["2"]
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert restart(tmp_path)[0] == 2


def test_each_block_that_one_host_holds_has_a_second_copy_at_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local_checkpoints, "_host", lambda device: device.id // 2)
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    split, replicated = (
        NamedSharding(mesh, spec) for spec in (P("fsdp", "tensor"), P(None, "tensor"))
    )
    x = jax.device_put(np.arange(64, dtype=np.int32).reshape(8, 8), split)
    assert local_checkpoints._needs_a_copy(x)
    assert not local_checkpoints._needs_a_copy(jax.device_put(x, replicated)), (
        "every host holds all of it"
    )
    sent = local_checkpoints._passed_on(split)(x)
    by_device = {shard.device.id: np.array(shard.data)[0] for shard in sent.addressable_shards}
    for shard in x.addressable_shards:
        np.testing.assert_array_equal(by_device[(shard.device.id + 2) % 8], shard.data)
    assert {name: block.tolist() for name, block in local_checkpoints._received(0, x, sent)} == {
        name: block.tolist() for name, block in blocks_here([x], of_all_hosts=False).items()
    }


def test_blocks_of_any_type_reach_other_hosts_bit_by_bit_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local_checkpoints, "_MOST_SENT", 16)
    blocks = {
        "0:2-4,0-3": np.array([[1.5, -0.0, np.nan], [2, 3, 4]], jax.numpy.bfloat16),
        "1:": np.array(7, np.int32),
        "2:0-5": np.array([True, False, True, True, False]),
    }
    forms = tuple(
        shard_files.ArrayForm(name, shape, str(blocks[key].dtype))
        for (name, shape), key in zip([("a", (4, 3)), ("b", ()), ("c", (5,))], blocks, strict=True)
    )
    sent = local_checkpoints._sent(0, list(blocks), forms, blocks, set(blocks))
    assert {name: (x.shape, x.dtype, x.tobytes()) for name, x in sent.items()} == {
        name: (x.shape, x.dtype, x.tobytes()) for name, x in blocks.items()
    }
    assert local_checkpoints._sent(0, list(blocks), forms, blocks, {"1:"}).keys() == {"1:"}
    assert local_checkpoints._sent(0, [], forms, {}, set()) == {}


def test_a_block_is_sent_by_one_host_that_has_it_to_those_that_need_and_lack_it() -> None:
    wanted, held = [{"0:0-2"}, {"0:2-4", "0:0-2"}, {"0:2-4"}], [{"0:0-2"}, {"0:0-2"}, {"0:2-4"}]
    assert local_checkpoints._senders(wanted, held) == [set(), set(), {"0:2-4"}]


def test_with_several_slices_the_second_copy_is_in_another_one() -> None:
    devices = [
        SimpleNamespace(process_index=host, slice_index=host // 2)
        for host in range(4)
        for _ in range(2)
    ]
    places = local_checkpoints._next_places(
        SimpleNamespace(mesh=SimpleNamespace(devices=np.array(devices)))
    )
    assert places == [4, 5, 6, 7, 0, 1, 2, 3]
