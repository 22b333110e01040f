"""`maxbatch import` of values that other programs compute: shares, `auto`, defaults, and numbers
that cannot be.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from maxbatch import BatchPlan, load_config
from tests.helpers.imports import imported

AXOLOTL = """
base_model: models/small
datasets:
  - path: a.jsonl
    type: completion
"""
MEGATRON = (
    "python pretrain_gpt.py --micro-batch-size 4 --global-batch-size 32 --train-iters 10 "
    "--seq-length 512 "
)


def test_periods_below_one_are_shares_of_the_updates_rounded_up(tmp_path: Path) -> None:
    words = {
        "per_device_train_batch_size": 4,
        "eval_strategy": "steps",
        "eval_steps": 0.25,
        "save_steps": 0.5,
    }
    config, _ = imported(
        "hf", tmp_path / "h.json", json.dumps({**words, "max_steps": 201, "logging_steps": 0.01})
    )
    assert (config.eval_interval, config.checkpoint_period, config.log_period) == (51, 101, 3)
    _, fates = imported("hf", tmp_path / "h.json", json.dumps(words))
    assert fates["eval_strategy"].fate == "needs you"
    assert (
        fates["save_steps"].fate == "ignored" and "share of the updates" in fates["save_steps"].says
    )


@pytest.mark.parametrize(
    ("arguments", "last"), [({"min_lr_rate": 0.2}, 0.2), ({"min_lr": 5e-6}, 0.05)]
)
def test_a_cosine_to_a_least_rate_ends_there(
    tmp_path: Path, arguments: dict[str, float], last: float
) -> None:
    words = {"lr_scheduler_type": "cosine_with_min_lr", "learning_rate": 1e-4, "max_steps": 10}
    config, _ = imported(
        "hf", tmp_path / "h.json", json.dumps({**words, "lr_scheduler_kwargs": arguments})
    )
    assert (config.learning_rate_schedule, config.learning_rate_final_fraction) == ("cosine", last)
    flag = json.dumps(arguments)
    text = (
        f"python t.py {' '.join(f'--{word} {value}' for word, value in words.items())} "
        f"--lr_scheduler_kwargs '{flag}'"
    )
    assert imported("hf", tmp_path / "h.sh", text)[0].learning_rate_final_fraction == last


def test_a_cosine_to_a_least_rate_that_is_not_stated_is_refused(tmp_path: Path) -> None:
    _, fates = imported(
        "hf", tmp_path / "h.json", '{"lr_scheduler_type": "cosine_with_min_lr", "max_steps": 10}'
    )
    assert fates["lr_scheduler_type"].fate == "not supported"


@pytest.mark.parametrize("word", ["warmup_num_steps", "total_num_steps"])
def test_what_deepspeeds_schedule_leaves_to_the_trainer_is_refused_by_name(
    tmp_path: Path, word: str
) -> None:
    numbers = {"warmup_num_steps": 10, "total_num_steps": 100} | {word: "auto"}
    words = {"train_batch_size": 8, "scheduler": {"type": "WarmupDecayLR", "params": numbers}}
    _, fates = imported("deepspeed", tmp_path / "d.json", json.dumps(words))
    assert fates[f"scheduler.params.{word}"].fate == "not supported"
    assert "needed: the value" in fates[f"scheduler.params.{word}"].says


def test_deepspeeds_schedule_has_its_own_defaults(tmp_path: Path) -> None:
    schedule = {
        "type": "WarmupCosineLR",
        "params": {"total_num_steps": 10_000, "warmup_min_lr": "auto"},
    }
    config, _ = imported(
        "deepspeed", tmp_path / "d.json", json.dumps({"train_batch_size": 8, "scheduler": schedule})
    )
    assert (config.warmup_steps_fraction, config.learning_rate_final_fraction) == (0.1, 0.0001)


@pytest.mark.parametrize(
    ("batch", "micro", "passes", "is_refused"),
    [
        (100, 8, 4, True),
        (96, 8, 4, False),
        (10, 3, None, True),
        (10, None, 4, True),
        (12, 3, None, False),
    ],
)
def test_a_batch_that_no_number_of_gpus_gives_is_refused(
    tmp_path: Path, batch: int, micro: int | None, passes: int | None, is_refused: bool
) -> None:
    words = {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": passes,
    }
    stated = {name: value for name, value in words.items() if value is not None}
    config, fates = imported("deepspeed", tmp_path / "d.json", json.dumps(stated))
    assert fates["train_batch_size"].is_essential is is_refused
    assert is_refused or BatchPlan.from_config(config, 1).global_batch_size_to_train_on == batch


def test_an_elastic_batch_of_deepspeed_is_refused(tmp_path: Path) -> None:
    words = {"train_batch_size": 8, "elasticity": {"enabled": True, "max_train_batch_size": 2000}}
    _, fates = imported("deepspeed", tmp_path / "d.json", json.dumps(words))
    assert fates["elasticity.enabled"].is_essential


@pytest.mark.parametrize(
    ("line", "dtype"), [("", "bfloat16"), ("bf16: false", "float32"), ("fp16: true", "bfloat16")]
)
def test_axolotls_dtype_is_bfloat16_unless_it_is_off(tmp_path: Path, line: str, dtype: str) -> None:
    config, fates = imported("axolotl", tmp_path / "a.yml", f"{AXOLOTL}max_steps: 10\n{line}\n")
    assert config.dtype == dtype
    assert line or fates["bf16"].value == "auto (default)"


def test_a_warmup_in_updates_of_epochs_needs_a_step(tmp_path: Path) -> None:
    _, fates = imported(
        "axolotl",
        tmp_path / "a.yml",
        f"{AXOLOTL}num_epochs: 2\nwarmup_steps: 100\nlora_dropout: 0.0\n",
    )
    assert (
        fates["warmup_steps"].fate == "needs you"
        and "100 / total_steps" in fates["warmup_steps"].says
    )
    assert fates["lora_dropout"].fate == "ignored"


WARMUP = {"per_device_train_batch_size": 4, "num_train_epochs": 2}


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_the_step_of_a_warmup_without_updates_states_all_that_has_to_change(
    tmp_path: Path, kind: str
) -> None:
    words = WARMUP | {"warmup_steps": 100, "warmup_ratio": 0.3, "lr_scheduler_type": kind}
    config, fates = imported("hf", tmp_path / "h.json", json.dumps(words))
    assert (fates["warmup_steps"].fate, config.warmup_steps_fraction) == ("needs you", 0)
    assert ("wsd_decay_steps_fraction" in fates["warmup_steps"].says) == (kind == "linear")
    assert fates["warmup_ratio"].says == "warmup_steps states it"
    share = 100 / 2500
    stated = [f"warmup_steps_fraction={share}"]
    stated += [f"wsd_decay_steps_fraction={1 - share}"] if kind == "linear" else []
    assert load_config(tmp_path / "imported.yml", overrides=stated).warmup_steps_fraction == share


@pytest.mark.parametrize(
    ("name", "end"), [("hf", "one update later"), ("axolotl", "one update sooner")]
)
def test_a_warmup_ratio_without_updates_is_a_share_and_says_how_it_is_rounded_there(
    tmp_path: Path, name: str, end: str
) -> None:
    text = AXOLOTL if name == "axolotl" else "per_device_train_batch_size: 4\n"
    config, fates = imported(name, tmp_path / "w.yml", f"{text}warmup_ratio: 0.1\n")
    assert (config.warmup_steps_fraction, fates["warmup_ratio"].fate) == (0.1, "mapped")
    assert f"{end}; max_steps beside it makes it exact" in fates["warmup_ratio"].says


def test_axolotls_default_warmup_without_updates_names_its_bound(tmp_path: Path) -> None:
    config, fates = imported("axolotl", tmp_path / "a.yml", AXOLOTL)
    assert "after 100 updates at the latest" in fates["warmup_ratio"].says
    assert config.warmup_steps_fraction == 0.03


def test_a_constant_schedule_has_no_warmup_as_there(tmp_path: Path) -> None:
    words = WARMUP | {"lr_scheduler_type": "constant", "warmup_steps": 100}
    config, fates = imported("hf", tmp_path / "h.json", json.dumps(words))
    assert (config.warmup_steps_fraction, fates["warmup_steps"].fate) == (0, "ignored")


@pytest.mark.parametrize(("steps", "updates"), [(1000, 30), (10_000, 100)])
def test_axolotls_default_warmup_ends_after_a_hundred_updates(
    tmp_path: Path, steps: int, updates: int
) -> None:
    config, _ = imported("axolotl", tmp_path / "a.yml", f"{AXOLOTL}max_steps: {steps}\n")
    assert config.warmup_steps_fraction == updates / steps


def test_a_null_tokenizer_is_data_of_token_ids(tmp_path: Path) -> None:
    flags = "--tokenizer-type NullTokenizer --vocab-size 32000 --data-path /data/x_text_document"
    config, fates = imported("megatron", tmp_path / "m.sh", MEGATRON + flags)
    assert (config.dataset_type, config.vocab_size, fates["tokenizer_type"].fate) == (
        "megatron",
        32000,
        "ignored",
    )
    _, fates = imported("megatron", tmp_path / "m.sh", f"{MEGATRON}--tokenizer-type NullTokenizer")
    assert fates["tokenizer_type"].is_essential


# Megatron-LM's defaults that our result does not have, and the words that state our result there.
MEGATRONS_FORM = {
    "swiglu": ("false", "--swiglu"),
    "normalization": ("LayerNorm", "--normalization RMSNorm"),
    "position_embedding_type": ("learned_absolute", "--position-embedding-type rope"),
    "hidden_dropout": ("0.1", "--hidden-dropout 0"),
    "attention_dropout": ("0.1", "--attention-dropout 0"),
    "disable_bias_linear": ("false", "--disable-bias-linear"),
}
DENSE = MEGATRON + "--num-layers 2 --hidden-size 64 --num-attention-heads 4 "


def test_a_minimal_command_of_megatron_names_each_default_that_differs(tmp_path: Path) -> None:
    config, fates = imported("megatron", tmp_path / "m.sh", DENSE)
    needed = {word: fate for word, fate in fates.items() if fate.fate == "needs you"}
    assert {word: fate.value for word, fate in needed.items()} == {
        word: f"{value} (default)" for word, (value, _) in MEGATRONS_FORM.items()
    }
    assert all(flag in needed[word].says for word, (_, flag) in MEGATRONS_FORM.items())
    # defaults that our keys can have
    assert fates["untie_embeddings_and_output_weights"].value == "false (default)"
    assert (config.logits_via_embedding, config.normalization_layer_epsilon) == (True, 1e-5)


@pytest.mark.parametrize("word", MEGATRONS_FORM)
def test_a_stated_form_of_megatron_leaves_no_row_of_its_default(tmp_path: Path, word: str) -> None:
    _, fates = imported("megatron", tmp_path / "m.sh", DENSE + MEGATRONS_FORM[word][1])
    assert {name for name, fate in fates.items() if fate.fate == "needs you"} == (
        MEGATRONS_FORM.keys() - {word}
    )


def test_a_default_of_megatron_that_another_word_replaces_has_no_row(tmp_path: Path) -> None:
    flags = "--use-rotary-position-embeddings --layernorm-epsilon 1e-6"
    config, fates = imported("megatron", tmp_path / "m.sh", DENSE + flags)
    assert not {"position_embedding_type", "norm_epsilon"} & fates.keys()
    assert config.normalization_layer_epsilon == 1e-6


def test_nemos_width_of_an_mlp_does_not_follow_its_hidden_size(tmp_path: Path) -> None:
    text = "python megatron_gpt_pretraining.py trainer.max_steps=10 model.hidden_size=1536"
    config, fates = imported("nemo", tmp_path / "n.sh", text)
    assert (config.base_mlp_dim, fates["ffn_hidden_size"].value) == (3072, "3072 (default)")
    assert (config.normalization_layer_epsilon, "swiglu" in fates) == (1e-5, False)


@pytest.mark.parametrize("name", ["nemo", "megatron"])
def test_a_command_of_nemo_has_nemos_defaults(tmp_path: Path, name: str) -> None:
    text = (
        "python megatron_gpt_pretraining.py trainer.max_steps=1000 "
        "model.data.data_prefix=[0.5,/a,0.5,/b]"
    )
    config, fates = imported(name, tmp_path / "n.sh", text)
    assert (config.global_batch_size, config.per_device_batch_size, config.max_target_length) == (
        8,
        4,
        512,
    )
    assert (config.learning_rate, config.adam_b2, config.dtype) == (2e-4, 0.98, "bfloat16")
    assert (config.learning_rate_schedule, config.learning_rate_final_fraction) == ("cosine", 0.1)
    assert (config.warmup_steps_fraction, config.eval_fraction, config.dataset_path) == (
        0.5,
        0.05,
        "/a,0.5;/b,0.5",
    )
    assert fates["lr"].value == "2e-4 (default)" and fates["hidden_dropout"].fate == "needs you"


@pytest.mark.parametrize(
    ("value", "dtype"), [("bfloat16", "bfloat16"), ("torch.float32", "float32")]
)
def test_the_dtype_of_hugging_faces_parameters_is_ours(
    tmp_path: Path, value: str, dtype: str
) -> None:
    words = {"per_device_train_batch_size": 4, "max_steps": 10, "torch_dtype": value}
    config, fates = imported("hf", tmp_path / "h.json", json.dumps(words))
    assert config.weight_dtype == dtype and fates["torch_dtype"].fate == "mapped"


def test_swiglu_is_a_gated_mlp(tmp_path: Path) -> None:
    config, fates = imported(
        "megatron", tmp_path / "m.sh", f"{MEGATRON}--swiglu --params-dtype float32"
    )
    assert config.mlp_activations == "silu,linear" and fates["swiglu"].fate == "mapped"


@pytest.mark.parametrize("kind", ["mmap", "mmap_npy"])
def test_maxtexts_stores_of_megatron_are_read_in_place(tmp_path: Path, kind: str) -> None:
    files = (
        "grain_train_files: /data/a,0.7;/data/b,0.3\nmmap_npy_split: 98,2\nmmap_eod_id: "
        "2\ntokenizer_path: t\n"
    )
    text = (
        f"base_config: base.yml\nsteps: 10\ndataset_type: grain\ngrain_file_type: {kind}\n{files}"
    )
    config, fates = imported("maxtext", tmp_path / "m.yml", text)
    assert (config.dataset_type, config.dataset_path) == ("megatron", "/data/a,0.7;/data/b,0.3")
    assert (config.eval_fraction, config.add_bos, config.add_eos) == (0.02, False, False)
    assert not [fate for fate in fates.values() if fate.fate == "not supported"]
