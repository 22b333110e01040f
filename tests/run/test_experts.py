"""Runs of a model with experts that differ in layout only are the same run, its balance
included.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from maxbatch import load_model
from maxbatch.model import delta_rule, scores
from maxbatch.model.experts import experts
from maxbatch.run.pretraining import train
from tests.helpers.tiny import (
    MEASURED,
    ONE_LAYER,
    SAME,
    UNSAVED,
    assert_same_run,
    read_metrics,
    tiny_config,
)

pytestmark = pytest.mark.runs

EXPERTS = (
    "decoder_block=mixtral",
    "num_experts=4",
    "num_experts_per_tok=2",
    "norm_topk_prob=true",
    "base_moe_mlp_dim=48",
    "load_balance_loss_weight=0.1",
    "router_z_loss_weight=0.01",
    "routed_bias=true",
    "routed_bias_update_rate=0.01",
)
RUN = (
    *EXPERTS,
    "max_target_length=16",
    "learning_rate=1e-3",
    "learning_rate_schedule=constant",
    "warmup_steps_fraction=0",
    "checkpoint_period=1000",
    "packing=false",
    "log_period=1",
    "global_batch_size=8",
    "steps=4",
)
RESUMED = "a row at a time"  # of the test in which a run goes on, and is compared there
# devices, most rows per device, keys
LAYOUTS: dict[str, tuple[int, str, tuple[str, ...]]] = {
    RESUMED: (1, "1", (MEASURED,)),
    "experts over four devices": (4, "1", ("ici_expert_parallelism=4", "remat_policy=full")),
    "experts and data": (4, "2", ("ici_expert_parallelism=2", "ici_data_parallelism=2", MEASURED)),
    "experts, tensor and fsdp": (
        8,
        "0.5",
        ("ici_expert_parallelism=2", "ici_tensor_parallelism=2"),
    ),
    "experts, tensor and pipeline": (
        8,
        "2",
        ("ici_expert_parallelism=2", "ici_tensor_parallelism=2", "ici_pipeline_parallelism=2"),
    ),
    "context and fsdp, products kept": (
        4,
        "2",
        ("ici_context_parallelism=2", "remat_policy=minimal"),
    ),
}
# Those that take the form of accelerators, where shares multiply before the last product.
ELSEWHERE = ("experts over four devices", "experts, tensor and fsdp")
# The keys of runs by the scope of their balance loss; a pipeline of two stages is among the global
# ones.
SCOPES = {
    "sequence": ("load_balance_scope=sequence", ONE_LAYER),
    "global": ("load_balance_scope=global",),
}
FIRST = (
    "load_balance_loss",
    "router_z_loss",
    "expert_load_max",
    "dropped_tokens",
    "routing_fingerprint",
)

# The keys of other forms of layers by their name, and the layouts on which each is compared with
# one device: all axes meet all forms that they cut in their own way, and loops over layers meet the
# axes once.
FORMS = {
    "deepseek": (
        "decoder_block=deepseek",
        "base_num_decoder_layers=3",
        "first_num_dense_layers=1",
        "num_experts=8",
        "n_routing_groups=4",
        "topk_routing_group=2",
        "shared_experts=1",
        "routed_score_func=sigmoid",
        "routed_scaling_factor=2.0",
        "q_lora_rank=16",
        "kv_lora_rank=16",
        "qk_nope_head_dim=8",
        "qk_rope_head_dim=8",
        "v_head_dim=8",
    ),
    # Layers with RoPE and an MLP in chunks alternate with layers without RoPE and with experts.
    "llama4": (
        "decoder_block=llama4",
        "norm_topk_prob=false",
        "routed_score_func=sigmoid",
        "shared_experts=1",
        "use_qk_norm=true",
        "interleave_moe_layer_step=2",
        "nope_layer_interval=2",
        "chunk_attn_window_size=5",
        "temperature_tuning=true",
        "base_num_decoder_layers=4",
    ),
    # Two cycles of a local and a global layer, whose heads have other sizes.
    "gemma4": (
        "decoder_block=gemma4",
        "base_num_decoder_layers=4",
        "attention_type=local_sliding,global",
        "sliding_window_size=7",
        "global_num_kv_heads=1",
        "use_qk_norm=true",
        "query_pre_attn_scalar=1",
        "mlp_activations=gelu,linear",
    ),
    # Layers with a gated delta rule alternate with layers with attention.
    "qwen3_next": (
        "decoder_block=qwen3_next",
        "inhomogeneous_layer_cycle_interval=2",
        "base_num_decoder_layers=4",
        "shared_experts=1",
        "gdn_num_key_heads=2",
        "gdn_num_value_heads=4",
        "gdn_key_head_dim=8",
        "partial_rotary_factor=0.5",
    ),
}
IN_LOOP = ("scan_layers=true", "remat_policy=full")
LAYOUTS_OF = {
    "deepseek": {
        "experts, tensor and pipeline": (),
        "context and fsdp, products kept": (
            "context_parallel_strategy=ring",
            "context_parallel_load_balance=true",
        ),
    },
    "llama4": {"experts, tensor and fsdp": IN_LOOP, "context and fsdp, products kept": ()},
    "gemma4": {"experts, tensor and pipeline": ()},
    "qwen3_next": {  # each device of a context axis runs the rule over whole rows
        "experts, tensor and pipeline": (
            "ici_expert_parallelism=1",
            "ici_context_parallelism=2",
            "remat_policy=full",
        )
    },
}


def run(run_dir: Path, layout: str, *overrides: str) -> list[dict[str, Any]]:
    devices, rows, keys = LAYOUTS[layout] if layout else (1, "8", ())
    config = tiny_config(
        *RUN, *keys, f"per_device_batch_size={rows}", f"run_dir={run_dir}", *overrides
    )
    train(config, jax.devices()[:devices])
    return read_metrics(run_dir)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The runs on one device in one pass, by the scope of their balance loss."""
    return {
        scope: run(tmp_path_factory.mktemp("whole"), "", *keys, UNSAVED)
        for scope, keys in SCOPES.items()
    }


@pytest.mark.parametrize(
    ("layout", "scope"),
    [
        (layout, ("sequence", "global")[number % 2])
        for number, layout in enumerate(name for name in LAYOUTS if name != RESUMED)
    ],
)
def test_all_layouts_route_and_balance_alike_in_the_form_of_a_cpu_or_of_accelerators(
    tmp_path, reference, monkeypatch, layout, scope
):
    expected = reference[scope]
    computed_by = experts.computed_by
    if layout in ELSEWHERE:
        monkeypatch.setattr(
            experts, "computed_by", lambda combine, _, *rest: computed_by(combine, "gpu", *rest)
        )
    found = run(tmp_path, layout, *SCOPES[scope], UNSAVED)
    assert_same_run(
        found, expected, SAME, ("loss", "grad_norm", "load_balance_loss", "router_z_loss")
    )
    assert {name: found[0][name] for name in FIRST[2:]} == {
        name: expected[0][name] for name in FIRST[2:]
    }
    assert found[0]["dropped_tokens"] == 0
    assert found[0]["expert_choices"] == expected[0]["expert_choices"]
    layers = 1 if ONE_LAYER in SCOPES[scope] else 2
    # 2 choices, 8 rows
    assert sum(found[0]["expert_choices"].values()) == 2 * layers * (found[0]["loss_weight"] + 8)


@pytest.mark.parametrize("form", FORMS)
def test_layers_of_other_forms_route_and_balance_alike_on_all_layouts(tmp_path, monkeypatch, form):
    monkeypatch.setattr(scores, "GROWTH_TOKENS", 4)
    monkeypatch.setattr(delta_rule, "CHUNK_TOKENS", 7)
    keys = (*FORMS[form], "steps=2", UNSAVED)
    expected = run(tmp_path / "whole", "", *keys, *IN_LOOP)
    for layout, more in LAYOUTS_OF[form].items():
        found = run(tmp_path / layout, layout, *keys, *more)
        assert_same_run(
            found, expected, SAME, ("loss", "grad_norm", "load_balance_loss", "router_z_loss")
        )
        assert found[0]["routing_fingerprint"] == expected[0]["routing_fingerprint"]


def bias_of(run_dir: Path) -> np.ndarray:
    """Returns the routers' bias in the newest checkpoint of a run: float32[layers, experts]."""
    leaves = jax.tree.leaves_with_path(load_model(run_dir).params)
    return next(
        np.asarray(leaf) for path, leaf in leaves if "routed_bias" in jax.tree_util.keystr(path)
    )


def test_a_resume_elsewhere_carries_the_counts_and_the_bias_and_a_new_run_the_bias(
    tmp_path, reference
):
    first, other = tmp_path / "first", tmp_path / "other"
    run(first, "experts and data", "load_balance_scope=global", "steps=2")
    run(other, "", f"load_parameters_path={first}", "steps=1")
    assert np.abs(bias_of(first)).max() == np.float32(0.02), "two steps of one expert the same way"
    steps = np.abs(bias_of(other) - bias_of(first))
    assert (
        np.isclose(steps, 0.01, atol=1e-6).any()
        and (np.isclose(steps, 0.01, atol=1e-6) | (steps == 0)).all()
    )
    found = run(first, RESUMED, "load_balance_scope=global")
    assert_same_run(
        found,
        reference["global"],
        SAME,
        ("loss", "grad_norm", "load_balance_loss", "router_z_loss"),
    )


def test_a_ramp_and_a_last_partial_batch_balance_as_one_pass_does(tmp_path):
    keys = (
        "batch_size_schedule=0:4 8:8",
        "train_samples=21",
        "steps=null",
        "global_batch_size=null",
        "load_balance_scope=global",
        "eval_interval=1",
        "eval_fraction=0.02",
        UNSAVED,
    )
    layout = "experts over four devices"
    cut = run(tmp_path / "cut", layout, *keys)
    close = ("loss", "eval_loss", "load_balance_loss", "router_z_loss")
    assert_same_run(cut, run(tmp_path / "whole", "", *keys), SAME, close)


def test_padded_rows_go_to_no_expert_and_a_capacity_is_counted_within_a_row(tmp_path):
    """7 rows in 9 slots of three devices, and in 8 of four over which the experts are split, are
    the same update.
    """
    keys = ("batch_padding=true", "global_batch_size=7", "capacity_factor=1", "steps=2", UNSAVED)
    config = tiny_config(*RUN, *keys, "per_device_batch_size=1", f"run_dir={tmp_path / 'three'}")
    train(config, jax.devices()[:3])
    three = read_metrics(tmp_path / "three")
    four = run(tmp_path / "four", "experts over four devices", *keys)
    assert_same_run(four, three, SAME, ("loss", "grad_norm", "load_balance_loss", "router_z_loss"))
    assert {name: four[0][name] for name in FIRST[2:]} == {
        name: three[0][name] for name in FIRST[2:]
    }
    assert 0 < three[0]["dropped_tokens"] < 7 * 16 * 2
