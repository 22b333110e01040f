"""What `plan` says of rows that several devices share."""

from __future__ import annotations

import pytest

from maxbatch import BatchPlan, load_config

MODEL = (
    "base_num_query_heads=32",
    "base_num_kv_heads=8",
    "head_dim=128",
    "dtype=bfloat16",
    "max_target_length=4096",
    "ici_context_parallelism=8",
    "per_device_batch_size=0.125",
)


@pytest.mark.parametrize(
    ("keys", "received", "busiest"),
    [
        ((), 2 * 2 * 4096 * 8 * 128 * 7 // 8, 15 / 8),
        (("context_parallel_strategy=ring",), 2 * 2 * 4096 * 8 * 128 * 7 // 8, 15 / 8),
        # each device's queries and results change their order, in a ring its keys and values too
        (
            ("context_parallel_load_balance=true",),
            2 * 2 * 128 * (4096 * 8 * 7 // 8 + 512 * 32),
            1.0,
        ),
        (
            ("context_parallel_strategy=ring", "context_parallel_load_balance=true"),
            2 * 2 * 128 * (4096 * 8 * 7 // 8 + 512 * (32 + 8)),
            1.0,
        ),
        # latents of 512 with 64 rotated columns
        (
            ("context_parallel_strategy=ring", "decoder_block=deepseek", "num_experts=4"),
            2 * 4096 * (512 + 64) * 7 // 8,
            15 / 8,
        ),
        # the eight devices of the axis each get a key head and four query heads of whole rows
        (("context_parallel_strategy=ulysses",), 2 * 2 * 4096 * (32 + 8) * 128 * 7 // 64, 1.0),
    ],
    ids=str,
)
def test_plan_says_what_attention_of_split_rows_moves_and_how_even_its_work_is(
    keys: tuple[str, ...], received: int, busiest: float
) -> None:
    plan = BatchPlan.from_config(load_config(overrides=[*MODEL, *keys]), 8).to_dict()
    assert plan["context_shards"] == 8
    assert plan["context_bytes_per_layer"] == received
    assert plan["context_busiest_share"] == busiest


def test_a_row_on_one_device_has_no_such_numbers() -> None:
    assert "context_shards" not in BatchPlan.from_config(load_config(), 8).to_dict()
