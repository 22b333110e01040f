"""Experts in place of the MLP or beside it: a router chooses some for each token.

Reference: Shazeer et al. 2017 (https://arxiv.org/abs/1701.06538).
"""

from __future__ import annotations

import dataclasses

from maxbatch.families.forms.form import Form, NormRows, refusal
from maxbatch.families.parameter import ModelKeys, Parameter

ROUTED_BIAS = "routed_bias"  # moved by `routed_bias_update_rate`, not by the optimizer
_STEP = "interleave_moe_layer_step"  # the key of a distance between layers with experts


def moe_mlp_dim(model: ModelKeys) -> int:
    """Returns the hidden width of an expert."""
    return int(model.base_mlp_dim if model.base_moe_mlp_dim == -1 else model.base_moe_mlp_dim)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts(Form):
    """Experts with a router."""

    layer = "maxbatch.model.experts.experts:Experts"
    over_tensor = ("moe_mlp", "shared_mlp")
    whole = ("router", "shared_gate")
    keys: tuple[str, ...] = ()
    have_biases: bool = False  # experts and router
    # clips the values that an expert multiplies, with another activation
    limit: float | None = None
    # the weights of a token's experts are normalised, for any router scores
    always_normalise: bool = False
    # A token's scores, sigmoid, multiply the inputs of its experts; without it weights multiply
    # their outputs.
    weigh_inputs: bool = False
    # With several experts a layer has them beside the MLP: both have norms of their own before
    # they are added, and the router reads the stream through a norm, a scale of each channel and a
    # scale of each expert's weight.
    are_beside_mlp: bool = False
    # the output of the shared experts is multiplied by one number of each token
    have_shared_gate: bool = False

    def rows(self, stack: str, mlp: tuple[Parameter, ...], norm: NormRows) -> tuple[Parameter, ...]:
        """Returns the parameters of one layer's experts, and of the MLP that they have beside them.

        Args:
          stack: the path of the layer.
          mlp: the parameters of its MLP.
          norm: of the family.
        """
        experts = self._own_rows(f"{stack}.experts")
        if self.are_beside_mlp:
            experts = (
                *mlp,
                *norm(f"{stack}.mlp_own_norm"),
                *norm(f"{stack}.experts_norm"),
                *experts,
                *norm(f"{stack}.experts_own_norm"),
            )
        return experts + self._shared_rows(f"{stack}.shared_experts")

    def _own_rows(self, name: str) -> tuple[Parameter, ...]:
        def of_each(part: str, outputs: str, inputs: str, kept: str) -> Parameter:
            return Parameter(
                f"{name}.expert_{part}", (outputs,), (inputs,), per_expert=True, kept=kept
            )

        biases = (
            Parameter(f"{name}.router_bias", ("router",)),
            Parameter(f"{name}.expert_gate_bias", ("moe_mlp",), per_expert=True),
            Parameter(f"{name}.expert_up_bias", ("moe_mlp",), per_expert=True),
            Parameter(f"{name}.expert_down_bias", ("norm",), per_expert=True),
        )
        scales = (
            Parameter(f"{name}.router_scale", ("norm",)),
            Parameter(f"{name}.expert_scale", ("router",)),
        )

        def has_routed_bias(model: ModelKeys) -> bool:
            return bool(model.routed_bias)

        return (
            Parameter(f"{name}.router", ("router",), ("embed",)),
            of_each("gate", "moe_mlp", "embed", kept="moe_mlpwi_0"),
            of_each("up", "moe_mlp", "embed", kept="moe_mlpwi_1"),
            of_each("down", "embed", "moe_mlp", kept="moe_mlpwo"),
            *(biases if self.have_biases else ()),
            *(scales if self.are_beside_mlp else ()),
            Parameter(f"{name}.{ROUTED_BIAS}", ("router",), is_float32=True, has=has_routed_bias),
        )

    def _shared_rows(self, name: str) -> tuple[Parameter, ...]:
        """Returns the parameters of the experts of every token, which are one MLP."""
        if "shared_experts" not in self.keys:
            return ()

        def has(model: ModelKeys) -> bool:
            return bool(model.shared_experts > 0)

        gate = Parameter(f"{name}.shared_gate", ("shared_gate",), ("embed",), has=has)
        return (
            Parameter(f"{name}.gate", ("shared_mlp",), ("embed",), kept="mlpwi_0", has=has),
            Parameter(f"{name}.up", ("shared_mlp",), ("embed",), kept="mlpwi_1", has=has),
            Parameter(f"{name}.down", ("embed",), ("shared_mlp",), kept="mlpwo", has=has),
            *((gate,) if self.have_shared_gate else ()),
        )

    @property
    def steps(self) -> tuple[str, ...]:  # type: ignore[override]
        """The distance between layers that have experts, if a key states it."""
        return tuple(name for name in self.keys if name == _STEP)

    @property
    def are_in_some(self) -> bool:
        """Whether some layers, or some models, may have none."""
        return self.are_beside_mlp or _STEP in self.keys

    def are_at(self, model: ModelKeys, place: int) -> bool:
        """Returns whether the layer at a place of a cycle has experts."""
        step = model[_STEP] if _STEP in self.keys else 1
        return self.are_in(model) and (place + 1) % step == 0

    def summed_times(self, config: ModelKeys) -> dict[str, int]:
        """Returns those of the shared experts, which are one MLP."""
        return {"base_moe_mlp_dim": config.shared_experts or 1}

    def axis_sizes(self, model: ModelKeys) -> dict[str, int]:
        """Returns the number of experts, their hidden width and that of shared ones."""
        return {
            **dict.fromkeys(("experts", "router"), model.num_experts),
            "moe_mlp": moe_mlp_dim(model),
            "shared_mlp": model.shared_experts * moe_mlp_dim(model),
            "shared_gate": 1,
        }

    def are_in(self, model: ModelKeys) -> bool:
        """Returns whether a model of the family has experts: beside an MLP there may be none."""
        return model.num_experts > 1 or not self.are_beside_mlp

    def check(self, config: ModelKeys) -> None:
        """Raises ConfigError for keys of experts that exclude each other."""
        if not self.are_in(config):
            return
        block = f"decoder_block={config.decoder_block}"
        self._check_number(config, block)
        if config.routed_bias_update_rate and not config.routed_bias:
            raise config.fault(
                "routed_bias_update_rate",
                "0 beside routed_bias=false, which has no bias to step",
                0,
            )
        if config.routed_bias_update_rate and config.lora_rank:
            raise config.fault(
                "routed_bias_update_rate", "0 beside lora_rank: only adapters are trained", 0
            )
        if self.limit is not None and config.mlp_activations != "silu,linear":
            rule = f"silu,linear beside {block}, whose activation is fixed"
            raise config.fault("mlp_activations", rule, "silu,linear")
        if not config.mlp_activations.endswith(",linear"):
            raise config.fault("mlp_activations", f"gated beside {block}", "silu,linear")
        if "first_num_dense_layers" in self.keys:
            _check_first_layers(config)
        if "n_routing_groups" in self.keys:
            _check_groups(config)

    def _check_number(self, config: ModelKeys, block: str) -> None:
        """Raises ConfigError for a number of experts that does not suit the others, and for weights
        of another form.
        """
        num_experts, choices = config.num_experts, config.num_experts_per_tok
        groups, best = config.n_routing_groups, config.topk_routing_group
        needs: dict[str, object] = {"norm_topk_prob": True} if self.always_normalise else {}
        if self.weigh_inputs:
            needs = {"routed_score_func": "sigmoid", "norm_topk_prob": False}
        needed = {
            name: str(value).lower() if isinstance(value, bool) else value
            for name, value in needs.items()
            if config[name] != value
        }
        if num_experts < 2:
            several = max(1, groups)
            chosen = best if 0 < best <= several else several
            least = max(8, several * max(2, -(-choices // chosen)))
            works = {"num_experts": str(-(-least // several) * several)} | needed
            raise refusal(config, f"at least 2 beside {block}, whose layers have experts", works)
        if needed:
            value = next(iter(needed.values()))
            why = (
                "always normalises"
                if self.always_normalise
                else "multiplies the experts' inputs by their scores"
            )
            raise refusal(config, f"{value} beside {block}, which {why}", needed)
        if choices > num_experts:
            has_groups = groups > 0 and best > 0
            most = min(best, groups) * (num_experts // groups) if has_groups else num_experts
            rule = f"at most num_experts={num_experts}"
            raise config.fault("num_experts_per_tok", rule, max(1, most))


def _check_first_layers(config: ModelKeys) -> None:
    """Raises ConfigError for first layers without experts that leave no other layer."""
    layers = config.base_num_decoder_layers
    if config.first_num_dense_layers >= layers:
        raise config.fault(
            "first_num_dense_layers", f"less than base_num_decoder_layers={layers}", layers - 1
        )


def _check_groups(config: ModelKeys) -> None:
    """Raises ConfigError for groups of experts that do not suit their number."""
    experts, choices = config.num_experts, config.num_experts_per_tok
    groups, best = config.n_routing_groups, config.topk_routing_group
    if groups == -1:
        if best != -1:
            raise config.fault(
                "topk_routing_group", "-1 beside n_routing_groups=-1, which makes no groups", -1
            )
        return
    if experts % groups or (groups > 1 and experts < 2 * groups):
        sizes = [number for number in range(1, experts // 2 + 1) if experts % number == 0]
        nearest = min(sizes, key=lambda number: (abs(number - groups), number))
        rule = (
            f"a divisor of num_experts={experts} with at least 2 experts per group, ranked by its "
            "two best"
        )
        works, fewest = {"n_routing_groups": nearest}, -(-choices // (experts // nearest))
        if best != -1 and not fewest <= best <= nearest:
            works["topk_routing_group"] = min(max(best, fewest), nearest)
        raise refusal(config, rule, works)
    if best > groups:
        raise config.fault("topk_routing_group", f"at most n_routing_groups={groups}", groups)
    if best != -1 and choices > best * (experts // groups):
        least = -(-choices // (experts // groups))
        rule = (
            f"at least {least}: num_experts_per_tok={choices} experts need as many groups of "
            f"{experts // groups}"
        )
        raise config.fault("topk_routing_group", rule, least)
