"""A policy trains on the same responses to the same losses on any number of hosts."""

from __future__ import annotations

import json
import math
import signal
import time
from pathlib import Path

import jax
import pytest

from maxbatch.kinds.prompt.run import train_policy
from maxbatch.run.folder.devices import read_devices
from maxbatch.testing import Pod, run
from tests.helpers.command import Hold, recorded, start
from tests.helpers.forks import Fork
from tests.helpers.policies import KEYS, RL, policy_config, reward_file, train
from tests.helpers.processes import wait_for
from tests.helpers.tiny import UNSAVED, assert_same_run, read_metrics

# Batches of 4 groups in two updates, sampled by the policy before the last batch; each host has two
# devices.
CUT = (
    "batch_size=4",
    "num_generations=2",
    "num_minibatches=2",
    "filter_groups=true",
    "max_prompts_per_batch=8",
    "off_policy_steps=1",
    "learning_rate_schedule=constant",
    "micro_batch_size=4",
    "warm_start_steps=1",
    "eval_interval=4",
    "eval_steps=1",
    "eval_num_generations=2",
    "checkpoint_period=2",
)
HOSTS = ("rollout_tensor_parallelism=2", "--simulate-devices", "4", "--simulate-hosts", "2")
# one device of each host each
APART = ("trainer_devices_fraction=0.5", "sampler_devices_fraction=0.5")
SAME = (
    "step",
    "samples_seen",
    "global_batch_size",
    "data_fingerprint",
    "reward",
    "rewards_failed",
    "response_length",
    "groups_missing",
)


# The same scores, but one host is slow, every seventh response takes long, and one worker is
# killed.
SLOW = """
import os
import signal
import time
from pathlib import Path

calls = 0


def digits(prompt, response, record):
    global calls
    calls += 1
    killed = Path(__file__).with_name("killed")
    if calls == 5 and os.environ["JAX_PROCESS_ID"] == "0" and not killed.exists():
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.02 * (os.environ["JAX_PROCESS_ID"] == "1") + 0.2 * (calls % 7 == 0))
    return sum(c.isdigit() for c in response) / 10
"""


@pytest.mark.processes
def test_slow_hosts_that_are_killed_and_stopped_give_the_run_of_one_which_goes_on_with_them(
    tmp_path: Path,
) -> None:
    """Mini-batches, filtered groups, a batch ahead, the warm start, evals, and weights split over
    two devices.

    First all devices train and sample in turns; then half of them train while the others sample.
    """
    one, two = tmp_path / "one", tmp_path / "two"
    expected = train(one, *CUT, "steps=12")
    reward = reward_file(tmp_path)
    (tmp_path / "rewards.py").write_text(SLOW)

    def held_after(step: int, *more: str) -> tuple[Fork, Hold]:
        hold = Hold(step, tmp_path)
        process = start(
            "rl",
            RL,
            *KEYS,
            reward,
            f"run_dir={two}",
            *CUT,
            "steps=12",
            *more,
            *HOSTS,
            **hold.variables,
        )
        wait_for(lambda: recorded(two) >= step, process)
        return process, hold

    killed, _ = held_after(3)
    killed.kill()
    killed.communicate(timeout=60)  # the pipe of its output closes with the last of its hosts
    assert (tmp_path / "killed").exists(), "a worker was"
    stopped, hold = held_after(5, *APART)
    stopped.send_signal(signal.SIGTERM)
    time.sleep(3)  # from the command to its hosts, also where they have few cores
    hold.release()
    said, _ = stopped.communicate(timeout=600)
    assert stopped.returncode == 75 and recorded(two) < 12, said
    train(two, *CUT, "steps=12")
    used = [
        (used.num_hosts, used.num_devices, math.prod(used.mesh.values()))
        for used in read_devices(two)
    ]
    assert used[-2:] == [(2, 4, 2), (1, 1, 1)], "two of the four trained"
    found = read_metrics(two)
    assert_same_run(found, expected, SAME, ("loss", "grad_norm", "entropy", "old_policy_kl"))
    first, second = (
        {
            line["step"]: line["transcripts"]
            for line in map(json.loads, file.read_text().splitlines())
            if "transcripts" in line
        }
        for file in (one / "transcripts.jsonl", two / "transcripts.jsonl")
    )
    assert list(first) == [1, 4, 8, 12] and first == {step: second[step] for step in first}


@pytest.mark.processes
@pytest.mark.usefixtures("standard_promotion")
def test_float32_samples_the_same_responses_on_several_hosts_where_training_rounds_to_bfloat16(
    tmp_path: Path,
) -> None:
    """Parameters that stay as they are, so that all that may differ is how the programs round."""
    types, long = ("dtype=bfloat16", "sampler_dtype=float32"), ("max_target_length=40", "steps=2")
    keys = (*types, *long, "learning_rate=1e-12", UNSAVED)
    expected, two = train(tmp_path / "one", *keys), policy_config(tmp_path / "two", *keys)

    def train_two(_: Pod) -> None:
        with jax.numpy_dtype_promotion("standard"):
            train_policy(two)

    run(train_two, devices=4, hosts=2, timeout=600)
    assert_same_run(
        read_metrics(two.run_dir), expected, ("data_fingerprint", "reward", "response_length"), ()
    )
