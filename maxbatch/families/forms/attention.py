"""What a form of attention states, and grouped-query attention, the form of most families."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from maxbatch.families.forms.form import Form, imported
from maxbatch.families.parameter import LAST_LAYERS, Axes, ModelKeys, Parameter

# Growth of scores with `temperature_tuning`. No config key states it, since all published models have
# these values (Llama 4's `floor_scale` and `attn_scale`).
GROWTH_TOKENS, GROWTH_FACTOR = 8192, 0.1

LOCAL, GLOBAL = "local_sliding", "global"  # words of `attention_type`


def is_local_layer(attention_type: str, num_layers: int) -> tuple[bool, ...]:
    """Returns whether each layer attends to a window only; the pattern repeats over the layers."""
    pattern = attention_type.split(",")
    return tuple(pattern[layer % len(pattern)].strip() == LOCAL for layer in range(num_layers))


class AttentionForm(Form):
    """A form of attention: how the tokens of a row read each other, or a state."""

    head_width = "head_dim"  # the width of a query, in a refusal
    lacks: tuple[str, ...] = ()  # config keys that are refused beside it
    unread: tuple[str, ...] = ()  # config keys that it does not read
    has_windows = True
    unscaled_queries = ""  # why no weight of queries may hold the scale of scores, in a refusal
    groups_heads = True  # whether several heads of queries have one of keys
    has_sinks = False
    has_global_heads = False
    shares_kv_projections = False
    # What published models have; the keys of a model may state otherwise.
    has_rope = True
    has_qk_norm = False
    has_input_biases = False  # of queries, keys and values
    caps_scores = False
    # n: every n-th layer is global and the others local; 1: all are local; 0: each model states it
    local_every = 0

    @property
    def attention_type(self) -> str:
        """The pattern of local and global layers in published models, in the form of the key."""
        if self.local_every == 1:
            return LOCAL
        return ",".join([LOCAL] * (self.local_every - 1) + [GLOBAL])

    def rows(self, name: str, is_local: bool | None) -> tuple[Parameter, ...]:
        """Returns the parameters of one layer's attention, whose paths begin with `name`."""
        raise NotImplementedError

    def names_in_maxtext(self) -> dict[str, str]:
        """Returns MaxText's names of its parameters within a layer's attention, by ours; none if
        MaxText lacks it.
        """
        return {}

    def widths(self, model: ModelKeys, is_local: bool) -> tuple[int, int]:
        """Returns the width of a head's query and key, and the width of its value."""
        raise NotImplementedError

    def compressed_width(self, model: ModelKeys) -> int:
        """Returns the numbers of a token of which the keys and values of all heads are made; 0 if
        each head makes its own.
        """
        del model
        return 0

    def rotated(self, model: ModelKeys) -> int:
        """Returns the columns of a head that rotary embeddings turn."""
        return int(model.head_dim * model.partial_rotary_factor)

    def scores(self, model: ModelKeys) -> str:
        """Returns the place of the class of its rules of scores."""
        del model
        return "maxbatch.model.scores:ScoreRules"

    def scores_class(self, model: ModelKeys) -> Any:
        """Imports the class of its rules of scores."""
        return imported(self.scores(model))

    def window(self, model: ModelKeys) -> int:
        """Returns the tokens that a local layer sees at most."""
        return int(model.sliding_window_size)

    def twice_seen(self, model: ModelKeys, length: int, is_local: bool) -> int:
        """Returns twice the tokens that a token of a row sees on average."""
        seen = min(self.window(model), length) if is_local else length
        return 2 * seen - seen * seen // length

    def is_at(self, model: ModelKeys, place: int) -> bool:
        """Returns whether the layer at a place of a cycle has it, in a family whose other layers
        have another form.
        """
        del model, place
        return True

    def rotates(self, model: ModelKeys, place: int) -> bool:
        """Returns whether the layer at a place of a cycle rotates queries and keys."""
        del model, place
        return True

    def is_local(self, model: ModelKeys, has_rope: bool, by_pattern: bool) -> bool:
        """Returns whether a layer of a cycle is local.

        Args:
          has_rope: whether it rotates queries and keys.
          by_pattern: whether `attention_type` states that it is.
        """
        del model, has_rope
        return by_pattern

    def excluded_by_windows(self, config: ModelKeys) -> dict[str, object]:
        """Returns values of its own keys that must change beside windows."""
        del config
        return {}

    def state_operations(self, model: ModelKeys) -> int | None:
        """Returns the floating-point operations of training per token that one layer has with a
        state; None: its tokens read each other, and the operations depend on the row.
        """
        del model
        return None

    def summed_heads(self, model: ModelKeys) -> tuple[str, int, int]:
        """Returns the key that states the number of heads that a product sums over, their width,
        and what the number is a multiple of.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedAttention(AttentionForm):
    """Grouped-query attention (Ainslie et al. 2023, https://arxiv.org/abs/2305.13245), full or
    within windows.
    """

    layer = "maxbatch.model.attention:Attention"
    over_tensor = ("global_kv_heads",)
    whole = ("global_head_dim",)
    # What `use_qk_norm` normalises: each head, all heads together, or each rotated head, without a
    # scale.
    qk_norm_over: Literal["head", "heads", "rotated"] = "head"
    # RoPE turns neighbouring columns of a head, not columns of its two halves
    rotates_neighbours: bool = False
    has_out_bias: bool = False  # whatever attention_out_bias says
    has_sinks: bool = False  # each head learns a score that absorbs attention, without a token
    # its output is multiplied by a sigmoid of the stream, head by head
    has_query_gate: bool = False
    has_value_norm: bool = False  # the values of a head are normalised
    # The heads of global layers are twice as wide, may have other numbers of keys, and are rotated
    # in part.
    has_global_heads: bool = False
    # one product gives the keys and the values of a global layer
    shares_kv_projections: bool = False
    has_rope: bool = True
    has_qk_norm: bool = False
    has_input_biases: bool = False
    caps_scores: bool = False
    local_every: int = 0

    @property
    def keys(self) -> tuple[str, ...]:  # type: ignore[override]
        """The keys of heads that only global layers have."""
        return ("global_num_kv_heads", "partial_rotary_factor") if self.has_global_heads else ()

    def axis_sizes(self, model: ModelKeys) -> dict[str, int]:
        """Returns the heads of global layers and their width."""
        width, _ = self.widths(model, is_local=False)
        kv_heads = model.global_num_kv_heads or model.base_num_kv_heads
        return {"global_head_dim": width, "global_kv_heads": kv_heads}

    def check(self, config: ModelKeys) -> None:
        """Raises ConfigError for heads of global layers that do not divide queries, or for a RoPE
        that does not turn a part of a head.
        """
        if not self.has_global_heads:
            return
        heads, kv_heads = config.base_num_query_heads, config.global_num_kv_heads
        block = f"decoder_block={config.decoder_block}"
        if kv_heads and heads % kv_heads:
            divisors = (number for number in range(1, heads + 1) if heads % number == 0)
            nearest = min(divisors, key=lambda number: abs(number - kv_heads))
            rule = f"a divisor of base_num_query_heads={heads}, or 0"
            raise config.fault("global_num_kv_heads", rule, nearest)
        rule = f"beside {block}, which rotates a part of a head"
        if config.rope_type != "default":
            raise config.fault("rope_type", f"default {rule}", "default")
        if config.trainable_position_size != -1:
            raise config.fault("trainable_position_size", f"-1 {rule}", -1)

    def widths(self, model: ModelKeys, is_local: bool) -> tuple[int, int]:
        """Returns the width of a head twice; heads of global layers may be twice as wide."""
        width = 2 * model.head_dim if self.has_global_heads and not is_local else model.head_dim
        return width, width

    def summed_heads(self, model: ModelKeys) -> tuple[str, int, int]:
        """Returns the heads of queries, which those of keys divide, in global layers too."""
        multiple = math.lcm(model.base_num_kv_heads, model.global_num_kv_heads or 1)
        width, _ = self.widths(model, is_local=False)
        return "base_num_query_heads", width, multiple

    def rows(self, name: str, is_local: bool | None) -> tuple[Parameter, ...]:
        """Returns its parameters. Global layers may have wider heads, and one product for keys and
        values; layers that share keys have none of their own.
        """
        heads, kv_heads = ("heads", "head_dim"), ("kv_heads", "head_dim")
        is_global = self.has_global_heads and not is_local
        if is_global:
            heads, kv_heads = ("heads", "global_head_dim"), ("global_kv_heads", "global_head_dim")

        def normalised(axes: Axes) -> Axes:
            return axes[1:] if self.qk_norm_over == "head" else axes

        def has_bias(model: ModelKeys) -> bool:
            return bool(model.attention_bias)

        def has_out_bias(model: ModelKeys) -> bool:
            return model.attention_out_bias or self.has_out_bias

        def has_scaled_norm(model: ModelKeys) -> bool:
            return model.use_qk_norm and self.qk_norm_over != "rotated"

        query_gate = (
            Parameter(f"{name}.query_gate", heads, ("embed",), kept="query_proj"),
            Parameter(f"{name}.query_gate_bias", heads, has=has_bias),
        )
        rows = (
            Parameter(f"{name}.query", heads, ("embed",), kept="query_proj"),
            Parameter(f"{name}.key", kv_heads, ("embed",), kept="key_proj"),
            Parameter(f"{name}.value", kv_heads, ("embed",), kept="value_proj"),
            Parameter(f"{name}.out", ("embed",), heads, kept="out_proj"),
            Parameter(f"{name}.query_bias", heads, has=has_bias),
            Parameter(f"{name}.key_bias", kv_heads, has=has_bias),
            Parameter(f"{name}.value_bias", kv_heads, has=has_bias),
            Parameter(f"{name}.out_bias", ("norm",), has=has_out_bias),
            *(query_gate if self.has_query_gate else ()),
            *((Parameter(f"{name}.sinks", ("heads",)),) if self.has_sinks else ()),
            Parameter(f"{name}.query_norm.scale", normalised(heads), has=has_scaled_norm),
            Parameter(f"{name}.key_norm.scale", normalised(kv_heads), has=has_scaled_norm),
        )

        absent: tuple[str, ...] = ()
        if name.startswith(LAST_LAYERS):
            absent = ("key", "value", "key_bias", "value_bias", "key_norm.scale")
        elif is_global and self.shares_kv_projections:
            absent = ("value", "value_bias")
        return tuple(row for row in rows if row.name.removeprefix(f"{name}.") not in absent)

    def names_in_maxtext(self) -> dict[str, str]:
        """Returns MaxText's names, which are ours with the part of a module."""
        return {
            **{name: f"{name}.kernel" for name in ("query", "key", "value", "out")},
            **{f"{name}_bias": f"{name}.bias" for name in ("query", "key", "value", "out")},
            **{f"{name}_norm.scale": f"{name}_norm.scale" for name in ("query", "key")},
            "sinks": "sinks",
        }


GROUPED: AttentionForm = GroupedAttention()  # as most families have it
