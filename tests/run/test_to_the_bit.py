"""With `reproducible_sums`, an update is equal to the last bit on any number of devices."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from maxbatch import load_config
from maxbatch.around.replay.recorded_run import RecordedRun
from maxbatch.around.replay.replayed import Wanted, replay
from maxbatch.cli import main
from maxbatch.run.pretraining import train
from maxbatch.run.programs import checked_mesh_shape
from maxbatch.system.errors import ConfigError
from tests.helpers.corpus import write_jsonl
from tests.helpers.tiny import (
    MEASURED,
    ONE_LAYER,
    TINY_RUN,
    UNMEASURED,
    UNSAVED,
    one_layer_config,
    read_metrics,
)

pytestmark = pytest.mark.runs

RUN = (
    "reproducible_sums=true",
    "packing=false",
    "global_batch_size=8",
    "learning_rate_schedule=constant",
    "warmup_steps_fraction=0",
    "adam_b1_half_life=4Kt",
    MEASURED,
)
SAME = ("step", "data_fingerprint", "loss", "grad_norm", "gradient_noise_scale", "state_hash")
KINDS = {
    "adapters of pairs": (
        "lora_rank=2",
        "parameter_average_half_life=4Kt",
        "use_dpo=true",
        "dataset_type=jsonl",
    ),
    "experts": (
        "decoder_block=mixtral",
        "num_experts=4",
        "num_experts_per_tok=2",
        "norm_topk_prob=true",
        "routed_bias=true",
        "routed_bias_update_rate=0.01",
        "base_moe_mlp_dim=32",
        "capacity_factor=1.0",
        "load_balance_loss_weight=0.1",
        "load_balance_scope=global",
        "router_z_loss_weight=0.01",
    ),
}
OF_KINDS = ("margin", "load_balance_loss", "router_z_loss", "routing_fingerprint", "dropped_tokens")
PAGE = Path(__file__).parents[2] / "docs/to-the-bit.md"


def run(run_dir: Path, devices: int, rows: int, *overrides: str) -> list[dict[str, Any]]:
    keys = (*RUN, f"per_device_batch_size={rows}", f"run_dir={run_dir}", *overrides)
    train(one_layer_config(*keys), jax.devices()[:devices])
    return read_metrics(run_dir)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on one device in one pass."""
    run_dir = tmp_path_factory.mktemp("whole")
    run(run_dir, 1, 8, "steps=4")
    return run_dir


def test_padding_passes_devices_a_resume_and_saved_programs_change_no_bit(
    whole: Path, tmp_path: Path
) -> None:
    run(tmp_path, 3, 1, "steps=2", "batch_padding=true")
    keys, saved = ("steps=4", "ici_data_parallelism=2"), tmp_path / "saved"
    words = [*TINY_RUN, ONE_LAYER, *RUN, *keys, "per_device_batch_size=1"]
    main(["compile", *words, "--output", str(saved)])  # for all devices
    lines = run(tmp_path, len(jax.devices()), 1, *keys, f"compiled_dir={saved}")
    assert lines[-1]["compiles"] == 0
    expected = read_metrics(whole)
    assert [[line[name] for name in SAME] for line in lines] == [
        [line[name] for name in SAME] for line in expected
    ]
    assert len({line["state_hash"] for line in lines}) == len(lines) == 4
    hashes = [(path / "hashes.jsonl").read_text() for path in (tmp_path, whole)]
    assert hashes[0] == hashes[1]
    arrays = json.loads(hashes[0].splitlines()[0])["hashes"]
    assert any(name.startswith("params[") for name in arrays)
    assert any(name.startswith("opt_state[") for name in arrays)


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_adapters_and_experts_are_the_same_to_the_bit(
    kind: str, whole: Path, tmp_path: Path
) -> None:
    pairs = [
        {"prompt": f"{n}?", "chosen": " yes" * (1 + n % 2), "rejected": " no" * (1 + n % 3)}
        for n in range(20)
    ]
    keys = [*KINDS[kind], UNSAVED, UNMEASURED]
    if kind != "experts":
        path = write_jsonl(tmp_path / "pairs.jsonl", pairs)
        keys += [f"dataset_path={path}", f"load_parameters_path={whole}"]
    expected = run(tmp_path / "one", 1, 8, "steps=2", *keys)
    lines = run(tmp_path / "three", 3, 1, "steps=2", "batch_padding=true", *keys)
    same = [name for name in (*SAME, *OF_KINDS) if name in expected[0]]
    assert [[line[name] for name in same] for line in lines] == [
        [line[name] for name in same] for line in expected
    ]
    assert expected[0]["state_hash"] != expected[1]["state_hash"]


def changed_hash(run_dir: Path, update: int) -> str:
    """Changes the recorded hash of a moment after an update; returns its name."""
    file = run_dir / "hashes.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    hashes = lines[update - 1]["hashes"]
    array = next(name for name in hashes if name.startswith("opt_state["))
    hashes[array] = "0" * 16
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return array


@pytest.mark.parametrize("kind", ["texts", "pairs"])
def test_the_tokens_of_a_pass_change_no_bit(kind: str, tmp_path: Path) -> None:
    """Nor do devices whose rows they hold, also of pairs, whose answers may be in several rows."""
    few = [
        {
            "text": "a" * (1 + 3 * n % 40),
            "prompt": f"{n}?",
            "chosen": "b" * (1 + 7 * n % 20),
            "rejected": "c" * (1 + 5 * n % 9),
        }
        for n in range(20)
    ]
    path = write_jsonl(tmp_path / "few.jsonl", few)
    keys = ("dataset_type=jsonl", f"dataset_path={path}", "per_device_batch_size=null", UNSAVED)
    keys = (*keys, f"use_dpo={str(kind == 'pairs').lower()}", "steps=2")

    def figures(devices: int, budget: int) -> list[list[Any]]:
        cut = (*keys, f"max_tokens_per_pass={budget}")
        lines = run(tmp_path / f"{devices}", devices, 1, *cut)
        assert [line["loss_weight"] for line in lines] == [8, 8] or kind == "texts"
        return [[line.get(name) for name in (*SAME, "margin", "row_share")] for line in lines]

    assert figures(3, 100) == figures(1, 1024)

    # and a replay names the array that is not the recorded one
    with_fault = changed_hash(tmp_path / "3", update=1)
    found = replay(RecordedRun(str(tmp_path / "3")), None, Wanted(2), jax.devices()[:2])
    assert found.differences == [f"update 1 differs: {with_fault}, to the last bit"]
    shares = [one.sample.share for one in found.update.samples]
    assert len(shares) == 8 and math.isclose(sum(filter(None, shares)), 1, abs_tol=1e-4)


def test_the_script_of_the_page_computes_the_recorded_hash(whole: Path, tmp_path: Path) -> None:
    block = re.search(r'title="state_hash.py"\n(.*?)```', PAGE.read_text(), re.S)
    assert block is not None
    script = tmp_path / "state_hash.py"
    script.write_text(block[1])
    done = subprocess.run(
        [sys.executable, script, whole / "checkpoints/4"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == read_metrics(whole)[-1]["state_hash"]


def test_replay_names_the_update_and_the_array_whose_recorded_bits_differ(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(whole, run_dir)
    array = changed_hash(run_dir, update=2)
    main(["replay", str(run_dir), "--step", "3", "--top", "1"])
    shown = "".join(capsys.readouterr())
    assert f"update 2 differs: {array}, to the last bit" in shown
    assert "update 1 differs" not in shown and "update 3 differs" not in shown


def test_gpus_are_refused_by_name() -> None:
    config = one_layer_config(*RUN)
    devices: Any = [SimpleNamespace(platform="gpu", device_kind="", process_index=0)]
    with pytest.raises(ConfigError, match="reproducible_sums=true: must be false on GPUs"):
        checked_mesh_shape(config.plan, config.programs, devices)


def test_a_chip_that_cannot_hold_the_model_whole_is_refused_by_name() -> None:
    config = load_config(overrides=["reproducible_sums=true", "model_name=llama2-7b"])
    devices: Any = [SimpleNamespace(platform="tpu", device_kind="TPU v5 lite", process_index=0)]
    with pytest.raises(ConfigError, match=r"must be false on TPU v5 lite \(16.91 GB\)"):
        checked_mesh_shape(config.plan, config.programs, devices)
