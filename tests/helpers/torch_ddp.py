"""One process of a DistributedDataParallel run of PyTorch over gloo: prints the gradients that its
ranks agree on.

Usage: python -m tests.helpers.torch_ddp RANK WORLD_SIZE RENDEZVOUS_FILE ROWS_FILE

The model is a table of logits by the token before; its rows come from a NumPy file, tokens [B, L]
and weights [B, L].
"""

from __future__ import annotations

import contextlib
import json
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

PASSES = 2


class Bigram(torch.nn.Module):
    """Logits of a token from the token before."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(vocabulary, vocabulary)
        torch.nn.init.zeros_(self.table.weight)

    def forward(self, tokens: torch.Tensor, weights: torch.Tensor, reduction: str) -> torch.Tensor:
        losses = torch.nn.functional.cross_entropy(
            self.table(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
        )
        total = (losses * weights[:, 1:].flatten()).sum()
        return total if reduction == "sum" else total / weights[:, 1:].sum()


def gradient(rows: TensorDataset, reduction: str, passes: int, divide: bool) -> list[list[float]]:
    """Returns the gradient of one update in so many passes a rank, after DDP's own reduction."""
    model = DistributedDataParallel(Bigram(int(rows.tensors[0].max()) + 1))
    sampler = DistributedSampler(rows, shuffle=False)
    batches = list(DataLoader(rows, batch_size=len(sampler) // passes, sampler=sampler))
    for number, (tokens, weights) in enumerate(batches):
        last = number == len(batches) - 1
        with contextlib.nullcontext() if last else model.no_sync():
            loss = model(tokens, weights, reduction)
            (loss / passes if divide else loss).backward()
    return model.module.table.weight.grad.tolist()


def main(rank: str, world_size: str, rendezvous: str, rows_file: str) -> None:
    """Prints, from the first rank, the gradients by name and the rows that each rank's sampler
    deals it.
    """
    dist.init_process_group(
        "gloo", f"file://{rendezvous}", rank=int(rank), world_size=int(world_size)
    )
    stored = np.load(rows_file)
    rows = TensorDataset(
        torch.from_numpy(stored["tokens"]).long(), torch.from_numpy(stored["weights"]).float()
    )
    found = {
        "mean": gradient(rows, "mean", passes=1, divide=False),
        "sum": gradient(rows, "sum", passes=1, divide=False),
        "accumulated mean": gradient(rows, "mean", PASSES, divide=True),
        "accumulated sum of means": gradient(rows, "mean", PASSES, divide=False),
    }
    odd = TensorDataset(torch.arange(int(world_size) * 2 + 1))
    dealt: list[list[int]] = [[] for _ in range(int(world_size))]
    dist.all_gather_object(dealt, list(DistributedSampler(odd, shuffle=False)))
    if dist.get_rank() == 0:
        print(json.dumps({"gradients": found, "dealt": dealt}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
