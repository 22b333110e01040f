"""A fine-tuning with experts, killed with -9 and gone on with elsewhere, and the commands that take
its model.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from maxbatch.cli import main
from maxbatch.run.folder.position import committed_steps
from maxbatch.run.pretraining import train
from tests.helpers.chats import chat_config, chat_overrides, some_talks
from tests.helpers.command import Hold, start
from tests.helpers.processes import wait_for
from tests.helpers.tiny import ONE_LAYER, SAME, TINY_MODEL, assert_same_run, read_metrics

pytestmark = pytest.mark.processes

RUN = (
    *TINY_MODEL,
    ONE_LAYER,
    "max_target_length=64",
    "packing=false",
    "global_batch_size=8",
    "generate_prompt=",
    "eval_interval=-1",
    "learning_rate_schedule=constant",
    "warmup_steps_fraction=0",
    "log_period=1",
    "steps=6",
    "checkpoint_period=2",
    "decoder_block=mixtral",
    "num_experts=4",
    "num_experts_per_tok=2",
    "norm_topk_prob=true",
    "base_moe_mlp_dim=32",
    "logits_via_embedding=false",
    "load_balance_loss_weight=0.1",
    "load_balance_scope=global",
    "router_z_loss_weight=0.01",
)
SPLIT = ("per_device_batch_size=1", "ici_expert_parallelism=2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    chat_config(folder, some_talks(40))
    return folder


@pytest.fixture(scope="module")
def killed(folder: Path) -> Path:
    """The folder of a run killed on four devices, with experts over two, and resumed on two."""
    run_dir = folder / "killed"
    stated = (*chat_overrides(folder), *RUN, *SPLIT, f"run_dir={run_dir}")
    process = start("train", *stated, "--simulate-devices", "4", **Hold(3, folder).variables)
    wait_for(lambda: committed_steps(run_dir), process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert max(committed_steps(run_dir)) < 6
    train(chat_config(folder, None, *RUN, *SPLIT, f"run_dir={run_dir}"), jax.devices()[:2])
    return run_dir


def test_a_killed_run_goes_on_elsewhere_as_if_it_had_not_been(folder: Path, killed: Path) -> None:
    train(
        chat_config(folder, None, *RUN, "per_device_batch_size=8", f"run_dir={folder / 'whole'}"),
        jax.devices()[:1],
    )
    found, expected = read_metrics(killed), read_metrics(folder / "whole")
    assert_same_run(
        found, expected, SAME, ("loss", "grad_norm", "load_balance_loss", "router_z_loss")
    )
    assert found[0]["routing_fingerprint"] == expected[0]["routing_fingerprint"]


def test_its_model_is_scored_and_exported(
    folder: Path, killed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "rows.jsonl").write_text(
        '{"tokens": [100, 101, 102, 32, 7]}\n{"tokens": [5, 6, 7]}\n'
    )

    def scores(model: Path) -> list[Any]:
        assert main(["score", str(model), str(folder / "rows.jsonl"), "--json"]) == 0
        return [record["logprobs"] for record in json.loads(capsys.readouterr().out)["records"]]

    assert main(["export", str(killed), "--output", str(folder / "exported")]) == 0
    capsys.readouterr()
    for found, expected in zip(scores(folder / "exported"), scores(killed), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)
