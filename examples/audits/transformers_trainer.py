"""The `Trainer` of transformers: `train()` for each update, with a dataset of the rows of the
batch.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from transformers import Trainer, TrainingArguments, default_data_collator

import maxbatch

sys.path.insert(0, str(Path(__file__).parent))
from torch_model import Loop, constant


def trainer_of(
    model: Any, optimizer: Any, batch: dict[str, np.ndarray], arguments: dict[str, Any]
) -> Trainer:
    """Returns a trainer of one update on the rows of a batch."""
    labels = np.where(batch["weights"] > 0, batch["tokens"], -100)
    rows = [
        {
            "input_ids": tokens.astype(int),
            "labels": of_row.astype(int),
            "attention_mask": np.ones_like(of_row, int),
        }
        for tokens, of_row in zip(batch["tokens"], labels, strict=True)
    ]
    return Trainer(
        model,
        TrainingArguments(**arguments),
        data_collator=default_data_collator,
        train_dataset=rows,
        optimizers=(optimizer, constant(optimizer)),
    )


def make(layout: maxbatch.Layout) -> Loop:
    """Returns the trainer of a layout."""
    return Loop(layout, trainer_of)


def make_without_a_count(layout: maxbatch.Layout) -> Loop:
    """Returns the trainer of a layout, with a model whose loss takes no number of items, as many of
    users' own.
    """

    def of_means(*arguments: Any) -> Trainer:
        trainer = trainer_of(*arguments)
        trainer.model_accepts_loss_kwargs = False
        return trainer

    return Loop(layout, of_means)
