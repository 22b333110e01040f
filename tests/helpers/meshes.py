"""Small programs on random meshes of simulated devices and hosts: none hangs.

    python -m tests.helpers.meshes --runs 200 --seed 1 --load 2

trains a few updates on 2, 4 and 8 devices, on 1, 2 or 4 hosts, over random axes (data, fsdp, tensor, context,
pipeline, expert), dense and sparse, with scanned and unrolled layers, beside processes that keep cores busy. A run
that fails, or lasts longer than the limit, ends it with the command that did.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.helpers.command import QUICK_TO_COMPILE
from tests.helpers.tiny import TINY_RUN

_AXES = ("data", "fsdp", "tensor", "context", "pipeline", "expert")
_LARGEST = {"tensor": 2, "pipeline": 2, "expert": 4}  # by the heads, the layers and the experts of the model
_SPARSE = (
    "decoder_block=mixtral", "num_experts=4", "num_experts_per_tok=2", "norm_topk_prob=true", "base_moe_mlp_dim=32",
)  # fmt: skip


def mesh_of(num_devices: int, chance: random.Random) -> dict[str, int]:
    """Returns random sizes of the axes, whose product is the number of devices."""
    sizes = dict.fromkeys(_AXES, 1)
    while num_devices > 1:
        axis = chance.choice([axis for axis in _AXES if sizes[axis] < _LARGEST.get(axis, num_devices * sizes[axis])])
        sizes[axis] *= 2
        num_devices //= 2
    return sizes


def arguments_of(chance: random.Random) -> list[str]:
    """Returns the arguments of a random run, but for its folder."""
    num_devices = chance.choice((2, 4, 8))
    num_hosts = chance.choice([hosts for hosts in (1, 1, 2, 4) if hosts <= num_devices])
    sizes = mesh_of(num_devices, chance)
    axes = [f"ici_{axis}_parallelism={size}" for axis, size in sizes.items()]
    pipeline = ["num_pipeline_microbatches=2"] if sizes["pipeline"] > 1 else []
    scan = ["scan_layers=true"] if pipeline or chance.random() < 0.6 else ["scan_layers=false"]
    vocabulary = [f"vocab_size={chance.choice((512, 4096))}"]
    hosts = ["--simulate-hosts", str(num_hosts)] if num_hosts > 1 else []
    stated = ["global_batch_size=32", f"per_device_batch_size={chance.choice((2, 4))}", "steps=4"]
    sparse = _SPARSE if sizes["expert"] > 1 or chance.random() < 0.2 else ()
    devices = ["--simulate-devices", str(num_devices), *hosts]
    return [*TINY_RUN, *sparse, *axes, *pipeline, *scan, *vocabulary, *stated, *devices]


@contextlib.contextmanager
def busy_cores(number: int) -> Iterator[None]:
    """Keeps that many processes computing."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def run(arguments: Sequence[str], folder: Path, limit_s: float) -> str | None:
    """Trains; returns how it failed, or None."""
    variables = {"XLA_FLAGS": QUICK_TO_COMPILE, "PYTHONPATH": str(Path(__file__).parents[2])}
    inherited = {name: value for name, value in os.environ.items() if name != "PJRT_NPROC"}
    with open(folder / "log.txt", "w+b") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "maxbatch", "train", *arguments, f"run_dir={folder / 'run'}"],
            env=inherited | variables, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"hangs: it lasts longer than {limit_s:.0f} s"
        log.seek(0)
        return None if code == 0 else f"exit code {code}: {log.read()[-2000:].decode(errors='replace')}"


def main(argv: Sequence[str] | None = None) -> int:
    """Trains on random meshes; returns 0 if every run ended by itself."""
    parser = argparse.ArgumentParser(prog="python -m tests.helpers.meshes", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--load", type=int, default=1, help="busy processes beside the runs")
    parser.add_argument("--limit", type=float, default=240, help="seconds of a run")
    asked = parser.parse_args(argv)
    sys.stdout.reconfigure(line_buffering=True)
    chance, begun = random.Random(asked.seed), time.monotonic()
    with busy_cores(asked.load):
        for number in range(1, asked.runs + 1):
            arguments, started = arguments_of(chance), time.monotonic()
            with tempfile.TemporaryDirectory(prefix="maxbatch-meshes-") as folder:
                failure = run(arguments, Path(folder), asked.limit)
            line = shlex.join(arguments[len(TINY_RUN) :])
            if failure:
                print(f"meshes: seed {asked.seed}, run {number}: {line}\n{failure}", file=sys.stderr)
                return 1
            print(f"{number}/{asked.runs} in {time.monotonic() - started:.1f} s: {line}")
    print(f"none of {asked.runs} runs hangs; {time.monotonic() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
