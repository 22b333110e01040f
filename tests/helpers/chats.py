"""Conversations, and a tokenizer with a chat template, made on the spot."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maxbatch import load_config
from maxbatch.config.config import Config
from tests.helpers.corpus import WORDS, write_jsonl

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


def write_tokenizer(folder: Path, template: str | None = CHATML, **settings: Any) -> Path:
    """Writes a byte-level BPE tokenizer with a few merges; `template` goes into
    tokenizer_config.json.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 5, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", **settings}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def talk(*turns: str, system: str = "") -> dict[str, Any]:
    """A record: user and assistant in turn."""
    messages = [{"role": "system", "content": system}] if system else []
    roles = ("user", "assistant")
    return {
        "messages": messages
        + [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    }


def some_talks(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Conversations of one to three turns, whose answers differ much in length."""
    rng = np.random.default_rng(seed)

    def words(most: int) -> str:
        return " ".join(rng.choice(WORDS, rng.integers(1, most)))

    return [
        talk(*(words((4, 12)[i % 2]) for i in range(2 * rng.integers(1, 4)))) for _ in range(count)
    ]


def chat_config(
    folder: Path, records: Sequence[Mapping[str, Any]] | None, *overrides: str
) -> Config:
    """A config that trains on the conversations of `folder/chats.jsonl`, with the tokenizer of
    `folder/tokenizer`.
    """
    if records is not None:
        write_jsonl(folder / "chats.jsonl", records)
    if not (folder / "tokenizer").exists():
        write_tokenizer(folder / "tokenizer")
    return load_config(overrides=[*chat_overrides(folder), *overrides])


def chat_overrides(folder: Path) -> tuple[str, ...]:
    """The overrides of `chat_config`."""
    return (
        "use_sft=true",
        "dataset_type=jsonl",
        f"dataset_path={folder / 'chats.jsonl'}",
        "tokenizer_type=huggingface",
        f"tokenizer_path={folder / 'tokenizer'}",
        "vocab_size=320",
        "max_target_length=64",
        "enable_data_shuffling=false",
    )
