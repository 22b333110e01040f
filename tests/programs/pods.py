"""Random runs of reinforcement learning on simulated pods: none differs from the run of one host
and one mesh.

    python -m tests.programs.pods --runs 20 --seed 1

draws the hosts and their devices, one mesh or two, chunks, how the sampler holds the weights, the
batches that are sampled ahead, filtered groups and mini-batches. Every run is killed with -9 after
a random update and goes on, on other hosts. Its updates and transcripts are compared with those of
one device with the same `off_policy_steps`, `filter_groups` and `num_minibatches`. A run that fails
or differs ends the program with its command.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.helpers.command import Hold, environment, recorded
from tests.helpers.policies import KEYS, RL, reward_file
from tests.helpers.tiny import assert_same_run, read_metrics

BATCHES = 6  # of 8 prompts, 4 responses to each
_KEYS = (
    *KEYS,
    "learning_rate_schedule=constant",
    "warmup_steps_fraction=0",
    "max_prompts_per_batch=10",
    "eval_interval=4",
    "eval_steps=1",
    "eval_num_generations=2",
)
SAME = (
    "step",
    "samples_seen",
    "global_batch_size",
    "data_fingerprint",
    "reward",
    "rewards_failed",
    "response_length",
    "groups_without_signal",
)
CLOSE = ("loss", "grad_norm", "entropy", "old_policy_kl")


class Settings(NamedTuple):
    """What the responses and updates of a run depend on."""

    off_policy_steps: int
    filter_groups: bool
    num_minibatches: int

    def arguments(self) -> list[str]:
        keys = [f"{name}={json.dumps(value)}" for name, value in self._asdict().items()]
        return [
            *keys,
            f"steps={BATCHES * self.num_minibatches}",
            f"checkpoint_period={self.num_minibatches}",
        ]


def pod_of(chance: random.Random, num_hosts: int, is_apart: bool) -> list[str]:
    """Returns the arguments of random devices, meshes and chunks, with which no number changes."""
    per_host = chance.choice((2, 4) if num_hosts == 1 else (2,))
    train = sample = per_host * num_hosts
    pod = ["--simulate-devices", str(train)]
    pod += ["--simulate-hosts", str(num_hosts)] if num_hosts > 1 else []
    if is_apart:
        share = chance.choice((1, 2, 3) if per_host == 4 else (1,))
        train, sample = num_hosts * share, num_hosts * (per_host - share)
        pod += [
            f"trainer_devices_fraction={share / per_host}",
            f"sampler_devices_fraction={1 - share / per_host}",
        ]
    # 8 pairs are an update's least, and every chunk of them is split over all devices of its mesh.
    divides = 8 % train == 8 % sample == 0
    pod += [f"micro_batch_size={chance.choice((-1, 8) if divides else (-1,))}"]
    pod += [] if divides else ["batch_padding=true"]
    if chance.random() < 0.4:
        pod += [f"rollout_tensor_parallelism={2 - sample % 2}"]
    return pod


def run(
    arguments: Sequence[str], variables: dict[str, str], log: Path, limit_s: float, kill_at: int = 0
) -> None:
    """Runs reinforcement learning to its end, or until it has recorded an update, after which it is
    killed with -9.
    """
    run_dir = next(
        Path(word.removeprefix("run_dir=")) for word in arguments if word.startswith("run_dir=")
    )
    with open(log, "ab") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "maxbatch", "rl", *arguments],
            env=environment() | variables,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
        end = time.monotonic() + limit_s
        try:
            while process.poll() is None and (not kill_at or recorded(run_dir) < kill_at):
                assert time.monotonic() < end, f"hangs: it lasts longer than {limit_s:.0f} s"
                time.sleep(0.1)
            code = process.poll()
            assert code == (None if kill_at else 0), f"exit code {code}, killed at {kill_at}"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def transcripts(run_dir: Path) -> dict[int, Any]:
    """Returns the responses of the evals by their step; of an eval that was taken again, the
    last.
    """
    lines = map(json.loads, (run_dir / "transcripts.jsonl").read_text().splitlines())
    return {line["step"]: line["transcripts"] for line in lines if "transcripts" in line}


def compared(found: Path, expected: Path) -> None:
    """Raises AssertionError if two runs differ in a sample, a response or, beyond tolerance, in a
    loss.
    """
    assert_same_run(read_metrics(found), read_metrics(expected), SAME, CLOSE)
    assert transcripts(found) == transcripts(expected), "transcripts"


def main(argv: Sequence[str] | None = None) -> int:
    """Trains on random pods; returns 0 if every run equals one device's."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.programs.pods",
        description=" ".join(__doc__.partition("\n\n")[0].split()),
    )
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=600, help="seconds of a start")
    asked = parser.parse_args(argv)
    sys.stdout.reconfigure(line_buffering=True)
    chance, begun = random.Random(asked.seed), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="maxbatch-pods-") as place:
        folder, alone = Path(place), dict[Settings, Path]()
        keys = [RL, *_KEYS, reward_file(folder)]
        for number in range(1, asked.runs + 1):
            # Of several, the hardest one first.
            first = number == 1 < asked.runs
            settings = Settings(
                2 if first else chance.randrange(3),
                chance.random() < 0.5,
                4 if first else chance.choice((1, 4)),
            )
            of_hosts = [4, 1] if first else chance.sample((1, 2, 4), 2)
            pods = [pod_of(chance, hosts, first or chance.random() < 0.5) for hosts in of_hosts]
            kill_at, started = (
                chance.randrange(1, BATCHES * settings.num_minibatches),
                time.monotonic(),
            )
            stated, run_dir, log = (
                [*keys, *settings.arguments()],
                folder / str(number),
                folder / f"{number}.log",
            )
            line = (
                f"{shlex.join([*settings.arguments(), *pods[0]])}; killed at {kill_at}; "
                f"{shlex.join(pods[1])}"
            )
            try:
                if settings not in alone:
                    alone[settings] = folder / f"alone-{len(alone)}"
                    run([*stated, f"run_dir={alone[settings]}"], {}, log, asked.limit)
                hold = Hold(kill_at, folder)
                run(
                    [*stated, *pods[0], f"run_dir={run_dir}"],
                    hold.variables,
                    log,
                    asked.limit,
                    kill_at,
                )
                hold.release()
                run([*stated, *pods[1], f"run_dir={run_dir}"], {}, log, asked.limit)
                compared(run_dir, alone[settings])
            except AssertionError as error:
                said = log.read_text(errors="replace")[-3000:]
                print(
                    f"pods: seed {asked.seed}, run {number}: {line}\n{said}\n{error}",
                    file=sys.stderr,
                )
                return 1
            print(f"{number}/{asked.runs} in {time.monotonic() - started:.0f} s: {line}")
    print(f"all of {asked.runs} runs are those of one device; {time.monotonic() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
