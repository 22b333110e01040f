"""Every word of a batch, a length or a rate of the pages that people come from has its right
answer.

The lists are of MaxText's pages and files on batches, reinforcement learning and fine-tuning, and
of the config references of TRL, verl and Axolotl. Beside each word is what its answer must name:
keys of ours, or a reason.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from maxbatch.around.words import look_up
from maxbatch.config.sections import KEYS
from maxbatch.config.unknown import hint

PAGE = Path(__file__).parents[3] / "docs" / "batch-size.md"
# Names of functions and of what a command prints, which nobody can set.
NOT_SETTINGS = {
    "all_reduce",
    "reduce_mean",
    "compute_average_loss",
    "experimental_distribute_dataset",
    "argument_bytes",
    "temp_bytes",
    "aux_loss",
    "seq_aux_loss",
    "global_aux_loss",
}
GENERAL = """
num_replicas: --devices | num_replicas_in_sync: --devices | global_batch: global_batch_size
effective_batch: global_batch_size | micro_batch: per_device_batch_size | per_replica_batch_size: global_batch_size
base_learning_rate: learning_rate | adjusted_learning_rate: learning_rate_scaling
linear_scaling: learning_rate_scaling | total_data_size: --samples-per-epoch | dataset_size: --samples-per-epoch
rank: can be left out | size: --devices | ngpus_per_node: --devices | gpus_per_node: --devices
node_rank: can be left out | workers: grain_worker_count | reduction: mean over the tokens
group_size: num_generations | num_return_sequences: num_generations | mini_batch_size: global_batch_size
ppo_epochs: num_iterations | num_batches: steps | num_increments: per_device_batch_size_increment
samples_per_increment: global_rampup_samples | number_of_devices: --devices | samples_per_host: global_batch_size
steps_per_epoch: --samples-per-epoch | batch_size_per_node: global_batch_size | lora_r: lora_rank
report_to: log_to | wandb_project: log_to | train_on_inputs: sft_train_on_completion_only | chat_template: use_sft
bias: attention_bias | offload_optimizer: remat_policy | lora.lora_rank: lora_rank
async_scheduling: can be left out | world_size: --devices | tokens_per_step: max_target_length
ngpu_per_node: per_device_batch_size | nodes: --hosts | number_of_gpus: --devices
per_node_batch_size: global_batch_size | images_per_node: global_batch_size
images_per_gpu: per_device_batch_size | per_gpu_batch_size: per_device_batch_size
DataParallel: global_batch_size | DistributedDataParallel: ici_data_parallelism | DistributedSampler: can be left out
multiprocessing_distributed: can be left out | nprocs: --devices | device_ids: --devices | MASTER_PORT: can be left out
sqrt_scaling: learning_rate_scaling | epoch: num_epochs | b: per_device_batch_size | epochs: num_epochs
"""
MAXTEXT = """
per_device_batch_size: = | gradient_accumulation_steps: = | expansion_factor_real_data: =
enable_rampup_batch_size: = | per_device_batch_size_start: = | per_device_batch_size_increment: =
global_rampup_samples: = | num_pipeline_microbatches: = | ici_pipeline_parallelism: = | dcn_pipeline_parallelism: =
global_batch_to_train: global_batch_size | global_batch_to_load: expansion_factor_real_data
global_batch_size_to_train_on: global_batch_size | global_batch_size_to_load: expansion_factor_real_data
micro_batch_size_to_train_on: per_device_batch_size | number_of_devices: --devices
batch_size: = | num_generations: = | micro_batch_size: = | train_micro_batch_size: = | rollout_micro_batch_size: =
num_iterations: = | effective_batch_size: batch_size and num_generations | num_batches: num_iterations
num_test_batches: eval_steps | test_batch_start_index: held-out prompts | train_fraction: eval_fraction
num_epoch: num_epochs | eval_batch_size: eval_per_device_batch_size | num_eval_passes: eval_num_generations
max_prefill_predict_length: = | max_target_length: = | max_prompt_length: max_prefill_predict_length
trainer_devices_fraction: = | sampler_devices_fraction: = | num_trainer_slices: trainer_devices_fraction
num_samplers_slices: sampler_devices_fraction | chips_per_vm: --devices | off_policy_steps: =
rollout_data_parallelism: = | rollout_tensor_parallelism: = | rollout_expert_parallelism: rollout_tensor_parallelism
rl.num_generations: num_generations | rl.num_iterations: num_iterations | rl.grpo_beta: grpo_beta
rl.off_policy_steps: off_policy_steps | max_num_batched_tokens: can be left out | max_num_seqs: can be left out
max_concurrency: rollout_micro_batch_size | learning_rate: = | warmup_steps_fraction: =
learning_rate_final_fraction: = | learning_rate_schedule_steps: = | lr_schedule_type: learning_rate_schedule
cosine_learning_rate_final_fraction: learning_rate_final_fraction | wsd_decay_steps_fraction: =
steps: = | eval_per_device_batch_size: = | eval_interval: = | eval_steps: = | eval_start_step: eval_interval
use_sft: = | sft_train_on_completion_only: = | use_tunix_gradient_accumulation: can be left out
lora.lora_alpha: lora_alpha | lora.enable_lora: lora_rank | lora.lora_module_path: lora_targets
use_dpo: = | dpo.dpo_beta: dpo_beta | batch_split_factor: can be left out
reuse_example_batch: can be left out | generate_padding_batch_train: can be left out
max_seq_token_per_tpu: max_tokens_per_pass
"""
TRL = """
per_device_train_batch_size: per_device_batch_size | per_device_eval_batch_size: eval_per_device_batch_size
gradient_accumulation_steps: = | num_train_epochs: num_epochs | max_steps: steps | learning_rate: =
warmup_ratio: warmup_steps_fraction | warmup_steps: warmup_steps_fraction | lr_scheduler_type: learning_rate_schedule
max_length: max_target_length | max_prompt_length: max_prefill_predict_length | max_completion_length: max_target_length
num_generations: = | num_generations_eval: eval_num_generations | generation_batch_size: batch_size
steps_per_generation: batch_size | num_iterations: = | packing: = | packing_strategy: = | eval_packing: packing
padding_free: can be left out | pad_to_multiple_of: can be left out | dataset_num_proc: maxbatch prepare
truncation_mode: overlong | completion_only_loss: sft_train_on_completion_only
assistant_only_loss: sft_train_on_completion_only | vllm_max_model_length: max_target_length
precompute_ref_batch_size: can be left out | ref_model_sync_steps: not supported | mini_batch_size: num_minibatches
num_mini_batches: num_minibatches | num_ppo_epochs: num_iterations | total_episodes: train_samples
local_rollout_forward_batch_size: rollout_micro_batch_size | response_length: max_target_length
temperature: decode_sampling_temperature | top_k: decode_sampling_top_k | top_p: decode_sampling_nucleus_p
beta: grpo_beta | epsilon: grpo_epsilon | epsilon_high: = | loss_type: loss_agg_mode | reward_weights: reward
logging_steps: log_period | save_steps: checkpoint_period | dataloader_num_workers: grain_worker_count
dataloader_drop_last: can be left out | average_tokens_across_devices: mean over the tokens
token_budget: max_tokens_per_pass
"""
VERL = """
data.train_batch_size: batch_size | data.val_batch_size: eval_per_device_batch_size | data.gen_batch_size: batch_size
data.max_prompt_length: max_prefill_predict_length | data.max_response_length: max_target_length
data.train_max_samples: train_samples | data.val_max_samples: eval_samples | data.truncation: overlong
actor_rollout_ref.actor.ppo_mini_batch_size: num_minibatches
algorithm.filter_groups.enable: filter_groups | algorithm.filter_groups.max_num_gen_batches: max_prompts_per_batch
actor_rollout_ref.actor.ppo_micro_batch_size: micro_batch_size
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu: micro_batch_size
actor_rollout_ref.actor.ppo_epochs: num_iterations
actor_rollout_ref.actor.ppo_max_token_len_per_gpu: max_tokens_per_pass
actor_rollout_ref.actor.use_dynamic_bsz: max_tokens_per_pass
actor_rollout_ref.actor.clip_ratio: grpo_epsilon | actor_rollout_ref.actor.clip_ratio_low: grpo_epsilon
actor_rollout_ref.actor.clip_ratio_high: epsilon_high | actor_rollout_ref.actor.kl_loss_coef: grpo_beta
actor_rollout_ref.actor.grad_clip: gradient_clipping_threshold | actor_rollout_ref.actor.optim.lr: learning_rate
actor_rollout_ref.actor.optim.lr_warmup_steps: warmup_steps_fraction
actor_rollout_ref.actor.optim.lr_warmup_steps_ratio: warmup_steps_fraction
actor_rollout_ref.actor.optim.min_lr_ratio: learning_rate_final_fraction
actor_rollout_ref.actor.optim.num_cycles: not supported
actor_rollout_ref.actor.optim.warmup_style: learning_rate_schedule
actor_rollout_ref.actor.optim.total_training_steps: steps | actor_rollout_ref.actor.optim.lr_decay_steps: steps
actor_rollout_ref.actor.optim.min_lr: learning_rate_final_fraction
actor_rollout_ref.actor.ulysses_sequence_parallel_size: ici_context_parallelism
actor_rollout_ref.rollout.n: num_generations | actor_rollout_ref.rollout.temperature: decode_sampling_temperature
actor_rollout_ref.rollout.top_p: decode_sampling_nucleus_p
actor_rollout_ref.rollout.response_length: max_target_length
actor_rollout_ref.rollout.prompt_length: max_prefill_predict_length
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu: rollout_micro_batch_size
actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu: max_tokens_per_pass
actor_rollout_ref.rollout.max_num_batched_tokens: can be left out
actor_rollout_ref.rollout.max_num_seqs: can be left out
actor_rollout_ref.rollout.max_model_len: max_target_length | algorithm.kl_ctrl.kl_coef: grpo_beta
actor_rollout_ref.ref.log_prob_micro_batch_size: rollout_micro_batch_size | critic.critic_warmup: not supported
critic.forward_micro_batch_size_per_gpu: rollout_micro_batch_size | trainer.total_epochs: num_epochs
trainer.total_training_steps: steps | trainer.balance_batch: can be left out | trainer.n_gpus_per_node: --devices
trainer.nnodes: --hosts | trainer.test_freq: eval_interval | trainer.save_freq: checkpoint_period
data.micro_batch_size_per_gpu: per_device_batch_size | data.max_length: max_target_length
reward_model.max_length: max_target_length | over_sample_rate: not supported
"""
AXOLOTL = """
micro_batch_size: = | batch_size: = | gradient_accumulation_steps: = | eval_batch_size: eval_per_device_batch_size
sequence_len: max_target_length | eval_sequence_len: max_target_length | min_sample_len: not supported
max_prompt_len: max_prefill_predict_length | max_packed_sequence_len: max_target_length
excess_length_strategy: overlong | sample_packing: packing | sample_packing_bin_size: can be left out
sample_packing_group_size: can be left out | sample_packing_eff_est: can be left out
sample_packing_sequentially: enable_data_shuffling | eval_sample_packing: packing
multipack_real_batches: can be left out | pretrain_multipack_buffer_size: can be left out
streaming_multipack_buffer_size: can be left out | batch_flattening: can be left out
pad_to_sequence_len: can be left out | group_by_length: not supported | dataset_shard_num: not supported
total_num_tokens: maxbatch data | total_supervised_tokens: maxbatch data | world_size: --devices
num_epochs: = | max_steps: steps | warmup_steps: warmup_steps_fraction | warmup_ratio: warmup_steps_fraction
learning_rate: = | lr_scheduler: learning_rate_schedule | lr_quadratic_warmup: not supported
cosine_min_lr_ratio: learning_rate_final_fraction | cosine_constant_lr_ratio: not supported
lr_div_factor: not supported | embedding_lr: not supported | embedding_lr_scale: not supported
loraplus_lr_ratio: not supported | lr_groups: not supported | jagged_restart_steps: not supported
relora_prune_ratio: not supported | auto_find_batch_size: maxbatch fit | max_grad_norm: gradient_clipping_threshold
val_set_size: eval_fraction | eval_steps: = | evals_per_epoch: eval_interval | saves_per_epoch: checkpoint_period
save_steps: checkpoint_period | logging_steps: log_period | eval_max_new_tokens: maxbatch generate
dp_shard_size: ici_fsdp_parallelism | dp_replicate_size: ici_data_parallelism
context_parallel_size: ici_context_parallelism | tensor_parallel_size: ici_tensor_parallelism
trl.num_generations: num_generations | trl.max_completion_length: max_target_length | trl.beta: grpo_beta
trl.generation_batch_size: batch_size | n_samples_per_prompt: num_generations | replay_buffer_size: not supported
dataloader_num_workers: grain_worker_count | torch_empty_cache_steps: can be left out | lora_alpha: =
"""
TORCHTITAN = """
num_tokens_per_train_step: global_batch_size | num_tokens_per_microbatch_per_dp_rank: per_device_batch_size
max_context_length: max_target_length | num_pp_microbatches: num_pipeline_microbatches | steps: =
local_batch_size: per_device_batch_size | global_batch_size: = | seq_len: max_target_length
lr_scheduler.warmup_steps: warmup_steps_fraction | lr_scheduler.min_lr_factor: learning_rate_final_fraction
"""
LEVANTER = """
train_batch_size: global_batch_size | per_device_parallelism: per_device_batch_size
per_device_eval_parallelism: eval_per_device_batch_size | allow_nondivisible_batch_size: batch_padding
num_train_steps: steps | train_seq_len: max_target_length | batch_schedule: batch_size_schedule
optimizer.warmup: warmup_steps_fraction | optimizer.min_lr_ratio: learning_rate_final_fraction
"""
OLMO_CORE = """
rank_microbatch_size: per_device_batch_size | sequence_length: max_target_length
max_sequence_length: max_target_length | max_duration: train_tokens | hard_stop: can be left out
batch_size_scheduler: batch_size_schedule | scheduler.warmup_fraction: warmup_steps_fraction | t_max: steps
"""
LISTS = {
    "torchtitan": TORCHTITAN,
    "Levanter": LEVANTER,
    "OLMo-core": OLMO_CORE,
    "general": GENERAL,
    "MaxText": MAXTEXT,
    "TRL": TRL,
    "verl": VERL,
    "Axolotl": AXOLOTL,
}
# Beside these words of RL stands another meaning, in configs of pre-training.
OF_PROMPTS = {"effective_batch_size", "epsilon", "mini_batch_size"}


def words(text: str) -> list[tuple[str, str]]:
    return [tuple(map(str.strip, word.split(":"))) for word in re.split(r"[|\n]", text.strip())]  # type: ignore[misc]


@pytest.mark.parametrize("name", LISTS)
def test_every_word_of_a_page_has_its_right_answer(name: str) -> None:
    for word, expected in words(LISTS[name]):
        if expected == "=":
            assert word in KEYS, word
        else:
            answer = hint(word, is_of_prompts=name != "general" and word in OF_PROMPTS)
            found = re.search(rf"(?<![\w-]){re.escape(expected)}(?!\w)", answer)
            assert word not in KEYS and found, (word, answer)


def test_every_identifier_of_the_page_on_batches_has_an_answer() -> None:
    spans = re.findall(r"`([^`\n]+)`", PAGE.read_text(encoding="utf-8"))
    identifiers = {
        word
        for span in spans
        for word in re.findall(r"(?<![\w./-])[A-Za-z]\w*_\w+(?![\w/-]|\.py)", span)
    }
    assert len(identifiers) > 40
    assert [
        word
        for word in sorted(identifiers - NOT_SETTINGS)
        if word not in KEYS and not look_up(word)
    ] == []
