"""Rules of MaxText's table on data: pipelines (synthetic, tfds, hf, grain), files and
tokenizers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from maxbatch.around.importers.hub import hub_step, is_hub_name
from maxbatch.around.importers.steps import take_tokenizer
from maxbatch.around.importers.table import Condition, Rule
from maxbatch.around.importers.translation import Translation
from maxbatch.around.words.convert import read_number
from maxbatch.config.sections import KEYS

_PIPELINES = {"olmo": "olmo_grain", "grain": "grain", "hf": "hf"}  # with the prefix of their words


def _kind(t: Translation) -> str:
    """Returns the pipeline; a named data set without one is tfds."""
    is_named = "dataset_type" not in t and any(
        word in t for word in ("dataset_path", "dataset_name")
    )
    return "tfds" if is_named else t.text("dataset_type")


def _has_eval(t: Translation) -> bool:
    return (t.number("eval_interval") or -1) > 0


def _columns(t: Translation) -> list[str]:
    return t.items("train_data_columns") or ["text"]


def _named(t: Translation, _: str) -> None:
    """Explains the pipeline of a named data set without a dataset_type."""
    if "dataset_type" not in t:
        why = (
            "a data set is named; 0.2.5 reads none of it without dataset_type=tfds, the default "
            "before it"
        )
        t.map("dataset_type", why, dataset_type=t.settings["dataset_type"])


def _text(t: Translation, word: str) -> None:
    columns = _columns(t)
    if len(columns) == 1:
        t.map(word, text_field=columns[0])
    else:
        t.refuse(word, "must be one field, which holds the text", is_essential=True)


def _conversations(t: Translation, word: str) -> None:
    """Takes the fields of conversations, whose names are fixed here, and the trained tokens."""
    t.assume({"sft_train_on_completion_only": "false"})
    if _columns(t) in (["messages"], ["prompt", "completion"]):
        t.ignore(word, "records with messages, or with prompt and completion, are read as they are")
    elif word in t:
        t.refuse(word, "must be messages, or prompt and completion", is_essential=True)


def _pairs(t: Translation, _: str) -> None:
    """Takes the fields of pairs of answers; their names are fixed here."""
    columns = _columns(t)
    if "train_data_columns" not in t:
        return
    if set(columns) in ({"chosen", "rejected"}, {"prompt", "chosen", "rejected"}):
        t.ignore(
            "train_data_columns",
            "records with chosen and rejected, and perhaps prompt, are read as they are",
        )
    elif len(columns) == 3 and {"chosen", "rejected"} < set(columns):
        prompt = next(column for column in columns if column not in ("chosen", "rejected"))
        t.need("train_data_columns", f"rename the field {prompt} of the records to prompt")
    else:
        t.refuse(
            "train_data_columns",
            "must be chosen and rejected, and perhaps prompt",
            is_essential=True,
        )


def _of_pipelines(t: Translation, _: str) -> None:
    """Leaves out words of other pipelines, and of a packing that the pipeline lacks."""
    kind = _kind(t)
    for word in t.left():
        pipeline = word.partition("_")[0]
        if (
            _PIPELINES.get(pipeline, kind) != kind
            and word in t
            and word not in (*KEYS, "hf_access_token")
        ):
            t.ignore(word, f"dataset_type={kind} does not read it")


def _tfds(t: Translation, _: str) -> None:
    name = t.text("dataset_name", "c4/en:3.1.0")
    folder = f"{t.text('dataset_path').rstrip('/')}/{name.replace(':', '/')}".lstrip("/")
    split = t.text("train_split", "train")
    step = f"its tfrecord files in that folder (tfds build {name})"
    path = {"dataset_path": f"{folder}/*-{split}.tfrecord*"}
    t.map("dataset_type", dataset_type="tfrecord")
    for word in ("dataset_path", "dataset_name", "train_split"):
        if word == "dataset_name":
            t.need(word, step, **path)
        elif word in t:
            t.map(word, **path)
    if _has_eval(t):
        other = t.text("eval_dataset_name", name).replace(":", "/")
        held_out = f"{t.text('dataset_path').rstrip('/')}/{other}".lstrip("/")
        files = f"{held_out}/*-{t.text('eval_split', 'validation')}.tfrecord*"
        for word in ("eval_dataset_name", "eval_split"):
            t.map(word, eval_dataset_path=files)


def _hf(t: Translation, _: str) -> None:
    files, name = t.text("hf_train_files"), t.text("hf_path")
    kind = "jsonl" if "json" in (files or name) else "parquet"
    t.map("dataset_type", dataset_type=kind)
    names = [part for part in (name, t.text("hf_name"), t.text("hf_data_dir")) if part]
    path = files or f"{'/'.join(names)}/*{t.text('train_split', 'train')}*.{kind}"
    if not files and not name:
        t.refuse("hf_path", "must name the files of the data set", is_essential=True)
        return
    for word in ("hf_train_files", "hf_path", "hf_name", "hf_data_dir", "train_split"):
        if word in t and word == "hf_path" and not files:
            step = (
                hub_step(name, "dataset")
                if is_hub_name(name)
                else f"its {kind} files in that folder"
            )
            t.need(word, step, dataset_path=path)
        elif word in t:
            t.map(word, dataset_path=path)
    held_out = (
        t.text("hf_eval_files")
        or f"{'/'.join(names)}/*{t.text('hf_eval_split', 'validation')}*.{kind}"
    )
    for word in ("hf_eval_files", "hf_eval_split"):
        if word in t and _has_eval(t):
            t.map(word, eval_dataset_path=held_out)


def _store_split(t: Translation, word: str) -> None:
    """Takes the shares of Megatron-LM's stores; the second part is held out."""
    shares = [read_number(part) for part in t.text(word).split(",")]
    total = sum(filter(None, shares))
    if len(shares) == 2 and None not in shares and total:
        t.map(word, "the second part", eval_fraction=f"{float((shares[1] or 0) / total):.12g}")
    else:
        t.refuse(word, "must be two shares, such as 99,1", is_essential=True)


def _tokenizer(t: Translation, _: str) -> None:
    name, path = t.text("model_name") or "default", t.text("tokenizer_path")
    of_model = not path and name != "default"  # its tokenizer there is Hugging Face's
    kind = "huggingface" if of_model else t.text("tokenizer_type", "sentencepiece")
    if kind not in ("sentencepiece", "huggingface", "tiktoken"):
        t.refuse(
            "tokenizer_type", "must be sentencepiece, huggingface or tiktoken", is_essential=True
        )
        return
    if kind == "tiktoken":
        step = "the tokenizer.json of the same model, which gives the same tokens, in that folder"
        t.map("tokenizer_type", tokenizer_type="huggingface")
        t.need("tokenizer_path", step, tokenizer_path=f"tokenizers/{name}")
        return
    t.map("tokenizer_type", tokenizer_type=kind)
    local = re.sub(r"^.*?(?=assets/)|^\$\{?\w+\}?/*", "", path)
    if not path:
        t.need(
            "tokenizer_path",
            "the tokenizer of the model at that path",
            tokenizer_path=f"tokenizers/{name}",
        )
    elif local.startswith("assets/"):
        step = "MaxText's src/maxtext/assets, copied or linked as assets"
        t.need("tokenizer_path", step, tokenizer_path=local)
    else:
        take_tokenizer(t, "tokenizer_path", local)


DATA_RULES: Mapping[str, Rule] = {
    "tfds": _tfds,
    "hf": _hf,
    "named": _named,
    "tokens": _tokenizer,
    "text": _text,
    "conversations": _conversations,
    "columns_of_pairs": _pairs,
    "of_pipelines": _of_pipelines,
    "store_split": _store_split,
    "unused": lambda t, word: t.ignore(word, f"dataset_type={_kind(t)} does not use it"),
}
DATA_CONDITIONS: Mapping[str, Condition] = {
    "is_synthetic": lambda t, _: _kind(t) == "synthetic",
    "is_tfds": lambda t, _: _kind(t) == "tfds",
    "is_hf": lambda t, _: _kind(t) == "hf",
    "is_stores": lambda t, _: (
        _kind(t) == "grain" and t.text("grain_file_type") in ("mmap", "mmap_npy")
    ),
    "is_grain": lambda t, _: _kind(t) == "grain",
    "has_eval": lambda t, _: _has_eval(t),
    "has_no_eval": lambda t, _: not _has_eval(t),
    "has_same_columns": lambda t, word: _kind(t) != "synthetic" and t.items(word) == _columns(t),
}
