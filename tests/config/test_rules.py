"""Keys that displace or exclude each other."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from maxbatch import ConfigError, load_config
from maxbatch.config.loading import dump_config
from maxbatch.config.rules import check_data_paths, check_dataset
from tests.helpers.configs import error_of, write

RAMP = (
    "enable_rampup_batch_size: true\nper_device_batch_size_start: "
    "2\nper_device_batch_size_increment: 2\n"
)


def test_the_wsd_decay_must_fit_behind_the_warmup() -> None:
    broken = (
        "learning_rate_schedule=wsd",
        "warmup_steps_fraction=0.6",
        "wsd_decay_steps_fraction=0.5",
    )
    message = error_of(overrides=broken)
    assert message.startswith("wsd_decay_steps_fraction=0.5: must be at most 0.4")
    load_config(overrides=[*broken, message.partition("works: ")[2]])


MIXTRAL = ("decoder_block=mixtral", "num_experts=8", "num_experts_per_tok=2", "norm_topk_prob=true")


DEEPSEEK = ("model_name=tiny-deepseek",)
OF_ONE_GROUP = ("topk_routing_group=1", "num_experts_per_tok=5")


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (
            (*DEEPSEEK, "n_routing_groups=3"),
            "n_routing_groups=3: must be a divisor of num_experts=8 with at least",
        ),
        (
            (*DEEPSEEK, "n_routing_groups=8"),
            "n_routing_groups=8: must be a divisor of num_experts=8 with at least",
        ),
        (
            (*DEEPSEEK, *OF_ONE_GROUP, "n_routing_groups=3"),
            "n_routing_groups=3: must be a divisor of num_experts=8",
        ),
        (
            (*DEEPSEEK, *OF_ONE_GROUP, "num_experts=1"),
            "num_experts=1: must be at least 2 beside decoder_block=deepseek",
        ),
        (
            (*DEEPSEEK, "topk_routing_group=5"),
            "topk_routing_group=5: must be at most n_routing_groups=4",
        ),
        (
            (*DEEPSEEK, "n_routing_groups=-1"),
            "topk_routing_group=2: must be -1 beside n_routing_groups=-1",
        ),
        (
            (*DEEPSEEK, "num_experts_per_tok=5"),
            "topk_routing_group=2: must be at least 3: num_experts_per_tok=5",
        ),
        (
            (*DEEPSEEK, "first_num_dense_layers=3"),
            "first_num_dense_layers=3: must be less than base_num_decoder_lay",
        ),
        ((*DEEPSEEK, "qk_rope_head_dim=7"), "qk_rope_head_dim=7: must be even"),
        (
            (*DEEPSEEK, "num_experts_per_tok=9"),
            "num_experts_per_tok=9: must be at most num_experts=8",
        ),
        (
            (*DEEPSEEK, "use_qk_norm=true"),
            "use_qk_norm=true: must be false beside decoder_block=deepseek",
        ),
        (
            (*DEEPSEEK, "attention_bias=true"),
            "attention_bias=true: must be false beside decoder_block=deepseek",
        ),
        (
            ("model_name=deepseek3-671b", "num_experts=1"),
            "num_experts=1: must be at least 2 beside decoder_block=deep",
        ),
        (
            ("batch_size=8", "load_parameters_path=base", "lora_rank=2", "warm_start_steps=5"),
            "warm_start_steps=5: must be 0 beside lora_rank",
        ),
        (("q_lora_rank=16",), "q_lora_rank=16: must be 0 beside decoder_block=llama2"),
        (
            (*MIXTRAL, "v_head_dim=16", "kv_lora_rank=8"),
            "kv_lora_rank=8: must be 512 beside decoder_block=mixtral",
        ),
        (
            (*MIXTRAL, "shared_experts=1"),
            "shared_experts=1: must be 0 beside decoder_block=mixtral",
        ),
        (
            (*MIXTRAL, "first_num_dense_layers=1"),
            "first_num_dense_layers=1: must be 0 beside decoder_block=mixtral",
        ),
        (
            (*MIXTRAL, "routed_score_func=sigmoid"),
            "routed_score_func=sigmoid: must be softmax beside decoder_block",
        ),
        (
            (*MIXTRAL, "n_routing_groups=2"),
            "n_routing_groups=2: must be -1 beside decoder_block=mixtral",
        ),
        (
            ("num_experts=8", "num_experts_per_tok=2"),
            "num_experts=8: must be 1 beside decoder_block=llama2",
        ),
        (
            ("num_experts=8", "routed_score_func=sigmoid"),
            "num_experts=8: must be 1 beside decoder_block=llama2",
        ),
        (
            ("remat_policy=custom", "moe_mlpwo=device"),
            "moe_mlpwo=device: must be remat beside decoder_block=llama2",
        ),
        (("moe_mlpwo=device",), "moe_mlpwo=device: must be remat beside decoder_block=llama2"),
        (
            ("load_balance_loss_weight=0.1",),
            "load_balance_loss_weight=0.1: must be 0.0 beside decoder_block=llama2",
        ),
        (
            ("decoder_block=mixtral",),
            "num_experts=1: must be at least 2 beside decoder_block=mixtral",
        ),
        (
            (*MIXTRAL, "num_experts_per_tok=9"),
            "num_experts_per_tok=9: must be at most num_experts=8",
        ),
        (
            (*MIXTRAL, "norm_topk_prob=false"),
            "norm_topk_prob=false: must be true beside decoder_block=mixtral",
        ),
        (
            (*MIXTRAL, "routed_bias_update_rate=0.1"),
            "routed_bias_update_rate=0.1: must be 0 beside routed_bias=false",
        ),
        (
            (*MIXTRAL, "mlp_activations=gelu"),
            "mlp_activations=gelu: must be gated beside decoder_block=mixtral",
        ),
        (
            (*MIXTRAL, "batch_size=4", "router_z_loss_weight=1"),
            "router_z_loss_weight=1.0: must be 0 beside batch_size",
        ),
    ],
)
def test_keys_of_experts_that_do_not_go_together_are_one_line_with_keys_that_work(
    broken: tuple[str, ...], said: str
) -> None:
    message = error_of(overrides=broken)
    assert message.startswith(said)
    load_config(overrides=[*broken, *shlex.split(message.partition("works: ")[2])])


@pytest.mark.parametrize("factors", ["", "1,1,1", "1,1,1,0", "1,1,1,-1", "1,1,1,x", "1,1,1,1,"])
def test_longrope_needs_a_positive_factor_for_each_pair_of_a_head(factors: str) -> None:
    broken = (
        "rope_type=longrope",
        "head_dim=8",
        f"rope_short_factors={factors}",
        f"rope_long_factors={factors}",
    )
    message = error_of(overrides=broken)
    assert message.startswith(
        f"rope_short_factors={factors}: must be 4 positive numbers joined by commas"
    )
    load_config(overrides=[*broken, *shlex.split(message.partition("works: ")[2])])


def test_a_tokenizer_that_knows_more_than_a_loaded_model_needs_the_models_own() -> None:
    small = load_config(overrides=["vocab_size=100"])
    with pytest.raises(
        ConfigError, match="the byte tokenizer has 259 tokens; works: vocab_size=259"
    ):
        check_dataset(small)
    loaded = load_config(overrides=["vocab_size=100", "load_parameters_path=there"])
    with pytest.raises(
        ConfigError, match="vocab_size=259, or the tokenizer of the model in load_parameters_path"
    ):
        check_dataset(loaded)


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


def test_a_ramp_beside_another_batch_in_one_layer_is_refused(tmp_path: Path) -> None:
    for other in ("global_batch_size: 64", "batch_size_schedule: 0:8"):
        run = write(tmp_path / "run.yml", RAMP + other + "\n")
        message = error_of(run)
        assert message.startswith(other.replace(": ", "=", 1))
        load_config(run, shlex.split(message.partition("works: ")[2]))
        load_config(run, ["enable_rampup_batch_size=false"])


@pytest.mark.parametrize(
    ("overrides", "works"),
    [
        (("adam_scaling=sde",), "learning_rate_scaling=sqrt"),
        (("adam_scaling=sde", "learning_rate_scaling=sqrt", "opt_type=lion"), "opt_type=adamw"),
        (("packing=false", "packing_strategy=best_fit"), "packing_strategy=concatenate"),
        (
            ("batch_size=8", "warm_start_steps=2", "enable_checkpointing=false"),
            "enable_checkpointing=true",
        ),
        (("early_stopping_patience=3", "eval_interval=-1"), "eval_interval=100"),
        (("batch_size=8", "early_stopping_patience=3"), "early_stopping_patience=null"),
        (("eval_tasks=hellaswag", "eval_interval=-1"), "eval_interval=100"),
        (("batch_size=8", "eval_tasks=hellaswag"), 'eval_tasks=""'),
        (("eval_tasks_limit=9",), "eval_tasks_limit=null"),
    ],
)
def test_keys_that_need_each_other_are_refused_apart(
    overrides: tuple[str, ...], works: str
) -> None:
    message = error_of(overrides=overrides)
    assert message.endswith(f"works: {works}")
    load_config(overrides=[*overrides, *shlex.split(works)])


@pytest.mark.parametrize(
    ("overrides", "works"),
    [
        (("dataset_type=synthetic", "dataset_path=gs://x"), "dataset_path=''"),
        (
            ("dataset_type=arithmetic", "dataset_path=a", "eval_dataset_path=b"),
            "dataset_path='' eval_dataset_path=''",
        ),
        (("dataset_path=gs://x/*.parquet",), "dataset_type=parquet"),
        (("eval_dataset_path=held/out.jsonl.gz",), "dataset_type=jsonl"),
        (("dataset_path=books",), "dataset_type=text"),
        (("dataset_type=text", "eval_dataset_path=a.txt", "eval_fraction=0.1"), "eval_fraction=0"),
    ],
)
def test_a_path_that_nothing_would_read_is_refused(overrides: tuple[str, ...], works: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_data_paths(load_config(overrides=overrides))
    assert str(caught.value).endswith(f"works: {works}")
    check_data_paths(load_config(overrides=[*overrides, *shlex.split(works)]))


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


def test_rows_per_device_of_null_need_what_they_follow_from() -> None:
    assert error_of(overrides=("per_device_batch_size=null",)).endswith(
        "; works: per_device_batch_size=16"
    )


def test_tensors_of_custom_remat_are_refused_under_another_policy_and_given_up_by_a_layer_that_states_one() -> (
    None
):
    with pytest.raises(ConfigError, match=r"query_proj=device: .*works: remat_policy=custom$"):
        load_config(overrides=["query_proj=device", "remat_policy=full"])
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
    ("overrides", "works"),
    [
        (("base_mlp_dim=133145",), "base_mlp_dim=133144"),
        (("base_emb_dim=200000",), "base_emb_dim=133144"),
        (
            ("base_num_query_heads=1048", "base_num_kv_heads=8", "head_dim=128"),
            "base_num_query_heads=1040",
        ),
        (("model_name=deepseek3-671b", "base_num_query_heads=521"), "base_num_query_heads=520"),
        (
            (
                "decoder_block=gemma4",
                "base_num_query_heads=264",
                "global_num_kv_heads=3",
                "head_dim=256",
            ),
            "base_num_query_heads=258",
        ),
    ],
)
def test_sums_of_int8_that_an_int32_may_not_hold_are_refused(
    overrides: tuple[str, ...], works: str
) -> None:
    message = error_of(overrides=(*overrides, "quantization=int8"))
    assert "133,144" in message and message.endswith(f"; works: {works}")
    name = works.partition("=")[0]
    load_config(
        overrides=[
            *(one for one in overrides if not one.startswith(name)),
            works,
            "quantization=int8",
        ]
    )
    load_config(overrides=[*overrides, "quantization=fp8"])
