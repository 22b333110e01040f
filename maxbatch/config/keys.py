"""The keys of the config: one row per key, in the order of base.yml, which holds their defaults.

Whoever needs a list of keys asks the rows: `names_fixing`, `names_of`. A new key states what it fixes, so it cannot
drop out of the identity of a run or of its compiled programs.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

from maxbatch.config.blocks import BLOCKS
from maxbatch.config.values import Bounds, Scalar


class Fixes(enum.Flag):
    """What the value of a key fixes; what it does not fix may change when a run is resumed."""

    NOTHING = 0
    BATCH = enum.auto()  # the samples of an update; compiled programs see only the shape of a batch
    RECORDS = enum.auto()  # how a source's records are read; each source of a mixture may state its own
    CONTENT = enum.auto()  # the documents and their tokenizer, of which a stream's identity holds hashes
    TOKENS = enum.auto()  # what is added to the tokens of a document
    ROWS = enum.auto()  # how documents become rows
    ORDER = enum.auto()  # the order of the rows
    PROMPTS = enum.auto()  # how records become prompts
    ADAPTERS = enum.auto()  # which parameters are trained beside the model's, and how they enter it
    CHAT = enum.auto()  # how records become conversations with trained and untrained tokens
    MODEL = enum.auto()  # the parameters and the optimizer's state
    PROGRAM = enum.auto()  # the compiled programs
    STREAM = RECORDS | CONTENT | TOKENS | ROWS | ORDER | CHAT


class Part(enum.Enum):
    """Keys that together state one thing, or are alternatives for stating it."""

    LENGTH = "the length of a run"
    BATCH = "the batch"
    RAMP = "the ramp of the batch"
    PROMPT_BATCH = "the batch of prompts"


SAME, OURS = "the same", None
# MaxText's names, from the least to the most that the backward pass computes again.
REMAT_POLICIES = ("none", "minimal_with_context", "minimal", "save_qkv_proj", "save_out_proj", "full", "custom")
# What remat_policy=custom says of each tensor of a layer, the first choice being the default; MaxText's names.
REMAT_TENSORS = {
    "decoder_layer_input": ("device", "offload"),
    **dict.fromkeys(
        ("query_proj", "key_proj", "value_proj", "context", "out_proj", "mlpwi_0", "mlpwi_1", "mlpwo"),
        ("remat", "device", "offload"),
    ),
}


@dataclasses.dataclass(frozen=True)
class Key(Scalar):
    """One config key."""

    _: dataclasses.KW_ONLY
    fixes: Fixes
    unit: str = ""  # of a number
    part: Part | None = None
    maxtext: str | None = SAME  # its name in MaxText's configs; OURS: MaxText has no such key
    warm_start: bool = True  # whether the warm start of RL takes it from the run; if not, it has its default

    @property
    def maxtext_name(self) -> str | None:
        """Its name in MaxText's configs, or None."""
        return self.name if self.maxtext == SAME else self.maxtext


_POSITIVE, _FROM_ZERO, _COUNT, _FROM_TWO = Bounds(above=0), Bounds(0), Bounds(1), Bounds(2)
_SHARE, _SOME = Bounds(0, 1), Bounds(above=0, at_most=1)
_BELOW_ONE, _INSIDE = Bounds(at_least=0, below=1), Bounds(above=0, below=1)
_SEED = Bounds(0, 2**32 - 1)
_ROWS, _SAMPLES = Bounds(above=0, at_most=2**31), Bounds(1, 2**40)
_COUNT_OR_OFF = Bounds(at_least=1, also=-1)
_ROWS_OR_SAME = Bounds(above=0, at_most=2**31, also=0)

_NOTHING, _PROGRAM, _MODEL = Fixes.NOTHING, Fixes.PROGRAM, Fixes.MODEL | Fixes.PROGRAM
_BATCH = Fixes.BATCH | Fixes.PROGRAM
_DTYPES = ("float32", "bfloat16")

# fmt: off
ROWS: tuple[Key, ...] = (
    # the run
    Key("run_dir", "path", fixes=_NOTHING, maxtext="base_output_directory and run_name"),
    Key("base_output_directory", "path", fixes=_NOTHING, warm_start=False),
    Key("run_name", "text", fixes=_NOTHING, warm_start=False),
    Key("model_name", "text", fixes=_NOTHING),  # what it stands for is in the keys of the model
    Key("load_parameters_path", "path", fixes=_NOTHING, warm_start=False),
    Key("load_full_state_path", "path", fixes=_NOTHING, warm_start=False),
    # how long
    Key("steps", "int", _COUNT, nullable=True, fixes=_NOTHING, unit="updates", part=Part.LENGTH, warm_start=False),
    Key("train_samples", "quantity", _COUNT, nullable=True, fixes=_NOTHING, unit="samples", part=Part.LENGTH,
        maxtext=OURS, warm_start=False),
    Key("train_tokens", "quantity", _COUNT, nullable=True, fixes=_NOTHING, unit="tokens", part=Part.LENGTH,
        maxtext=OURS, warm_start=False),
    Key("num_epochs", "exact", _POSITIVE, nullable=True, fixes=_NOTHING, unit="passes", part=Part.LENGTH,
        maxtext="num_epoch", warm_start=False),
    # the batch
    Key("per_device_batch_size", "exact", _ROWS, nullable=True, fixes=_BATCH, unit="rows per device",
        part=Part.BATCH),
    Key("gradient_accumulation_steps", "int", _SAMPLES, nullable=True, fixes=_BATCH, unit="micro-batches",
        part=Part.BATCH),
    Key("global_batch_size", "int", _SAMPLES, nullable=True, fixes=_BATCH, unit="samples", part=Part.BATCH,
        maxtext=OURS),
    Key("batch_size_schedule", "text", nullable=True, fixes=_BATCH, part=Part.BATCH, maxtext=OURS),
    Key("expansion_factor_real_data", "exact", fixes=_PROGRAM, warm_start=False),
    Key("eval_per_device_batch_size", "exact", _ROWS_OR_SAME, nullable=True, fixes=_BATCH, unit="rows per device"),
    Key("num_pipeline_microbatches", "int", _COUNT_OR_OFF, fixes=_PROGRAM, unit="parts"),
    Key("num_pipeline_repeats", "int", _COUNT, fixes=_PROGRAM, unit="groups of layers"),
    # batch ramp-up
    Key("enable_rampup_batch_size", "bool", fixes=_BATCH, part=Part.RAMP),
    Key("per_device_batch_size_start", "exact", _ROWS, fixes=_BATCH, unit="rows per device", part=Part.RAMP),
    Key("per_device_batch_size_increment", "exact", fixes=_BATCH, unit="rows per device", part=Part.RAMP),
    Key("global_rampup_samples", "quantity", _COUNT, fixes=_BATCH, unit="samples", part=Part.RAMP),
    # reinforcement learning
    Key("batch_size", "int", _COUNT, nullable=True, fixes=_BATCH, unit="prompts"),
    Key("num_generations", "int", _COUNT, fixes=_BATCH, unit="responses per prompt", part=Part.PROMPT_BATCH),
    Key("micro_batch_size", "int", _COUNT_OR_OFF, fixes=_BATCH, unit="pairs", part=Part.PROMPT_BATCH, maxtext=OURS),
    Key("train_micro_batch_size", "int", _COUNT_OR_OFF, fixes=_BATCH, unit="prompts", part=Part.PROMPT_BATCH),
    Key("rollout_micro_batch_size", "int", _COUNT_OR_OFF, fixes=_BATCH, unit="prompts", part=Part.PROMPT_BATCH),
    Key("num_iterations", "int", _COUNT, fixes=_BATCH, unit="updates per batch", part=Part.PROMPT_BATCH),
    Key("loss_algo", "choice", choices=("grpo", "gspo-token"), fixes=_PROGRAM),
    Key("loss_agg_mode", "choice", choices=("token-mean", "sequence-mean", "sequence-mean-token-mean"),
        fixes=_PROGRAM),
    Key("grpo_epsilon", "real", _INSIDE, fixes=_PROGRAM),
    Key("epsilon_high", "real", _POSITIVE, nullable=True, fixes=_PROGRAM),
    Key("grpo_beta", "real", _FROM_ZERO, fixes=_PROGRAM),
    Key("max_prefill_predict_length", "int", _COUNT, fixes=_PROGRAM, unit="tokens"),
    Key("decode_sampling_temperature", "real", _POSITIVE, fixes=_PROGRAM),
    Key("decode_sampling_top_k", "int", _FROM_ZERO, fixes=_PROGRAM, unit="tokens"),
    Key("decode_sampling_nucleus_p", "real", _SOME, fixes=_PROGRAM, unit="probability"),
    Key("sampler_seed", "int", _SEED, fixes=_PROGRAM, maxtext=OURS),
    Key("trainer_devices_fraction", "exact", _SOME, fixes=_PROGRAM, unit="share of the devices"),
    Key("sampler_devices_fraction", "exact", _SOME, fixes=_PROGRAM, unit="share of the devices"),
    Key("reward", "text", fixes=_PROGRAM, maxtext="reward_functions_path and reward_functions"),
    Key("reward_worker_count", "int", _COUNT, fixes=_PROGRAM, unit="processes", maxtext=OURS),
    Key("reward_timeout_s", "real", _POSITIVE, fixes=_PROGRAM, unit="seconds", maxtext=OURS),
    Key("reward_on_failure", "real", fixes=_PROGRAM, maxtext=OURS),
    Key("prompt_template", "text", fixes=Fixes.PROMPTS | _PROGRAM, maxtext=OURS),
    Key("eval_num_generations", "int", _COUNT, fixes=_PROGRAM, unit="responses per held-out prompt",
        maxtext="num_eval_passes"),
    Key("warm_start_steps", "int", _FROM_ZERO, fixes=_PROGRAM, unit="updates", maxtext=OURS),
    Key("warm_start_learning_rate", "real", _POSITIVE, fixes=_PROGRAM, maxtext=OURS),
    Key("warm_start_path", "paths", fixes=_PROGRAM, maxtext=OURS),
    # rates
    Key("learning_rate", "real", _POSITIVE, fixes=_NOTHING),
    Key("learning_rate_schedule", "choice", choices=("cosine", "wsd", "constant"), fixes=_NOTHING,
        maxtext="lr_schedule_type", warm_start=False),
    Key("warmup_steps_fraction", "real", _SHARE, fixes=_NOTHING, unit="share of the run's samples", warm_start=False),
    Key("learning_rate_final_fraction", "real", _SHARE, fixes=_NOTHING, unit="share of the peak"),
    Key("wsd_decay_steps_fraction", "real", _SHARE, fixes=_NOTHING, unit="share of the run's samples"),
    Key("learning_rate_scaling", "choice", choices=("none", "linear", "sqrt"), fixes=_NOTHING, maxtext=OURS),
    Key("reference_batch_size", "int", _SAMPLES, nullable=True, fixes=_NOTHING, unit="samples", maxtext=OURS),
    Key("adam_scaling", "choice", choices=("none", "sde"), fixes=_PROGRAM, maxtext=OURS),
    # optimizer
    Key("opt_type", "choice", choices=("adamw", "lion", "adafactor", "muon", "sgd"), fixes=_MODEL),
    Key("adam_b1", "real", _BELOW_ONE, fixes=_PROGRAM),
    Key("adam_b2", "real", _BELOW_ONE, fixes=_PROGRAM),
    Key("adam_eps", "real", _POSITIVE, fixes=_PROGRAM),
    Key("adam_weight_decay", "real", _FROM_ZERO, fixes=_PROGRAM, warm_start=False),
    Key("gradient_clipping_threshold", "real", _FROM_ZERO, fixes=_PROGRAM),
    Key("gradient_noise_scale", "bool", fixes=_PROGRAM, maxtext=OURS),
    Key("max_consecutive_skips", "int", _COUNT, fixes=_NOTHING, unit="updates", maxtext=OURS),
    # model
    Key("base_emb_dim", "int", _COUNT, fixes=_MODEL),
    Key("base_num_query_heads", "int", _COUNT, fixes=_MODEL, unit="heads"),
    Key("base_num_kv_heads", "int", _COUNT, fixes=_MODEL, unit="heads"),
    Key("head_dim", "int", _FROM_TWO, fixes=_MODEL),
    Key("base_mlp_dim", "int", _COUNT, fixes=_MODEL),
    Key("base_num_decoder_layers", "int", _COUNT, fixes=_MODEL, unit="layers"),
    Key("vocab_size", "int", _COUNT, fixes=_MODEL, unit="rows of the embedding"),
    Key("logits_via_embedding", "bool", fixes=_MODEL),
    Key("decoder_block", "choice", choices=tuple(BLOCKS), fixes=_MODEL),
    Key("mlp_activations", "choice", fixes=_MODEL,
        choices=("silu,linear", "gelu,linear", "gelu_exact,linear", "gelu", "gelu_exact")),
    Key("attention_bias", "bool", fixes=_MODEL),
    Key("attention_out_bias", "bool", fixes=_MODEL, maxtext=OURS),
    Key("mlp_projection_bias", "bool", fixes=_MODEL, maxtext=OURS),
    Key("use_qk_norm", "bool", fixes=_MODEL),
    Key("attention_type", "text", fixes=_MODEL),
    Key("sliding_window_size", "int", _FROM_ZERO, fixes=_MODEL, unit="tokens"),
    Key("attn_logits_soft_cap", "real", _FROM_ZERO, fixes=_MODEL),
    Key("final_logits_soft_cap", "real", _FROM_ZERO, fixes=_MODEL),
    Key("query_pre_attn_scalar", "real", _POSITIVE, nullable=True, fixes=_MODEL, maxtext=OURS),
    Key("trainable_position_size", "int", _COUNT_OR_OFF, fixes=_MODEL, unit="positions"),
    Key("max_target_length", "int", _FROM_TWO, fixes=Fixes.ROWS | _PROGRAM, unit="tokens"),
    Key("rope_max_timescale", "real", _POSITIVE, fixes=_MODEL),
    Key("local_rope_max_timescale", "real", Bounds(above=0, also=-1), fixes=_MODEL),
    Key("rope_type", "choice", choices=("default", "linear", "llama3.1", "yarn", "longrope"), fixes=_MODEL),
    Key("rope_factor", "real", Bounds(at_least=1), fixes=_MODEL),
    Key("rope_low_freq_factor", "real", _POSITIVE, fixes=_MODEL, maxtext=OURS),
    Key("rope_high_freq_factor", "real", _POSITIVE, fixes=_MODEL, maxtext=OURS),
    Key("original_max_position_embeddings", "int", _COUNT, fixes=_MODEL, unit="tokens"),
    Key("beta_fast", "real", _POSITIVE, fixes=_MODEL),
    Key("beta_slow", "real", _POSITIVE, fixes=_MODEL),
    Key("rope_attention_factor", "real", _POSITIVE, nullable=True, fixes=_MODEL, maxtext=OURS),
    Key("rope_short_factors", "text", fixes=_MODEL, maxtext=OURS),
    Key("rope_long_factors", "text", fixes=_MODEL, maxtext=OURS),
    Key("normalization_layer_epsilon", "real", _POSITIVE, fixes=_MODEL),
    Key("dtype", "choice", choices=_DTYPES, fixes=_PROGRAM),
    Key("weight_dtype", "choice", choices=_DTYPES, fixes=_MODEL),
    Key("remat_policy", "choice", choices=REMAT_POLICIES, fixes=_PROGRAM),
    *(Key(tensor, "choice", choices=choices, fixes=_PROGRAM) for tensor, choices in REMAT_TENSORS.items()),
    Key("attention", "choice", choices=("auto", "dot_product", "cudnn", "splash"), fixes=_PROGRAM),
    Key("scan_layers", "bool", fixes=_PROGRAM),
    Key("init_weights_seed", "int", _SEED, fixes=_MODEL),
    # low-rank adapters
    Key("lora_rank", "int", _FROM_ZERO, fixes=Fixes.ADAPTERS | _PROGRAM, maxtext=OURS, warm_start=False),
    Key("lora_alpha", "real", _POSITIVE, fixes=Fixes.ADAPTERS | _PROGRAM, maxtext=OURS),
    Key("lora_targets", "text", fixes=Fixes.ADAPTERS | _PROGRAM, maxtext=OURS),
    # data
    Key("dataset_type", "choice", fixes=Fixes.RECORDS, choices=(
        "python_stdlib", "synthetic", "text", "jsonl", "parquet", "arrayrecord", "tokens", "arithmetic")),
    Key("dataset_path", "paths", fixes=Fixes.CONTENT),
    Key("eval_dataset_path", "paths", fixes=Fixes.CONTENT, maxtext=OURS, warm_start=False),
    Key("eval_fraction", "real", _BELOW_ONE, fixes=Fixes.CONTENT, unit="share of the documents", maxtext=OURS,
        warm_start=False),
    Key("text_field", "text", fixes=Fixes.RECORDS, maxtext="train_data_columns", warm_start=False),
    Key("record_format", "choice", choices=("text", "example"), fixes=Fixes.RECORDS, maxtext=OURS),
    Key("skip_bad_records", "bool", fixes=Fixes.ROWS | Fixes.PROMPTS, maxtext=OURS),
    Key("synthetic_samples", "quantity", _COUNT, fixes=Fixes.CONTENT, unit="samples per epoch", maxtext=OURS),
    Key("packing", "bool", fixes=Fixes.ROWS),
    Key("packing_strategy", "choice", choices=("concatenate", "best_fit"), fixes=Fixes.ROWS,
        maxtext="grain_packing_type", warm_start=False),
    Key("add_bos", "bool", fixes=Fixes.TOKENS | Fixes.PROMPTS),
    Key("add_eos", "bool", fixes=Fixes.TOKENS),
    Key("tokenizer_type", "choice", choices=("byte", "huggingface", "sentencepiece"), fixes=Fixes.CONTENT),
    Key("tokenizer_path", "path", fixes=Fixes.CONTENT),
    Key("use_sft", "bool", fixes=Fixes.CHAT, warm_start=False),
    Key("sft_train_on_completion_only", "bool", fixes=Fixes.CHAT),
    Key("overlong", "choice", choices=("truncate", "drop", "error"), fixes=Fixes.CHAT, maxtext=OURS),
    Key("enable_data_shuffling", "bool", fixes=Fixes.ORDER),
    Key("data_shuffle_seed", "int", _SEED, fixes=Fixes.ORDER),
    Key("grain_worker_count", "int", _FROM_ZERO, fixes=_NOTHING, unit="processes"),
    Key("grain_prefetch_buffer_size", "int", _COUNT, fixes=_NOTHING, unit="rows"),
    Key("data_cache_dir", "local", fixes=_NOTHING, maxtext=OURS),
    # mesh
    *(Key(f"{network}_{axis}_parallelism", "int", _COUNT_OR_OFF, fixes=_PROGRAM)
      for network in ("ici", "dcn") for axis in ("data", "fsdp", "tensor", "context", "pipeline")),
    # checkpoints, eval, what a person sees
    Key("enable_checkpointing", "bool", fixes=_NOTHING),
    Key("checkpoint_period", "int", _COUNT, fixes=_NOTHING, unit="updates"),
    Key("max_num_checkpoints_to_keep", "int", _COUNT, nullable=True, fixes=_NOTHING, unit="checkpoints"),
    Key("eval_interval", "int", _COUNT_OR_OFF, fixes=_NOTHING, unit="updates", warm_start=False),
    Key("eval_steps", "int", _COUNT_OR_OFF, fixes=_NOTHING, unit="batches"),
    Key("eval_samples", "quantity", _COUNT, nullable=True, fixes=_NOTHING, unit="samples", maxtext=OURS),
    Key("log_to", "choices", fixes=_NOTHING, choices=("tensorboard", "wandb", "mlflow"),
        maxtext="enable_tensorboard", warm_start=False),
    Key("log_period", "int", _COUNT, fixes=_NOTHING, unit="updates"),
    Key("profile_steps", "text", fixes=_NOTHING, maxtext="skip_first_n_steps_for_profiler and profiler_steps",
        warm_start=False),
    Key("generate_prompt", "text", fixes=_NOTHING, maxtext="prompt"),
    Key("peak_tflops_per_device", "real", _POSITIVE, nullable=True, fixes=_NOTHING, unit="TFLOP/s", maxtext=OURS),
    Key("compilation_cache_dir", "local", fixes=_NOTHING, maxtext="jax_cache_dir"),
    Key("libtpu_flags", "text", fixes=_PROGRAM, maxtext=OURS),
    Key("compiled_dir", "path", fixes=_NOTHING, maxtext="compiled_trainstep_file"),
)
# fmt: on


def names_fixing(what: Fixes) -> tuple[str, ...]:
    """Returns the keys that fix any part of what is named, in the order of base.yml."""
    return tuple(key.name for key in ROWS if key.fixes & what)


def customised_tensors(values: Mapping[str, object]) -> list[str]:
    """Returns the tensors of a layer whose place is not the default, which remat_policy=custom alone may state."""
    return [name for name, (first, *_) in REMAT_TENSORS.items() if values[name] != first]


def names_of(part: Part) -> tuple[str, ...]:
    """Returns the keys of a statement, in the order of base.yml."""
    return tuple(key.name for key in ROWS if key.part is part)
