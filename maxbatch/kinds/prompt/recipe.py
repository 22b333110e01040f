"""Prompts (`batch_size`): a sample is a prompt, and updates train on the model's own responses."""

from __future__ import annotations

from collections.abc import Mapping

from maxbatch.config.sections import AllKeys
from maxbatch.config.values import Value, value_text
from maxbatch.families.family import FAMILIES
from maxbatch.kinds.text.recipe import TextRecipe

# Keys with values that maxbatch rl cannot have, with rule and working value.
_REFUSED: Mapping[str, tuple[str, object]] = {
    "load_full_state_path": (
        "empty in reinforcement learning, which starts from parameters (load_parameters_path)",
        '""',
    ),
    "early_stopping_patience": ("null beside batch_size: maxbatch rl has no eval loss", "null"),
    "eval_tasks": (
        "empty beside batch_size: maxbatch rl scores held-out prompts; maxbatch evaluate scores "
        "its checkpoints",
        '""',
    ),
    "z_loss_multiplier": ("0 beside batch_size: maxbatch rl trains on advantages", 0),
    "local_checkpoint_directory": ("empty beside batch_size: maxbatch rl keeps none", '""'),
}
# Keys with the value that `reproducible_sums` needs here, the reason, and what is typed.
_NOT_REPRODUCIBLE: Mapping[str, tuple[Value, str, str]] = {
    "off_policy_steps": (0, "log-probabilities are computed under the newest policy", "0"),
    "lora_rank": (0, "a program of all devices merges adapters into the policy", "0"),
    "trainer_devices_fraction": (1, "all hosts train", "1 sampler_devices_fraction=1"),
    "max_tokens_per_pass": (None, "a pair is a row", "null"),
}
_ROUTER_LOSSES = ("load_balance_loss_weight", "router_z_loss_weight")


class PromptRecipe(TextRecipe):
    """Prompts of reinforcement learning."""

    unit = "prompt"
    is_sampled = True

    @property
    def statement(self) -> str:
        return f"{self.key}, which states a batch of prompts for maxbatch rl"

    def check(self, config: AllKeys) -> None:
        if config.warm_start_steps and not config.enable_checkpointing:
            steps = config.warm_start_steps
            rule = (
                f"true beside warm_start_steps={steps}, whose parameters the run keeps in a "
                "checkpoint"
            )
            raise config.fault("enable_checkpointing", rule, "true")
        for name, (rule, works) in _REFUSED.items():
            if config[name]:
                raise config.fault(name, rule, works)
        if config.lora_rank and config.warm_start_steps:
            rule = "0 beside lora_rank: adapters adapt the model of load_parameters_path"
            raise config.fault("warm_start_steps", rule, 0)
        if FAMILIES[config.decoder_block].experts:
            _check_experts(config)
        if config.reproducible_sums:
            for name, (needed, reason, works) in _NOT_REPRODUCIBLE.items():
                if config[name] != needed:
                    rule = (
                        f"{value_text(needed)} beside reproducible_sums=true in rl, since {reason}"
                    )
                    raise config.fault(name, rule, works)


def _check_experts(config: AllKeys) -> None:
    if config.capacity_factor > 0:
        rule = (
            "-1 beside batch_size: the capacity counts a whole row, and sampling does not know "
            "its length"
        )
        raise config.fault("capacity_factor", rule, -1)
    for name in _ROUTER_LOSSES:
        if config[name]:
            raise config.fault(
                name, "0 beside batch_size: maxbatch rl does not add the losses of a router", 0
            )


RECIPE = PromptRecipe()
