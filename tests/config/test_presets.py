"""The presets of published models: they plan, and have the keys that an import of the model itself
has.
"""

from __future__ import annotations

import pytest

from maxbatch import BatchPlan, load_config
from maxbatch.around.huggingface.folder.model_fields import model_keys
from maxbatch.config.paths import configs_dir
from maxbatch.config.sections import KEYS
from tests.helpers.published_models import PUBLISHED

PRESETS = sorted(path.stem for path in (configs_dir() / "models").glob("*.yml"))


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_plans(preset: str) -> None:
    config = load_config(
        overrides=[f"model_name={preset}", "per_device_batch_size=1", "global_batch_size=256"]
    )
    assert BatchPlan.from_config(config, 64, 16).tokens_per_step == 256 * config.max_target_length


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_preset_has_the_keys_that_an_import_of_its_model_has(preset: str) -> None:
    config = load_config(overrides=[f"model_name={preset}"])
    imported = model_keys(PUBLISHED[preset].fields, preset)
    assert {name: config[name] for name in imported} == {
        name: KEYS[name].read(text) for name, text in imported.items()
    }
