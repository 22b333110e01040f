"""(q) The gain of sampling ahead (`off_policy_steps`): a modelled schedule, and two simulated
meshes.

The model has two meshes, each with its own devices. All responses of a batch are drawn at once, so
sampling takes as long as the longest response; lengths are log-normal (sigma 1) up to a limit of 8
or 16 times their median. Rows have a fixed length, so training on a batch takes a constant time,
the average time of sampling. Moving the weights takes 2% of that, and both meshes wait for it. No
chunks overlap within a batch.

The measurement runs `maxbatch rl` on two meshes of one simulated device with one thread each, so
that both can work at a time on two cores. Sampling a batch takes about as long as training on it.
The model is untrained, so every batch has a response that reaches the limit: the measurement shows
the schedule, without a long tail.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.measurement import Measurement, ratio
from benchmarks.two_meshes import updates_in_turns

BAR = 0.55
BATCHES, RESPONSES = 20, 256
RESHARDING = 0.02  # of the time of a batch's training
_STEPS = (0, 1, 2)
_RUN = ("batch_size=2", "grpo_beta=0", "max_target_length=128", "micro_batch_size=-1")
_AHEAD = {f"s={s}": (*_RUN, f"off_policy_steps={s}") for s in (0, 1)}
_ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"  # for each device


def seconds_until_trained(
    sampling_s: Sequence[float], training_s: Sequence[float], resharding_s: float, ahead: int
) -> float:
    """Returns the time until all batches are trained on, each sampled `ahead` batches before."""
    sampled: list[float] = []  # when each batch is
    sampler_free = trained = 0.0
    for k, training in enumerate(training_s):
        at_policy = trained + resharding_s  # the policy after k batches is on both meshes
        while len(sampled) < min(k + ahead + 1, len(sampling_s)):
            sampler_free = max(sampler_free, at_policy) + sampling_s[len(sampled)]
            sampled.append(sampler_free)
        trained = max(at_policy, sampled[k]) + training
    return trained


def modelled(limit: float, turns: int) -> dict[int, list[float]]:
    """Returns draws of the time of `BATCHES` batches, by the batches ahead, in units of a batch's
    training.
    """
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(sigma=1.0, size=(turns, BATCHES, RESPONSES)), limit)
    longest = lengths.max(axis=2)
    sampling = (longest / longest.mean()).tolist()
    training = [1.0] * BATCHES
    return {
        s: [seconds_until_trained(own, training, RESHARDING, s) for own in sampling] for s in _STEPS
    }


def measure(quick: bool) -> list[Measurement]:
    """The modelled times with s = 1 and 2 over that with s = 0, and the measured one with s = 1."""
    found = []
    for limit in (8, 16):
        times = modelled(limit, 10 if quick else 1000)
        found += [
            ratio(
                f"modelled, longest response at most {limit} medians, s={s} / s=0",
                times[s],
                times[0],
                bar=BAR if (limit, s) == (8, 1) else None,
            )
            for s in _STEPS[1:]
        ]
    turns, steps = (1, 4) if quick else (5, BATCHES + 2)
    return found + updates_in_turns(
        "measured, update with s=1 / s=0",
        _AHEAD,
        turns=turns,
        steps=steps,
        num_devices=2,
        XLA_FLAGS=_ONE_THREAD,
    )
