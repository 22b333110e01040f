"""Rules of LLaMA-Factory's table: its data sets, which a file of its own describes, and its adapters."""

from __future__ import annotations

from maxbatch.commands.import_config import hf
from maxbatch.commands.import_config.table import Format
from maxbatch.commands.import_config.trainer_words import per_device_equation
from maxbatch.commands.import_config.translation import Translation
from maxbatch.config.matrices import OF_PEFT

_RECORDS = {
    "sft": "records of messages, or of prompt and completion",
    "pt": "records of text",
    "dpo": "records with prompt, chosen and rejected",
}


def _data(t: Translation, _: str) -> None:
    """Takes the data sets by name: its dataset_info.json has their files, which are written anew as our records."""
    stage = t.text("stage")
    names = [name.strip() for item in t.items("dataset") for name in item.split(",") if name.strip()]
    records = _RECORDS.get(stage)
    if names and records:
        files = ";".join(f"{name}.jsonl" for name in names)
        step = f"{records} in these files; its dataset_info.json names the files of {', '.join(names)}"
        t.need("dataset", step, dataset_path=files, dataset_type="jsonl")
    elif "dataset" in t:
        t.refuse("dataset", "names of data sets, in stage pt, sft or dpo", is_essential=True)
    held_out = [name.strip() for item in t.items("eval_dataset") for name in item.split(",") if name.strip()]
    if held_out and records:
        t.need("eval_dataset", f"{records} in that file", eval_dataset_path=f"{held_out[0]}.jsonl")
    if "template" in t and stage == "pt":
        t.ignore("template", "documents are plain text")
    elif "template" in t:
        step = f"its {t.text('template')} template as chat_template.jinja beside the tokenizer, unless that one has it"
        t.need("template", step)
    if model := t.text("model_name_or_path"):
        t.settings |= {"tokenizer_type": "huggingface", "tokenizer_path": model}


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
        t.refuse(word, f"all, or a list of {', '.join(OF_PEFT)}", is_essential=True)


FORMAT = Format(
    "llamafactory",
    per_device_equation("per_device_train_batch_size"),
    {"data": _data, "alpha": _alpha, "targets_of": _targets},
    parent=hf.FORMAT,
)
