"""Settings that `maxbatch rl` and its plans refuse before reading files. No JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from maxbatch.config.combined import PromptConfig
from maxbatch.config.file_formats import has_records, record_types
from maxbatch.config.sections import READY_TASKS, RLConfig
from maxbatch.kinds.prompt.ready_tasks import TASKS
from maxbatch.kinds.prompt.reward_functions import scorer
from maxbatch.kinds.prompt.reward_terms import parse_rewards, reward_error, sources_of
from maxbatch.kinds.prompt.templates import Template
from maxbatch.system.errors import ConfigError

# Types of datasets without records, with the nearest type that has them.
_NEAREST_TYPE = {"arrayrecord": "parquet", "text": "jsonl", "tokens": "jsonl"}


def check_policy(config: RLConfig, prompts: PromptConfig, compiled_dir: str) -> None:
    """Raises ConfigError for prompts, rewards, warm start or programs that no file can correct."""
    dataset_type = prompts.dataset_type
    check_type(dataset_type)
    Template(config.prompt_template)
    _check_rewards(config.reward)
    if compiled_dir:
        raise ConfigError(
            f"compiled_dir={compiled_dir}: holds programs of maxbatch train, and maxbatch rl has others; "
            'works: compiled_dir=""'
        )
    if config.warm_start_steps and not config.warm_start_path and dataset_type not in READY_TASKS:
        raise ConfigError(
            f"warm_start_steps={config.warm_start_steps}: without warm_start_path its documents "
            f"are worked examples of dataset_type={' or '.join(READY_TASKS)}, not {dataset_type}; "
            "works: warm_start_steps=0"
        )
    if dataset_type in READY_TASKS and not prompts.skip_bad_records:
        _check_ready_prompts(prompts)


def check_type(dataset_type: str) -> None:
    """Raises ConfigError for a dataset type whose records lack fields."""
    if not (dataset_type in READY_TASKS or has_records(dataset_type)):
        nearest = _NEAREST_TYPE.get(dataset_type, "arithmetic")
        known = ", ".join((*READY_TASKS, *record_types()))
        raise ConfigError(
            f"dataset_type={dataset_type}: prompts, which batch_size counts, come from records "
            f"with fields: one of {known}; works: dataset_type={nearest}, or batch_size=null and "
            "global_batch_size for documents"
        )


def _check_rewards(reward: str) -> None:
    """Raises ConfigError for a malformed reward, or one missing in maxbatch itself."""
    for term in parse_rewards(reward):
        if term.spec.startswith("maxbatch."):
            try:
                scorer(sources_of([term]))
            except ImportError as error:
                raise reward_error(reward, error) from error


def _check_ready_prompts(config: PromptConfig) -> None:
    """Raises ConfigError if a ready task's prompts do not fit, or none is held out."""
    where, template = f"dataset_type={config.dataset_type}", Template(config.prompt_template)
    records = TASKS[config.dataset_type].records()
    texts = [template.fill(record, f"record {number}") for number, record in enumerate(records, 1)]
    if config.tokenizer_type == "byte":
        lengths = [len(text.encode()) + config.add_bos for text in texts]
        check_lengths(config, lengths, lambda number: f"{where} record {number + 1}")
    # the split imports NumPy, which would slow a plan
    if 0 < config.eval_fraction * len(records) < 1:
        from maxbatch.data.store.heldout import HeldOutFraction

        HeldOutFraction.of(config.eval_fraction).refuse_empty(len(records), "prompts")


def check_lengths(
    config: PromptConfig, lengths: Sequence[int], where: Callable[[int], str]
) -> None:
    """Raises ConfigError if a prompt, by its number from 0, has no token or too many; `where` names
    its record.
    """
    numbers = range(len(lengths))
    longest, shortest = (
        max(numbers, key=lambda n: lengths[n]),
        min(numbers, key=lambda n: lengths[n]),
    )
    most = config.max_prefill_predict_length
    if lengths[longest] > most:
        others = sum(length > most for length in lengths) - 1
        more = f", and {others} more are too long" if others else ""
        works = f"max_prefill_predict_length={lengths[longest]}"
        if lengths[longest] >= config.max_target_length:
            works += f" max_target_length={lengths[longest] + config.max_target_length - most}"
        raise ConfigError(
            f"max_prefill_predict_length={most}: the prompt of {where(longest)} has "
            f"{lengths[longest]} tokens{more}; works: {works}"
        )
    if not lengths[shortest]:
        raise ConfigError(
            f"add_bos=false: the prompt of {where(shortest)} has no token to respond to; "
            "works: add_bos=true"
        )
