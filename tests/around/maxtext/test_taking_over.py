"""Runs that go on with a MaxText run: its step, its moments, its bias correction, and nothing
written to its folder.
"""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from maxbatch import load_config, train
from maxbatch.around.maxtext.checkpoints.names import places_of
from maxbatch.around.maxtext.checkpoints.reading import MaxTextCheckpoint
from maxbatch.around.maxtext.checkpoints.stored import open_arrays
from maxbatch.around.maxtext.export import ScannedNames, arrays_there, export_maxtext, nested
from maxbatch.cli import main
from maxbatch.run.weights.parameters import open_parameters, open_source
from maxbatch.system.errors import ConfigError
from maxbatch.update.optimizers import AT_REST, make_optimizer
from tests.helpers.maxtext_checkpoints import (
    abstract_params,
    content_of,
    random_like,
    write_checkpoint,
)
from tests.helpers.tiny import ONE_LAYER, TINY_RUN

RUN = (*TINY_RUN, ONE_LAYER, "logits_via_embedding=false", "checkpoint_period=2", "dtype=float32")
UPDATES = 5


@pytest.fixture(scope="module")
def maxtext_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a run folder of MaxText's with a state of five updates, `checkpoints/4`."""
    folder = tmp_path_factory.mktemp("maxtext")
    config = load_config(overrides=list(RUN))
    abstract = abstract_params(config)

    def theirs(seed: int, scale: float) -> dict:
        params = (
            jax.tree.map(lambda x: abs(x) * scale, random_like(abstract, seed))
            if seed
            else random_like(abstract)
        )
        return nested(arrays_there(params, places_of(config.model, ScannedNames()), None))

    params = jax.tree.map(lambda x: x * np.float32(0.05), theirs(0, 1.0))
    write_checkpoint(folder, params, step=UPDATES, moments=(theirs(1, 1e-3), theirs(2, 1e-6)))
    return folder


def lines_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def overrides(maxtext_run: Path, run_dir: Path, *more: str) -> list[str]:
    return [*RUN, f"run_dir={run_dir}", f"load_full_state_path={maxtext_run}/checkpoints/4", *more]


def test_a_state_of_maxtext_is_gone_on_with_from_its_own_step(
    maxtext_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content_of(maxtext_run)
    config = load_config(
        overrides=overrides(maxtext_run, tmp_path / "run", "global_batch_size=8", "steps=8")
    )

    train(config)

    lines = lines_of(tmp_path / "run")
    assert [(line["step"], line["samples_seen"]) for line in lines] == [(6, 48), (7, 56), (8, 64)]
    assert content_of(maxtext_run) == before
    said = " ".join(capsys.readouterr().out.split())
    assert "continues MaxText's run at step 5, after 40 samples" in said
    assert "which rows MaxText had read is not known" in said


def test_a_run_that_took_over_resumes_without_a_word_about_missing_lines(
    maxtext_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = overrides(
        maxtext_run, tmp_path / "run", "global_batch_size=8", "learning_rate_schedule=constant"
    )
    train(load_config(overrides=[*common, "steps=7"]))
    capsys.readouterr()
    train(load_config(overrides=[*common, "steps=9"]))
    assert "missing" not in capsys.readouterr().err
    assert [line["step"] for line in lines_of(tmp_path / "run")] == [6, 7, 8, 9]


def test_a_run_whose_own_checkpoints_are_all_damaged_takes_over_again(
    maxtext_run: Path, tmp_path: Path
) -> None:
    common = overrides(
        maxtext_run, tmp_path / "run", "global_batch_size=8", "learning_rate_schedule=constant"
    )
    train(load_config(overrides=[*common, "steps=7"]))
    for blocks in (tmp_path / "run" / "checkpoints").glob("*/*/*"):
        blocks.write_bytes(blocks.read_bytes()[: blocks.stat().st_size // 2])

    train(load_config(overrides=[*common, "steps=7"]))

    assert [(line["step"], line["samples_seen"]) for line in lines_of(tmp_path / "run")] == [
        (6, 48),
        (7, 56),
    ]


def test_moments_are_those_of_the_parameters_as_we_store_them(maxtext_run: Path) -> None:
    config = load_config(overrides=list(RUN))
    abstract = abstract_params(config)
    where = jax.tree.leaves(abstract)[0].sharding
    optimizer = make_optimizer(config.optimizer, AT_REST)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        jax.eval_shape(optimizer.init, abstract),
    )
    checkpoint = MaxTextCheckpoint(maxtext_run / "checkpoints" / "4", "load_full_state_path")
    params, opt_state = checkpoint.read_state(config.model, abstract, shapes)

    adam = opt_state[0]
    assert int(adam.count) == UPDATES
    root = np.float32(np.sqrt(config.head_dim))

    def there(prefix: str) -> np.ndarray:
        name = f"{prefix}.params.decoder.layers.self_attention.query.kernel"
        array = open_arrays(checkpoint._folder, [name])[name]
        return np.moveaxis(array.read(tuple((0, size) for size in array.shape)), 1, 0)

    def ours(tree: object) -> np.ndarray:
        return np.asarray(tree["layers"]["attention"]["query"].get_value())

    np.testing.assert_allclose(ours(params), there("params") * root, rtol=1e-6)
    np.testing.assert_allclose(ours(adam.mu), there("opt_state.0.mu") / root, rtol=1e-6)
    np.testing.assert_allclose(ours(adam.nu), there("opt_state.0.nu") / root**2, rtol=1e-6)


def test_a_batch_per_device_needs_the_samples_stated_and_the_refusal_computes_them(
    maxtext_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "train",
        *overrides(maxtext_run, tmp_path / "run", "per_device_batch_size=2", "steps=6"),
    ]
    assert main(words) == 2
    message = capsys.readouterr().err
    works = message.split("works: ")[1].strip()
    assert works == f"start_samples={UPDATES * 2 * len(jax.devices())}"
    assert main([*words, works]) == 0
    assert [line["step"] for line in lines_of(tmp_path / "run")] == [6]


def test_start_samples_without_a_maxtext_state_is_refused(tmp_path: Path) -> None:
    config = load_config(overrides=[*RUN, f"run_dir={tmp_path / 'run'}", "start_samples=4"])
    with pytest.raises(
        ConfigError, match="null unless load_full_state_path names a state of MaxText"
    ):
        train(config)


def test_parameters_alone_are_no_state(maxtext_run: Path, tmp_path: Path) -> None:
    config = load_config(overrides=list(RUN))
    params = nested(
        arrays_there(
            random_like(abstract_params(config)), places_of(config.model, ScannedNames()), None
        )
    )
    items = write_checkpoint(tmp_path / "alone", params)
    stated = overrides(
        maxtext_run, tmp_path / "run", "global_batch_size=8", f"load_full_state_path={items}"
    )
    with pytest.raises(
        ConfigError,
        match="holds parameters alone, no optimizer state; works: load_parameters_path=",
    ):
        train(load_config(overrides=stated))


def test_an_exported_run_is_read_as_the_same_model(maxtext_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(load_config(overrides=overrides(maxtext_run, run, "global_batch_size=8", "steps=6")))
    export_maxtext(str(run), str(tmp_path / "exported"), None)

    config = load_config(overrides=list(RUN))
    abstract = abstract_params(config)
    ours = open_parameters(open_source(run), config.model, abstract)(abstract)
    again = MaxTextCheckpoint(tmp_path / "exported" / "0" / "items").open(config.model, abstract)(
        abstract
    )
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(again), strict=True):
        np.testing.assert_allclose(one, other, rtol=3e-7)


def test_a_tokenizer_with_more_tokens_than_the_checkpoints_model_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(overrides=[*RUN, "vocab_size=64"])
    params = nested(
        arrays_there(
            random_like(abstract_params(config)), places_of(config.model, ScannedNames()), None
        )
    )
    items = write_checkpoint(tmp_path, params)
    assert main(["generate", str(items), *RUN, "vocab_size=64", "--prompt", "a"]) == 2
    assert "vocab_size=64" in capsys.readouterr().err
