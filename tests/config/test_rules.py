"""Keys that displace or exclude each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from maxbatch import load_config
from maxbatch.config.loading import dump_config
from maxbatch.config.rules import check_data_paths
from tests.helpers.configs import write

RAMP = (
    "enable_rampup_batch_size: true\nper_device_batch_size_start: "
    "2\nper_device_batch_size_increment: 2\n"
)


@pytest.mark.parametrize("length", ["train_samples=7", "train_tokens=7", "num_epochs=7", "steps=7"])
def test_a_length_displaces_those_of_lower_layers(tmp_path: Path, length: str) -> None:
    run = write(tmp_path / "run.yml", "num_epochs: 3\n")
    config = load_config(run, [length])
    stated = {
        n: config[n]
        for n in ("steps", "train_samples", "train_tokens", "num_epochs")
        if config[n] is not None
    }
    assert stated == {length.partition("=")[0]: 7}


BATCH_KEYS = (
    "gradient_accumulation_steps",
    "global_batch_size",
    "batch_size_schedule",
    "enable_rampup_batch_size",
)


@pytest.mark.parametrize(
    ("file", "overrides", "expected"),
    [
        ("", [], (1, None, None, False)),
        ("", ["global_batch_size=64"], (None, 64, None, False)),
        ("global_batch_size: 64", ["gradient_accumulation_steps=4"], (4, None, None, False)),
        ("global_batch_size: 64", ["batch_size_schedule=0:8"], (None, None, "0:8", False)),
        ("gradient_accumulation_steps: 2\n" + RAMP, [], (2, None, None, True)),
        (RAMP, ["gradient_accumulation_steps=4"], (4, None, None, True)),
        (RAMP, ["per_device_batch_size_start=4"], (1, None, None, True)),
        (RAMP, ["global_batch_size=64"], (None, 64, None, False)),
        (RAMP, ["batch_size_schedule=0:8 9:16"], (None, None, "0:8 9:16", False)),
        (RAMP, ["global_batch_size=64", "enable_rampup_batch_size=false"], (None, 64, None, False)),
        (RAMP, ["enable_rampup_batch_size=false"], (1, None, None, False)),
        ("batch_size_schedule: 0:8", ["enable_rampup_batch_size=true"], (None, None, None, True)),
        ("global_batch_size: 64\nper_device_batch_size_start: 2", [], (None, 64, None, False)),
        ("global_batch_size: 64", ["global_batch_size=null"], (None, None, None, False)),
        ("global_batch_size: 64\ngradient_accumulation_steps: 4", [], (4, 64, None, False)),
    ],
)
def test_a_statement_of_the_batch_displaces_those_of_lower_layers(
    tmp_path: Path, file: str, overrides: list[str], expected: tuple[object, ...]
) -> None:
    config = load_config(write(tmp_path / "run.yml", file + "\n"), overrides)
    assert tuple(config[name] for name in BATCH_KEYS) == expected
    again = load_config(write(tmp_path / "again.yml", dump_config(config)))
    assert again == config


def test_the_sources_of_a_mixture_file_have_types_of_their_own() -> None:
    check_data_paths(load_config(overrides=["dataset_path=mixture.yml"]))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], (None, 2, 32)),
        (["per_device_batch_size=4"], (4, None, 32)),
        (["gradient_accumulation_steps=4"], (16, 4, None)),
        (["global_batch_size=64"], (16, None, 64)),
        (["global_batch_size=64", "gradient_accumulation_steps=8"], (None, 8, 64)),
        (["batch_size_schedule=0:8 9:16"], (16, None, None)),
    ],
)
def test_what_a_layer_states_displaces_a_global_batch_and_its_steps(
    tmp_path: Path, overrides: list[str], expected: tuple[int | None, ...]
) -> None:
    run = write(tmp_path / "run.yml", "global_batch_size: 32\ngradient_accumulation_steps: 2\n")
    config = load_config(run, overrides)
    names = ("per_device_batch_size", "gradient_accumulation_steps", "global_batch_size")
    assert tuple(config[name] for name in names) == expected
    assert load_config(write(tmp_path / "config.yml", dump_config(config))) == config


def test_tensors_of_custom_remat_are_given_up_by_a_layer_that_states_another_policy() -> None:
    Path("run.yml").write_text(
        "remat_policy: custom\nquery_proj: device\ndecoder_layer_input: offload\n"
    )
    assert load_config("run.yml").query_proj == "device"
    changed = load_config("run.yml", ["remat_policy=full"])
    assert (changed.remat_policy, changed.query_proj, changed.decoder_layer_input) == (
        "full",
        "remat",
        "device",
    )


@pytest.mark.parametrize(
    "overrides",
    [
        ("base_mlp_dim=133145",),
        ("base_emb_dim=200000",),
        ("base_num_query_heads=1048", "base_num_kv_heads=8", "head_dim=128"),
    ],
)
def test_sums_of_fp8_have_no_bound(overrides: tuple[str, ...]) -> None:
    load_config(overrides=[*overrides, "quantization=fp8"])


def test_an_override_may_leave_the_ramp_of_a_file_for_its_other_batch(tmp_path: Path) -> None:
    for other in ("global_batch_size: 64", "batch_size_schedule: 0:8"):
        run = write(tmp_path / "run.yml", RAMP + other + "\n")
        assert not load_config(run, ["enable_rampup_batch_size=false"]).enable_rampup_batch_size
