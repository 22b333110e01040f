"""Rules of the table for TRL's GRPOConfig: batch of completions, lengths and rewards."""

from __future__ import annotations

from collections.abc import Container, Mapping

from maxbatch.commands.import_config import hf
from maxbatch.commands.import_config.prompts import (
    PROMPTS,
    take_chunk,
    take_rewards,
    take_sampling,
    take_target_length,
    whole,
    without_balance,
)
from maxbatch.commands.import_config.steps import take_dataset
from maxbatch.commands.import_config.table import Format
from maxbatch.commands.import_config.translation import Translation

PROCESSES = "num_processes"  # Accelerate's word for the devices of all machines
_OF_RESPONSES = ("num_generations", "generation_batch_size", "steps_per_generation", "max_completion_length")
_BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "generation_batch_size")


def is_of_responses(words: Container[str]) -> bool:
    """Returns whether the words are GRPOConfig's."""
    return any(word in words for word in _OF_RESPONSES)


def _processes(t: Translation, word: str) -> None:
    t.devices = t.devices or whole(t, word)
    t.ignore(word, f"its batch is counted on {t.devices} devices; here devices are found when the run starts")


def _sizes(t: Translation) -> Mapping[str, int] | None:
    """Returns rows per device, passes per update and per batch, and completions of both; None if not stated."""
    rows, passes = whole(t, _BATCH[0]), whole(t, _BATCH[1])
    if t.devices is None or rows is None or passes is None:
        return None
    of_pass = rows * t.devices
    if "generation_batch_size" in t:
        per_batch, rest = divmod(whole(t, "generation_batch_size") or 0, of_pass)
        per_batch = 0 if rest else per_batch
    else:
        per_batch = whole(t, "steps_per_generation") or passes if "steps_per_generation" in t else passes
    return {"rows": rows, "passes": passes, "per_batch": per_batch, "update": of_pass * passes,
            "batch": of_pass * per_batch}  # fmt: skip


def _batch(t: Translation, _: str) -> None:
    """Takes the batch."""
    group, iterations = whole(t, "num_generations"), whole(t, "num_iterations")
    words = [word for word in _BATCH if word in t or word in _BATCH[:2]]
    sizes, fault = _sizes(t), ""
    if t.devices is None:
        fault = "--devices N: its batch counts completions of every device, and ours prompts of all"
    elif "generation_batch_size" in t and "steps_per_generation" in t:
        fault = "one of generation_batch_size and steps_per_generation"
    elif sizes is None or group is None or iterations is None:
        fault = "whole numbers"
    elif not sizes["per_batch"]:
        fault = f"generation_batch_size that {sizes['rows']} rows x {t.devices} devices divide"
    else:
        fault = _uneven(sizes, group, iterations)
    if fault or sizes is None or group is None or iterations is None:
        for word in words:
            t.refuse(word, fault, is_essential=True)
        return
    batch, update = max(sizes["batch"], sizes["update"]), sizes["update"]
    counted = f"{batch} completions / {group}"
    prompts = {"batch_size": str(batch // group), "num_minibatches": str(batch // update)}
    for word in words[1:]:
        t.map(word, counted, **prompts)
    mixed = "; an update there has completions of the batch at random, here its prompts in order"
    t.map(words[0], counted + (mixed if batch > update else ""), **prompts)
    t.settings |= prompts
    take_chunk(t, words[0], sizes["rows"], t.devices or 1, update // group, group)
    t.updates = batch // update * iterations


def _uneven(sizes: Mapping[str, int], group: int, iterations: int) -> str:
    """Returns the reason why a batch has no counterpart, or ""."""
    batch, update = sizes["batch"], sizes["update"]
    if batch % group:
        return f"a batch of {batch} completions in whole groups of num_generations={group}, as TRL asks too"
    if update > batch and (update % batch or iterations > 1):
        return f"updates of {update} completions that cut no batch of {batch}"
    if batch > update and batch % update:
        return f"updates of {update} completions that divide a batch of {batch}"
    if update % group:
        return f"updates of {update} completions in whole groups of num_generations={group}"
    return ""


def _lengths(t: Translation, _: str) -> None:
    if "max_prompt_length" in t:
        take_target_length(t, "max_prompt_length", "max_completion_length")
        return
    t.assume({"max_prompt_length": "512"})
    total, response = whole(t, "vllm_max_model_length"), whole(t, "max_completion_length")
    if total and response and total > response:
        t.assume({"max_prompt_length": str(total - response)})
    take_target_length(t, "max_prompt_length", "max_completion_length", f"TRL bounds no prompt: state {PROMPTS}")


def _whole_batches(t: Translation, _: str) -> None:
    """Refuses a run length that ends within a batch."""
    steps = t.settings.get("steps", "")
    if t.updates > 1 and steps.isdigit() and int(steps) % t.updates:
        t.refuse("max_steps", f"a multiple of {t.updates}, the updates per batch", is_essential=True)


def _data(t: Translation, _: str) -> None:
    settings = {"dataset_type": "jsonl", "dataset_path": "prompts.jsonl", "prompt_template": "{prompt}"}
    take_dataset(t, "records with prompt, a text or messages", settings)
    functions, weights = [f for f in t.items("reward_funcs") if f], t.items("reward_weights")
    names = [name.rpartition(".")[2] for name in functions] or [f"score_{i}" for i, _ in enumerate(weights, 1)]
    if weights and len(names) != len(weights):
        t.refuse("reward_weights", "one for each of reward_funcs")
        weights = []
    take_rewards(t, "reward_funcs", "rewards.py", names or ["score"], weights)
    if weights:
        t.map("reward_weights", reward=t.settings["reward"])
    model = t.text("model_name_or_path") or t.text("model")
    t.settings |= {"tokenizer_type": "huggingface", "tokenizer_path": model or "tokenizer"}
    if not model:
        t.need("model_name_or_path", "the model that the script names: load_parameters_path and tokenizer_path")


def _equation(t: Translation) -> tuple[str, str]:
    """Returns the batch as an equation in TRL's words and in ours."""
    sizes, s = _sizes(t), t.settings
    prompts, group, updates = s["batch_size"], s["num_generations"], s["num_minibatches"]
    if sizes is None:
        raise KeyError("batch_size")
    passes = max(sizes["per_batch"], sizes["passes"])
    there = (
        f"{passes * sizes['rows'] * (t.devices or 1)} completions = per_device_train_batch_size {sizes['rows']} x "
        f"{t.devices} devices x {passes} passes, {sizes['passes']} in an update"
    )
    return there, f"batch_size {prompts} x num_generations {group}, num_minibatches {updates}"


FORMAT = Format(
    "trl",
    _equation,
    {
        "processes": _processes,
        "batch": _batch,
        "lengths": _lengths,
        "sampling": lambda t, _: take_sampling(t, "temperature", "top_k", "top_p"),
        "data": _data,
        "router": lambda t, _: without_balance(t),
        "whole_batches": _whole_batches,
    },
    {"has_minibatches": lambda t, _: int(t.settings.get("num_minibatches", "1")) > 1},
    hf.FORMAT,
)
