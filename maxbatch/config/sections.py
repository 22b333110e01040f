"""The sections of the config, in the order of base.yml: a table with one row a key.

A row is `name: type = key(default, sentence, fixes, bounds, unit, ...)`. The rows give the loader's
types, messages and defaults, the identities of runs and programs, and base.yml (`python -m
maxbatch.config.base_yml`). A new key must state the properties it fixes, so the identity of a run
or of its compiled programs cannot miss it.
"""

from collections.abc import Mapping
from typing import Literal, get_args

from maxbatch.config.file_formats import file_formats
from maxbatch.config.keys import (
    OURS,
    BatchSize,
    Choice,
    DataPaths,
    Exact,
    FieldNames,
    Fixes,
    Key,
    LocalPath,
    Part,
    Quantity,
    Section,
    Shared,
    StoragePath,
    Words,
    key,
)
from maxbatch.config.values import Bounds, value_text
from maxbatch.families.family import DEFAULT_FAMILY, FAMILIES
from maxbatch.system.errors import ConfigError
from maxbatch.system.registry import Table, names

# Bounds shared by several keys.
POSITIVE, FROM_ZERO, COUNT, FROM_TWO = Bounds(above=0), Bounds(0), Bounds(1), Bounds(2)
SHARE, SOME = Bounds(0, 1), Bounds(above=0, at_most=1)
BELOW_ONE, INSIDE = Bounds(at_least=0, below=1), Bounds(above=0, below=1)
SEED = Bounds(0, 2**32 - 1)
SPIKE_WINDOW = Bounds(2, 100_000)  # its figures are in every checkpoint
ROWS, SAMPLES = Bounds(above=0, at_most=2**31), Bounds(1, 2**40)
LAYERS = Bounds(1, 2**20)  # a plan looks at each of them
COUNT_OR_OFF = Bounds(at_least=1, also=-1)
ROWS_OR_SAME = Bounds(above=0, at_most=2**31, also=0)

# Properties fixed by several keys.
NOTHING, PROGRAM = Fixes.NOTHING, Fixes.PROGRAM
MODEL, STATE = Fixes.FORM | Fixes.PROGRAM, Fixes.STATE | Fixes.PROGRAM
BATCH = Fixes.BATCH | Fixes.PROGRAM

# Effects of a resume with another value.
THE_BATCH = "the batch"
_GOES_ON = "nothing: the run goes on from its own checkpoint"

# Shared or long choices.
FloatType = Literal["float32", "bfloat16"]
Kept = Literal["remat", "device", "offload"]
Activations = Literal["silu,linear", "gelu,linear", "gelu_exact,linear", "gelu", "gelu_exact"]
RematPolicy = Literal[
    "none", "minimal_with_context", "minimal", "save_qkv_proj", "save_out_proj", "full", "custom"
]
ContextStrategy = Literal["all_gather", "ring", "ulysses"]
Quantization = Literal["", "int8", "fp8"]
ReadyTask = Literal["arithmetic", "sorting"]
STORES = ("tokens", "megatron")  # types of data that are token ids already
READY_TASKS: tuple[str, ...] = get_args(ReadyTask)  # reinforcement learning without a download
_LOGGERS = ("tensorboard", *names(Table.TRACKERS))
_DATASET_TYPES = ("python_stdlib", "synthetic", *file_formats(), *STORES, *READY_TASKS)

# The table; rows take as few lines as possible.
# fmt: off


class RunConfig(Section):
    """The run."""

    run_dir: StoragePath = key("runs/default",
        "folder of this run; a checkpoint in it is resumed", NOTHING, maxtext="base_output_directory and run_name")
    base_output_directory: StoragePath = key("",
        "MaxText's alternative: run_dir is base_output_directory/run_name", NOTHING, warm_start=False)
    run_name: str = key("",
        'name of the run in base_output_directory ("": runs); both "": run_dir', NOTHING, warm_start=False)
    model_name: str = key("default", "preset: a file of configs/models/ without .yml; auto: the model of "
        "load_parameters_path, a Hugging Face folder; default: the model keys below (docs/models.md)", NOTHING)
    load_parameters_path: StoragePath = key("", "start a new run from the parameters of this run folder, checkpoint, "
        'MaxText checkpoint, Hugging Face folder or hub name; "": from scratch', NOTHING, warm_start=False,
        changes=_GOES_ON)
    load_full_state_path: StoragePath = key("", "start a new run from parameters and optimizer state: a new stream and "
        "plan, step 0 (annealing); a state of MaxText: go on with that run, from its step", NOTHING, warm_start=False,
        changes=_GOES_ON)
    start_samples: Quantity | None = key(None, "samples that the updates of a MaxText state in load_full_state_path "
        "have read; null: its updates x global_batch_size", NOTHING, FROM_ZERO, "samples", maxtext=OURS,
        warm_start=False, changes=_GOES_ON)
    own_parts: str = key("", "the parts of your own that maxbatch.train was given, such as 'model: mine.Net, stream: "
        "mine.Rows'; written by train, which refuses a config whose parts it is not given", NOTHING, maxtext=OURS,
        warm_start=False, changes="the user's own code")
    heartbeat_timeout_s: int = key(30,
        "seconds within which the other hosts stop after one dies; exit code 75 if a checkpoint is saved", NOTHING,
        Bounds(10, 3600), "s", maxtext=OURS)
    host_wait_s: int = key(300, "seconds that the hosts of a start wait for each other; then they end, and name those "
        "that have not come", NOTHING, Bounds(1, 604_800), "s", maxtext=OURS)


class LengthConfig(Section, changes="the end of the run, and rates that follow its length"):
    """How long: exactly one of the first four (a higher layer displaces the others), and the length
    of a row.
    """

    steps: int | None = key(200, "optimizer updates", NOTHING, COUNT, "updates", part=Part.LENGTH, warm_start=False)
    train_samples: Quantity | None = key(None, "samples (rows); suffixes K, M, B, T or Ki, Mi, Gi, Ti",
        NOTHING, COUNT, "samples", part=Part.LENGTH, maxtext=OURS, warm_start=False)
    train_tokens: Quantity | None = key(None,
        "tokens (slots), rounded up to a sample; suffixes K, M, B, T or Ki, Mi, Gi, Ti",
        NOTHING, COUNT, "tokens", part=Part.LENGTH, maxtext=OURS, warm_start=False)
    num_epochs: Exact | None = key(None, "passes over the training split, may be fractional; not for a mixture",
        NOTHING, POSITIVE, "passes", part=Part.LENGTH, maxtext="num_epoch", warm_start=False)
    max_target_length: int = key(256,
        "L: tokens per sample; use_dpo: per row, two rows a sample", PROGRAM | Fixes.ROWS, FROM_TWO, "tokens",
        changes="the length of a sample")


class BatchConfig(Section, changes=THE_BATCH):
    """The batch: samples = rows of max_target_length tokens."""

    per_device_batch_size: Exact | None = key(16, "p: rows per device in one forward and backward pass; > 0, may be a "
        "fraction; p x devices is whole; null: global_batch_size / (devices x g)", BATCH, ROWS, "rows per device",
        part=Part.BATCH)
    gradient_accumulation_steps: int | None = key(1, "g >= 1: micro-batches per update; global batch = p x devices x g",
        BATCH, SAMPLES, "micro-batches", part=Part.BATCH)
    global_batch_size: BatchSize | None = key(None, "instead of g: samples per update, or tokens in whole samples "
        "(2Mit, 2097152t), kept on any number of devices; p then limits a pass and g is computed; if g is stated too, "
        "p is computed",
        BATCH, SAMPLES, "samples", part=Part.BATCH, maxtext=OURS)
    batch_size_schedule: str | None = key(None, 'instead of g: "0:256 100000:512 250Bt:4Mit", samples:global '
        'batch, each of them in tokens with the suffix t; or "seesaw 256 2"', BATCH, part=Part.BATCH, maxtext=OURS)
    batch_padding: bool = key(False,
        "true: a batch stated globally need not divide; rows of zero weight fill the last pass", BATCH, maxtext=OURS)
    max_tokens_per_pass: Quantity | None = key(None, "tokens of a device in one pass: the samples of an update share "
        "rows, as many as these tokens hold; p and g follow, the update stays the same; null: a row a sample",
        BATCH, COUNT, "tokens", maxtext=OURS, warm_start=False)
    expansion_factor_real_data: Exact = key(-1,
        "e: -1 or 1: every host loads; e > 1: one host in e loads; 0 < e < 1: a resume on e x the loading hosts",
        PROGRAM, warm_start=False, changes="the hosts that load data")


class RampConfig(Section, changes=THE_BATCH):
    """Batch ramp-up: p grows from start by increment over global_rampup_samples."""

    enable_rampup_batch_size: bool = key(False,
        "true: the three keys below apply, and per_device_batch_size is the target", BATCH, part=Part.RAMP)
    per_device_batch_size_start: Exact = key(4,
        "a: rows per device in stage 0", BATCH, ROWS, "rows per device", part=Part.RAMP)
    per_device_batch_size_increment: Exact = key(2, "c: rows per device added by each stage; (p - a) / c is whole and "
        ">= 1", BATCH, unit="rows per device", part=Part.RAMP)
    global_rampup_samples: Quantity = key(500,
        "R: samples over which the ramp runs; R / n samples per stage", BATCH, COUNT, "samples", part=Part.RAMP)


class PromptBatchConfig(Section, changes="the batch of prompts"):
    """The batch of prompts (maxbatch rl): batch_size states it, in place of p, g and the ramp."""

    batch_size: int | None = key(None,
        "unique prompts per batch; a sample of the stream is then a prompt; null: pre-training", BATCH, COUNT,
        "prompts", chooses="prompt")
    num_generations: int = key(8, "G: responses per prompt; effective batch = batch_size x G prompt-response pairs",
        BATCH, COUNT, "responses per prompt", part=Part.PROMPT_BATCH)
    micro_batch_size: int = key(-1, "pairs per chunk: a multiple of G, dividing the effective batch and divisible by "
        "the batch shards; -1: no chunks", BATCH, COUNT_OR_OFF, "pairs", part=Part.PROMPT_BATCH)
    train_micro_batch_size: int = key(-1, "prompts per chunk of training; -1: from micro_batch_size",
        BATCH, COUNT_OR_OFF, "prompts", part=Part.PROMPT_BATCH)
    rollout_micro_batch_size: int = key(-1, "prompts per chunk of generation; -1: from micro_batch_size",
        BATCH, COUNT_OR_OFF, "prompts", part=Part.PROMPT_BATCH)
    num_iterations: int = key(1, "mu >= 1: passes over a batch", BATCH, COUNT, "passes", part=Part.PROMPT_BATCH)
    num_minibatches: int = key(1, "updates per pass; a batch is cut into them in stream order; divides batch_size",
        BATCH, COUNT, "updates per pass", part=Part.PROMPT_BATCH, maxtext=OURS)
    filter_groups: bool = key(False,
        "true: prompts whose responses all have the same reward are replaced by the next prompts", BATCH,
        part=Part.PROMPT_BATCH, maxtext=OURS)
    max_prompts_per_batch: int | None = key(None, "most prompts that filter_groups reads for a batch; null: 4 x "
        "batch_size", BATCH, COUNT, "prompts", part=Part.PROMPT_BATCH, maxtext=OURS)
    off_policy_steps: int = key(0, "s: batch k is sampled by the policy after k - s batches; 0: by the newest policy",
        BATCH, FROM_ZERO, "batches", part=Part.PROMPT_BATCH)
    max_prefill_predict_length: int = key(64,
        "most tokens of a prompt; max_target_length includes prompt and response", PROGRAM, COUNT, "tokens")


class RLConfig(Section, changes="responses, rewards or their loss"):
    """Reinforcement learning."""

    loss_algo: Literal["grpo", "gspo-token"] = key("grpo",
        "grpo (ratio of each token) | gspo-token (ratio of the sequence, its geometric mean)", PROGRAM)
    loss_agg_mode: Literal["token-mean", "sequence-mean", "sequence-mean-token-mean"] = key("token-mean",
        "token-mean | sequence-mean (sum over tokens) | sequence-mean-token-mean", PROGRAM)
    advantage_scale: Literal["deviation", "sample_deviation", "none"] = key("deviation",
        "the difference of a reward from its group's mean is divided by: deviation (over G) | sample_deviation (over "
        "G - 1, plus 1e-4, as TRL's) | none (not divided; Liu et al. 2025)", PROGRAM, maxtext=OURS)
    grpo_epsilon: float = key(0.2, "the ratio of the policies is clipped to at least 1 - grpo_epsilon", PROGRAM, INSIDE)
    epsilon_high: float | None = key(None,
        "the ratio of the policies is clipped to at most 1 + epsilon_high; null: grpo_epsilon", PROGRAM, POSITIVE)
    grpo_beta: float = key(0.0,
        "weight of the KL divergence to the first parameters; 0: not computed", PROGRAM, FROM_ZERO)
    decode_sampling_temperature: float = key(1.0, "divides the logits of a rollout; > 0", PROGRAM, POSITIVE)
    decode_sampling_top_k: int = key(0, "draws from the k likeliest tokens; 0: all", PROGRAM, FROM_ZERO, "tokens")
    decode_sampling_nucleus_p: float = key(1.0,
        "draws from the likeliest tokens that together have this probability; 1: all", PROGRAM, SOME, "probability")
    sampler_seed: int = key(0, "seed of the responses", PROGRAM, SEED, maxtext=OURS)
    sampler_dtype: FloatType | None = key(None, "compute of the sampler: float32 (responses do not depend on the "
        "devices) | bfloat16; null: dtype", PROGRAM, maxtext=OURS)
    reward: str = key("maxbatch.rl.arithmetic:is_right", "module:function or FILE.py:function of (prompt, response, "
        'record); several: "a:f,0.7;b:g,0.3"', PROGRAM, maxtext="reward_functions_path and reward_functions",
        shared=Shared.CONTENT)
    reward_worker_count: int = key(1, "processes that run the rewards", PROGRAM, COUNT, "processes", maxtext=OURS,
        changes="")
    reward_timeout_s: float = key(10.0,
        "seconds that one response may take", PROGRAM, POSITIVE, "seconds", maxtext=OURS)
    reward_on_failure: float = key(0.0, "score of a response whose reward crashed or timed out", PROGRAM, maxtext=OURS)
    transcript_period: int = key(10, "batches between records of trained responses in transcripts.jsonl; -1: none",
        NOTHING, COUNT_OR_OFF, "batches", maxtext=OURS, changes="the logs")
    prompt_template: str = key("{prompt}", "text of a prompt, from the fields of its record; a field alone, "
        '"{messages}", may hold a conversation', PROGRAM | Fixes.PROMPTS, maxtext=OURS)
    eval_num_generations: int = key(8, "responses per held-out prompt: pass@1 is their mean, pass@k: one is right",
        PROGRAM, COUNT, "responses per held-out prompt", maxtext="num_eval_passes")
    warm_start_steps: int = key(0,
        "updates of supervised training before the first batch; 0: none", PROGRAM, FROM_ZERO, "updates", maxtext=OURS)
    warm_start_learning_rate: float = key(3e-3, "peak rate of the warm start; cosine", PROGRAM, POSITIVE, maxtext=OURS)
    warm_start_path: DataPaths = key("", 'documents of the warm start, jsonl; "": worked examples of '
        "dataset_type=arithmetic or sorting", PROGRAM, maxtext=OURS)


class RatesConfig(Section, changes="the learning rate"):
    """Rates: schedules run over samples, so a ramp does not distort them."""

    learning_rate: float = key(3e-3, "peak, at reference_batch_size where it is scaled", NOTHING, POSITIVE)
    learning_rate_schedule: Literal["cosine", "wsd", "constant"] = key("cosine",
        "cosine | wsd (warmup, stable, decay) | constant, after the warmup",
        NOTHING, maxtext="lr_schedule_type", warm_start=False)
    warmup_steps_fraction: float = key(0.1, "share of the run's samples in linear warmup from 0",
        NOTHING, SHARE, "share of the run's samples", warm_start=False)
    learning_rate_final_fraction: float = key(0.1,
        "last rate as a share of the peak (cosine and wsd)", NOTHING, SHARE, "share of the peak")
    wsd_decay_steps_fraction: float = key(0.1,
        "share of the run's samples in wsd's linear decay", NOTHING, SHARE, "share of the run's samples")
    learning_rate_schedule_by: Literal["samples", "updates"] = key("samples", "samples | updates: as in MaxText, the "
        "warm-up is a whole number of updates, and the last update has the last rate", NOTHING, maxtext=OURS,
        warm_start=False)
    learning_rate_schedule_steps: int = key(-1, "updates: length of the schedule, with learning_rate_schedule_by="
        "updates; the rate is 0 after it; -1: the run's", NOTHING, COUNT_OR_OFF, "updates", warm_start=False)
    learning_rate_scaling: Literal["none", "linear", "sqrt"] = key("none", "none | linear (rate x B / reference) | "
        "sqrt (rate x sqrt(B / reference)), stage by stage", NOTHING, maxtext=OURS)
    reference_batch_size: int | None = key(None,
        "global batch in samples for which learning_rate was tuned; null: the last stage's", NOTHING, SAMPLES,
        "samples", maxtext=OURS)


class OptimizerConfig(Section, changes="the updates"):
    """Optimizer."""

    opt_type: Literal["adamw", "lion", "adafactor", "muon", "sgd"] = key("adamw",
        "adamw | lion | adafactor | muon | sgd", STATE)
    adam_b1: float | None = key(0.9,
        "decay of the first moment, per update (also lion's b1, muon's and sgd's momentum)", PROGRAM, BELOW_ONE)
    adam_b1_half_life: str | None = key(None,
        "instead of adam_b1: tokens in which the moment halves, such as 2Mt, at any batch; null: adam_b1", STATE,
        maxtext=OURS)
    adam_b2: float | None = key(0.95, "decay of the second moment, per update", PROGRAM, BELOW_ONE)
    adam_b2_half_life: str | None = key(None,
        "instead of adam_b2: tokens in which the moment halves, such as 20Mt; null: adam_b2", STATE, maxtext=OURS)
    adam_eps: float = key(1e-8, "added to the root of the second moment", PROGRAM, POSITIVE)
    adam_eps_root: float = key(0, "added to the second moment, under the root", PROGRAM, FROM_ZERO)
    mu_dtype: Literal["float32", "bfloat16"] | None = key(None,
        "first moment of adamw and muon: float32 | bfloat16; null: weight_dtype", STATE)
    adam_weight_decay: float | None = key(0.1, "decoupled, x learning rate, per update; of matrices, or as adamw_mask "
        "states", PROGRAM, FROM_ZERO, warm_start=False)
    adamw_mask: str | None = key(None, "parameters without weight decay: a list of regular expressions, searched in "
        "their paths here and in MaxText; []: none, all decay (MaxText's default); null: all but matrices", PROGRAM)
    weight_decay_timescale: str | None = key(None, "instead of adam_weight_decay: tokens over which it averages the "
        "updates, such as 5Bt, or 1.0run", PROGRAM, maxtext=OURS, warm_start=False)
    parameter_average_half_life: str | None = key(None,
        "keep an average of the parameters; an old value's weight halves in this many tokens, such as 20Mt; null: none",
        STATE, maxtext=OURS, warm_start=False)
    adam_scaling: Literal["none", "sde"] = key("none", "none | sde: with sqrt, Adam's betas and epsilon follow the "
        "batch too (Malladi et al. 2022)", PROGRAM, maxtext=OURS)
    muon_beta: float | None = key(None, "muon: momentum of matrices; null: adam_b1", PROGRAM, BELOW_ONE)
    muon_weight_decay: float | None = key(None, "muon: weight decay of the matrices that it orthogonalises; null: "
        "that of the others", PROGRAM, FROM_ZERO, warm_start=False)
    muon_consistent_rms: float | None = key(0.2, "muon: root mean square of an update of matrices, before the rate; "
        "null: it is scaled by sqrt(max(1, outputs / inputs))", PROGRAM, POSITIVE)
    gradient_clipping_threshold: float = key(1.0,
        "largest global norm of the update's gradient; 0: no clipping", PROGRAM, FROM_ZERO)
    gradient_noise_scale: bool = key(True,
        "measure the gradient noise scale from parts of a batch (McCandlish et al. 2018)", PROGRAM, maxtext=OURS,
        changes="the measured metrics")
    max_consecutive_skips: int = key(10,
        "the run ends after this many non-finite updates in a row; >= 1", NOTHING, COUNT, "updates", maxtext=OURS,
        changes="the point where a diverging run ends")
    skip_step_on_spikes: bool = key(False, "true: skip an update whose loss or gradient norm exceeds the mean of the "
        "last skip_step_interval updates by more than skip_step_scaling_factor standard deviations", PROGRAM,
        changes="the updates that are skipped as spikes")
    skip_step_interval: int = key(128, "updates that a spike is compared with; none is skipped before half of them "
        "are known", PROGRAM, SPIKE_WINDOW, "updates", changes="the updates that are skipped as spikes")
    skip_step_scaling_factor: float = key(6.0, "standard deviations above the mean from which on an update is a spike",
        PROGRAM, POSITIVE, "standard deviations", changes="the updates that are skipped as spikes")
    reproducible_sums: bool = key(False, "true: updates are equal to the last bit on any number of devices and for any "
        "cut of the batch; a device holds the model and its gradient whole", PROGRAM, maxtext=OURS,
        changes="the last bits of the updates")
    reproducible_rows: int = key(1, "rows whose gradient one program computes, beside reproducible_sums=true; divides "
        "the rows of a device in a pass", PROGRAM, COUNT, "rows", maxtext=OURS, changes="the last bits of the updates")


class ModelConfig(Section, changes="the model's computation"):
    """Model."""

    base_emb_dim: int = key(128, "D: width of the residual stream", MODEL, COUNT)
    base_num_query_heads: int = key(4, "H: query heads; a multiple of base_num_kv_heads", MODEL, COUNT, "heads")
    base_num_kv_heads: int = key(2,
        "K: key and value heads (grouped-query attention where K < H)", MODEL, COUNT, "heads")
    head_dim: int = key(32, "h: width of a head; even", MODEL, FROM_TWO)
    global_num_kv_heads: int = key(0, "gemma4: key and value heads of global layers; 0: base_num_kv_heads", MODEL,
        FROM_ZERO, "heads")
    num_kv_shared_layers: int = key(0, "gemma4_small: last layers that take keys and values of the layers before them; "
        "whole cycles of attention_type", MODEL, FROM_ZERO, "layers")
    use_double_wide_mlp: bool = key(False, "gemma4_small: true: the MLPs of these layers have twice base_mlp_dim",
        MODEL)
    base_mlp_dim: int = key(384, "F: hidden width of the gated MLP", MODEL, COUNT)
    base_num_decoder_layers: int = key(4, "layers", MODEL, LAYERS, "layers")
    vocab_size: int = key(264,
        "V: rows of the embedding; at least the tokenizer's vocabulary", MODEL, COUNT, "rows of the embedding")
    logits_via_embedding: bool = key(True, "true: the output projection is the embedding, transposed", MODEL)
    decoder_block: Choice = key(DEFAULT_FAMILY,
        "form of a layer: llama2, or another family (docs/models.md)", MODEL, choices=tuple(FAMILIES))
    mlp_activations: Activations = key("silu,linear",
        "silu,linear | gelu,linear | gelu_exact,linear (gated) | gelu | gelu_exact (not gated); gelu is by tanh", MODEL)
    attention_bias: bool = key(False, "true: query, key and value projections have biases", MODEL)
    attention_out_bias: bool = key(False,
        "true: the projection after attention has a bias; gpt2 always has one", MODEL, maxtext=OURS)
    mlp_projection_bias: bool = key(False,
        "true: the projections of the MLP have biases; gpt2 always has them", MODEL, maxtext=OURS)
    use_qk_norm: bool = key(False, "true: queries and keys are normalised, as in the decoder_block's family", MODEL)
    attention_type: str = key("global",
        "global | local_sliding, or a pattern that repeats over the layers: local_sliding,global", MODEL)
    sliding_window_size: int = key(0,
        "tokens visible to a token in a local_sliding layer, itself included; 0: no such layer", MODEL, FROM_ZERO,
        "tokens")
    chunk_attn_window_size: int = key(0, "llama4: tokens of a chunk; in a layer with RoPE a token sees its chunk of "
        "the document alone; 0: no chunks", MODEL, FROM_ZERO, "tokens")
    nope_layer_interval: int = key(-1,
        "llama4: layers from one without RoPE and chunks to the next; -1: all have RoPE", MODEL, COUNT_OR_OFF, "layers")
    temperature_tuning: bool = key(False, "llama4: true: scores of layers without RoPE are multiplied by 1 + "
        "0.1 ln(1 + floor(tokens of the document so far / 8192))", MODEL)
    attn_logits_soft_cap: float = key(0, "c > 0: scores s become c tanh(s / c); 0: off", MODEL, FROM_ZERO)
    final_logits_soft_cap: float = key(0, "c > 0: logits s become c tanh(s / c); 0: off", MODEL, FROM_ZERO)
    z_loss_multiplier: float = key(0.0, "weight of the square of the log of the softmax's sum, added to a token's loss "
        "in the gradient (Chowdhery et al. 2022); 0: off", PROGRAM, FROM_ZERO)
    query_pre_attn_scalar: float | None = key(None,
        "scores are divided by its root; null: head_dim", MODEL, POSITIVE, maxtext=OURS)
    query_weights_scaled: bool = key(False, "true: query weights hold that division, as MaxText's do, so the optimizer "
        "changes queries sqrt(head_dim) times as much", MODEL, maxtext=OURS)
    gemma_weights_scaled: bool = key(False, "true: the embedding of a Gemma holds the factor sqrt(base_emb_dim), and "
        "its norms hold 1 + scale, as MaxText's do, so the optimizer changes and decays other numbers", MODEL,
        maxtext=OURS)
    trainable_position_size: int = key(-1,
        "positions with a trained embedding, in place of RoPE; -1: RoPE", MODEL, COUNT_OR_OFF, "positions")
    rope_max_timescale: float = key(10000, "RoPE base (Su et al. 2021)", MODEL, POSITIVE)
    local_rope_max_timescale: float = key(-1, "RoPE base of local_sliding layers, without rope_type; -1: "
        "rope_max_timescale, with rope_type as in the other layers", MODEL, Bounds(above=0, also=-1))
    partial_rotary_factor: float = key(1.0, "share that RoPE turns: of a head, from its start (qwen3_next, qwen3_5); "
        "of the pairs of a global layer's head (gemma4)", MODEL, SOME)
    rope_type: Literal["default", "linear", "llama3.1", "yarn", "longrope"] = key("default",
        "default | linear | llama3.1 | yarn | longrope: how RoPE extends to longer texts", MODEL)
    rope_factor: float = key(1, "stretches wavelengths; >= 1", MODEL, COUNT)
    rope_low_freq_factor: float = key(1, "llama3.1: wavelengths above the original length / this factor are stretched "
        "in full", MODEL, POSITIVE, maxtext=OURS)
    rope_high_freq_factor: float = key(4, "llama3.1: wavelengths below the original length / this factor are not "
        "stretched", MODEL, POSITIVE, maxtext=OURS)
    original_max_position_embeddings: int = key(4096,
        "llama3.1, yarn, longrope: tokens of the texts before stretching", MODEL, COUNT, "tokens")
    beta_fast: float = key(32,
        "yarn: pairs that turn more often over the original length are not stretched", MODEL, POSITIVE)
    beta_slow: float = key(1, "yarn: pairs that turn less often are stretched in full", MODEL, POSITIVE)
    rope_attention_factor: float | None = key(None, "yarn, longrope: scales queries and keys; null: 0.1 "
        "ln(rope_factor) + 1 (yarn), sqrt(1 + ln(rope_factor) / ln(original length)) (longrope)",
        MODEL, POSITIVE, maxtext=OURS)
    rope_truncate: bool = key(True,
        "yarn: true: rounds the bounds of the partly stretched pairs to whole ones", MODEL)
    rope_short_factors: str = key("", "longrope: stretching factor of each pair of a head in rows of at most the "
        "original length; head_dim / 2 numbers", MODEL, maxtext=OURS)
    rope_long_factors: str = key("", "longrope: the same in longer rows", MODEL, maxtext=OURS)
    normalization_layer_epsilon: float = key(1e-6, "epsilon of the norms", MODEL, POSITIVE)
    q_lora_rank: int = key(0,
        "deepseek: width of the queries' latent; 0: no latent", MODEL, FROM_ZERO)
    kv_lora_rank: int = key(512,
        "deepseek: width of the latent of all heads' keys and values", MODEL, COUNT)
    qk_nope_head_dim: int = key(128,
        "deepseek: width of the unrotated part of a head's query and key, in place of head_dim", MODEL, COUNT)
    qk_rope_head_dim: int = key(64,
        "deepseek: width of the rotated part; all heads share its key; even", MODEL, FROM_TWO)
    v_head_dim: int = key(128, "deepseek: width of a head's value", MODEL, COUNT)
    mscale: float = key(1.0,
        "deepseek with rope_type=yarn: scores are multiplied by (0.1 mscale ln(rope_factor) + 1)^2", MODEL, FROM_ZERO)
    num_experts: int = key(1,
        "E: experts per layer, in a decoder_block with experts; 1: none", MODEL, COUNT, "experts")
    num_experts_per_tok: int = key(1, "k: experts per token; at most num_experts", MODEL, COUNT, "experts")
    base_moe_mlp_dim: int = key(-1, "hidden width of an expert; -1: base_mlp_dim", MODEL, COUNT_OR_OFF)
    norm_topk_prob: bool = key(False, "true: the weights of a token's experts are divided by their sum", MODEL)
    shared_experts: int = key(0,
        "deepseek, llama4, qwen3_next, qwen3_5: shared experts, computed as one MLP for every token", MODEL, FROM_ZERO,
        "experts")
    first_num_dense_layers: int = key(0,
        "deepseek: first layers with an MLP of base_mlp_dim in place of experts", MODEL, FROM_ZERO, "layers")
    interleave_moe_layer_step: int = key(1,
        "llama4: layers from one with experts to the next; those between have an MLP of base_mlp_dim",
        MODEL, COUNT, "layers")
    inhomogeneous_layer_cycle_interval: int = key(1,
        "qwen3_next, qwen3_5: layers from one with attention to the next; those between have the gated delta rule",
        MODEL, COUNT, "layers")
    gdn_num_key_heads: int = key(16, "gated delta rule: heads of queries and keys", MODEL, COUNT, "heads")
    gdn_num_value_heads: int = key(32,
        "gated delta rule: heads of values and states; a multiple of gdn_num_key_heads", MODEL, COUNT, "heads")
    gdn_key_head_dim: int = key(128, "gated delta rule: width of queries, keys and values", MODEL, COUNT)
    routed_score_func: Literal["softmax", "sigmoid"] = key("softmax",
        "softmax | sigmoid (deepseek, llama4): a router's scores of experts", MODEL)
    routed_scaling_factor: float = key(1.0, "deepseek: multiplies the weights of a token's experts", MODEL, POSITIVE)
    n_routing_groups: int = key(-1,
        "deepseek: groups of neighbouring experts; a group's score is the sum of its two largest; -1: none", MODEL,
        COUNT_OR_OFF, "groups")
    topk_routing_group: int = key(-1, "deepseek: best-scoring groups that a token may choose experts from; -1: all",
        MODEL, COUNT_OR_OFF, "groups")
    routed_bias: bool = key(False,
        "true: a bias of each expert, added to its score for the choice alone (Wang et al. 2024)", MODEL)
    routed_bias_update_rate: float = key(0.0,
        "step of that bias after an update, towards experts with fewer tokens than the mean", PROGRAM, FROM_ZERO)
    load_balance_loss_weight: float = key(0.0,
        "weight of the balance loss E sum(f P), which is 1 for even loads of the experts; 0: off", PROGRAM, FROM_ZERO)
    load_balance_scope: Literal["sequence", "global"] = key("sequence",
        "sequence (loads of each row) | global (loads of the previous update's whole batch)", PROGRAM, maxtext=OURS)
    router_z_loss_weight: float = key(0.0, "weight of the mean square of the router's log-sum-exp (Zoph et al. 2022); "
        "0: off", PROGRAM, FROM_ZERO, maxtext=OURS)
    capacity_factor: float = key(-1.0,
        "c > 0: an expert takes at most the first c x tokens x k / E of a row, rounded up; -1: all", PROGRAM,
        Bounds(above=0, also=-1))
    dtype: FloatType = key("float32", "compute: float32 | bfloat16", PROGRAM)
    quantization: Quantization = key("", 'products of the layers: "" (in dtype) | int8 | fp8 (e4m3, gradients e5m2), '
        "scaled token by token and channel by channel (docs/eight-bits.md)", PROGRAM,
        changes="the layers' products, and updates and evals through them")
    weight_dtype: FloatType = key("float32", "parameters and optimizer state: float32 | bfloat16", STATE)
    attention: Literal["auto", "dot_product", "cudnn", "splash"] = key("auto", "auto (splash on TPU, cudnn on GPU, "
        "where dtype and shapes allow; else dot_product) | dot_product | cudnn | splash", PROGRAM)
    context_parallel_strategy: ContextStrategy = key("all_gather", "how attention reads rows split over the context "
        "axis: all_gather (all keys on every device) | ring (keys go around) | ulysses (heads split in place of rows)",
        PROGRAM)
    context_parallel_load_balance: bool = key(False,
        "every device attends from an early and a late part of each row, so that all have as much to do", PROGRAM)
    scan_layers: bool = key(False,
        "true: one compiled layer in a loop (compiles faster); false: unrolled (runs faster on CPU)", PROGRAM)
    init_weights_seed: int = key(0, "seed of the parameters", STATE, SEED)


class RematConfig(Section, changes="memory and time; updates change by rounding"):
    """Rematerialisation in the backward pass."""

    remat_policy: RematPolicy = key("none", "none | minimal (keep matrix products) | minimal_with_context (and "
        "attention) | save_qkv_proj | save_out_proj | full (keep layer inputs) | custom (the next twelve keys)",
        PROGRAM)
    decoder_layer_input: Literal["device", "offload"] = key("device",
        "custom: place of each layer's input: device | offload (the host's memory)", PROGRAM)
    query_proj: Kept = key("remat",
        "custom: queries: remat (computed again) | device (kept) | offload (kept in the host's memory)", PROGRAM)
    key_proj: Kept = key("remat", "custom: keys: remat | device | offload", PROGRAM)
    value_proj: Kept = key("remat", "custom: values: remat | device | offload", PROGRAM)
    context: Kept = key("remat", "custom: the attention kernel's output (splash): remat | device | offload", PROGRAM)
    out_proj: Kept = key("remat", "custom: attention's last projection: remat | device | offload", PROGRAM)
    mlpwi_0: Kept = key("remat", "custom: the MLP's gate, or its only first product: remat | device | offload", PROGRAM)
    mlpwi_1: Kept = key("remat", "custom: the MLP's projection beside the gate: remat | device | offload", PROGRAM)
    mlpwo: Kept = key("remat", "custom: the MLP's last projection: remat | device | offload", PROGRAM)
    moe_mlpwi_0: Kept = key("remat", "custom: the experts' gate: remat | device | offload", PROGRAM)
    moe_mlpwi_1: Kept = key("remat",
        "custom: the experts' projection beside the gate: remat | device | offload", PROGRAM)
    moe_mlpwo: Kept = key("remat", "custom: the experts' last projection (only a CPU's backward pass needs it): "
        "remat | device | offload", PROGRAM)


class AdapterConfig(Section, changes="the adapters"):
    """Low-rank adapters (LoRA) over the model of load_parameters_path."""

    lora_rank: int = key(0, "rank of the adapters; only they are trained and saved; 0: no adapters",
        PROGRAM | Fixes.ADAPTERS, FROM_ZERO, maxtext=OURS, warm_start=False)
    lora_alpha: float = key(16,
        "adapters are scaled by lora_alpha / lora_rank", PROGRAM | Fixes.ADAPTERS, POSITIVE, maxtext=OURS)
    lora_targets: str = key("all", "all, or a list of matrices of a layer: query,key,value,out,gate,up,down",
        PROGRAM | Fixes.ADAPTERS, maxtext=OURS)


class DataConfig(Section, changes="the data"):
    """Data: stream[0], stream[1] and so on."""

    dataset_type: Choice = key("python_stdlib",
        f"python_stdlib | synthetic | {' | '.join(file_formats())} | tokens (see prepare) | megatron (.bin and .idx); "
        "rl: arithmetic | sorting | a format whose records have fields",
        Fixes.RECORDS, choices=_DATASET_TYPES, changes="")
    dataset_path: DataPaths = key("", 'a file, a folder or a glob; a list of them; a mixture: "a,0.7;b,0.3", its file '
        '(*.yml), or by position "{0: {a: 0.7, b: 0.3}, 1Bt: {a: 0.5, b: 0.5}}"', Fixes.CONTENT, changes="")
    eval_dataset_path: DataPaths = key("",
        'held-out data of the same type, a list too; "": eval_fraction', Fixes.CONTENT, maxtext=OURS, warm_start=False,
        changes="the evals")
    eval_fraction: float = key(0,
        "share of the documents held out, evenly spread; python_stdlib holds out a fixed list", Fixes.CONTENT,
        BELOW_ONE, "share of the documents", maxtext=OURS, warm_start=False)
    text_field: str = key("text", "jsonl, json, csv, tsv, parquet, tfrecord, arrayrecord examples: the field "
        "that holds the text",
        Fixes.RECORDS, maxtext="train_data_columns", warm_start=False, changes="")
    record_fields: FieldNames = key("", "records, the names of fields that have other names: "
        '"{prompt: question, completion: answer}"', Fixes.RECORDS, maxtext=OURS, changes="")
    record_format: Literal["text", "example"] = key("text",
        "arrayrecord: text (UTF-8) | example (tf.train.Example)", Fixes.RECORDS, maxtext=OURS, changes="")
    skip_bad_records: bool = key(False, "true: unreadable records are left out and counted; false: they are an error",
        Fixes.ROWS | Fixes.PROMPTS, maxtext=OURS)
    deduplicate: bool = key(False, "true: of equal records of a source the first is kept, and none is trained on that "
        "is held out", Fixes.CONTENT, maxtext=OURS, warm_start=False)
    synthetic_samples: Quantity = key(1000000,
        "synthetic: samples per epoch", Fixes.CONTENT, COUNT, "samples per epoch", maxtext=OURS)
    packing: bool = key(True,
        "true: documents are joined and cut into rows; false: one document (or part of one) a row", Fixes.ROWS)
    packing_strategy: Literal["concatenate", "best_fit"] = key("concatenate", "concatenate (cut every L tokens) | "
        "best_fit (documents of at most L tokens stay whole)",
        Fixes.ROWS, maxtext="grain_packing_type", warm_start=False)
    add_bos: bool = key(True, "a beginning-of-text token before each document", Fixes.TOKENS | Fixes.PROMPTS)
    add_eos: bool = key(True, "an end-of-text token after each document", Fixes.TOKENS)
    tokenizer_type: Literal["byte", "huggingface", "sentencepiece"] = key("byte",
        "byte (UTF-8 bytes and three special tokens) | huggingface | sentencepiece", Fixes.CONTENT)
    tokenizer_path: StoragePath = key("", "tokenizer.json, a .model file, a folder that holds one, or a Hugging Face "
        'hub name; "" for byte', Fixes.CONTENT, changes="")
    use_sft: bool = key(False,
        "true: records are conversations in a form of sft_format; best_fit if packed", Fixes.CHAT, warm_start=False,
        chooses="conversation")
    sft_format: Literal["auto", "messages", "sharegpt", "completion", "alpaca", "text"] = key("auto",
        "use_sft, the fields of a record: auto (the first that fits) | messages | sharegpt (conversations) | "
        "completion (prompt, completion) | alpaca (instruction, input, output) | text (text_field)",
        Fixes.CHAT, maxtext=OURS)
    sft_train_on_completion_only: bool = key(True,
        "use_sft: true: only the assistant's tokens, end of turn included, have weight; false: all", Fixes.CHAT)
    use_dpo: bool = key(False, "true: records are pairs of a chosen and a rejected answer; a sample is a pair, two "
        "rows of L tokens", Fixes.CONTENT | Fixes.PROGRAM, chooses="pair")
    overlong: Literal["truncate", "drop", "error"] = key("truncate", "use_sft, use_dpo, a record longer than a row: "
        "truncate (keep its beginning) | drop | error", Fixes.CHAT, maxtext=OURS)
    enable_data_shuffling: bool = key(True, "true: every epoch permutes all rows anew", Fixes.ORDER)
    data_shuffle_seed: int = key(0, "seed of the permutations (and of the synthetic data)", Fixes.ORDER, SEED)
    skip_samples: str = key("", 'ranges of the stream to leave out: "1.2M:1.3M 5M:5.01M" (in tokens with t, whole '
        'samples), or a file with one range a line; "": none', NOTHING, maxtext=OURS, warm_start=False,
        shared=Shared.CONTENT, changes="the samples ahead that are left out")
    grain_worker_count: int = key(0,
        "processes that read rows; 0: threads of this one", NOTHING, FROM_ZERO, "processes", changes="")
    grain_prefetch_buffer_size: int = key(64, "rows read ahead; >= 1", NOTHING, COUNT, "rows", changes="")
    data_cache_dir: LocalPath = key("",
        'tokenised data and index; "": ~/.cache/maxbatch (or XDG_CACHE_HOME)', NOTHING, maxtext=OURS, changes="")


class PreferenceConfig(Section, changes="the loss of pairs"):
    """Preference pairs (use_dpo): the loss, a mean over the pairs of the global batch."""

    dpo_algo: Literal["dpo", "orpo"] = key("dpo", "dpo (log-ratios to the first parameters) | orpo (likelihood and "
        "odds ratio, no reference)", PROGRAM, maxtext="dpo.algo")
    dpo_beta: float = key(0.1,
        "dpo: scales the log-ratios; larger: stays nearer to the first parameters", PROGRAM, POSITIVE)
    dpo_label_smoothing: float = key(0.0, "dpo: probability that a pair's answers are swapped (Mitchell 2023); 0: "
        "never", PROGRAM, Bounds(0, below=0.5), "probability")
    orpo_lambda: float = key(0.1,
        "orpo: weight of the odds ratio beside the likelihood of the chosen answer", PROGRAM, FROM_ZERO)


class MeshConfig(Section, changes="the layout; updates change by rounding"):
    """Mesh: axis sizes within a slice (ici) and over slices (dcn); one of each may be -1: the
    rest.
    """

    ici_data_parallelism: int = key(1, "parameters replicated, batch split", PROGRAM, COUNT_OR_OFF)
    ici_fsdp_parallelism: int = key(-1, "parameters and batch split", PROGRAM, COUNT_OR_OFF)
    ici_expert_parallelism: int = key(1, "experts and batch split", PROGRAM, COUNT_OR_OFF)
    ici_tensor_parallelism: int = key(1, "heads, MLP and vocabulary split", PROGRAM, COUNT_OR_OFF)
    ici_context_parallelism: int = key(1, "sequence and parameters split", PROGRAM, COUNT_OR_OFF)
    ici_pipeline_parallelism: int = key(1, "layers split over pipeline stages", PROGRAM, COUNT_OR_OFF)
    dcn_data_parallelism: int = key(1, "over slices: parameters replicated, batch split", PROGRAM, COUNT_OR_OFF)
    dcn_fsdp_parallelism: int = key(1, "over slices: parameters and batch split", PROGRAM, COUNT_OR_OFF)
    dcn_expert_parallelism: int = key(1, "over slices: experts and batch split", PROGRAM, COUNT_OR_OFF)
    dcn_tensor_parallelism: int = key(1, "over slices: heads, MLP and vocabulary split", PROGRAM, COUNT_OR_OFF)
    dcn_context_parallelism: int = key(1, "over slices: sequence and parameters split", PROGRAM, COUNT_OR_OFF)
    dcn_pipeline_parallelism: int = key(1, "over slices: layers split over pipeline stages", PROGRAM, COUNT_OR_OFF)
    trainer_devices_fraction: Exact = key(1.0,
        "share of the devices for training; both 1: all devices train and sample; else disjoint, together at most 1",
        PROGRAM, SOME, "share of the devices")
    sampler_devices_fraction: Exact = key(1.0,
        "share of the devices for sampling", PROGRAM, SOME, "share of the devices")
    rollout_data_parallelism: int = key(-1,
        "copies of the weights for sampling, each with a share of the responses; -1: the rest of the sampling devices",
        PROGRAM, COUNT_OR_OFF, "copies of the weights")
    rollout_tensor_parallelism: int = key(-1,
        "devices per copy of the weights for sampling; -1: the rest; both -1: the axes above", PROGRAM, COUNT_OR_OFF,
        "devices")
    num_pipeline_microbatches: int = key(-1,
        "parts of a micro-batch in the pipeline; a multiple of its stages; -1: the number of stages", PROGRAM,
        COUNT_OR_OFF, "parts")
    num_pipeline_repeats: int = key(1, "groups of layers per stage; a pass goes through all stages once per group; "
        "layers divisible by stages x repeats", PROGRAM, COUNT, "groups of layers")


class CheckpointConfig(Section, changes="the states that are kept"):
    """Checkpoints."""

    enable_checkpointing: bool = key(True, "false: nothing is saved, nothing is resumed", NOTHING)
    checkpoint_period: int = key(100,
        "updates between checkpoints; the last update is always saved", NOTHING, COUNT, "updates")
    max_num_checkpoints_to_keep: int | None = key(3,
        "newest checkpoints kept; null: all", NOTHING, COUNT, "checkpoints")
    keep_best_checkpoint: bool = key(True, "true: the checkpoint with the lowest eval loss is saved and kept "
        "beside the newest ones (checkpoints/best)", NOTHING, maxtext=OURS, warm_start=False)
    overwrite_run: bool = key(False,
        "true: a start refused because checkpoints stand for the lines of run_dir removes both and begins anew",
        NOTHING, maxtext=OURS, changes="")
    local_checkpoint_directory: LocalPath = key("",
        'each host keeps its newest shards below this path, on its own disk or RAM disk; "": none', NOTHING,
        warm_start=False, shared=Shared.STATED, changes="")
    local_checkpoint_period: int = key(0, "updates between local checkpoints; 0 without local_checkpoint_directory",
        NOTHING, FROM_ZERO, "updates", warm_start=False)


class EvaluationConfig(Section, changes="the evals"):
    """Eval."""

    eval_per_device_batch_size: Exact | None = key(None,
        "rows per device in one eval pass; null or 0: per_device_batch_size", BATCH, ROWS_OR_SAME, "rows per device")
    eval_interval: int = key(100, "updates between evals, one at the end as well; -1: no eval",
        NOTHING, COUNT_OR_OFF, "updates", warm_start=False)
    eval_steps: int = key(-1, "most batches of an eval; its samples depend on the devices; -1: the whole held-out part",
        NOTHING, COUNT_OR_OFF, "batches")
    eval_samples: Quantity | None = key(None, "most samples of an eval, the same on any devices; null: the whole "
        "held-out part; suffixes K, M, B, T or Ki, Mi, Gi, Ti", NOTHING, COUNT, "samples", maxtext=OURS)
    eval_tasks: str = key("", "lm-evaluation-harness tasks scored at each eval, by commas: names, patterns, files, "
        'folders; "": none', NOTHING, maxtext=OURS, warm_start=False)
    eval_tasks_limit: int | None = key(None,
        "most documents of each of eval_tasks, the first ones; null: all", NOTHING, COUNT, "documents", maxtext=OURS)
    early_stopping_patience: int | None = key(None,
        "the run ends after this many evals in a row without a lower loss; null: it runs its whole length", NOTHING,
        COUNT, "evals", maxtext=OURS, warm_start=False, changes="the end of the run")


class LoggingConfig(Section, changes="the logs"):
    """Logging."""

    log_to: Words = key("tensorboard",
        f"{', '.join(_LOGGERS)}, or several: [{', '.join(_LOGGERS[:2])}]; none (metrics.jsonl is always written)",
        NOTHING, choices=_LOGGERS, maxtext="enable_tensorboard", warm_start=False)
    log_period: int = key(10, "updates between printed lines (metrics.jsonl has every one)", NOTHING, COUNT, "updates")
    profile_steps: str = key("", '"10:13" traces updates 10 to 12 into run_dir/profile',
        NOTHING, maxtext="skip_first_n_steps_for_profiler and profiler_steps", warm_start=False)
    generate_prompt: str = key("def ",
        'prompt of the text generated at the end of a run; "": none', NOTHING, maxtext="prompt")
    peak_tflops_per_device: float | None = key(None,
        "peak TFLOP/s, for MFU; null: from the chip's name; MFU is null for an unknown chip", NOTHING, POSITIVE,
        "TFLOP/s", maxtext=OURS)


class CompilingConfig(Section, changes="the compiled programs; updates change by rounding"):
    """Compiling."""

    compilation_cache_dir: LocalPath = key("",
        "XLA's persistent cache; \"\": ~/.cache/maxbatch/xla; \"none\": off", NOTHING, maxtext="jax_cache_dir",
        changes="")
    libtpu_flags: str = key("auto", "auto: the flags for the TPU's version | none | \"--flag=value ...\"; flags in "
        "LIBTPU_INIT_ARGS take precedence; no effect without a TPU", PROGRAM, maxtext=OURS)
    compiled_dir: StoragePath = key("",
        'folder written by maxbatch compile; train loads its programs and compiles none; "": compiles', NOTHING,
        maxtext="compiled_trainstep_file", changes="")


# fmt: on
class AllKeys(
    RunConfig, LengthConfig, BatchConfig, RampConfig, PromptBatchConfig, RLConfig, RatesConfig, OptimizerConfig,
    ModelConfig, RematConfig, AdapterConfig, DataConfig, PreferenceConfig, MeshConfig, CheckpointConfig,
    EvaluationConfig, LoggingConfig, CompilingConfig,
):  # fmt: skip
    """Every key, as an attribute and as an item."""

    def fault(self, name: str, rule: str, nearest: object = None) -> ConfigError:
        """Returns the error for the value of a key: the rule that it breaks, and the nearest value
        that works.
        """
        return KEYS[name].fault(value_text(self[name]), rule, nearest)


SECTIONS: tuple[type[Section], ...] = AllKeys.__bases__
# By name, in the order of base.yml.
KEYS: Mapping[str, Key] = {key.name: key for section in SECTIONS for key in section.declared}
# Keys that version 0.5.0 was the last to have, and the texts that change nothing, which its runs
# state.
FORMER_KEYS = {"attention_output_dim": "-1"}
# Choices of remat_policy=custom per tensor of a layer, the default first; MaxText's names.
REMAT_TENSORS = {key.name: key.choices for key in RematConfig.declared[1:]}


def names_fixing(properties: Fixes) -> tuple[str, ...]:
    """Returns the keys that fix any of the named properties, in the order of base.yml."""
    return tuple(name for name, key in KEYS.items() if key.fixes & properties)


def names_of(part: Part) -> tuple[str, ...]:
    """Returns the keys of a part, in the order of base.yml."""
    return tuple(name for name, key in KEYS.items() if key.part is part)


def customised_tensors(values: Mapping[str, object]) -> list[str]:
    """Returns the tensors of a layer with another place than the default; they need
    remat_policy=custom.
    """
    return [name for name, (first, *_) in REMAT_TENSORS.items() if values[name] != first]
