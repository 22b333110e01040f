"""The sections of the config, in the order of base.yml, which holds the defaults of their keys.

A new key states what it fixes, so it cannot drop out of the identity of a run or of its compiled programs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

from maxbatch.config.families import FAMILIES
from maxbatch.config.keys import (
    OURS,
    Choice,
    DataPaths,
    Exact,
    Fixes,
    Key,
    LocalPath,
    Part,
    Place,
    Quantity,
    Section,
    Words,
    key,
)
from maxbatch.config.values import Bounds

_POSITIVE, _FROM_ZERO, _COUNT, _FROM_TWO = Bounds(above=0), Bounds(0), Bounds(1), Bounds(2)
_SHARE, _SOME = Bounds(0, 1), Bounds(above=0, at_most=1)
_BELOW_ONE, _INSIDE = Bounds(at_least=0, below=1), Bounds(above=0, below=1)
_SEED = Bounds(0, 2**32 - 1)
_ROWS, _SAMPLES = Bounds(above=0, at_most=2**31), Bounds(1, 2**40)
_COUNT_OR_OFF = Bounds(at_least=1, also=-1)
_ROWS_OR_SAME = Bounds(above=0, at_most=2**31, also=0)

_NOTHING, _PROGRAM = Fixes.NOTHING, Fixes.PROGRAM
_MODEL, _STATE = Fixes.FORM | Fixes.PROGRAM, Fixes.STATE | Fixes.PROGRAM
_BATCH = Fixes.BATCH | Fixes.PROGRAM

_ReadyTask = Literal["arithmetic", "sorting"]
READY_TASKS: tuple[str, ...] = get_args(_ReadyTask)  # of reinforcement learning, without a download


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(Section):
    """The run."""

    run_dir: Place = key(
        "folder of this run; a checkpoint in it is resumed",
        fixes=_NOTHING,
        maxtext="base_output_directory and run_name",
    )
    base_output_directory: Place = key(
        "MaxText's alternative to run_dir, which is then base_output_directory/run_name",
        fixes=_NOTHING,
        warm_start=False,
    )
    run_name: str = key(
        'name of the run in base_output_directory ("": runs); both "": run_dir', fixes=_NOTHING, warm_start=False
    )
    model_name: str = key(
        "preset: a file of configs/models/ without .yml; auto: the model of load_parameters_path, a Hugging Face "
        "folder; default: the model keys below (docs/models.md)",
        fixes=_NOTHING,
    )
    load_parameters_path: Place = key(
        'start a new run from the parameters of this run folder, checkpoint, Hugging Face folder or hub name; "": '
        "from scratch",
        fixes=_NOTHING,
        warm_start=False,
    )
    load_full_state_path: Place = key(
        "start a new run from parameters and optimizer state: a new stream and plan, step 0 (annealing)",
        fixes=_NOTHING,
        warm_start=False,
    )
    heartbeat_timeout_s: int = key(
        "of several hosts: a host that dies ends the others within so many seconds, with exit code 75 if a checkpoint "
        "is saved",
        fixes=_NOTHING,
        bounds=Bounds(10, 3600),
        unit="s",
        maxtext=OURS,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LengthConfig(Section):
    """How long: exactly one of the first four (a higher layer displaces the others), and the length of a row."""

    steps: int | None = key(
        "optimizer updates", fixes=_NOTHING, bounds=_COUNT, unit="updates", part=Part.LENGTH, warm_start=False
    )
    train_samples: Quantity | None = key(
        "samples (rows); suffixes K, M, B",
        fixes=_NOTHING,
        bounds=_COUNT,
        unit="samples",
        part=Part.LENGTH,
        maxtext=OURS,
        warm_start=False,
    )
    train_tokens: Quantity | None = key(
        "tokens (slots), rounded up to a sample; suffixes K, M, B",
        fixes=_NOTHING,
        bounds=_COUNT,
        unit="tokens",
        part=Part.LENGTH,
        maxtext=OURS,
        warm_start=False,
    )
    num_epochs: Exact | None = key(
        "passes over the training split, may be fractional; not for a mixture",
        fixes=_NOTHING,
        bounds=_POSITIVE,
        unit="passes",
        part=Part.LENGTH,
        maxtext="num_epoch",
        warm_start=False,
    )
    max_target_length: int = key(
        "L: tokens per sample; use_dpo: of each of its two rows",
        fixes=_PROGRAM | Fixes.ROWS,
        bounds=_FROM_TWO,
        unit="tokens",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchConfig(Section):
    """The batch: samples = rows of max_target_length tokens."""

    per_device_batch_size: Exact | None = key(
        "p: rows per device in one forward and backward pass; > 0, may be a fraction; p x devices whole; null: "
        "global_batch_size / (devices x g)",
        fixes=_BATCH,
        bounds=_ROWS,
        unit="rows per device",
        part=Part.BATCH,
    )
    gradient_accumulation_steps: int | None = key(
        "g >= 1: micro-batches per update; global batch = p x devices x g",
        fixes=_BATCH,
        bounds=_SAMPLES,
        unit="micro-batches",
        part=Part.BATCH,
    )
    global_batch_size: int | None = key(
        "instead of g: samples per update, kept on any number of devices; p then limits a pass and g is computed; "
        "if g is stated too, p is computed",
        fixes=_BATCH,
        bounds=_SAMPLES,
        unit="samples",
        part=Part.BATCH,
        maxtext=OURS,
    )
    batch_size_schedule: str | None = key(
        'instead of g: "0:256 100000:512 250Bt:1024", samples (or tokens, suffix t):global batch; or "seesaw 256 2"',
        fixes=_BATCH,
        part=Part.BATCH,
        maxtext=OURS,
    )
    batch_padding: bool = key(
        "true: a batch stated globally need not divide; rows of zero weight fill the last pass",
        fixes=_BATCH,
        maxtext=OURS,
    )
    expansion_factor_real_data: Exact = key(
        "e: -1 or 1 every host loads; e > 1 one host in e loads; 0 < e < 1 a resume on e x the hosts that loaded",
        fixes=_PROGRAM,
        warm_start=False,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RampConfig(Section):
    """Batch ramp-up: p grows from start by increment over global_rampup_samples."""

    enable_rampup_batch_size: bool = key(
        "true: the three keys below apply, and per_device_batch_size is the target", fixes=_BATCH, part=Part.RAMP
    )
    per_device_batch_size_start: Exact = key(
        "a: rows per device in stage 0", fixes=_BATCH, bounds=_ROWS, unit="rows per device", part=Part.RAMP
    )
    per_device_batch_size_increment: Exact = key(
        "c: rows per device that each stage adds; (p - a) / c whole and >= 1",
        fixes=_BATCH,
        unit="rows per device",
        part=Part.RAMP,
    )
    global_rampup_samples: Quantity = key(
        "R: samples over which the ramp runs; R / n samples per stage",
        fixes=_BATCH,
        bounds=_COUNT,
        unit="samples",
        part=Part.RAMP,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptBatchConfig(Section):
    """The batch of prompts (maxbatch rl): batch_size states it, in place of p, g and the ramp."""

    batch_size: int | None = key(
        "unique prompts per batch; null: pre-training; a sample of the stream is then a prompt",
        fixes=_BATCH,
        bounds=_COUNT,
        unit="prompts",
    )
    num_generations: int = key(
        "G: responses per prompt; effective batch = batch_size x G prompt-response pairs",
        fixes=_BATCH,
        bounds=_COUNT,
        unit="responses per prompt",
        part=Part.PROMPT_BATCH,
    )
    micro_batch_size: int = key(
        "pairs per chunk: a multiple of G, dividing the effective batch and divisible by the batch shards; -1: no"
        " chunks",
        fixes=_BATCH,
        bounds=_COUNT_OR_OFF,
        unit="pairs",
        part=Part.PROMPT_BATCH,
    )
    train_micro_batch_size: int = key(
        "prompts per chunk of training; -1: from micro_batch_size",
        fixes=_BATCH,
        bounds=_COUNT_OR_OFF,
        unit="prompts",
        part=Part.PROMPT_BATCH,
    )
    rollout_micro_batch_size: int = key(
        "prompts per chunk of generation; -1: from micro_batch_size",
        fixes=_BATCH,
        bounds=_COUNT_OR_OFF,
        unit="prompts",
        part=Part.PROMPT_BATCH,
    )
    num_iterations: int = key(
        "mu >= 1: passes over a batch", fixes=_BATCH, bounds=_COUNT, unit="passes", part=Part.PROMPT_BATCH
    )
    num_minibatches: int = key(
        "updates per pass, into which a batch is cut in stream order; divides batch_size",
        fixes=_BATCH,
        bounds=_COUNT,
        unit="updates per pass",
        part=Part.PROMPT_BATCH,
        maxtext=OURS,
    )
    filter_groups: bool = key(
        "true: prompts whose responses all have one reward are left out, and the next ones take their place",
        fixes=_BATCH,
        part=Part.PROMPT_BATCH,
        maxtext=OURS,
    )
    max_prompts_per_batch: int | None = key(
        "most prompts that filter_groups reads for a batch; null: 4 x batch_size",
        fixes=_BATCH,
        bounds=_COUNT,
        unit="prompts",
        part=Part.PROMPT_BATCH,
        maxtext=OURS,
    )
    off_policy_steps: int = key(
        "s: batch k is sampled by the policy that k - s batches made; 0: by the one that it is about to change",
        fixes=_BATCH,
        bounds=_FROM_ZERO,
        unit="batches",
        part=Part.PROMPT_BATCH,
    )
    max_prefill_predict_length: int = key(
        "most tokens of a prompt; max_target_length includes prompt and response",
        fixes=_PROGRAM,
        bounds=_COUNT,
        unit="tokens",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RLConfig(Section):
    """Reinforcement learning."""

    loss_algo: Literal["grpo", "gspo-token"] = key(
        "grpo (ratio of each token) | gspo-token (ratio of the sequence, its geometric mean)", fixes=_PROGRAM
    )
    loss_agg_mode: Literal["token-mean", "sequence-mean", "sequence-mean-token-mean"] = key(
        "token-mean | sequence-mean (sum over tokens) | sequence-mean-token-mean", fixes=_PROGRAM
    )
    grpo_epsilon: float = key(
        "the ratio of the policies is clipped to at least 1 - grpo_epsilon", fixes=_PROGRAM, bounds=_INSIDE
    )
    epsilon_high: float | None = key(
        "the ratio of the policies is clipped to at most 1 + epsilon_high; null: grpo_epsilon",
        fixes=_PROGRAM,
        bounds=_POSITIVE,
    )
    grpo_beta: float = key(
        "weight of the KL divergence to the first parameters; 0: not computed", fixes=_PROGRAM, bounds=_FROM_ZERO
    )
    decode_sampling_temperature: float = key("divides the logits of a rollout; > 0", fixes=_PROGRAM, bounds=_POSITIVE)
    decode_sampling_top_k: int = key(
        "draws from the k likeliest tokens; 0: all", fixes=_PROGRAM, bounds=_FROM_ZERO, unit="tokens"
    )
    decode_sampling_nucleus_p: float = key(
        "draws from the likeliest tokens that together have this probability; 1: all",
        fixes=_PROGRAM,
        bounds=_SOME,
        unit="probability",
    )
    sampler_seed: int = key("seed of the responses", fixes=_PROGRAM, bounds=_SEED, maxtext=OURS)
    sampler_dtype: Literal["float32", "bfloat16"] | None = key(
        "compute of the sampler: float32 (responses do not depend on the devices) | bfloat16; null: dtype",
        fixes=_PROGRAM,
        maxtext=OURS,
    )
    reward: str = key(
        'module:function or FILE.py:function of (prompt, response, record); several: "a:f,0.7;b:g,0.3"',
        fixes=_PROGRAM,
        maxtext="reward_functions_path and reward_functions",
    )
    reward_worker_count: int = key(
        "processes that run the rewards", fixes=_PROGRAM, bounds=_COUNT, unit="processes", maxtext=OURS
    )
    reward_timeout_s: float = key(
        "seconds that one response may take", fixes=_PROGRAM, bounds=_POSITIVE, unit="seconds", maxtext=OURS
    )
    reward_on_failure: float = key(
        "score of a response whose reward crashed or timed out", fixes=_PROGRAM, maxtext=OURS
    )
    transcript_period: int = key(
        "batches from one record in transcripts.jsonl of the responses that are trained on to the next; -1: none",
        fixes=_NOTHING,
        bounds=_COUNT_OR_OFF,
        unit="batches",
        maxtext=OURS,
    )
    prompt_template: str = key(
        'text of a prompt, from the fields of its record; a field alone, "{messages}", may hold a conversation',
        fixes=_PROGRAM | Fixes.PROMPTS,
        maxtext=OURS,
    )
    eval_num_generations: int = key(
        "responses per held-out prompt: pass@1 is their mean, pass@k that one is right",
        fixes=_PROGRAM,
        bounds=_COUNT,
        unit="responses per held-out prompt",
        maxtext="num_eval_passes",
    )
    warm_start_steps: int = key(
        "updates of supervised training before the first batch; 0: none",
        fixes=_PROGRAM,
        bounds=_FROM_ZERO,
        unit="updates",
        maxtext=OURS,
    )
    warm_start_learning_rate: float = key(
        "peak rate of the warm start; cosine", fixes=_PROGRAM, bounds=_POSITIVE, maxtext=OURS
    )
    warm_start_path: DataPaths = key(
        f'documents of the warm start, jsonl; "": worked examples of dataset_type={" or ".join(READY_TASKS)}',
        fixes=_PROGRAM,
        maxtext=OURS,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RatesConfig(Section):
    """Rates: schedules run over samples, so a ramp does not distort them."""

    learning_rate: float = key("peak, at reference_batch_size where it is scaled", fixes=_NOTHING, bounds=_POSITIVE)
    learning_rate_schedule: Literal["cosine", "wsd", "constant"] = key(
        "cosine | wsd (warmup, stable, decay) | constant, after the warmup",
        fixes=_NOTHING,
        maxtext="lr_schedule_type",
        warm_start=False,
    )
    warmup_steps_fraction: float = key(
        "share of the run's samples in linear warmup from 0",
        fixes=_NOTHING,
        bounds=_SHARE,
        unit="share of the run's samples",
        warm_start=False,
    )
    learning_rate_final_fraction: float = key(
        "last rate as a share of the peak (cosine and wsd)", fixes=_NOTHING, bounds=_SHARE, unit="share of the peak"
    )
    wsd_decay_steps_fraction: float = key(
        "share of the run's samples in wsd's linear decay",
        fixes=_NOTHING,
        bounds=_SHARE,
        unit="share of the run's samples",
    )
    learning_rate_scaling: Literal["none", "linear", "sqrt"] = key(
        "none | linear (rate x B / reference) | sqrt (rate x sqrt(B / reference)), stage by stage",
        fixes=_NOTHING,
        maxtext=OURS,
    )
    reference_batch_size: int | None = key(
        "global batch, in samples, that learning_rate was tuned for; null: the last stage's",
        fixes=_NOTHING,
        bounds=_SAMPLES,
        unit="samples",
        maxtext=OURS,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """Optimizer."""

    opt_type: Literal["adamw", "lion", "adafactor", "muon", "sgd"] = key(
        "adamw | lion | adafactor | muon | sgd", fixes=_STATE
    )
    adam_b1: float | None = key(
        "decay of the first moment, per update (also lion's b1, muon's and sgd's momentum)",
        fixes=_PROGRAM,
        bounds=_BELOW_ONE,
    )
    adam_b1_half_life: str | None = key(
        "instead of adam_b1: tokens in which the moment halves, such as 2Mt, at any batch; null: adam_b1 holds",
        fixes=_STATE,
        maxtext=OURS,
    )
    adam_b2: float | None = key("decay of the second moment, per update", fixes=_PROGRAM, bounds=_BELOW_ONE)
    adam_b2_half_life: str | None = key(
        "instead of adam_b2: tokens in which the moment halves, such as 20Mt; null: adam_b2 holds",
        fixes=_STATE,
        maxtext=OURS,
    )
    adam_eps: float = key("added to the root of the second moment", fixes=_PROGRAM, bounds=_POSITIVE)
    adam_weight_decay: float | None = key(
        "decoupled, x learning rate, per update; matrices only (norm scales are left out)",
        fixes=_PROGRAM,
        bounds=_FROM_ZERO,
        warm_start=False,
    )
    weight_decay_timescale: str | None = key(
        "instead of adam_weight_decay: tokens over which it averages the updates, such as 5Bt, or 1.0run",
        fixes=_PROGRAM,
        maxtext=OURS,
        warm_start=False,
    )
    parameter_average_half_life: str | None = key(
        "keep an average of the parameters, in which old ones halve in so many tokens, such as 20Mt; null: none",
        fixes=_STATE,
        maxtext=OURS,
        warm_start=False,
    )
    adam_scaling: Literal["none", "sde"] = key(
        "none | sde: with sqrt, Adam's betas and epsilon follow the batch too (Malladi et al. 2022)",
        fixes=_PROGRAM,
        maxtext=OURS,
    )
    gradient_clipping_threshold: float = key(
        "largest global norm of the update's gradient; 0: no clipping", fixes=_PROGRAM, bounds=_FROM_ZERO
    )
    gradient_noise_scale: bool = key(
        "measure the gradient noise scale from the parts of a batch (McCandlish et al. 2018)",
        fixes=_PROGRAM,
        maxtext=OURS,
    )
    max_consecutive_skips: int = key(
        "updates in a row skipped as non-finite that end the run; >= 1",
        fixes=_NOTHING,
        bounds=_COUNT,
        unit="updates",
        maxtext=OURS,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """Model."""

    base_emb_dim: int = key("D: width of the residual stream", fixes=_MODEL, bounds=_COUNT)
    base_num_query_heads: int = key(
        "H: query heads; a multiple of base_num_kv_heads", fixes=_MODEL, bounds=_COUNT, unit="heads"
    )
    base_num_kv_heads: int = key(
        "K: key and value heads (grouped-query attention where K < H)", fixes=_MODEL, bounds=_COUNT, unit="heads"
    )
    head_dim: int = key("h: width of a head; even", fixes=_MODEL, bounds=_FROM_TWO)
    base_mlp_dim: int = key("F: hidden width of the gated MLP", fixes=_MODEL, bounds=_COUNT)
    base_num_decoder_layers: int = key("layers", fixes=_MODEL, bounds=_COUNT, unit="layers")
    vocab_size: int = key(
        "V: rows of the embedding; at least the tokenizer's vocabulary",
        fixes=_MODEL,
        bounds=_COUNT,
        unit="rows of the embedding",
    )
    logits_via_embedding: bool = key("true: the output projection is the embedding, transposed", fixes=_MODEL)
    decoder_block: Choice = key(
        "form of a layer: that of llama2, or of another family (docs/models.md)", fixes=_MODEL, choices=tuple(FAMILIES)
    )
    mlp_activations: Literal["silu,linear", "gelu,linear", "gelu_exact,linear", "gelu", "gelu_exact"] = key(
        "silu,linear | gelu,linear | gelu_exact,linear (gated) | gelu | gelu_exact (not gated); gelu is by tanh",
        fixes=_MODEL,
    )
    attention_bias: bool = key("true: query, key and value projections have biases", fixes=_MODEL)
    attention_out_bias: bool = key(
        "true: the projection after attention has a bias; gpt2 has one always", fixes=_MODEL, maxtext=OURS
    )
    mlp_projection_bias: bool = key(
        "true: the projections of the MLP have biases; gpt2 has them always", fixes=_MODEL, maxtext=OURS
    )
    use_qk_norm: bool = key("true: queries and keys are normalised, in the way of the decoder_block", fixes=_MODEL)
    attention_type: str = key(
        "global | local_sliding, or a pattern that repeats over the layers: local_sliding,global", fixes=_MODEL
    )
    sliding_window_size: int = key(
        "tokens that a local_sliding layer sees, its own included; 0: there is no such layer",
        fixes=_MODEL,
        bounds=_FROM_ZERO,
        unit="tokens",
    )
    attn_logits_soft_cap: float = key("c > 0: scores s become c tanh(s / c); 0: off", fixes=_MODEL, bounds=_FROM_ZERO)
    final_logits_soft_cap: float = key("c > 0: logits s become c tanh(s / c); 0: off", fixes=_MODEL, bounds=_FROM_ZERO)
    query_pre_attn_scalar: float | None = key(
        "scores are divided by its root; null: head_dim", fixes=_MODEL, bounds=_POSITIVE, maxtext=OURS
    )
    trainable_position_size: int = key(
        "positions with an embedding of their own, in place of RoPE; -1: RoPE",
        fixes=_MODEL,
        bounds=_COUNT_OR_OFF,
        unit="positions",
    )
    rope_max_timescale: float = key("RoPE base (Su et al. 2021)", fixes=_MODEL, bounds=_POSITIVE)
    local_rope_max_timescale: float = key(
        "RoPE base of local_sliding layers, without rope_type; -1: rope_max_timescale, with rope_type as in the "
        "other layers",
        fixes=_MODEL,
        bounds=Bounds(above=0, also=-1),
    )
    rope_type: Literal["default", "linear", "llama3.1", "yarn", "longrope"] = key(
        "default | linear | llama3.1 | yarn | longrope: how RoPE is stretched to longer texts", fixes=_MODEL
    )
    rope_factor: float = key("stretches wavelengths; >= 1", fixes=_MODEL, bounds=_COUNT)
    rope_low_freq_factor: float = key(
        "llama3.1: wavelengths longer than the original length over it are stretched in full",
        fixes=_MODEL,
        bounds=_POSITIVE,
        maxtext=OURS,
    )
    rope_high_freq_factor: float = key(
        "llama3.1: wavelengths shorter than the original length over it are not stretched",
        fixes=_MODEL,
        bounds=_POSITIVE,
        maxtext=OURS,
    )
    original_max_position_embeddings: int = key(
        "llama3.1, yarn, longrope: tokens of the texts before stretching", fixes=_MODEL, bounds=_COUNT, unit="tokens"
    )
    beta_fast: float = key(
        "yarn: pairs that turn more often over the original length are not stretched", fixes=_MODEL, bounds=_POSITIVE
    )
    beta_slow: float = key("yarn: pairs that turn less often are stretched in full", fixes=_MODEL, bounds=_POSITIVE)
    rope_attention_factor: float | None = key(
        "yarn, longrope: scales queries and keys; null: 0.1 ln(rope_factor) + 1 (yarn), sqrt(1 + ln(rope_factor) "
        "/ ln(original length)) (longrope)",
        fixes=_MODEL,
        bounds=_POSITIVE,
        maxtext=OURS,
    )
    rope_truncate: bool = key(
        "yarn: true: the pairs between which it stretches in part are rounded to whole ones", fixes=_MODEL
    )
    rope_short_factors: str = key(
        "longrope: stretching factor of each pair of a head in rows of at most the original length; head_dim / 2 "
        "numbers",
        fixes=_MODEL,
        maxtext=OURS,
    )
    rope_long_factors: str = key("longrope: the same in longer rows", fixes=_MODEL, maxtext=OURS)
    normalization_layer_epsilon: float = key("epsilon of the norms", fixes=_MODEL, bounds=_POSITIVE)
    q_lora_rank: int = key(
        "deepseek: width of the latent that queries are made of; 0: they are made of the stream",
        fixes=_MODEL,
        bounds=_FROM_ZERO,
    )
    kv_lora_rank: int = key(
        "deepseek: width of the latent that the keys and values of all heads are made of", fixes=_MODEL, bounds=_COUNT
    )
    qk_nope_head_dim: int = key(
        "deepseek: width of the part of a head's query and key that is not rotated; in place of head_dim",
        fixes=_MODEL,
        bounds=_COUNT,
    )
    qk_rope_head_dim: int = key(
        "deepseek: width of the rotated part, whose key all heads share; even", fixes=_MODEL, bounds=_FROM_TWO
    )
    v_head_dim: int = key("deepseek: width of a head's value", fixes=_MODEL, bounds=_COUNT)
    mscale: float = key(
        "deepseek with rope_type=yarn: scores are multiplied by (0.1 mscale ln(rope_factor) + 1)^2",
        fixes=_MODEL,
        bounds=_FROM_ZERO,
    )
    num_experts: int = key(
        "E: experts of a layer, of a decoder_block that has experts; 1: none",
        fixes=_MODEL,
        bounds=_COUNT,
        unit="experts",
    )
    num_experts_per_tok: int = key(
        "k: experts that a token goes to; at most num_experts", fixes=_MODEL, bounds=_COUNT, unit="experts"
    )
    base_moe_mlp_dim: int = key("hidden width of an expert; -1: base_mlp_dim", fixes=_MODEL, bounds=_COUNT_OR_OFF)
    norm_topk_prob: bool = key("true: the weights of a token's experts are divided by their sum", fixes=_MODEL)
    shared_experts: int = key(
        "deepseek: experts, as one MLP, that every token goes to beside its own",
        fixes=_MODEL,
        bounds=_FROM_ZERO,
        unit="experts",
    )
    first_num_dense_layers: int = key(
        "deepseek: first layers, which have an MLP of base_mlp_dim in place of experts",
        fixes=_MODEL,
        bounds=_FROM_ZERO,
        unit="layers",
    )
    routed_score_func: Literal["softmax", "sigmoid"] = key(
        "softmax | sigmoid (deepseek): a router's scores of experts", fixes=_MODEL
    )
    routed_scaling_factor: float = key(
        "deepseek: multiplies the weights of a token's experts", fixes=_MODEL, bounds=_POSITIVE
    )
    n_routing_groups: int = key(
        "deepseek: groups of experts that are neighbours; a group's score is the sum of its two largest; -1: none",
        fixes=_MODEL,
        bounds=_COUNT_OR_OFF,
        unit="groups",
    )
    topk_routing_group: int = key(
        "deepseek: groups, those of the largest scores, that a token's experts are of; -1: all",
        fixes=_MODEL,
        bounds=_COUNT_OR_OFF,
        unit="groups",
    )
    routed_bias: bool = key(
        "true: a bias of each expert, added to its score for the choice alone (Wang et al. 2024)", fixes=_MODEL
    )
    routed_bias_update_rate: float = key(
        "step of that bias after an update, towards the experts that had fewer tokens than the mean",
        fixes=_PROGRAM,
        bounds=_FROM_ZERO,
    )
    load_balance_loss_weight: float = key(
        "weight of the balance loss E sum(f P), which is 1 where the experts' loads are even; 0: off",
        fixes=_PROGRAM,
        bounds=_FROM_ZERO,
    )
    load_balance_scope: Literal["sequence", "global"] = key(
        "sequence (loads of each row) | global (loads of the whole batch of the update before)",
        fixes=_PROGRAM,
        maxtext=OURS,
    )
    router_z_loss_weight: float = key(
        "weight of the mean square of the router's log-sum-exp (Zoph et al. 2022); 0: off",
        fixes=_PROGRAM,
        bounds=_FROM_ZERO,
        maxtext=OURS,
    )
    capacity_factor: float = key(
        "c > 0: an expert takes at most c x tokens x k / E of a row, rounded up, the first ones; -1: all",
        fixes=_PROGRAM,
        bounds=Bounds(above=0, also=-1),
    )
    dtype: Literal["float32", "bfloat16"] = key("compute: float32 | bfloat16", fixes=_PROGRAM)
    weight_dtype: Literal["float32", "bfloat16"] = key(
        "parameters and optimizer state: float32 | bfloat16", fixes=_STATE
    )
    attention: Literal["auto", "dot_product", "cudnn", "splash"] = key(
        "auto (splash on TPU, cudnn on GPU, where dtype and shapes allow; else dot_product) | dot_product | cudnn"
        " | splash",
        fixes=_PROGRAM,
    )
    scan_layers: bool = key(
        "true: one compiled layer in a loop (compiles faster); false: unrolled (runs faster on CPU)", fixes=_PROGRAM
    )
    init_weights_seed: int = key("seed of the parameters", fixes=_STATE, bounds=_SEED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RematConfig(Section):
    """What the backward pass computes again."""

    remat_policy: Literal[
        "none", "minimal_with_context", "minimal", "save_qkv_proj", "save_out_proj", "full", "custom"
    ] = key(
        "none | minimal (keep matrix products) | minimal_with_context (and attention) | save_qkv_proj | "
        "save_out_proj | full (keep layer inputs) | custom (the next twelve keys)",
        fixes=_PROGRAM,
    )
    decoder_layer_input: Literal["device", "offload"] = key(
        "custom: device | offload (to the host's memory): where the input of each layer is kept", fixes=_PROGRAM
    )
    query_proj: Literal["remat", "device", "offload"] = key(
        "custom: queries: remat (computed again) | device (kept) | offload (kept in the host's memory)", fixes=_PROGRAM
    )
    key_proj: Literal["remat", "device", "offload"] = key("custom: keys: remat | device | offload", fixes=_PROGRAM)
    value_proj: Literal["remat", "device", "offload"] = key("custom: values: remat | device | offload", fixes=_PROGRAM)
    context: Literal["remat", "device", "offload"] = key(
        "custom: the attention kernel's output (splash): remat | device | offload", fixes=_PROGRAM
    )
    out_proj: Literal["remat", "device", "offload"] = key(
        "custom: attention's last projection: remat | device | offload", fixes=_PROGRAM
    )
    mlpwi_0: Literal["remat", "device", "offload"] = key(
        "custom: the MLP's gate, or its only first product: remat | device | offload", fixes=_PROGRAM
    )
    mlpwi_1: Literal["remat", "device", "offload"] = key(
        "custom: the MLP's projection beside the gate: remat | device | offload", fixes=_PROGRAM
    )
    mlpwo: Literal["remat", "device", "offload"] = key(
        "custom: the MLP's last projection: remat | device | offload", fixes=_PROGRAM
    )
    moe_mlpwi_0: Literal["remat", "device", "offload"] = key(
        "custom: the experts' gate: remat | device | offload", fixes=_PROGRAM
    )
    moe_mlpwi_1: Literal["remat", "device", "offload"] = key(
        "custom: the experts' projection beside the gate: remat | device | offload", fixes=_PROGRAM
    )
    moe_mlpwo: Literal["remat", "device", "offload"] = key(
        "custom: the experts' last projection (no backward pass needs it but a CPU's): remat | device | offload",
        fixes=_PROGRAM,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterConfig(Section):
    """Low-rank adapters (LoRA) over the model of load_parameters_path."""

    lora_rank: int = key(
        "rank of the adapters, which alone are trained and saved; 0: no adapters",
        fixes=_PROGRAM | Fixes.ADAPTERS,
        bounds=_FROM_ZERO,
        maxtext=OURS,
        warm_start=False,
    )
    lora_alpha: float = key(
        "adapters are added times lora_alpha / lora_rank",
        fixes=_PROGRAM | Fixes.ADAPTERS,
        bounds=_POSITIVE,
        maxtext=OURS,
    )
    lora_targets: str = key(
        "all, or a list of matrices of a layer: query,key,value,out,gate,up,down",
        fixes=_PROGRAM | Fixes.ADAPTERS,
        maxtext=OURS,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """Data: what fixes stream[0], stream[1] and all that follow."""

    dataset_type: Literal[
        "python_stdlib", "synthetic", "text", "jsonl", "parquet", "arrayrecord", "tokens", _ReadyTask
    ] = key(
        "python_stdlib | synthetic | text | jsonl | parquet | arrayrecord | tokens (see prepare); "
        f"rl: {' | '.join(READY_TASKS)} | jsonl | parquet",
        fixes=Fixes.RECORDS,
    )
    dataset_path: DataPaths = key(
        'a file, a folder or a glob; a list of them; a mixture: "a,0.7;b,0.3", its file (*.yml), or by position '
        '"{0: {a: 0.7, b: 0.3}, 1Bt: {a: 0.5, b: 0.5}}"',
        fixes=Fixes.CONTENT,
    )
    eval_dataset_path: DataPaths = key(
        'held-out data of the same type, a list too; "": eval_fraction',
        fixes=Fixes.CONTENT,
        maxtext=OURS,
        warm_start=False,
    )
    eval_fraction: float = key(
        "share of the documents that is held out, evenly spread; python_stdlib holds out a fixed list",
        fixes=Fixes.CONTENT,
        bounds=_BELOW_ONE,
        unit="share of the documents",
        maxtext=OURS,
        warm_start=False,
    )
    text_field: str = key(
        "jsonl, parquet, arrayrecord examples: the field that holds the text",
        fixes=Fixes.RECORDS,
        maxtext="train_data_columns",
        warm_start=False,
    )
    record_format: Literal["text", "example"] = key(
        "arrayrecord: text (UTF-8) | example (tf.train.Example)", fixes=Fixes.RECORDS, maxtext=OURS
    )
    skip_bad_records: bool = key(
        "true: records that cannot be read are left out and counted; false: they are an error",
        fixes=Fixes.ROWS | Fixes.PROMPTS,
        maxtext=OURS,
    )
    synthetic_samples: Quantity = key(
        "synthetic: samples per epoch", fixes=Fixes.CONTENT, bounds=_COUNT, unit="samples per epoch", maxtext=OURS
    )
    packing: bool = key(
        "true: documents are joined and cut into rows; false: one document (or part of one) a row", fixes=Fixes.ROWS
    )
    packing_strategy: Literal["concatenate", "best_fit"] = key(
        "concatenate (cut every L tokens) | best_fit (documents of at most L tokens stay whole)",
        fixes=Fixes.ROWS,
        maxtext="grain_packing_type",
        warm_start=False,
    )
    add_bos: bool = key("a beginning-of-text token before each document", fixes=Fixes.TOKENS | Fixes.PROMPTS)
    add_eos: bool = key("an end-of-text token after each document", fixes=Fixes.TOKENS)
    tokenizer_type: Literal["byte", "huggingface", "sentencepiece"] = key(
        "byte (UTF-8 bytes and three special tokens) | huggingface | sentencepiece", fixes=Fixes.CONTENT
    )
    tokenizer_path: Place = key(
        'tokenizer.json, a .model file, a folder that holds one, or a Hugging Face hub name; "" for byte',
        fixes=Fixes.CONTENT,
    )
    use_sft: bool = key(
        "true: records are conversations, in a form of sft_format; best_fit where packed",
        fixes=Fixes.CHAT,
        warm_start=False,
    )
    sft_format: Literal["auto", "messages", "sharegpt", "completion", "alpaca", "text"] = key(
        "use_sft, the fields of a record: auto (the first that fits) | messages | sharegpt (conversations) | "
        "completion (prompt, completion) | alpaca (instruction, input, output) | text (text_field)",
        fixes=Fixes.CHAT,
        maxtext=OURS,
    )
    sft_train_on_completion_only: bool = key(
        "use_sft: true: only the assistant's tokens, end of turn included, have weight; false: all have",
        fixes=Fixes.CHAT,
    )
    use_dpo: bool = key(
        "true: records are pairs of a chosen and a rejected answer; a sample is a pair, two rows of L tokens",
        fixes=Fixes.CONTENT | Fixes.PROGRAM,
    )
    overlong: Literal["truncate", "drop", "error"] = key(
        "use_sft, use_dpo, a record longer than a row: truncate (keep its beginning) | drop | error",
        fixes=Fixes.CHAT,
        maxtext=OURS,
    )
    enable_data_shuffling: bool = key("true: every epoch permutes the rows anew", fixes=Fixes.ORDER)
    data_shuffle_seed: int = key(
        "seed of the permutations (and of the synthetic data)", fixes=Fixes.ORDER, bounds=_SEED
    )
    grain_worker_count: int = key(
        "processes that read rows; 0: threads of this one", fixes=_NOTHING, bounds=_FROM_ZERO, unit="processes"
    )
    grain_prefetch_buffer_size: int = key("rows read ahead; >= 1", fixes=_NOTHING, bounds=_COUNT, unit="rows")
    data_cache_dir: LocalPath = key(
        'tokenised data and its index; "": ~/.cache/maxbatch (or XDG_CACHE_HOME)', fixes=_NOTHING, maxtext=OURS
    )

    @property
    def marks_trained(self) -> bool:
        """Whether records become tokens of which only some are trained on: conversations, or pairs of answers."""
        return self.use_sft or self.use_dpo


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreferenceConfig(Section):
    """Preference pairs (use_dpo): the loss, a mean over the pairs of the global batch."""

    dpo_algo: Literal["dpo", "orpo"] = key(
        "dpo (log-ratios to the first parameters) | orpo (likelihood and odds ratio, no reference)",
        fixes=_PROGRAM,
        maxtext="dpo.algo",
    )
    dpo_beta: float = key(
        "dpo: scales the log-ratios; larger: stays nearer to the first parameters", fixes=_PROGRAM, bounds=_POSITIVE
    )
    dpo_label_smoothing: float = key(
        "dpo: probability that a pair's answers are swapped (Mitchell 2023); 0: never",
        fixes=_PROGRAM,
        bounds=Bounds(0, below=0.5),
        unit="probability",
    )
    orpo_lambda: float = key(
        "orpo: weight of the odds ratio beside the likelihood of the chosen answer", fixes=_PROGRAM, bounds=_FROM_ZERO
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig(Section):
    """Mesh: axis sizes within a slice (ici) and over slices (dcn); one of each may be -1: the rest."""

    ici_data_parallelism: int = key("parameters replicated, batch split", fixes=_PROGRAM, bounds=_COUNT_OR_OFF)
    ici_fsdp_parallelism: int = key("parameters and batch split", fixes=_PROGRAM, bounds=_COUNT_OR_OFF)
    ici_expert_parallelism: int = key("experts and batch split", fixes=_PROGRAM, bounds=_COUNT_OR_OFF)
    ici_tensor_parallelism: int = key("heads, MLP and vocabulary split", fixes=_PROGRAM, bounds=_COUNT_OR_OFF)
    ici_context_parallelism: int = key("sequence split", fixes=_PROGRAM, bounds=_COUNT_OR_OFF)
    ici_pipeline_parallelism: int = key("layers split over pipeline stages", fixes=_PROGRAM, bounds=_COUNT_OR_OFF)
    dcn_data_parallelism: int = key(
        "over slices: parameters replicated, batch split", fixes=_PROGRAM, bounds=_COUNT_OR_OFF
    )
    dcn_fsdp_parallelism: int = key("over slices: parameters and batch split", fixes=_PROGRAM, bounds=_COUNT_OR_OFF)
    dcn_expert_parallelism: int = key("over slices: experts and batch split", fixes=_PROGRAM, bounds=_COUNT_OR_OFF)
    dcn_tensor_parallelism: int = key(
        "over slices: heads, MLP and vocabulary split", fixes=_PROGRAM, bounds=_COUNT_OR_OFF
    )
    dcn_context_parallelism: int = key("over slices: sequence split", fixes=_PROGRAM, bounds=_COUNT_OR_OFF)
    dcn_pipeline_parallelism: int = key(
        "over slices: layers split over pipeline stages", fixes=_PROGRAM, bounds=_COUNT_OR_OFF
    )
    trainer_devices_fraction: Exact = key(
        "share of the devices that trains; both 1: the same devices train and sample; else disjoint, together at "
        "most 1",
        fixes=_PROGRAM,
        bounds=_SOME,
        unit="share of the devices",
    )
    sampler_devices_fraction: Exact = key(
        "share of the devices that samples", fixes=_PROGRAM, bounds=_SOME, unit="share of the devices"
    )
    rollout_data_parallelism: int = key(
        "copies of the weights that sample, each for a share of the responses; -1: the rest of the devices that sample",
        fixes=_PROGRAM,
        bounds=_COUNT_OR_OFF,
        unit="copies of the weights",
    )
    rollout_tensor_parallelism: int = key(
        "devices that hold a copy of the weights that sample between them; -1: the rest; both -1: the axes above",
        fixes=_PROGRAM,
        bounds=_COUNT_OR_OFF,
        unit="devices",
    )
    num_pipeline_microbatches: int = key(
        "parts that the micro-batch is cut into for the pipeline; a multiple of its stages; -1: the number of stages",
        fixes=_PROGRAM,
        bounds=_COUNT_OR_OFF,
        unit="parts",
    )
    num_pipeline_repeats: int = key(
        "groups of layers per stage; a pass goes through all stages once per group; layers divisible by stages x "
        "repeats",
        fixes=_PROGRAM,
        bounds=_COUNT,
        unit="groups of layers",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section):
    """Checkpoints."""

    enable_checkpointing: bool = key("false: nothing is saved, nothing is resumed", fixes=_NOTHING)
    checkpoint_period: int = key(
        "updates between checkpoints; the last update is always saved", fixes=_NOTHING, bounds=_COUNT, unit="updates"
    )
    max_num_checkpoints_to_keep: int | None = key(
        "newest checkpoints kept; null: all", fixes=_NOTHING, bounds=_COUNT, unit="checkpoints"
    )
    local_checkpoint_directory: LocalPath = key(
        'each host keeps its newest shards below this path on its own disk or RAM disk; "": none',
        fixes=_NOTHING,
        warm_start=False,
    )
    local_checkpoint_period: int = key(
        "updates between local checkpoints; 0 without local_checkpoint_directory",
        fixes=_NOTHING,
        bounds=_FROM_ZERO,
        unit="updates",
        warm_start=False,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig(Section):
    """Eval."""

    eval_per_device_batch_size: Exact | None = key(
        "rows per device in one eval pass; null or 0: per_device_batch_size",
        fixes=_BATCH,
        bounds=_ROWS_OR_SAME,
        unit="rows per device",
    )
    eval_interval: int = key(
        "updates between evals, one at the end as well; -1: no eval",
        fixes=_NOTHING,
        bounds=_COUNT_OR_OFF,
        unit="updates",
        warm_start=False,
    )
    eval_steps: int = key(
        "most batches of an eval, so its samples depend on the devices; -1: the whole held-out part",
        fixes=_NOTHING,
        bounds=_COUNT_OR_OFF,
        unit="batches",
    )
    eval_samples: Quantity | None = key(
        "most samples of an eval, the same on any devices; null: the whole held-out part; suffixes K, M, B",
        fixes=_NOTHING,
        bounds=_COUNT,
        unit="samples",
        maxtext=OURS,
    )
    eval_tasks: str = key(
        'lm-evaluation-harness tasks scored at each eval, by commas: names, patterns, files, folders; "": none',
        fixes=_NOTHING,
        maxtext=OURS,
        warm_start=False,
    )
    eval_tasks_limit: int | None = key(
        "most documents of each of eval_tasks, the first ones; null: all",
        fixes=_NOTHING,
        bounds=_COUNT,
        unit="documents",
        maxtext=OURS,
    )
    early_stopping_patience: int | None = key(
        "the run ends once the eval loss has not fallen for so many evals in a row; null: it runs its whole length",
        fixes=_NOTHING,
        bounds=_COUNT,
        unit="evals",
        maxtext=OURS,
        warm_start=False,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoggingConfig(Section):
    """What a person sees."""

    log_to: Words = key(
        "tensorboard, wandb, mlflow, or several: [tensorboard, wandb]; none (metrics.jsonl is always written)",
        fixes=_NOTHING,
        choices=("tensorboard", "wandb", "mlflow"),
        maxtext="enable_tensorboard",
        warm_start=False,
    )
    log_period: int = key(
        "updates between printed lines (metrics.jsonl has every one)", fixes=_NOTHING, bounds=_COUNT, unit="updates"
    )
    profile_steps: str = key(
        '"10:13" traces updates 10 to 12 into run_dir/profile',
        fixes=_NOTHING,
        maxtext="skip_first_n_steps_for_profiler and profiler_steps",
        warm_start=False,
    )
    generate_prompt: str = key(
        'prompt of the text that is generated at the end of a run; "": none', fixes=_NOTHING, maxtext="prompt"
    )
    peak_tflops_per_device: float | None = key(
        "peak TFLOP/s, for MFU; null: that of the chip by its name; MFU is null for an unknown chip",
        fixes=_NOTHING,
        bounds=_POSITIVE,
        unit="TFLOP/s",
        maxtext=OURS,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompilingConfig(Section):
    """Compiling."""

    compilation_cache_dir: LocalPath = key(
        'XLA\'s persistent cache; "": ~/.cache/maxbatch/xla; "none": off', fixes=_NOTHING, maxtext="jax_cache_dir"
    )
    libtpu_flags: str = key(
        'auto: the flags for the TPU\'s version | none | "--flag=value ..."; flags in LIBTPU_INIT_ARGS take '
        "precedence; no effect without a TPU",
        fixes=_PROGRAM,
        maxtext=OURS,
    )
    compiled_dir: Place = key(
        'folder that maxbatch compile wrote: train loads its programs and compiles none; "": compiles',
        fixes=_NOTHING,
        maxtext="compiled_trainstep_file",
    )


SECTIONS: tuple[type[Section], ...] = (
    RunConfig, LengthConfig, BatchConfig, RampConfig, PromptBatchConfig, RLConfig, RatesConfig, OptimizerConfig,
    ModelConfig, RematConfig, AdapterConfig, DataConfig, PreferenceConfig, MeshConfig, CheckpointConfig,
    EvaluationConfig, LoggingConfig, CompilingConfig,
)  # fmt: skip
KEYS: tuple[Key, ...] = tuple(key for section in SECTIONS for key in section.declared())
# The choices of remat_policy=custom for each tensor of a layer, the default first; MaxText's names.
REMAT_TENSORS = {key.name: key.choices for key in RematConfig.declared()[1:]}


def slots_per_sample(config: Mapping[str, Any] | Section) -> int:
    """Returns the tokens that a sample has room for: L, or 2 L for a pair of answers."""
    return int(config["max_target_length"]) * (2 if config["use_dpo"] else 1)


def names_fixing(what: Fixes) -> tuple[str, ...]:
    """Returns the keys that fix any of the named properties, in the order of base.yml."""
    return tuple(key.name for key in KEYS if key.fixes & what)


def names_of(part: Part) -> tuple[str, ...]:
    """Returns the keys of a statement, in the order of base.yml."""
    return tuple(key.name for key in KEYS if key.part is part)


def customised_tensors(values: Mapping[str, object]) -> list[str]:
    """Returns the tensors of a layer whose place is not the default; only remat_policy=custom may state them."""
    return [name for name, (first, *_) in REMAT_TENSORS.items() if values[name] != first]
