"""The figures that a report draws of every run, from its metrics."""

from __future__ import annotations

from maxbatch.pages.plots import Panel
from maxbatch.runs.metrics_schema import Metric as M

SMOOTHED_LOSS = "smoothed loss"
PANELS = (
    Panel("Loss", "loss per token (nats)", ((M.LOSS, "faint"), (SMOOTHED_LOSS, "line"), (M.EVAL_LOSS, "points"))),
    Panel("Global batch", "samples per update", ((M.GLOBAL_BATCH_SIZE, "stairs"),)),
    Panel("Learning rate", "learning rate", ((M.LEARNING_RATE, "line"),)),
    Panel("Throughput", "tokens per second", ((M.TOKENS_PER_SECOND, "line"),), tick_format="~s"),
    Panel("Step time", "seconds per update", ((M.STEP_TIME_S, "line"),), is_log=True),
    Panel("Gradient norm", "norm before clipping", ((M.GRAD_NORM, "line"),), is_log=True),
    Panel("Gradient noise scale", "samples",
          ((M.GRADIENT_NOISE_SCALE, "faint"), (M.CRITICAL_BATCH_ESTIMATE, "line")), is_log=True),
    Panel("Model FLOPs utilisation", "share of the peak", ((M.MFU, "line"),)),
    # Of reinforcement learning.
    Panel("Reward", "mean of a batch", ((M.REWARD, "line"),)),
    Panel("pass@1 on held-out prompts, sampled", "share of the responses", ((M.EVAL_PASS_AT_1, "points"),)),
    Panel("pass@1 on held-out prompts, greedy", "share of the responses", ((M.EVAL_GREEDY_PASS_AT_1, "points"),)),
    Panel("Response length", "tokens", ((M.RESPONSE_LENGTH, "line"),)),
    Panel("Entropy", "per token (nats)", ((M.ENTROPY, "line"),)),
    Panel("Divergence from the reference", "per token (nats)", ((M.KL, "line"),)),
    Panel("Clipped", "share of the tokens", ((M.CLIP_FRACTION, "line"),)),
)  # fmt: skip
COLUMNS = tuple(column for panel in PANELS for column, _ in panel.lines)
