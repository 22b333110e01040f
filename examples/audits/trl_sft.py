"""TRL's `SFTTrainer`: `train()` for each update, on tokens and labels that are prepared already."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import maxbatch

sys.path.insert(0, str(Path(__file__).parent))
from torch_model import CONFIG, Loop, constant

WORDS = Tokenizer(
    WordLevel(
        {str(token): token for token in range(CONFIG.vocab_size - 1)} | {".": CONFIG.vocab_size - 1}
    )
)
WORDS.pre_tokenizer = Whitespace()
TOKENIZER = PreTrainedTokenizerFast(tokenizer_object=WORDS, pad_token="0", eos_token=".")


def trainer_of(
    model: Any, optimizer: Any, batch: dict[str, np.ndarray], arguments: dict[str, Any]
) -> SFTTrainer:
    """Returns a trainer of one update on the rows of a batch."""
    labels = np.where(batch["weights"] > 0, batch["tokens"], -100)
    return SFTTrainer(
        model,
        SFTConfig(**arguments, max_length=None, dataset_kwargs={"skip_prepare_dataset": True}),
        train_dataset=Dataset.from_dict(
            {"input_ids": batch["tokens"].tolist(), "labels": labels.tolist()}
        ),
        processing_class=TOKENIZER,
        optimizers=(optimizer, constant(optimizer)),
    )


def make(layout: maxbatch.Layout) -> Loop:
    """Returns the trainer of a layout."""
    return Loop(layout, trainer_of)
