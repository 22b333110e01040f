"""An update of a run is taken again elsewhere, and its samples are those of the gradient."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from maxbatch import ConfigError, load_config, open_stream
from maxbatch.around.replay import replayed
from maxbatch.around.replay.comparison import Compared
from maxbatch.around.replay.recorded_run import RecordedRun
from maxbatch.around.replay.replayed import Replayed, Wanted, replay
from maxbatch.around.replay.sample_gradients import Sample
from maxbatch.around.replay.stream_task import Documents
from maxbatch.around.replay.updates import Before, Taken, updates
from maxbatch.cli import main
from maxbatch.model.decoder import Decoder
from maxbatch.run.folder.sessions import read_sessions
from maxbatch.run.own import Parts
from maxbatch.run.pretraining import train
from tests.helpers.corpus import some_texts, write_jsonl
from tests.helpers.tiny import loss_sums, one_layer_config, read_metrics

pytestmark = pytest.mark.runs

KEYS = ("global_batch_size=8", "per_device_batch_size=2", "checkpoint_period=3")
SLOWER = "learning_rate=2e-3"


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


@pytest.fixture(scope="module")
def fourth(run_dir: Path) -> Replayed:
    """Update 4, taken again on two devices."""
    return replay(RecordedRun(str(run_dir)), 3, Wanted(4), jax.devices()[:2])


def test_a_run_whose_rate_a_resume_changed_is_replayed_equal_on_both_sides_of_it(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = read_sessions(run_dir)
    assert first.changed == {}
    assert second.changed is not None and second.changed["learning_rate"] == ["0.01", "0.002"]
    assert second.changed["steps"] == ["6", "9"]
    before = content(run_dir)
    command = ["replay", str(run_dir), "--step", "8", "--checkpoint", "3", "--around", "4"]
    assert main([*command, "--top", "2", "--json"]) == 0, "a difference would end with 1"
    assert content(run_dir) == before, "replay changes no byte of RUN"
    found = json.loads(capsys.readouterr().out)
    shown = [*found["before"], found]
    assert [update["step"] for update in shown] == [4, 5, 6, 7, 8]
    for update in shown:
        assert update["data_fingerprint"] == update["recorded_data_fingerprint"]
        assert update["loss"] == pytest.approx(update["recorded_loss"], abs=2e-4)
        assert update["grad_norm"] == pytest.approx(update["recorded_grad_norm"], abs=2e-4)
        one, other = update["samples"]
        assert one["grad_norm"] * one["weight"] > other["grad_norm"] * other["weight"]
        assert set(one) == {"index", "loss", "weight", "grad_norm", "share", "documents"}


def test_losses_of_samples_weighted_make_the_loss_and_their_shares_sum_to_1(
    fourth: Replayed,
) -> None:
    assert fourth.differences == []
    samples = [one.sample for one in fourth.update.samples]
    assert [sample.index for sample in samples] == list(range(24, 32))
    weights = [sample.weight for sample in samples]
    losses = [sample.loss or math.nan for sample in samples]
    mean = np.average(losses, weights=weights)
    assert mean == pytest.approx(fourth.update.figures.loss, abs=1e-5)
    assert sum(sample.share or math.nan for sample in samples) == pytest.approx(1, abs=1e-5)


def test_a_finite_difference_of_the_loss_along_the_gradient_agrees_with_the_shares(
    run_dir: Path, fourth: Replayed
) -> None:
    run = RecordedRun(str(run_dir))
    step = updates(run, 3, 4, jax.devices()[:1])
    before = next(step)
    assert isinstance(before, Before)
    params, rows = before.state.params, before.rows.arrays
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
    shares = [one.sample.share for one in fourth.update.samples]
    np.testing.assert_allclose(of_rows, shares, atol=2e-3)
    step.close()


def test_the_gradient_norm_of_a_sample_is_that_of_a_run_whose_batch_it_is_alone(
    run_dir: Path, fourth: Replayed, tmp_path: Path
) -> None:
    sample = fourth.update.samples[3].sample
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


def test_a_sample_names_its_documents_and_every_sample_ahead_with_its_row(
    run_dir: Path, fourth: Replayed
) -> None:
    stream = open_stream(load_config(run_dir / "config.yml"))
    file = str(run_dir.parent / "texts.jsonl")
    lines = Path(file).read_text().splitlines()
    for one in fourth.update.samples:
        assert isinstance(one.content, Documents) and one.content.documents
        for document in one.content.documents:
            assert document.file == file and document.record is not None
            text = json.loads(lines[document.record - 1])["text"]
            assert document.text in text and document.tokens >= len(document.text)
    rows = {stream.row(one.sample.index).row for one in fourth.update.samples}
    again = {index for index in range(24, 72) if stream.row(index).row in rows}
    ranges = [tuple(map(int, text.split(":"))) for text in fourth.skip_samples.split()]
    found = {index for first, end in ranges for index in range(first, end)}
    assert {index for index in found if index < 72} == again
    assert {stream.row(index).row for index in found} == rows
    assert len(again) > 8, "rows return in the second epoch"


def test_updates_are_taken_from_the_first_parameters_where_no_checkpoint_is_before_them(
    run_dir: Path,
) -> None:
    run = RecordedRun(str(run_dir))
    assert run.checkpoint_before(2, None) is None
    lines = [one.line for one in updates(run, None, 2, jax.devices()[:1]) if isinstance(one, Taken)]
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert line["loss"] == pytest.approx(run.line(line["step"])["loss"], abs=2e-4)


def test_a_sample_that_pulls_elsewhere_or_is_not_finite_is_above_one_with_a_larger_share() -> None:
    aligned = Sample(0, 1.2, 62.0, 2.5, 0.097)
    strange = Sample(1, 6.4, 63.0, 4.9, 0.040)
    broken = Sample(2, None, 62.0, None, None)
    assert broken.pull > strange.pull > aligned.pull > Sample(3, None, 0.0, 0.0, None).pull


def test_an_update_differs_by_its_fingerprint_or_in_float32_by_its_figures() -> None:
    same = Compared(5, 3.0, 3.0, 900.0, 900.1, "ab", "ab")
    assert same.difference(is_exact=True) is None, "rounding grows with the figure"
    assert "data_fingerprint" in str(
        same._replace(recorded_data_fingerprint="cd").difference(is_exact=False)
    )
    other = same._replace(loss=3.001)
    assert other.difference(is_exact=False) is None
    assert str(other.difference(is_exact=True)).startswith("loss 3.001, recorded 3.0")
    assert same._replace(grad_norm=None).difference(is_exact=True) is not None
    assert Compared(5, None, None, None, None, "ab", "ab").difference(is_exact=True) is None


def test_an_update_that_differs_is_named_and_ends_with_exit_code_1(
    run_dir: Path,
    fourth: Replayed,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    differing = fourth._replace(differences=["update 4 differs: loss 1.0, recorded 2.0"])
    monkeypatch.setattr(replayed, "replay", lambda *_: differing)
    assert main(["replay", str(run_dir), "--step", "4"]) == 1
    printed = capsys.readouterr()
    assert "update 4 differs: loss 1.0, recorded 2.0" in printed.err
    assert "taken again from checkpoint 3" in printed.out and "texts.jsonl:" in printed.out
    assert f'skip_samples="{fourth.skip_samples}"' in printed.out


def test_an_update_that_cannot_be_taken_again_is_refused_in_one_line(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RecordedRun(str(run_dir))
    with pytest.raises(ConfigError, match=r"--step 30: .* has updates 1 to 9; works: --step 9"):
        run.line(30)
    with pytest.raises(ConfigError, match=r"checkpoints 3, 6 before update 8; works: --checkpoint"):
        run.checkpoint_before(8, 4)
    with pytest.raises(ConfigError, match="is no run folder"):
        _ = RecordedRun(str(run_dir / "checkpoints")).config
    assert main(["replay", str(run_dir), "--step", "4", "--html", "missing/page.html"]) == 2
    refusal = "--html missing/page.html: missing is no folder; make it, or name another"
    assert refusal in capsys.readouterr().err, "before any update is taken"


def test_an_older_run_says_from_which_update_on_it_can_be_taken_again(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    (copy / "sessions.jsonl").unlink()
    assert [one.first_step for one in RecordedRun(str(copy)).segments(3, 8)] == [3, 7], "by devices"
    assert "has no sessions.jsonl" in capsys.readouterr().err


def test_a_forks_updates_have_the_config_of_its_run_until_the_step_of_the_fork(
    run_dir: Path, tmp_path: Path
) -> None:
    origin, fork = tmp_path / "origin", tmp_path / "fork"
    shutil.copytree(run_dir, origin)
    command = ["fork", str(origin), "--step", "6", "--output", str(fork)]
    assert main([*command, "learning_rate=5e-3", "steps=12"]) == 0
    run = RecordedRun(str(fork))
    rates = [(one.first_step, one.config.learning_rate) for one in run.segments(2, 8)]
    assert rates == [(2, 0.01), (7, 0.005)]
    origin.rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match=r"until 6 are those of .*, which it was forked from"):
        RecordedRun(str(fork)).segments(6, 8)
    assert len(RecordedRun(str(fork)).segments(7, 8)) == 1
