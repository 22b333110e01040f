"""Rules of torchtitan's table: its batch in rows or in tokens, its schedule, its models and its
data.
"""

from __future__ import annotations

from fractions import Fraction

from maxbatch.around.importers.hub import is_hub_name
from maxbatch.around.importers.steps import take_tokenizer
from maxbatch.around.importers.table import Format
from maxbatch.around.importers.translation import Translation
from maxbatch.around.words.convert import read_number
from maxbatch.config.paths import presets
from maxbatch.config.values import plain_number

_ROWS, _BATCH, _LENGTH = (
    "training.local_batch_size",
    "training.global_batch_size",
    "training.seq_len",
)
_TOKENS, _TOKENS_OF_BATCH = (
    "training.num_tokens_per_microbatch_per_dp_rank",
    "training.num_tokens_per_train_step",
)
_PARTS = "parallelism.num_pp_microbatches"  # of one pass
_DEFAULT_ROWS, _DEFAULT_LENGTH = "8", "2048"


def _batch(t: Translation, _: str) -> None:
    """Takes the batch; a data-parallel rank, which is a replica here, has the local batch in one
    pass.
    """
    if _LENGTH not in t:
        t.assume({_LENGTH: _DEFAULT_LENGTH})
    t.map(_LENGTH, max_target_length=t.text(_LENGTH))
    if _TOKENS in t:
        _batch_of_tokens(t)
        return
    if _ROWS not in t:
        t.assume({_ROWS: _DEFAULT_ROWS})
    t.map(_ROWS, t.replica_in_words(), per_device_batch_size=t.rows_of_device(_ROWS))
    if (t.number(_BATCH) or -1) > 0:
        t.map(_BATCH, "kept on any number of devices", global_batch_size=t.text(_BATCH))
    else:
        t.settings["gradient_accumulation_steps"] = "1"
        if _BATCH in t:
            t.ignore(_BATCH, "-1: one pass per update")


def _batch_of_tokens(t: Translation) -> None:
    """Takes a batch in tokens: a pass of a rank has the tokens of a micro-batch for each part in
    the pipeline.
    """
    length, tokens = read_number(t.text(_LENGTH)), read_number(t.text(_TOKENS))
    microbatches = (
        read_number(t.text(_PARTS, "1"))
        if "ici_pipeline_parallelism" in t.settings
        else Fraction(1)
    )
    if length is None or tokens is None or microbatches is None:
        t.refuse(_TOKENS, f"must be a number of tokens, beside {_LENGTH}", is_essential=True)
        return
    rows = str(plain_number(tokens * microbatches / length / t.replica))
    why = (
        f"tokens x {microbatches} / {length} tokens of a row"
        if microbatches > 1
        else f"tokens / {length} tokens of a row"
    )
    t.map(_TOKENS, "; ".join(filter(None, (why, t.replica_in_words()))), per_device_batch_size=rows)
    if _PARTS in t:
        t.ignore(_PARTS, "its micro-batches are parts of a pass in the pipeline")
    if (t.number(_TOKENS_OF_BATCH) or -1) > 0:
        t.map(_TOKENS_OF_BATCH, "in tokens", global_batch_size=f"{t.text(_TOKENS_OF_BATCH)}t")
    else:
        t.settings["gradient_accumulation_steps"] = "1"
        if _TOKENS_OF_BATCH in t:
            t.ignore(_TOKENS_OF_BATCH, "-1: one pass per update")


def _rates(t: Translation, _: str) -> None:
    """Takes the warm-up, and the decay to the end of the run or in its last part."""
    steps, warmup = t.number("training.steps"), t.number("lr_scheduler.warmup_steps")
    kind, ratio = t.text("lr_scheduler.decay_type"), t.number("lr_scheduler.decay_ratio")
    share = min(1.0, warmup / steps) if steps and warmup is not None else 0.0
    if not steps or warmup is None:
        t.refuse("lr_scheduler.warmup_steps", "must be updates, beside training.steps")
    else:
        t.map(
            "lr_scheduler.warmup_steps",
            "warmup steps / steps",
            warmup_steps_fraction=f"{share:.12g}",
        )
    last = {"learning_rate_final_fraction": t.text("lr_scheduler.min_lr_factor")}
    t.map("lr_scheduler.min_lr_factor", "last rate / peak", **last)
    if kind == "linear":
        decay = f"{1 - share if ratio is None else ratio:.12g}"
        t.map(
            "lr_scheduler.decay_type", learning_rate_schedule="wsd", wsd_decay_steps_fraction=decay
        )
        if "lr_scheduler.decay_ratio" in t:
            t.map("lr_scheduler.decay_ratio", wsd_decay_steps_fraction=decay)
    elif kind == "cosine" and ratio is None:
        t.map("lr_scheduler.decay_type", learning_rate_schedule="cosine")
    else:
        t.refuse("lr_scheduler.decay_type", "must be linear, or cosine without decay_ratio")


def _model(t: Translation, _: str) -> None:
    name, flavor = t.text("model.name", "llama3").lower(), t.text("model.flavor").lower()
    preset = f"{name}-{flavor}"
    if flavor and preset in presets():
        t.map("model.flavor", model_name=preset)
    elif flavor:
        step = (
            f"the sizes of its {t.text('model.flavor')}, as keys of the model; works with "
            "model_name of a preset too"
        )
        t.need("model.flavor", step)
    if "model.name" in t:
        t.ignore("model.name", "model.flavor names the preset")
    for word in ("model.tokenizer_path", "model.hf_assets_path", "hf_assets_path"):
        if word in t:
            folder = t.text(word).removesuffix("/original/tokenizer.model")
            t.settings["tokenizer_type"] = "huggingface"
            if folder == t.text(word):
                take_tokenizer(t, word, folder)
            else:
                t.need(word, "the folder with tokenizer.json", tokenizer_path=folder)


def _data(t: Translation, _: str) -> None:
    name, path = t.text("training.dataset"), t.text("training.dataset_path")
    if path and not is_hub_name(path):
        t.map(
            "training.dataset_path", "state dataset_type", dataset_path=path, dataset_type="jsonl"
        )
        if name:
            t.ignore("training.dataset", "training.dataset_path has its files")
    elif name:
        step = (
            f"records of text of {name} in that file, or dataset_path and dataset_type of its files"
        )
        t.need("training.dataset", step, dataset_path=f"{name}.jsonl", dataset_type="jsonl")


def _equation(t: Translation) -> tuple[str, str]:
    """Returns the batch as an equation in torchtitan's words and in ours."""
    rows = t.settings["per_device_batch_size"]
    degree = "GPUs" if t.replica == 1 else f"GPUs / {t.replica} of a replica"
    local = t.text(_TOKENS) + " tokens" if _TOKENS in t else t.text(_ROWS)
    if batch := t.settings.get("global_batch_size"):
        there = (
            f"global batch {batch} = local batch {local} x data-parallel degree ({degree}) x passes"
        )
        return (
            there,
            f"global_batch_size {batch}, in passes of at most per_device_batch_size {rows} x "
            "devices",
        )
    there = f"global batch = local batch {local} x data-parallel degree ({degree})"
    return there, f"per_device_batch_size {rows} x devices"


FORMAT = Format(
    "torchtitan", _equation, {"batch": _batch, "rates": _rates, "model": _model, "data": _data}
)
