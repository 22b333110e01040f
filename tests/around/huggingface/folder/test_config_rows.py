"""Config keys and the fields of a Hugging Face `config.json` are one table: what one direction
writes the other reads.
"""

from __future__ import annotations

from typing import Any

import pytest

from maxbatch import ConfigError, load_config
from maxbatch.around.huggingface.folder.config_rows import FORMS
from maxbatch.around.huggingface.folder.model_fields import config_json, model_keys
from maxbatch.config.sections import KEYS
from maxbatch.families.family import FAMILIES
from tests.helpers.published_models import PUBLISHED
from tests.helpers.transformers_models import COMMON, MODELS

# The `model_type` of transformers' classes.
TYPES = {
    family.architecture.partition("For")[0].removesuffix("LMHeadModel"): family.model_type
    for family in FAMILIES.values()
}


def imported_fields() -> dict[str, dict[str, Any]]:
    """Returns the `config.json` files of tiny models and of published ones, by name."""
    tiny = {
        name: COMMON
        | {"model_type": TYPES[kind.removesuffix("Text")]}
        | {field: value for field, value in fields.items() if field != "floor_scale"}
        for name, (kind, fields) in MODELS.items()
    }
    # transformers writes the last layer as a global one, whatever the pattern
    tiny["gemma4_own_keys"]["layer_types"] = ["sliding_attention"] * 3 + ["full_attention"]
    return tiny | {name: published.fields for name, published in PUBLISHED.items()}


FIELDS = imported_fields()


def exported(keys: dict[str, str]) -> tuple[dict[str, Any], dict[str, object]]:
    """Returns the `config.json` of a model of these keys, and its keys."""
    overrides = [f"{key}={text}" for key, text in keys.items()]
    config = load_config(overrides=[*overrides, "max_target_length=16"])
    return config_json(config.decoder, "float32", {}), {key: config[key] for key in keys}


def test_every_family_is_among_the_files() -> None:
    families = {model_keys(fields, name)["decoder_block"] for name, fields in FIELDS.items()}
    assert families == FAMILIES.keys()


@pytest.mark.parametrize("name", FIELDS)
def test_an_export_of_an_import_states_the_same_keys(name: str) -> None:
    keys = model_keys(FIELDS[name], name)
    written, values = exported(keys)
    read = {key: KEYS[key].read(text) for key, text in model_keys(written, name).items()}
    for stated in (read, values):
        # 0: as many as the other layers have
        stated["global_num_kv_heads"] = (
            stated.get("global_num_kv_heads") or stated["base_num_kv_heads"]
        )
    assert read == values


@pytest.mark.parametrize("name", ["llama3", *(name for name in FAMILIES if name in FIELDS)])
def test_an_import_reads_every_field_that_a_row_writes(name: str) -> None:
    """A field of another value states other keys, or is refused."""
    keys = model_keys(FIELDS[name], name)
    written, _ = exported(keys)
    family = FAMILIES[keys["decoder_block"]]
    rows = [row for form in FORMS if form.has_form(family) for row in form.rows]
    unread = set()
    for row in rows:
        field = family.fields.get(row.field, row.field)
        if field not in written or not row.is_written(family):
            continue
        value = written[field]
        other = value[:-1] if isinstance(value, list) else not value
        if not isinstance(value, bool | list):
            other = "silu" if isinstance(value, str) and "gelu" in value else 2 * (value or 1)
        try:
            is_read = model_keys(written | {field: other}, name) != keys
        except ConfigError:
            is_read = True
        unread |= set() if is_read else {field}
    assert not unread
