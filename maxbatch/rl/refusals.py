"""The settings that `maxbatch rl` refuses before it reads a file, so that a plan refuses them too. No JAX."""

from __future__ import annotations

from maxbatch.config.sections import RLConfig
from maxbatch.rl.reward_terms import parse_rewards
from maxbatch.rl.templates import Template
from maxbatch.system.errors import ConfigError

_READY = ("arithmetic", "sorting")  # the tasks that need no download
# Types of datasets without records, and the nearest type that has them.
_NEAREST_TYPE = {"arrayrecord": "parquet", "text": "jsonl", "tokens": "jsonl"}


def check_policy(config: RLConfig, dataset_type: str, compiled_dir: str) -> None:
    """Raises ConfigError for a config whose prompts, rewards, warm start or programs no file can make right."""
    check_type(dataset_type)
    Template(config.prompt_template)
    parse_rewards(config.reward)
    if compiled_dir:
        raise ConfigError(
            f"compiled_dir={compiled_dir}: holds programs of maxbatch train, and maxbatch rl has others; "
            'works: compiled_dir=""'
        )
    if config.warm_start_steps and not config.warm_start_path and dataset_type not in _READY:
        raise ConfigError(
            f"warm_start_steps={config.warm_start_steps}: without warm_start_path its documents are worked "
            f"examples of dataset_type={' or '.join(_READY)}, not {dataset_type}; works: warm_start_steps=0"
        )


def check_type(dataset_type: str) -> None:
    """Raises ConfigError for a type of dataset whose records have no fields."""
    if dataset_type not in (*_READY, "jsonl", "parquet"):
        nearest = _NEAREST_TYPE.get(dataset_type, "arithmetic")
        raise ConfigError(f"dataset_type={dataset_type}: prompts come from records with fields: one of "
                          f"{', '.join(_READY)}, jsonl, parquet; works: dataset_type={nearest}")  # fmt: skip
