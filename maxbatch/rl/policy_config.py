"""The config keys of reinforcement learning."""

from __future__ import annotations

from maxbatch.config.sections import RLConfig
from maxbatch.data.stream.stream_config import StreamConfig
from maxbatch.model.decoder_config import DecoderConfig

WARM_START = "warm_start"  # folder in `run_dir` of the training before the first update


class PromptConfig(StreamConfig):
    """The keys of a stream, the template of a prompt, and the bound of its tokens."""

    prompt_template: str
    max_prefill_predict_length: int


class RolloutConfig(DecoderConfig):
    """Keys of the decoder, the responses, the model with their end tokens, and the compiler's flags."""

    rl: RLConfig
    max_prefill_predict_length: int
    load_parameters_path: str
    libtpu_flags: str
