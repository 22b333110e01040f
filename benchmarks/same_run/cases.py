"""The table of comparisons: a program's settings, its rows, and the word because of which runs
differ, if they do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

Rows = dict[str, np.ndarray]  # tokens, segments: int32[N, L + 1], weights: float32[N, L + 1]
Kind = Literal["padded", "masked", "packed", "full"]
PRE_TRAINING = "pre_train.train"  # MaxText's module
VOCABULARY = 256
RESPONSES = 4  # to each prompt


@dataclass(frozen=True)
class Case:
    """A comparison with another program.

    Attributes:
      program: the other program, a name in `PROGRAMS`.
      title: what the row of the page is called.
      settings: of the other program, which `maxbatch import` reads.
      rows: their kind; `make_rows` explains each.
      length: L, the targets of a row.
      differs: the word because of which the runs differ, and why; "" if they are the same.
      updates: their number.
      checked: whether CI repeats it.
      trainer: of transformers or TRL, the class.
      taken_over: updates of theirs after which ours goes on with their checkpoint; 0: ours begins
        with their start.
      num_rows: of the data; None: as many as the updates read.
      module: of MaxText's trainers, the one that runs.
      whole_embedding: whether MaxText's logits are products with the embedding as it is, which its
        own code rounds to bfloat16.
      adapters: the arguments of PEFT's LoraConfig; None: all parameters are trained.
    """

    program: str
    title: str
    settings: Mapping[str, str]
    rows: Kind = "padded"
    length: int = 32
    differs: str = ""
    updates: int = 20
    checked: bool = False
    trainer: str = ""
    taken_over: int = 0
    num_rows: int | None = None
    adapters: Mapping[str, object] | None = None
    module: str = PRE_TRAINING
    whole_embedding: bool = False


def make_rows(kind: Kind, num_rows: int, length: int, seed: int) -> Rows:
    """Makes random rows; the last of the L + 1 tokens of a row is a target only.

    Args:
      kind: full: every token is trained; padded: rows end early, so that batches have unequal
        tokens; masked: random tokens of whole rows are not trained; packed: rows of several
        documents, with padding at the end.
    """
    rng = np.random.default_rng(seed)
    shape = (num_rows, length + 1)
    tokens = rng.integers(1, VOCABULARY, shape, dtype=np.int32)
    segments = np.ones(shape, np.int32)
    weights = np.ones(shape, np.float32)
    for row in range(num_rows):
        if kind in ("padded", "packed"):
            segments[row, rng.integers(length // 4, length + 2) :] = 0
        if kind == "packed":
            begins = rng.random(length + 1) < 3 / length
            segments[row] *= 1 + np.cumsum(begins, dtype=np.int32)
        if kind == "masked":
            weights[row] = rng.random(length + 1) < rng.uniform(0.2, 1.0)
    begins_document = np.diff(segments, axis=1, prepend=-1) != 0
    weights[(segments == 0) | begins_document] = 0
    tokens[segments == 0] = 0
    return {"tokens": tokens, "segments": segments, "weights": weights}


def make_records(trainer: str, num_records: int, folder: Path, seed: int) -> None:
    """Writes `records.jsonl`, texts of random words for a trainer of TRL, and `tokenizer`, whose
    tokens are words. Records of GRPO have token ids of `RESPONSES` completions, of which some
    end, and `rewards.py` scores their texts.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    rng = np.random.default_rng(seed)
    end = VOCABULARY - 1

    def words() -> str:
        return " ".join(map(str, rng.integers(1, end, rng.integers(3, 12))))

    def completion() -> list[int]:
        return [*map(int, words().split()), *([end] if rng.random() < 0.7 else [])]

    fields: dict[str, dict[str, Callable[[], object]]] = {
        "SFTTrainer": {"completion": words},
        "DPOTrainer": {"chosen": words, "rejected": words},
        "GRPOTrainer": {"given": lambda: [completion() for _ in range(RESPONSES)]},
    }
    answers = fields[trainer]
    records = [
        {"prompt": words() + " ", **{name: make() for name, make in answers.items()}}
        for _ in range(num_records)
    ]
    (folder / "rewards.py").write_text(
        "def score(prompt, response, record):\n    return sum(map(int, response.split())) % 11 / 10\n"
    )
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    tokenizer = Tokenizer(
        models.WordLevel({"<pad>": 0, **{str(word): word for word in range(1, end)}, "<end>": end})
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<pad>", "<end>"])  # TRL appends its text to an answer
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<end>",
        "pad_token": "<pad>",
    }
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(settings))


SMALL = {
    "base_emb_dim": "64",
    "base_num_query_heads": "4",
    "base_num_kv_heads": "2",
    "head_dim": "16",
    "base_mlp_dim": "128",
    "base_num_decoder_layers": "2",
    "vocab_size": str(VOCABULARY),
}


def _maxtext(title: str, decoder_block: str, *settings: str, **case: object) -> Case:
    stated = dict(setting.split("=", 1) for setting in settings)
    defaults = {**SMALL, "per_device_batch_size": "4", "learning_rate": "1e-2"}
    whole = {"model_name": "default", "decoder_block": decoder_block, **defaults, **stated}
    return Case("maxtext", title, whole, **case)


def _trl(title: str, trainer: str, **arguments: object) -> Case:
    case = {
        name: arguments.pop(name) for name in list(arguments) if name in Case.__dataclass_fields__
    }
    defaults = {"per_device_train_batch_size": 4, "learning_rate": 1e-2, "bf16": False, **arguments}
    settings = {name: json.dumps(value) for name, value in defaults.items()}
    return Case("trl", title, settings, trainer=trainer, **case)


EXPERTS = (
    "num_experts=4",
    "num_experts_per_tok=2",
    "base_moe_mlp_dim=128",
    "megablox=false",
    "sparse_matmul=false",
)
_BALANCED = (
    *EXPERTS,
    "load_balance_loss_weight=0.01",
    "gradient_accumulation_steps=2",
    "per_device_batch_size=2",
)
DEEPSEEK = (
    *EXPERTS,
    "attention_type=mla",
    "base_num_kv_heads=4",
    "first_num_dense_layers=1",
    "shared_experts=1",
    "q_lora_rank=16",
    "kv_lora_rank=16",
    "qk_nope_head_dim=16",
    "qk_rope_head_dim=8",
    "v_head_dim=16",
    "routed_score_func=softmax",
    "rope_type=yarn",
    "original_max_position_embeddings=8",
)
GEMMA3 = ("model_name=gemma3-4b", "base_num_decoder_layers=6", "sliding_window_size=8")
_GRPO = {
    "learning_rate": 1e-3,
    "per_device_train_batch_size": 4 * RESPONSES,
    "num_generations": RESPONSES,
    "max_completion_length": 16,
    "shuffle_dataset": False,
}
CASES = {
    "maxtext_llama2": _maxtext("llama2, cosine, unequal tokens", "llama2", checked=True),
    "maxtext_mixtral": _maxtext(
        "mixtral, balance loss, 2 passes", "mixtral", *_BALANCED, rows="full", checked=True
    ),
    "trainer_linear": _trl(
        "`Trainer`, linear, warm-up, decay",
        "Trainer",
        warmup_steps=3,
        weight_decay=0.1,
        rows="full",
        checked=True,
    ),
    "trl_dpo": _trl("`DPOTrainer`", "DPOTrainer", learning_rate=1e-3, max_length=32, checked=True),
    "trainer_cosine": _trl(
        "`Trainer`, `cosine`, masked labels",
        "Trainer",
        lr_scheduler_type="cosine",
        warmup_steps=3,
        rows="masked",
    ),
    "trainer_constant": _trl(
        "`Trainer`, `constant_with_warmup`, 2 passes of padded rows",
        "Trainer",
        rows="padded",
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=3,
        weight_decay=0.1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
    ),
    "trainer_epochs": _trl(
        "`Trainer`, 3 epochs of 26 rows in batches of 4",
        "Trainer",
        rows="full",
        num_train_epochs=3,
        num_rows=26,
        differs="`num_train_epochs`: the last batch of an epoch has the 2 rows that are left; here "
        "batches go on into the next epoch",
    ),
    "trl_sft": _trl(
        "`SFTTrainer`, completions alone",
        "SFTTrainer",
        learning_rate=1e-3,
        max_length=32,
        packing=False,
        completion_only_loss=True,
    ),
    "trainer_lora": _trl(
        "`Trainer`, LoRA by PEFT",
        "Trainer",
        adapters={"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
        lr_scheduler_type="cosine",
        warmup_steps=3,
        weight_decay=0.1,
    ),
    "trl_grpo": _trl(
        "`GRPOTrainer`, given completions",
        "GRPOTrainer",
        **_GRPO,
    ),
    "trl_grpo_reused": _trl(
        "`GRPOTrainer`, each batch used twice, ratios clipped",
        "GRPOTrainer",
        **_GRPO,
        lr_scheduler_type="constant",
        num_iterations=2,
    ),
    # At a hundredth of the rate: where a gradient is zero but for the rounding of the KL term, Adam
    # makes a whole step of the rounding.
    "trl_grpo_reused_kl": _trl(
        "`GRPOTrainer`, each batch used twice, `beta=0.04`",
        "GRPOTrainer",
        **(_GRPO | {"learning_rate": 1e-5}),
        lr_scheduler_type="constant",
        num_iterations=2,
        beta=0.04,
    ),
    "maxtext_mixtral_masked": _maxtext(
        "mixtral, balance loss, 2 passes of unequal tokens",
        "mixtral",
        *_BALANCED,
        rows="masked",
        differs="`gradient_accumulation_steps`: a pass's balance loss is weighted by its trained "
        "tokens",
    ),
    "maxtext_taken_over": _maxtext(
        "llama2, taken over after 11 of 20 updates",
        "llama2",
        "checkpoint_period=10",
        taken_over=11,
    ),
    "maxtext_llama2_wsd": _maxtext(
        "llama2, layers not scanned, wsd of odd lengths, `learning_rate_schedule_steps`, 2 passes "
        "of unequal tokens",
        "llama2",
        "scan_layers=false",
        "lr_schedule_type=wsd",
        "warmup_steps_fraction=0.13",
        "wsd_decay_steps_fraction=0.37",
        "learning_rate_schedule_steps=17",
        "gradient_accumulation_steps=2",
        "per_device_batch_size=2",
    ),
    "maxtext_llama2_packed": _maxtext("llama2, packed rows", "llama2", rows="packed"),
    "maxtext_llama2_muon": _maxtext("llama2, `opt_type=muon`", "llama2", "opt_type=muon"),
    "maxtext_llama2_adam_pax": _maxtext(
        "llama2, `opt_type=adam_pax`", "llama2", "opt_type=adam_pax"
    ),
    "maxtext_llama2_sgd": _maxtext("llama2, `opt_type=sgd`", "llama2", "opt_type=sgd"),
    "maxtext_qwen3": _maxtext("qwen3", "qwen3", "use_qk_norm=true"),
    "maxtext_deepseek": _maxtext("deepseek", "deepseek", *DEEPSEEK),
    "maxtext_gemma3_whole": _maxtext(
        "gemma3, its embedding not rounded", "gemma3", *GEMMA3, whole_embedding=True
    ),
    "maxtext_gemma2_whole": _maxtext(
        "gemma2, its embedding not rounded",
        "gemma2",
        "model_name=gemma2-2b",
        "base_num_decoder_layers=1",
        "sliding_window_size=8",
        whole_embedding=True,
    ),
    "maxtext_gemma_whole": _maxtext(
        "gemma, its embedding not rounded", "gemma", "model_name=gemma-2b", whole_embedding=True
    ),
    "maxtext_z_loss": _maxtext("llama2, `z_loss_multiplier`", "llama2", "z_loss_multiplier=0.01"),
    "maxtext_sft": _maxtext(
        "`train_sft_native`, trained on completions, 2 passes of unequal tokens",
        "llama2",
        "dataset_type=hf",
        "hf_path=json",
        "hf_train_files=chats.jsonl",
        "tokenizer_path=tokenizer",
        "gradient_accumulation_steps=2",
        "per_device_batch_size=2",
        rows="masked",
        module="post_train.sft.train_sft_native",
    ),
}
