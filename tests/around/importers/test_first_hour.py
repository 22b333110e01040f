"""`maxbatch import`: "mapped" means that it works, and nothing that states what is trained is left
out.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from maxbatch import BatchPlan
from maxbatch.cli import main
from maxbatch.commands.import_config import translated
from maxbatch.system.errors import ConfigError
from tests.helpers.imports import imported

SYNTHETIC = "dataset_type: synthetic\nper_device_batch_size: 2\n"
RL = """
batch_size: {batch}
num_batches: 5
train_fraction: 0.5
num_epoch: 4
num_test_batches: 3
test_batch_start_index: 2
dataset_name: someone/sums
learning_rate_schedule_steps: -1
rl:
  num_generations: 3
  num_iterations: 2
  grpo_beta: 0.04
  epsilon_high: null
  off_policy_steps: 0
"""
CHAT = """
base_model: someone/Llama-3.2-1B-Instruct
datasets: [{path: chats.jsonl, type: chat_template}]
sequence_len: 512
micro_batch_size: 3
gradient_accumulation_steps: 2
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("nested", [True, False])
def test_the_words_below_rl_state_the_batch_and_the_length(folder: Path, nested: bool) -> None:
    text = RL.format(batch=4)
    if not nested:
        text = text.replace("rl:\n", "").replace("\n  ", "\n")
    config, fates = imported("maxtext", folder / "m.yml", text)
    plan = BatchPlan.from_config(config, 4)
    assert (plan.global_batch_size_to_train_on, plan.total_steps) == (4 * 3, 5 * 2 * 0.5 * 4)
    assert (config.num_generations, config.num_iterations, config.grpo_beta) == (3, 2, 0.04)
    assert config.off_policy_steps == 0
    assert config.eval_samples == 3 * 4 - 2 and config.learning_rate_final_fraction == 0
    assert config.loss_agg_mode == "sequence-mean-token-mean"  # its default
    assert not [
        fate
        for fate in fates.values()
        if fate.fate == "not supported" and fate.word != "test_batch_start_index"
    ]
    data, reward = fates["dataset_name"], fates["reward_functions_path"]
    assert data.fate == reward.fate == "needs you"
    assert "hf download --repo-type dataset someone/sums" in data.says


@pytest.mark.parametrize("weight", ["", "load_balance_loss_weight: 0.02\n"])
def test_a_preset_with_experts_is_trained_without_its_routers_loss(
    folder: Path, weight: str
) -> None:
    config, fates = imported(
        "maxtext", folder / "m.yml", f"model_name: qwen3-235b-a22b\n{weight}{RL.format(batch=4)}"
    )
    assert config.load_balance_loss_weight == 0 and config.num_experts == 128
    assert not weight or fates["load_balance_loss_weight"].fate == "ignored"


@pytest.mark.parametrize(("chunk", "pairs"), [("-1", 12), ("6", 6)])
def test_its_own_micro_batch_size_counts_pairs(folder: Path, chunk: str, pairs: int) -> None:
    config, _ = imported(
        "maxtext", folder / "m.yml", f"{RL.format(batch=4)}micro_batch_size: {chunk}\n"
    )
    assert BatchPlan.from_config(config, 1).micro_batch_size_to_train_on == pairs


def test_its_off_policy_steps_are_those_here(folder: Path) -> None:
    text = RL.format(batch=4).replace("off_policy_steps: 0", "off_policy_steps: 2")
    config, fates = imported("maxtext", folder / "m.yml", text)
    assert config.off_policy_steps == 2 and fates["rl.off_policy_steps"].fate == "mapped"


@pytest.mark.parametrize(
    ("lines", "sampling"),
    [
        ("rollout_data_parallelism: -1\nrollout_tensor_parallelism: 1", (8, 1)),
        ("rollout_tensor_parallelism: 4\nrollout_expert_parallelism: 1", (2, 4)),
        ("rollout_tensor_parallelism: 2\nrollout_expert_parallelism: 4", (1, 8)),
        ("rollout_data_parallelism: 2\nrollout_expert_parallelism: -1", (2, 4)),
    ],
)
def test_its_mesh_that_samples_is_that_here(
    folder: Path, lines: str, sampling: tuple[int, int]
) -> None:
    text = f"{RL.format(batch=8)}{lines}\n"
    config, fates = imported("maxtext", folder / "m.yml", text)
    batch = BatchPlan.from_config(config, 8).rl
    assert batch and (batch.rollout_data_parallelism, batch.rollout_tensor_parallelism) == sampling
    assert not [
        fate for word, fate in fates.items() if "rollout" in word and fate.fate == "not supported"
    ]


def test_what_the_block_of_rl_may_not_lack_is_refused(folder: Path) -> None:
    for line in ("use_agentic_rollout: true", "system_prompt: Think.", "unheard_of: 3"):
        text = RL.format(batch=4).replace("  off_policy_steps: 0", f"  {line}")
        _, fates = imported("maxtext", folder / "m.yml", text)
        fate = fates[f"rl.{line.partition(':')[0]}"]
        assert fate.fate == "not supported" and fate.is_essential, line


def test_names_on_the_hub_are_shown_with_the_step_they_need(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (
        "dataset_type: hf\nhf_path: someone/texts\nmodel_name: llama2-7b\nscan_layers: "
        "false\ntokenizer_type: huggingface\ntokenizer_path: someone/llama\nload_parameters_path: "
        "gs://b/run/0/items\n"
    )
    (folder / "m.yml").write_text(text)
    assert main(["import", "maxtext", "m.yml"]) == 0
    captured = capsys.readouterr()
    rows = {
        line.split()[2]: line for line in captured.out.splitlines() if line.startswith("needs you")
    }
    assert set(rows) == {"hf_path", "tokenizer_path"}
    assert "pip install huggingface_hub, or hf download someone/llama" in rows["tokenizer_path"]
    assert "--repo-type dataset someone/texts" in rows["hf_path"]
    assert "2 rows of the table need you before maxbatch train: a step" in captured.err
    assert main(["plan", "maxbatch.yml", "--devices", "4"]) == 0


def test_what_is_here_already_needs_no_step(folder: Path) -> None:
    (folder / "someone" / "llama").mkdir(parents=True)
    (folder / "someone" / "llama" / "tokenizer.json").write_text("{}")
    text = (
        "dataset_type: grain\ngrain_train_files: a*\ntokenizer_type: huggingface\ntokenizer_path: "
        "someone/llama\n"
    )
    _, fates = imported("maxtext", folder / "m.yml", text)
    assert fates["tokenizer_path"].fate == fates["grain_train_files"].fate == "mapped"


def test_lora_of_maxtext_is_ours(folder: Path) -> None:
    lora = (
        "lora: {{enable_lora: {}, lora_rank: 8, lora_alpha: 16.0, lora_module_path: "
        "'{}'}}\nload_parameters_path: a\n"
    )
    pattern = "decoder/layers/.*self_attention/(query|value)"
    config, fates = imported("maxtext", folder / "m.yml", SYNTHETIC + lora.format("true", pattern))
    assert (config.lora_rank, config.lora_alpha, config.lora_targets) == (8, 16, "query,value")
    assert fates["lora.lora_rank"].fate == "mapped"
    config, fates = imported("maxtext", folder / "n.yml", SYNTHETIC + lora.format("false", ""))
    assert config.lora_rank == 0 and fates["lora.lora_rank"].fate == "ignored"


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        (2, (2048, 32, 14336, 16)),
        (4, (4096, 32, 14336, 16)),
        (8, (4096, 32, 14336, 32)),
        (32, (8192, 64, 28672, 32)),
    ],
)
def test_a_scale_of_all_dimensions_is_worked_out(
    folder: Path, scale: int, expected: tuple[int, ...]
) -> None:
    """A factor of 2 goes to heads and MLP first, then to the width, then to the layers."""
    config, _ = imported(
        "maxtext", folder / "m.yml", f"{SYNTHETIC}global_parameter_scale: {scale}\n"
    )
    names = ("base_emb_dim", "base_num_query_heads", "base_mlp_dim", "base_num_decoder_layers")
    assert tuple(config[name] for name in names) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "ici_fsdp_transpose_parallelism: 4\nici_fsdp_parallelism: 2\n",
            {"ici_fsdp_parallelism": 8},
        ),
        (
            "ici_fsdp_transpose_parallelism: -1\nici_fsdp_parallelism: 1\n",
            {"ici_fsdp_parallelism": -1},
        ),
        ("ici_expert_parallelism: 4\nici_fsdp_parallelism: 2\n", {"ici_fsdp_parallelism": 8}),
        ("dcn_fsdp_parallelism: -1\n", {"dcn_fsdp_parallelism": -1, "dcn_data_parallelism": 1}),
        ("ici_tensor_sequence_parallelism: 2\n", {"ici_tensor_parallelism": 2}),
        ("cosine_learning_rate_final_fraction: 0.2\n", {"learning_rate_final_fraction": 0.2}),
        (
            "use_truncation: true\nuse_sft: true\ndataset_type: hf\nhf_path: "
            "a\ntrain_data_columns: [messages]\neval_data_columns: [messages]\n",
            {"overlong": "truncate", "use_sft": True},
        ),
    ],
)
def test_words_of_other_axes_and_retired_ones_are_mapped(
    folder: Path, text: str, expected: dict[str, object]
) -> None:
    start = "per_device_batch_size: 2\n" + (
        "" if "dataset_type" in text else "dataset_type: synthetic\n"
    )
    config, fates = imported("maxtext", folder / "m.yml", start + text)
    assert {name: config[name] for name in expected} == expected
    assert not [fate for fate in fates.values() if fate.fate == "not supported"]


def test_a_script_that_calls_another_gives_it_its_arguments(folder: Path) -> None:
    (folder / "base.sh").write_text(
        "P=${1:-${P:-4}}\nPOLICY=${2:-full}\n"
        'if [ -n "$3" ]; then\n  python3 -m maxtext.train base.yml dataset_type=synthetic '
        'per_device_batch_size="${P}" remat_policy=$POLICY compile_topology="${9}"\n'
        'else\n  python3 -m maxtext.train base.yml dataset_type=synthetic per_device_batch_size="${P}" '
        "remat_policy=$POLICY\nfi\n"
    )
    config, _ = imported("maxtext", folder / "run.sh", './configs/base.sh 6 "minimal"\n')
    assert (config.per_device_batch_size, config.remat_policy) == (6, "minimal")
    (folder / "loop.sh").write_text("./loop.sh 1\n")
    with pytest.raises(ConfigError, match="states nothing"):
        imported("maxtext", folder / "again.sh", "./loop.sh 1\n")


def test_a_config_that_has_moved_is_found_and_one_that_is_gone_is_refused(folder: Path) -> None:
    (folder / "configs" / "gpu" / "models").mkdir(parents=True)
    (folder / "configs" / "gpu" / "recipes").mkdir()
    (folder / "configs" / "gpu" / "models" / "mine.yml").write_text(
        f"{SYNTHETIC}gradient_accumulation_steps: 7\n"
    )
    recipe = folder / "configs" / "gpu" / "recipes" / "run.sh"
    config, _ = imported(
        "maxtext", recipe, "python3 -m maxtext.train configs/models/gpu/mine.yml steps=9\n"
    )
    assert (config.per_device_batch_size, config.gradient_accumulation_steps, config.steps) == (
        2,
        7,
        9,
    )
    with pytest.raises(ConfigError, match=r"gone\.yml: is not beside"):
        imported(
            "maxtext", recipe, "python3 -m maxtext.train configs/models/gpu/gone.yml steps=9\n"
        )


def test_a_models_file_is_found_beside_the_config_that_a_command_names(folder: Path) -> None:
    (folder / "there" / "models").mkdir(parents=True)
    (folder / "there" / "models" / "mine-1b.yml").write_text(
        "base_emb_dim: 512\ndecoder_block: llama2\n"
    )
    words = "dataset_type=synthetic model_name=mine-1b load_parameters_path=gs://b/0/items"
    command = f"python3 -m maxtext.train {folder}/there/base.yml {words}\n"
    (folder / "here").mkdir()
    config, fates = imported("maxtext", folder / "here" / "run.sh", command)
    assert config.base_emb_dim == 512 and fates["model_name"].fate == "ignored"
    assert config.load_parameters_path == "gs://b/0/items"


@pytest.mark.parametrize("key", ["load_parameters_path", "load_full_state_path"])
def test_a_checkpoint_of_maxtext_is_taken_as_it_is(folder: Path, key: str) -> None:
    config, fates = imported(
        "maxtext", folder / "m.yml", f"{SYNTHETIC}{key}: gs://b/run/checkpoints/4/items\n"
    )
    assert config[key] == "gs://b/run/checkpoints/4/items" and fates[key].fate == "mapped"


def test_a_checkpoint_whose_interleaving_no_key_states_is_refused(folder: Path) -> None:
    text = (
        f"{SYNTHETIC}rope_type: llama3.1\nrope_use_scale: false\nload_parameters_path: "
        "gs://b/run/0/items\n"
    )
    _, fates = imported("maxtext", folder / "m.yml", text)
    assert fates["load_parameters_path"].fate == "not supported"


@pytest.mark.parametrize(("trains_on_inputs", "only_answers"), [("false", True), ("true", False)])
def test_axolotls_chats_are_use_sft(
    folder: Path, trains_on_inputs: str, only_answers: bool
) -> None:
    text = (
        f"{CHAT}train_on_inputs: {trains_on_inputs}\nsample_packing: true\neval_sample_packing: "
        "false\n"
    )
    config, fates = imported(
        "axolotl",
        folder / "c.yml",
        f"{text}adapter: lora\nlora_r: 16\nlora_alpha: 32\n"
        "lora_target_modules: [q_proj, v_proj]\nchat_template: tokenizer_default\n",
    )
    assert config.use_sft and config.packing and config.sft_train_on_completion_only == only_answers
    assert (config.dataset_path, config.dataset_type) == ("chats.jsonl", "jsonl")
    assert (config.lora_rank, config.lora_alpha, config.lora_targets) == (16, 32, "query,value")
    assert (config.model_name, config.tokenizer_path) == (
        "llama3.2-1b",
        "someone/Llama-3.2-1B-Instruct",
    )
    assert BatchPlan.from_config(config, 3).global_batch_size_to_train_on == 18
    assert fates["base_model"].fate == "needs you" and fates["datasets"].fate == "mapped"
    assert not [fate for fate in fates.values() if fate.fate == "not supported"]


@pytest.mark.parametrize(
    "text",
    ["datasets: [{path: [a], type: chat_template}]\n", "warmup_ratio: 1e308\nmax_steps: 9\n"],
)
def test_a_value_of_another_kind_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (folder / "a.yml").write_text(f"micro_batch_size: 2\n{text}")
    assert main(["import", "axolotl", "a.yml"]) in (0, 2)
    assert "Traceback" not in capsys.readouterr().err


def test_axolotls_sharegpt_is_ours(folder: Path) -> None:
    form = (
        "chat_template, field_messages: conversations, message_property_mappings: {role: from, "
        "content: value}}"
    )
    config, fates = imported("axolotl", folder / "c.yml", CHAT.replace("chat_template}", form))
    assert (config.use_sft, config.sft_format) == (True, "sharegpt")
    assert fates["datasets"].fate == "mapped"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("type: chat_template, field_messages: turns", {"record_fields": "{messages: turns}"}),
        (
            "type: chat_template, field_messages: turns, message_property_mappings: {role: from, "
            "content: value}",
            {"record_fields": "{messages: turns}"},
        ),
        ("type: completion, field: body", {"text_field": "body", "use_sft": False}),
        (
            "type: {field_instruction: q, field_output: a, format: '{instruction}', "
            "no_input_format: '{instruction}'}",
            {
                "record_fields": "{prompt: q, completion: a}",
                "sft_format": "completion",
                "use_sft": True,
            },
        ),
    ],
)
def test_axolotls_names_of_fields_are_record_fields(
    folder: Path, source: str, expected: dict[str, object]
) -> None:
    text = CHAT.replace("type: chat_template", source)
    config, fates = imported("axolotl", folder / "c.yml", text)
    assert {name: config[name] for name in expected} == expected
    assert fates["datasets"].fate == "mapped"


@pytest.mark.parametrize(
    ("source", "fate", "said"),
    [
        ("type: {field_instruction: q, field_output: a}", "needs you", "into the field q"),
        ("type: {field_instruction: q, system_prompt: Be kind.}", "not supported", "system_prompt"),
        (
            "type: chat_template, message_property_mappings: {role: who, content: said}",
            "not supported",
            "mappings",
        ),
        (
            "type: chat_template, field_messages: a}, {path: b.jsonl, type: chat_template",
            "not supported",
            "field_mess",
        ),
        (
            "type: completion, field: a}, {path: b.jsonl, type: completion, field: b",
            "not supported",
            "one field",
        ),
    ],
)
def test_axolotls_fields_without_a_counterpart_are_named(
    folder: Path, source: str, fate: str, said: str
) -> None:
    (folder / "c.yml").write_text(CHAT.replace("type: chat_template", source))
    translation, _ = translated("axolotl", folder / "c.yml")
    (found,) = [one for one in translation.fates if one.word == "datasets"]
    assert found.fate == fate and said in found.says


def test_axolotls_exact_deduplication_is_ours(folder: Path) -> None:
    config, fates = imported(
        "axolotl", folder / "c.yml", f"{CHAT}dataset_exact_deduplication: true\n"
    )
    assert config.deduplicate and fates["dataset_exact_deduplication"].fate == "mapped"


def test_axolotl_packs_only_when_it_is_told_to(folder: Path) -> None:
    config, _ = imported("axolotl", folder / "c.yml", CHAT)
    assert not config.packing


def test_a_warmup_ratio_is_whole_steps_as_there(folder: Path) -> None:
    text = "per_device_train_batch_size: 4\nmax_steps: 99\nwarmup_ratio: 0.1\n"
    config, _ = imported("hf", folder / "h.yml", text)
    assert config.warmup_steps_fraction * 99 == pytest.approx(10)
    config, _ = imported("axolotl", folder / "a.yml", f"{CHAT}max_steps: 99\nwarmup_ratio: 0.1\n")
    assert config.warmup_steps_fraction * 99 == pytest.approx(9)


def test_the_mean_of_the_devices_means_is_not_ignored(folder: Path) -> None:
    text = "per_device_train_batch_size: 4\naverage_tokens_across_devices: {}\n"
    fates = {
        value: imported("hf", folder / "h.yml", text.format(value))[1]
        for value in ("true", "false")
    }
    assert [fates[value]["average_tokens_across_devices"].fate for value in fates] == [
        "ignored",
        "not supported",
    ]


def test_a_mean_of_the_passes_means_is_said(folder: Path) -> None:
    text = f"{SYNTHETIC}gradient_accumulation_steps: 4\nuse_tunix_gradient_accumulation: true\n"
    _, fates = imported("maxtext", folder / "m.yml", text)
    assert "mean of the passes' means" in fates["gradient_accumulation_steps"].says


def test_tiktokens_tokenizer_needs_the_same_models_tokenizer_json(folder: Path) -> None:
    text = (
        "dataset_type: grain\ngrain_train_files: a*\ntokenizer_type: tiktoken\ntokenizer_path: "
        "assets/t.llama3\n"
    )
    config, fates = imported("maxtext", folder / "m.yml", f"{text}model_name: llama3-8b\n")
    assert (config.tokenizer_type, config.tokenizer_path) == ("huggingface", "tokenizers/llama3-8b")
    assert fates["tokenizer_path"].fate == "needs you"


def test_a_schedule_of_another_length_is_taken(folder: Path) -> None:
    config, _ = imported(
        "maxtext", folder / "m.yml", f"{SYNTHETIC}steps: 10\nlearning_rate_schedule_steps: 20\n"
    )
    assert (config.learning_rate_schedule_steps, config.learning_rate_schedule_by) == (
        20,
        "updates",
    )


def test_words_of_lora_without_its_switch_are_not_adapters(folder: Path) -> None:
    _, fates = imported("axolotl", folder / "a.yml", f"{CHAT}lora_r: 8\nlora_model_dir:\n")
    assert fates["lora_r"].fate == fates["lora_model_dir"].fate == "ignored"
    _, fates = imported("hf", folder / "h.yml", "per_device_train_batch_size: 4\nlora_r: 8\n")
    assert fates["lora_r"].fate == "not supported" and fates["lora_r"].is_essential
    config, fates = imported(
        "hf", folder / "p.yml", "use_peft: true\nmodel_name_or_path: someone/model\n"
    )
    assert (config.lora_rank, config.lora_alpha, config.lora_targets) == (16, 32, "query,value")
    assert fates["lora_dropout"].fate == "not supported" and not fates["lora_dropout"].is_essential


def test_an_empty_word_in_a_script_is_no_program(folder: Path) -> None:
    text = (
        "tool '' x train.py\npython3 -m maxtext.train base.yml dataset_type=synthetic "
        "per_device_batch_size=3\n"
    )
    config, _ = imported("maxtext", folder / "run.sh", text)
    assert config.per_device_batch_size == 3


@pytest.mark.parametrize(
    ("name", "text", "word"),
    [
        ("hf", "per_device_train_batch_size: 4\ntokenizer_name: someone/tok\n", "tokenizer_name"),
        (
            "hf",
            "per_device_train_batch_size: 4\nmodel_name_or_path: someone/model\n",
            "model_name_or_path",
        ),
        ("axolotl", f"{CHAT}tokenizer_config: someone/tok\n", "tokenizer_config"),
        (
            "megatron",
            "micro_batch_size: 4\ntokenizer_type: HuggingFaceTokenizer\ntokenizer_model: "
            "someone/tok\n",
            "tokenizer_model",
        ),
    ],
)
def test_no_format_shows_a_name_on_the_hub_or_other_files_as_mapped(
    folder: Path, name: str, text: str, word: str
) -> None:
    _, fates = imported(name, folder / "c.yml", text)
    assert fates[word].fate == "needs you"


def test_a_checkpoint_of_megatrons_is_resumed_or_refused(folder: Path) -> None:
    text = "micro_batch_size: 4\nglobal_batch_size: 8\nload: a\nsave: {}\n"
    fates = [
        imported("megatron", folder / "c.yml", text.format(place))[1]["load"]
        for place in ("a", "b")
    ]
    assert [(fate.fate, fate.is_essential) for fate in fates] == [
        ("ignored", False),
        ("not supported", True),
    ]
