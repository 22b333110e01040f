"""The presets of published models have as many parameters as the models."""

from __future__ import annotations

import pytest

from maxbatch import load_config
from maxbatch.families.matrices import model_size
from maxbatch.update.state import abstract_model, num_parameters
from tests.helpers.published_models import PUBLISHED


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_preset_has_as_many_parameters_as_its_model(preset: str) -> None:
    config = load_config(overrides=[f"model_name={preset}"])
    assert num_parameters(abstract_model(config.decoder)[1]) == PUBLISHED[preset].num_parameters
    assert model_size(config.model) == PUBLISHED[preset].num_parameters


@pytest.mark.parametrize(
    "overrides",
    [
        ("attention_bias=true", "attention_out_bias=true", "mlp_projection_bias=true"),
        ("decoder_block=gpt2", "mlp_projection_bias=true"),
        ("mlp_activations=gelu", "logits_via_embedding=false", "use_qk_norm=true"),
    ],
)
def test_the_keys_of_any_model_tell_its_parameters(overrides: tuple[str, ...]) -> None:
    config = load_config(overrides=list(overrides))
    assert model_size(config.model) == num_parameters(abstract_model(config.decoder)[1])
