"""A loop in PyTorch that averages over devices as DistributedDataParallel does; an audit finds the
mean of means.

maxbatch audit examples/audit_torch.py:make          # each device takes the mean of its tokens, DDP
the mean of these maxbatch audit examples/audit_torch.py:make_exact    # sums over devices and
passes, divided once
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch

import maxbatch

VOCABULARY, WIDTH = 8, 16


class Loop:
    """The loop of one layout; the devices take their turns in one process."""

    def __init__(self, layout: maxbatch.Layout, is_exact: bool) -> None:
        self.layout, self.is_exact = layout, is_exact

    def init(self) -> Any:
        """Returns a new model and its optimizer."""
        torch.manual_seed(0)
        layers = (
            torch.nn.Embedding(VOCABULARY, WIDTH),
            torch.nn.Tanh(),
            torch.nn.Linear(WIDTH, VOCABULARY),
        )
        model = torch.nn.Sequential(*layers)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(self, state: Any, batch: dict[str, np.ndarray]) -> tuple[Any, dict[str, float]]:
        """Takes one update."""
        model, optimizer = copy.deepcopy(state)
        optimizer.zero_grad()
        passes, devices = self.layout.gradient_accumulation_steps, self.layout.num_devices
        total = float(batch["weights"][:, 1:].sum())
        loss = 0.0
        for start in range(0, len(batch["tokens"]), self.layout.rows_per_pass):
            rows = np.arange(start, min(start + self.layout.rows_per_pass, len(batch["tokens"])))
            for of_device in np.array_split(rows, devices):
                tokens = torch.from_numpy(batch["tokens"][of_device]).long()
                weights = torch.from_numpy(batch["weights"][of_device])[:, 1:].flatten()
                logits = model(tokens[:, :-1]).flatten(0, 1)
                losses = torch.nn.functional.cross_entropy(
                    logits, tokens[:, 1:].flatten(), reduction="none"
                )
                share = (
                    1 / total if self.is_exact else 1 / (float(weights.sum()) * passes * devices)
                )
                part = (losses * weights).sum() * share
                part.backward()
                loss += part.item()
        optimizer.step()
        return (model, optimizer), {"loss": loss}

    def params(self, state: Any) -> dict[str, np.ndarray]:
        """Returns the parameters as NumPy arrays."""
        return {
            name: parameter.detach().numpy().copy()
            for name, parameter in state[0].named_parameters()
        }


def make(layout: maxbatch.Layout) -> Loop:
    """Returns the trainer of a layout that averages over devices and passes."""
    return Loop(layout, is_exact=False)


def make_exact(layout: maxbatch.Layout) -> Loop:
    """Returns the trainer of a layout that divides by the tokens of the whole batch."""
    return Loop(layout, is_exact=True)


if __name__ == "__main__":
    print(maxbatch.audit(make))
