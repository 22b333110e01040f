"""The presets of published models have as many parameters as the models."""

from __future__ import annotations

import pytest

from maxbatch import load_config
from maxbatch.training.state import abstract_model, num_parameters
from tests.helpers.published_models import PUBLISHED


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_preset_has_as_many_parameters_as_its_model(preset: str) -> None:
    _, params = abstract_model(load_config(overrides=[f"model_name={preset}"]))
    assert num_parameters(params) == PUBLISHED[preset].num_parameters
