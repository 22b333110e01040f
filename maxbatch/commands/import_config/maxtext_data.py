"""MaxText's data words: its pipelines (synthetic, tfds, hf, grain), their files and tokenizers, as ours."""

from __future__ import annotations

import re

from maxbatch.commands.import_config.translation import Translation

_DATA_WORDS = (
    "dataset_path", "dataset_name", "eval_dataset_name", "train_split", "eval_split", "hf_path", "hf_name",
    "hf_data_dir", "hf_train_files", "hf_eval_split", "hf_eval_files", "grain_train_files", "grain_eval_files",
    "grain_file_type", "tokenizer_path", "tokenizer_type", "train_data_columns", "eval_data_columns", "add_bos",
    "add_eos", "tokenize_train_data", "tokenize_eval_data",
)  # fmt: skip


def translate_data(t: Translation) -> None:
    """Takes the words of the data."""
    kind = t.text("dataset_type")
    is_eval = (t.number("eval_interval") or -1) > 0
    reads = {"synthetic": _synthetic, "tfds": _tfds, "hf": _hf, "grain": _grain}.get(kind)
    if reads is None:
        t.refuse("dataset_type", "synthetic, tfds, hf or grain", is_essential=True)
        return
    reads(t, is_eval)
    if kind != "synthetic":
        _tokenizer(t)
        columns = t.items("train_data_columns") or ["text"]
        if len(columns) == 1:
            t.map("train_data_columns", text_field=columns[0])
        else:
            t.refuse("train_data_columns", "one field holds the text", is_essential=True)
    for word in ("eval_data_columns", *_DATA_WORDS):
        if word in t and not is_eval and word.startswith(("eval_", "hf_eval", "grain_eval")):
            t.ignore(word, "eval_interval=-1: there is no eval")
    if "grain_packing_type" in t:
        strategy = t.text("grain_packing_type")
        if strategy == "best_fit" and t.is_true("packing"):
            t.map("grain_packing_type", packing_strategy="best_fit")
        elif kind != "grain" or not t.is_true("packing"):
            t.ignore("grain_packing_type", f"dataset_type={kind} does not use it")
        else:
            t.map("grain_packing_type", f"{strategy} joins other documents; rows are other ones",
                  packing_strategy="concatenate")  # fmt: skip
    workers = t.text("grain_worker_count")
    if workers == "-1":
        t.map("grain_worker_count", "as many as read best is not found by itself", grain_worker_count="0")


def _synthetic(t: Translation, is_eval: bool) -> None:
    t.map("dataset_type", dataset_type="synthetic")
    for word in _DATA_WORDS:
        if word in t:
            t.ignore(word, "dataset_type=synthetic reads nothing")
    t.settings |= {"tokenizer_type": "byte"}


def _tfds(t: Translation, is_eval: bool) -> None:
    name = t.text("dataset_name", "c4/en:3.1.0")
    folder = f"{t.text('dataset_path').rstrip('/')}/{name.replace(':', '/')}".lstrip("/")
    split = t.text("train_split", "train")
    why = "TFDS's array_record files of that data set (tfds build --file_format=array_record)"
    path = {"dataset_path": f"{folder}/*-{split}.array_record*"}
    t.map("dataset_type", why, dataset_type="arrayrecord", record_format="example")
    for word in ("dataset_path", "dataset_name", "train_split"):
        if word in t or word == "dataset_name":
            t.map(word, **path)
    if is_eval:
        other = t.text("eval_dataset_name", name).replace(":", "/")
        held_out = f"{t.text('dataset_path').rstrip('/')}/{other}".lstrip("/")
        files = f"{held_out}/*-{t.text('eval_split', 'validation')}.array_record*"
        for word in ("eval_dataset_name", "eval_split"):
            t.map(word, eval_dataset_path=files)
    else:
        for word in ("eval_dataset_name", "eval_split"):
            if word in t:
                t.ignore(word, "eval_interval=-1: there is no eval")


def _hf(t: Translation, is_eval: bool) -> None:
    files, name = t.text("hf_train_files"), t.text("hf_path")
    kind = "jsonl" if "json" in (files or name) else "parquet"
    t.map("dataset_type", dataset_type=kind)
    parts = [part for part in (name, t.text("hf_name"), t.text("hf_data_dir")) if part]
    path = files or f"{'/'.join(parts)}/*{t.text('train_split', 'train')}*.{kind}"
    if not files and not name:
        t.refuse("hf_path", "the files of the data set", is_essential=True)
        return
    why = "" if files else f"its {kind} files, downloaded into that folder"
    for word in ("hf_train_files", "hf_path", "hf_name", "hf_data_dir", "train_split"):
        if word in t:
            t.map(word, why, dataset_path=path)
    held_out = t.text("hf_eval_files") or f"{'/'.join(parts)}/*{t.text('hf_eval_split', 'validation')}*.{kind}"
    for word in ("hf_eval_files", "hf_eval_split"):
        if word in t and is_eval:
            t.map(word, eval_dataset_path=held_out)
    for word in ("dataset_path", "dataset_name", "eval_dataset_name", "eval_split"):
        if word in t:
            t.ignore(word, "dataset_type=hf does not read it")


def _grain(t: Translation, is_eval: bool) -> None:
    kind = t.text("grain_file_type") or "arrayrecord"
    if kind not in ("arrayrecord", "parquet"):
        t.refuse("grain_file_type", "arrayrecord or parquet", is_essential=True)
        return
    record = {"record_format": "example"} if kind == "arrayrecord" else {}
    t.map("dataset_type", dataset_type=kind, **record)
    if "grain_file_type" in t:
        t.map("grain_file_type", dataset_type=kind)
    if "grain_train_files" in t:
        t.map("grain_train_files", dataset_path=t.text("grain_train_files"))
    elif "grain_train_mixture_config_path" not in t:
        t.refuse("grain_train_files", "the files of the data set", is_essential=True)
    if is_eval and "grain_eval_files" in t:
        t.map("grain_eval_files", eval_dataset_path=t.text("grain_eval_files"))
    for word in ("dataset_path", "dataset_name", "eval_dataset_name", "train_split", "eval_split"):
        if word in t:
            t.ignore(word, "dataset_type=grain does not read it")


def _tokenizer(t: Translation) -> None:
    kind, path = t.text("tokenizer_type", "sentencepiece"), t.text("tokenizer_path")
    if kind not in ("sentencepiece", "huggingface"):
        t.refuse("tokenizer_type", "sentencepiece or huggingface", is_essential=True)
        return
    ours = "huggingface" if kind == "huggingface" else "sentencepiece"
    name = t.text("model_name") or "default"
    why = "" if path else "the tokenizer of the model, put there"
    local = re.sub(r"^.*?(?=assets/)|^\$\{?\w+\}?/*", "", path) if path else f"tokenizers/{name}"
    t.map("tokenizer_type", tokenizer_type=ours)
    t.map("tokenizer_path", why, tokenizer_path=local)
