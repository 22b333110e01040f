"""`maxbatch import maxtext`: its documentation's batch, its defaults, its chains, its recipes."""

from __future__ import annotations

import random
from fractions import Fraction
from pathlib import Path

import pytest

from maxbatch import BatchPlan, RampupBatchManager
from maxbatch.config.sections import REMAT_TENSORS
from maxbatch.config.values import exact
from tests.helpers.imports import imported

SYNTHETIC = "base_config: base.yml\ndataset_type: synthetic\n"


@pytest.mark.parametrize("seed", range(200))
def test_random_batch_keys_give_what_its_documentation_promises(tmp_path: Path, seed: int) -> None:
    """Its page on batch size: `global_batch_to_train`, `global_batch_to_load`, `num_increments` and
    their like.
    """
    draw = random.Random(seed)
    hosts = draw.choice([1, 2, 4])
    devices = hosts * draw.choice([1, 2, 4])
    g, steps = draw.choice([1, 1, 2, 3, 8]), draw.randint(50, 3000)
    start, rise, n = draw.randint(1, 8), draw.randint(1, 4), draw.randint(1, 5)
    samples = draw.randint(1, 20_000)
    e = draw.choice([e for e in (-1, 1, 2, 4) if hosts % max(e, 1) == 0])
    p = start + rise * n
    is_ramp = draw.random() < 0.5
    text = (
        f"{SYNTHETIC}per_device_batch_size: {p}.0\ngradient_accumulation_steps: {g}\nsteps: "
        f"{steps}\n"
    )
    text += f"expansion_factor_real_data: {e}.0\nenable_rampup_batch_size: {is_ramp}\n"
    text += f"per_device_batch_size_start: {start}.0\nper_device_batch_size_increment: {rise}.0\n"
    text += f"global_rampup_samples: {samples}\n"
    config, fates = imported("maxtext", tmp_path / "m.yml", text)
    plan = BatchPlan.from_config(config, devices, hosts)
    assert plan.global_batch_size_to_train_on == p * devices * g
    assert plan.global_batch_size_to_load == p * devices * g * max(e, 1)
    assert plan.total_steps == steps
    assert plan.num_increments == (n if is_ramp else None)
    if not is_ramp:
        return
    apart = Fraction(samples, n)
    assert plan.samples_per_increment is not None and exact(plan.samples_per_increment) == apart
    manager = RampupBatchManager.from_config(config, devices)
    for seen in (0, samples // 3, samples // 2, samples - 1, samples, 2 * samples):
        stage = min(n, seen * n // samples)
        assert manager.batch_size_at(seen) == (start + stage * rise) * devices * g
    assert ("leaves out" in fates["enable_rampup_batch_size"].says) == (g > 1)


def test_what_is_not_stated_is_maxtexts_default(tmp_path: Path) -> None:
    config, fates = imported("maxtext", tmp_path / "m.yml", SYNTHETIC)
    assert (config.per_device_batch_size, config.steps, config.max_target_length) == (
        12,
        150_001,
        2048,
    )
    assert (config.learning_rate, config.base_emb_dim, config.vocab_size) == (3e-5, 2048, 32_000)
    assert fates["per_device_batch_size"].value == "12.0 (default)"


def test_a_chain_of_bases_and_a_models_file_are_read(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine.yml").write_text(
        "base_emb_dim: 64\nmlp_activations: ['silu', 'linear']\n"
    )
    (tmp_path / "middle.yml").write_text(
        "base_config: base.yml\nsteps: 7\nper_device_batch_size: 3\n"
    )
    text = "base_config: middle.yml\nmodel_name: mine\nsteps: 9\ndataset_type: synthetic\n"
    config, fates = imported("maxtext", tmp_path / "m.yml", text)
    assert (config.steps, config.per_device_batch_size, config.base_emb_dim) == (9, 3, 64)
    assert fates["mlp_activations"].fate == "ignored"


def test_a_preset_of_ours_takes_its_models_dimensions(tmp_path: Path) -> None:
    config, _ = imported("maxtext", tmp_path / "m.yml", f"{SYNTHETIC}model_name: llama3-8b\n")
    assert (config.model_name, config.base_emb_dim, config.max_target_length) == (
        "llama3-8b",
        4096,
        2048,
    )


GEMMA2 = """model_name: default
decoder_block: gemma2
base_num_decoder_layers: 3
mlp_activations: ['gelu', 'linear']
final_logits_soft_cap: 30.0
attn_logits_soft_cap: 50.0
sliding_window_size: 4096
use_post_attn_norm: true
use_post_ffw_norm: true
"""


def test_a_block_of_gemma_becomes_ours_with_its_windows(tmp_path: Path) -> None:
    config, fates = imported("maxtext", tmp_path / "m.yml", SYNTHETIC + GEMMA2)
    assert (config.decoder_block, config.mlp_activations, config.base_num_decoder_layers) == (
        "gemma2",
        "gelu,linear",
        6,
    )
    assert (config.attention_type, config.sliding_window_size) == ("local_sliding,global", 4096)
    assert (config.attn_logits_soft_cap, config.final_logits_soft_cap) == (50, 30)
    assert fates["use_post_attn_norm"].fate == "ignored"
    _, fates = imported(
        "maxtext", tmp_path / "n.yml", SYNTHETIC + GEMMA2.replace("layers: 3", "layers: many")
    )
    assert fates["base_num_decoder_layers"].fate == "not supported"


def test_the_blocks_of_gemma_gpt3_and_olmo3_become_ours(tmp_path: Path) -> None:
    gpt3 = (
        "decoder_block: gpt3\nmlp_activations: ['gelu']\ntrainable_position_size: "
        "2048\nfused_qkv: true\n"
    )
    config, _ = imported("maxtext", tmp_path / "gpt3.yml", SYNTHETIC + gpt3)
    assert (config.decoder_block, config.attention_bias, config.mlp_activations) == (
        "gpt2",
        True,
        "gelu",
    )
    gemma = (
        "decoder_block: gemma\nmlp_activations: ['gelu', 'linear']\nlogits_via_embedding: true\n"
    )
    config, _ = imported("maxtext", tmp_path / "gemma.yml", SYNTHETIC + gemma)
    assert (config.decoder_block, config.attention_type) == ("gemma", "global")
    _, fates = imported(
        "maxtext", tmp_path / "other.yml", f"{SYNTHETIC}{gemma}normalize_embedding_logits: false\n"
    )
    assert fates["normalize_embedding_logits"].fate == "not supported"
    olmo3 = (
        "decoder_block: olmo3\nuse_qk_norm: true\nsliding_window_size: 64\nrope_max_timescale: "
        "500000\n"
    )
    config, _ = imported("maxtext", tmp_path / "olmo3.yml", SYNTHETIC + olmo3)
    assert config.attention_type == "local_sliding,local_sliding,local_sliding,global"
    _, fates = imported("maxtext", tmp_path / "yarn.yml", f"{SYNTHETIC}{olmo3}rope_type: yarn\n")
    assert "local_rope_max_timescale=500000" in fates["decoder_block"].says
    _, fates = imported(
        "maxtext",
        tmp_path / "six.yml",
        f"{SYNTHETIC}{olmo3}inhomogeneous_layer_cycle_interval: 6\n",
    )
    assert fates["inhomogeneous_layer_cycle_interval"].fate == "not supported"


def test_a_named_data_set_without_a_type_is_tfds_and_is_noted(tmp_path: Path) -> None:
    config, fates = imported(
        "maxtext", tmp_path / "m.yml", "dataset_path: gs://b\ndataset_name: c4/en:3.0.4\n"
    )
    assert (config.dataset_type, config.dataset_path) == (
        "tfrecord",
        "gs://b/c4/en/3.0.4/*-train.tfrecord*",
    )
    assert "0.2.5" in fates["dataset_type"].says


def test_a_layers_form_that_is_not_ours_is_not_supported(tmp_path: Path) -> None:
    text = f"{SYNTHETIC}decoder_block: deepseek4\nmlp_activations: ['relu']\nrope_type: ntk\n"
    _, fates = imported("maxtext", tmp_path / "m.yml", text)
    assert {fates[word].fate for word in ("decoder_block", "mlp_activations", "rope_type")} == {
        "not supported"
    }


def test_a_value_that_a_rule_of_ours_refuses_is_not_supported_and_is_left_out(
    tmp_path: Path,
) -> None:
    config, fates = imported(
        "maxtext", tmp_path / "m.yml", f"{SYNTHETIC}attention_type: mla\nsteps: 7\n"
    )
    assert (fates["attention_type"].fate, fates["steps"].fate) == ("not supported", "mapped")
    assert (config.attention_type, config.steps) == ("global", 7)


def test_qwens_and_llamas_forms_are_mapped(tmp_path: Path) -> None:
    text = "decoder_block: qwen3\nuse_qk_norm: true\nattention_bias: true\n"
    config, _ = imported("maxtext", tmp_path / "m.yml", SYNTHETIC + text)
    assert (config.decoder_block, config.use_qk_norm, config.attention_bias) == (
        "qwen3",
        True,
        True,
    )
    config, _ = imported(
        "maxtext", tmp_path / "n.yml", f"{SYNTHETIC}rope_type: llama3.1\nrope_factor: 40\n"
    )
    assert (config.rope_type, config.rope_factor, config.original_max_position_embeddings) == (
        "llama3.1",
        8,
        8192,
    )


def test_the_logits_of_tied_embeddings_that_are_divided_there_are_said(tmp_path: Path) -> None:
    tied = SYNTHETIC + "logits_via_embedding: true\n"
    config, fates = imported("maxtext", tmp_path / "m.yml", tied)
    assert (
        config.logits_via_embedding and "sqrt(base_emb_dim)" in fates["logits_via_embedding"].says
    )
    for stated, fate in (("true", "not supported"), ("false", "ignored")):
        _, fates = imported(
            "maxtext", tmp_path / f"{stated}.yml", f"{tied}normalize_embedding_logits: {stated}\n"
        )
        assert fates["normalize_embedding_logits"].fate == fate
    untied = f"{SYNTHETIC}logits_via_embedding: false\nnormalize_embedding_logits: true\n"
    _, fates = imported("maxtext", tmp_path / "untied.yml", untied)
    assert fates["normalize_embedding_logits"].fate == "ignored"


def test_a_preset_that_is_another_model_there_has_the_keys_of_there(tmp_path: Path) -> None:
    config, _ = imported("maxtext", tmp_path / "m.yml", f"{SYNTHETIC}model_name: mistral-7b\n")
    assert (config.attention_type, config.rope_max_timescale, config.base_mlp_dim) == (
        "global",
        1e6,
        14336,
    )


RECIPE = r"""#!/bin/bash
# python3 train.py base.yml steps=1
export DATASET_TYPE="synthetic"
export STEPS=30
for ARGUMENT in "$@"; do export "$ARGUMENT"; done
bash preflight.sh
export LIBTPU_INIT_ARGS="--xla_tpu_a=true --xla_tpu_b=true"
python3 -m maxtext.trainers.pre_train.train "${ROOT:-$PWD}/configs"/base.yml model_name=llama2-7b\
  base_output_directory=$OUTPUT_PATH per_device_batch_size=4\
  steps=$STEPS max_target_length=4096 attention='flash' sa_block_q=1024 dataset_type=${DATASET_TYPE}
"""


def test_a_shell_recipe_is_read_with_its_variables(tmp_path: Path) -> None:
    config, fates = imported("maxtext", tmp_path / "recipe.sh", RECIPE)
    assert (config.per_device_batch_size, config.steps, config.max_target_length) == (4, 30, 4096)
    assert (config.dataset_type, config.model_name) == ("synthetic", "llama2-7b")
    assert fates["base_output_directory"].fate == "ignored" and "xla_tpu_a" not in fates


def test_lines_of_key_value_are_read(tmp_path: Path) -> None:
    text = "per_device_batch_size=4\nsteps=30\ndataset_type=synthetic\n"
    config, _ = imported("maxtext", tmp_path / "lines.txt", text)
    assert (config.per_device_batch_size, config.steps) == (4, 30)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "dataset_type: tfds\ndataset_path: data\ndataset_name: 'c4/en:3.0.1'\n",
            ("tfrecord", "data/c4/en/3.0.1/*-train.tfrecord*"),
        ),
        (
            "dataset_type: grain\ngrain_file_type: tfrecord\ngrain_train_files: a/*.tfrecord\n",
            ("tfrecord", "a/*.tfrecord"),
        ),
        (
            "dataset_type: hf\nhf_path: parquet\nhf_train_files: d/*.parquet\n",
            ("parquet", "d/*.parquet"),
        ),
        (
            "dataset_type: grain\ngrain_train_files: a/*,0.3;b/*,0.7\n",
            ("arrayrecord", "a/*,0.3;b/*,0.7"),
        ),
    ],
)
def test_its_data_become_ours(tmp_path: Path, text: str, expected: tuple[str, str]) -> None:
    config, _ = imported("maxtext", tmp_path / "m.yml", text)
    assert (config.dataset_type, config.dataset_path) == expected


@pytest.mark.parametrize(
    "text",
    [
        "dataset_type: c4_mlperf\n",
        "dataset_type: olmo_grain\nolmo_index_path: index.json\n",
        "grain_train_mixture_config_path: m.json\ndataset_type: grain\n",
        "train_data_columns: ['chosen', 'rejected']\ndataset_type: tfds\n",
        "per_device_batch_size: $BATCH\n",
    ],
)
def test_a_word_of_the_batch_or_the_data_is_never_dropped(tmp_path: Path, text: str) -> None:
    _, fates = imported("maxtext", tmp_path / "m.yml", text)
    assert any(fate.fate == "not supported" and fate.is_essential for fate in fates.values())


def test_a_word_that_the_table_does_not_know_is_never_ignored(tmp_path: Path) -> None:
    _, fates = imported(
        "maxtext",
        tmp_path / "m.yml",
        f"{SYNTHETIC}a_new_word: 0\nnum_experts: 8\nmtp_num_layers: 0\n",
    )
    assert fates["a_new_word"].fate == fates["num_experts"].fate == "not supported"
    assert fates["mtp_num_layers"].fate == "ignored"  # 0 has no effect


MIXTRAL = """decoder_block: mixtral
num_experts: 8
num_experts_per_tok: 2
base_moe_mlp_dim: 14336
load_balance_loss_weight: 0.01
ici_expert_parallelism: 4
megablox: true
sparse_matmul: true
"""


def test_experts_are_those_of_maxtext_and_its_balance_loss_is_theirs(tmp_path: Path) -> None:
    config, fates = imported("maxtext", tmp_path / "m.yml", f"{SYNTHETIC}{MIXTRAL}")
    assert config.norm_topk_prob and config.load_balance_loss_weight == 0.01
    assert (config.num_experts, config.ici_expert_parallelism) == (8, 4)
    assert fates["megablox"].fate == fates["sparse_matmul"].fate == "ignored"
    preset, _ = imported("maxtext", tmp_path / "p.yml", f"{SYNTHETIC}model_name: mixtral-8x22b\n")
    assert (preset.load_balance_loss_weight, preset.vocab_size) == (0, 32768)


DEEPSEEK = """decoder_block: deepseek
attention_type: mla
base_num_decoder_layers: 6
first_num_dense_layers: 1
num_experts: 16
num_experts_per_tok: 2
shared_experts: 1
routed_scaling_factor: 2.5
routed_score_func: sigmoid
routed_bias: true
q_lora_rank: 384
kv_lora_rank: 128
qk_nope_head_dim: 32
qk_rope_head_dim: 16
v_head_dim: 128
mscale: 0.7
rope_type: yarn
rope_interleave: true
rope_attention_scaling: false
max_position_embeddings: 163840
"""


def test_deepseeks_form_is_that_of_maxtext(tmp_path: Path) -> None:
    config, fates = imported("maxtext", tmp_path / "m.yml", f"{SYNTHETIC}{DEEPSEEK}")
    assert not [name for name, fate in fates.items() if fate.fate == "not supported"]
    assert (config.decoder_block, config.routed_score_func, config.norm_topk_prob) == (
        "deepseek",
        "sigmoid",
        True,
    )
    assert (config.first_num_dense_layers, config.shared_experts, config.q_lora_rank) == (1, 1, 384)
    assert (config.rope_type, config.rope_factor, config.rope_attention_factor, config.mscale) == (
        "yarn",
        40,
        1,
        0.7,
    )
    short, _ = imported(
        "maxtext", tmp_path / "s.yml", f"{SYNTHETIC}{DEEPSEEK}".replace("163840", "4096")
    )
    assert short.mscale == 0  # scores do not grow
    preset, _ = imported("maxtext", tmp_path / "p.yml", f"{SYNTHETIC}model_name: deepseek3-671b\n")
    assert (preset.n_routing_groups, preset.load_balance_loss_weight, preset.num_experts) == (
        -1,
        0,
        256,
    )
    plain = f"{SYNTHETIC}{DEEPSEEK}".replace("attention_type: mla\n", "")
    _, fates = imported("maxtext", tmp_path / "g.yml", plain)
    assert fates["attention_type"].is_essential and "mla" in fates["attention_type"].says
    for word, line in (
        ("rope_type", "rope_type: yarn\n"),
        ("routed_score_func", "routed_score_func: sigmoid\n"),
    ):
        _, fates = imported(
            "maxtext", tmp_path / f"{word}.yml", f"{SYNTHETIC}{DEEPSEEK}".replace(line, "")
        )
        assert fates[word].is_essential, "MaxText's default is another model"


@pytest.mark.parametrize(
    ("block", "nearest"), [("envy", "llama4"), ("qwen3_custom_moe", "qwen3_moe")]
)
def test_a_block_of_maxtext_alone_is_refused_with_the_nearest_that_works(
    tmp_path: Path, block: str, nearest: str
) -> None:
    stated = f"{SYNTHETIC}decoder_block: {block}\nnum_experts: 8\n"
    _, fates = imported("maxtext", tmp_path / "m.yml", stated)
    said = f"no family {block}, which maxbatch==0.5.0 still has; nearest: {nearest}"
    assert fates["decoder_block"].is_essential and said in fates["decoder_block"].says


LLAMA4 = """decoder_block: llama4
base_num_decoder_layers: 4
num_experts: 8
shared_experts: 1
use_qk_norm: true
rope_type: llama3.1
rope_use_scale: false
nope_layer_interval: 4
interleave_moe_layer_step: 2
inhomogeneous_layer_cycle_interval: 4
temperature_tuning: true
chunk_attn_window_size: 8192
"""


def test_layers_without_rope_and_chunks_are_those_of_maxtext(tmp_path: Path) -> None:
    config, fates = imported("maxtext", tmp_path / "m.yml", f"{SYNTHETIC}{LLAMA4}")
    assert not [name for name, fate in fates.items() if fate.fate == "not supported"]
    assert (config.decoder_block, config.nope_layer_interval, config.chunk_attn_window_size) == (
        "llama4",
        4,
        8192,
    )
    assert (config.routed_score_func, config.temperature_tuning, config.rope_type) == (
        "sigmoid",
        True,
        "default",
    )
    other = LLAMA4.replace("interval: 4\ntemp", "interval: 2\ntemp")
    _, fates = imported("maxtext", tmp_path / "o.yml", f"{SYNTHETIC}{other}")
    assert fates["inhomogeneous_layer_cycle_interval"].is_essential


GEMMA4 = """decoder_block: gemma4
base_num_decoder_layers: 6
base_num_query_heads: 16
base_num_kv_heads: 8
head_dim: 256
global_head_dim: 512
global_num_kv_heads: 2
mlp_activations: ["gelu","linear"]
logits_via_embedding: true
sliding_window_size: 1024
use_post_attn_norm: true
use_post_ffw_norm: true
share_kv_projections: true
v_norm_with_scale: false
local_rope_max_timescale: 10000
global_rope_max_timescale: 1000000
rope_max_timescale: 500
"""
GEMMA4_EXPERTS = "num_experts: 8\nnum_experts_per_tok: 2\nnorm_topk_prob: true\nshared_experts: 1\n"


def test_gemma4_is_that_of_maxtext(tmp_path: Path) -> None:
    config, fates = imported("maxtext", tmp_path / "d.yml", f"{SYNTHETIC}{GEMMA4}")
    assert not [name for name, fate in fates.items() if fate.fate == "not supported"]
    assert (config.head_dim, config.global_num_kv_heads) == (256, 2)
    assert (config.rope_max_timescale, config.local_rope_max_timescale) == (1_000_000, 10_000)
    assert (config.use_qk_norm, config.query_pre_attn_scalar, config.partial_rotary_factor) == (
        True,
        1,
        0.25,
    )
    assert config.attention_type.split(",") == ["local_sliding"] * 5 + ["global"]
    config, fates = imported("maxtext", tmp_path / "e.yml", f"{SYNTHETIC}{GEMMA4}{GEMMA4_EXPERTS}")
    assert not [name for name, fate in fates.items() if fate.fate == "not supported"]
    assert (config.num_experts, config.norm_topk_prob, config.shared_experts) == (8, True, 0)
    scaled = GEMMA4.replace("v_norm_with_scale: false\n", "")
    assert imported("maxtext", tmp_path / "v.yml", f"{SYNTHETIC}{scaled}")[1][
        "v_norm_with_scale"
    ].is_essential
    shares = "global_rope_proportion: 0.5\nlocal_rope_proportion: 0.5\n"
    config, fates = imported("maxtext", tmp_path / "s.yml", f"{SYNTHETIC}{GEMMA4}{shares}")
    assert config.partial_rotary_factor == 0.5 and fates["local_rope_proportion"].is_essential
    others = (
        "shared_experts: 2",
        "norm_topk_prob: false",
        "share_kv_projections: false",
        "global_head_dim: 256",
    )
    for word, other in zip(
        (
            "shared_experts: 1",
            "norm_topk_prob: true",
            "share_kv_projections: true",
            "global_head_dim: 512",
        ),
        others,
        strict=True,
    ):
        text = f"{SYNTHETIC}{GEMMA4}{GEMMA4_EXPERTS}".replace(word, other)
        assert imported("maxtext", tmp_path / "o.yml", text)[1][word.partition(":")[0]].is_essential


DELTA_RULE = """decoder_block: qwen3_5
base_num_decoder_layers: 8
num_experts: 8
shared_experts: 1
inhomogeneous_layer_cycle_interval: 4
gdn_num_value_heads: 64
partial_rotary_factor: 0.25
use_mrope: true
mrope_section: [11, 11, 10]
"""


def test_layers_of_a_gated_delta_rule_are_those_of_maxtext(tmp_path: Path) -> None:
    config, fates = imported("maxtext", tmp_path / "m.yml", f"{SYNTHETIC}{DELTA_RULE}")
    assert not [name for name, fate in fates.items() if fate.fate == "not supported"]
    assert (config.decoder_block, config.inhomogeneous_layer_cycle_interval) == ("qwen3_5", 4)
    assert config.use_qk_norm and config.norm_topk_prob
    assert (config.gdn_num_key_heads, config.gdn_num_value_heads, config.partial_rotary_factor) == (
        16,
        64,
        0.25,
    )
    others = (
        "use_qk_norm_in_gdn: false\ngdn_key_head_dim: 64\ngdn_conv_kernel_dim: 3\ngdn_chunk_size: "
        "32\n"
    )
    _, fates = imported("maxtext", tmp_path / "o.yml", f"{SYNTHETIC}{DELTA_RULE}{others}")
    refused = {name for name, fate in fates.items() if fate.fate == "not supported"}
    assert refused == {"use_qk_norm_in_gdn", "gdn_value_head_dim", "gdn_conv_kernel_dim"}


GEMMA4_SMALL = f"""{GEMMA4.replace("gemma4", "gemma4_small").replace("share_kv_projections: true", "")}
vocab_size: 4000
hidden_size_per_layer_input: 256
vocab_size_per_layer_input: 4000
"""


def test_gemma4_small_is_that_of_maxtext_by_the_name_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    of_e2b = (
        GEMMA4_SMALL.replace("layers: 6", "layers: 35")
        + "num_kv_shared_layers: 20\nuse_double_wide_mlp: true\n"
    )
    config, fates = imported("maxtext", tmp_path / "models/gemma4-e2b.yml", f"{SYNTHETIC}{of_e2b}")
    assert not [name for name, fate in fates.items() if fate.fate == "not supported"]
    assert (config.decoder_block, config.num_kv_shared_layers) == ("gemma4_small", 20)
    assert (config.use_double_wide_mlp, config.partial_rotary_factor) == (True, 0.25)
    assert config.attention_type.split(",") == ["local_sliding"] * 4 + ["global"]
    named, _ = imported("maxtext", tmp_path / "m.yml", f"{SYNTHETIC}model_name: gemma4-e2b\n")
    assert (named.attention_type, named.num_kv_shared_layers) == (config.attention_type, 20)
    other, _ = imported("maxtext", tmp_path / "models/gemma4-e4b.yml", f"{SYNTHETIC}{GEMMA4_SMALL}")
    assert other.attention_type.split(",") == ["local_sliding"] * 5 + ["global"]
    for stated, changed in (
        ("input: 256", "input: 128"),
        ("input: 4000", "input: 300"),
        ("_dim: 512", "_dim: 256"),
    ):
        fates = imported(
            "maxtext", tmp_path / "o.yml", f"{SYNTHETIC}{GEMMA4_SMALL}".replace(stated, changed)
        )[1]
        assert any(fate.is_essential for fate in fates.values()), changed


def test_the_tensors_of_custom_remat_stay_what_they_are(tmp_path: Path) -> None:
    recipe = (
        "remat_policy: custom\ndecoder_layer_input: offload\nquery_proj: device\nmlpwi_0: "
        "offload\nmla_q: device\n"
    )
    config, fates = imported("maxtext", tmp_path / "m.yml", SYNTHETIC + recipe)
    assert (config.remat_policy, config.decoder_layer_input) == ("custom", "offload")
    assert (config.query_proj, config.mlpwi_0, config.key_proj) == ("device", "offload", "remat")
    assert fates["query_proj"].fate == "mapped" and fates["mla_q"].fate == "ignored"
    config, _ = imported(
        "maxtext",
        tmp_path / "fused.yml",
        f"{SYNTHETIC}{recipe}qkv_proj: offload\nfused_qkv: true\n",
    )
    assert (config.query_proj, config.key_proj, config.value_proj) == (
        "offload",
        "offload",
        "offload",
    )
    config, fates = imported(
        "maxtext", tmp_path / "full.yml", SYNTHETIC + "remat_policy: full\nquery_proj: device\n"
    )
    assert (config.remat_policy, config.query_proj) == ("full", "remat") and fates[
        "query_proj"
    ].fate == "ignored"


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (
            "save_dot_except_mlp",
            dict.fromkeys(("query_proj", "key_proj", "value_proj", "out_proj"), "device"),
        ),
        ("qkv_proj_offloaded", dict.fromkeys(("query_proj", "key_proj", "value_proj"), "offload")),
    ],
)
def test_its_named_policies_become_the_tensors_that_they_keep(
    tmp_path: Path, policy: str, kept: dict[str, str]
) -> None:
    config, _ = imported("maxtext", tmp_path / "m.yml", f"{SYNTHETIC}remat_policy: {policy}\n")
    assert config.remat_policy == "custom"
    assert {name: config[name] for name in REMAT_TENSORS if config[name] not in ("remat",)} == {
        "decoder_layer_input": "device",
        **kept,
    }


_GPT_OSS = """
base_emb_dim: 64
base_num_query_heads: 4
base_num_kv_heads: 2
head_dim: 16
sliding_window_size: 32
attention_bias: true
attention_sink: true
rope_type: "yarn"
rope_max_timescale: 150_000
original_max_position_embeddings: 64
rope_factor: 4
rope_interleave: false
rope_truncate: false
rope_attention_scaling: true
base_mlp_dim: 96
base_moe_mlp_dim: 96
mlp_activations: ["sigmoid","linear"]
mlp_activations_limit: 7.0
routed_bias: true
mlp_bias: true
num_experts: 8
num_experts_per_tok: 4
base_num_decoder_layers: 4
vocab_size: 512
decoder_block: "gpt_oss"
inhomogeneous_layer_cycle_interval: 2
per_device_batch_size: 2
steps: 10
load_balance_loss_weight: 0.01
"""


def test_gpt_oss_is_read_from_the_words_of_its_form(tmp_path: Path) -> None:
    config, _ = imported("maxtext", tmp_path / "gpt_oss.yml", _GPT_OSS)
    assert (config.decoder_block, config.attention_type) == ("gpt_oss", "local_sliding,global")
    assert (config.num_experts, config.num_experts_per_tok, config.base_moe_mlp_dim) == (8, 4, 96)
    assert (config.attention_bias, config.attention_out_bias, config.routed_bias) == (
        True,
        True,
        False,
    )
    assert (config.rope_type, config.rope_factor, config.rope_truncate) == ("yarn", 4.0, False)
    assert (config.rope_attention_factor, config.load_balance_loss_weight) == (None, 0.01)
    config, _ = imported(
        "maxtext", tmp_path / "scaling.yml", _GPT_OSS.replace("rope_attention_scaling: true", "")
    )
    assert config.rope_attention_factor == 1
    _, fates = imported(
        "maxtext", tmp_path / "no.yml", _GPT_OSS.replace("attention_sink: true", "")
    )
    assert (fates["attention_sink"].fate, fates["attention_sink"].is_essential) == (
        "not supported",
        True,
    )


def test_the_expert_axis_is_data_for_a_dense_model_and_an_axis_for_a_sparse_one(
    tmp_path: Path,
) -> None:
    text = "model_name: {}\nper_device_batch_size: 1\nsteps: 10\nici_expert_parallelism: 4\n"
    dense, _ = imported("maxtext", tmp_path / "dense.yml", text.format("llama2-7b"))
    sparse, _ = imported("maxtext", tmp_path / "sparse.yml", text.format("mixtral-8x7b"))
    assert dense.ici_expert_parallelism == 1
    assert sparse.ici_expert_parallelism == 4


def test_emergency_checkpoints_are_local_checkpoints(tmp_path: Path) -> None:
    text = (
        "enable_emergency_checkpoint: true\nlocal_checkpoint_directory: "
        "/local\nlocal_checkpoint_period: 20\n"
    )
    config, fates = imported("maxtext", tmp_path / "m.yml", SYNTHETIC + text)
    assert (config.local_checkpoint_directory, config.local_checkpoint_period) == ("/local", 20)
    assert "local_checkpoint_directory" in fates["enable_emergency_checkpoint"].says


@pytest.mark.parametrize(
    ("words", "is_scaled"),
    [
        ("decoder_block: llama2\n", True),
        ("decoder_block: mixtral\nnum_experts: 4\nnum_experts_per_tok: 2\n", True),
        ("decoder_block: llama2\nuse_qk_norm: true\n", False),
        ("decoder_block: qwen3\nuse_qk_norm: true\n", False),
        ("decoder_block: qwen2\nattention_bias: true\n", False),
        ("model_name: llama3.1-8b\n", True),
        ("model_name: mixtral-8x7b\n", True),
        ("model_name: gemma2-2b\n", True),
        ("model_name: gemma3-4b\n", False),
    ],
)
def test_queries_hold_their_scale_where_maxtexts_do(
    words: str, is_scaled: bool, tmp_path: Path
) -> None:
    assert (
        imported("maxtext", tmp_path / "run.yml", f"{SYNTHETIC}{words}")[0].query_weights_scaled
        is is_scaled
    )


@pytest.mark.parametrize(
    "words",
    [
        "model_name: gemma-2b",
        "model_name: gemma3-1b",
        "decoder_block: gemma",
        "decoder_block: gemma2\nsliding_window_size: 8",
        "decoder_block: gemma3\nsliding_window_size: 8",
    ],
)
def test_every_gemma_holds_its_factors_in_the_weights_as_maxtexts_does(
    words: str, tmp_path: Path
) -> None:
    text = f"{SYNTHETIC}{words}\ndtype: float32\nlogits_via_embedding: true\n"
    config, fates = imported("maxtext", tmp_path / "run.yml", text)
    assert config.gemma_weights_scaled
    assert "rounded to bfloat16 there" in fates["dtype"].says


def test_what_runs_beside_maxtext_found_is_said(tmp_path: Path) -> None:
    def says(name: str, text: str) -> str:
        fates = imported("maxtext", tmp_path / f"{name}.yml", f"{SYNTHETIC}{text}")[1]
        return fates[name].says

    experts = "decoder_block: mixtral\nnum_experts: 4\nnum_experts_per_tok: 2\n"
    passes = "gradient_accumulation_steps: 2\nload_balance_loss_weight: 0.01\n"
    assert "passes of unequal tokens" in says("gradient_accumulation_steps", experts + passes)
    assert "unequal" not in says(
        "gradient_accumulation_steps", f"{experts}gradient_accumulation_steps: 2\n"
    )
    adapters = (
        "enable_lora: true\nlora_rank: 4\nlora_alpha: 8\nload_parameters_path: base/4/items\n"
        "decoder_block: {}\n"
    )
    assert "sqrt(head_dim) times" in says("lora_rank", adapters.format("llama2"))
    assert "sqrt" not in says("lora_rank", adapters.format("qwen3"))


def test_the_native_trainer_of_fine_tuning_weighs_all_tokens_alike(tmp_path: Path) -> None:
    line = (
        "python3 -m maxtext.trainers.post_train.sft.{} hf_path=json hf_train_files=a.jsonl "
        "tokenizer_path=tokenizer gradient_accumulation_steps=2 per_device_batch_size=1\n"
    )
    for module, has_means in [("train_sft", True), ("train_sft_native", False)]:
        fates = imported("maxtext", tmp_path / f"{module}.sh", line.format(module))[1]
        assert ("means" in fates["gradient_accumulation_steps"].says) is has_means


@pytest.mark.parametrize("name", ["gemma2-2b", "gemma3-4b"])
def test_scores_of_a_gemma_with_other_heads_are_divided_by_the_root_of_their_width(
    name: str, tmp_path: Path
) -> None:
    words = (
        f"base_output_directory=a run_name=b dataset_type=synthetic model_name={name} head_dim=16"
    )
    command = f"python3 -m maxtext.trainers.pre_train.train {words}\n"
    config, _ = imported("maxtext", tmp_path / "run.sh", command)
    assert (config.head_dim, config.query_pre_attn_scalar) == (16, 16)


_PUBLISHED = (
    "python3 -m maxtext.trainers.pre_train.train base_output_directory=a run_name=b "
    "dataset_type=synthetic override_model_config=true model_name={} {}\n"
)


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("olmo3-7b", "olmo3"),
        ("gpt-oss-20b", "gpt_oss"),
        ("deepseek3-671b", "deepseek"),
        ("gemma3-4b", "gemma3"),
    ],
)
def test_a_block_beside_the_model_that_has_it_states_nothing_new(
    name: str, block: str, tmp_path: Path
) -> None:
    plain, _ = imported("maxtext", tmp_path / "plain.sh", _PUBLISHED.format(name, ""))
    line = _PUBLISHED.format(name, f"decoder_block={block}")
    assert imported("maxtext", tmp_path / "both.sh", line)[0] == plain


@pytest.mark.parametrize("block", ["", "decoder_block=gemma2"])
def test_the_layers_of_a_published_gemma2_are_pairs_there(block: str, tmp_path: Path) -> None:
    line = _PUBLISHED.format("gemma2-2b", f"base_num_decoder_layers=1 {block}")
    config, _ = imported("maxtext", tmp_path / "run.sh", line)
    assert (config.base_num_decoder_layers, config.model_name) == (2, "gemma2-2b")
    whole, _ = imported("maxtext", tmp_path / "all.sh", _PUBLISHED.format("gemma2-2b", block))
    assert whole.base_num_decoder_layers == 26
