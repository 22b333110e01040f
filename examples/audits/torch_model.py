"""A tiny LLaMA of transformers, and the run of one update that every trainer of its family
takes.
"""

from __future__ import annotations

import copy
import gc
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer

import maxbatch

torch.set_num_threads(1)  # of a model this small; more threads wait for each other
CONFIG = LlamaConfig(
    vocab_size=16,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    use_cache=False,
)
ARGUMENTS = {
    "output_dir": tempfile.gettempdir(),
    "max_steps": 1,
    # so that a pass holds the rows that its layout gives it
    "train_sampling_strategy": "sequential",
    "lr_scheduler_type": "constant",
    "logging_strategy": "no",
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
}
Trains = Callable[[Any, Any, dict[str, np.ndarray], dict[str, Any]], Trainer]


def first_model() -> LlamaForCausalLM:
    """Returns a model with the parameters that every run starts from."""
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG)


class Loop:
    """One call of `train()` an update, on one device.

    Args:
      layout: the cut of a batch.
      trainer_of: returns the trainer of a model, an optimizer, a batch and arguments.
    """

    def __init__(self, layout: maxbatch.Layout, trainer_of: Trains) -> None:
        if layout.num_devices > 1:
            raise ValueError("this adapter has one device")
        # every `train()` collects garbage: not that of the modules, which takes a second
        gc.freeze()
        self.trainer_of = trainer_of
        self.arguments = ARGUMENTS | {
            "per_device_train_batch_size": layout.rows_per_pass,
            "gradient_accumulation_steps": layout.gradient_accumulation_steps,
        }

    def init(self) -> Any:
        """Returns a new model and its optimizer."""
        model = first_model()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(self, state: Any, batch: dict[str, np.ndarray]) -> tuple[Any, dict[str, float]]:
        """Takes one update."""
        model, optimizer = copy.deepcopy(state)
        loss = self.trainer_of(model, optimizer, batch, self.arguments).train().training_loss
        model.train(False)
        return (model, optimizer), {"loss": loss}

    def params(self, state: Any) -> dict[str, np.ndarray]:
        """Returns the parameters as NumPy arrays."""
        return {
            name: parameter.detach().numpy().copy()
            for name, parameter in state[0].named_parameters()
        }


def constant(optimizer: Any) -> Any:
    """Returns a schedule that keeps the optimizer's rate."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
