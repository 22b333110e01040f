"""Fine-tuning on conversations: rows of very unequal trained tokens, and one update however they
are cut.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from maxbatch.data.stream.stream import open_stream
from maxbatch.model.decoder import Decoder
from maxbatch.run.folder.position import committed_steps
from maxbatch.run.pretraining import train
from tests.helpers.chats import chat_config, chat_overrides, some_talks
from tests.helpers.command import Hold, start
from tests.helpers.processes import wait_for
from tests.helpers.tiny import TINY_MODEL, UNSAVED, read_metrics

pytestmark = pytest.mark.runs

TALKS = some_talks(60)
RUN = (
    *TINY_MODEL,
    "max_target_length=64",
    "global_batch_size=8",
    "enable_data_shuffling=true",
    "scan_layers=true",
    "generate_prompt=",
    "eval_interval=-1",
    "gradient_noise_scale=false",
    "checkpoint_period=1000",
    "learning_rate_schedule=constant",
    "warmup_steps_fraction=0",
)


def run(folder: Path, name: str, devices: int, *overrides: str) -> list[dict[str, Any]]:
    config = chat_config(folder, None, *RUN, f"run_dir={folder / name}", *overrides)
    train(config, jax.devices()[:devices])
    return read_metrics(folder / name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sft")
    chat_config(folder, TALKS)
    return folder


def same(metrics: list[dict[str, Any]], reference: list[dict[str, Any]]) -> None:
    for key in ("step", "samples_seen", "data_fingerprint", "loss_weight"):
        assert [m[key] for m in metrics] == [m[key] for m in reference]
    for key, tolerance in (("loss", 2e-4), ("grad_norm", 3e-4)):
        assert [m[key] for m in metrics] == pytest.approx(
            [m[key] for m in reference], rel=tolerance
        )


RING = (
    "ici_context_parallelism=4",
    "context_parallel_strategy=ring",
    "context_parallel_load_balance=true",
)
PACKINGS = ("packing=true", "packing=false")


@pytest.fixture(scope="module")
def whole(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The metrics of a run of one device that takes each batch in one pass, by its packing."""
    keys = ("steps=24", "per_device_batch_size=8", UNSAVED)
    return {packing: run(folder, f"whole-{packing}", 1, packing, *keys) for packing in PACKINGS}


@pytest.mark.parametrize("packing", PACKINGS)
def test_throughput_counts_tokens_not_slots(
    folder: Path, whole: dict[str, list[dict[str, Any]]], packing: str
) -> None:
    segments = open_stream(chat_config(folder, None, *RUN, packing)).read(0, 8)["segments"]
    first = whole[packing][0]
    assert first["tokens"] == np.count_nonzero(segments)
    assert first["slot_share"] == pytest.approx(np.count_nonzero(segments) / segments.size)
    assert first["tokens_per_second"] == pytest.approx(first["tokens"] / first["step_time_s"])
    assert first["tokens_seen"] == segments.size


@pytest.mark.parametrize("packing", PACKINGS)
def test_rows_differ_in_their_trained_tokens(folder: Path, packing: str) -> None:
    weights = (
        open_stream(chat_config(folder, None, *RUN, packing)).read(0, 8)["weights"].sum(axis=1)
    )
    assert max(weights) > 2 * min(weights)


@pytest.mark.parametrize(
    ("packing", "devices", "rows", "mesh"),
    [
        ("packing=true", 1, 2, ()),
        ("packing=false", 2, 2, ()),
        ("packing=false", 4, 1, ("ici_data_parallelism=2",)),
        ("packing=true", 2, 2, ("ici_pipeline_parallelism=2",)),
        ("packing=true", 4, 1, RING),
    ],
    ids=[
        "accumulation 4",
        "2 devices, accumulation 2",
        "4 devices, accumulation 2",
        "pipeline 2",
        "a ring of 4",
    ],
)
def test_the_update_does_not_depend_on_the_cut_of_its_rows(
    folder: Path,
    whole: dict[str, list[dict[str, Any]]],
    packing: str,
    devices: int,
    rows: int,
    mesh: tuple[str, ...],
) -> None:
    cut = f"cut-{packing}-{devices}-{len(mesh)}-{rows}"
    found = run(
        folder, cut, devices, packing, "steps=6", f"per_device_batch_size={rows}", *mesh, UNSAVED
    )
    same(found, whole[packing][:6])


def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    folder: Path, whole: dict[str, list[dict[str, Any]]]
) -> None:
    packing, run_dir = "packing=true", folder / "killed"
    stated = (
        *chat_overrides(folder),
        *RUN,
        packing,
        "steps=24",
        "per_device_batch_size=4",
        "checkpoint_period=2",
    )
    process = start("train", *stated, f"run_dir={run_dir}", **Hold(12, Path.cwd()).variables)
    wait_for(lambda: process.poll() is not None or len(committed_steps(run_dir)) > 1, seconds=300)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL and committed_steps(run_dir)[0] < 24
    resumed = run(
        folder,
        run_dir.name,
        2,
        packing,
        "steps=24",
        "per_device_batch_size=1",
        "checkpoint_period=8",
    )
    same(resumed, whole[packing])


def test_the_loss_of_an_update_is_the_mean_over_its_trained_tokens(folder: Path) -> None:
    config = chat_config(folder, None, *RUN)
    metrics = run(folder, "one", 1, "steps=1", "per_device_batch_size=2", UNSAVED)
    rows = open_stream(config).read(0, 8)
    decoder = Decoder(
        config.decoder, rngs=nnx.Rngs(params=jax.random.key(config.init_weights_seed))
    )
    hidden = jax.jit(lambda *arrays: decoder.hidden(*arrays).x_MxLxD)(
        rows["tokens"], rows["segments"]
    )
    logits = np.asarray(hidden @ decoder.output_projection(), np.float64)[:, :-1]
    losses = np.log(np.exp(logits).sum(axis=-1))
    losses -= np.take_along_axis(logits, rows["tokens"][:, 1:, None], axis=-1)[..., 0]
    weights = rows["weights"][:, 1:]
    assert metrics[0]["loss"] == pytest.approx((losses * weights).sum() / weights.sum(), abs=1e-4)
    mean_of_means = ((losses * weights).sum(axis=1) / weights.sum(axis=1)).mean()
    assert abs(mean_of_means - metrics[0]["loss"]) > 1e-3, (
        "what an average of the rows' means would have made of it"
    )
