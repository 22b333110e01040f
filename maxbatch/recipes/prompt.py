"""Prompts (`batch_size`): a sample is a prompt, and updates train on the model's own responses."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from maxbatch.config.families import FAMILIES
from maxbatch.config.values import Value
from maxbatch.system.errors import ConfigError
from maxbatch.training.update.recipe import TrainedRecipe

# Keys with values that maxbatch rl cannot have, with rule and working value.
_REFUSED: Mapping[str, tuple[str, object]] = {
    "load_full_state_path": (
        "empty in reinforcement learning, which starts from parameters (load_parameters_path)", '""'
    ),
    "early_stopping_patience": ("null beside batch_size: maxbatch rl has no eval loss", "null"),
    "eval_tasks": (
        "empty beside batch_size: maxbatch rl scores held-out prompts; maxbatch evaluate scores its checkpoints", '""'
    ),
    "local_checkpoint_directory": ("empty beside batch_size: maxbatch rl keeps none", '""'),
}  # fmt: skip
_ROUTER_LOSSES = ("load_balance_loss_weight", "router_z_loss_weight")


class PromptRecipe(TrainedRecipe):
    """Prompts of reinforcement learning."""

    unit = "prompt"
    is_sampled = True

    @property
    def statement(self) -> str:
        return f"{self.key}, which states a batch of prompts for maxbatch rl"

    def check(self, values: Mapping[str, Value], fault: Callable[..., ConfigError]) -> None:
        if values["warm_start_steps"] and not values["enable_checkpointing"]:
            steps = values["warm_start_steps"]
            rule = f"true beside warm_start_steps={steps}, whose parameters the run keeps in a checkpoint"
            raise fault("enable_checkpointing", rule, "true")
        for name, (rule, works) in _REFUSED.items():
            if values[name]:
                raise fault(name, rule, works)
        if values["lora_rank"] and values["warm_start_steps"]:
            raise fault("warm_start_steps", "0 beside lora_rank: adapters adapt the model of load_parameters_path", 0)
        if FAMILIES[str(values["decoder_block"])].has_experts:
            _check_experts(values, fault)


def _check_experts(values: Mapping[str, Value], fault: Callable[..., ConfigError]) -> None:
    if float(str(values["capacity_factor"])) > 0:
        rule = "-1 beside batch_size: the capacity counts a whole row, and sampling does not know its length"
        raise fault("capacity_factor", rule, -1)
    for name in _ROUTER_LOSSES:
        if values[name]:
            raise fault(name, "0 beside batch_size: maxbatch rl does not add the losses of a router", 0)


RECIPE = PromptRecipe()
