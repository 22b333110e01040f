"""Kinds of samples: a config's choice, and the interface of each room."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from maxbatch import load_config
from maxbatch.config.recipes import CHOICES, slots_per_sample
from maxbatch.config.sections import KEYS
from maxbatch.data.store.recipe import StoreRecipe
from maxbatch.plan.batch import BatchPlan
from maxbatch.system.errors import ConfigError
from maxbatch.update.recipe import TrainedRecipe

FILES = Path(__file__).parents[2] / "maxbatch" / "kinds"
STATED = {
    "text": (),
    "conversation": ("use_sft=true",),
    "pair": ("use_dpo=true",),
    "prompt": ("batch_size=4",),
}


def test_each_kind_is_a_folder_and_all_but_text_have_a_key() -> None:
    folders = {path.parent.name for path in FILES.glob("*/recipe.py")}
    assert folders == set(STATED) == {"text", *CHOICES.values()}


@pytest.mark.parametrize("kind", STATED)
def test_every_room_knows_the_kind_that_the_config_chooses(kind: str) -> None:
    config = load_config(overrides=STATED[kind])
    recipe = config.recipe
    assert recipe.name == kind and recipe.key == (STATED[kind] or ("",))[0].partition("=")[0]
    assert recipe == TrainedRecipe.of(config.recipe) == config.plan.recipe == config.record.recipe
    assert slots_per_sample(config) == config.max_target_length * (2 if kind == "pair" else 1)


@pytest.mark.parametrize(
    ("kind", "unit"),
    [("text", "sample"), ("conversation", "sample"), ("pair", "pair"), ("prompt", "prompt")],
)
def test_a_plan_counts_in_the_unit_of_the_kind(kind: str, unit: str) -> None:
    assert BatchPlan.from_config(load_config(overrides=STATED[kind])).sample == unit


def test_a_store_is_of_one_kind() -> None:
    conversation = {
        "version": 2,
        "completion_only": True,
        "format": "auto",
        "text_field": "text",
        "template": None,
    }
    for made, kind in (
        (conversation, "conversation"),
        (conversation | {"pairs": True}, "pair"),
        (None, ""),
    ):
        assert [one.name for one in StoreRecipe.flagged() if one.has_made(made)] == [kind] * bool(
            kind
        )
    assert not any(one.has_made(conversation | {"kind": "label"}) for one in StoreRecipe.flagged())


def test_a_rule_between_keys_is_the_kinds_own() -> None:
    stated = (
        "dpo_algo=orpo",
        "dpo_label_smoothing=0.1",
        "early_stopping_patience=2",
        "eval_interval=10",
    )
    load_config(overrides=stated)
    with pytest.raises(
        ConfigError, match=r"dpo_label_smoothing=0\.1: must be 0 beside dpo_algo=orpo"
    ):
        load_config(overrides=[*stated, "use_dpo=true"])
    with pytest.raises(
        ConfigError, match="early_stopping_patience=2: must be null beside batch_size"
    ):
        load_config(overrides=[*stated, "batch_size=4"])


def test_the_kind_of_a_plan_brings_neither_numpy_nor_jax() -> None:
    program = (
        "import sys; from maxbatch.config.loading import load_config; from "
        "maxbatch.config.recipes import Recipe\nassert load_config().recipe.unit == 'sample'; "
        "print({'numpy', 'jax'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"


def test_a_key_that_chooses_a_kind_is_off_by_default() -> None:
    assert {str(KEYS[name].default) for name in CHOICES} == {"null", "false"}
