"""The config: parsing of values, precedence of layers, and messages about bad input."""

from __future__ import annotations

import pickle
import shutil
from fractions import Fraction
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from maxbatch import BatchPlan, ConfigError, load_config
from maxbatch.config.keys import Fixes
from maxbatch.config.loading import dump_config, resolve
from maxbatch.config.paths import configs_dir
from maxbatch.config.sections import KEYS, names_fixing
from tests.helpers.configs import error_of, write
from tests.helpers.huggingface_folders import WIDTH, tiny_llama_tensors, write_folder

PRESETS = sorted(path.stem for path in (configs_dir() / "models").glob("*.yml"))

# --- texts and types ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("learning_rate: 3e-4", 3e-4),
        ("profile_steps: 10:13", "10:13"),
        ("steps: 1_000", 1000),
        ("steps: 1e3", 1000),
        ('steps: "20"', 20),
        ("train_tokens: 1.5B", 1_500_000_000),
        ("train_samples: 2k", 2000),
        ("per_device_batch_size: 16.0", 16),
        ("per_device_batch_size: 0.1", 0.1),
        ("per_device_batch_size: 1/3", Fraction(1, 3)),
        ("expansion_factor_real_data: 0.5", 0.5),
        ("packing: FALSE", False),
        ("dtype: bfloat16", "bfloat16"),
        ("remat_policy: none", "none"),
        ("compilation_cache_dir: none", "none"),
        ("dataset_path:", ""),
        ("dataset_path: null", ""),
        ('dataset_path: "null"', "null"),
        ('generate_prompt: " x "', " x "),
        ("max_num_checkpoints_to_keep: ~", None),
        ("eval_fraction: 0", 0.0),
        ("run_dir: 2024-01-01", "2024-01-01"),
        ("text_field: 1e3", "1e3"),
    ],
)
def test_a_scalar_is_read_by_its_keys_type_in_files_and_overrides_alike(
    tmp_path: Path, text: str, value: object
) -> None:
    name, _, written = text.partition(":")
    read = load_config(write(tmp_path / "run.yml", text + "\n"))[name]
    assert read == value and type(read) is type(value)
    if '"' not in written:
        assert load_config(overrides=[f"{name}={written.strip()}"])[name] == value


# --- layers -------------------------------------------------------------------------------------------------


def test_a_config_is_a_frozen_mapping_with_the_sections_of_its_keys() -> None:
    config = load_config(steps=3)
    assert (
        config.steps
        == config["steps"]
        == dict(config)["steps"]
        == pickle.loads(pickle.dumps(config)).steps
        == 3
    )
    assert list(config) == list(KEYS) and config.model.items() <= config.items()
    with pytest.raises(AttributeError, match="steps: a Config is frozen"):
        config.steps = 4  # type: ignore[misc]
    assert config.replaced({"steps": 4}) == load_config(steps=4) != config


def test_a_config_dict_of_a_users_is_planned_as_the_config_that_it_holds() -> None:
    config = load_config(global_batch_size=64)
    plans = [
        BatchPlan.from_config(one, num_devices=8).to_dict()
        for one in (config, ConfigDict(config.to_dict()))
    ]
    assert plans[0] == plans[1]


def test_each_layer_wins_over_the_ones_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(
        tmp_path / "ground.yml",
        "log_period: 2\nbase_emb_dim: 2\nadam_b1: 0.2\nadam_b2: 0.2\ntext_field: a\n",
    )
    write(
        tmp_path / "base" / "middle.yml",
        "base_config: ../ground.yml\nadam_b1: 0.3\nmodel_name: gpt2-124m\n",
    )
    run = write(
        tmp_path / "run.yml", "base_config: base/middle.yml\nadam_b2: 0.4\nhead_dim: 32\nsteps: 4\n"
    )
    monkeypatch.setenv("MAXBATCH_STEPS", "5")
    monkeypatch.setenv("MAXBATCH_TEXT_FIELD", "env")
    config = load_config(run, ["text_field=override"])
    assert (config.log_period, config.adam_b1, config.adam_b2) == (2, 0.3, 0.4)
    assert (config.base_emb_dim, config.head_dim, config.dtype) == (768, 32, "bfloat16")
    assert (config.steps, config.text_field) == (5, "override")


IMPORTED = (
    "base_emb_dim: 100\nnum_experts: 4\nlearning_rate: 7e-5\nweight_dtype: bfloat16\nopt_type: "
    "lion\nmodel_name: "
)


@pytest.mark.parametrize("below", ["file", "base", "environment"])
@pytest.mark.parametrize("named", ["default", "gpt2-124m", "auto"])
def test_a_preset_displaces_the_model_of_lower_layers_and_nothing_else(
    below: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write(tmp_path / "run.yml", f"{IMPORTED}{named}\nrope_max_timescale: 77\n")
    if below == "base":
        run = write(tmp_path / "above.yml", "base_config: run.yml\nsteps: 4\n")
    if below == "environment":
        monkeypatch.setenv("MAXBATCH_BASE_EMB_DIM", "64")
        monkeypatch.setenv("MAXBATCH_MODEL_NAME", "gpt2-124m")
    config = load_config(run, ["model_name=llama3-8b", "base_num_decoder_layers=3"])
    alone = load_config(None, ["model_name=llama3-8b", "base_num_decoder_layers=3"])
    assert {name: config[name] for name in names_fixing(Fixes.FORM)} == {
        name: alone[name] for name in names_fixing(Fixes.FORM)
    }
    # a preset's are above those of a base_config
    rates = (3e-4, "float32") if below == "base" else (7e-5, "bfloat16")
    assert (config.learning_rate, config.weight_dtype, config.opt_type) == (*rates, "lion")


def test_a_preset_of_the_environment_lies_between_the_file_and_the_overrides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write(tmp_path / "run.yml", f"{IMPORTED}default\n")
    monkeypatch.setenv("MAXBATCH_MODEL_NAME", "llama3-8b")
    monkeypatch.setenv("MAXBATCH_BASE_MLP_DIM", "96")
    config = load_config(run, ["base_num_decoder_layers=3"])
    assert (config.base_emb_dim, config.num_experts, config.base_mlp_dim) == (4096, 1, 96)
    assert (config.base_num_decoder_layers, config.learning_rate) == (3, 7e-5)


def test_keys_beside_a_model_name_and_above_it_adjust_its_preset(tmp_path: Path) -> None:
    write(
        tmp_path / "base.yml", "base_config: ground.yml\nmodel_name: llama3-8b\nbase_mlp_dim: 96\n"
    )
    write(tmp_path / "ground.yml", "base_emb_dim: 100\nrope_factor: 2\nmodel_name: tiny\n")
    run = write(tmp_path / "run.yml", "base_config: base.yml\nbase_num_decoder_layers: 3\n")
    config = load_config(run)
    assert (config.base_emb_dim, config.base_mlp_dim, config.base_num_decoder_layers) == (
        4096,
        96,
        3,
    )
    assert config.rope_factor == 1
    assert load_config(run, ["model_name=default"]).base_emb_dim == 100  # which is no preset


def test_a_folder_and_a_preset_displace_the_packaged_rl_configs_layers(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "llama", layers := tiny_llama_tensors())
    assert load_config("rl", ["model_name=smollm2-135m"]).base_num_decoder_layers == 30
    config = load_config(
        "rl", ["model_name=auto", f"load_parameters_path={folder}", "base_num_decoder_layers=1"]
    )
    assert (config.base_num_decoder_layers, config.base_emb_dim) == (1, WIDTH)
    config = load_config("rl", ["model_name=auto", f"load_parameters_path={folder}", "steps=3"])
    assert config.base_num_decoder_layers == len(
        {name[:14] for name in layers if ".layers." in name}
    )
    shutil.rmtree(folder)
    # which needs no folder
    assert load_config(write(tmp_path / "config.yml", dump_config(config))) == config


def test_config_names_what_displaced_a_key_of_the_model(tmp_path: Path) -> None:
    settings = resolve(
        write(tmp_path / "run.yml", f"{IMPORTED}default\n"), ["model_name=llama3-8b"]
    )
    experts, width = settings["num_experts"], settings["base_emb_dim"]
    assert (experts.layer, experts.displaced_by, experts.value) == ("override", "model_name", 1)
    assert (width.layer, width.displaced_by) == ("preset", "")


@pytest.mark.parametrize("preset", ["default", "tiny-moe"])
def test_the_config_of_a_run_fed_back_repeats_its_model(preset: str, tmp_path: Path) -> None:
    config = load_config(
        None, [f"model_name={preset}", "base_num_decoder_layers=3", "rope_max_timescale=77"]
    )
    run = write(tmp_path / "config.yml", dump_config(config))
    assert load_config(run) == config
    assert load_config(write(tmp_path / "run.yml", "base_config: config.yml\n")) == config


def test_the_packaged_base_yml_as_config_or_as_base_changes_nothing(tmp_path: Path) -> None:
    run = write(tmp_path / "run.yml", "base_config: base.yml\n")
    override = ["model_name=llama2-7b"]
    assert (
        load_config(configs_dir() / "base.yml", override)
        == load_config(run, override)
        == load_config(None, override)
    )


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_hold_model_keys_and_the_large_ones_compute_in_bfloat16(preset: str) -> None:
    text = (configs_dir() / "models" / f"{preset}.yml").read_text()
    default, config = load_config(), load_config(overrides=[f"model_name={preset}"])
    differing = {name for name in KEYS if config[name] != default[name]} - {"model_name"}
    model = {*names_fixing(Fixes.MODEL)} - {"opt_type", "init_weights_seed"}
    # Published with the model.
    model |= {
        "load_balance_loss_weight",
        "load_balance_scope",
        "router_z_loss_weight",
        "routed_bias_update_rate",
    }
    assert differing <= model | {
        "max_target_length",
        "dtype",
        "remat_policy",
        "scan_layers",
        "learning_rate",
    }
    if preset not in ("tiny", "tiny-moe", "tiny-deepseek", "small"):
        assert (config.dtype, config.weight_dtype, config.scan_layers) == (
            "bfloat16",
            "float32",
            True,
        )
        assert "dtype: bfloat16" in text and "weight_dtype: float32" in text


def test_the_config_is_locked() -> None:
    with pytest.raises(AttributeError):
        load_config().learning_rat = 1.0


def test_the_config_written_back_gives_an_equal_config(tmp_path: Path) -> None:
    overrides = [
        "model_name=gpt2-124m",
        "per_device_batch_size=1/3",
        "num_epochs=0.1",
        "generate_prompt= a: 'b' \"c\" #\t",
        "run_dir=~/ä b",
        "dataset_path=null",
        "learning_rate=1e-30",
        "max_num_checkpoints_to_keep=null",
        "profile_steps=10:13",
        "compilation_cache_dir=none",
        "batch_size_schedule=0:8 100:16",
    ]
    config = load_config(overrides=overrides)
    assert config.generate_prompt == " a: 'b' \"c\" #\t"
    assert load_config(write(tmp_path / "config.yml", dump_config(config))) == config


# --- bad files and keys -------------------------------------------------------------------------------------


@pytest.mark.parametrize("nothing", ["", "~", "null", '""'])
def test_a_base_config_of_null_is_none(tmp_path: Path, nothing: str) -> None:
    config = load_config(write(tmp_path / "a.yml", f"base_config: {nothing}\nsteps: 3\n"))
    assert config == load_config(overrides=["steps=3"])


def test_an_empty_file_states_nothing(tmp_path: Path) -> None:
    assert load_config(write(tmp_path / "run.yml", "# nothing\n")) == load_config()


def test_a_bad_value_in_the_environment_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAXBATCH_STEPS", "soon")
    assert error_of().startswith(
        "environment variable MAXBATCH_STEPS: steps=soon: must be a whole number"
    )


# --- packaged configs by name -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rl", "post_train/rl.yml", "configs/post_train/rl.yml"])
def test_a_packaged_config_is_found_by_name_in_every_folder(name: str) -> None:
    assert load_config(name) == load_config(configs_dir() / "post_train" / "rl.yml")


def test_a_preset_is_found_by_name_and_a_file_wins_over_a_name(tmp_path: Path) -> None:
    assert load_config("llama3-8b").base_emb_dim == 4096
    write(tmp_path / "llama3-8b", "steps: 7\n")
    assert load_config("llama3-8b").steps == 7


def test_a_folder_with_the_name_of_a_packaged_config_is_not_read_as_the_config() -> None:
    Path("rl").mkdir()
    assert load_config("rl") == load_config("post_train/rl.yml")


def test_a_config_may_build_on_a_packaged_one(tmp_path: Path) -> None:
    built = load_config(
        write(
            tmp_path / "sub" / "mine.yml", "base_config: configs/post_train/rl.yml\nbatch_size: 4\n"
        )
    )
    assert (built.batch_size, built.dataset_type) == (4, "arithmetic")
    write(tmp_path / "sub" / "rl", "steps: 7\n")
    assert load_config(write(tmp_path / "sub" / "own.yml", "base_config: rl\n")).steps == 7


@pytest.mark.parametrize(
    "name", ["nothing.yml", "sweeps/batch_size.yml", "../configs/base.yml", "x" * 5000]
)
def test_a_name_of_no_config_is_a_file_that_does_not_exist(name: str) -> None:
    assert "does not exist" in error_of(Path(name)) or "cannot be read" in error_of(Path(name))


@pytest.mark.parametrize("overrides", ["steps=3", [3], [None]])
def test_overrides_that_are_no_texts_are_the_callers_fault(overrides: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"^overrides.*; works: overrides="):
        load_config(overrides=overrides)
