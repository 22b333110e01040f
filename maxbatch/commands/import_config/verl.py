"""verl's trainer of policies (`main_ppo`): its batch, lengths, objective, data and rewards.

Facts from verl's documentation of its config and its `ppo_trainer.yaml`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase

from maxbatch.commands.import_config.prompts import (
    only,
    take_chunk,
    take_rewards,
    take_sampling,
    take_target_length,
    whole,
    without_balance,
)
from maxbatch.commands.import_config.steps import take_parameters
from maxbatch.commands.import_config.trainer_words import betas, optimizer
from maxbatch.commands.import_config.translation import Translation

_ACTOR, _ROLLOUT, _MODEL = (f"actor_rollout_ref.{part}." for part in ("actor", "rollout", "model"))
_OPTIM = f"{_ACTOR}optim."
_BATCH, _MINI, _GROUP = "data.train_batch_size", f"{_ACTOR}ppo_mini_batch_size", f"{_ROLLOUT}n"
_ROWS, _OLD_ROWS = f"{_ACTOR}ppo_micro_batch_size_per_gpu", f"{_ACTOR}ppo_micro_batch_size"
_FILTER = "algorithm.filter_groups."
DEFAULTS = {
    _BATCH: "1024", _MINI: "256", _GROUP: "1", f"{_ACTOR}ppo_epochs": "1", "data.max_prompt_length": "512",
    "data.max_response_length": "512", "algorithm.adv_estimator": "gae", f"{_ACTOR}clip_ratio": "0.2",
    f"{_ACTOR}loss_agg_mode": "token-mean", f"{_ACTOR}policy_loss.loss_mode": "vanilla",
    f"{_ACTOR}use_kl_loss": "false", f"{_ACTOR}kl_loss_coef": "0.001", f"{_ACTOR}kl_loss_type": "low_var_kl",
    f"{_ROLLOUT}temperature": "1.0", f"{_ROLLOUT}top_k": "-1", f"{_ROLLOUT}top_p": "1", f"{_OPTIM}lr": "1e-6",
    f"{_OPTIM}weight_decay": "0.01", f"{_OPTIM}lr_scheduler_type": "constant", "trainer.total_epochs": "30",
    "data.train_files": "", "data.shuffle": "true", "data.prompt_key": "prompt", "data.truncation": "error",
    "custom_reward_function.name": "compute_score", f"{_MODEL}enable_gradient_checkpointing": "true",
    f"{_ACTOR}grad_clip": "1.0", "trainer.n_gpus_per_node": "8", "trainer.nnodes": "1",
}  # fmt: skip
_LOSSES = {"token-mean": "token-mean", "seq-mean-token-sum": "sequence-mean",
           "seq-mean-token-mean": "sequence-mean-token-mean"}  # fmt: skip
_MODES = {"vanilla": "grpo", "gspo": "gspo-token"}
_OFF = ("", "null", "none", "false")
# Words that change what is trained unless they have one of these values, what is needed, and whether it is essential.
_ONLY = (
    (f"{_ACTOR}entropy_coeff", ("0", "0.0"), "0: the objective is the clipped ratio and grpo_beta's divergence", False),
    (f"{_ACTOR}shuffle", _OFF, "false: mini-batches are in stream order", False),
    (f"{_ACTOR}loss_scale_factor", _OFF, "null", False),
    ("algorithm.norm_adv_by_std_in_grpo", ("true",), "true: an advantage is divided by its group's deviation", False),
    ("algorithm.use_pf_ppo", _OFF, "false", True),
    ("algorithm.rollout_correction.rollout_is", _OFF, "null: the ratio is to the policy that sampled", False),
    ("algorithm.rollout_correction.rollout_rs", _OFF, "null: every response is trained on", True),
    ("algorithm.rollout_correction.bypass_mode", _OFF, "false", False),
    ("trainer.critic_warmup", ("0",), "0: there is no critic", False),
    ("trainer.val_only", _OFF, "false: maxbatch evaluate scores a checkpoint", True),
    ("config_name", ("ppo_trainer", "ppo_trainer.yaml", "ppo_megatron_trainer", "ppo_megatron_trainer.yaml"),
     "the settings of that file, in this one", True),
    (f"{_ROLLOUT}multi_turn.enable", _OFF, "false: a response is one turn", True),
    (f"{_ROLLOUT}multi_turn.tool_config_path", _OFF, "null: there are no tools", True),
    (f"{_ROLLOUT}multi_turn.interaction_config_path", _OFF, "null: a response is one turn", True),
    (f"{_ROLLOUT}agent.default_agent_loop", ("single_turn_agent",), "single_turn_agent: a response is one turn", True),
    (f"{_ROLLOUT}do_sample", ("true",), "true: responses are drawn", False),
    (f"{_ROLLOUT}ignore_eos", _OFF, "false: a response ends at the end token", False),
    (f"{_ROLLOUT}over_sample_rate", ("0", "0.0"), "0: every prompt that was sampled is trained on", True),
    (f"{_ACTOR}megatron.override_transformer_config.moe_aux_loss_coeff", ("0", "0.0"), "0: the balance of experts is "
     "of pre-training", False),
    (f"{_ACTOR}megatron.override_transformer_config.moe_z_loss_coeff", ("0", "0.0"), "0: no loss of the router", False),
    (f"{_ACTOR}router_replay.mode", ("disabled",), "disabled: a pass over responses routes anew", False),
    (f"{_MODEL}freeze_vision_tower", _OFF, "false: models of text", True),
    (f"{_ACTOR}freeze_vision_tower", _OFF, "false: models of text", True),
    (f"{_MODEL}mtp.enable", _OFF, "false: a model predicts the next token alone", True),
    ("data.image_key", _OFF, "records of text alone", True), ("data.video_key", _OFF, "records of text alone", True),
    ("data.custom_cls.path", _OFF, "null: prompt_template makes a prompt of a record", True),
    ("data.sampler.class_path", _OFF, "null: the order is a permutation of all records", True),
)  # fmt: skip
# Words that change nothing that is trained, and why; * matches any text.
_IGNORED = tuple((pattern, why) for why, patterns in {
    "how the same is computed": (
        f"{_ACTOR}fsdp_config.*offload*", f"{_ACTOR}fsdp_config.reshard_after_forward",
        f"{_ACTOR}fsdp_config.forward_prefetch", f"{_ACTOR}fsdp_config.use_orig_params",
        f"{_ACTOR}fsdp_config.wrap_policy.*", "*.strategy", "*use_torch_compile", "*use_remove_padding",
        "*use_fused_kernels", "*fused_kernel_options.*", "*.entropy_checkpointing",
        "*entropy_from_logits_with_chunking",
        f"{_ACTOR}calculate_*", f"{_ACTOR}use_prefix_grouper", "actor_rollout_ref.ref.*",
        "actor_rollout_ref.hybrid_engine",
        "actor_rollout_ref.nccl_timeout", f"{_OPTIM}override_optimizer_config.*offload*", f"{_MODEL}use_shm",
        f"{_OPTIM}override_optimizer_config.overlap_*", f"{_MODEL}enable_activation_offload", f"{_MODEL}use_liger",
        f"{_ACTOR}megatron.*offload", f"{_ACTOR}megatron.*mbridge", f"{_ACTOR}megatron.*dist_checkpointing*",
        f"{_ACTOR}megatron.override_transformer_config.recompute_*",
        f"{_ACTOR}megatron.override_transformer_config.*_fusion",
        f"{_ACTOR}megatron.override_transformer_config.moe_enable_deepep",
        f"{_ACTOR}megatron.override_transformer_config.moe_token_dispatcher_type",
        f"{_ACTOR}megatron.override_transformer_config.moe_grouped_gemm",
        f"{_ACTOR}megatron.override_transformer_config.deallocate_pipeline_outputs",
        f"{_ACTOR}megatron.override_transformer_config.persist_layer_norm",
        f"{_ACTOR}megatron.override_transformer_config.attention_backend",
        f"{_OPTIM}override_optimizer_config.use_precision_aware_optimizer", f"{_ACTOR}megatron.seed",
        "trainer.use_legacy_worker_impl",
        "ray_init.*", "ray_kwargs.*", "transfer_queue.*", "data.dataloader_num_workers", "*trust_remote_code"),
    "where parameters lie; ici_fsdp_parallelism and its like say it here": (
        f"{_ACTOR}fsdp_config.fsdp_size", f"{_ACTOR}megatron.*parallel_size",
        f"{_ACTOR}*ulysses_sequence_parallel_size",
        f"{_ACTOR}megatron.override_transformer_config.account_for_*",
        f"{_ACTOR}megatron.override_transformer_config.num_layers_in_*"),
    "where the sampler's weights lie; rollout_tensor_parallelism says it here": (
        f"{_ROLLOUT}*parallel_size",),
    "of its sampler, and the sampler here is JAX's": tuple(f"{_ROLLOUT}{name}" for name in (
        "name", "mode", "gpu_memory_utilization", "engine_kwargs.*", "load_format", "enforce_eager",
        "free_cache_engine", "enable_*", "layered_summon", "multi_stage_wake_up", "calculate_log_probs",
        "disable_log_stats", "prometheus.*", "trace.*", "checkpoint_engine.*", "agent.num_workers", "scheduling_policy",
        "cudagraph_capture_sizes", "max_*", "log_prob_*", "multi_turn.*", "prompt_length", "response_length")),
    "there is no critic": ("critic.*",),
    "how it is profiled or logged": ("*profiler.*", "trainer.log_*", "trainer.project_name", "trainer.*_data_dir",
                                     "algorithm.rollout_correction.rollout_is_batch_normalize"),
    "when it evaluates and saves": (f"{_ACTOR}checkpoint.*", "trainer.val_before_train", "trainer.resume_*",
                                    "trainer.max_*_ckpt_to_keep", "trainer.default_hdfs_dir", "trainer.esi_*",
                                    "trainer.del_*", "data.val_batch_size", "data.validation_shuffle"),
    "JAX finds and connects the devices": ("trainer.device", "trainer.ray_wait_*", "config_path"),
    "every prompt has the advantage of its own group": ("algorithm.gamma", "algorithm.lam"),
    "use_kl_in_reward is false": ("algorithm.kl_ctrl.*", "algorithm.kl_penalty"),
    "it is read with algorithm.rollout_correction.rollout_is": ("algorithm.rollout_correction.*_threshold",
                                                                "algorithm.rollout_correction.loss_type"),
    "it is read with another policy_loss.loss_mode": (f"{_ACTOR}policy_loss.*", f"{_ACTOR}tau_*"),
    "gradients are summed in float32": (f"{_ACTOR}fsdp_config.mixed_precision.reduce_dtype",
                                        f"{_ACTOR}fsdp_config.mixed_precision.buffer_dtype"),
    "records are read whole": ("data.return_*", "data.reward_fn_key", "data.use_shm"),
    "it names a class of its own": ("*._target_",),
}.items() for pattern in patterns)  # fmt: skip


def translate(t: Translation) -> None:
    """Takes the words of verl's config, by their whole paths."""
    updates = _batch(t)
    take_target_length(t, "data.max_prompt_length", "data.max_response_length")
    _length(t, updates)
    _objective(t)
    _rates(t)
    _data(t)
    _model(t)
    for word, allowed, needed, is_essential in _ONLY:
        only(t, word, allowed, needed, is_essential)
    for word in t.left():
        why = next((why for pattern, why in _IGNORED if fnmatchcase(word, pattern)), "")
        if why:
            t.ignore(word, why)
        elif word not in t and word not in DEFAULTS:
            t.ignore(word, f"{t.text(word) or 'empty'} says nothing")


def _devices(t: Translation) -> int | None:
    """Returns the devices that split a batch, if they are known."""
    devices, nodes = t.devices, whole(t, "trainer.nnodes")
    each = whole(t, "trainer.n_gpus_per_node")
    if devices is None and nodes and each:
        devices = nodes * each
    in_replica = 1
    for name in ("ulysses_sequence_parallel_size", "megatron.tensor_model_parallel_size",
                 "megatron.pipeline_model_parallel_size", "megatron.context_parallel_size"):  # fmt: skip
        size = whole(t, f"{_ACTOR}{name}") if f"{_ACTOR}{name}" in t else 1
        if size is None:
            return None
        in_replica *= size
    return devices // in_replica if devices and devices % in_replica == 0 else None


def _batch(t: Translation) -> int:
    """Takes the batch; returns its updates, 1 where they are not known."""
    for word, ours in ((_BATCH, "batch_size"), (_GROUP, "num_generations"), (f"{_ACTOR}ppo_epochs", "num_iterations")):
        if whole(t, word) is None:
            t.refuse(word, "a whole number", is_essential=True)
        else:
            t.map(word, **{ours: t.text(word)})
    batch, mini, group, epochs = (whole(t, word) for word in (_BATCH, _MINI, _GROUP, f"{_ACTOR}ppo_epochs"))
    _filter(t, batch)
    if not batch or not mini or not group or not epochs or batch % mini:
        t.refuse(_MINI, f"prompts of an update that divide {t.text(_BATCH)}", is_essential=True)
        return 1
    why = f"{batch} / {mini} prompts of an update"
    t.map(_MINI, why, num_minibatches=str(batch // mini))
    _chunks(t, mini, group)
    for word in ("trainer.n_gpus_per_node", "trainer.nnodes"):
        if word in t:
            t.ignore(word, "devices are found when the run starts; plan takes --devices and --hosts")
        t.drop(word)
    return batch // mini * epochs


def _chunks(t: Translation, mini: int, group: int) -> None:
    """Takes the micro-batch, of a device or (older) of all."""
    dynamic = f"{_ACTOR}use_dynamic_bsz"
    for word, is_of_all in ((_ROWS, False), (_OLD_ROWS, True)):
        rows, shards = whole(t, word), _devices(t)
        if word not in t:
            if t.is_left(word):
                t.ignore(word, "null says nothing")
        elif t.is_true(dynamic):
            t.ignore(word, "use_dynamic_bsz fills passes by tokens; the update does not depend on them")
        elif rows is None:
            t.refuse(word, "a whole number")
        elif is_of_all:
            take_chunk(t, word, rows, 1, mini, group)
        elif shards is None:
            t.refuse(word, "--devices N, over which the rows are counted: micro_batch_size is that of all devices")
        else:
            take_chunk(t, word, rows, shards, mini, group)
    for word in (dynamic, f"{_ACTOR}ppo_max_token_len_per_gpu"):
        if t.is_left(word):
            t.ignore(
                word, "passes of as many tokens as fit; micro_batch_size bounds a pass, and the update is the same"
            )


def _filter(t: Translation, batch: int | None) -> None:
    """Takes the filter of groups, and the prompts that are sampled at a time."""
    sampled, metric, most = "data.gen_batch_size", f"{_FILTER}metric", f"{_FILTER}max_num_gen_batches"
    size = whole(t, sampled) if sampled in t else batch
    if not t.is_true(f"{_FILTER}enable"):
        for word in t.left():
            if word.startswith(_FILTER):
                t.ignore(word, "filter_groups.enable is false")
        only(t, sampled, (str(batch),), f"{batch}, as train_batch_size", is_essential=True)
        return
    t.map(f"{_FILTER}enable", filter_groups="true")
    only(t, metric, ("seq_reward", "seq_final_reward", "score", "seq_score"), "seq_reward: whole rewards are compared",
         is_essential=True)  # fmt: skip
    batches = whole(t, most)
    if size is None or batches is None:
        t.refuse(most, "a number of batches: max_prompts_per_batch bounds the prompts", is_essential=True)
        return
    cut = "; the rest of a sampled batch is dropped there, and here the next batch begins with it"
    t.map(most, f"it x {size} prompts sampled at a time{cut}", max_prompts_per_batch=str(batches * size))
    if t.is_left(sampled):
        t.map(sampled, f"{most} x it", max_prompts_per_batch=str(batches * size))


def _length(t: Translation, updates: int) -> None:
    """Takes the length and the periods, which count batches there."""
    steps, epochs = "trainer.total_training_steps", "trainer.total_epochs"
    batches = whole(t, steps)
    if steps in t and batches is None:
        t.refuse(steps, "a number of batches", is_essential=True)
    elif batches is not None:
        t.map(steps, f"{batches} batches of {updates} updates", steps=str(batches * updates))
        if epochs in t:
            t.ignore(epochs, "total_training_steps says the length")
        t.drop(epochs)
    else:
        t.map(epochs, "there the last prompts of an epoch that fill no batch are left out", num_epochs=t.text(epochs))
    for word, ours in (("trainer.test_freq", "eval_interval"), ("trainer.save_freq", "checkpoint_period")):
        period = whole(t, word)
        if period is not None:
            t.map(word, f"{period} batches of {updates} updates", **{ours: str(period * updates)})
        elif t.is_left(word):
            t.ignore(word, "when it evaluates and saves")
    if f"{_ROLLOUT}val_kwargs.n" in t:
        t.map(f"{_ROLLOUT}val_kwargs.n", eval_num_generations=t.text(f"{_ROLLOUT}val_kwargs.n"))
    for word in t.left():
        if word.startswith(f"{_ROLLOUT}val_kwargs."):
            t.ignore(word, "held-out prompts are sampled as others, and greedily as well")


def _objective(t: Translation) -> None:
    estimator, mode, aggregation = "algorithm.adv_estimator", f"{_ACTOR}policy_loss.loss_mode", f"{_ACTOR}loss_agg_mode"
    ours = _MODES.get(t.text(mode))
    if t.text(estimator) != "grpo":
        t.refuse(estimator, "grpo: the advantage is that within a group of responses", is_essential=True)
    else:
        why = "the deviation of a group is divided by G - 1 there, by G here"
        t.map(estimator, why, loss_algo=ours or "grpo")
    if ours is None:
        t.refuse(mode, " or ".join(_MODES), is_essential=True)
    else:
        t.map(mode, loss_algo=ours)
    if ours == "gspo-token":
        t.map(aggregation, "gspo takes this one, whatever is stated", loss_agg_mode="sequence-mean-token-mean")
    elif t.text(aggregation) in _LOSSES:
        t.map(aggregation, loss_agg_mode=_LOSSES[t.text(aggregation)])
    else:
        t.refuse(aggregation, f"{', '.join(_LOSSES)}", is_essential=True)
    _clipping(t)
    _divergence(t)
    take_sampling(t, *(f"{_ROLLOUT}{name}" for name in ("temperature", "top_k", "top_p")))


def _clipping(t: Translation) -> None:
    both, low, high, dual = (f"{_ACTOR}{name}" for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high",
                                                             "clip_ratio_c"))  # fmt: skip
    bound = t.text(dual) if dual in t else "3.0"
    why = f"there a ratio over clip_ratio_c {bound} is clipped as well where the advantage is negative"
    if low in t:
        t.map(low, why, grpo_epsilon=t.text(low))
        if both in t:
            t.ignore(both, "clip_ratio_low and clip_ratio_high say it")
        t.drop(both)
    else:
        t.map(both, why, grpo_epsilon=t.text(both))
    if high in t:
        t.map(high, epsilon_high=t.text(high))
    if dual in t:
        t.refuse(dual, "no second bound: the ratio is clipped by grpo_epsilon and epsilon_high alone")


def _divergence(t: Translation) -> None:
    use, weight, kind = (f"{_ACTOR}{name}" for name in ("use_kl_loss", "kl_loss_coef", "kl_loss_type"))
    if t.is_true(use):
        t.map(use, grpo_beta=t.text(weight))
        t.map(weight, grpo_beta=t.text(weight))
        only(t, kind, ("low_var_kl", "k3"), "low_var_kl")
    else:
        t.map(use, grpo_beta="0")
        for word in (weight, kind):
            t.ignore(word, "use_kl_loss is false")
    reward = "algorithm.use_kl_in_reward"
    only(t, reward, _OFF, "false: the divergence is a term of the loss, grpo_beta")


def _rates(t: Translation) -> None:
    t.map(f"{_OPTIM}lr", learning_rate=t.text(f"{_OPTIM}lr"))
    t.map(f"{_OPTIM}weight_decay", adam_weight_decay=t.text(f"{_OPTIM}weight_decay"))
    for word in (f"{_OPTIM}clip_grad", f"{_ACTOR}grad_clip"):
        if word in t:
            t.map(word, gradient_clipping_threshold=t.text(word))
    t.drop(f"{_ACTOR}grad_clip")
    t.settings.setdefault("gradient_clipping_threshold", "1.0")
    if f"{_OPTIM}optimizer" in t:
        optimizer(t, f"{_OPTIM}optimizer")
    if f"{_OPTIM}optimizer_impl" in t:
        only(t, f"{_OPTIM}optimizer_impl", ("torch.optim",), "torch.optim")
    betas(t, f"{_OPTIM}betas")
    for word in (f"{_OPTIM}warmup_style", f"{_OPTIM}lr_decay_style"):
        if word in t:
            t.rename(word, f"{_OPTIM}lr_scheduler_type")
    kind, last = f"{_OPTIM}lr_scheduler_type", f"{_OPTIM}min_lr_ratio"
    if t.text(kind) == "constant":
        t.map(kind, learning_rate_schedule="constant")
    elif t.text(kind) == "cosine":
        t.map(kind, learning_rate_schedule="cosine", learning_rate_final_fraction=t.text(last, "0"))
        if last in t:
            t.map(last, learning_rate_final_fraction=t.text(last))
    else:
        t.refuse(kind, "constant or cosine")
    if t.is_left(last):
        t.ignore(last, "it is read with a cosine")
    if t.is_left(f"{_OPTIM}num_cycles"):
        only(t, f"{_OPTIM}num_cycles", ("0.5",), "0.5: one schedule per run")
    _warmup(t)


def _warmup(t: Translation) -> None:
    steps, ratio = f"{_OPTIM}lr_warmup_steps", f"{_OPTIM}lr_warmup_steps_ratio"
    warmup, total = t.number(steps), whole(t, "trainer.total_training_steps")
    if f"{_OPTIM}total_training_steps" in t:
        t.ignore(f"{_OPTIM}total_training_steps", "verl writes it from the length of the run")
    if warmup is not None and warmup > 0 and total is None:
        t.refuse(steps, "a share of the run: state lr_warmup_steps_ratio, or trainer.total_training_steps beside it")
        return
    if warmup is not None and warmup > 0 and total is not None:
        t.map(steps, "warmup batches / batches", warmup_steps_fraction=f"{min(1.0, warmup / total):.12g}")
        if ratio in t:
            t.ignore(ratio, "lr_warmup_steps says it")
        return
    share = t.text(ratio) if ratio in t and warmup != 0 else "0"
    for word in (steps, ratio):
        if t.is_left(word):
            t.map(word, warmup_steps_fraction=share)
    t.settings["warmup_steps_fraction"] = share


def _names(t: Translation, word: str) -> Iterator[str]:
    """Yields the items of a list, of YAML or as text."""
    for item in t.items(word):
        yield from (path for path in re.split(r"[\[\],'\"\s]+", item) if path)


def _data(t: Translation) -> None:
    key = t.text("data.prompt_key")
    step = "its parquet files at that path"
    data = {"dataset_type": "parquet", "prompt_template": f"{{{key}}}"}
    train = ";".join(_names(t, "data.train_files"))
    t.need("data.train_files", step, dataset_path=train or "train.parquet", **data)
    if held_out := ";".join(_names(t, "data.val_files")):
        t.need("data.val_files", step, eval_dataset_path=held_out)
    t.map("data.prompt_key", "a list of messages, or a text", prompt_template=data["prompt_template"])
    t.map("data.shuffle", enable_data_shuffling="true" if t.is_true("data.shuffle") else "false")
    if "data.seed" in t:
        t.map("data.seed", data_shuffle_seed=t.text("data.seed"))
    longer = "leave prompts of more tokens than data.max_prompt_length out of the files; one is refused here"
    filters, truncates = "data.filter_overlong_prompts", t.text("data.truncation") != "error"
    if t.is_true(filters):
        t.need(filters, longer)
    elif t.is_left(filters):
        t.ignore(filters, "every prompt is read")
    if truncates and not t.is_true(filters):
        t.need("data.truncation", longer)
    elif "data.truncation" in t:
        t.ignore("data.truncation", "a longer prompt is refused, as there")
    t.drop("data.truncation")
    for word in ("data.filter_overlong_prompts_workers",):
        if t.is_left(word):
            t.ignore(word, "how the same is computed")
    path, name = "custom_reward_function.path", "custom_reward_function.name"
    file = t.text(path) if path in t else "rewards.py"
    for word in (path, name):
        if t.is_left(word) and (word in t or word == name):
            take_rewards(t, word, file, [t.text(name)])
        elif t.is_left(word):
            t.ignore(word, "null says nothing")
    for word in t.left():
        if word.startswith(("reward_model.", "reward_manager.", "custom_reward_function.", "reward_loop.")):
            if t.text(word).lower() in _OFF:
                t.ignore(word, "it says nothing")
            else:
                t.need(word, "state it in your reward, which is a function")


def _model(t: Translation) -> None:
    path, checkpointing = f"{_MODEL}path", f"{_MODEL}enable_gradient_checkpointing"
    _logger(t)
    if path in t:
        take_parameters(t, path, t.text(path))
        t.settings |= {"tokenizer_type": "huggingface", "tokenizer_path": t.text(path)}
        without_balance(t)
    t.map(checkpointing, remat_policy="full" if t.is_true(checkpointing) else "none")
    t.settings |= {"dtype": "bfloat16", "weight_dtype": "float32"}
    kinds = {"fp32": "float32", "float32": "float32", "bf16": "bfloat16", "bfloat16": "bfloat16"}
    for name, ours in (("model_dtype", "weight_dtype"), ("dtype", "dtype"), ("mixed_precision.param_dtype", "dtype")):
        word = f"{_ACTOR}fsdp_config.{name}"
        if word in t and t.text(word) in kinds:
            t.map(word, **{ours: kinds[t.text(word)]})
        elif word in t:
            t.refuse(word, "float32 or bfloat16")
    sampled_in = f"{_ROLLOUT}dtype"
    if sampled_in in t and t.text(sampled_in) in kinds:
        t.map(sampled_in, sampler_dtype=kinds[t.text(sampled_in)])
    elif sampled_in in t:
        t.ignore(sampled_in, "the sampler computes in dtype; sampler_dtype is float32 or bfloat16")
    folder = "trainer.default_local_dir"
    if folder in t and "$" not in t.text(folder):
        t.map(folder, run_dir=t.text(folder))
    elif folder in t:
        t.ignore(folder, "its variable is not set in the file; run_dir is the folder of the run")
    if "trainer.experiment_name" in t:
        t.ignore("trainer.experiment_name", "run_dir names the run")


def _logger(t: Translation) -> None:
    """Takes the loggers that are ours; lines are always printed."""
    names = list(_names(t, "trainer.logger"))
    ours = [name for name in names if name in ("tensorboard", "wandb", "mlflow")]
    if others := [name for name in names if name not in (*ours, "console", "file")]:
        t.refuse("trainer.logger", f"console, tensorboard, wandb or mlflow, without {', '.join(others)}")
    elif ours:
        t.map("trainer.logger", log_to=",".join(ours))
    elif "trainer.logger" in t:
        t.ignore("trainer.logger", "lines are printed, and metrics.jsonl has every update")


def equation(t: Translation) -> tuple[str, str]:
    """Returns the batch as an equation in verl's words and in ours."""
    s = t.settings
    prompts, group, updates = s["batch_size"], s["num_generations"], s["num_minibatches"]
    there = f"train_batch_size {prompts} prompts x rollout.n {group}, ppo_mini_batch_size {t.text(_MINI)} in an update"
    return there, f"batch_size {prompts} x num_generations {group}, num_minibatches {updates}"
