"""The table of config keys: base.yml agrees with it, and identities made from it are unchanged."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from maxbatch import ConfigError, load_config
from maxbatch.config import base_yml as of_base
from maxbatch.config.base_yml import base_path, base_yml
from maxbatch.config.keys import Fixes, Key, Part
from maxbatch.config.paths import configs_dir
from maxbatch.config.sections import KEYS, SECTIONS, names_fixing, names_of
from maxbatch.config.values import NUMBERS, TEXTS
from maxbatch.config.yaml_file import entries

LINES = [line for line in base_path().read_text().splitlines() if re.match(r"\w", line)]
COMMENTS = {line.partition(":")[0]: line.partition("#")[2].strip() for line in LINES}


def test_base_yml_is_what_its_command_writes() -> None:
    assert base_path().read_text() == base_yml(), "run python -m maxbatch.config.base_yml"
    assert {
        entry.name: (entry.text, entry.plain or KEYS[entry.name].kind in TEXTS)
        for entry in entries(base_path())
    } == {key.name: (key.default, True) for key in KEYS.values()}


def test_base_yml_shows_the_sections_their_keys_and_their_sentences_once_and_in_their_order() -> (
    None
):
    shown = [
        re.match(r"# --- (.*?) -+$|(\w+):", line) for line in base_path().read_text().splitlines()
    ]
    declared = [
        name
        for section in SECTIONS
        for name in (section.heading(), *(key.name for key in section.declared))
    ]
    assert [match[1] or match[2] for match in shown if match] == declared
    assert {key.name: key.sentence for key in KEYS.values()} == COMMENTS


@pytest.mark.parametrize("is_named", [True, False])
def test_an_edited_base_yml_is_refused_whether_it_is_named_or_not(
    is_named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "base.yml").write_text(base_yml().replace("steps: 200", "steps: 300"))
    monkeypatch.setattr(of_base, "configs_dir", lambda: tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"base\.yml: differs from the table of keys.*works: a config file of your own",
    ):
        load_config(tmp_path / "base.yml" if is_named else None)


def test_every_default_is_a_value_that_its_row_allows() -> None:
    config = load_config()
    assert {key.kind for key in KEYS.values()} == {*NUMBERS, *TEXTS, "bool", "choice", "choices"}
    for key in KEYS.values():
        assert config[key.name] == key.read(key.default), key
        assert bool(key.choices) == (key.kind in ("choice", "choices")), key
        assert key.kind in NUMBERS or not (key.bounds or key.unit), key


def test_every_comment_in_base_yml_gives_unit_and_choices() -> None:
    for key in KEYS.values():
        comment = COMMENTS[key.name]
        assert comment and key.unit in comment, key
        # it lists the families
        page = re.search(r"docs/\w+\.md", comment) if key.name == "decoder_block" else None
        said = (configs_dir().parent / page[0]).read_text() if page else comment
        assert [choice for choice in key.choices if choice not in said] == [], key


def test_every_preset_gives_a_config() -> None:
    for path in (configs_dir() / "models").glob("*.yml"):
        assert load_config(overrides=[f"model_name={path.stem}"]).model_name == path.stem


# --- what follows from the rows -----------------------------------------------------------------------------


def test_a_new_key_must_say_what_it_fixes() -> None:
    assert inspect.signature(Key).parameters["fixes"].default is inspect.Parameter.empty


def test_the_model_identity_of_a_checkpoint_holds_the_keys_of_before() -> None:
    assert set(names_fixing(Fixes.MODEL)) == {
        "query_weights_scaled",
        "gemma_weights_scaled",
        "mu_dtype",
        "base_emb_dim",
        "base_num_query_heads",
        "base_num_kv_heads",
        "head_dim",
        "base_mlp_dim",
        "base_num_decoder_layers",
        "vocab_size",
        "logits_via_embedding",
        "rope_max_timescale",
        "normalization_layer_epsilon",
        "weight_dtype",
        "init_weights_seed",
        "opt_type",
        # A checkpoint of before them has their defaults.
        "decoder_block",
        "global_num_kv_heads",
        "num_kv_shared_layers",
        "use_double_wide_mlp",
        "mlp_activations",
        "attention_bias",
        "use_qk_norm",
        "attention_type",
        "sliding_window_size",
        "attn_logits_soft_cap",
        "final_logits_soft_cap",
        "query_pre_attn_scalar",
        "trainable_position_size",
        "local_rope_max_timescale",
        "rope_type",
        "rope_factor",
        "rope_low_freq_factor",
        "rope_high_freq_factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "rope_attention_factor",
        "attention_out_bias",
        "mlp_projection_bias",
        "rope_short_factors",
        "rope_long_factors",
        "num_experts",
        "num_experts_per_tok",
        "base_moe_mlp_dim",
        "norm_topk_prob",
        "routed_bias",
        "rope_truncate",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "mscale",
        "shared_experts",
        "first_num_dense_layers",
        "routed_score_func",
        "routed_scaling_factor",
        "n_routing_groups",
        "topk_routing_group",
        "interleave_moe_layer_step",
        "chunk_attn_window_size",
        "nope_layer_interval",
        "temperature_tuning",
        "gdn_key_head_dim",
        "inhomogeneous_layer_cycle_interval",
        "partial_rotary_factor",
        "gdn_num_key_heads",
        "gdn_num_value_heads",
        "adam_b1_half_life",
        "adam_b2_half_life",
        "parameter_average_half_life",
    }


def test_the_stream_identity_of_a_checkpoint_holds_the_keys_of_before() -> None:
    assert set(names_fixing(Fixes.TOKENS | Fixes.ROWS)) == {
        "max_target_length",
        "packing",
        "packing_strategy",
        "add_bos",
        "add_eos",
        "skip_bad_records",
    }
    assert names_fixing(Fixes.ORDER) == ("enable_data_shuffling", "data_shuffle_seed")
    assert set(names_fixing(Fixes.PROMPTS)) == {"prompt_template", "add_bos", "skip_bad_records"}
    # in the order of a store's signature
    assert names_fixing(Fixes.TOKENS) == ("add_bos", "add_eos")
    assert names_fixing(Fixes.RECORDS) == (
        "dataset_type",
        "text_field",
        "record_fields",
        "record_format",
    )


def test_the_manifest_of_compiled_programs_leaves_out_the_keys_of_before() -> None:
    assert set(KEYS) - set(names_fixing(Fixes.PROGRAM)) == {
        "run_dir",
        "base_output_directory",
        "run_name",
        "model_name",
        "load_parameters_path",
        "load_full_state_path",
        "start_samples",
        "compiled_dir",
        "steps",
        "train_samples",
        "train_tokens",
        "num_epochs",
        "learning_rate_schedule_by",
        "learning_rate_schedule_steps",
        "learning_rate",
        "learning_rate_schedule",
        "warmup_steps_fraction",
        "learning_rate_final_fraction",
        "wsd_decay_steps_fraction",
        "learning_rate_scaling",
        "reference_batch_size",
        "max_consecutive_skips",
        "dataset_type",
        "dataset_path",
        "eval_dataset_path",
        "eval_fraction",
        "text_field",
        "record_fields",
        "record_format",
        "skip_bad_records",
        "deduplicate",
        "synthetic_samples",
        "packing",
        "packing_strategy",
        "add_bos",
        "add_eos",
        "tokenizer_type",
        "tokenizer_path",
        "enable_data_shuffling",
        "data_shuffle_seed",
        "skip_samples",
        "grain_worker_count",
        "grain_prefetch_buffer_size",
        "data_cache_dir",
        "use_sft",
        "sft_format",
        "sft_train_on_completion_only",
        "overlong",
        "enable_checkpointing",
        "checkpoint_period",
        "max_num_checkpoints_to_keep",
        "local_checkpoint_directory",
        "keep_best_checkpoint",
        "overwrite_run",
        "local_checkpoint_period",
        "eval_interval",
        "eval_steps",
        "eval_samples",
        "eval_tasks",
        "eval_tasks_limit",
        "early_stopping_patience",
        "log_to",
        "log_period",
        "profile_steps",
        "generate_prompt",
        "peak_tflops_per_device",
        "compilation_cache_dir",
        "heartbeat_timeout_s",
        "host_wait_s",
        "transcript_period",
        "own_parts",
    }


def test_the_warm_start_has_the_defaults_that_it_had_before() -> None:
    assert {key.name for key in KEYS.values() if not key.warm_start} == {
        "steps",  # set to warm_start_steps
        "max_tokens_per_pass",
        "base_output_directory",
        "run_name",  # the warm start has a run_dir of its own
        "learning_rate_schedule_by",
        "learning_rate_schedule_steps",
        "muon_weight_decay",
        "train_samples",
        "train_tokens",
        "num_epochs",
        "eval_dataset_path",
        "eval_fraction",
        "text_field",
        "deduplicate",
        "skip_samples",
        "eval_interval",
        "learning_rate_schedule",
        "warmup_steps_fraction",
        "load_parameters_path",
        "load_full_state_path",
        "start_samples",
        "log_to",
        "packing_strategy",
        "expansion_factor_real_data",
        "adam_weight_decay",
        "weight_decay_timescale",
        "profile_steps",
        "use_sft",
        "lora_rank",
        "early_stopping_patience",
        "eval_tasks",
        "parameter_average_half_life",
        "local_checkpoint_directory",
        "local_checkpoint_period",
        "own_parts",
        "keep_best_checkpoint",
    }


def test_the_parts_of_the_config_name_the_keys_of_before() -> None:
    assert names_of(Part.LENGTH) == ("steps", "train_samples", "train_tokens", "num_epochs")
    assert names_of(Part.BATCH) + names_of(Part.RAMP) == (
        "per_device_batch_size",
        "gradient_accumulation_steps",
        "global_batch_size",
        "batch_size_schedule",
        "enable_rampup_batch_size",
        "per_device_batch_size_start",
        "per_device_batch_size_increment",
        "global_rampup_samples",
    )
    assert names_of(Part.PROMPT_BATCH) == (
        "num_generations",
        "micro_batch_size",
        "train_micro_batch_size",
        "rollout_micro_batch_size",
        "num_iterations",
        "num_minibatches",
        "filter_groups",
        "max_prompts_per_batch",
        "off_policy_steps",
    )


def test_a_key_is_called_as_in_maxtext_unless_its_row_says_otherwise() -> None:
    assert KEYS["per_device_batch_size"].maxtext_name == "per_device_batch_size"
    assert KEYS["num_epochs"].maxtext_name == "num_epoch"
    assert KEYS["train_samples"].maxtext_name is None
