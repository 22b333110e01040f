"""The clock: costs of a program from scheduled HLO, rule by rule, on texts of a few lines."""

from __future__ import annotations

import dataclasses

import pytest

from maxbatch.around.compile.clock import Operation, Schedule, schedule_of
from maxbatch.around.compile.hlo import read_hlo, shape_bytes
from maxbatch.system.hardware.chips import TPUS, Chip

# 1,000 FLOPs a cycle
CHIP = Chip(("TPU of a test",), None, tflops=1, hbm_gb_s=1, ici_gb_s=1, clock_ghz=1)


def cycles(number: int) -> str:
    return f'backend_config={{"window_config":{{"estimated_cycles":"{number}"}}}}'


def schedule(entry: str, computations: str = "", trips: int = 1, chip: Chip = CHIP) -> Schedule:
    text = (
        f"HloModule m, is_scheduled=true\n\n{computations}\nENTRY %main (p: f32[4]) -> f32[4] "
        f"{{\n{entry}\n}}\n\n"
    )
    return schedule_of(read_hlo(text), chip, trips)


WORK = f"  %work = f32[4]{{0:T(128)}} fusion(%p), kind=kLoop, calls=%fused, {cycles(100)}"


def test_cycles_of_fusions_add_up() -> None:
    assert (
        schedule(
            f"{WORK}\n  ROOT %more = f32[4]{{0}} fusion(%work), calls=%fused, {cycles(7)}"
        ).compute_cycles
        == 107
    )


@pytest.mark.parametrize(
    ("known", "condition", "turns"),
    [
        (', backend_config={"known_trip_count":{"n":"12"}}', "  %c = s32[] constant(3)", 12),
        (
            "",
            "  %c = s32[]{:T(128)} constant(5)\n  ROOT %lt = pred[] compare(%i, %c), direction=LT",
            5,
        ),
        ("", "  ROOT %lt = pred[] compare(%i, %n), direction=LT", 4),
    ],
    ids=["said", "in the condition", "an argument"],
)
def test_loops_are_multiplied_out(known: str, condition: str, turns: int) -> None:
    bodies = (
        f"%body (i: s32[]) -> s32[] {{\n{WORK}\n}}\n\n%cond (i: s32[]) -> pred[] "
        f"{{\n{condition}\n}}\n"
    )
    loop = f"  ROOT %loop = s32[] while(%p), condition=%cond, body=%body{known}"
    assert schedule(loop, bodies, trips=4).compute_cycles == 100 * turns


@pytest.mark.parametrize(("stride", "turns"), [(1, 8), (2, 4), (3, 3)])
def test_a_turn_of_an_unrolled_loop_counts_by_more_than_one(stride: int, turns: int) -> None:
    """The compiler unrolls loops that multiply one shard while the next arrives; they state no trip
    count.
    """
    condition = """  %n = u32[]{:T(128)} constant(8)
  %q = (f32[4], u32[]) parameter(0)
  %count = u32[]{:T(128)} get-tuple-element(%q), index=1
  ROOT %lt = pred[] compare(%count, %n), direction=LT"""
    body = f"""  %p = (f32[4], u32[]) parameter(0)
  %count = u32[]{{:T(128)}} get-tuple-element(%p), index=1
  %stride = u32[]{{:T(128)}} constant({stride})
{WORK}
  %next = u32[]{{:T(128)}} add(%count, %stride)
  %kept = u32[]{{:T(128)}} copy(%next)
  ROOT %both = (f32[4], u32[]) tuple(%work, %kept)"""
    bodies = (
        f"%body (i: s32[]) -> s32[] {{\n{body}\n}}\n\n%cond (i: s32[]) -> pred[] "
        f"{{\n{condition}\n}}\n"
    )
    found = schedule(
        "  ROOT %loop = (f32[4], u32[]) while(%p), condition=%cond, body=%body", bodies
    )
    assert found.compute_cycles == 100 * turns


def test_loops_in_loops_multiply() -> None:
    inner = f"%inner (i: s32[]) -> s32[] {{\n{WORK}\n}}\n\n"
    loop = (
        "%a = s32[] while(%i), condition=%c, body=%inner, "
        'backend_config={"known_trip_count":{"n":"3"}}'
    )
    outer = f"%outer (i: s32[]) -> s32[] {{\n  {loop}\n}}\n\n"
    assert (
        schedule(
            "  %b = s32[] while(%p), condition=%c, body=%outer", inner + outer, trips=5
        ).compute_cycles
        == 1500
    )


def test_of_branches_the_longest_counts() -> None:
    branches = (
        f"%skip (p: f32[4]) -> f32[4] {{\n}}\n\n%update (p: f32[4]) -> f32[4] {{\n{WORK}\n}}\n\n"
    )
    entry = "  %c = f32[4] conditional(%x, %p, %p), branch_computations={%skip, %update}"
    assert schedule(entry, branches).compute_cycles == 100


@pytest.mark.parametrize(
    ("operation", "num_bytes"),
    [
        ("bf16[64,8]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=1, dimensions={0}", 1024),
        ("f32[2]{0} reduce-scatter(%p), channel_id=1, dimensions={0}", 16),
        ("f32[4]{0} all-reduce(%p), channel_id=1, to_apply=%add", 32),
        ("f32[4]{0} collective-permute(%p), channel_id=1", 16),
    ],
    ids=[
        "whole output of a gather",
        "whole input of a scatter",
        "an all-reduce twice",
        "a permute once",
    ],
)
def test_bytes_are_those_that_cross_the_wire(operation: str, num_bytes: int) -> None:
    found = schedule(f"  %p = f32[4]{{0}} parameter(0)\n  %c = {operation}\n{WORK}")
    assert (found.exposed_collective_bytes, found.hidden_collective_bytes) == (num_bytes, 0)


PAIR = """  %p = f32[4]{0} parameter(0)
  %start = (f32[4]{0}, f32[64]{0}) all-gather-start(%p), channel_id=1
{between}
  %done = f32[64]{0} all-gather-done(%start)
"""


@pytest.mark.parametrize(
    ("between", "is_hidden"), [(WORK, True), ("  %b = f32[4] bitcast(%p)", False)]
)
def test_a_pair_is_hidden_if_computation_runs_between_start_and_done(
    between: str, is_hidden: bool
) -> None:
    found = schedule(PAIR.replace("{between}", between) + WORK.replace("%work", "%later"))
    assert (found.hidden_collective_bytes, found.exposed_collective_bytes) == (
        (256, 0) if is_hidden else (0, 256)
    )


@pytest.mark.parametrize(
    ("between", "is_hidden"), [(WORK, True), ("  %b = f32[4] bitcast(%p)", False)]
)
def test_a_collective_that_sparse_cores_run_is_a_pair_of_calls(
    between: str, is_hidden: bool
) -> None:
    body = (
        "  %q = f32[64]{0} parameter(0)\n  ROOT %r = f32[64]{0} all-reduce(%q), channel_id=2, "
        "to_apply=%add"
    )
    called = f'%called (q: f32[64]) -> f32[64] {{\n{body}\n}}, execution_thread="sparsecore"\n\n'
    entry = f"""  %start = (f32[64]{{0}}, u32[]) call-start(%g), async_execution_thread="sparsecore", to_apply=%called
{between}
  %done = f32[64]{{0}} call-done(%start)
"""
    found = schedule(entry + WORK.replace("%work", "%later"), called)
    assert (found.hidden_collective_bytes, found.exposed_collective_bytes) == (
        (512, 0) if is_hidden else (0, 512)
    )


@pytest.mark.parametrize(
    ("before", "after", "is_hidden"),
    [(WORK, "", False), ("", WORK, True)],
    ids=["before the operands", "after them"],
)
def test_a_collective_of_sparse_cores_runs_once_it_has_its_operands(
    before: str, after: str, is_hidden: bool
) -> None:
    """libtpu 0.0.46 and newer load the program of the SparseCores first, and hand over the operands
    later.
    """
    body = (
        "  %q = f32[8]{0} parameter(0)\n  ROOT %r = f32[64]{0} all-gather(%q), channel_id=2, "
        "dimensions={0}"
    )
    called = f'%called (q: f32[8]) -> f32[64] {{\n{body}\n}}, execution_thread="sparsecore"\n\n'
    entry = f"""  %start = ((), (), s32[9]) custom-call-start(), called_computations={{%called}}
{before}
  %update = ((f32[8]), f32[64], s32[9]) custom-call-update(%start, %g)
{after}
  %done = f32[64]{{0}} custom-call-done(%update)
"""
    found = schedule(entry + WORK.replace("%work", "%later"), called)
    assert (found.hidden_collective_bytes, found.exposed_collective_bytes) == (
        (256, 0) if is_hidden else (0, 256)
    )


def test_a_collective_that_was_joined_again_waits() -> None:
    """The compiler marks collectives whose start and done it joined again, since nothing ran
    between them.
    """
    joined = (
        "%c = f32[4]{0} all-reduce(%p), channel_id=1, "
        'frontend_attributes={async_collective_name="all-reduce-start"}'
    )
    found = schedule(f"  %p = f32[4]{{0}} parameter(0)\n{WORK}\n  {joined}")
    assert (found.exposed_collective_bytes, found.hidden_collective_bytes) == (32, 0)


GATHER = "  %g = f32[64]{0} all-gather(%q), channel_id=9, dimensions={0}"
SPREAD = "".join(
    f"%{name} (q: f32[4]) -> f32[64] {{\n  %q = f32[4]{{0}} parameter(0)\n{GATHER}\n}}\n\n"
    for name in ("begin", "async_collective_fusion.1", "end")
)


def test_a_collective_over_several_fusions_counts_once() -> None:
    entry = f"""  %a = f32[64]{{0}} fusion(%p), kind=kCustom, calls=%begin
  %b = f32[64]{{0}} fusion(%a), kind=kOutput, calls=%async_collective_fusion.1, {cycles(50)}
  %c = f32[64]{{0}} fusion(%b), kind=kCustom, calls=%end"""
    found = schedule(entry, SPREAD)
    assert (
        found.hidden_collective_bytes,
        found.exposed_collective_bytes,
        found.compute_cycles,
    ) == (256, 0, 50)


def test_fusions_of_a_collective_alone_hide_nothing() -> None:
    entry = "  %a = f32[64]{0} fusion(%p), calls=%begin\n  %c = f32[64]{0} fusion(%a), calls=%end"
    found = schedule(entry, SPREAD)
    assert (found.hidden_collective_bytes, found.exposed_collective_bytes) == (0, 256)


def test_a_fused_all_reduce_scatter_runs_in_the_open() -> None:
    body = (
        "  %q = f32[64]{0} parameter(0)\n  %r = f32[64]{0} all-reduce(%q), channel_id=2, "
        "to_apply=%add"
    )
    called = f"%all-reduce-scatter.3 (q: f32[64]) -> f32[4] {{\n{body}\n}}\n\n"
    found = schedule(
        f"  %a = f32[4]{{0}} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.3, {cycles(9)}",
        called,
    )
    assert (found.exposed_collective_bytes, found.hidden_collective_bytes) == (512, 0)


# As the printer breaks a kernel's line.
KERNEL = """  %q = bf16[8,2,1024,64]{3,2,1,0:T(8,128)(2,1)} parameter(0)
  %splash_mha_fwd_segmented.2 = f32[8]{0} custom-call(%q, %q), custom_call_target="tpu_custom_call", metadata={
"xprof_metadata":"{}"
}
}}, metadata={op_name="jit(f)/pallas_call"}, backend_config={"custom_call_config":{"body":"TUz"COST}}
%WORK"""


@pytest.mark.parametrize(
    ("cost", "expected"),
    [
        (',"cost_estimate":{"flops":"5000000","transcendentals":"1","bytes_accessed":"16"}', 5000),
        (',"cost_estimate":{"flops": 5000, "bytes_accessed": 16000}', 16000),
        ("", 8 * 2 * 1024 * 64 * 1024 * 2 * 2 // 2 // 1000),  # two products, half of them masked
    ],
    ids=["arithmetic", "memory", "splash, which states none"],
)
def test_kernels_count_apart_by_their_own_cost(cost: str, expected: int) -> None:
    found = schedule(KERNEL.replace("COST", cost).replace("%WORK", WORK))
    assert (found.kernel_cycles, found.compute_cycles) == (pytest.approx(expected, abs=1), 100)
    assert found.dearest(1)[0].name == "splash_mha_fwd_segmented"


def test_time_is_the_longer_of_computation_and_hidden_transfer_plus_what_is_exposed() -> None:
    said = {"compute_cycles": 2e9, "kernel_cycles": 1e9, "exposed_collective_bytes": 5e8}
    assert Schedule(**said, hidden_collective_bytes=1e9).seconds(CHIP) == pytest.approx(3.5)
    assert Schedule(**said, hidden_collective_bytes=4e9).seconds(CHIP) == pytest.approx(4.5)
    assert Schedule(**said).seconds(dataclasses.replace(CHIP, clock_ghz=None)) is None


def test_the_dearest_operations_are_named_with_their_source_line() -> None:
    tables = """FileNames
1 "/home/someone/maxbatch/model/decoder.py"
2 "/home/someone/site-packages/optax/update.py"

FileLocations
1 {file_name_id=1 function_name_id=1 line=73 end_line=73}
2 {file_name_id=2 function_name_id=1 line=9 end_line=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=1}

"""
    work = (
        'calls=%f, metadata={op_name="jit(step)/mlf,fd->mld/dot_general" stack_frame_id=2}, '
        f"{cycles(30)}"
    )
    found = schedule(
        f"  %a = f32[4] fusion(%p), {work}\n  %b = f32[4] fusion(%a), {work}\n{WORK}", tables
    )
    assert found.dearest(2) == [
        Operation("work", "", 100),
        Operation("mlf,fd->mld", "maxbatch/model/decoder.py:73", 60),
    ]


def test_bytes_of_shapes() -> None:
    assert (
        shape_bytes(
            "(f32[2,3]{1,0:T(8,128)}, bf16[4]{0}, pred[], s4[6], /*index=5*/u8[3], token[])"
        )
        == 24 + 8 + 1 + 3 + 3
    )


def test_peaks_are_what_the_matrix_units_do_per_cycle() -> None:
    per_cycle = {
        version: chip.tflops * 1e3 / (chip.clock_ghz or 1) for version, chip in TPUS.items()
    }
    units = {
        "v4": 8 * 128**2,
        "v5e": 4 * 128**2,
        "v5p": 8 * 128**2,
        "v6e": 4 * 256**2,
        "tpu7x": 4 * 256**2,
    }
    assert per_cycle == {
        version: pytest.approx(2 * number, rel=0.01) for version, number in units.items()
    }
