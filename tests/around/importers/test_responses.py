"""Configs of generated responses: TRL's GRPOConfig converted, verl's policy trainer explained."""

from __future__ import annotations

from pathlib import Path

import pytest

from maxbatch import load_config
from maxbatch.around.importers.translation import Fate, Translation
from maxbatch.cli import main
from maxbatch.commands.import_config import recognised_format, translated, written
from maxbatch.config.unknown import hint

TRL = """
model_name_or_path: Qwen/Qwen3-0.6B
per_device_train_batch_size: 8
gradient_accumulation_steps: 2
num_generations: 8
max_prompt_length: 512
max_completion_length: 1024
max_steps: 400
"""
VERL = """
bsz=128
total=$(( bsz * 8 ))
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files="['/data/a.parquet', '/data/b.parquet']" \\
    data.train_batch_size=${total} data.max_prompt_length=512 data.max_response_length=1024 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \\
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 \\
    actor_rollout_ref.rollout.n=5 +actor_rollout_ref.rollout.engine_kwargs.vllm.x=1 \\
    trainer.logger='["console","wandb"]' \\
    trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.test_freq=5 trainer.total_epochs=15 $@
"""
_SIZES = ("batch_size", "num_generations", "num_minibatches", "num_iterations", "micro_batch_size")


def _read(
    name: str, path: Path, text: str, devices: int | None = 8
) -> tuple[Translation, dict[str, Fate]]:
    path.write_text(text)
    translation, _ = translated(name, path, devices=devices)
    return translation, {fate.word: fate for fate in translation.fates}


def _sizes(translation: Translation) -> tuple[int, ...]:
    return tuple(int(translation.settings[name]) for name in _SIZES)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "sample_deviation"),
        ("scale_rewards: group\n", "sample_deviation"),
        ("scale_rewards: none\n", "none"),
        ("scale_rewards: false\n", "none"),
    ],
)
def test_advantages_are_scaled_as_trls(text: str, expected: str, tmp_path: Path) -> None:
    translation, _ = _read("trl", tmp_path / "t.yml", TRL + text)
    assert translation.settings["advantage_scale"] == expected


@pytest.mark.parametrize(
    ("text", "devices", "expected"),
    [
        ("", 8, (16, 8, 1, 1, 64)),
        ("", 4, (8, 8, 1, 1, 32)),
        ("steps_per_generation: 8\n", 8, (64, 8, 4, 1, 64)),
        ("generation_batch_size: 512\nnum_iterations: 2\n", 8, (64, 8, 4, 2, 64)),
        # an update of two batches of one policy
        ("steps_per_generation: 1\n", 8, (16, 8, 1, 1, 64)),
    ],
)
def test_trls_completions_become_prompts(
    tmp_path: Path, text: str, devices: int, expected: tuple[int, ...]
) -> None:
    for name in ("trl", "hf"):
        translation, fates = _read(name, tmp_path / "t.yml", TRL + text, devices)
        assert _sizes(translation) == expected and translation.framework == "trl"
        assert not [fate for fate in fates.values() if fate.fate == "not supported"]
    assert (
        translation.settings["loss_agg_mode"] == "token-mean"
        and translation.settings["grpo_beta"] == "0.0"
    )
    run = tmp_path / "run.yml"
    run.write_text(written(translation, "t.yml"))
    config = load_config(run)
    assert config.max_target_length == 1536 and config.steps == 400 and config.learning_rate == 1e-6


@pytest.mark.parametrize(
    ("text", "devices", "word", "why"),
    [
        ("", None, "per_device_train_batch_size", "--devices N"),
        ("steps_per_generation: 3\n", 8, "steps_per_generation", "updates of 128 completions"),
        ("generation_batch_size: 100\n", 8, "generation_batch_size", "devices divide"),
        (
            "steps_per_generation: 2\ngeneration_batch_size: 128\n",
            8,
            "generation_batch_size",
            "one of",
        ),
        ("loss_type: dr_grpo\n", 8, "loss_type", "must be grpo, bnpo or dapo"),
        ("num_iterations: 3\n", 8, "max_steps", "a multiple of 3"),
    ],
)
def test_a_word_of_trls_that_states_a_batch_is_never_skipped(
    tmp_path: Path, text: str, devices: int | None, word: str, why: str
) -> None:
    _, fates = _read("trl", tmp_path / "t.yml", TRL + text, devices)
    assert fates[word].is_essential and why in fates[word].says


@pytest.mark.parametrize(
    ("launcher", "devices", "prompts"),
    [
        ("accelerate launch --config_file zero3.yaml --num_processes 4 grpo.py", None, 8),
        ("accelerate launch --num_processes=4 --num_machines 2 trl/scripts/grpo.py", 16, 32),
        ("torchrun --nproc-per-node 4 --nnodes 2 grpo.py", None, 16),
        ("N=2 CUDA_VISIBLE_DEVICES=0,1 trl grpo --num_processes 2", None, 4),
        ("torchrun --nproc-per-node 4 --nnodes 1:2 grpo.py", None, None),
    ],
)
def test_the_processes_of_trls_launcher_are_the_devices_of_its_batch(
    tmp_path: Path, launcher: str, devices: int | None, prompts: int | None
) -> None:
    flags = " ".join(f"--{line.replace(': ', ' ')}" for line in TRL.split("\n") if line)
    translation, fates = _read("trl", tmp_path / "run.sh", f"{launcher} {flags}\n", devices)
    if prompts is None:
        assert "--devices N" in fates["per_device_train_batch_size"].says
        return
    assert (
        int(translation.settings["batch_size"]) == prompts
        and fates["num_processes"].fate == "ignored"
    )
    assert not [fate for fate in fates.values() if fate.fate == "not supported"]


@pytest.mark.parametrize("name", ["verl", "auto"])
def test_verls_command_is_answered_with_its_batch_here(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.sh").write_text(VERL)
    assert recognised_format(tmp_path / "run.sh") == "verl"
    assert main(["import", name, "run.sh"]) == 2
    captured = capsys.readouterr()
    assert (
        captured.err.count("\n") == 1
        and not captured.out
        and not (tmp_path / "maxbatch.yml").exists()
    )
    for answer in (
        "data.train_batch_size=1024 (verl) is batch_size",
        "ppo_mini_batch_size=256 (verl) maps to num_minibatches",
        "ppo_micro_batch_size_per_gpu=16 (verl) maps to micro_batch_size",
        "rollout.n=5 (verl) is num_generations",
        "maxbatch plan rl --words",
    ):
        assert answer in captured.err


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("algorithm.adv_estimator", "loss_algo: grpo is grpo; others are not supported"),
        (
            "actor_rollout_ref.actor.ppo_mini_batch_size",
            "prompts per update: num_minibatches = batch_size / it",
        ),
        ("data.gen_batch_size", "batch_size; filter_groups replaces prompts one by one"),
        ("algorithm.filter_groups.enable", "is filter_groups"),
        (
            "algorithm.filter_groups.max_num_gen_batches",
            "max_prompts_per_batch = it x gen_batch_size",
        ),
        ("trainer.total_training_steps", "steps = batches x num_minibatches x num_iterations"),
        ("actor_rollout_ref.actor.clip_ratio_high", "is epsilon_high"),
        ("actor_rollout_ref.actor.clip_ratio_c", "is not supported"),
        ("actor_rollout_ref.actor.loss_agg_mode", "seq-mean-token-sum is sequence-mean"),
        ("actor_rollout_ref.actor.use_kl_loss", "false is grpo_beta=0"),
        ("actor_rollout_ref.actor.kl_loss_type", "low_var_kl (k3) only"),
        ("algorithm.use_kl_in_reward", "is not supported"),
        ("actor_rollout_ref.rollout.multi_turn.enable", "is not supported: a response is one turn"),
        ("data.prompt_key", "prompt_template"),
        ("data.filter_overlong_prompts", "leave it out of the files"),
    ],
)
def test_verls_words_are_answered_by_their_paths(word: str, answer: str) -> None:
    assert answer in hint(word, is_of_prompts=True)


@pytest.mark.parametrize(("schedule", "is_said"), [("linear", True), ("constant", False)])
def test_an_import_says_that_the_updates_of_a_batch_share_its_rate(
    schedule: str, is_said: bool, tmp_path: Path
) -> None:
    text = f"{TRL}num_iterations: 2\nlr_scheduler_type: {schedule}\n"
    _, fates = _read("trl", tmp_path / "t.yml", text)
    assert ("one rate" in fates["num_iterations"].says) is is_said
