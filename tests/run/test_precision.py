"""The table of equalities between layouts, to the bit or to rounding: every row has tests, bfloat16
its own.
"""

from __future__ import annotations

import re
from pathlib import Path

import jax
import pytest

from maxbatch.run.pretraining import train
from tests.helpers.tiny import SAME, UNSAVED, assert_same_run, read_metrics, tiny_config

ROOT = Path(__file__).parents[2]
# The tests that hold a row, by the words that its first cell begins with.
HELD_BY = {
    "samples": (
        "run/test_invariance.py::test_all_layouts_of_one_batch_are_one_run",
        "run/test_precision.py::test_in_bfloat16_layouts_have_the_same_data_and_losses_to_its_rounding",
    ),
    "position": (
        "run/test_invariance.py::test_all_layouts_of_one_batch_are_one_run",
        "run/test_precision.py::test_in_bfloat16_layouts_have_the_same_data_and_losses_to_its_rounding",
    ),
    "bytes": ("commands/test_prepare.py::test_the_number_of_workers_leaves_no_trace",),
    "state": ("run/weights/test_checkpoints.py::test_restores_the_newest_onto_another_mesh",),
    "losses": (
        "run/test_invariance.py::test_all_layouts_of_one_batch_are_one_run",
        "run/test_invariance.py::test_a_resume_onto_another_layout_is_not_noticed",
        "run/test_precision.py::test_in_bfloat16_layouts_have_the_same_data_and_losses_to_its_rounding",
    ),
    "experts": (
        "run/test_experts.py::test_all_layouts_route_and_balance_alike_in_the_form_of_a_cpu_or_of_accelerators",
        "run/test_experts.py::test_layers_of_other_forms_route_and_balance_alike_on_all_layouts",
    ),
    "responses of `rl` for equal": (
        "kinds/prompt/test_run.py::test_float32_samples_the_same_responses_on_any_devices_where_training_rounds_to_bfloat16",
        "kinds/prompt/test_hosts.py::test_float32_samples_the_same_responses_on_several_hosts_where_training_rounds_to_bfloat16",
    ),
    "responses of `rl` over": (
        "kinds/prompt/test_run.py::test_chunks_and_devices_give_the_same_responses_and_losses",
        "kinds/prompt/test_hosts.py::test_slow_hosts_that_are_killed_and_stopped_give_the_run_of_one_which_goes_on_with_them",
    ),
}


def test_every_row_of_the_table_has_its_tests() -> None:
    page = (ROOT / "docs" / "how-it-works.md").read_text()
    section = page.partition("## What is equal, and in which type\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("|")][2:]
    assert len(rows) == len(HELD_BY) and all(
        row.startswith(begin) for row, begin in zip(rows, HELD_BY, strict=True)
    )
    for file, _, name in (test.partition("::") for tests in HELD_BY.values() for test in tests):
        assert re.search(rf"^def {name}\(", (ROOT / "tests" / file).read_text(), re.M), (
            f"{file} has no {name}"
        )


@pytest.mark.runs
@pytest.mark.usefixtures("standard_promotion")
def test_in_bfloat16_layouts_have_the_same_data_and_losses_to_its_rounding(tmp_path: Path) -> None:
    """Experts too, whose tokens may go elsewhere on another layout."""
    experts = (
        "decoder_block=mixtral",
        "num_experts=4",
        "num_experts_per_tok=2",
        "norm_topk_prob=true",
        "base_moe_mlp_dim=24",
    )
    keys = (*experts, "dtype=bfloat16", "global_batch_size=8", "steps=4", UNSAVED)
    train(tiny_config(*keys, f"run_dir={tmp_path / 'whole'}"), jax.devices()[:1])
    cut = ("per_device_batch_size=1", "ici_data_parallelism=2", f"run_dir={tmp_path / 'cut'}")
    train(tiny_config(*keys, *cut), jax.devices()[:4])
    found, expected = read_metrics(tmp_path / "cut"), read_metrics(tmp_path / "whole")
    assert_same_run(
        found, expected, (*SAME, "tokens_seen", "learning_rate"), ("loss",), tolerance=2e-2
    )
