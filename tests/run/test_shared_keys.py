"""Runs of a model whose last layers share keys and values, on a mesh and on one device, are the
same run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import pytest

from maxbatch.run.pretraining import train
from tests.helpers.tiny import SAME, UNSAVED, assert_same_run, read_metrics, tiny_config

pytestmark = pytest.mark.runs

# Two cycles of a local and a global layer with keys and values of their own, and two that share the
# last ones.
RUN = (
    "decoder_block=gemma4_small",
    "base_num_decoder_layers=8",
    "attention_type=local_sliding,global",
    "sliding_window_size=7",
    "num_kv_shared_layers=4",
    "use_double_wide_mlp=true",
    "use_qk_norm=true",
    "query_pre_attn_scalar=1",
    "mlp_activations=gelu,linear",
    "max_target_length=16",
    "learning_rate=1e-3",
    "learning_rate_schedule=constant",
    "warmup_steps_fraction=0",
    "log_period=1",
    "global_batch_size=8",
    "steps=2",
    "scan_layers=true",
    UNSAVED,
)
MESH = (
    "ici_data_parallelism=2",
    "ici_tensor_parallelism=2",
    "ici_context_parallelism=2",
    "context_parallel_strategy=ring",
    "remat_policy=full",
)


def test_a_mesh_and_one_device_are_one_run(tmp_path: Path) -> None:
    def run(name: str, num_devices: int, *overrides: str) -> list[dict[str, Any]]:
        train(
            tiny_config(*RUN, f"run_dir={tmp_path / name}", *overrides), jax.devices()[:num_devices]
        )
        return read_metrics(tmp_path / name)

    expected = run("whole", 1, "per_device_batch_size=8")
    found = run("mesh", 8, *MESH, "per_device_batch_size=0.5")
    assert_same_run(found, expected, SAME, ("loss", "grad_norm"))
