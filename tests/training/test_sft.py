"""Fine-tuning on conversations: rows of very unequal trained tokens, and one update however they are cut."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from maxbatch.data.stream.stream import open_stream
from maxbatch.model.decoder import Decoder
from maxbatch.training.pretraining import train
from tests.helpers.chats import chat_config, some_talks
from tests.helpers.tiny import TINY_MODEL, read_metrics

pytestmark = pytest.mark.slow

TALKS = some_talks(60)
RUN = (
    *TINY_MODEL, "max_target_length=64", "global_batch_size=8", "enable_data_shuffling=true", "scan_layers=true",
    "generate_prompt=", "eval_interval=-1", "gradient_noise_scale=false", "checkpoint_period=1000",
    "learning_rate_schedule=constant", "warmup_steps_fraction=0",
)  # fmt: skip


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
    assert [m["loss"] for m in metrics] == pytest.approx([m["loss"] for m in reference], rel=2e-4)


@pytest.mark.parametrize("packing", ["packing=true", "packing=false"])
def test_the_update_does_not_depend_on_the_cut_of_its_rows(folder: Path, packing: str) -> None:
    go = partial(run, folder)
    name = packing.removeprefix("packing=")
    reference = go(f"{name}-whole", 1, packing, "steps=6", "per_device_batch_size=8")
    weights = open_stream(chat_config(folder, None, *RUN, packing)).read(0, 8)["weights"].sum(axis=1)
    assert max(weights) > 2 * min(weights), "rows differ in trained tokens"
    same(go(f"{name}-cut", 1, packing, "steps=6", "per_device_batch_size=2"), reference)
    go(f"{name}-resumed", 2, packing, "steps=3", "per_device_batch_size=2", "ici_pipeline_parallelism=2")
    same(go(f"{name}-resumed", 4, packing, "steps=6", "per_device_batch_size=1"), reference)


def test_the_loss_of_an_update_is_the_mean_over_its_trained_tokens(folder: Path) -> None:
    config = chat_config(folder, None, *RUN)
    metrics = run(folder, "one", 1, "steps=1", "per_device_batch_size=2")
    rows = open_stream(config).read(0, 8)
    decoder = Decoder(config, rngs=nnx.Rngs(params=jax.random.key(config.init_weights_seed)))
    hidden = jax.jit(lambda tokens, segments: decoder.hidden(tokens, segments))(rows["tokens"], rows["segments"])
    logits = np.asarray(hidden @ decoder.output_projection(), np.float64)[:, :-1]
    losses = np.log(np.exp(logits).sum(axis=-1))
    losses -= np.take_along_axis(logits, rows["tokens"][:, 1:, None], axis=-1)[..., 0]
    weights = rows["weights"][:, 1:]
    assert metrics[0]["loss"] == pytest.approx((losses * weights).sum() / weights.sum(), abs=1e-4)
    mean_of_means = ((losses * weights).sum(axis=1) / weights.sum(axis=1)).mean()
    assert abs(mean_of_means - metrics[0]["loss"]) > 1e-3, "what an average of the rows' means would have made of it"
