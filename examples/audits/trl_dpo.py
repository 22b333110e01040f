"""TRL's `DPOTrainer`: `train()` for each update; a row is a pair whose loss is the mean over pairs.

The prompt of a pair is the first token of a row, the chosen response its trained tokens, the
rejected one as many other tokens. A row without a trained token is no pair, so that some promises
are not applicable.
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
from torch_model import CONFIG, Loop, constant, first_model
from trl_sft import TOKENIZER

EOS = CONFIG.vocab_size - 1


class OnTokens(DPOTrainer):
    """The trainer on pairs that are tokens already; preparing a data set would take most of an
    update's time.
    """

    def _prepare_dataset(self, dataset: Dataset, *_: Any) -> Dataset:
        return dataset


def trainer_of(
    model: Any, optimizer: Any, batch: dict[str, np.ndarray], arguments: dict[str, Any]
) -> DPOTrainer:
    """Returns a trainer of one update on the pairs of a batch."""
    if not batch["weights"].any(axis=1).all():
        raise ValueError("a pair has trained tokens")
    chosen = [
        row[weights > 0] for row, weights in zip(batch["tokens"], batch["weights"], strict=True)
    ]
    columns = {
        "prompt_ids": batch["tokens"][:, :1].tolist(),
        "chosen_ids": [[*of_row.tolist(), EOS] for of_row in chosen],
        "rejected_ids": [
            [*((of_row + CONFIG.vocab_size // 2) % EOS).tolist(), EOS] for of_row in chosen
        ],
    }
    return OnTokens(
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
