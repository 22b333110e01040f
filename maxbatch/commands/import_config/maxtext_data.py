"""MaxText's data words: its pipelines (synthetic, tfds, hf, grain), their files and tokenizers, as ours."""

from __future__ import annotations

import re

from maxbatch.commands.import_config.hub import hub_step, is_hub_name
from maxbatch.commands.import_config.steps import take_tokenizer
from maxbatch.commands.import_config.translation import Translation
from maxbatch.config.loading import keys

_DATA_WORDS = (
    "dataset_path", "dataset_name", "eval_dataset_name", "train_split", "eval_split", "hf_path", "hf_name",
    "hf_data_dir", "hf_train_files", "hf_eval_split", "hf_eval_files", "grain_train_files", "grain_eval_files",
    "grain_file_type", "tokenizer_path", "tokenizer_type", "train_data_columns", "eval_data_columns", "add_bos",
    "add_eos", "tokenize_train_data", "tokenize_eval_data",
)  # fmt: skip

_PIPELINES = {"olmo": "olmo_grain", "grain": "grain", "hf": "hf"}  # whose words begin so


def translate_data(t: Translation) -> None:
    """Takes the words of the data."""
    kind, why = t.text("dataset_type"), ""
    if "dataset_type" not in t and any(word in t for word in ("dataset_path", "dataset_name")):
        kind = "tfds"
        why = "a data set is named; 0.2.5 reads none of it without dataset_type=tfds, the default before it"
    is_eval = (t.number("eval_interval") or -1) > 0
    reads = {"synthetic": _synthetic, "tfds": _tfds, "hf": _hf, "grain": _grain}.get(kind)
    if reads is None:
        t.refuse("dataset_type", "synthetic, tfds, hf or grain", is_essential=True)
        return
    reads(t, is_eval)
    if why:
        t.map("dataset_type", why, **{name: t.settings[name] for name in ("dataset_type", "record_format")})
    columns = t.items("train_data_columns") or ["text"]
    if kind != "synthetic":
        _tokenizer(t)
        if t.is_true("use_dpo"):
            _pairs(t, columns)
        elif t.is_true("use_sft"):
            _conversations(t, columns)
        elif len(columns) == 1:
            t.map("train_data_columns", text_field=columns[0])
        else:
            t.refuse("train_data_columns", "one field holds the text", is_essential=True)
    if "eval_data_columns" in t and kind != "synthetic" and t.items("eval_data_columns") == columns:
        t.ignore("eval_data_columns", "held-out data have the fields of train_data_columns")
    _rows(t, kind)
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


def _conversations(t: Translation, columns: list[str]) -> None:
    """Takes the fields of conversations, whose names are fixed here, and the tokens that are trained on."""
    t.assume({"sft_train_on_completion_only": "false"})
    if columns in (["messages"], ["prompt", "completion"]):
        t.ignore("train_data_columns", "records with messages, or with prompt and completion, are read as they are")
    elif "train_data_columns" in t:
        t.refuse("train_data_columns", "messages, or prompt and completion", is_essential=True)


def _pairs(t: Translation, columns: list[str]) -> None:
    """Takes the fields of pairs of answers: their names are fixed here."""
    if "train_data_columns" not in t:
        return
    if set(columns) in ({"chosen", "rejected"}, {"prompt", "chosen", "rejected"}):
        t.ignore("train_data_columns", "records with chosen and rejected, and perhaps prompt, are read as they are")
    elif len(columns) == 3 and {"chosen", "rejected"} < set(columns):
        prompt = next(column for column in columns if column not in ("chosen", "rejected"))
        t.need("train_data_columns", f"rename the field {prompt} of the records to prompt")
    else:
        t.refuse("train_data_columns", "chosen and rejected, and perhaps prompt", is_essential=True)


def _rows(t: Translation, kind: str) -> None:
    """Takes the words on documents that are longer than a row, and those of other pipelines."""
    if t.is_true("use_truncation"):
        if t.is_true("use_sft") or t.is_true("use_dpo"):
            t.map("use_truncation", overlong="truncate")
        else:
            t.ignore("use_truncation", "its default; here a document longer than a row is split, so no token is lost")
    take_template(t, is_read=t.is_true("use_sft") or t.is_true("use_dpo"))
    for word in t.left():
        pipeline = word.partition("_")[0]
        if _PIPELINES.get(pipeline, kind) != kind and word in t and word not in (*keys(), "hf_access_token"):
            t.ignore(word, f"dataset_type={kind} does not read it")


def take_template(t: Translation, is_read: bool) -> None:
    """Takes the template of a chat, as a text or as a file."""
    for word in ("chat_template", "chat_template_path"):
        if word in t and is_read:
            t.need(word, "put its text into chat_template.jinja beside the tokenizer")
        elif word in t:
            t.ignore(word, "documents are text, without a chat's template")


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
    step = f"its array_record files in that folder (tfds build {name} --file_format=array_record)"
    path = {"dataset_path": f"{folder}/*-{split}.array_record*"}
    t.map("dataset_type", dataset_type="arrayrecord", record_format="example")
    for word in ("dataset_path", "dataset_name", "train_split"):
        if word == "dataset_name":
            t.need(word, step, **path)
        elif word in t:
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
    for word in ("hf_train_files", "hf_path", "hf_name", "hf_data_dir", "train_split"):
        if word in t and word == "hf_path" and not files:
            step = hub_step(name, "dataset") if is_hub_name(name) else f"its {kind} files in that folder"
            t.need(word, step, dataset_path=path)
        elif word in t:
            t.map(word, dataset_path=path)
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
    name, path = t.text("model_name") or "default", t.text("tokenizer_path")
    of_model = not path and name != "default"  # whose tokenizer there is the one of Hugging Face
    kind = "huggingface" if of_model else t.text("tokenizer_type", "sentencepiece")
    if kind not in ("sentencepiece", "huggingface", "tiktoken"):
        t.refuse("tokenizer_type", "sentencepiece, huggingface or tiktoken", is_essential=True)
        return
    if kind == "tiktoken":
        step = "the tokenizer.json of the same model, which gives the same tokens, in that folder"
        t.map("tokenizer_type", tokenizer_type="huggingface")
        t.need("tokenizer_path", step, tokenizer_path=f"tokenizers/{name}")
        return
    t.map("tokenizer_type", tokenizer_type=kind)
    local = re.sub(r"^.*?(?=assets/)|^\$\{?\w+\}?/*", "", path)
    if not path:
        t.need("tokenizer_path", "the tokenizer of the model at that path", tokenizer_path=f"tokenizers/{name}")
    elif local.startswith("assets/"):
        step = "MaxText's src/maxtext/assets, copied or linked as assets"
        t.need("tokenizer_path", step, tokenizer_path=local)
    else:
        take_tokenizer(t, "tokenizer_path", local)
