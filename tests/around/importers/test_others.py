"""`maxbatch import` of Hugging Face, DeepSpeed, Axolotl, Megatron-LM and NeMo: the batch that they
promise.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from maxbatch import BatchPlan, RampupBatchManager
from maxbatch.commands.import_config import recognised_format
from maxbatch.plan.skip_samples import holes_of
from tests.helpers.imports import imported
from tests.helpers.ramps_elsewhere import megatron_rampup

HF = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 8,
    "num_train_epochs": 2,
    "bf16": True,
}
DEEPSPEED = {
    "train_batch_size": 256,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95]}},
    "bf16": {"enabled": True},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_num_steps": 100, "total_num_steps": 1000},
    },
    "zero_optimization": {"stage": 3},
    "gradient_clipping": 0.5,
}
AXOLOTL = """
base_model: models/small
datasets:
  - path: a.jsonl
    type: completion
sequence_len: 2048
micro_batch_size: 3
gradient_accumulation_steps: 2
max_steps: 100
warmup_steps: 10
"""
MEGATRON = r"""
torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 2 --num-layers 24 --hidden-size 1024 \
    --num-attention-heads 16 --seq-length 1024 --micro-batch-size 2 --global-batch-size 96 \
    --rampup-batch-size 16 16 3000 --lr 0.00015 --train-iters 5000 --lr-decay-style cosine --min-lr 1.5e-5 \
    --lr-warmup-fraction .01 --bf16 --split 949,50,1
"""
NEMO = """
trainer: {devices: 8, precision: bf16, max_steps: 300}
model:
  micro_batch_size: 2
  global_batch_size: 64
  rampup_batch_size: [16, 16, 1000]
  encoder_seq_length: 2048
  optim: {name: distributed_fused_adam, lr: 2e-4, betas: [0.9, 0.98], sched: {name: CosineAnnealing, warmup_steps: 30}}
"""


def test_trainer_multiplies_rows_passes_and_gpus(tmp_path: Path) -> None:
    config, fates = imported("hf", tmp_path / "args.json", json.dumps(HF))
    assert (
        BatchPlan.from_config(config, 8, samples_per_epoch=1000).global_batch_size_to_train_on
        == 4 * 8 * 8
    )
    assert "go on into the next epoch" in fates["num_train_epochs"].says
    assert (config.num_epochs, config.learning_rate, config.adam_b2, config.dtype) == (
        2,
        5e-5,
        0.999,
        "bfloat16",
    )
    # Its default: linear to 0.
    assert (config.learning_rate_schedule, config.wsd_decay_steps_fraction) == ("wsd", 1)
    assert config.learning_rate_final_fraction == 0
    assert fates["learning_rate"].value == "5e-5 (default)"


def test_deepspeeds_batch_is_kept_and_its_passes_follow(tmp_path: Path) -> None:
    config, _ = imported("deepspeed", tmp_path / "ds.json", json.dumps(DEEPSPEED))
    for devices, steps in ((8, 8), (16, 4)):
        plan = BatchPlan.from_config(config, devices)
        assert (plan.global_batch_size_to_train_on, plan.gradient_accumulation_steps) == (
            256,
            steps,
        )
    assert (config.steps, config.adam_b2, config.gradient_clipping_threshold) == (1000, 0.95, 0.5)
    assert (config.warmup_steps_fraction, config.wsd_decay_steps_fraction) == (0.1, 0.9)


def test_what_deepspeed_leaves_to_the_trainer_is_not_supported(tmp_path: Path) -> None:
    _, fates = imported("deepspeed", tmp_path / "ds.json", json.dumps({"train_batch_size": "auto"}))
    assert fates["train_batch_size"].is_essential


def test_axolotls_example_is_a_batch_of_18(tmp_path: Path) -> None:
    config, _ = imported("axolotl", tmp_path / "ax.yml", AXOLOTL)
    assert BatchPlan.from_config(config, 3).global_batch_size_to_train_on == 18
    assert (config.steps, config.warmup_steps_fraction, config.dataset_path) == (
        100,
        0.1,
        "a.jsonl",
    )
    assert (config.max_target_length, config.num_epochs) == (2048, None)


@pytest.mark.parametrize(("name", "text"), [("megatron", MEGATRON), ("nemo", NEMO)])
def test_megatrons_ramp_gives_its_batch_at_every_sample(
    tmp_path: Path, name: str, text: str
) -> None:
    config, fates = imported(
        "megatron", tmp_path / ("run.sh" if name == "megatron" else "nemo.yml"), text
    )
    manager = RampupBatchManager.from_config(config, 8)
    ramp = (
        megatron_rampup(16, 16, 3000, 96)
        if name == "megatron"
        else megatron_rampup(16, 16, 1000, 64)
    )
    assert [manager.batch_size_at(s) for s in range(0, 3500, 7)] == [
        ramp(s) for s in range(0, 3500, 7)
    ]
    if name == "megatron":
        assert (config.per_device_batch_size, config.ici_tensor_parallelism, config.steps) == (
            1,
            2,
            5000,
        )
        assert (config.learning_rate_final_fraction, config.eval_fraction) == (0.1, 0.05)
    else:
        assert (config.adam_b2, config.max_target_length, config.warmup_steps_fraction) == (
            0.98,
            2048,
            0.1,
        )
        assert fates["trainer.max_steps"].says.startswith("steps=300")


SCRIPTS = {
    "flags alone": "--micro-batch-size 4 --global-batch-size 64 --rampup-batch-size 16 16 3000 --seq-length "
    "512 --bf16",
    "a flag a line": """
--micro-batch-size 4
--global-batch-size 64   # the user's own
--rampup-batch-size 16 16 3000
--seq-length 512
--bf16
""",
    "arrays": """#!/bin/bash
MICRO=4 # don't raise
LAUNCH=(
    --nproc_per_node $GPUS
)
TRAINING_ARGS=(
    --micro-batch-size $MICRO
    --global-batch-size 64 # (of all GPUs)
    --rampup-batch-size 16 16 3000
)
TRAINING_ARGS+=(--seq-length $((512)) --bf16)
TRAINING_ARGS+=(--seq-length 512)
torchrun ${LAUNCH[@]} pretrain_gpt.py "${TRAINING_ARGS[@]}" 2> log
""",
    "a quote of many lines": """
export GPT_ARGS="
    --micro-batch-size 4
    --global-batch-size 64
    --rampup-batch-size 16 16 3000
"
options="$GPT_ARGS --seq-length 512"
options+=" --bf16"
run_cmd="deepspeed ${DIR}/pretrain_gpt.py ${options} &> log"
eval ${run_cmd}
""",
}


@pytest.mark.parametrize("form", SCRIPTS)
def test_megatrons_arguments_are_read_as_its_scripts_write_them(tmp_path: Path, form: str) -> None:
    config, fates = imported("megatron", tmp_path / "run.sh", SCRIPTS[form])
    manager, ramp = RampupBatchManager.from_config(config, 4), megatron_rampup(16, 16, 3000, 64)
    assert [manager.batch_size_at(s) for s in range(0, 3500, 7)] == [
        ramp(s) for s in range(0, 3500, 7)
    ]
    assert (config.per_device_batch_size, config.max_target_length, config.dtype) == (
        4,
        512,
        "bfloat16",
    )
    assert not {fate.word for fate in fates.values() if fate.fate == "not supported"}
    assert fates["rampup_batch_size"].value == "[16, 16, 3000]"


RAMPED = "--rampup-batch-size 16 16 3000 --global-batch-size 64 --train-iters 200"


@pytest.mark.parametrize(
    ("words", "samples", "length"),
    [
        ("--iterations-to-skip 3 11 12 300", "128:192 640:768 19136:19200", 197),
        ("--skip-samples-range 100 300", "64:320", 196),
        ("--skip-iters-range 3 5", "192:320", 198),
        ("--skip-train-iteration-range 4-5 9-9", "192:320 512:576", 197),
        ("--iterations-to-skip 4 --skip-iters-range 4 6", "192:384", 197),
    ],
)
def test_what_megatron_skips_is_left_out_and_the_length_counts_what_trains(
    tmp_path: Path, words: str, samples: str, length: int
) -> None:
    text = f"python pretrain_gpt.py --micro-batch-size 4 --global-batch-size 64 {words}"
    config, fates = imported("megatron", tmp_path / "run.sh", f"{text} --train-iters 200")
    assert (config.skip_samples, config.steps) == (samples, length)
    assert fates["train_iters"].says == f"steps={length}: those that are not skipped"
    by_samples, _ = imported("megatron", tmp_path / "s.sh", f"{text} --train-samples {200 * 64}")
    assert by_samples.train_samples == length * 64
    _, fates = imported("megatron", tmp_path / "n.sh", text.replace("--global-batch-size 64", ""))
    assert all(fates[word].is_essential for word in fates if "skip" in word)


def test_iterations_that_megatron_skips_in_a_ramp_are_those_of_the_ramp(tmp_path: Path) -> None:
    text = f"python pretrain_gpt.py --micro-batch-size 4 {RAMPED} --iterations-to-skip 1 70 71 190"
    config, _ = imported("megatron", tmp_path / "run.sh", text)
    ramp, sample, skipped = megatron_rampup(16, 16, 3000, 64), 0, set[int]()
    for iteration in range(1, 201):
        if iteration in (1, 70, 71, 190):
            skipped |= set(range(sample, sample + ramp(sample)))
        sample += ramp(sample)
    assert {n for hole in holes_of(config) for n in range(*hole)} == skipped
    assert config.steps == 196


@pytest.mark.parametrize("form", ["flags", "yaml"])
def test_megatrons_global_batch_is_kept_on_any_number_of_devices(tmp_path: Path, form: str) -> None:
    words = {
        "micro-batch-size": 4,
        "global-batch-size": 64,
        "train-samples": 6400,
        "lr-warmup-samples": 640,
        "lr": 1e-4,
    }
    text = "\n".join(f"{word}: {value}" for word, value in words.items())
    if form == "flags":
        text = "python pretrain_gpt.py " + " ".join(
            f"--{word} {value}" for word, value in words.items()
        )
    config, _ = imported("megatron", tmp_path / ("m.sh" if form == "flags" else "m.yaml"), text)
    assert [BatchPlan.from_config(config, n).gradient_accumulation_steps for n in (1, 4, 16)] == [
        16,
        4,
        1,
    ]
    assert (config.train_samples, config.warmup_steps_fraction) == (6400, 0.1)


@pytest.mark.parametrize(
    ("name", "file", "text"),
    [
        ("hf", "a.json", json.dumps(HF)),
        ("deepspeed", "d.json", json.dumps(DEEPSPEED)),
        ("axolotl", "x.yml", AXOLOTL),
        ("megatron", "m.sh", MEGATRON),
        ("megatron", "n.yml", NEMO),
        ("maxtext", "t.yml", "base_config: base.yml\nper_device_batch_size: 2\nsa_block_q: 512\n"),
        (
            "maxtext",
            "t.sh",
            "python3 -m maxtext.train base.yml per_device_batch_size=2 base_output_directory=x\n",
        ),
    ],
)
def test_auto_recognises_the_format(tmp_path: Path, name: str, file: str, text: str) -> None:
    (tmp_path / file).write_text(text)
    assert recognised_format(tmp_path / file) == name


def test_megatrons_experts_keep_their_balance_over_layers(tmp_path: Path) -> None:
    text = (
        "python pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 "
        "--seq-length 128 --micro-batch-size 1 --global-batch-size 16 --train-iters 10 --lr 1e-3 "
        "--num-experts 8 --moe-router-topk 3 --moe-ffn-hidden-size 96 --moe-aux-loss-coeff 0.01 "
        "--moe-z-loss-coeff 0.001 --expert-model-parallel-size 2 --moe-router-load-balancing-type "
        "global_aux_loss --moe-grouped-gemm --moe-token-dispatcher-type alltoall "
        "--moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-2"
    )
    config, _ = imported("megatron", tmp_path / "run.sh", text)
    assert (config.decoder_block, config.num_experts, config.num_experts_per_tok) == (
        "mixtral",
        8,
        3,
    )
    assert (config.base_moe_mlp_dim, config.ici_expert_parallelism, config.global_batch_size) == (
        96,
        2,
        16,
    )
    assert (config.load_balance_loss_weight, config.load_balance_scope) == (0.04, "global")
    assert (config.router_z_loss_weight, config.routed_bias, config.routed_bias_update_rate) == (
        0.004,
        True,
        0.01,
    )
    assert (
        imported("megatron", tmp_path / "first.sh", f"{text} --moe-router-pre-softmax")[
            0
        ].decoder_block
        == "olmoe"
    )
