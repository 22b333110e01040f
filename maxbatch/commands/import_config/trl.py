"""TRL's GRPOConfig: its batch of completions as a batch of prompts, its objective and its rewards.

Facts from TRL's documentation of `GRPOConfig` and of its trainer.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from maxbatch.commands.import_config import hf
from maxbatch.commands.import_config.prompts import (
    PROMPTS,
    only,
    take_chunk,
    take_rewards,
    take_sampling,
    take_target_length,
    whole,
    without_balance,
)
from maxbatch.commands.import_config.steps import take_dataset
from maxbatch.commands.import_config.translation import Translation

DEFAULTS = hf.DEFAULTS | {
    "learning_rate": "1e-6", "bf16": "true", "logging_steps": "10",
    "num_generations": "8", "num_iterations": "1", "max_completion_length": "512", "temperature": "1.0",
    "top_k": "0", "top_p": "1.0", "beta": "0.0", "epsilon": "0.2", "loss_type": "dapo",
    "importance_sampling_level": "token", "scale_rewards": "group", "reward_funcs": "", "model_name_or_path": "",
    "dataset_name": "",
}  # fmt: skip
PROCESSES = "num_processes"  # Accelerate's word for the devices of all machines
_OF_RESPONSES = ("num_generations", "generation_batch_size", "steps_per_generation", "max_completion_length")
_BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "generation_batch_size")
_LOSSES = {"grpo": "sequence-mean-token-mean", "bnpo": "token-mean", "dapo": "token-mean"}
_LEVELS = {"token": "grpo", "sequence": "gspo-token"}
# Words that change what is trained unless they have one of these values.
_ONLY = {
    "use_bias_correction_kl": ("false",), "off_policy_mask_threshold": ("", "null", "none"),
    "generation_kwargs": ("", "null", "none", "{}"), "chat_template_kwargs": ("", "null", "none", "{}"),
    "top_entropy_quantile": ("1.0", "1"), "multi_objective_aggregation": ("sum_then_normalize",),
    "use_adaptive_entropy": ("false",), "repetition_penalty": ("1.0", "1"),
    "max_tool_calling_iterations": ("", "null", "none", "0"),
}  # fmt: skip
_HOW = ("log_completions", "log_multimodal", "log_unique_prompts", "log_completions_hub_repo",
        "num_completions_to_print", "use_transformers_continuous_batching", "use_transformers_paged",
        "transformers_continuous_batching_config", "cache_implementation", "trust_remote_code",
        "per_device_eval_batch_size", "num_generations_eval", "dataset_test_split", "disable_dropout")  # fmt: skip


def is_of_responses(words: Container[str]) -> bool:
    """Returns whether words of the Trainer's are those of GRPOConfig."""
    return any(word in words for word in _OF_RESPONSES)


def translate(t: Translation) -> None:
    """Takes the words of GRPOConfig, and the others as those of TrainingArguments."""
    hf.old_words(t)
    if PROCESSES in t:
        t.devices = t.devices or whole(t, PROCESSES)
        t.ignore(PROCESSES, f"its batch is counted on {t.devices} devices; here devices are found when the run starts")
    updates = _batch(t)
    _lengths(t)
    _objective(t)
    _data(t)
    t.settings["remat_policy"] = "full"  # its default
    hf.arguments(t)
    without_balance(t)
    steps = t.settings.get("steps", "")
    if updates > 1 and steps.isdigit() and int(steps) % updates:
        t.refuse("max_steps", f"a multiple of {updates}, the updates per batch", is_essential=True)


def _sizes(t: Translation) -> Mapping[str, int] | None:
    """Returns rows of a device, passes of an update and of a batch, and completions of both; None: not stated."""
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


def _batch(t: Translation) -> int:
    """Takes the batch; returns its updates, 1 where they are not known."""
    group, iterations = whole(t, "num_generations"), whole(t, "num_iterations")
    t.map("num_generations", num_generations=t.text("num_generations"))
    t.map("num_iterations", num_iterations=t.text("num_iterations"))
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
        return 1
    batch, update = max(sizes["batch"], sizes["update"]), sizes["update"]
    counted = f"{batch} completions / {group}"
    prompts = {"batch_size": str(batch // group), "num_minibatches": str(batch // update)}
    for word in words[1:]:
        t.map(word, counted, **prompts)
    mixed = "; an update there has completions of the batch at random, here its prompts in order"
    t.map(words[0], counted + (mixed if batch > update else ""), **prompts)
    t.settings |= prompts
    take_chunk(t, words[0], sizes["rows"], t.devices or 1, update // group, group)
    return batch // update * iterations


def _uneven(sizes: Mapping[str, int], group: int, iterations: int) -> str:
    """Returns why a batch has no counterpart, "" if it has one."""
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


def _lengths(t: Translation) -> None:
    if "max_prompt_length" in t:
        take_target_length(t, "max_prompt_length", "max_completion_length")
        return
    t.assume({"max_prompt_length": "512"})
    total, response = whole(t, "vllm_max_model_length"), whole(t, "max_completion_length")
    if total and response and total > response:
        t.assume({"max_prompt_length": str(total - response)})
    take_target_length(t, "max_prompt_length", "max_completion_length", f"TRL bounds no prompt: state {PROMPTS}")


def _objective(t: Translation) -> None:
    level, loss = t.text("importance_sampling_level"), t.text("loss_type")
    if level in _LEVELS:
        t.map("importance_sampling_level", loss_algo=_LEVELS[level])
    else:
        t.refuse("importance_sampling_level", "token or sequence", is_essential=True)
    if loss in _LOSSES:
        why = "the mean over the tokens of an update; there the mean of the passes' means" if loss == "bnpo" else ""
        if loss == "dapo" and int(t.settings.get("num_minibatches", "1")) > 1:
            why = "the mean over the tokens of an update; there the sum over the tokens of the batch"
        t.map("loss_type", why, loss_agg_mode=_LOSSES[loss])
    else:
        t.refuse("loss_type", f"{', '.join(_LOSSES)}", is_essential=True)
    t.map("beta", grpo_beta=t.text("beta"))
    t.map("epsilon", grpo_epsilon=t.text("epsilon"))
    take_sampling(t, "temperature", "top_k", "top_p")
    if t.text("scale_rewards").lower() in ("group", "true"):
        t.ignore("scale_rewards", "the deviation of a group, as here, but divided by G - 1 there and by G here")
    else:
        t.refuse("scale_rewards", "group")
    for word, allowed in _ONLY.items():
        only(t, word, allowed, f"{allowed[0] or 'none'} only")
    for word in _HOW:
        if word in t:
            t.ignore(word, "how the same is computed, read or logged")
        elif t.is_left(word):
            t.ignore(word, "null says nothing")
    for word in t.left():
        if word.startswith(("sapo_", "vespo_")):
            t.ignore(word, f"it is read with loss_type={word.partition('_')[0]}")
    if "shuffle_dataset" in t:
        t.map("shuffle_dataset", enable_data_shuffling="true" if t.is_true("shuffle_dataset") else "false")


def _data(t: Translation) -> None:
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


def equation(t: Translation) -> tuple[str, str]:
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
