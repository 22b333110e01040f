"""The model that a `config.json` states: its family, and its fields by their common names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from maxbatch.around.huggingface.folder.fields import check_fields
from maxbatch.config.combined import DecoderConfig
from maxbatch.config.values import shown
from maxbatch.families.family import MODEL_TYPES
from maxbatch.families.record import Family, Json
from maxbatch.system.errors import ConfigError

_BIASES = ("attention_bias", "mlp_bias")
_QUANTIZED = {"mxfp4": "packed 4-bit weights", "fp8": "8-bit weights with scales of blocks"}


def _nowhere(config: DecoderConfig, family: Family) -> bool:
    return False


def _of_groups(config: DecoderConfig, family: Family) -> bool:
    """Returns whether the router may choose groups of experts first, as DeepSeek's."""
    return "n_routing_groups" in family.own_keys


def _of_groups_with_experts(config: DecoderConfig, family: Family) -> bool:
    return _of_groups(config, family) and config.num_experts > 1


def states_rotated_part(family: Family) -> bool:
    """Returns whether a file states the part of a head that is rotated, beside its other fields."""
    return "partial_rotary_factor" in family.defaults


def _of_sparse_layers(config: DecoderConfig, family: Family) -> bool:
    """Returns whether a file of the family may have an MLP in some layers, as Qwen3's."""
    return (
        family.experts is not None
        and not family.experts.are_beside_mlp
        and config.num_experts > 1
        and has_expert_width(family)
        and "first_num_dense_layers" not in family.own_keys
    )


class FixedField(NamedTuple):
    """A field that every supported model has the same value of."""

    values: tuple[object, ...]  # those that an import accepts; an export writes the first
    is_written: Callable[[DecoderConfig, Family], bool] = _nowhere


# A file may lack them.
FIXED_FIELDS = {
    "use_bidirectional_attention": FixedField((False, None)),
    "scale_attn_weights": FixedField((True, None)),
    "scale_attn_by_inverse_layer_idx": FixedField((False, None)),
    "add_cross_attention": FixedField((False, None)),
    "partial_rotary_factor": FixedField((1, None)),  # unless the family has a key for it
    "quantization_config": FixedField((None,)),
    "decoder_sparse_step": FixedField((1, None), _of_sparse_layers),
    "mlp_only_layers": FixedField(([], None), _of_sparse_layers),
    "clip_qkv": FixedField((None,)),
    "swiglu_limit": FixedField((7.0, None)),
    "swiglu_alpha": FixedField((1.702, None)),
    "scoring_func": FixedField(("sigmoid", None), _of_groups),
    "topk_method": FixedField(("noaux_tc", None), _of_groups),
    "moe_layer_freq": FixedField((1, None), _of_groups_with_experts),
    "rope_interleave": FixedField((True, None), _of_groups),
}


class StatedModel:
    """The model of a `config.json`.

    Attributes:
      family: its family.
      fields: the fields by their common names, with the defaults of the family.
      where: names the file in messages.
      width, num_heads, num_layers: the dimensions that other fields refer to.

    Args:
      most: the largest value of each whole number that a form of few families has.
    """

    def __init__(self, family: Family, fields: Json, where: str, most: Mapping[str, int]) -> None:
        self.family, self.where = family, where
        common_names = {theirs: common for common, theirs in family.fields.items()}
        renamed = {
            common_names[name]: value for name, value in fields.items() if name in common_names
        }
        # transformers 5 writes this name for any family
        if family.experts and "num_local_experts" in fields:
            renamed["num_experts"] = fields["num_local_experts"]
        self.fields: Json = family.defaults | fields | renamed
        check_fields(self.fields, family.fields, where, most)
        self.width: int = self.fields["hidden_size"]
        self.num_heads: int = self.fields["num_attention_heads"]
        self.num_layers: int = self.fields["num_hidden_layers"]

    def __getitem__(self, field: str) -> Any:
        """Returns the value of a field; raises KeyError if the file and the family lack it."""
        return self.fields[field]

    def get(self, field: str, default: object = None) -> Any:
        """Returns the value of a field, or the default if the file and the family lack it."""
        return self.fields.get(field, default)

    def refused(self, problem: str) -> ConfigError:
        """Returns the error of a model that is not supported."""
        return ConfigError(f"{self.where}: {problem}")


def has_expert_width(family: Family) -> bool:
    """Returns whether a field of its own states the width of an expert (`moe_intermediate_size`);
    without it `intermediate_size` does.
    """
    is_beside = family.experts is not None and family.experts.are_beside_mlp
    return is_beside or "moe_intermediate_size" in family.defaults


def family_of(fields: Json, where: str) -> Family:
    """Returns the family of a `config.json`'s model; `fields_of_family` writes what it reads.

    Raises:
      ConfigError: there is no such family, or a field has a value that its models do not have here.
    """
    name = str(fields.get("model_type"))
    if name not in MODEL_TYPES:
        works = ", ".join(MODEL_TYPES)
        raise ConfigError(
            f"{where}: model_type={shown(name)} is not supported; works: one of {works}"
        )
    families = MODEL_TYPES[name]
    family = next((family for family in families if _is_told(family, fields)), families[0])
    experts = [
        field
        for field, value in fields.items()
        if "expert" in field and value and not family.experts
    ]
    if experts:
        value = shown(str(fields[experts[0]]))
        raise ConfigError(
            f"{where}: {shown(experts[0])}={value} is not supported for {name}, which has no "
            "experts"
        )
    quantization = fields.get("quantization_config")
    method = str(quantization.get("quant_method")) if isinstance(quantization, dict) else ""
    if method in _QUANTIZED:
        raise ConfigError(
            f"{where}: quantization_config.quant_method={method}: {_QUANTIZED[method]} are not "
            "read; works: a folder with the weights in bfloat16"
        )
    accepted = {field: fixed.values for field, fixed in FIXED_FIELDS.items()}
    accepted |= {field: (value,) for field, value in family.fixed.items()}
    if states_rotated_part(family):
        del accepted["partial_rotary_factor"]
    for field, values in accepted.items():
        if field in fields and fields[field] not in values:
            raise ConfigError(
                f"{where}: {field}={shown(str(fields[field]))} is not supported for {name}"
            )
    if biases := [
        field for field in _BIASES if fields.get(field) and field not in family.bias_fields
    ]:
        raise ConfigError(
            f"{where}: {biases[0]}={shown(str(fields[biases[0]]))} is not supported for {name}"
        )
    return family


def fields_of_family(config: DecoderConfig, family: Family) -> Json:
    """Returns the fields that follow from the family alone, as `family_of` reads them."""
    fixed = {
        field: fixed.values[0]
        for field, fixed in FIXED_FIELDS.items()
        if fixed.is_written(config, family)
    }
    names = {"architectures": [family.architecture], "model_type": family.model_type}
    return fixed | family.fixed | family.told_by | names


def _is_told(family: Family, fields: Json) -> bool:
    """Returns whether a file is of this family, if several have its `model_type`."""
    stated = family.defaults | fields
    return all(stated.get(field, 0) == value for field, value in family.told_by.items())
