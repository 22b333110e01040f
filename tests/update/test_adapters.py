"""Adapters: they alone are trained and saved, and the model is the one that they adapt, however it
runs.
"""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import maxbatch
from maxbatch import ConfigError
from maxbatch.cli import main
from maxbatch.data.stream.stream import open_stream
from maxbatch.run.pretraining import train
from maxbatch.run.weights.checkpoint_reading import StoredCheckpoint
from maxbatch.run.weights.parameters import open_source
from maxbatch.system.storage.safetensors import stored_tensors
from maxbatch.update.lora import adapters_of
from maxbatch.update.state import abstract_model
from tests.helpers.configs import error_of
from tests.helpers.damage import flip_a_parameter
from tests.helpers.parameters import load_parameters
from tests.helpers.tiny import loss_sums, read_metrics, tiny_config

pytestmark = [pytest.mark.runs, pytest.mark.slow]

RUN = (
    "scan_layers=true",
    "global_batch_size=8",
    "per_device_batch_size=4",
    "gradient_noise_scale=false",
    "learning_rate_schedule=constant",
    "warmup_steps_fraction=0",
    "checkpoint_period=1000",
)


def lora(base: Path, run_dir: Path, *overrides: str) -> Any:
    return tiny_config(
        *RUN, "lora_rank=4", f"load_parameters_path={base}", f"run_dir={run_dir}", *overrides
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "run"
    train(tiny_config(*RUN, f"run_dir={folder}", "steps=2"), jax.devices()[:1])
    return folder


@pytest.fixture(scope="module")
def adapted(base: Path) -> Path:
    run_dir = base.parent / "adapted"
    train(
        lora(base, run_dir, "steps=6", "eval_fraction=0.02", "eval_interval=6"), jax.devices()[:1]
    )
    return run_dir


def leaves(params: nnx.State) -> dict[str, np.ndarray]:
    return {
        jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(params)
    }


def test_only_matrices_of_the_layers_change_and_by_low_rank(base: Path, adapted: Path) -> None:
    before, after = (leaves(load_parameters(path)[2]) for path in (base, adapted))
    for name, old in before.items():
        change = (after[name] - old).astype(np.float64)
        if "layers" not in name or "norm" in name:
            assert not change.any(), name
            continue
        matrix = change[0].reshape(
            (-1, change.shape[-1]) if "'out'" in name else (change.shape[1], -1)
        )
        singular = np.linalg.svd(matrix, compute_uv=False)
        assert singular[0] > 1e-4 and singular[4:].max() < 1e-5, name


def test_a_checkpoint_holds_adapters_and_their_moments_alone(base: Path, adapted: Path) -> None:
    sizes = [
        sum(f.stat().st_size for f in (path / "checkpoints").rglob("*") if f.is_file())
        for path in (base, adapted)
    ]
    assert sizes[1] < sizes[0] / 2
    [record] = (adapted / "checkpoints").glob("*/position/metadata")
    stated = json.loads(record.read_text())
    assert stated["identity"]["model"]["lora_rank"] == 4
    origin = {
        "key": "load_parameters_path",
        "source": str(base),
        "identity": open_source(base).identity,
        "step": 2,
    }
    assert stated["origin"] == origin


def test_the_loss_falls_and_the_eval_sees_the_adapters(base: Path, adapted: Path) -> None:
    metrics = read_metrics(adapted)
    config, graphdef, params = load_parameters(adapted)
    rows = open_stream(config, "eval").read(0, 10)
    sums = jax.jit(lambda params: loss_sums(nnx.merge(graphdef, params), *rows.values()))(params)
    assert metrics[-1]["eval_loss"] == pytest.approx(float(sums[0] / sums[1]), rel=1e-4)
    assert metrics[-1]["loss"] < metrics[0]["loss"]


def test_an_update_is_that_of_the_low_rank_sum(base: Path, tmp_path: Path) -> None:
    sgd = (
        "opt_type=sgd",
        "adam_b1=0",
        "adam_weight_decay=0",
        "gradient_clipping_threshold=0",
        "learning_rate=1",
    )
    config = lora(base, tmp_path / "run", "steps=1", "lora_targets=query", "lora_alpha=8", *sgd)
    train(config, jax.devices()[:1])
    _, graphdef, params = load_parameters(base)
    first = adapters_of(config.adapters).init(params, config.init_weights_seed)["layers"][
        "attention"
    ]
    a, b = (np.asarray(first[f"query_lora_{name}"]) for name in "ab")
    rows = open_stream(config).read(0, 8)

    def loss(b: jax.Array) -> jax.Array:
        query = params["layers"]["attention"]["query"]
        moved = jax.tree.map(lambda x: x, params)
        moved["layers"]["attention"]["query"] = query.replace(
            query[...] + 2 * jnp.einsum("ndr,nrhk->ndhk", a, b)
        )
        total, weight = loss_sums(nnx.merge(graphdef, moved), *rows.values())
        return total / weight

    gradient = jax.jit(jax.grad(loss))(b)
    expected = params["layers"]["attention"]["query"][...] - 2 * jnp.einsum(
        "ndr,nrhk->ndhk", a, gradient
    )
    found = load_parameters(tmp_path / "run")[2]["layers"]["attention"]["query"][...]
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_the_update_does_not_depend_on_the_cut(base: Path, adapted: Path, tmp_path: Path) -> None:
    losses = partial(map, lambda m: m["loss"])
    reference = list(losses(read_metrics(adapted)))
    go = partial(
        lora,
        base,
        tmp_path / "cut",
        "eval_fraction=0.02",
        "eval_interval=6",
        "per_device_batch_size=1",
    )
    train(go("steps=3", "ici_pipeline_parallelism=2"), jax.devices()[:2])
    train(go("steps=6", "ici_data_parallelism=2"), jax.devices()[:2])
    assert list(losses(read_metrics(tmp_path / "cut"))) == pytest.approx(reference, rel=2e-4)


def test_adapters_resume_only_over_the_model_that_they_adapt(
    base: Path, adapted: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    train(
        tiny_config(*RUN, f"run_dir={other}", "steps=1", "init_weights_seed=0"), jax.devices()[:1]
    )
    shutil.copytree(adapted, tmp_path / "run")
    with pytest.raises(
        ConfigError,
        match=r"has no checkpoint of step 2, and the run in run_dir=.*run started from it",
    ):
        train(lora(other, tmp_path / "run", "steps=7", "eval_fraction=0.02"), jax.devices()[:1])
    with pytest.raises(ConfigError, match=r"belongs to another run .*lora_alpha"):
        train(
            lora(base, tmp_path / "run", "steps=7", "lora_alpha=3", "eval_fraction=0.02"),
            jax.devices()[:1],
        )


def test_a_run_from_adapters_reads_them_and_their_model_once(
    base: Path, adapted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []

    restore = StoredCheckpoint._restore

    def noted(checkpoint: StoredCheckpoint, *rest: Any) -> nnx.State:
        read.append(checkpoint.folder)
        return restore(checkpoint, *rest)

    monkeypatch.setattr(StoredCheckpoint, "_restore", noted)
    config = tiny_config(
        *RUN, f"load_parameters_path={adapted}", f"run_dir={tmp_path / 'run'}", "steps=1"
    )
    train(config, jax.devices()[:1])
    assert sorted(read) == [adapted / "checkpoints" / "6", base / "checkpoints" / "2"]


@pytest.mark.parametrize("damaged", ["adapters", "base"])
def test_damaged_adapters_and_a_damaged_model_below_them_are_named(
    damaged: str, tmp_path: Path, base: Path, adapted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own_base, run_dir = tmp_path / "base", tmp_path / "run"
    shutil.copytree(base, own_base)
    shutil.copytree(adapted, run_dir)
    config = run_dir / "config.yml"
    config.write_text(config.read_text().replace(str(base), str(own_base)))
    checkpoint = (
        run_dir / "checkpoints" / "6" if damaged == "adapters" else own_base / "checkpoints" / "2"
    )
    flip_a_parameter(checkpoint)
    for flags in ((), ("--adapter",)):
        code = main(["export", str(run_dir), "--output", "exported", *flags])
        if flags and damaged == "base":
            assert code == 0, "the adapters alone are whole"
        else:
            assert code == 2
            assert f"{checkpoint}: is damaged (" in capsys.readouterr().err.splitlines()[-1]
        shutil.rmtree("exported", ignore_errors=True)
    lines = [line for line in config.read_text().splitlines() if not line.startswith("lora_alpha")]
    config.write_text("\n".join([*lines, "lora_alpha: 8"]) + "\n")
    with pytest.raises(ConfigError, match="lora_alpha"):
        load_parameters(run_dir)


def test_commands_take_the_merged_model(adapted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.jsonl").write_text('{"tokens": [1, 2, 3]}\n')
    assert (
        main(
            [
                "score",
                str(adapted),
                "a.jsonl",
                "--json",
                "ici_fsdp_parallelism=1",
                "ici_data_parallelism=-1",
            ]
        )
        == 0
    )
    assert len(json.loads(capsys.readouterr().out)["records"][0]["logprobs"]) == 2


@pytest.mark.parametrize("model", ["adapted", "some"])
def test_exported_adapters_are_the_difference_of_the_merged_export(
    model: str, base: Path, adapted: Path, tmp_path: Path
) -> None:
    run_dir, alpha = adapted, 16
    if model == "some":
        run_dir, alpha = tmp_path / "run", 8
        train(
            lora(base, run_dir, "steps=2", "lora_targets=value,down", "lora_alpha=8"),
            jax.devices()[:1],
        )
    for source, output, *flags in (
        (base, "base"),
        (run_dir, "merged"),
        (run_dir, "adapters", "--adapter"),
    ):
        assert main(["export", str(source), "--output", str(tmp_path / output), *flags]) == 0
    before, after = (stored_tensors(tmp_path / name) for name in ("base", "merged"))
    low_rank = stored_tensors(tmp_path / "adapters")
    stated = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert (stated["peft_type"], stated["r"], stated["lora_alpha"]) == ("LORA", 4, alpha)
    changed = 0
    for name, tensor in before.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        expected = tensor.array()
        if f"{module}.lora_A.weight" in low_rank:
            a, b = (low_rank[f"{module}.lora_{part}.weight"].array() for part in "AB")
            assert any(module.endswith(f".{target}") for target in stated["target_modules"])
            expected = expected + alpha / 4 * b @ a
            changed += 1
        np.testing.assert_allclose(after[name].array(), expected, atol=1e-6, err_msg=name)
    assert changed == len(low_rank) / 2 == 2 * {"adapted": 7, "some": 2}[model]


def test_a_model_without_adapters_has_none_to_export(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(base), "--output", "out", "--adapter"]) == 2
    assert "has no adapters, which a run with lora_rank above 0 trains" in capsys.readouterr().err
    assert not Path("out").exists()


def test_a_target_that_is_no_matrix_is_named(base: Path) -> None:
    config = lora(base, Path("run"), "lora_targets=query,qerry")
    with pytest.raises(ConfigError, match=r"'qerry' names no matrix.*works: lora_targets=query"):
        adapters_of(config.adapters).targets(abstract_model(config.decoder)[1])


def test_experts_have_no_adapters() -> None:
    keys = (
        "decoder_block=mixtral",
        "num_experts=4",
        "num_experts_per_tok=2",
        "norm_topk_prob=true",
    )
    model = abstract_model(tiny_config(*keys).decoder)[1]

    def targets(names: str) -> set[str]:
        config = tiny_config("load_parameters_path=model", "lora_rank=2", f"lora_targets={names}")
        adapters = adapters_of(config.adapters)
        assert adapters is not None
        return {target.path[-1] for target in adapters.targets(model)}

    assert targets("all") == {"query", "key", "value", "out"}
    for name in ("expert_up", "router"):
        with pytest.raises(
            ConfigError,
            match=f"lora_targets: {name} is of experts, which have no adapters; works: ",
        ):
            targets(name)


def test_adapters_need_a_model() -> None:
    assert "load_parameters_path names the model" in error_of(overrides=("lora_rank=4",))


def test_a_base_model_that_was_moved_is_read_where_it_is_now_and_another_one_is_refused(
    base: Path, adapted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, moved = tmp_path / "run", tmp_path / "moved"
    shutil.copytree(base, moved)
    shutil.copytree(adapted, run)
    config = run / "config.yml"
    config.write_text(config.read_text().replace(str(base), str(tmp_path / "gone")))
    there = f"load_parameters_path={moved}"
    for words in (
        ["generate", str(run), "--max-new-tokens", "2"],
        ["export", str(run), "--output", str(tmp_path / "a")],
    ):
        assert main(words) == 2
        assert (
            "works: load_parameters_path=PATH, wherever that model is now"
            in capsys.readouterr().err
        )
        assert main([*words, f"load_parameters_path={adapted}"]) == 2
        assert main([*words, there]) == 0
    expected = maxbatch.load_parameters(adapted)
    jax.tree.map(
        np.testing.assert_array_equal,
        maxbatch.load_parameters(run, load_parameters_path=moved),
        expected,
    )
    assert main(["export", str(run), "--output", str(tmp_path / "b"), "steps=3"]) == 2
    assert "export takes no config key but load_parameters_path" in capsys.readouterr().err
