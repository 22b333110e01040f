"""Effects of a key's value: whether hosts must share it, and the change that a resume makes with another value.

`docs/depends.md` shows both for every key. Hosts compare the values of all keys not named here, so a new key cannot be
forgotten.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from maxbatch.config.config import Config
from maxbatch.config.keys import Fixes, Section
from maxbatch.config.loading import keys
from maxbatch.config.sections import (
    SECTIONS,
    AdapterConfig,
    BatchConfig,
    CheckpointConfig,
    CompilingConfig,
    DataConfig,
    EvaluationConfig,
    LengthConfig,
    LoggingConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PreferenceConfig,
    PromptBatchConfig,
    RampConfig,
    RatesConfig,
    RematConfig,
    RLConfig,
    RunConfig,
    names_fixing,
)
from maxbatch.config.values import Value, shown
from maxbatch.config.yaml_file import entries
from maxbatch.system.errors import ConfigError
from maxbatch.system.storage import AnyPath


class Shared(enum.Enum):
    """The aspect of a key that hosts must share."""

    VALUE = "its value"
    CONTENT = "the content it names, in any place, or its absence"
    STATED = "whether it is stated; each host may have its own place"
    NOTHING = "nothing; each host may have its own place"


# Keys whose values may differ between hosts, each with the aspect that they share.
_NOT_BY_VALUE = {
    "run_dir": Shared.CONTENT,
    "base_output_directory": Shared.CONTENT,
    "load_parameters_path": Shared.CONTENT,
    "load_full_state_path": Shared.CONTENT,
    "reward": Shared.CONTENT,
    "warm_start_path": Shared.CONTENT,
    "dataset_path": Shared.CONTENT,
    "eval_dataset_path": Shared.CONTENT,
    "tokenizer_path": Shared.CONTENT,
    "compiled_dir": Shared.CONTENT,
    "local_checkpoint_directory": Shared.STATED,
    "data_cache_dir": Shared.NOTHING,
    "compilation_cache_dir": Shared.NOTHING,
}


def shared(name: str) -> Shared:
    """Returns the aspect of a key that hosts must share."""
    return _NOT_BY_VALUE.get(name, Shared.VALUE)


def facts_of(config: Mapping[str, Value]) -> dict[str, str]:
    """Returns the facts of a config that hosts compare before they read any data, as texts by key."""
    facts = {}
    for name, key in keys().items():
        value = config[name]
        if shared(name) is Shared.VALUE:
            facts[name] = key.write(value)
        elif shared(name) is not Shared.NOTHING:
            facts[name] = "stated" if value else "not stated"
    return facts


def texts_fixing(what: Fixes, config: Mapping[str, Value]) -> dict[str, str]:
    """Returns the values of the keys that fix any of the named properties, as texts by key."""
    return {name: keys()[name].write(config[name]) for name in names_fixing(what)}


THE_BATCH, THE_CUT = "the batch", "the cut of the batch alone"
# The effect of a resume with another value, by section; "": none.
_CHANGES: dict[type[Section], str] = {
    RunConfig: "",
    LengthConfig: "the end of the run, and rates that follow its length",
    BatchConfig: THE_BATCH,
    RampConfig: THE_BATCH,
    PromptBatchConfig: "the batch of prompts",
    RLConfig: "responses, rewards or their loss",
    RatesConfig: "the learning rate",
    OptimizerConfig: "the updates",
    ModelConfig: "the model's computation",
    RematConfig: "memory and time; updates change by rounding",
    AdapterConfig: "the adapters",
    DataConfig: "the data",
    PreferenceConfig: "the loss of pairs",
    MeshConfig: "the layout; updates change by rounding",
    CheckpointConfig: "the states that are kept",
    EvaluationConfig: "what is evaluated",
    LoggingConfig: "what is logged",
    CompilingConfig: "the compiled programs; updates change by rounding",
}
# Keys whose value alone has no effect: places of equal content (a resume with other content is refused), and the
# reading of data.
_HARMLESS = {
    *(name for name, how in _NOT_BY_VALUE.items() if how is not Shared.CONTENT),
    "dataset_path", "tokenizer_path", "compiled_dir", "grain_worker_count", "grain_prefetch_buffer_size",
    *names_fixing(Fixes.RECORDS),
}  # fmt: skip
_GOES_ON = "nothing: the run goes on from its own checkpoint"
_OF_KEYS = {
    "load_parameters_path": _GOES_ON,
    "load_full_state_path": _GOES_ON,
    "quantization": "the layers' products, and updates and evals through them",
    "max_target_length": "the length of a sample",
    "expansion_factor_real_data": "which hosts load",
    "reward_worker_count": "",
    "transcript_period": "what is logged",
    "eval_dataset_path": "what is evaluated",
    "max_consecutive_skips": "the point where a diverging run ends",
    "gradient_noise_scale": "what is measured",
    "early_stopping_patience": "the end of the run",
}


def changes(name: str) -> str:
    """Returns the effect of a resume with another value of a key, in words; "" if there is none."""
    if name in _HARMLESS:
        return ""
    section = next(one for one in SECTIONS if any(key.name == name for key in one.declared()))
    return _OF_KEYS.get(name, _CHANGES[section])


def states_batch(name: str) -> bool:
    """Returns whether a key states the batch in samples."""
    return changes(name) == THE_BATCH


def read_written(path: AnyPath) -> Config | None:
    """Reads the config written by a run, without the environment; returns None if it cannot be read.

    Missing keys are newer than the run, so they have their defaults.
    """
    try:
        texts = {entry.name: (entry.text, entry.plain) for entry in entries(path)}
        return Config.of({name: key.read(*texts.get(name, (key.default,))) for name, key in keys().items()})
    except ConfigError:
        return None


def changed_since(
    previous: Mapping[str, Value], config: Mapping[str, Value], of_batch: str = THE_BATCH
) -> dict[str, str]:
    """Returns a line for each key whose value differs from the last session's and changes the run, by key.

    Args:
      previous: the last session's config.
      config: this session's config.
      of_batch: the effect of the keys of the batch: `THE_BATCH` or `THE_CUT`.
    """
    states_prompts = previous["batch_size"] is not None  # then no key states the batch in samples
    lines = {}
    for name, key in keys().items():
        if previous[name] == config[name] or (states_prompts and states_batch(name)):
            continue
        if what := changes(name):
            before, now = (_quoted(key.write(values[name])) for values in (previous, config))
            what = of_batch if states_batch(name) else what
            lines[name] = f"{name}: {before} before, {now} now: changes {what}"
    return lines


def _quoted(text: str) -> str:
    return shown(text) if text else '""'
