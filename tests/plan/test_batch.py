"""The batch plan: the identities of its numbers, and that the values its rejections name work."""

from __future__ import annotations

import shlex
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from maxbatch import BatchPlan, ConfigError, load_config
from maxbatch.plan.batch import ResumePoint, check_batch_keys

RAMP = ["enable_rampup_batch_size=true", "per_device_batch_size_increment=4"]


def plan_of(
    overrides: list[str], num_devices: int = 1, num_hosts: int = 1, **keywords: Any
) -> BatchPlan:
    return BatchPlan.from_config(
        load_config(overrides=overrides), num_devices, num_hosts, **keywords
    )


@given(
    st.integers(1, 12),
    st.integers(1, 5),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.integers(0, 4),
    st.integers(0, 4),
    st.sampled_from(["tensor", "pipeline", "data"]),
    st.sampled_from([1, 2]),
)
def test_the_numbers_follow_from_one_another(
    rows: int, g: int, num_devices: int, hosts_log: int, e_log: int, axis: str, size: int
) -> None:
    num_hosts = min(2**hosts_log, num_devices)
    e = min(2**e_log, num_hosts)
    size = min(size, num_devices)
    overrides = [f"per_device_batch_size={rows}", f"gradient_accumulation_steps={g}"]
    overrides += [f"expansion_factor_real_data={e}", f"ici_{axis}_parallelism={size}"]
    plan = plan_of(overrides, num_devices, num_hosts).to_dict()
    p = plan["per_device_batch_size"]
    batch = plan["global_batch_size_to_train_on"]
    assert (p, plan["gradient_accumulation_steps"]) == (rows, g)
    assert plan["micro_batch_size_to_train_on"] == p * num_devices
    assert batch == p * num_devices * g
    assert plan["per_replica_batch_size"] * plan["num_replicas"] == batch
    assert plan["global_batch_size_to_load"] == batch * e
    assert plan["num_loading_hosts"] * e == num_hosts
    assert plan["num_pipeline_stages"] == (size if axis == "pipeline" else 1)
    assert plan["batch_shards"] * (1 if axis == "data" else size) == num_devices
    assert plan["pipeline_microbatch_size"] * plan["num_pipeline_microbatches"] == p * num_devices
    assert plan["tokens_per_step"] == batch * 256
    assert plan["total_samples"] == 200 * batch
    assert all(
        isinstance(value, int)
        for name, value in plan.items()
        if name != "pipeline_bubble" and isinstance(value, int | float)
    )


@given(st.integers(1, 64), st.sampled_from([1, 2, 4, 8, 16]))
def test_a_global_batch_is_kept_on_any_number_of_devices(units: int, num_devices: int) -> None:
    plan = plan_of([f"global_batch_size={16 * units}", "per_device_batch_size=4"], num_devices)
    assert plan.global_batch_size_to_train_on == 16 * units
    assert plan.micro_batch_size_to_train_on <= 4 * num_devices
    if 16 * units % (4 * num_devices) == 0:
        assert plan.gradient_accumulation_steps == 16 * units // (4 * num_devices)


def test_a_plan_for_a_pod() -> None:
    overrides = [
        "per_device_batch_size=2",
        "gradient_accumulation_steps=4",
        "expansion_factor_real_data=8",
    ]
    overrides += ["ici_tensor_parallelism=8", "dcn_data_parallelism=4", "train_tokens=10B"]
    overrides += ["base_num_query_heads=8"]
    plan = plan_of(overrides, 10240, 2560, num_slices=4, samples_per_epoch=1_000_000).to_dict()
    assert plan["batch_shards"] == 1280
    assert (plan["global_batch_size_to_train_on"], plan["global_batch_size_to_load"]) == (
        81920,
        655360,
    )
    assert plan["num_loading_hosts"] == 320
    assert (plan["total_samples"], plan["total_steps"]) == (39062500, 477)
    assert (plan["steps_per_epoch"], plan["epochs"]) == (13, 39.0625)


def test_a_mesh_that_does_not_work_leads_to_one_that_keeps_rows_times_passes() -> None:
    stated = ["per_device_batch_size=0.75", "gradient_accumulation_steps=6"]
    stated += ["base_num_query_heads=10", "ici_tensor_parallelism=4"]
    with pytest.raises(ConfigError, match="ici_tensor_parallelism=4: ") as refusal:
        plan_of(stated, 32)
    works = str(refusal.value).partition("works: ")[2].split()
    changed = tuple(text.partition("=")[0] for text in works)
    plan = plan_of([*(text for text in stated if not text.startswith(changed)), *works], 32)
    assert plan.global_batch_size_to_train_on == 144  # 0.75 x 32 devices x 6


def test_fractions_of_a_row_per_device_are_exact() -> None:
    overrides = [
        "ici_fsdp_parallelism=1",
        "ici_tensor_parallelism=-1",
        "gradient_accumulation_steps=3",
    ]
    overrides += ["base_num_query_heads=60"]
    plan = plan_of([*overrides, "per_device_batch_size=1/3"], 12)
    assert plan.per_device_batch_size == Fraction(1, 3)
    assert (plan.micro_batch_size_to_train_on, plan.num_replicas, plan.per_replica_batch_size) == (
        4,
        1,
        12,
    )
    assert plan_of([*overrides, "per_device_batch_size=0.1"], 30).micro_batch_size_to_train_on == 3


def test_the_top_level_numbers_are_the_last_stages() -> None:
    plan = plan_of([*RAMP, "gradient_accumulation_steps=2"], 2).to_dict()
    last = plan["stages"][-1]
    assert plan["global_batch_size_to_train_on"] == last["global_batch_size"] == 64
    assert (plan["rampup_end_step"], plan["rampup_end_sample"]) == (
        last["first_step"],
        last["first_sample"],
    )
    assert sum(stage["num_steps"] for stage in plan["stages"]) == plan["total_steps"] == 200
    assert sum(stage["num_samples"] for stage in plan["stages"]) == plan["total_samples"]
    assert set(last) == {
        "per_device_batch_size",
        "global_batch_size",
        "gradient_accumulation_steps",
        "micro_batch_size_to_train_on",
        "first_step",
        "num_steps",
        "first_sample",
        "num_samples",
        "learning_rate_scale",
        "adam_b1",
        "adam_b2",
        "adam_weight_decay",
        "parameter_average",
        "padded_slots_per_step",
        "tokens_per_step",
    }
    constant = plan_of([]).to_dict()
    assert (
        constant["rampup_end_step"],
        constant["rampup_end_sample"],
        len(constant["stages"]),
    ) == (0, 0, 1)


def test_a_run_that_ends_inside_its_ramp_is_warned_about() -> None:
    short, exact, long = (plan_of([*RAMP, f"train_samples={n}"]) for n in (499, 500, 501))
    assert "ends inside its ramp" in short.warnings[0]
    assert exact.warnings == long.warnings == ()
    assert short.rampup_end_sample == long.rampup_end_sample


def test_unknown_epochs_are_null() -> None:
    plan = plan_of(["num_epochs=2"]).to_dict()
    assert plan["total_steps"] is plan["total_samples"] is plan["steps_per_epoch"] is None
    assert plan["epochs"] == 2
    assert plan["stages"][0]["num_steps"] is None
    known = plan_of(["num_epochs=2"], samples_per_epoch=100).to_dict()
    assert (known["total_steps"], known["total_samples"], known["steps_per_epoch"]) == (13, 200, 7)


def test_a_plan_before_the_data_is_open_leaves_the_comparison_of_lengths_to_the_run() -> None:
    # `rl`, `compile` and simulated hosts plan so, to refuse other faults before a file is read.
    assert plan_of(["num_epochs=2", "steps=13"]).manager.total_steps == 13
    assert plan_of(["num_epochs=2", "steps=13"], samples_per_epoch=104).manager.total_steps == 13
    with pytest.raises(ConfigError, match="steps=14: must agree with num_epochs=2"):
        plan_of(["num_epochs=2", "steps=14"], samples_per_epoch=104)


def test_eval_has_its_own_arithmetic() -> None:
    assert plan_of(["gradient_accumulation_steps=4"], 4).eval_batch_size == 64
    assert plan_of(["eval_per_device_batch_size=3"], 4).eval_batch_size == 12
    # As a cap, p need not be a multiple of anything; eval takes what fits under it.
    assert plan_of(["global_batch_size=64", "per_device_batch_size=2.9"], 4).eval_batch_size == 8


def test_the_layout_is_axolotls_example() -> None:
    plan = plan_of(["per_device_batch_size=3", "gradient_accumulation_steps=2"], 3)
    assert plan.layout() == [[(0, 3), (3, 6), (6, 9)], [(9, 12), (12, 15), (15, 18)]]


# --- rejections ---------------------------------------------------------------------------------------------


def plan_as_told(
    error: ConfigError, stated: dict[str, str], num_devices: int, num_hosts: int = 1
) -> None:
    """Plans with the message's settings in place of the stated ones."""
    works = dict(word.split("=", 1) for word in shlex.split(str(error).partition("; works: ")[2]))
    assert works
    plan_of([f"{key}={value}" for key, value in (stated | works).items()], num_devices, num_hosts)


def sizes(most: int) -> st.SearchStrategy[str]:
    """Numbers of rows per device as they are written: whole, fractions, decimals."""
    fractions = st.tuples(st.integers(1, 6 * most), st.integers(1, 6)).map(
        lambda f: f"{f[0]}/{f[1]}"
    )
    return (
        st.integers(1, most).map(str)
        | fractions
        | st.sampled_from(["0.1", "0.25", "1.5", "2.3", "7.5"])
    )


@given(
    sizes(8),
    sizes(9),
    sizes(40),
    st.booleans(),
    st.sampled_from([1, 2, 4, 6, 12]),
    st.sampled_from([1, 2]),
)
def test_what_is_named_in_place_of_a_ramp_works(
    start: str, increment: str, target: str, falls: bool, num_devices: int, tensor: int
) -> None:
    assume(num_devices % tensor == 0)
    stated = {
        "enable_rampup_batch_size": "true",
        "global_rampup_samples": "1000",
        "per_device_batch_size_start": start,
        "per_device_batch_size_increment": f"-{increment}" if falls else increment,
        "per_device_batch_size": target,
        "ici_tensor_parallelism": str(tensor),
    }
    try:
        plan_of([f"{key}={value}" for key, value in stated.items()], num_devices)
    except ConfigError as error:
        plan_as_told(error, stated, num_devices)


@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=3),
    sizes(8),
    st.integers(1, 14),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2]),
)
def test_what_is_named_in_place_of_batches_in_a_pipeline_works(
    batches: list[int], rows: str, parts: int, num_devices: int, pipeline: int
) -> None:
    assume(num_devices % pipeline == 0)
    stated = {
        "batch_size_schedule": " ".join(f"{100 * i}:{batch}" for i, batch in enumerate(batches)),
        "per_device_batch_size": rows,
        "num_pipeline_microbatches": str(parts * pipeline),
        "ici_pipeline_parallelism": str(pipeline),
    }
    try:
        plan_of([f"{key}={value}" for key, value in stated.items()], num_devices)
    except ConfigError as error:
        plan_as_told(error, stated, num_devices)


def test_what_needs_no_devices_is_checked_without_them() -> None:
    for overrides in (
        ["expansion_factor_real_data=0"],
        [*RAMP, "per_device_batch_size=15"],
        ["batch_size_schedule=1:2"],
    ):
        with pytest.raises(ConfigError):
            check_batch_keys(load_config(overrides=overrides).plan)
    check_batch_keys(load_config(overrides=["per_device_batch_size=0.3"]).plan)


@pytest.mark.parametrize(
    ("e", "hosts_now", "hosts_then", "works"),
    [
        ("0.5", 2, 4, None),
        ("1/3", 2, 6, None),
        ("0.5", 2, None, None),  # nothing to check it against
        ("0.5", 4, 4, None),  # the same command again, on the same hosts
        ("-1", 2, 8, None),
        ("0.5", 2, 8, "0.25"),
        ("0.5", 8, 2, "-1"),
        ("0.5", 4, 6, "-1"),
    ],
)
def test_a_factor_below_one_must_be_hosts_now_over_hosts_then(
    e: str, hosts_now: int, hosts_then: int | None, works: str | None
) -> None:
    override = [f"expansion_factor_real_data={e}"]
    resume = ResumePoint(hosts=hosts_then, loading_hosts=hosts_then)
    if works is None:
        plan = plan_of(override, 8, hosts_now, resume=resume)
        # The full batch is trained, and by all hosts.
        assert plan.global_batch_size_to_load == plan.global_batch_size_to_train_on == 128
        assert plan.num_loading_hosts == hosts_now
        return
    with pytest.raises(ConfigError, match=f"works: expansion_factor_real_data={works}$") as caught:
        plan_of(override, 8, hosts_now, resume=resume)
    plan_of([str(caught.value).partition("works: ")[2]], 8, hosts_now, resume=resume)


def test_a_factor_below_one_counts_the_hosts_that_loaded() -> None:
    """4 hosts of which 2 loaded, then 1: half as many load."""
    plan_of(["expansion_factor_real_data=0.5"], 8, 1, resume=ResumePoint(hosts=4, loading_hosts=2))
    with pytest.raises(ConfigError, match=r"1/2; works: expansion_factor_real_data=0.5$"):
        plan_of(
            ["expansion_factor_real_data=0.25"], 8, 1, resume=ResumePoint(hosts=4, loading_hosts=2)
        )


def test_a_replica_holds_the_whole_model_however_many_devices_it_is() -> None:
    overrides = ["ici_tensor_parallelism=4", "ici_pipeline_parallelism=2", "ici_data_parallelism=2"]
    plan = plan_of(
        [*overrides, "gradient_accumulation_steps=3", "per_device_batch_size=2"], 32, 8
    ).to_dict()
    assert (plan["num_replicas"], plan["batch_shards"]) == (4, 4)
    assert (plan["global_batch_size_to_train_on"], plan["per_replica_batch_size"]) == (192, 48)
    # A replica of 8 devices spans two hosts of 4: both read all of its rows.
    assert (plan["samples_per_host"], plan["rows_per_loading_host"]) == (24, 48)
    on_one_host = plan_of(
        ["per_device_batch_size=2", "expansion_factor_real_data=4"], 16, 8
    ).to_dict()
    assert (on_one_host["samples_per_host"], on_one_host["rows_per_loading_host"]) == (4, 16)
    assert plan_of(["per_device_batch_size=2"], 16, 8).rows_per_loading_host == 4


@pytest.mark.parametrize("axis", ["data", "fsdp", "tensor", "context", "pipeline"])
@pytest.mark.parametrize("slices", [1, 2])
def test_a_loading_host_reads_no_more_than_the_batch(axis: str, slices: int) -> None:
    overrides = [f"dcn_{axis}_parallelism=2", "global_batch_size=128"]
    config = load_config(overrides=overrides)
    alone = BatchPlan.from_config(config, 4, 1, num_slices=slices)
    assert alone.rows_per_loading_host == alone.samples_per_host == 128
    split = 2 if axis in ("data", "fsdp") else 1  # over slices, the other axes replicate the rows
    on_two_hosts = BatchPlan.from_config(config, 8, 2, num_slices=2)
    assert on_two_hosts.rows_per_loading_host == 128 // split


def test_the_ramp_has_maxtexts_defaults_and_its_increments_are_exact() -> None:
    plan = plan_of(["enable_rampup_batch_size=true", "global_rampup_samples=1000"]).to_dict()
    assert (plan["num_increments"], plan["samples_per_increment"]) == (6, 1000 / 6)
    assert [stage["per_device_batch_size"] for stage in plan["stages"]] == [4, 6, 8, 10, 12, 14, 16]
    whole = plan_of(["enable_rampup_batch_size=true", "global_rampup_samples=600"]).to_dict()
    assert whole["samples_per_increment"] == 100 and isinstance(whole["samples_per_increment"], int)
    constant = plan_of(["batch_size_schedule=0:8 100:16"]).to_dict()
    assert constant["num_increments"] is constant["samples_per_increment"] is None


def test_rows_per_device_follow_from_the_global_batch_and_its_steps() -> None:
    stated = ["global_batch_size=32", "gradient_accumulation_steps=2"]
    for devices, rows in ((1, 16), (4, 4), (16, 1)):
        plan = plan_of(stated, devices)
        assert (plan.per_device_batch_size, plan.gradient_accumulation_steps) == (rows, 2)
        assert plan.global_batch_size_to_train_on == 32
    with pytest.raises(ConfigError, match=r"works: global_batch_size=24$"):
        plan_of(["global_batch_size=25", "gradient_accumulation_steps=3"], 8)
    assert plan_of([*stated, "eval_per_device_batch_size=0"], 4).eval_batch_size == 16


def test_what_is_read_counts_prompts_in_reinforcement_learning() -> None:
    plan = plan_of(["batch_size=16", "num_generations=4"], 4, 2).to_dict()
    assert (plan["global_batch_size_to_train_on"], plan["global_batch_size_to_load"]) == (64, 16)


def test_a_batch_that_repeats_its_samples_draws_a_warning() -> None:
    config = load_config(overrides=["global_batch_size=64", "steps=3"])
    [warning] = BatchPlan.from_config(config, 1, samples_per_epoch=3).warnings
    assert (
        warning
        == "a batch of 64 samples is larger than an epoch of 3 samples: an update holds each of "
        "them 21 times or more"
    )
    assert (
        "some of them twice" in BatchPlan.from_config(config, 1, samples_per_epoch=40).warnings[0]
    )
    assert not BatchPlan.from_config(config, 1, samples_per_epoch=64).warnings
