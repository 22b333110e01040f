"""Configs of preference pairs: MaxText's dpo.yml, TRL's DPOConfig and ORPOConfig, Axolotl's rl."""

from __future__ import annotations

from pathlib import Path

import pytest

from maxbatch.plan.batch import BatchPlan
from tests.helpers.imports import imported

MAXTEXT = """
use_dpo: true
dpo: {algo: orpo, orpo_lambda: 0.2, dpo_label_smoothing: 0.0, dpo_beta: 0.3, max_prompt_length: null}
packing: false
per_device_batch_size: 2.0
steps: 10
max_target_length: 512
dataset_type: hf
hf_path: Anthropic/hh-rlhf
train_data_columns: ['chosen', 'rejected']
tokenizer_type: huggingface
tokenizer_path: tokenizer
"""
TRL = """
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
max_steps: 5
beta: 0.05
max_length: 256
max_prompt_length: null
"""


def test_maxtexts_pairs_are_ours(tmp_path: Path) -> None:
    config, fates = imported("maxtext", tmp_path / "m.yml", MAXTEXT)
    assert (config.use_dpo, config.dpo_algo, config.orpo_lambda, config.dpo_beta) == (
        True,
        "orpo",
        0.2,
        0.3,
    )
    assert config.max_target_length == 512 and fates["train_data_columns"].fate == "ignored"
    plan = BatchPlan.from_config(config, 4)
    assert (plan.global_batch_size_to_train_on, plan.tokens_per_step) == (8, 8 * 2 * 512)
    _, fates = imported(
        "maxtext",
        tmp_path / "m.yml",
        MAXTEXT.replace("max_prompt_length: null", "max_prompt_length: 9"),
    )
    assert fates["dpo.max_prompt_length"].fate == "not supported"
    _, fates = imported(
        "maxtext", tmp_path / "m.yml", MAXTEXT.replace("'chosen', 'rejected'", "'good', 'bad'")
    )
    assert fates["train_data_columns"].is_essential


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("label_smoothing: 0.1\nprecompute_ref_log_probs: true\n", ("dpo", 0.05, 0.1, 0.1)),
        ("loss_type: sigmoid\noutput_dir: runs/orpo-then-dpo\n", ("dpo", 0.05, 0.0, 0.1)),
        ("output_dir: zephyr-orpo\n", ("orpo", 0.1, 0.0, 0.05)),
    ],
)
def test_trls_pairs_are_ours(
    tmp_path: Path, text: str, expected: tuple[str, float, float, float]
) -> None:
    config, _ = imported("hf", tmp_path / "t.yml", TRL + text)
    assert config.use_dpo and config.max_target_length == 256 and config.learning_rate == 1e-6
    assert (
        config.dpo_algo,
        config.dpo_beta,
        config.dpo_label_smoothing,
        config.orpo_lambda,
    ) == expected
    plan = BatchPlan.from_config(config, 2)
    assert plan.global_batch_size_to_train_on == 32 and plan.sample == "pair"


@pytest.mark.parametrize(
    "line", ["loss_type: ipo\n", "loss_type: [sigmoid, bco_pair]\n", "truncation_mode: keep_end\n"]
)
def test_another_loss_or_other_rows_are_never_left_out(tmp_path: Path, line: str) -> None:
    _, fates = imported("hf", tmp_path / "t.yml", TRL + line)
    assert fates[line.partition(":")[0]].is_essential


AXOLOTL = """
base_model: here
chat_template: tokenizer_default
datasets:
  - {path: pairs.jsonl, type: chat_template.default, field_messages: conversation, field_chosen: chosen}
sequence_len: 2048
sample_packing: false
micro_batch_size: 2
gradient_accumulation_steps: 4
max_steps: 10
"""


def test_axolotls_pairs_are_ours(tmp_path: Path) -> None:
    config, fates = imported("axolotl", tmp_path / "a.yml", f"{AXOLOTL}rl: dpo\nrl_beta: 0.3\n")
    assert (config.use_dpo, config.dpo_algo, config.dpo_beta, config.packing) == (
        True,
        "dpo",
        0.3,
        False,
    )
    assert (
        fates["datasets"].fate == "needs you"
        and "prompt (there conversation)" in fates["datasets"].says
    )
    assert fates["rl"].fate == fates["rl_beta"].fate == "mapped"
    plan = BatchPlan.from_config(config, 2)
    assert (plan.global_batch_size_to_train_on, plan.sample) == (2 * 4 * 2, "pair")
    config, _ = imported("axolotl", tmp_path / "a.yml", f"{AXOLOTL}rl: orpo\norpo_alpha: 0.2\n")
    assert (config.dpo_algo, config.orpo_lambda) == ("orpo", 0.2)
    for line in ("dpo_loss_type: [ipo]", "sample_packing: true", "dpo_use_weighting: true"):
        text = f"{AXOLOTL}rl: dpo\n".replace("sample_packing: false\n", "") + f"{line}\n"
        _, fates = imported("axolotl", tmp_path / "a.yml", text)
        assert fates[line.partition(":")[0]].is_essential, line


@pytest.mark.parametrize(("line", "on_answers"), [("", True), ("train_on_inputs: true\n", False)])
def test_axolotls_alpaca_is_ours_with_its_text_as_the_chat_template(
    tmp_path: Path, line: str, on_answers: bool
) -> None:
    text = (
        AXOLOTL.partition("chat_template:")[0]
        + "datasets: [{path: a.jsonl, type: alpaca}]\nmicro_batch_size: 2\n"
    )
    config, fates = imported(
        "axolotl", tmp_path / "a.yml", f"{text}gradient_accumulation_steps: 4\n{line}"
    )
    assert (config.use_sft, config.sft_format, config.sft_train_on_completion_only) == (
        True,
        "alpaca",
        on_answers,
    )
    assert (
        config.dataset_path == "a.jsonl"
        and BatchPlan.from_config(config, 1).global_batch_size_to_train_on == 8
    )
    assert fates["datasets"].fate == "needs you" and "### Response:" in fates["datasets"].says
