"""Rules of the table for TRL's GRPOConfig: batch of completions, lengths and rewards."""

from __future__ import annotations

from collections.abc import Mapping

from maxbatch.around.importers import hf
from maxbatch.around.importers.python_file import CLASS
from maxbatch.around.importers.steps import take_dataset, take_rewards, without_balance
from maxbatch.around.importers.table import Format
from maxbatch.around.importers.translation import Translation
from maxbatch.plan.divisors import divisors

_MOST = 2**31  # prompts, responses or tokens
PROCESSES = "num_processes"  # Accelerate's word for the devices of all machines
_OF_RESPONSES = (
    "num_generations",
    "generation_batch_size",
    "steps_per_generation",
    "max_completion_length",
)
_BATCH = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "generation_batch_size",
)


def is_of_responses(words: Mapping[str, object]) -> bool:
    """Returns whether the words are GRPOConfig's."""
    return words.get(CLASS) == "GRPOConfig" or any(word in words for word in _OF_RESPONSES)


def _whole(t: Translation, word: str) -> int | None:
    """Returns a word's value as a whole number from 1 to _MOST, or None."""
    number = t.number(word)
    return (
        int(number) if number is not None and 1 <= number <= _MOST and number.is_integer() else None
    )


def _processes(t: Translation, word: str) -> None:
    t.devices = t.devices or _whole(t, word)
    t.ignore(
        word,
        f"its batch is counted on {t.devices} devices; here devices are found when the run starts",
    )


def _sizes(t: Translation) -> Mapping[str, int] | None:
    """Returns rows per device, passes per update and per batch, and completions of both; None if
    not stated.
    """
    rows, passes = _whole(t, _BATCH[0]), _whole(t, _BATCH[1])
    if t.devices is None or rows is None or passes is None:
        return None
    of_pass = rows * t.devices
    if "generation_batch_size" in t:
        per_batch, rest = divmod(_whole(t, "generation_batch_size") or 0, of_pass)
        per_batch = 0 if rest else per_batch
    else:
        per_batch = (
            _whole(t, "steps_per_generation") or passes if "steps_per_generation" in t else passes
        )
    return {
        "rows": rows,
        "passes": passes,
        "per_batch": per_batch,
        "update": of_pass * passes,
        "batch": of_pass * per_batch,
    }


def _batch(t: Translation, _: str) -> None:
    group, iterations = _whole(t, "num_generations"), _whole(t, "num_iterations")
    words = [word for word in _BATCH if word in t or word in _BATCH[:2]]
    sizes, fault = _sizes(t), ""
    if t.devices is None:
        fault = "--devices N: its batch counts completions of every device, and ours prompts of all"
    elif "generation_batch_size" in t and "steps_per_generation" in t:
        fault = "one of generation_batch_size and steps_per_generation"
    elif sizes is None or group is None or iterations is None:
        fault = "must be whole numbers"
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
    mixed = (
        "; an update there has completions of the batch at random and a rate of its own, here its "
        "prompts in order and the rate of the batch"
    )
    t.map(words[0], counted + (mixed if batch > update else ""), **prompts)
    t.settings |= prompts
    _chunk(t, words[0], sizes["rows"], t.devices or 1, update // group, group)
    t.updates = batch // update * iterations


def _chunk(t: Translation, word: str, rows: int, devices: int, prompts: int, group: int) -> None:
    """Takes a word as the pairs of a chunk: whole groups of an update's prompts, at most `rows` per
    device.
    """
    chunks = [divisor * group for divisor in divisors(prompts)]
    even = [pairs for pairs in chunks if pairs % devices == 0] or chunks
    within = [pairs for pairs in even if pairs <= rows * devices]
    pairs = within[-1] if within else even[0]
    why = f"{rows} rows x {devices}"
    if pairs != rows * devices:
        bound = "at most" if within else "more than"
        why = (
            f"{bound} {why}, in whole groups of {group} that divide an update; the update does "
            "not depend on it"
        )
    t.map(word, why, micro_batch_size=str(pairs))


def _uneven(sizes: Mapping[str, int], group: int, iterations: int) -> str:
    """Returns the reason why a batch has no counterpart, or ""."""
    batch, update = sizes["batch"], sizes["update"]
    if batch % group:
        return (
            f"a batch of {batch} completions in whole groups of num_generations={group}, as TRL "
            "asks too"
        )
    if update > batch and (update % batch or iterations > 1):
        return f"updates of {update} completions that cut no batch of {batch}"
    if batch > update and batch % update:
        return f"updates of {update} completions that divide a batch of {batch}"
    if update % group:
        return f"updates of {update} completions in whole groups of num_generations={group}"
    return ""


def _lengths(t: Translation, _: str) -> None:
    """Takes the bounds of a prompt and of a response; their sum bounds a row."""
    prompt, response, why = "max_prompt_length", "max_completion_length", ""
    if prompt not in t:
        t.assume({prompt: "512"})
        total, answer = _whole(t, "vllm_max_model_length"), _whole(t, response)
        if total and answer and total > answer:
            t.assume({prompt: str(total - answer)})
        why = (
            "TRL bounds no prompt: state the most tokens of a prompt; a longer one is refused "
            "when the run starts"
        )
    bounds = {word: _whole(t, word) for word in (prompt, response)}
    if None in bounds.values():
        for word, bound in bounds.items():
            if bound is None:
                t.refuse(word, "must be a number of tokens", is_essential=True)
        return
    (t.need if why else t.map)(prompt, why, max_prefill_predict_length=str(bounds[prompt]))
    t.map(
        response,
        f"{prompt} + {response}",
        max_target_length=str(sum(filter(None, bounds.values()))),
    )


def _whole_batches(t: Translation, _: str) -> None:
    """Refuses a run length that ends within a batch."""
    steps = t.settings.get("steps", "")
    if t.updates > 1 and steps.isdigit() and int(steps) % t.updates:
        t.refuse(
            "max_steps",
            f"must be a multiple of {t.updates}, the updates per batch",
            is_essential=True,
        )


def _data(t: Translation, _: str) -> None:
    settings = {
        "dataset_type": "jsonl",
        "dataset_path": "prompts.jsonl",
        "prompt_template": "{prompt}",
    }
    take_dataset(t, "records with prompt, a text or messages", settings)
    functions, weights = [f for f in t.items("reward_funcs") if f], t.items("reward_weights")
    names = [name.rpartition(".")[2] for name in functions] or [
        f"score_{i}" for i, _ in enumerate(weights, 1)
    ]
    if weights and len(names) != len(weights):
        t.refuse("reward_weights", "must be one for each of reward_funcs")
        weights = []
    take_rewards(t, "reward_funcs", "rewards.py", names or ["score"], weights)
    if weights:
        t.map("reward_weights", reward=t.settings["reward"])
    model = t.text("model_name_or_path") or t.text("model")
    t.settings |= {"tokenizer_type": "huggingface", "tokenizer_path": model or "tokenizer"}
    if not model:
        t.need(
            "model_name_or_path",
            "the model that the script names: load_parameters_path and tokenizer_path",
        )


def _equation(t: Translation) -> tuple[str, str]:
    """Returns the batch as an equation in TRL's words and in ours."""
    sizes, s = _sizes(t), t.settings
    prompts, group, updates = s["batch_size"], s["num_generations"], s["num_minibatches"]
    if sizes is None:
        raise KeyError("batch_size")
    passes = max(sizes["per_batch"], sizes["passes"])
    there = (
        f"{passes * sizes['rows'] * (t.devices or 1)} completions = per_device_train_batch_size "
        f"{sizes['rows']} x {t.devices} devices x {passes} passes, {sizes['passes']} in an update"
    )
    return there, f"batch_size {prompts} x num_generations {group}, num_minibatches {updates}"


FORMAT = Format(
    "trl",
    _equation,
    {
        "processes": _processes,
        "batch": _batch,
        "lengths": _lengths,
        "data": _data,
        "router": without_balance,
        "whole_batches": _whole_batches,
    },
    {"has_minibatches": lambda t, _: int(t.settings.get("num_minibatches", "1")) > 1},
    hf.FORMAT,
)
