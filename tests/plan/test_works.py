"""What a message names after `works:` is followed to its end: it works, with the rest of the config
left as it is.
"""

from __future__ import annotations

import itertools
import shlex
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxbatch import BatchPlan, ConfigError, load_config
from maxbatch.plan.batch import ResumePoint
from maxbatch.plan.place import Place
from maxbatch.plan.refusal import Refusal

MACHINE = ("num_devices", "num_hosts", "num_slices")
Stated = dict[str, str]

SIZES = ["1", "2", "3", "4", "6", "7", "12", "64"]
HUGE = ["2147483648", "1099511627776", "1099511627777", "9223372036854775807"]
ROWS = ["0", "-1", "1/3", "0.1", "0.5", "2.5", "7/3", "3e-9", "2147483647.5", *SIZES, *HUGE]
SCHEDULES = [
    "0:30 100:64",
    "100:512 0:256",
    "5:8 10:16",
    "0:8 10:16 10:32",
    "0:7 3t:9 5t:11",
    "0:1099511627776 1:3",
    "8",
    ",",
    "0:0",
    "0:8 9223372036854775807:9",
    "0:8 99999999999999999999:9",
    " ".join(f"{i * 37}:{i + 3}" for i in range(200)),
]
AXES = st.sampled_from(["data", "fsdp", "tensor", "context", "pipeline"])
AXIS_KEYS = st.tuples(st.sampled_from(["ici", "dcn"]), AXES).map("{0[0]}_{0[1]}_parallelism".format)


def keys(values: dict[str, list[str]]) -> st.SearchStrategy[tuple[str, str]]:
    return st.one_of(
        [st.tuples(st.just(key), st.sampled_from(texts)) for key, texts in values.items()]
    )


AXIS = st.tuples(AXIS_KEYS, st.sampled_from(["-1", "0", *SIZES, "4294967296"]))
MODEL = keys(
    {
        "base_num_query_heads": ["6", "8", "30"],
        "base_num_decoder_layers": ["1", "6", "7", "9223372036854775783"],
        "max_target_length": ["2", "255", "1024"],
        "num_pipeline_repeats": [*SIZES, *HUGE],
        "num_pipeline_microbatches": ["-1", "0", *SIZES, *HUGE],
        "eval_per_device_batch_size": ROWS,
        "expansion_factor_real_data": [
            "-1",
            "0",
            "-2",
            "0.5",
            "0.4",
            "2/3",
            "3e-300",
            "2.5",
            "8",
            *SIZES,
            *HUGE,
        ],
    }
)
LENGTHS = keys(
    {
        "steps": ["0", "7", "9223372036854775807"],
        "train_samples": ["0", "100", "9000000B"],
        "num_epochs": ["0", "1.5", "1e-9"],
    }
)
BATCH = keys(
    {
        "per_device_batch_size": ROWS,
        "gradient_accumulation_steps": ["0", *SIZES, *HUGE],
        "global_batch_size": ["0", "30", *SIZES, *HUGE],
        "batch_size_schedule": SCHEDULES,
        "adam_b1": ["0", "0.9"],
        "reference_batch_size": ["0", "2", *HUGE],
    }
)
RAMP = keys(
    {
        "per_device_batch_size_start": ROWS,
        "per_device_batch_size_increment": ["-2", "-0.7", "3e-999", *ROWS],
        "per_device_batch_size": ROWS,
        "global_rampup_samples": ["0", "1", "500"],
        "gradient_accumulation_steps": ["0", *SIZES, *HUGE],
    }
)
PROMPTS = keys(
    {
        "batch_size": ["0", "2147483649", *SIZES, *HUGE],
        "num_generations": ["0", *SIZES, *HUGE],
        "micro_batch_size": ["-4", "-1", "0", "453284", *SIZES, *HUGE],
        "train_micro_batch_size": ["-4", "-1", "453284", *SIZES, *HUGE],
        "rollout_micro_batch_size": ["-1", "453284", *SIZES, *HUGE],
        "num_iterations": [*SIZES, *HUGE],
        "trainer_devices_fraction": ["0", "0.5", "0.75", "1/3", "1", "2"],
        "sampler_devices_fraction": ["0.25", "0.5", "1/7", "1"],
        "rollout_data_parallelism": ["-1", *SIZES, *HUGE],
        "rollout_tensor_parallelism": ["-1", *SIZES, *HUGE],
        "max_prefill_predict_length": ["256", "9223372036854775807"],
        "train_tokens": ["100"],
        "adam_b1": ["0"],
    }
)
STARTS = [
    ({}, BATCH),
    ({"enable_rampup_batch_size": "true"}, RAMP),
    ({"batch_size": "8"}, PROMPTS),
    ({"adam_scaling": "sde", "learning_rate_scaling": "sqrt"}, BATCH),
]


@st.composite
def statements(draw: st.DrawFn) -> Stated:
    start, own = draw(st.sampled_from(STARTS))
    mutations = draw(st.lists(st.one_of(own, own, AXIS, MODEL, LENGTHS), min_size=1, max_size=4))
    return start | dict(mutations)


def plan_of(stated: Stated, machine: dict[str, int], **keywords: Any) -> BatchPlan:
    config = load_config(overrides=[f"{key}={value}" for key, value in stated.items()])
    return BatchPlan.from_config(config, **machine, **keywords)


def follow(stated: Stated, machine: dict[str, int], **keywords: Any) -> list[str]:
    """Returns the messages until a plan succeeds."""
    messages: list[str] = []
    refused = False
    for _ in range(12):
        try:
            plan_of(stated, machine, **keywords)
            return messages
        except ConfigError as error:
            said, _, works = str(error).partition("; works: ")
            assert not refused, f"{messages[-1]}\ndid not work: {error}"
            assert str(error) not in messages, f"a circle: {error}"
            assert len(said.partition("=")[2].partition(": ")[0]) <= 80, (
                "a value is not repeated whole"
            )
            refused = isinstance(error, Refusal)
            messages.append(str(error))
            for word in shlex.split(works.partition(", or ")[0]):
                key, value = word.split("=", 1)
                if key in MACHINE:
                    machine = machine | {key: int(value)}
                else:
                    stated = stated | {key: value}
    pytest.fail("\n".join(messages))


@pytest.mark.runs
@settings(max_examples=500)
@given(
    statements(),
    st.sampled_from([1, 2, 3, 4, 6, 8, 12, 10240]),
    st.sampled_from([1, 2, 3, 4, 2560]),
    st.sampled_from([1, 1, 2, 3, 10**9]),
    st.sampled_from([None, 100]),
    st.sampled_from([ResumePoint(), ResumePoint(3, Place(100)), ResumePoint(3, Place(100), 2, 2)]),
)
def test_what_a_message_names_works(
    stated: Stated,
    devices: int,
    hosts: int,
    slices: int,
    samples_per_epoch: int | None,
    resume: ResumePoint,
) -> None:
    machine = {"num_devices": devices, "num_hosts": hosts, "num_slices": slices}
    follow(stated, machine, samples_per_epoch=samples_per_epoch, resume=resume)


def batch_at(schedule: str, position: int) -> int:
    stages = [tuple(map(int, word.split(":"))) for word in schedule.split()]
    return max(stage for stage in stages if stage[0] <= position)[1]


@pytest.mark.parametrize("stages", [2, 9, 12, 25, 40, 60, 126, 400])
@pytest.mark.parametrize("devices", [3, 8, 16])
def test_a_schedule_that_works_keeps_every_threshold_and_every_batch(
    stages: int, devices: int
) -> None:
    thresholds = [i * 300_000 // stages for i in range(stages)]
    batches = [devices + 7 * i for i in range(stages)]
    stated = " ".join(
        f"{position}:{batch}" for position, batch in zip(thresholds, batches, strict=True)
    )
    machine = {"num_devices": devices}
    messages = follow({"batch_size_schedule": stated}, machine)
    assert len(messages) == 1 and "batch_padding=true keeps every batch" in messages[0]
    [works] = shlex.split(messages[0].partition("; works: ")[2])
    key, value = works.split("=", 1)
    if key == "batch_padding":
        assert len(stated) > 400
        plan = plan_of({"batch_size_schedule": stated, key: value}, machine)
        assert [stage.global_batch_size for stage in plan.stages] == batches
        return
    assert len(value) <= 500
    for position, batch in zip(thresholds, batches, strict=True):
        assert abs(batch_at(value, position) - batch) <= devices / 2
    texts = [word.partition(":")[2] for word in value.split()]
    assert all(before != after for before, after in itertools.pairwise(texts)), (
        "no stage is in it twice"
    )


def test_a_long_schedule_with_a_wrong_pair_names_the_pair() -> None:
    stages = [f"{i * 1000}:{8 * i + 8}" for i in range(100)]
    for wrong, said in (
        ("500:8", "thresholds must rise, 500:8 does not"),
        (
            "200000:1000000t",
            "1000000t: tokens of a batch must be whole samples of 256 tokens, such as 999936t",
        ),
    ):
        with pytest.raises(ConfigError, match=f"{said}$"):
            plan_of({"batch_size_schedule": " ".join([*stages, wrong])}, {"num_devices": 8})
