"""The `Trainer` of transformers, for `maxbatch audit examples/audit_transformers.py:make`, and the
same with a model that takes no number of items (`make_of_means`): its loss is a mean of each pass.

The Trainer counts the trained tokens of a batch and takes the gradient of each pass
(`get_batch_samples`, `training_step`); the loop around them, which it would also run, is the
example's. It is made once per layout: `train()` prepares a run each time that it is called, which
would be most of an audit's time.

python examples/audit_transformers.py
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
    vocab_size=8,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    use_cache=False,
)
torch.set_num_threads(1)  # of a model this small; more threads wait for each other


class Loop:
    """The loop of one layout, on one device.

    Args:
      layout: the cut of a batch.
      has_count: whether the model's loss takes the number of trained tokens of the batch.
    """

    def __init__(self, layout: maxbatch.Layout, has_count: bool) -> None:
        if layout.num_devices > 1:
            raise ValueError("this adapter has one device")
        self.rows_per_pass = layout.rows_per_pass
        arguments = TrainingArguments(
            output_dir=tempfile.gettempdir(),
            per_device_train_batch_size=layout.rows_per_pass,
            gradient_accumulation_steps=layout.gradient_accumulation_steps,
            report_to=[],
            use_cpu=True,
        )
        self.trainer = Trainer(LlamaForCausalLM(CONFIG), arguments)
        # of a model that is not transformers' own it is often False
        self.trainer.model_accepts_loss_kwargs = has_count

    def init(self) -> Any:
        """Returns a new model and its optimizer."""
        torch.manual_seed(0)
        model = LlamaForCausalLM(CONFIG)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(self, state: Any, batch: dict[str, np.ndarray]) -> tuple[Any, dict[str, float]]:
        """Takes one update."""
        model, optimizer = copy.deepcopy(state)
        labels = np.where(batch["weights"] > 0, batch["tokens"], -100)
        columns = {
            "input_ids": batch["tokens"],
            "labels": labels,
            "attention_mask": batch["segments"],
        }
        starts = range(0, len(labels), self.rows_per_pass)
        passes = [
            {
                name: torch.from_numpy(column[start : start + self.rows_per_pass]).long()
                for name, column in columns.items()
            }
            for start in starts
        ]
        trainer = self.trainer
        trainer.current_gradient_accumulation_steps = len(passes)
        taken, num_tokens = trainer.get_batch_samples(
            iter(passes), len(passes), trainer.args.device
        )
        loss = sum(float(trainer.training_step(model, inputs, num_tokens)) for inputs in taken)
        optimizer.step()
        optimizer.zero_grad()
        return (model, optimizer), {"loss": loss}

    def params(self, state: Any) -> dict[str, np.ndarray]:
        """Returns the parameters as NumPy arrays."""
        return {
            name: parameter.detach().numpy().copy()
            for name, parameter in state[0].named_parameters()
        }


def make(layout: maxbatch.Layout) -> Loop:
    """Returns the trainer of a layout."""
    return Loop(layout, has_count=True)


def make_of_means(layout: maxbatch.Layout) -> Loop:
    """Returns the trainer of a layout, with a model whose loss is the mean of a pass."""
    return Loop(layout, has_count=False)


if __name__ == "__main__":
    print(maxbatch.audit(make))
