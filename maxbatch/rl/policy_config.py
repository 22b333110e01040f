"""The keys of a config that reinforcement learning reads."""

from __future__ import annotations

from maxbatch.config.sections import DataConfig, RLConfig
from maxbatch.model.decoder_config import DecoderConfig

WARM_START = "warm_start"  # the folder in `run_dir` of the training before the first update


class PromptConfig(DataConfig):
    """The data's keys, the template of a prompt, the bounds of its tokens, and the model that a tokenizer must fit."""

    prompt_template: str
    max_prefill_predict_length: int
    max_target_length: int
    vocab_size: int
    load_parameters_path: str


class RolloutConfig(DecoderConfig):
    """The decoder's keys, those of the responses, the model whose end tokens end them, and the compiler's flags."""

    rl: RLConfig
    max_prefill_predict_length: int
    load_parameters_path: str
    libtpu_flags: str
