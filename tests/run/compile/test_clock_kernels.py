"""The cycles of custom kernels: splash attention, which states no cost of its own."""

from __future__ import annotations

import pytest

from maxbatch.around.compile.clock import schedule_of
from maxbatch.around.compile.hlo import read_hlo
from maxbatch.system.hardware.chips import Chip

# 1,000 FLOPs a cycle
CHIP = Chip(("TPU of a test",), None, tflops=1, hbm_gb_s=1, ici_gb_s=1, clock_ghz=1)
# cycles of one product, of all queries with all keys
PRODUCT = 8 * 2 * 1024 * 64 * 1024 * 2 // 1000
QUERIES = "bf16[8,2,1024,64]{3,2,1,0}"


def splash(phase: str, blocks: str = "{}", grid: str = "s8[1,4,4]", result: str = QUERIES) -> float:
    """Returns the cycles of a splash kernel on 1,024 queries and keys."""
    text = f"""HloModule m, is_scheduled=true

ENTRY %main (g: {grid}, q: bf16[8,2,1024,64]) -> f32[8] {{
  %g = {grid}{{2,1,0}} parameter(0)
  %q = {QUERIES} parameter(1)
  ROOT %splash_{phase}.1 = (f32[8,256,128]{{2,1,0}}, {result}) custom-call(%g, %g, %q, %q, %q), \
custom_call_target="tpu_custom_call", frontend_attributes={{kernel_metadata={{
"xprof_metadata":"{blocks}"
}}}}
}}

"""
    return schedule_of(read_hlo(text), CHIP).kernel_cycles


def blocks(suffix: str, q: int, kv: int) -> str:
    return rf"{{\"block_q{suffix}\": {q}, \"block_kv{suffix}\": {kv}, \"block_kv{suffix}_compute\": 128}}"


@pytest.mark.parametrize(
    ("phase", "products"), [("mha_fwd", 2), ("mha_dq", 3), ("mha_dkv", 4), ("mqa_fwd", 2)]
)
def test_splash_counts_its_products_half_of_them_masked_if_it_states_no_blocks(
    phase: str, products: int
) -> None:
    assert splash(phase) == pytest.approx(0.5 * products * PRODUCT, rel=0.001)


@pytest.mark.parametrize(
    ("q", "kv", "share"),
    [(256, 256, 10 / 16), (1024, 1024, 1), (512, 256, 6 / 8), (256, 512, 6 / 8)],
    ids=["ten of 16 blocks", "one block", "wide queries", "wide keys"],
)
def test_a_block_that_the_mask_cuts_is_computed_whole(q: int, kv: int, share: float) -> None:
    grid = f"s8[1,{1024 // q},{1024 // kv}]"
    assert splash("mha_fwd", blocks("", q, kv), grid) == pytest.approx(
        share * 2 * PRODUCT, rel=0.001
    )


def test_the_blocks_are_those_of_the_phase() -> None:
    stated = blocks("", 1024, 1024) + blocks("_dq", 256, 256)
    assert splash("mha_dq", stated) == pytest.approx(10 / 16 * 3 * PRODUCT, rel=0.001)


def test_a_window_visits_fewer_blocks() -> None:
    assert splash("mha_fwd", blocks("", 256, 256), "s8[1,4,2]") == pytest.approx(
        8 / 16 * 2 * PRODUCT, rel=0.001
    )


def test_a_fused_backward_makes_the_gradient_of_the_queries_as_well() -> None:
    by_blocks_of_keys = "bf16[8,4,2,1024,64]{4,3,2,1,0}"
    assert splash("mha_dkv", result=by_blocks_of_keys) == pytest.approx(
        0.5 * 5 * PRODUCT, rel=0.001
    )
