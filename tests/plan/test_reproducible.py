"""The bytes that `reproducible_sums` has every device hold whole."""

from __future__ import annotations

import jax
import pytest

from maxbatch import load_config
from maxbatch.plan.batch import BatchPlan
from maxbatch.update.lora import adapters_of
from maxbatch.update.state import abstract_model


@pytest.mark.parametrize(
    "keys",
    [
        ("model_name=tiny-deepseek",),
        ("model_name=tiny-deepseek", "lora_rank=3", "routed_bias_update_rate=0"),
        ("model_name=tiny", "lora_rank=2", "lora_targets=query, down"),
    ],
)
def test_a_device_holds_the_model_and_three_integers_of_each_trained_value(
    keys: tuple[str, ...],
) -> None:
    config = load_config(
        overrides=[*keys, "reproducible_sums=true", "weight_dtype=bfloat16"]
        + ["load_parameters_path=model"] * (len(keys) > 1)
    )
    model = abstract_model(config.programs)[1]
    adapters = adapters_of(config.adapters)
    trained = adapters.abstract(model) if adapters else model

    def num_values(tree: object) -> int:
        return sum(x.size for x in jax.tree.leaves(tree))

    of_adapters = num_values(trained) if adapters else 0
    assert BatchPlan.from_config(config).whole_bytes_per_device == (
        2 * num_values(model) + 4 * of_adapters + 12 * num_values(trained)
    )
