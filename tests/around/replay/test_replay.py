"""An update of a run is taken again elsewhere, and its samples are those of the gradient."""

from __future__ import annotations

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxbatch import ConfigError, load_config, open_stream
from maxbatch.around.replay.recorded_run import RecordedRun
from maxbatch.around.replay.replayed import Replayed, replay
from maxbatch.around.replay.updates import Before, Taken, rows_of, updates
from maxbatch.run.folder.sessions import read_sessions
from maxbatch.run.own import Parts
from maxbatch.run.pretraining import train
from tests.helpers.command import maxbatch
from tests.helpers.corpus import some_texts, write_jsonl
from tests.helpers.tiny import one_layer_config, read_metrics

pytestmark = pytest.mark.runs

KEYS = ("global_batch_size=8", "per_device_batch_size=2", "checkpoint_period=3")
SLOWER = "learning_rate=2e-3"


def replayed(run_dir: Path, step: int, devices: int = 1, checkpoint: int | None = None) -> Replayed:
    run = RecordedRun(str(run_dir))
    start = run.checkpoint_before(step, checkpoint)
    return replay(run, start, step, devices=jax.devices()[:devices])


def content(run_dir: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(file.relative_to(run_dir)): (file.read_bytes(), file.stat().st_mtime_ns)
        for file in sorted(run_dir.rglob("*"))
        if file.is_file()
    }


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six updates on four devices, and three more on two, at another rate, of two epochs."""
    folder = tmp_path_factory.mktemp("replay")
    texts = write_jsonl(folder / "texts.jsonl", [{"text": text} for text in some_texts(70)])
    data = ("dataset_type=jsonl", f"dataset_path={texts}", f"data_cache_dir={folder}/cache")
    keys = (*KEYS, *data, f"run_dir={folder}/run")
    train(one_layer_config(*keys, "steps=6"), jax.devices()[:4])
    train(one_layer_config(*keys, "steps=9", SLOWER), jax.devices()[:2])
    return folder / "run"


def test_a_run_whose_rate_a_resume_changed_is_replayed_equal_on_both_sides_of_it(
    run_dir: Path,
) -> None:
    before = content(run_dir)
    first, second = read_sessions(run_dir)
    assert first.changed == {}
    assert second.changed is not None and second.changed["learning_rate"] == ["0.01", "0.002"]
    assert second.changed["steps"] == ["6", "9"]
    for step, checkpoint, devices in ((2, None, 1), (5, None, 2), (8, 3, 4)):
        found = replayed(run_dir, step, devices, checkpoint)
        assert found.differences == [], step
        assert found.update.data_fingerprint == found.update.recorded_data_fingerprint
        assert found.update.loss == pytest.approx(found.update.recorded_loss, abs=2e-4)
        assert found.update.grad_norm == pytest.approx(found.update.recorded_grad_norm, abs=2e-4)
    assert content(run_dir) == before, "replay changes no byte of RUN"


def test_losses_of_samples_weighted_make_the_loss_and_their_shares_sum_to_1(run_dir: Path) -> None:
    found = replayed(run_dir, 5, 2)
    assert [one.sample.index for one in found.samples] == list(range(32, 40))
    samples = [one.sample for one in found.samples]
    weights = [sample.weight for sample in samples]
    losses = [sample.loss or math.nan for sample in samples]
    assert np.average(losses, weights=weights) == pytest.approx(found.update.loss, abs=1e-5)
    assert sum(sample.share or math.nan for sample in samples) == pytest.approx(1, abs=1e-5)
    top = replay(RecordedRun(str(run_dir)), 3, 5, top=2, devices=jax.devices()[:1])
    assert [one.sample.index for one in top.samples] == [
        one.index for one in sorted(samples, key=lambda one: -(one.share or 0))[:2]
    ]


def test_a_finite_difference_of_the_loss_along_the_gradient_agrees_with_the_shares(
    run_dir: Path,
) -> None:
    from flax import nnx

    from maxbatch.model.decoder import Decoder
    from tests.helpers.tiny import loss_sums

    found = replayed(run_dir, 4)
    run = RecordedRun(str(run_dir))
    step = updates(run, 3, 4, jax.devices()[:1])
    before = next(step)
    assert isinstance(before, Before)
    params, rows = before.state.params, rows_of(before.batch)
    graph = nnx.graphdef(nnx.eval_shape(lambda: Decoder(run.config, rngs=nnx.Rngs(0))))

    @jax.jit
    def losses(params: nnx.State) -> jax.Array:
        """The loss of each row, summed over its tokens."""

        def one(tokens: jax.Array, segments: jax.Array, weights: jax.Array) -> jax.Array:
            decoder = nnx.merge(graph, params)
            return loss_sums(decoder, tokens[None], segments[None], weights[None])[0]

        arrays = (jnp.asarray(rows[name]) for name in ("tokens", "segments", "weights"))
        found: jax.Array = jax.lax.map(lambda row: one(*row), tuple(arrays))
        return found

    weight = float(rows["weights"].sum())
    gradient = jax.grad(lambda p: losses(p).sum() / weight)(params)
    length = optax.tree.norm(gradient)

    def moved(distance: float) -> jax.Array:
        return losses(jax.tree.map(lambda p, g: p + distance * g / length, params, gradient))

    ahead, behind = moved(1e-2), moved(-1e-2)
    of_rows = np.asarray(ahead - behind) / 2e-2 / weight / float(length)
    shares = [one.sample.share for one in found.samples]
    np.testing.assert_allclose(of_rows, shares, atol=2e-3)
    step.close()


def test_the_gradient_norm_of_a_sample_is_that_of_a_run_whose_batch_it_is_alone(
    run_dir: Path, tmp_path: Path
) -> None:
    sample = replayed(run_dir, 4, 2).samples[3].sample
    rows = open_stream(load_config(run_dir / "config.yml"))

    class Alone:
        def __getitem__(self, index: int) -> dict[str, np.ndarray]:
            return rows[sample.index]

    alone = one_layer_config(
        "global_batch_size=1",
        "steps=1",
        f"run_dir={tmp_path}/alone",
        f"load_parameters_path={run_dir}/checkpoints/3",
    )
    train(alone, jax.devices()[:1], Parts(stream=Alone()))
    (line,) = read_metrics(tmp_path / "alone")
    assert line["grad_norm"] == pytest.approx(sample.grad_norm, rel=1e-5)
    assert line["loss"] == pytest.approx(sample.loss, rel=1e-5)


def test_a_sample_names_its_documents_and_every_sample_ahead_with_its_row(run_dir: Path) -> None:
    found = replay(RecordedRun(str(run_dir)), 3, 4, top=2, devices=jax.devices()[:1])
    stream = open_stream(load_config(run_dir / "config.yml"))
    lines = (run_dir.parent / "texts.jsonl").read_text().splitlines()
    for one in found.samples:
        assert one.documents
        for document in one.documents:
            assert document.file == str(run_dir.parent / "texts.jsonl")
            assert document.record is not None
            text = json.loads(lines[document.record - 1])["text"]
            assert document.text in text and document.tokens >= len(document.text)
    rows = {stream.row(one.sample.index).row for one in found.samples}
    again = {index for index in range(24, 72) if stream.row(index).row in rows}
    ranges = [tuple(map(int, text.split(":"))) for text in found.skip_samples.split()]
    assert {index for first, end in ranges for index in range(first, end)} == again
    assert len(again) >= 3, "rows return in the second epoch"


def test_updates_are_taken_from_the_first_parameters_where_no_checkpoint_is_before_them(
    run_dir: Path,
) -> None:
    steps = [
        one.line["step"]
        for one in updates(RecordedRun(str(run_dir)), None, 2, jax.devices()[:1])
        if isinstance(one, Taken)
    ]
    assert steps == [1, 2]


def test_an_update_that_differs_is_named_and_ends_with_exit_code_1(
    run_dir: Path, tmp_path: Path
) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(run_dir, copy)
    lines = read_metrics(copy)
    lines[3]["loss"] += 1e-3
    lines[4]["data_fingerprint"] = "0" * 16
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    answer = maxbatch("replay", copy, "--step", "5", "--json", "--simulate-devices", "1")
    assert answer.returncode == 1
    assert "update 4 differs: loss" in answer.stderr
    assert "update 5 differs: data_fingerprint" in answer.stderr
    found = json.loads(answer.stdout)
    assert found["step"] == 5 and len(found["samples"]) == 8
    assert found["recorded_data_fingerprint"] == "0" * 16 != found["data_fingerprint"]
    assert found["samples"][0].keys() >= {"index", "loss", "weight", "grad_norm", "share"}


def test_an_update_that_cannot_be_taken_again_is_refused_in_one_line(run_dir: Path) -> None:
    run = RecordedRun(str(run_dir))
    with pytest.raises(ConfigError, match=r"--step 30: .* has updates 1 to 9; works: --step 9"):
        run.line(30)
    with pytest.raises(ConfigError, match=r"checkpoints 3, 6 before update 8; works: --checkpoint"):
        run.checkpoint_before(8, 4)
    with pytest.raises(ConfigError, match="is no run folder"):
        _ = RecordedRun(str(run_dir / "checkpoints")).config


def test_an_older_run_says_from_which_update_on_it_can_be_taken_again(
    run_dir: Path, tmp_path: Path
) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(run_dir, copy)
    sessions = [json.loads(line) for line in (copy / "sessions.jsonl").read_text().splitlines()]
    for session in sessions:
        del session["changed"]
    (copy / "sessions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in sessions))
    run = RecordedRun(str(copy))
    assert [one.first_step for one in run.segments(7, 9)] == [7]
    with pytest.raises(ConfigError, match=r"from checkpoint 6 on; works: --step 7"):
        run.segments(6, 8)
