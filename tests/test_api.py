"""The Python API: a user's own model, loss, data and logger in a run; batches for a loop of one's
own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from ml_collections import ConfigDict

import maxbatch
from maxbatch.cli import main
from maxbatch.config.config import Config
from maxbatch.data.stream.fingerprint import fingerprint
from tests.helpers.tiny import LENGTH, one_layer_config, read_metrics

ONE = jax.devices()[:1]


class Bigrams(nnx.Module):
    """A model whose list of layers is not the stack of the config's own."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(config.vocab_size, 8, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs)])
        self.out = nnx.Linear(8, config.vocab_size, rngs=rngs)

    def __call__(self, tokens: jax.Array, segments: jax.Array) -> jax.Array:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return self.out(self.layers[0](self.table(tokens)))


def half_loss(model: Any, rows: maxbatch.Rows) -> tuple[jax.Array, jax.Array]:
    loss, weight = maxbatch.next_token_loss(model, rows)
    return loss * 0.5, weight


def test_importing_maxbatch_starts_nothing() -> None:
    said = subprocess.run(
        [
            sys.executable,
            "-c",
            "import maxbatch, sys; print([m for m in ('jax', 'yaml', 'numpy') if m in "
            "sys.modules])",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.strip() == "[]"
    assert (Path(maxbatch.__file__).parent / "py.typed").exists()


def test_everything_exported_has_a_home_and_a_docstring() -> None:
    assert dir(maxbatch) == sorted(maxbatch.__all__)
    for name in set(maxbatch.__all__) - {"__version__"}:
        assert getattr(maxbatch, name).__doc__, name


def test_a_users_model_keeps_layout_invariance(tmp_path: Path) -> None:
    """Losses and data do not depend on the devices or on the cut of the batch."""
    layouts = {"one": (ONE, ()), "four": (jax.devices()[:4], ("gradient_accumulation_steps=1",))}
    metrics = {}
    for name, (devices, _) in layouts.items():
        config = one_layer_config(
            "global_batch_size=16",
            f"per_device_batch_size={16 if len(devices) == 1 else 2}",
            "ici_data_parallelism=1",
            "steps=3",
            f"run_dir={tmp_path / name}",
        )
        maxbatch.train(config, model=Bigrams, devices=devices)
        metrics[name] = read_metrics(tmp_path / name)
    for one, four in zip(metrics["one"], metrics["four"], strict=True):
        assert one["loss"] == pytest.approx(four["loss"], rel=1e-5)
        assert one["data_fingerprint"] == four["data_fingerprint"]
    assert metrics["one"][2]["loss"] < metrics["one"][0]["loss"]


def test_a_users_model_resumes_and_refuses_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = (
        f"run_dir={tmp_path}",
        "learning_rate_schedule=constant",
        "eval_fraction=0.02",
        "eval_interval=2",
    )
    maxbatch.train(one_layer_config(*base, "steps=2"), model=Bigrams, devices=ONE)
    assert (
        f"\nnext: pip install tensorboard && tensorboard --logdir {tmp_path}\n"
        in capsys.readouterr().out
    )
    outcome = maxbatch.train(one_layer_config(*base, "steps=3"), model=Bigrams, devices=ONE)
    assert outcome.position.step == 3
    metrics = read_metrics(tmp_path)
    assert [m["step"] for m in metrics] == [1, 2, 3] and metrics[1]["eval_loss"] > 0
    with pytest.raises(maxbatch.ConfigError, match="model"):
        maxbatch.train(one_layer_config(*base, "steps=4"), devices=ONE)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> maxbatch.Outcome:
    folder = tmp_path_factory.mktemp("trained")
    return maxbatch.train(
        one_layer_config("steps=2", f"run_dir={folder}", "vocab_size=260"), devices=ONE
    )


def test_train_returns_the_history_and_the_folder_of_the_run(trained: maxbatch.Outcome) -> None:
    assert trained.position.step == 2 and trained.stopped_by is None
    assert (
        trained.history == maxbatch.read_metrics(trained.run_dir) == read_metrics(trained.run_dir)
    )
    assert trained.last is not None and trained.last["step"] == 2 and trained.last["loss"] > 0
    with pytest.raises(maxbatch.ConfigError, match="no such run folder"):
        maxbatch.read_metrics(f"{trained.run_dir}/none")


def _events_of(call: Callable[[], object]) -> set[str]:
    """The durations that JAX reports while a call runs."""
    events: set[str] = set()

    def on_event(event: str, seconds: float, **facts: str | int) -> None:
        events.add(event)

    jax.monitoring.register_event_duration_secs_listener(on_event)
    call()
    jax.monitoring.unregister_event_duration_listener(on_event)
    return events


@pytest.mark.runs
def test_a_loaded_model_writes_and_scores_as_the_commands_do(
    trained: maxbatch.Outcome, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = maxbatch.load_model(trained.run_dir)
    rules = ["--prompt", "ab", "--max-new-tokens", "4", "--temperature", "0"]
    assert main(["generate", trained.run_dir, *rules]) == 0
    assert (
        maxbatch.generate(model, "ab", max_new_tokens=4, temperature=0) + "\n"
        == capsys.readouterr().out
    )
    (tmp_path / "a.jsonl").write_text('{"text": "some words"}\n{"tokens": [1, 2, 3]}\n')
    assert main(["score", trained.run_dir, "a.jsonl", "--json"]) == 0
    printed, found = (
        json.loads(capsys.readouterr().out),
        maxbatch.score(model, ["some words", {"tokens": [1, 2, 3]}]),
    )
    assert found.loss == pytest.approx(printed["loss"], rel=1e-6) and found.perplexity is not None
    assert [len(record.logprobs) for record in found.records] == [10, 2]
    assert "/jax/core/compile/jaxpr_trace_duration" not in _events_of(
        lambda: maxbatch.score(model, ["other words"])
    )
    for command in (["score", trained.run_dir, "a.jsonl"], ["generate", trained.run_dir]):
        assert main([*command, "--averaged"]) == 2
        assert (
            "has no average of the parameters, which a run with parameter_average"
            in capsys.readouterr().err
        )
    with pytest.raises(ValueError, match="top_p=2: must be above 0"):
        maxbatch.generate(model, "ab", top_p=2)
    with pytest.raises(maxbatch.ConfigError, match="record 2: needs text, tokens"):
        maxbatch.score(model, ["fine", {"txt": "x"}])


def test_load_config_takes_keys_by_name() -> None:
    config = maxbatch.load_config(
        steps=3,
        log_to=["tensorboard"],
        dataset_path=Path("a.txt"),
        dataset_type="text",
        packing=False,
        per_device_batch_size=Fraction(1, 2),
        train_samples=None,
    )
    assert (config.steps, config.packing, config.per_device_batch_size) == (3, False, 0.5)
    assert config.dataset_path == "a.txt" and config.log_to == "tensorboard"
    assert maxbatch.load_config(None, ["steps=3"], steps=4).steps == 4
    for wrong, said in (
        ({"step": 3}, "nearest: steps"),
        ({"steps": {1: 2}}, "steps={1: 2}: must be a text"),
    ):
        with pytest.raises(maxbatch.ConfigError, match=said):
            maxbatch.load_config(**wrong)


def _no_rngs(config: Config) -> Bigrams:
    raise AssertionError


class _Small(Bigrams):
    def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
        super().__init__(ConfigDict({"vocab_size": 9}), rngs=rngs)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (
            {"model": _no_rngs},
            r"is called as _no_rngs\(config, rngs=rngs\), but takes _no_rngs\(config",
        ),
        ({"model": lambda config, *, rngs: 3}, "returned int; it must be a flax.nnx.Module"),
        ({"model": _Small}, "logits of 9 tokens; must be one for each of vocab_size=264"),
        ({"model": "Bigrams"}, "model: must be a function or a class, not str"),
        (
            {"objective": lambda model: 0.0},
            r"called as <lambda>\(model, rows\), but takes <lambda>\(model\)",
        ),
        ({"objective": lambda model, rows: None}, "returned NoneType in place of two scalars"),
        (
            {"objective": lambda model, rows: (jnp.int32(1), 1.0)},
            "type int32, which has no gradient",
        ),
        ({"optimizer": "adam"}, "optimizer: must be a function or a class, not str"),
        (
            {"optimizer": lambda: None},
            r"is called as <lambda>\(learning_rate\), but takes <lambda>\(\)",
        ),
        (
            {"optimizer": lambda rate: rate},
            "returned float; it must be an optax.GradientTransformation",
        ),
        ({"outputs": print}, r"works: outputs=\[my_logger\]"),
        ({"outputs": [3]}, "int is neither a function of a record"),
    ],
)
def test_a_part_that_cannot_be_used_is_refused_in_the_users_words(
    parts: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(maxbatch.ConfigError, match=said):
        maxbatch.train(one_layer_config("steps=1", f"run_dir={tmp_path}"), devices=ONE, **parts)


def test_an_error_of_a_users_code_names_the_part_that_raised_it(tmp_path: Path) -> None:
    def my_loss(model: Any, rows: maxbatch.Rows) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        maxbatch.train(
            one_layer_config("steps=1", f"run_dir={tmp_path}"), objective=my_loss, devices=ONE
        )
    assert any("raised by the objective my_loss" in note for note in caught.value.__notes__)
    with pytest.raises(maxbatch.ConfigError, match=r"works: maxbatch\.load_config"):
        maxbatch.train("run.yml")  # type: ignore[arg-type]


def test_a_users_loss_is_summed_over_the_global_batch(tmp_path: Path) -> None:
    runs = {}
    for name, loss in {"own": half_loss, "configured": None}.items():
        config = one_layer_config(
            "steps=1", "gradient_accumulation_steps=2", f"run_dir={tmp_path / name}"
        )
        maxbatch.train(config, objective=loss, devices=ONE)
        runs[name] = read_metrics(tmp_path / name)[0]
    assert runs["own"]["loss"] == pytest.approx(runs["configured"]["loss"] / 2, rel=1e-5)
    assert runs["own"]["grad_norm"] == pytest.approx(runs["configured"]["grad_norm"] / 2, rel=1e-4)


def test_a_loss_that_is_no_pair_of_scalars_is_refused(tmp_path: Path) -> None:
    config = one_layer_config("steps=1", f"run_dir={tmp_path}")
    with pytest.raises(maxbatch.ConfigError, match="two scalars"):
        maxbatch.train(config, objective=lambda model, rows: jnp.float32(1), devices=ONE)  # type: ignore[arg-type, return-value]


def test_a_model_with_running_statistics_is_refused(tmp_path: Path) -> None:
    class WithDropout(Bigrams):
        def __init__(self, config: Config, *, rngs: nnx.Rngs) -> None:
            super().__init__(config, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

    with pytest.raises(maxbatch.ConfigError, match="parameters"):
        maxbatch.train(
            one_layer_config("steps=1", f"run_dir={tmp_path}"), model=WithDropout, devices=ONE
        )


@pytest.mark.runs
def test_a_users_optimizer_follows_the_configs_rates_on_any_devices_and_resumes(
    tmp_path: Path,
) -> None:
    own = partial(optax.adamw, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.0)
    plain = (
        "adam_b1=0.9",
        "adam_b2=0.95",
        "adam_eps=1e-8",
        "adam_weight_decay=0",
        "train_samples=64",
        "global_batch_size=16",
    )
    configured = one_layer_config(
        *plain, "per_device_batch_size=8", f"run_dir={tmp_path / 'configured'}"
    )
    maxbatch.train(configured, devices=ONE)
    halves = (
        *plain,
        "per_device_batch_size=2",
        "checkpoint_period=2",
        f"run_dir={tmp_path / 'own'}",
    )

    def cut_power(record: dict[str, Any]) -> None:
        if record["step"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        maxbatch.train(
            one_layer_config(*halves), optimizer=own, devices=jax.devices()[:4], outputs=[cut_power]
        )
    with pytest.raises(maxbatch.ConfigError, match="opt_type"):
        maxbatch.train(one_layer_config(*halves), devices=ONE)
    with pytest.raises(maxbatch.ConfigError, match="optimizer's state"):
        maxbatch.train(one_layer_config(*halves), optimizer=optax.sgd, devices=ONE)
    maxbatch.train(one_layer_config(*halves), optimizer=own, devices=ONE)
    pairs = [read_metrics(tmp_path / name) for name in ("configured", "own")]
    assert [record["step"] for record in pairs[1]] == [1, 2, 3, 4]
    for ours, theirs in zip(*pairs, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["learning_rate"] == theirs["learning_rate"]


def test_an_optimizer_with_rates_of_its_own_is_taken_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = one_layer_config("steps=2", f"run_dir={tmp_path}", "enable_checkpointing=false")
    rows = [np.arange(LENGTH) % 7] * 40  # all alike: with a rate of 0 the loss stays
    maxbatch.train(config, optimizer=optax.sgd(0.0), stream=rows, devices=ONE)
    first, second = read_metrics(tmp_path)
    assert (
        first["loss"] == second["loss"] and "learning_rate has no effect" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "key", ["adam_b1_half_life=2Mt", "weight_decay_timescale=1Mt", "compiled_dir=programs"]
)
def test_keys_of_the_configs_optimizer_are_refused_beside_a_users(key: str, tmp_path: Path) -> None:
    config = one_layer_config("steps=1", f"run_dir={tmp_path}", key)
    with pytest.raises(
        maxbatch.ConfigError, match=f"{key.split('=')[0]}=.*; works: {key.split('=')[0]}="
    ):
        maxbatch.train(config, optimizer=optax.adamw, devices=ONE)


def test_a_users_data_are_one_stream(tmp_path: Path) -> None:
    """Rows of a list, in epochs; a logger, as a function or an object, sees every record."""
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 256, LENGTH) for _ in range(20)]
    seen: list[int] = []

    class Logger(maxbatch.Output):
        is_closed = False

        def append(self, record: dict[str, Any]) -> None:
            seen.append(record["samples_seen"])

        def close(self) -> None:
            self.is_closed = True

    logger, steps = Logger(), []
    config = one_layer_config("num_epochs=2", f"run_dir={tmp_path}")
    maxbatch.train(
        config,
        stream=rows,
        outputs=[logger, lambda record: steps.append(record["step"])],
        devices=ONE,
    )
    assert (seen, steps, logger.is_closed) == ([16, 32, 40], [1, 2, 3], True)
    total = sum(int(m["data_fingerprint"], 16) for m in read_metrics(tmp_path))
    weights = np.ones((20, LENGTH), np.float32)
    weights[:, 0] = 0
    once = {
        "tokens": np.stack(rows).astype(np.int32),
        "segments": np.ones((20, LENGTH), np.int32),
        "weights": weights,
    }
    assert total % 2**64 == 2 * int(fingerprint([once]), 16) % 2**64


def test_a_logger_is_closed_once_also_where_nothing_is_trained(tmp_path: Path) -> None:
    closed: list[str] = []

    class Logger:
        def append(self, record: dict[str, Any]) -> None:
            closed.append("record")

        def close(self) -> None:
            closed.append("close")

    for expected in (["record", "close"], ["close"]):  # the second time the run is complete
        maxbatch.train(
            one_layer_config("steps=1", f"run_dir={tmp_path}"), outputs=[Logger()], devices=ONE
        )
        assert closed == expected
        closed.clear()


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        (np.zeros(3), "max_target_length=3"),
        (np.full(LENGTH, 999), "vocab_size=1000"),
        ({"ids": 1}, "has no tokens"),
    ],
)
def test_a_users_row_that_is_none_is_refused(row: Any, rule: str, tmp_path: Path) -> None:
    with pytest.raises(maxbatch.ConfigError, match=rule):
        maxbatch.train(
            one_layer_config("steps=1", f"run_dir={tmp_path}"), stream=[row], devices=ONE
        )


def test_a_feed_gives_the_batches_that_train_takes_from_any_position() -> None:
    config = one_layer_config(
        "batch_size_schedule=0:8 24:16", "per_device_batch_size=4", "train_samples=60"
    )
    stream = maxbatch.open_stream(config)
    mesh = maxbatch.make_mesh(config, jax.devices()[:4])
    with maxbatch.open_feed(config, mesh) as feed:
        batches = list(feed)
    assert [(b.step, b.samples_seen, b.num_rows) for b in batches] == [
        (1, 0, 8),
        (2, 8, 8),
        (3, 16, 8),
        (4, 24, 16),
        (5, 40, 16),
        (6, 56, 4),
    ]
    for batch in batches:
        rows = stream.read(batch.samples_seen, batch.end)
        assert (np.asarray(batch.tokens)[: batch.num_rows] == rows["tokens"]).all()
        assert not np.asarray(batch.weights)[batch.num_rows :].any()
        assert len(batch.tokens.sharding.device_set) == 4
    with maxbatch.open_feed(config, mesh, start=40) as feed:
        assert [b.samples_seen for b in feed] == [40, 56]
    with maxbatch.open_feed(config, mesh, start=3) as feed:
        first = next(feed)
        assert (first.samples_seen, first.end) == (3, 11)


def test_a_feed_takes_a_mesh_of_ones_own() -> None:
    config = one_layer_config("global_batch_size=16", "steps=1")
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    with maxbatch.open_feed(config, mesh) as feed:
        (batch,) = feed
    assert batch.tokens.sharding.shard_shape(batch.tokens.shape) == (2, LENGTH)
    with pytest.raises(maxbatch.ConfigError, match="works: global_batch_size=8"):
        maxbatch.open_feed(
            one_layer_config(
                "global_batch_size=9", "ici_fsdp_parallelism=1", "ici_context_parallelism=8"
            ),
            mesh,
        )


def test_a_rate_is_a_function_of_samples_seen() -> None:
    config = one_layer_config("steps=10", "learning_rate=1.0", "learning_rate_schedule=constant")
    rate = maxbatch.LearningRate.from_config(config, num_devices=4)
    assert rate.total_samples == 10 * 16 * 4
    assert rate(0) == 0 and rate(rate.total_samples // 2) == 1.0
