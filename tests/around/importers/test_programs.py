"""`maxbatch import` of Python files, LLaMA-Factory and torchtitan; trainers that are named and not
imported.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from maxbatch import BatchPlan
from maxbatch.cli import main
from maxbatch.commands.import_config import recognised_format, translated
from tests.helpers.imports import imported

PYTHON = """
import os
from trl import SFTConfig, SFTTrainer
RATE = 3e-4
open({ran!r}, "w").close()
def main(args):
    config = SFTConfig(
        per_device_train_batch_size=2, gradient_accumulation_steps=4, learning_rate=RATE, max_steps=100,
        output_dir="out", report_to=["wandb"], max_length=512, {more}
    )
    trainer = SFTTrainer(model="models/small", args=config, peft_config=LoraConfig(r=16, target_modules=["q_proj"]))
"""
FACTORY = """
model_name_or_path: models/small
trust_remote_code: true
stage: {stage}
finetuning_type: {method}
lora_rank: 4
lora_target: {target}
dataset: identity,alpaca_en_demo
template: qwen3_nothink
cutoff_len: 1024
output_dir: saves/run
plot_loss: true
overwrite_output_dir: true
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
bf16: true
"""
TITAN = """
[job]
dump_folder = "outputs"
[model]
name = "llama3"
flavor = "8B"
[optimizer]
lr = 3e-4
[lr_scheduler]
warmup_steps = 100
[training]
local_batch_size = 4
seq_len = 8192
steps = 1000
dataset = "c4"
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
"""


def python(tmp_path: Path, more: str = "") -> str:
    return PYTHON.format(ran=str(tmp_path / "ran"), more=more)


def factory(stage: str = "sft", method: str = "lora", target: str = "all", more: str = "") -> str:
    return FACTORY.format(stage=stage, method=method, target=target) + more


def test_arguments_of_a_python_file_are_read_and_the_file_never_runs(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(python(tmp_path))
    assert recognised_format(tmp_path / "t.py") == "hf"
    config, _ = imported("hf", tmp_path / "t.py", python(tmp_path))
    assert BatchPlan.from_config(config, 8).global_batch_size_to_train_on == 2 * 4 * 8
    assert (config.learning_rate, config.steps, config.max_target_length, config.use_sft) == (
        3e-4,
        100,
        512,
        True,
    )
    assert (config.lora_rank, config.lora_targets, config.dtype) == (16, "query", "bfloat16")
    assert not (tmp_path / "ran").exists()


def test_an_argument_that_is_no_literal_is_refused_by_name(tmp_path: Path) -> None:
    more = "weight_decay=args.decay, warmup_steps=args.warmup, run_name=f'{os.getcwd()}'"
    _, fates = imported("hf", tmp_path / "t.py", python(tmp_path, more))
    assert fates["weight_decay"].fate == fates["warmup_steps"].fate == "not supported"
    assert "args_decay" in fates["weight_decay"].says
    _, fates = imported("hf", tmp_path / "t.py", "TrainingArguments(max_steps=args.steps)")
    assert fates["max_steps"].is_essential


@pytest.mark.parametrize(("name", "algo"), [("DPOConfig", "dpo"), ("ORPOConfig", "orpo")])
def test_the_class_of_a_python_file_states_the_loss_of_pairs(
    tmp_path: Path, name: str, algo: str
) -> None:
    text = f"import trl\ntrl.{name}(per_device_train_batch_size=2, max_steps=10, beta=0.3)\n"
    config, _ = imported("hf", tmp_path / "t.py", text)
    assert (config.use_dpo, config.dpo_algo) == (True, algo)


def test_a_call_of_grpo_config_is_a_batch_of_prompts(tmp_path: Path) -> None:
    text = "GRPOConfig(per_device_train_batch_size=8, num_generations=4, max_steps=10)\n"
    (tmp_path / "g.py").write_text(text)
    translation, _ = translated("trl", tmp_path / "g.py", devices=4)
    assert (translation.settings["batch_size"], translation.settings["num_generations"]) == (
        "8",
        "4",
    )
    assert recognised_format(tmp_path / "g.py") == "trl"


def test_llama_factorys_own_words_are_mapped_or_need_you(tmp_path: Path) -> None:
    config, fates = imported("llamafactory", tmp_path / "f.yaml", factory())
    assert recognised_format(tmp_path / "f.yaml") == "llamafactory"
    assert (
        BatchPlan.from_config(config, 4, samples_per_epoch=640).global_batch_size_to_train_on
        == 2 * 8 * 4
    )
    assert (config.use_sft, config.max_target_length, config.packing, config.num_epochs) == (
        True,
        1024,
        False,
        3,
    )
    assert (config.lora_rank, config.lora_alpha, config.lora_targets) == (4, 8, "all")
    assert config.dataset_path == "identity.jsonl;alpaca_en_demo.jsonl"
    assert {fates[word].fate for word in ("dataset", "template")} == {"needs you"}
    assert {
        fates[word].fate for word in ("plot_loss", "trust_remote_code", "overwrite_output_dir")
    } == {"ignored"}
    assert not [fate for fate in fates.values() if fate.fate == "not supported"]


_CHATS = {"file_name": "c.json", "formatting": "sharegpt", "columns": {"messages": "turns"}}
_OPENAI = {
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
}
_PAIRS = {
    "file_name": "p.parquet",
    "ranking": True,
    "columns": {"prompt": "q", "chosen": "good", "rejected": "bad"},
}


@pytest.mark.parametrize(
    ("stage", "described", "expected"),
    [
        (
            "sft",
            {"file_name": "a.csv", "columns": {"prompt": "q", "response": "a"}},
            {
                "dataset_type": "csv",
                "sft_format": "alpaca",
                "record_fields": "{instruction: q, output: a}",
            },
        ),
        ("sft", _CHATS, {"dataset_type": "json", "record_fields": "{messages: turns}"}),
        ("sft", {**_CHATS, "tags": _OPENAI}, {"record_fields": "{messages: turns}"}),
        (
            "dpo",
            _PAIRS,
            {
                "dataset_type": "parquet",
                "record_fields": "{prompt: q, chosen: good, rejected: bad}",
            },
        ),
        ("pt", {"file_name": "t.jsonl", "columns": {"prompt": "body"}}, {"text_field": "body"}),
    ],
)
def test_llama_factorys_columns_are_record_fields(
    tmp_path: Path, stage: str, described: dict[str, Any], expected: dict[str, object]
) -> None:
    (tmp_path / "data").mkdir()
    info = {
        "identity": described,
        "alpaca_en_demo": {**described, "file_name": f"other-{described['file_name']}"},
    }
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(info))
    config, fates = imported("llamafactory", tmp_path / "f.yaml", factory(stage, "full"))
    assert {name: config[name] for name in expected} == expected
    name = described["file_name"]
    assert config.dataset_path == f"{tmp_path}/data/{name};{tmp_path}/data/other-{name}"
    assert fates["dataset"].fate == "mapped"


@pytest.mark.parametrize(
    "described",
    [
        {"file_name": "a.json"},  # an input, joined with one line break there
        {"file_name": "a.json", "columns": {"prompt": "q", "query": "i", "response": "a"}},
        {**_CHATS, "tags": {"role_tag": "who"}},
        {**_CHATS, "columns": {"messages": "turns", "tools": "t"}},
        {"hf_hub_url": "someone/data"},
        _PAIRS,
    ],
)
def test_llama_factorys_other_records_need_to_be_written_anew(
    tmp_path: Path, described: dict[str, Any]
) -> None:
    (tmp_path / "data").mkdir()
    info = {"identity": described, "alpaca_en_demo": described}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(info))
    _, fates = imported("llamafactory", tmp_path / "f.yaml", factory())
    assert fates["dataset"].fate == "needs you"


def test_llama_factorys_stages_and_methods(tmp_path: Path) -> None:
    config, _ = imported(
        "llamafactory", tmp_path / "f.yaml", factory("dpo", "full", more="pref_beta: 0.2\n")
    )
    assert (config.use_dpo, config.dpo_beta, config.lora_rank) == (True, 0.2, 0)
    config, _ = imported(
        "llamafactory", tmp_path / "f.yaml", factory("pt", "lora", "q_proj,v_proj")
    )
    assert (config.use_sft, config.packing, config.lora_targets) == (False, True, "query,value")
    _, fates = imported("llamafactory", tmp_path / "f.yaml", factory("dpo"))
    assert not [fate for fate in fates.values() if fate.fate == "not supported"]
    for text in (
        factory("ppo"),
        factory(method="freeze"),
        factory(target="c_attn"),
        factory(more="use_galore: true\n"),
    ):
        _, fates = imported("llamafactory", tmp_path / "f.yaml", text)
        assert any(fate.is_essential for fate in fates.values())


FACTORY_V1 = """
model: models/small
model_class: llm
kernel_config: {name: auto}
quant_config: null
dist_config:
  name: fsdp2
  dcp_path:
train_dataset: data/v1_sft_demo.yaml
output_dir: outputs/run
micro_batch_size: 2
cutoff_len: 1024
max_steps: 10
sample_backend: hf
"""


def test_llama_factorys_v1_schema_has_its_own_words_and_defaults(tmp_path: Path) -> None:
    config, fates = imported("llamafactory", tmp_path / "f.yaml", FACTORY_V1)
    assert recognised_format(tmp_path / "f.yaml") == "llamafactory"
    assert BatchPlan.from_config(config, 4).global_batch_size_to_train_on == 2 * 4
    assert (config.steps, config.max_target_length, config.packing) == (10, 1024, False)
    assert (config.learning_rate, config.adam_weight_decay) == (1e-4, 0.01)
    assert (config.learning_rate_schedule, config.warmup_steps_fraction) == ("constant", 0)
    assert (config.use_sft, config.tokenizer_path, config.lora_rank) == (True, "models/small", 0)
    needed = {word for word, fate in fates.items() if fate.fate == "needs you"}
    assert needed == {"train_dataset", "model", "bf16"}
    assert not [fate for fate in fates.values() if fate.fate == "not supported"]
    # unstated sections have no row, those without a value have one
    assert fates["quant_config"].fate == "ignored" and "peft_config" not in fates


def test_llama_factorys_v1_batch_is_of_replicas(tmp_path: Path) -> None:
    text = f"{FACTORY_V1}cp_size: 2\nglobal_batch_size: 32\n"
    config, _ = imported("llamafactory", tmp_path / "f.yaml", text)
    assert (config.ici_context_parallelism, config.per_device_batch_size) == (2, 1)
    assert BatchPlan.from_config(config, 8).gradient_accumulation_steps == 32 // (2 * 4)


def test_llama_factorys_v1_sections_are_adapters_optimizer_and_pairs(tmp_path: Path) -> None:
    adapters = "peft_config: {name: lora, r: 16, lora_alpha: 32, target_modules: [q_proj]}\n"
    muon = "optim_config: {name: muon, wd: 0.2, momentum: 0.9}\npref_beta: 0.3\n"
    config, fates = imported("llamafactory", tmp_path / "f.yaml", FACTORY_V1 + adapters + muon)
    assert (config.lora_rank, config.lora_alpha, config.lora_targets) == (16, 32, "query")
    assert fates["peft_config.lora_dropout"].value == "0.05 (default)"
    assert fates["peft_config.lora_dropout"].fate == "needs you"
    assert (config.opt_type, config.muon_beta, config.adam_weight_decay) == ("muon", 0.9, 0.2)
    assert (config.use_dpo, config.dpo_beta, config.dataset_path) == (True, 0.3, "pairs.jsonl")


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("batching_strategy: dynamic_batching", "batching_strategy"),
        ("peft_config: {name: freeze}", "peft_config.name"),
        ("peft_config: {name: lora, adapter_name_or_path: a}", "peft_config.adapter_name_or_path"),
        ("quant_config: {name: bnb}", "quant_config.name"),
        ("pref_loss: simpo", "pref_loss"),
        ("model_class: cls", "model_class"),
    ],
)
def test_what_llama_factorys_v1_schema_has_alone_is_refused(
    tmp_path: Path, line: str, word: str
) -> None:
    name = line.partition(":")[0]
    text = "".join(row + "\n" for row in FACTORY_V1.split("\n") if not row.startswith(name))
    _, fates = imported("llamafactory", tmp_path / "f.yaml", text + line)
    assert fates[word].is_essential


def test_a_split_of_llama_factorys_models_divides_its_rows(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"tensor_parallel": {"autotp_size": 2}}')
    for more in ("tensor_model_parallel_size: 2\n", "deepspeed: ds.json\n"):
        config, _ = imported("llamafactory", tmp_path / "f.yaml", factory(method="full", more=more))
        assert (
            BatchPlan.from_config(config, 4, samples_per_epoch=640).global_batch_size_to_train_on
            == 2 * 8 * 2
        )


def test_torchtitans_toml_is_its_batch(tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text(TITAN)
    assert recognised_format(tmp_path / "t.toml") == "torchtitan"
    config, fates = imported("torchtitan", tmp_path / "t.toml", TITAN)
    assert BatchPlan.from_config(config, 8).global_batch_size_to_train_on == 4 * 8 // 2
    assert (config.steps, config.warmup_steps_fraction, config.wsd_decay_steps_fraction) == (
        1000,
        0.1,
        0.9,
    )
    assert (config.model_name, config.learning_rate, config.adam_b2) == ("llama3-8b", 3e-4, 0.95)
    assert fates["training.dataset"].fate == "needs you"


def test_torchtitans_flags_take_precedence_over_their_file(tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text(TITAN)
    text = (
        "torchrun -m torchtitan.train --job.config_file t.toml --training.steps 50 "
        "--training.global_batch_size 64"
    )
    config, _ = imported("torchtitan", tmp_path / "t.sh", text)
    assert (config.steps, config.global_batch_size, config.per_device_batch_size) == (50, 64, 2)


def test_torchtitans_batch_in_tokens(tmp_path: Path) -> None:
    text = (
        "torchrun -m torchtitan.train --training.num_tokens_per_microbatch_per_dp_rank 16384 "
        "--training.max_context_length 2048 --parallelism.tensor_parallel_degree 2 "
        "--training.num_tokens_per_train_step"
    )
    config, _ = imported("torchtitan", tmp_path / "t.sh", f"{text} -1")
    assert BatchPlan.from_config(config, 8).global_batch_size_to_train_on == 8 * 4
    config, _ = imported("torchtitan", tmp_path / "t.sh", f"{text} 1048576")
    assert BatchPlan.from_config(config, 8).global_batch_size_to_train_on == 512


def test_deepspeeds_file_is_hjson(tmp_path: Path) -> None:
    text = (
        '{\n // the batch\n "train_batch_size": 64, # of all\n /* "x": 1, */ "wandb": {"team": '
        '"https://a//b",},\n}\n'
    )
    config, fates = imported("deepspeed", tmp_path / "d.json", text)
    assert config.global_batch_size == 64 and fates["wandb.team"].value == "https://a//b"


@pytest.mark.parametrize(
    ("name", "file", "text"),
    [
        ("hf", "t.py", f"TrainingArguments(max_steps=0x{'f' * 9000})"),
        (
            "hf",
            "t.py",
            f"TrainingArguments(max_steps={'+'.join(['x'] * 700)}, learning_rate=1e999)",
        ),
        ("torchtitan", "t.toml", f"[training]\nsteps = {'9' * 9000}"),
        ("torchtitan", "t.toml", f"{'.'.join(['a'] * 5000)} = 1"),
        (
            "megatron",
            "m.sh",
            "python pretrain_gpt.py --micro-batch-size 1.5 --train-iters 10 --seq-length 128",
        ),
    ],
)
def test_odd_numbers_and_depths_are_refused_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    file: str,
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / file).write_text(text)
    assert main(["import", name, file, "--skip-unsupported"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
