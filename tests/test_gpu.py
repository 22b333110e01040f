"""On one NVIDIA GPU: the kernels that no CPU runs, the edge of the memory, and the speed beside the
update by hand.
"""

from __future__ import annotations

import pytest

from benchmarks import gpu
from benchmarks.commands import metrics_of
from benchmarks.gpu import ONE_B, SEVEN_B, Bench, Gpu
from benchmarks.measurement import Measurement
from benchmarks.trainer import RUN

# Widths at which cuDNN's attention and 8-bit products run.
CUT = (
    *RUN,
    "base_emb_dim=128",
    "base_num_query_heads=4",
    "base_num_kv_heads=2",
    "head_dim=64",
    "base_mlp_dim=256",
    "base_num_decoder_layers=2",
    "max_target_length=256",
    "vocab_size=512",
    "logits_via_embedding=false",
    "global_batch_size=8",
    "learning_rate=1e-3",
    "steps=4",
)

pytestmark = [pytest.mark.slow, pytest.mark.gpu]


@pytest.fixture(autouse=True)
def lenient_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX's own promotion of ranks: the update by hand is written as others write."""
    monkeypatch.setenv("JAX_NUMPY_RANK_PROMOTION", "allow")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """One time limit for the whole group."""
    return Bench(tmp_path_factory.mktemp("gpu"))


@pytest.fixture(scope="module")
def device(bench: Bench) -> Gpu:
    """The GPU, which every test of this group needs."""
    found = gpu.find_gpu(bench)
    if found is None:
        pytest.skip("no GPU here")
    return found


def assert_passed(figures: list[Measurement]) -> None:
    """Every bar is reached, and there is one: figures without a bar ask nothing of the GPU."""
    verdicts = {figure.name: figure.passed for figure in figures if figure.passed is not None}
    assert verdicts and all(verdicts.values()), figures


def assert_same_in_four_micro_batches(
    bench: Bench, dtype: str, quantization: str, tolerance: float
) -> None:
    """Four updates of eight rows, in one pass and in four, have the same losses and gradient
    norms.
    """
    records = []
    for rows in (8, 2):
        name = f"{dtype}-{quantization}-{rows}"
        cut = (f"per_device_batch_size={rows}", f"run_dir={bench.folder / name}")
        variables = (
            {"XLA_FLAGS": "--xla_gpu_enable_triton_gemm=false"} if quantization == "int8" else {}
        )
        bench.run(
            name,
            "maxbatch",
            "train",
            *CUT,
            f"dtype={dtype}",
            f"quantization={quantization}",
            *cut,
            **variables,
        )
        records.append(metrics_of(bench.folder / name))
    for one, other in zip(*records, strict=True):
        assert one["data_fingerprint"] == other["data_fingerprint"]
        assert (one["loss"], one["grad_norm"]) == pytest.approx(
            (other["loss"], other["grad_norm"]), rel=tolerance
        )


@pytest.mark.usefixtures("device")
def test_cudnn_attention_is_the_plain_path_to_rounding(bench: Bench) -> None:
    assert_passed(gpu.attention(bench))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("dtype", "quantization", "tolerance"),
    [
        ("float32", "", 1e-4),
        ("bfloat16", "", 2e-2),
        ("bfloat16", "fp8", 2e-2),
        ("bfloat16", "int8", 2e-2),
    ],
)
def test_the_update_does_not_depend_on_the_cut(
    bench: Bench, dtype: str, quantization: str, tolerance: float
) -> None:
    assert_same_in_four_micro_batches(bench, dtype, quantization, tolerance)


@pytest.mark.usefixtures("device")
def test_the_batch_that_fit_finds_trains_and_one_row_more_is_refused(bench: Bench) -> None:
    (rows,) = gpu.fit_edge(bench)
    assert rows.value >= 1


def test_an_update_of_a_1b_is_as_fast_as_by_hand(bench: Bench, device: Gpu) -> None:
    assert_passed(gpu.speed(bench, device, "1B", ONE_B))


def test_an_update_of_the_layers_of_a_7b_that_fit_is_as_fast_as_by_hand(
    bench: Bench, device: Gpu
) -> None:
    layers = gpu.layers_that_fit(device.memory_bytes)
    assert_passed(gpu.speed(bench, device, "7B", (*SEVEN_B, f"base_num_decoder_layers={layers}")))
