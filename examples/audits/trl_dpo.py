"""TRL's `DPOTrainer`: `train()` for each update; a row is a pair whose loss is the mean over pairs.

The prompt of a pair is the first token of a row, the chosen response its trained tokens, the rejected one the same
tokens in reverse order. A row without a trained token is no pair, so that some promises are not applicable.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from trl import DPOConfig, DPOTrainer

import maxbatch

sys.path.insert(0, str(Path(__file__).parent))
from torch_model import Loop, constant, first_model
from trl_sft import TOKENIZER


def trainer_of(model: Any, optimizer: Any, batch: dict[str, np.ndarray], arguments: dict[str, Any]) -> DPOTrainer:
    """Returns a trainer of one update on the pairs of a batch."""
    if not batch["weights"].any(axis=1).all():
        raise ValueError("a pair has trained tokens")
    chosen = [row[weights > 0] for row, weights in zip(batch["tokens"], batch["weights"], strict=True)]
    columns = {
        "prompt": [str(row[0]) for row in batch["tokens"]],
        "chosen": ["".join(f" {token}" for token in of_row) for of_row in chosen],
        "rejected": ["".join(f" {token}" for token in of_row[::-1]) for of_row in chosen],
    }
    return DPOTrainer(
        model,
        ref_model=first_model(),
        args=DPOConfig(**arguments, max_length=None),
        train_dataset=Dataset.from_dict(columns),
        processing_class=TOKENIZER,
        optimizers=(optimizer, constant(optimizer)),
    )


def make(layout: maxbatch.Layout) -> Loop:
    """Returns the trainer of a layout."""
    return Loop(layout, trainer_of)
