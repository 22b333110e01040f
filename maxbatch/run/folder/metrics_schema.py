"""The one list of the metrics that training records: name, type, unit, meaning, and which lines
hold them.

Every writer and reader of `metrics.jsonl` takes the names from `Metric`, whose members are texts:
`record[Metric.LOSS]`. The site's page on metrics is made from the list.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple, Self


class Lines(NamedTuple):
    """The lines of `metrics.jsonl` that hold a metric: all or some lines of the runs of
    `commands`.
    """

    commands: tuple[str, ...]
    every: bool


_EVERY, _SOME = Lines(("train", "rl"), True), Lines(("train", "rl"), False)
_SOME_OF_TRAIN = Lines(("train",), False)
_RL, _SOME_OF_RL = Lines(("rl",), True), Lines(("rl",), False)


class SkipReason(StrEnum):
    """The reasons for which an update is skipped, as `skip_reason` states them."""

    NON_FINITE = "non-finite"  # loss, gradient or new state
    SPIKE = "spike"  # its loss or gradient norm, beside those of the updates before


class Metric(StrEnum):
    """A field of a line of `metrics.jsonl`; `{...}` in a name is filled in by `of`.

    A kind is `whole`, `real`, `text`, `bool` or `map` (of names to whole numbers), or one of them
    `or null`. A real that is not finite is written as null.
    """

    kind: str
    unit: str  # "" for none
    meaning: str  # one sentence
    lines: Lines

    def __new__(
        cls, name: str, kind: str = "", unit: str = "", meaning: str = "", lines: Lines = _EVERY
    ) -> Self:
        metric = str.__new__(cls, name)
        metric._value_ = name
        metric.kind, metric.unit, metric.meaning, metric.lines = kind, unit, meaning, lines
        return metric

    def of(self, name: object) -> str:
        """Returns the name of one metric of a family: `Metric.REWARD_BY_FUNCTION.of("score")` is
        `reward/score`.
        """
        return self[: self.index("{")] + str(name)

    # fmt: off
    STEP = "step", "whole", "updates", "Updates done, from 1."
    SAMPLES_SEEN = "samples_seen", "whole", "samples", "Position in the stream after the update (`rl`: in prompts)."
    STREAM_POSITION = (
        "stream_position", "whole", "samples",
        "One more than the own number of the last sample trained on; `samples_seen` without `skip_samples`.")
    TOKENS_SEEN = "tokens_seen", "whole", "tokens", "Slots of the samples seen: samples × length."
    GLOBAL_BATCH_SIZE = "global_batch_size", "whole", "samples", "Real rows of the update (`rl`: pairs)."
    STAGE = "stage", "whole", "", "Stage of the ramp, from 0."
    LOSS = (
        "loss", "real or null", "nats per token",
        "Token-weighted mean loss of the batch (`use_dpo`: mean over its pairs); null without weight.")
    LEARNING_RATE = "learning_rate", "real", "", "Learning rate of the update."
    GRAD_NORM = "grad_norm", "real or null", "", "Global norm of the gradient before clipping."
    DATA_FINGERPRINT = "data_fingerprint", "text", "", "Hash of the batch's rows, independent of their order and place."
    STATE_HASH = (
        "state_hash", "text or null", "", "Hash of the bits of parameters and moments after the update, with "
        "`reproducible_sums`.")
    STEP_TIME_S = "step_time_s", "real", "s", "Wall time of the update, evals and saves left out."
    TOKENS = "tokens", "whole", "tokens", "Tokens that the update trained on; padding is none."
    SLOT_SHARE = (
        "slot_share", "real or null", "share", "`tokens` as a share of the slots of the update's passes; null without.")
    NUM_PASSES = (
        "num_passes", "whole", "passes", "Passes of the update, with `max_tokens_per_pass`.", _SOME)
    ROW_SHARE = (
        "row_share", "real or null", "share",
        "`tokens` as a share of the slots of the rows that hold any, with `max_tokens_per_pass`.", _SOME)
    TOKENS_PER_SECOND = "tokens_per_second", "real", "tokens/s", "`tokens` per second, over all devices."
    TFLOPS_PER_DEVICE = "tflops_per_device", "real", "TFLOP/s", "Model FLOPs per device, recomputation not counted."
    MFU = "mfu", "real or null", "share", "Share of the device's peak; null where the peak is unknown."
    DATA_WAIT_S = "data_wait_s", "real", "s", "Time that the update waited for its batch."
    DATA_WAIT_FRACTION = "data_wait_fraction", "real", "share", "`data_wait_s` as a share of `step_time_s`."
    LOSS_WEIGHT = "loss_weight", "real", "tokens", "Sum of the loss weights of the global batch (`use_dpo`: its pairs)."
    MICRO_BATCH_SIZE = "micro_batch_size", "whole", "samples", "Rows in one forward and backward pass."
    NUM_MICRO_BATCHES = "num_micro_batches", "whole", "", "Forward and backward passes of the update."
    SKIPPED = "skipped", "bool", "", "Whether the update was skipped: it changed nothing but the position."
    SKIP_REASON = (
        "skip_reason", "text or null", "", "Why it was skipped: `non-finite`, or `spike` (`skip_step_on_spikes`).")
    SKIPPED_UPDATES = "skipped_updates", "whole", "updates", "Updates skipped so far."
    COMPILES = "compiles", "whole", "", "XLA compilations so far on the critical path of training."
    GRADIENT_NOISE_SCALE = (
        "gradient_noise_scale", "real or null", "samples", "Running estimate, with `gradient_noise_scale`.", _SOME)
    CRITICAL_BATCH_ESTIMATE = (
        "critical_batch_estimate", "whole or null", "samples", "`gradient_noise_scale`, rounded, at least 1.", _SOME)
    LOAD_BALANCE_LOSS = (
        "load_balance_loss", "real", "", "Balance loss of the experts, without its weight; 1 for even loads.", _SOME)
    ROUTER_Z_LOSS = "router_z_loss", "real", "", "Mean squared log-sum-exp of the router, without its weight.", _SOME
    EXPERT_LOAD_MAX = (
        "expert_load_max", "real", "", "Largest count of an expert over the mean count, of the worst layer.", _SOME)
    EXPERT_CHOICES = (
        "expert_choices", "map", "choices",
        "Choices of each expert, by its number, over all layers; in every `log_period`-th line.", _SOME)
    DROPPED_TOKENS = (
        "dropped_tokens", "whole", "choices", "Choices of experts beyond `capacity_factor`, over all layers.", _SOME)
    ROUTING_FINGERPRINT = (
        "routing_fingerprint", "text", "", "Hash of the experts of every token, independent of the layout.", _SOME)
    MARGIN = (
        "margin", "real or null", "nats", "Mean over the pairs: `dpo_beta` × the difference of log-ratios, or the log "
        "odds ratio of `dpo_algo: orpo`.", _SOME_OF_TRAIN)
    PAIR_ACCURACY = (
        "pair_accuracy", "real or null", "share", "Share of the pairs whose margin is above 0.", _SOME_OF_TRAIN)
    SAMPLES_BY_SOURCE = (
        "samples_by_source", "map", "samples", "Samples seen of each source of a mixture.", _SOME_OF_TRAIN)
    EVAL_LOSS = (
        "eval_loss", "real or null", "nats per token", "Token-weighted mean loss on the held-out data.", _SOME_OF_TRAIN)
    EVAL_LOSS_AVERAGED = (
        "eval_loss_averaged", "real or null", "nats per token",
        "Eval loss of the average of the parameters, with `parameter_average_half_life`.", _SOME_OF_TRAIN)
    EVAL_TASK = (
        "eval_task/{task}", "real or null", "",
        "Score of a task of `eval_tasks`, such as `eval_task/hellaswag/acc`; a filter's name follows after a comma.",
        _SOME_OF_TRAIN)
    REWARD = "reward", "real", "", "Mean reward of the batch's responses.", _RL
    REWARD_STD = "reward_std", "real", "", "Standard deviation of these rewards.", _RL
    REWARD_BY_FUNCTION = (
        "reward/{function}", "real", "", "Mean value of a reward function, where there are several.", _SOME_OF_RL)
    GROUPS_WITHOUT_SIGNAL = (
        "groups_without_signal", "real", "share", "Share of the prompts whose responses all scored the same.", _RL)
    GROUPS_MISSING = (
        "groups_missing", "whole", "prompts", "Groups that the batch lacks at `max_prompts_per_batch`.", _SOME_OF_RL)
    RESPONSE_LENGTH = "response_length", "real", "tokens", "Mean length of the responses.", _RL
    REWARDS_FAILED = "rewards_failed", "whole", "responses", "Responses whose reward function failed.", _RL
    REWARDS_TIMED_OUT = "rewards_timed_out", "whole", "responses", "Responses whose reward function timed out.", _RL
    REWARD_WAIT_S = "reward_wait_s", "real", "s", "Time that the batch waited for rewards.", _RL
    ENTROPY = "entropy", "real or null", "nats per token", "Mean entropy of the policy over the responses.", _RL
    KL = (
        "kl", "real or null", "nats per token", "Divergence from the reference, with `grpo_beta` above 0.", _SOME_OF_RL)
    CLIP_FRACTION = "clip_fraction", "real or null", "share", "Share of the tokens whose ratio was clipped.", _RL
    OLD_POLICY_KL = "old_policy_kl", "real or null", "nats per token", "Divergence from the policy that sampled.", _RL
    BUSY_FRACTION = (
        "busy_fraction/{side}", "real", "share", "Share of the time that `sampling`, `trainer`, `both` were busy.", _RL)
    EVAL_GREEDY_PASS_AT_1 = (
        "eval_greedy_pass_at_1", "real", "share", "Share of the held-out prompts answered greedily that pass.",
        _SOME_OF_RL)
    EVAL_PASS_AT_1 = "eval_pass_at_1", "real", "share", "Share of the sampled responses that pass.", _SOME_OF_RL
    EVAL_REWARD = "eval_reward", "real", "", "Mean reward of the sampled responses to held-out prompts.", _SOME_OF_RL
    EVAL_PASS_AT_K = (
        "eval_pass_at_{k}", "real", "share", "Share of the prompts with a passing response among k.", _SOME_OF_RL)
    BEFORE_TRAINING = (
        "first_{eval_metric}", "real", "share", "An eval before the first update; in the first line.", _SOME_OF_RL)
    # fmt: on


def find_metric(name: str) -> Metric | None:
    """Returns the metric, or the family of metrics, of a field of a record; None for an unknown
    field.
    """

    def covers(metric: Metric) -> bool:
        prefix, brace, _ = metric.partition("{")
        return name.startswith(prefix) if brace else name == metric

    return min(filter(covers, Metric), key=lambda metric: "{" in metric, default=None)
