"""MaxText's reinforcement learning (`train_rl`): its batch of prompts, its length, its data and its sampler.

Facts from MaxText's `configs/post_train/rl.yml` and its documentation of the batch size.
"""

from __future__ import annotations

import math
from fractions import Fraction

from maxbatch.commands.import_config.hub import hub_step, is_hub_name
from maxbatch.commands.import_config.maxtext_data import take_template
from maxbatch.commands.import_config.steps import take_tokenizer
from maxbatch.commands.import_config.translation import Translation
from maxbatch.config.loading import keys
from maxbatch.config.rules import PRETRAINING_BATCH
from maxbatch.config.values import exact, shown
from maxbatch.config.words import look_up
from maxbatch.system.errors import ConfigError

# What its file of reinforcement learning has for unstated words.
_DEFAULTS = {"batch_size": "1", "num_generations": "2", "num_iterations": "1", "num_batches": "4",
             "train_fraction": "1.0", "num_epoch": "1", "num_test_batches": "5", "eval_batch_size": "-1",
             "max_prefill_predict_length": "256", "max_target_length": "1024", "grpo_beta": "0.08",
             "grpo_epsilon": "0.2", "loss_algo": "grpo", "loss_agg_mode": "sequence-mean-token-mean",
             "data_shuffle_seed": "42", "dataset_name": "openai/gsm8k", "eval_dataset_name": "openai/gsm8k",
             "train_split": "train", "eval_split": "test", "reward_functions_path": "",
             "data_template_path": ""}  # fmt: skip
_BLOCK = "rl."
_PAIRS = "pairs per chunk; the update does not depend on it"
# Words that change what is trained unless they have one of these values.
_ONLY = {
    "use_agentic_rollout": (("false",), "no agents: a response is sampled in one go"),
    "system_prompt": (("", "null"), "none: prompt_template makes the prompt"),
}


def is_rl(t: Translation) -> bool:
    """Returns whether a file is one of MaxText's reinforcement learning."""
    return "batch_size" in t or any(word.startswith(_BLOCK) for word in t.left())


def translate_rl(t: Translation) -> None:
    """Takes the words of reinforcement learning, nested below `rl` or not."""
    for word in t.left():
        name = word.removeprefix(_BLOCK)
        if name != word and (name in keys() or name in _DEFAULTS or name in _ONLY or look_up(name, "maxtext")):
            t.rename(word, name)
        elif name != word:
            t.refuse(word, "maxbatch rl has no such setting", is_essential=True)
    t.assume(_DEFAULTS)
    _batch(t)
    _length(t)
    _evaluation(t)
    _data(t)
    _rewards(t)
    if "load_balance_loss_weight" in t:
        t.ignore("load_balance_loss_weight", "its reinforcement learning adds no loss of a router")
    for name, (values, why) in _ONLY.items():
        if t.is_left(name) and t.text(name).lower() in values:
            t.ignore(name, "that is so here")
        elif t.is_left(name):
            t.refuse(name, why, is_essential=True)


def _batch(t: Translation) -> None:
    for name in PRETRAINING_BATCH:
        if name in t:
            t.ignore(name, "batch_size states the batch, in prompts")
        t.drop(name)
    for name in ("batch_size", "num_generations", "num_iterations", "max_prefill_predict_length", "max_target_length"):
        t.map(name, **{name: t.text(name)})
    if "micro_batch_size" in t:
        t.map("micro_batch_size", _PAIRS, micro_batch_size=t.text("micro_batch_size"))
    if "off_policy_steps" in t:
        t.map("off_policy_steps", off_policy_steps=t.text("off_policy_steps"))
    _sampling_mesh(t)


def _sampling_mesh(t: Translation) -> None:
    """Takes the axes of the mesh that samples; its axis of experts joins the tensor axis, which splits them too."""
    data, tensor, expert = (f"rollout_{axis}_parallelism" for axis in ("data", "tensor", "expert"))
    if data in t:
        t.map(data, rollout_data_parallelism=t.text(data))
    if expert in t and t.text(expert) != "1":
        sizes = [_number(t, name) for name in (tensor, expert) if name in t]
        product = -1 if -1 in sizes else math.prod(sizes)
        why = f"{tensor} x {expert}: the tensor axis splits the experts' matrices as well"
        for name in (tensor, expert):
            if name in t:
                t.map(name, why, rollout_tensor_parallelism=str(product))
        return
    if tensor in t:
        t.map(tensor, rollout_tensor_parallelism=t.text(tensor))
    if expert in t:
        t.ignore(expert, f"{tensor} splits the experts' matrices as well")


def _number(t: Translation, name: str) -> Fraction:
    number = t.number(name)
    if number is None:
        raise ConfigError(f"{name}={shown(t.text(name))}: must be a number")
    return exact(number)


def _length(t: Translation) -> None:
    """Takes the length: updates = num_batches x num_iterations x train_fraction x num_epoch."""
    names = ("num_batches", "num_iterations", "train_fraction", "num_epoch")
    updates = Fraction(1)
    for name in names:
        updates *= _number(t, name)
    why = "num_batches x num_iterations x train_fraction x num_epoch updates"
    for name in names:
        if name != "num_iterations":
            t.map(name, why, steps=str(max(1, int(updates))))
    if "steps" in t:
        t.ignore("steps", "num_batches says the length of its reinforcement learning")
    t.drop("steps")
    why = "its reinforcement learning decays to 0 along a cosine"
    for name in ("lr_schedule_type", "learning_rate_final_fraction"):
        t.map(name, why, learning_rate_schedule="cosine", learning_rate_final_fraction="0")
    if t.text("learning_rate_schedule_steps") == "-1":
        t.ignore("learning_rate_schedule_steps", "the schedule ends with the run")


def _evaluation(t: Translation) -> None:
    batches, start = _number(t, "num_test_batches"), t.number("test_batch_start_index") or 0
    rows = _number(t, "eval_batch_size")
    prompts = int(batches * (rows if rows > 0 else _number(t, "batch_size"))) - int(start)
    for name in ("num_test_batches", "eval_batch_size"):
        if prompts > 0:
            t.map(name, "num_test_batches x eval_batch_size held-out prompts", eval_samples=str(prompts))
        else:
            t.map(name, "no held-out prompts are read", eval_interval="-1")
    if "test_batch_start_index" in t:
        why = "held-out prompts are read from the first one on" if start else "0 is the first held-out prompt"
        t.refuse("test_batch_start_index", why) if start else t.ignore("test_batch_start_index", why)


def _data(t: Translation) -> None:
    subset = t.text("hf_subset") if "hf_subset" in t else ""
    sides = (
        ("dataset_name", "train_split", "dataset_path", "hf_train_files"),
        ("eval_dataset_name", "eval_split", "eval_dataset_path", "hf_eval_files"),
    )
    for word, split, key, named in sides:
        source = t.text(word)
        if named in t:
            kind = "jsonl" if "json" in t.text(named) else "parquet"
            t.map(named, **{"dataset_type": kind, key: t.text(named)})
            for other in (word, split):
                t.ignore(other, f"{named} says the files")
            continue
        path = "/".join(filter(None, (source, subset, f"{t.text(split)}*.parquet")))
        settings = {"dataset_type": "parquet", key: path}
        step = hub_step(source, "dataset") if is_hub_name(source) else "its parquet files at that path"
        t.need(word, step, **settings)
        t.map(split, **{key: path})
    if subset and t.is_left("hf_subset"):
        t.map("hf_subset", dataset_path=t.settings["dataset_path"])
    if "dataset_type" in t:
        t.ignore("dataset_type", "dataset_name says the data of its reinforcement learning")
    t.drop("dataset_type")
    if "tokenizer_path" in t:
        take_tokenizer(t, "tokenizer_path", t.text("tokenizer_path"))
    t.settings.setdefault("tokenizer_type", "huggingface")
    t.settings.setdefault("tokenizer_path", f"tokenizers/{t.text('model_name') or 'default'}")
    take_template(t, is_read=True)
    step = "prompt_template is the text of a prompt, with {question} and other fields of a record"
    t.need("data_template_path", step, prompt_template="{question}")
    for word in t.left():
        if word.startswith(("reasoning_", "solution_")):
            t.need(word, "state it in prompt_template and in your reward")


def _rewards(t: Translation) -> None:
    path, names = t.text("reward_functions_path"), t.text("reward_functions")
    functions = [name.strip() for name in names.split(",") if name.strip()] or ["score"]
    file = path if "reward_functions_path" in t else "rewards.py"
    reward = f"{file}:{functions[0]}"
    if len(functions) > 1:
        reward = ";".join(f"{file}:{name},1" for name in functions)
    step = f"{file} with {', '.join(functions)}(prompt, response, record), which returns a number"
    t.need("reward_functions_path", step, reward=reward)
    for word in t.left():
        if word.startswith(("reward_", "penalty_", "math_verify_")) and word not in keys():
            t.need(word, "it is a number of MaxText's own rewards; state it in yours")
