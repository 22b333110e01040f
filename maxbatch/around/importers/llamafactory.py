"""Rules of LLaMA-Factory's tables: its data sets, which a file of its own describes, its adapters,
and its v1 schema.
"""

from __future__ import annotations

from collections.abc import Iterable

from maxbatch.around.importers import hf
from maxbatch.around.importers.steps import take_parameters
from maxbatch.around.importers.table import Format
from maxbatch.around.importers.trainer_words import TRAINER, length, per_device_equation
from maxbatch.around.importers.translation import Translation
from maxbatch.around.words.convert import record_fields
from maxbatch.config.file_formats import record_types
from maxbatch.families.matrices import OF_PEFT

# Words for the parts of a message, with their defaults, which are ShareGPT's; both forms are read
# here.
_TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "system_tag": "system",
}
_TAGS_OF_OPENAI = {
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
    "system_tag": "system",
}
_RECORDS = {
    "sft": "records of messages, or of prompt and completion",
    "pt": "records of text",
    "dpo": "records with prompt, chosen and rejected",
}


def _data(t: Translation, _: str) -> None:
    """Takes the data sets by name: its dataset_info.json has their files, which are written anew as
    our records.
    """
    stage = t.text("stage")
    names = [
        name.strip() for item in t.items("dataset") for name in item.split(",") if name.strip()
    ]
    records = _RECORDS.get(stage)
    if names and records and (settings := _read_as_they_are(t, names, stage)):
        t.map("dataset", "its files, as dataset_info.json describes them", **settings)
    elif names and records:
        files = ";".join(f"{name}.jsonl" for name in names)
        step = (
            f"{records} in these files; its dataset_info.json names the files of {', '.join(names)}"
        )
        t.need("dataset", step, dataset_path=files, dataset_type="jsonl")
    elif "dataset" in t:
        t.refuse(
            "dataset", "must be names of data sets, in stage pt, sft or dpo", is_essential=True
        )
    held_out = [
        name.strip() for item in t.items("eval_dataset") for name in item.split(",") if name.strip()
    ]
    if held_out and records and (settings := _read_as_they_are(t, held_out, stage)):
        t.map(
            "eval_dataset",
            "its files, as dataset_info.json describes them",
            eval_dataset_path=settings["dataset_path"],
        )
    elif held_out and records:
        t.need("eval_dataset", f"{records} in that file", eval_dataset_path=f"{held_out[0]}.jsonl")
    if "template" in t and stage == "pt":
        t.ignore("template", "documents are plain text")
    elif "template" in t:
        step = (
            f"its {t.text('template')} template as chat_template.jinja beside the tokenizer, "
            "unless that one has it"
        )
        t.need("template", step)
    if model := t.text("model_name_or_path"):
        t.settings |= {"tokenizer_type": "huggingface", "tokenizer_path": model}


def _read_as_they_are(t: Translation, names: list[str], stage: str) -> dict[str, str] | None:
    """Returns the settings that read data sets in place; None if they need to be written anew, or
    are not described.
    """
    described = [_settings_of(t.described.get(name), stage) for name in names]
    read = [data_set for data_set in described if data_set]
    if len(read) < len(names) or any(settings != read[0][1] for _, settings in read):
        return None
    return {"dataset_path": ";".join(path for path, _ in read), **read[0][1]}


def _settings_of(described: object, stage: str) -> tuple[str, dict[str, str]] | None:
    """Returns the path of a data set and the settings that read it; None if its records are not
    ours.
    """
    if not isinstance(described, dict):
        return None
    columns, tags = described.get("columns") or {}, described.get("tags") or {}
    form: dict[str, str] = {}
    is_chat, is_ranking = (
        described.get("formatting", "alpaca") == "sharegpt",
        described.get("ranking") is True,
    )
    if (
        not isinstance(columns, dict)
        or not isinstance(tags, dict)
        or is_ranking != (stage == "dpo")
    ):
        return None
    if stage == "pt":
        wanted = {"prompt": "text"}
    elif is_ranking and not is_chat:
        wanted = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
    elif is_chat and not is_ranking:
        wanted, form = {"messages": "messages"}, {"sft_format": "messages"}
        columns = {"messages": "conversations"} | columns
    elif not is_chat:
        wanted, form = {"prompt": "instruction", "response": "output"}, {"sft_format": "alpaca"}
    else:
        return None
    # Without columns it reads an input and a history too, and joins them in its own way.
    if set(columns) != set(wanted) or not all(isinstance(name, str) for name in columns.values()):
        return None
    if tags and {name: tags.get(name, default) for name, default in _TAGS.items()} not in (
        _TAGS,
        _TAGS_OF_OPENAI,
    ):
        return None
    kind = next(
        (kind for kind in record_types() if str(described["file_name"]).endswith(f".{kind}")), None
    )
    fields = record_fields({ours: columns[theirs] for theirs, ours in wanted.items()})
    if kind is None or fields is None:
        return None
    if stage == "pt":
        return described["path"], {"dataset_type": kind, "text_field": columns["prompt"]}
    return described["path"], {
        "dataset_type": kind,
        **form,
        **({"record_fields": fields} if fields else {}),
    }


def _alpha(t: Translation, _: str) -> None:
    rank = t.number("lora_rank")
    if rank is not None:
        t.settings["lora_alpha"] = f"{2 * rank:g}"  # its default


def _targets(t: Translation, word: str) -> None:
    names = [name.strip() for item in t.items(word) for name in item.split(",") if name.strip()]
    if names == ["all"]:
        t.map(word, lora_targets="all")
    elif names and set(names) <= set(OF_PEFT):
        t.map(word, lora_targets=",".join(ours for name, ours in OF_PEFT.items() if name in names))
    else:
        t.refuse(word, f"must be all, or a list of {', '.join(OF_PEFT)}", is_essential=True)


_MICRO_BATCH = "micro_batch_size"  # of the v1 schema alone
_SIGNS_OF_V1 = (
    *(_MICRO_BATCH, "global_batch_size", "train_dataset", "model_class", "batching_strategy"),
    *("dist_config", "peft_config", "kernel_config", "quant_config", "init_config"),
    *("optim_config", "lr_scheduler_config"),
)
_SIGNS_OF_V0 = ("stage", "finetuning_type", "model_name_or_path", "per_device_train_batch_size")
_OF_PAIRS = ("pref_loss", "pref_beta", "dpo_label_smoothing")


def is_v1(words: Iterable[str]) -> bool:
    """Returns whether words are of the v1 schema, whose words of the batch, the data and the model
    differ.
    """
    names = {word.partition(".")[0] for word in words}
    return not names.isdisjoint(_SIGNS_OF_V1) and names.isdisjoint(_SIGNS_OF_V0)


def _equation(t: Translation) -> tuple[str, str]:
    """Returns the batch as an equation in LLaMA-Factory's words, of either schema, and in ours."""
    if not t.text(_MICRO_BATCH):
        return per_device_equation("per_device_train_batch_size")(t)
    rows, batch = t.text(_MICRO_BATCH), t.settings.get("global_batch_size")
    replicas = "GPUs" if t.replica == 1 else f"GPUs / {t.replica} of a replica"
    p = t.settings["per_device_batch_size"]
    if batch:
        return (
            f"global_batch_size {batch} = micro_batch_size {rows} x {replicas} x micro-batches",
            f"global_batch_size {batch}, in passes of at most per_device_batch_size {p} x devices",
        )
    return (
        f"global batch = micro_batch_size {rows} x {replicas}",
        f"per_device_batch_size {p} x devices",
    )


FORMAT = Format(
    "llamafactory",
    _equation,
    {"data": _data, "alpha": _alpha, "targets_of": _targets},
    parent=hf.FORMAT,
)
V1 = Format(
    "llamafactory_v1",
    _equation,
    {
        "length": lambda t, _: length(t, "num_train_epochs"),
        "parameters": take_parameters,
        "targets_of": _targets,
    },
    {"states_pairs": lambda t, _: any(word in t for word in _OF_PAIRS)},
    parent=TRAINER,
)
