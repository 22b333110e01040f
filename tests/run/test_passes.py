"""Samples that share rows and passes train the run of a sample a row, at any budget and layout."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from maxbatch import testing as pods
from maxbatch.run.pretraining import train
from tests.helpers.chats import chat_config, some_talks
from tests.helpers.corpus import write_jsonl
from tests.helpers.tiny import ONE_LAYER, TINY_MODEL, UNSAVED, read_metrics

RUN = (
    *TINY_MODEL,
    ONE_LAYER,
    "max_target_length=64",
    "batch_size_schedule=0:7 14:20",
    "steps=4",
    "generate_prompt=",
    "eval_interval=-1",
    "checkpoint_period=2",
    "learning_rate_schedule=constant",
    "warmup_steps_fraction=0",
)
ALONE = ("packing=false",)  # a sample is a conversation
JOINED = ("packing=true",)  # a sample is a row of several
# what experts count, they count within a sample
EXPERTS = (
    *ALONE,
    "decoder_block=mixtral",
    "num_experts=4",
    "num_experts_per_tok=2",
    "norm_topk_prob=true",
    "base_moe_mlp_dim=48",
    "capacity_factor=1",
    "load_balance_loss_weight=0.1",
    "load_balance_scope=sequence",
    "router_z_loss_weight=0.01",
    "routed_bias=true",
    "routed_bias_update_rate=0.01",
)
BALANCED = (  # texts, by experts that take all tokens
    *ALONE,
    "use_sft=false",
    "decoder_block=mixtral",
    "num_experts=4",
    "num_experts_per_tok=2",
    "norm_topk_prob=true",
    "base_moe_mlp_dim=48",
    "load_balance_loss_weight=0.1",
    "load_balance_scope=global",
    "routed_bias=true",
    "routed_bias_update_rate=0.01",
)
SAME = ("step", "samples_seen", "tokens_seen", "data_fingerprint", "loss_weight", "tokens")
SAME_ROUTES = ("routing_fingerprint", "dropped_tokens", "expert_load_max")
CLOSE = {"loss": 2e-4, "grad_norm": 3e-4, "load_balance_loss": 2e-4, "router_z_loss": 2e-4}
Unpacked = Callable[[tuple[str, ...]], list[dict[str, Any]]]


def run(folder: Path, name: str, devices: int, *overrides: str) -> list[dict[str, Any]]:
    config = chat_config(folder, None, *RUN, f"run_dir={folder / name}", *overrides)
    train(config, jax.devices()[:devices])
    return read_metrics(folder / name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("passes")
    chat_config(folder, some_talks(60))
    return folder


@pytest.fixture(scope="module")
def unpacked(folder: Path) -> Unpacked:
    """Returns the metrics of a run that takes a row a sample, by its keys."""
    rows = ("per_device_batch_size=20", "batch_padding=true", UNSAVED)
    return functools.cache(lambda keys: run(folder, f"rows-{hash(keys)}", 1, *keys, *rows))


def same(lines: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for name in (*SAME, *SAME_ROUTES):
        assert [line.get(name) for line in lines] == [line.get(name) for line in expected], name
    for name in CLOSE.keys() & expected[0].keys():
        wanted = [line[name] for line in expected]
        assert [line[name] for line in lines] == pytest.approx(wanted, rel=CLOSE[name]), name


@pytest.mark.runs
@pytest.mark.parametrize(
    ("keys", "budget", "devices", "mesh"),
    [
        (ALONE, 64, 1, ()),
        (EXPERTS, 200, 4, ("ici_data_parallelism=2", "ici_expert_parallelism=2")),
        (
            JOINED,
            128,
            2,
            (
                "ici_context_parallelism=2",
                "context_parallel_strategy=ring",
                "context_parallel_load_balance=true",
            ),
        ),
    ],
    ids=["conversations", "experts", "rows"],
)
def test_an_update_does_not_depend_on_the_tokens_of_a_pass(
    folder: Path,
    unpacked: Unpacked,
    keys: tuple[str, ...],
    budget: int,
    devices: int,
    mesh: tuple[str, ...],
) -> None:
    name = f"passes-{devices}-{budget}"
    lines = run(folder, name, devices, *keys, f"max_tokens_per_pass={budget}", *mesh, UNSAVED)
    same(lines, unpacked(keys))
    rows = budget // 64 * devices
    for line in lines:
        slots = line["num_passes"] * rows * 64
        assert line["slot_share"] == pytest.approx(line["tokens"] / slots)
        assert line["slot_share"] <= line["row_share"] <= 1
    assert lines[-1]["compiles"] == lines[0]["compiles"], "nothing compiles after the first update"
    assert len({line["num_passes"] for line in lines}) > 1, "their number follows from lengths"
    if rows == 1:  # of a row a conversation there would be 20
        assert lines[-1]["num_passes"] < 20


@pytest.mark.runs
def test_a_resume_with_another_budget_goes_on_with_the_same_run(
    folder: Path, unpacked: Unpacked
) -> None:
    run(folder, "resumed", 1, "packing=false", "max_tokens_per_pass=128", "steps=2")
    lines = run(folder, "resumed", 2, "packing=false", "max_tokens_per_pass=64")
    same(lines, unpacked(ALONE))


@pytest.mark.runs
def test_a_resume_without_a_budget_goes_on_with_the_same_run(
    folder: Path, unpacked: Unpacked
) -> None:
    texts = [{"text": "ab" * (1 + 7 * n % 50)} for n in range(90)]  # some are longer than a row
    keys = (*BALANCED, f"dataset_path={write_jsonl(folder / 'texts.jsonl', texts)}")
    run(folder, "without", 2, *keys, "max_tokens_per_pass=150", "steps=2")
    rows = ("per_device_batch_size=20", "batch_padding=true")
    same(run(folder, "without", 1, *keys, *rows), unpacked(keys))


@pytest.mark.processes
def test_a_host_packs_the_same_passes_and_reads_the_samples_of_its_rows(
    folder: Path, unpacked: Unpacked
) -> None:
    layouts = ((), ("expansion_factor_real_data=2", "ici_data_parallelism=2"))
    keys = (*RUN, "packing=false", "max_tokens_per_pass=64", UNSAVED)
    configs = [
        chat_config(folder, None, *keys, *layout, f"run_dir={folder / f'hosts-{len(layout)}'}")
        for layout in layouts
    ]
    pods.run(lambda _: [train(config) for config in configs], devices=4, hosts=2, timeout=600)
    for config in configs:
        same(read_metrics(config.run_dir), unpacked(ALONE))
