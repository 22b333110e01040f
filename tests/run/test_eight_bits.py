"""Runs in 8 bits: one config is one run on any layout, and a row's output depends on that row
alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import pytest
from flax import nnx

from maxbatch import load_model
from maxbatch.cli import main
from maxbatch.data.stream.stream import open_stream
from maxbatch.run.pretraining import train
from maxbatch.run.weights.parameters import load_adapters
from maxbatch.update.lora import adapters_of
from maxbatch.update.state import abstract_model
from tests.helpers.parameters import load_parameters
from tests.helpers.tiny import MEASURED, ONE_LAYER, UNSAVED, loss_sums, read_metrics, tiny_config

pytestmark = pytest.mark.runs

# At the rate of the other tests of layouts a tip of a rounding grows within 20 updates; this is the
# rate of base.yml.
RUN = (
    "learning_rate=3e-3",
    "learning_rate_schedule=constant",
    "packing=false",
    "global_batch_size=192",
)
# devices, most rows per device, the rest
LAYOUTS: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "one device, one pass": (1, "192", ()),
    "padding": (5, "8", ("batch_padding=true", "ici_data_parallelism=5")),
    "context and tensor": (
        4,
        "24",
        (
            "ici_context_parallelism=2",
            "context_parallel_strategy=ring",
            "ici_tensor_parallelism=2",
            "remat_policy=minimal",
            "scan_layers=true",
            MEASURED,
        ),
    ),
    "experts": (4, "24", ("ici_expert_parallelism=2", "ici_tensor_parallelism=2")),
    "pipeline and fsdp": (4, "12", ("ici_pipeline_parallelism=2", "remat_policy=full")),
}


def run(run_dir: Path, layout: str, *overrides: str) -> list[dict[str, Any]]:
    num_devices, rows, others = LAYOUTS[layout]
    stated = (*RUN, *others, f"per_device_batch_size={rows}", f"run_dir={run_dir}", *overrides)
    train(tiny_config(*stated), jax.devices()[:num_devices])
    return read_metrics(run_dir)


def assert_same_in_eight_bits(
    found: list[dict[str, Any]],
    expected: list[dict[str, Any]],
    tolerance: float,
    first: float = 2e-5,
) -> None:
    assert [line["data_fingerprint"] for line in found] == [
        line["data_fingerprint"] for line in expected
    ]
    losses = [(one["loss"], other["loss"]) for one, other in zip(found, expected, strict=True)]
    assert abs(losses[0][0] - losses[0][1]) <= first
    assert max(abs(one - other) for one, other in losses) <= tolerance


DENSE = ("steps=20",)
EXPERTS = (
    "decoder_block=mixtral",
    "num_experts=4",
    "num_experts_per_tok=2",
    "norm_topk_prob=true",
    ONE_LAYER,
    "steps=8",
)


@pytest.mark.parametrize(
    ("quantization", "model", "layouts"),
    [
        ("int8", DENSE, ("context and tensor", "pipeline and fsdp")),
        ("fp8", EXPERTS, ("padding", "experts")),
    ],
)
def test_all_layouts_are_one_run_in_eight_bits(
    tmp_path: Path, quantization: str, model: tuple[str, ...], layouts: tuple[str, ...]
) -> None:
    """Each layout once: what is cut is the same product in both types."""
    keys = (f"quantization={quantization}", *model, UNSAVED)
    whole = run(tmp_path / "whole", "one device, one pass", *keys)
    for layout in layouts:
        assert_same_in_eight_bits(run(tmp_path / layout, layout, *keys), whole, 2e-3)


@pytest.mark.usefixtures("standard_promotion")
def test_layouts_in_bfloat16_are_one_run_to_its_rounding(tmp_path: Path) -> None:
    keys = (
        "quantization=int8",
        "dtype=bfloat16",
        "global_batch_size=48",
        "steps=20",
        ONE_LAYER,
        UNSAVED,
    )
    whole = run(tmp_path / "whole", "one device, one pass", *keys, "per_device_batch_size=48")
    cut = run(tmp_path / "cut", "padding", *keys, "per_device_batch_size=2")
    assert_same_in_eight_bits(cut, whole, 2e-2, first=2e-2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("run")
    train(
        tiny_config(ONE_LAYER, "quantization=int8", "steps=2", f"run_dir={run_dir}"),
        jax.devices()[:1],
    )
    return run_dir


def test_adapters_stay_beside_matrices_in_eight_bits_on_any_layout(
    trained: Path, tmp_path: Path
) -> None:
    keys = (
        "lora_rank=2",
        f"load_parameters_path={trained}",
        "quantization=int8",
        "eval_interval=6",
        "eval_fraction=0.02",
        "steps=6",
    )
    whole = run(tmp_path / "whole", "one device, one pass", ONE_LAYER, *keys)
    cut = run(tmp_path / "cut", "context and tensor", ONE_LAYER, *keys)
    assert_same_in_eight_bits(cut, whole, 2e-3)

    base = load_parameters(trained)[2]
    config, _, _, adapters = load_adapters(tmp_path / "whole")
    config = config.replaced({"quantization": "int8"})
    applied = adapters_of(config.adapters, "int8")
    assert applied is not None
    model = nnx.merge(abstract_model(config)[0], applied.applied(base, adapters))
    held_out = open_stream(config, "eval")
    rows = held_out.read(0, held_out.samples_per_epoch)
    total, weight = jax.jit(lambda model: loss_sums(model, *rows.values()))(model)
    assert whole[-1]["eval_loss"] == pytest.approx(float(total / weight), rel=1e-5)
    assert len(load_model(tmp_path / "whole").score([{"text": "def main():\n"}]).records) == 1, (
        "merged, in dtype"
    )


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_a_record_scores_alike_beside_any_other_bit_for_bit(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], quantization: str
) -> None:
    shared, scores = {"text": "def main():\n    return 0\n"}, []
    for other in ("import sys, os, json\n\n", "~~~~~~~~~~~~~~~~~~~~~~\x7f"):
        file = tmp_path / "records.jsonl"
        file.write_text("".join(json.dumps(record) + "\n" for record in (shared, {"text": other})))
        assert (
            main(["score", str(trained), str(file), f"quantization={quantization}", "--json"]) == 0
        )
        scores.append(json.loads(capsys.readouterr().out)["records"])
    assert scores[0][0] == scores[1][0] and scores[0][1] != scores[1][1]


def test_a_trained_model_computes_in_dtype_unless_quantization_is_given(trained: Path) -> None:
    def loss(**stated: str) -> float | None:
        return load_model(trained, **stated).score([{"text": "def main():\n"}]).loss

    assert loss() == loss(quantization="") != loss(quantization="int8")


def test_a_resume_with_another_quantization_goes_on_and_tells(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny_config(ONE_LAYER, "steps=3", f"run_dir={trained}"), jax.devices()[:1])
    assert (
        'quantization: int8 before, "" now: changes the layers\' products'
        in capsys.readouterr().out
    )
    assert [line["step"] for line in read_metrics(trained)] == [1, 2, 3]
