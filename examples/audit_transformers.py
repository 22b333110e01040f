"""The `Trainer` of transformers, whose own loop takes each update.

maxbatch audit examples/audit_transformers.py:make
"""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import maxbatch

CONFIG = LlamaConfig(
    vocab_size=8, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, use_cache=False
)


class InOrder(Trainer):
    """A Trainer that takes rows in their order."""

    def _get_train_sampler(self, *_: Any) -> torch.utils.data.Sampler:
        return torch.utils.data.SequentialSampler(self.train_dataset)


class Loop:
    """The loop of one layout, on one device."""

    def __init__(self, layout: maxbatch.Layout) -> None:
        if layout.num_devices > 1:
            raise ValueError("this adapter has one device")
        self.arguments = TrainingArguments(
            output_dir=tempfile.gettempdir(),
            per_device_train_batch_size=layout.rows_per_pass,
            gradient_accumulation_steps=layout.gradient_accumulation_steps,
            max_steps=1,
            logging_steps=1,
            logging_nan_inf_filter=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            max_grad_norm=0,
        )

    def init(self) -> Any:
        """Returns a new model and its optimizer."""
        torch.manual_seed(0)
        model = LlamaForCausalLM(CONFIG)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(self, state: Any, batch: dict[str, np.ndarray]) -> tuple[Any, dict[str, float]]:
        """Takes one update."""
        model, optimizer = copy.deepcopy(state)
        labels = np.where(batch["weights"] > 0, batch["tokens"], -100)  # labels that the loss leaves out
        columns = {"input_ids": batch["tokens"], "labels": labels, "attention_mask": batch["segments"]}
        rows = [
            {name: torch.from_numpy(column[row]).long() for name, column in columns.items()}
            for row in range(len(labels))
        ]
        constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        trainer = InOrder(model, self.arguments, train_dataset=rows, optimizers=(optimizer, constant))
        trainer.train()
        return (model, optimizer), {"loss": trainer.state.log_history[0]["loss"]}

    def params(self, state: Any) -> dict[str, np.ndarray]:
        """Returns the parameters as NumPy arrays."""
        return {name: parameter.detach().numpy().copy() for name, parameter in state[0].named_parameters()}


def make(layout: maxbatch.Layout) -> Loop:
    """Returns the trainer of a layout."""
    return Loop(layout)
