"""Rules of Axolotl's table: its data sets, and values that need code."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from maxbatch.around.importers.hub import hub_step, is_hub_name
from maxbatch.around.importers.steps import take_parameters
from maxbatch.around.importers.table import Format
from maxbatch.around.importers.trainer_words import TRAINER, length, per_device_equation, rates
from maxbatch.around.importers.translation import Translation
from maxbatch.around.words.convert import record_fields

# Its prompter's text around a record.
_ALPACA = (
    "write Alpaca's text (Below is an instruction ..., ### Instruction:, ### Response:) as "
    "chat_template.jinja beside the tokenizer; an input, there under ### Input:, follows the "
    "instruction after an empty line"
)


def _passes(t: Translation, word: str) -> None:
    passes = (t.number(word) or 1) // (t.number("micro_batch_size") or 1)
    t.map(
        word,
        "batch_size / micro_batch_size passes",
        gradient_accumulation_steps=f"{max(1, passes):g}",
    )


def _base_model(t: Translation, word: str) -> None:
    take_parameters(t, word)
    t.settings |= {"tokenizer_type": "huggingface", "tokenizer_path": t.text(word)}


def _names_a_class(t: Translation, word: str) -> bool:
    end = "ForCausalLM" if word == "model_type" else "Tokenizer"
    return re.search(rf"{end}(Fast)?$", t.text(word)) is not None


def _sources(t: Translation, _: str) -> None:
    """Takes the data sets: documents of plain text, or conversations in `messages`."""
    if not (sources := t.sources("datasets")):
        return
    kinds = {str(item.get("type", "completion")) for item in sources}
    settings = {"dataset_path": ";".join(item["path"] for item in sources), "dataset_type": "jsonl"}
    on_answers = "false" if t.is_true("train_on_inputs") else "true"
    chats = settings | {"use_sft": "true", "sft_train_on_completion_only": on_answers}
    if all(isinstance(item.get("type"), dict) for item in sources):
        _take_prompts(t, sources, chats)
    elif kinds <= {"completion", "pretrain"}:
        names = {str(item.get("field") or item.get("text_column") or "text") for item in sources}
        if len(names) > 1:
            t.refuse(
                "datasets", "must have one field for the text of all data sets", is_essential=True
            )
            return
        FORMAT.translate(t, "texts")
        _take_sources(
            t, sources, settings | ({} if names == {"text"} else {"text_field": names.pop()})
        )
    elif kinds == {"alpaca"}:
        t.map("train_on_inputs", sft_train_on_completion_only=on_answers)
        _take_sources(t, sources, chats | {"sft_format": "alpaca"}, _ALPACA)
    elif kinds != {"chat_template"}:
        rule = f"type {', '.join(sorted(kinds))}: must be completion, chat_template or alpaca"
        t.refuse("datasets", rule, is_essential=True)
    elif others := _unlike_ours(_without_messages(sources)):
        rule = f"must have records with messages of role and content, without {', '.join(others)}"
        t.refuse("datasets", rule, is_essential=True)
    else:
        if all(map(_is_sharegpt, sources)):
            chats["sft_format"] = "sharegpt"
        elif fields := record_fields(
            {"messages": str(sources[0].get("field_messages") or "messages")}
        ):
            chats["record_fields"] = fields
        if "train_on_inputs" in t:
            t.map("train_on_inputs", sft_train_on_completion_only=on_answers)
        FORMAT.translate(t, "templates")
        _take_sources(t, sources, chats)


def _take_sources(
    t: Translation, sources: list[dict[str, str]], settings: Mapping[str, str], step: str = ""
) -> None:
    """Takes the data sets; `step` is work for the user, beside the download of a hub data set."""
    hub = [item["path"] for item in sources if is_hub_name(item["path"])]
    if hub or step:
        steps = [" and ".join(hub_step(name, "dataset") for name in hub), step]
        steps.append("dataset_type=parquet if the files are")
        t.need("datasets", "; ".join(filter(None, steps)), **settings)
    else:
        t.map(
            "datasets",
            "its files, at that path; state dataset_type if they are not jsonl",
            **settings,
        )


_MOST_WARMUP = 100  # updates, unless the file states the warmup
_PAIR_KINDS = ("chat_template.default", "chat_template.argilla")
_OF_PAIRS = {"use_dpo": "true", "packing": "false", "dataset_type": "jsonl"}
_BETAS = ("trl.beta", "rl_beta", "dpo_beta", "orpo_alpha")  # the first stated one applies


def _weight(t: Translation, word: str) -> None:
    """Takes `rl: dpo` and `rl: orpo`, whose batch counts pairs; the defaults are TRL's."""
    algo = t.text(word).lower()
    beta = next((word for word in _BETAS if word in t), "")
    weight = {"dpo_beta" if algo == "dpo" else "orpo_lambda": t.text(beta) if beta else "0.1"}
    t.map(word, "a batch counts pairs, as there", dpo_algo=algo, **weight, **_OF_PAIRS)
    for other in _BETAS:
        if other in t and other == beta:
            t.map(other, **weight)
        elif other in t:
            t.ignore(other, f"{beta} goes first there")


def _pair_sources(t: Translation, _: str) -> None:
    if not (sources := t.sources("datasets")):
        return
    kinds = {str(item.get("type")) for item in sources}
    if not kinds <= set(_PAIR_KINDS):
        rule = f"type {', '.join(sorted(kinds))}: must be {' or '.join(_PAIR_KINDS)}"
        t.refuse("datasets", rule, is_essential=True)
        return
    FORMAT.translate(t, "templates")
    fields = sorted({str(item.get("field_messages", "messages")) for item in sources})
    step = "write its records as lists of messages of role and content: chosen and rejected"
    if "chat_template.default" in kinds:
        step += f" (there one message each), and prompt (there {', '.join(fields)})"
    _take_sources(
        t, sources, {**_OF_PAIRS, "dataset_path": ";".join(item["path"] for item in sources)}, step
    )


_OURS_OF_A_SOURCE = {
    "type": ("chat_template",),
    "field_messages": ("messages",),
    "roles_to_train": (["assistant"],),
    "train_on_eos": ("turn",),
    "split": ("train",),
    "message_property_mappings": ({"role": "role", "content": "content"},),
    "chat_template": ("tokenizer_default",),
    "ds_type": ("json",),
}


# Words of a type of prompts, with their defaults.
_PROMPT_WORDS = {
    "field_instruction": "instruction",
    "field_input": "input",
    "field_output": "output",
    "format": "{instruction} {input} ",
    "no_input_format": "{instruction} ",
}
_SHAREGPT = {
    "field_messages": "conversations",
    "message_property_mappings": {"role": "from", "content": "value"},
}


def _is_sharegpt(source: Mapping[str, object]) -> bool:
    return all(source.get(name) == value for name, value in _SHAREGPT.items())


def _without_messages(sources: list[dict[str, str]]) -> list[dict[str, str]]:
    """Returns the data sets without the field of their messages, if all have the same, and
    ShareGPT's names in it.
    """
    fields = {str(source.get("field_messages") or "messages") for source in sources}
    if len(fields) > 1 or record_fields({"messages": next(iter(fields))}) is None:
        return sources
    ours = {"message_property_mappings": _SHAREGPT["message_property_mappings"]}
    return [
        {
            n: value
            for n, value in source.items()
            if n != "field_messages" and ours.get(n, "") != value
        }
        for source in sources
    ]


def _take_prompts(t: Translation, sources: list[dict[str, str]], chats: Mapping[str, str]) -> None:
    """Takes data sets of instructions and outputs in fields of their own, whose text a format
    writes.
    """
    kinds: list[object] = [source["type"] for source in sources]
    kind = kinds[0]
    assert isinstance(kind, dict), "checked by the caller"
    if any(other != kind for other in kinds):
        t.refuse("datasets", "must have one type for all data sets", is_essential=True)
        return
    if others := sorted(
        name for name, value in kind.items() if value and name not in _PROMPT_WORDS
    ):
        t.refuse(
            "datasets",
            f"must have a type of prompts without {', '.join(others)}",
            is_essential=True,
        )
        return
    texts = {name: str(kind.get(name) or default) for name, default in _PROMPT_WORDS.items()}
    fields = record_fields(
        {"prompt": texts["field_instruction"], "completion": texts["field_output"]}
    )
    if fields is None:
        t.refuse(
            "datasets",
            "must have fields whose names have no comma, colon or brace",
            is_essential=True,
        )
        return
    named = {"sft_format": "completion", **({"record_fields": fields} if fields else {})}
    formats = {texts["format"], texts["no_input_format"]}
    step = (
        ""
        if formats == {"{instruction}"}
        else (
            f"write the text of its format ({' or '.join(sorted(repr(form) for form in formats))}) "
            f"into the field {texts['field_instruction']}"
        )
    )
    if "train_on_inputs" in t:
        t.map("train_on_inputs", sft_train_on_completion_only=chats["sft_train_on_completion_only"])
    FORMAT.translate(t, "templates")
    _take_sources(t, sources, {**chats, **named}, step)


def _unlike_ours(sources: list[dict[str, str]]) -> list[str]:
    """Returns settings of chat data sets that affect records or weights and have no counterpart."""
    words = (
        (name, value)
        for item in sources
        for name, value in item.items()
        if name not in ("path", "name")
    )
    return sorted(
        {name for name, value in words if value and value not in _OURS_OF_A_SOURCE.get(name, ())}
    )


FORMAT = Format(
    "axolotl",
    per_device_equation("micro_batch_size"),
    {
        "passes": _passes,
        "length": lambda t, _: length(t, "num_epochs"),
        "rates": lambda t, word: rates(t, word, math.floor, _MOST_WARMUP),
        "base_model": _base_model,
        "sources": _sources,
        "weight": _weight,
        "loss": lambda t, word: t.map(word, dpo_algo=t.text("rl").lower()),
        "pair_sources": _pair_sources,
    },
    {
        "is_of_pairs": lambda t, _: t.text("rl").lower() in ("dpo", "orpo"),
        "is_sigmoid": lambda t, word: word in t and t.items(word) == ["sigmoid"],
        "names_a_class": _names_a_class,
    },
    TRAINER,
)
