"""A policy is trained on the same responses to the same losses, whatever the number of hosts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.command import maxbatch
from tests.helpers.policies import KEYS, RL, reward_file, train
from tests.helpers.tiny import assert_same_run, read_metrics

# Batches of 4 groups in two updates, sampled by the policy before the last batch; each host has two devices.
CUT = (
    "batch_size=4", "num_generations=2", "num_minibatches=2", "filter_groups=true", "max_prompts_per_batch=8",
    "off_policy_steps=1", "learning_rate_schedule=constant", "micro_batch_size=4", "warm_start_steps=1",
    "eval_interval=4", "eval_steps=1", "eval_num_generations=2", "checkpoint_period=2",
)  # fmt: skip
HOSTS = ("--simulate-devices", "4", "--simulate-hosts", "2")
SAME = ("step", "samples_seen", "global_batch_size", "data_fingerprint", "reward", "response_length", "groups_missing")


@pytest.mark.processes
def test_two_hosts_give_the_responses_rewards_and_losses_of_one_which_goes_on_with_them(tmp_path: Path) -> None:
    """Mini-batches, filtered groups, a batch ahead, the warm start and evals included."""
    one, two = tmp_path / "one", tmp_path / "two"
    expected = train(one, *CUT, "steps=8")
    done = maxbatch("rl", RL, *KEYS, reward_file(tmp_path), f"run_dir={two}", *CUT, "steps=6", *HOSTS, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((two / "devices.json").read_text())[-1]["num_hosts"] == 2
    train(two, *CUT, "steps=8")
    found = read_metrics(two)
    assert_same_run(found, expected, SAME, ("loss", "grad_norm", "entropy", "old_policy_kl"))
    first, second = (
        {line["step"]: line["transcripts"] for line in map(json.loads, file.read_text().splitlines())}
        for file in (one / "transcripts.jsonl", two / "transcripts.jsonl")
    )
    assert list(first) == [1, 4, 8] and first == {step: second[step] for step in first}, "6 is the end of the other run"
