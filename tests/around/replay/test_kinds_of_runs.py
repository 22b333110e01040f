"""Updates of several kinds of runs are replayed on other meshes, and equal the recorded ones."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest

from maxbatch.around.replay.comparison import computes_exactly
from maxbatch.around.replay.recorded_run import RecordedRun
from maxbatch.around.replay.replay_page import page_of
from maxbatch.around.replay.replayed import Replayed, Wanted, replay
from maxbatch.around.replay.stream_task import Documents
from maxbatch.plan.skip_samples import holes_of
from maxbatch.run.pretraining import train
from maxbatch.system.storage.storage import AnyPath, as_path
from tests.helpers.corpus import some_texts, write_jsonl
from tests.helpers.stores import Store, on
from tests.helpers.tiny import one_layer_config

PAIRS = [
    {"prompt": f"{n}?", "chosen": " yes" * (1 + n % 3), "rejected": " no" * (1 + n % 4)}
    for n in range(20)
]


class Kind(NamedTuple):
    """A kind of run, the mesh that it has, and the devices of its replay."""

    records: list[dict[str, str]]
    keys: tuple[str, ...]
    num_devices: int
    replayed_on: int


TEXTS = [{"text": text} for text in some_texts(60)]
KINDS = {
    "a ramp with holes that skips spikes, on a mesh of tensor and pipeline": Kind(
        TEXTS,
        (
            "base_num_decoder_layers=2",
            "batch_size_schedule=0:4 8:8",
            "per_device_batch_size=2",
            "ici_tensor_parallelism=2",
            "ici_pipeline_parallelism=2",
            "skip_samples=3:5 17:18",
            "skip_step_on_spikes=true",
            "skip_step_interval=4",
            "skip_step_scaling_factor=0.1",
        ),
        4,
        2,
    ),
    "experts with a balance over the batch": Kind(
        TEXTS,
        (
            "decoder_block=mixtral",
            "num_experts=4",
            "num_experts_per_tok=2",
            "norm_topk_prob=true",
            "base_moe_mlp_dim=16",
            "load_balance_loss_weight=0.1",
            "router_z_loss_weight=0.01",
            "routed_bias=true",
            "routed_bias_update_rate=0.01",
            "global_batch_size=8",
            "ici_expert_parallelism=2",
        ),
        2,
        1,
    ),
    "adapters, trained on pairs": Kind(
        PAIRS, ("use_dpo=true", "lora_rank=2", "global_batch_size=4", "packing=false"), 1, 2
    ),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for adapters."""
    folder = tmp_path_factory.mktemp("base") / "run"
    train(
        one_layer_config("global_batch_size=4", "steps=1", f"run_dir={folder}"), jax.devices()[:1]
    )
    return folder


def finite(numbers: list[float | None]) -> list[float]:
    return [math.nan if number is None else number for number in numbers]


@pytest.mark.runs
@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_an_update_of_any_kind_of_run_is_taken_again_on_another_mesh(
    kind: Kind, base: Path, tmp_path: Path
) -> None:
    records = write_jsonl(tmp_path / "records.jsonl", kind.records)
    data = ("dataset_type=jsonl", f"dataset_path={records}", "skip_bad_records=true")
    adapts = "lora_rank=2" in kind.keys
    keys = (*kind.keys, f"load_parameters_path={base}") if adapts else kind.keys
    config = one_layer_config(
        *data, *keys, "steps=5", "checkpoint_period=3", f"run_dir={tmp_path}/run"
    )
    train(config, jax.devices()[: kind.num_devices])
    run = RecordedRun(f"{tmp_path}/run")
    colours = "num_experts=4" not in kind.keys  # one program less to compile
    wanted = Wanted(5, around=1, has_losses=colours)
    found = replay(run, 3, wanted, jax.devices()[: kind.replayed_on])
    assert found.differences == [] and len(found.before) == 1
    check_samples(found, colours)
    holes, kept = holes_of(config.stream), run.line(4)["samples_seen"]
    own = [one.sample.index for one in found.update.samples]
    assert own == holes.own_numbers(range(kept, run.line(5)["samples_seen"]))
    page = tmp_path / "page.html"
    page_of(found, run.named).write(page)
    assert "<script" not in page.read_text() and ('title="' in page.read_text()) == colours
    json.dumps(found.to_json(), allow_nan=False)


@on("gs")
def test_a_run_in_a_bucket_is_replayed_and_stays_as_it_is(store: Store) -> None:
    run_dir = store.bucket() + "/run"
    keys = ("global_batch_size=4", "steps=2", "checkpoint_period=1", f"run_dir={run_dir}")
    train(one_layer_config(*keys), jax.devices()[:1])
    before = content(as_path(run_dir))
    found = replay(RecordedRun(run_dir), 1, Wanted(2), jax.devices()[:2])
    assert found.differences == [] and len(found.update.samples) == 4
    assert content(as_path(run_dir)) == before and len(before) > 5


def content(folder: AnyPath) -> dict[str, bytes]:
    found = dict[str, bytes]()
    for path in folder.iterdir():
        found |= content(path) if path.is_dir() else {str(path): path.read_bytes()}
    return found


def test_updates_in_bfloat16_and_in_eight_bits_are_not_compared_exactly() -> None:
    assert computes_exactly(one_layer_config())
    for key in ("dtype=bfloat16", "weight_dtype=bfloat16", "quantization=int8"):
        assert not computes_exactly(one_layer_config(key))


def check_samples(found: Replayed, colours: bool) -> None:
    """Checks that the samples of the updates make their batches, and name their documents."""
    for update in found.shown:
        samples = [one.sample for one in update.samples]
        assert sum(finite([one.share for one in samples])) == pytest.approx(1, abs=1e-4)
        losses, weights = finite([one.loss for one in samples]), [one.weight for one in samples]
        assert np.average(losses, weights=weights) == pytest.approx(update.figures.loss, abs=1e-3)
        for one in update.samples:
            assert isinstance(one.content, Documents)
            documents, losses = one.content
            assert documents and len(losses) == len(documents) * colours
            for document in documents:
                assert document.file is not None and document.record is not None
            for document, pieces in zip(documents, losses, strict=colours):
                assert "".join(text for text, _ in pieces) == document.text
