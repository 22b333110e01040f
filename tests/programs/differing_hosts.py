"""Real starts of two hosts with different values of a key: each must be refused, and soon.

python -m tests.programs.differing_hosts --starts 20 --seed 1
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from maxbatch.system.hardware.cpu_devices import variables_of_host
from maxbatch.system.processes.ports import free_port
from tests.helpers.command import start
from tests.helpers.tiny import TINY_RUN


def start_hosts(
    arguments: Sequence[str],
    own: Sequence[Sequence[str]],
    variables: Mapping[int, Mapping[str, str]] = {},
    commands: Sequence[str] = (),
    by_slurm: bool = False,
    makes_devices: bool = True,
) -> list[tuple[int, str]]:
    """Starts a host for each item of `own`, its own arguments; returns codes and outputs.

    Variables name the hosts as a user does by hand, or as SLURM does.
    """
    port, hosts = free_port(), []
    for index, more in enumerate(own):
        joined = {"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
        if by_slurm:
            joined |= {
                "SLURM_JOB_ID": "1",
                "SLURM_STEP_NODELIST": "localhost",
                "SLURM_NTASKS": str(len(own)),
                "SLURM_PROCID": str(index),
                "SLURM_LOCALID": "0",
                "JAX_COORDINATOR_PORT": str(port),
            }
        else:
            joined |= variables_of_host(port, len(own), index)
        command = commands[index] if commands else "train"
        devices = ["--simulate-devices", "1"] if makes_devices else []
        named = joined | variables.get(index, {})
        hosts.append(start(command, *arguments, *more, *devices, own_group=True, **named))
    try:
        outputs = [host.communicate(timeout=90)[0] for host in hosts]
        return [(host.returncode, output) for host, output in zip(hosts, outputs, strict=True)]
    finally:
        for host in hosts:
            host.kill()


# Each with another value than TINY_RUN's, which any config takes.
OTHER_VALUES = (
    "learning_rate=1e-1",
    "steps=9",
    "checkpoint_period=7",
    "eval_interval=2",
    "heartbeat_timeout_s=77",
    "enable_checkpointing=false",
    "adam_b2=0.9",
    "data_shuffle_seed=3",
    "init_weights_seed=5",
    "base_mlp_dim=96",
    "log_period=3",
    "gradient_clipping_threshold=0.5",
    "dtype=bfloat16",
    "max_num_checkpoints_to_keep=1",
    "generate_prompt=a",
    "local_checkpoint_directory=/tmp/nowhere local_checkpoint_period=1",
    "remat_policy=full",
    "warmup_steps_fraction=0.5",
    "grain_worker_count=1",
    "per_device_batch_size=4",
    "max_target_length=64",
)


def refused_start(run_dir: Path, stated: str) -> float:
    """Starts two hosts, the second with another value, and checks how the start is refused; returns
    the seconds.
    """
    started = time.monotonic()
    base = [*TINY_RUN, f"run_dir={run_dir}", "steps=2", "per_device_batch_size=1"]
    ends = start_hosts(base, [[], stated.split()])
    seconds = time.monotonic() - started
    for code, output in ends:
        name, _, value = stated.split()[0].partition("=")
        assert code == 2 and f"{name}: " in output and output.count("\n") == 1, (stated, ends)
        assert ("stated" if value.startswith("/") else value) in output or float(value) == 0.1, (
            stated,
            output,
        )
    assert not run_dir.exists(), "nothing was written"
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    draw = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.starts):
            stated = draw.choice(OTHER_VALUES)
            seconds = refused_start(Path(folder) / str(number), stated)
            print(f"{stated}: refused in {seconds:.1f} s", flush=True)
            assert seconds < 30, "hosts that miss each other wait for minutes"


if __name__ == "__main__":
    main()
