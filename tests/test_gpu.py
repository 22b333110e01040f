"""On one NVIDIA GPU: the kernels that no CPU runs, the edge of the memory, and the speed beside the update by hand."""

from __future__ import annotations

import pytest

from benchmarks import gpu
from benchmarks.gpu import ONE_B, SEVEN_B, Bench, Gpu
from benchmarks.measurement import Measurement

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


@pytest.mark.usefixtures("device")
def test_cudnn_attention_is_the_plain_path_to_rounding(bench: Bench) -> None:
    assert_passed(gpu.attention(bench))


@pytest.mark.usefixtures("device")
def test_the_batch_that_fit_finds_trains_and_one_row_more_is_refused(bench: Bench) -> None:
    (rows,) = gpu.fit_edge(bench)
    assert rows.value >= 1


def test_an_update_of_a_1b_is_as_fast_as_by_hand(bench: Bench, device: Gpu) -> None:
    assert_passed(gpu.speed(bench, device, "1B", ONE_B))


def test_an_update_of_the_layers_of_a_7b_that_fit_is_as_fast_as_by_hand(bench: Bench, device: Gpu) -> None:
    layers = gpu.layers_that_fit(device.memory_bytes)
    assert_passed(gpu.speed(bench, device, "7B", (*SEVEN_B, f"base_num_decoder_layers={layers}")))
