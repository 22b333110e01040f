"""One batch on random meshes of simulated devices and hosts: no run hangs, and each is the run of
one device.

    python -m tests.programs.meshes --runs 200 --seed 1 --load 2

trains a few updates on 1 to 8 devices, on 1, 2 or 4 hosts, over random axes (data, fsdp, tensor,
context, pipeline, expert) and strategies for split rows, rows per pass and expansions, with a batch
or a ramp that need not divide, dense and sparse, on text, chats, pairs and by reinforcement
learning, with scanned and unrolled layers, beside processes that keep cores busy. The updates are
compared with those of the same run on one device in one pass. A run that differs, fails, or lasts
longer than the limit ends the search with the command that did.
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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.helpers.chats import write_jsonl
from tests.helpers.command import QUICK_TO_COMPILE
from tests.helpers.policies import KEYS, RL, reward_file
from tests.helpers.tiny import SAME, TINY_RUN, UNSAVED, assert_same_run, read_metrics

_AXES = ("data", "fsdp", "tensor", "context", "pipeline", "expert")
_HEADS = 4
# by the heads, the layers and the experts of the model
_LARGEST = {"tensor": 2, "pipeline": 2, "expert": 4}
_SPARSE = (
    "decoder_block=mixtral",
    "num_experts=4",
    "num_experts_per_tok=2",
    "norm_topk_prob=true",
    "base_moe_mlp_dim=32",
    "routed_bias=true",
    "routed_bias_update_rate=0.01",
)
_BALANCED = "load_balance_loss_weight=0.1", "router_z_loss_weight=0.01"
_BATCHES = (16, 16, 7, 10, 17, 32)
# with their largest batch
_RAMPS = {"0:3 6:5 16:7 23:11": 11, "0:5 10:11 32:16": 16, "0:16 32:7": 16}
_TRAINED = (
    "learning_rate=1e-3",
    "learning_rate_schedule=constant",
    "warmup_steps_fraction=0",
    UNSAVED,
)
_CLOSE = ("loss", "grad_norm", "load_balance_loss", "router_z_loss", "margin", "reward", "entropy")
# pair_accuracy starts at margins of 0, whose sign is rounding
_SAME = (*SAME, "tokens_seen", "routing_fingerprint")


class Case(NamedTuple):
    """A command, and the same run on one device in one pass."""

    command: tuple[str, ...]
    trained: tuple[str, ...]  # arguments of both
    layout: tuple[str, ...]
    whole: tuple[str, ...]  # the layout of one device in one pass


def mesh_of(num_devices: int, chance: random.Random, is_sparse: bool) -> dict[str, int]:
    """Returns random sizes of the axes, whose product is the number of devices."""
    sizes = dict.fromkeys(_AXES, 1)
    for factor in (2, 2, 2, 3, 5, 7):
        if num_devices % factor == 0:
            axes = [
                axis for axis in _AXES if sizes[axis] * factor <= _LARGEST.get(axis, num_devices)
            ]
            fitting = axes if factor == 2 else ["data", "fsdp"]
            sizes[chance.choice([axis for axis in fitting if is_sparse or axis != "expert"])] *= (
                factor
            )
            num_devices //= factor
    return sizes


def _kinds(folder: Path) -> dict[str, tuple[str, ...]]:
    """Returns the arguments of each kind of training, and writes the files that they name."""
    lengths = random.Random(0)
    words = [
        (f"q{i} " + "a" * lengths.randrange(6), "b" * lengths.randrange(1, 12)) for i in range(200)
    ]
    write_jsonl(
        folder / "chats.jsonl", [{"prompt": asked, "completion": said} for asked, said in words]
    )
    write_jsonl(
        folder / "pairs.jsonl",
        [{"prompt": a, "chosen": s, "rejected": s[::2] + "c"} for a, s in words],
    )
    cache = f"data_cache_dir={folder / 'cache'}"
    return {
        "text": TINY_RUN,
        "chats": (
            *TINY_RUN,
            "use_sft=true",
            "dataset_type=jsonl",
            f"dataset_path={folder / 'chats.jsonl'}",
            cache,
        ),
        "pairs": (
            *TINY_RUN,
            "use_dpo=true",
            "dataset_type=jsonl",
            f"dataset_path={folder / 'pairs.jsonl'}",
            cache,
        ),
        "rl": (*KEYS, reward_file(folder)),
    }


def case_of(chance: random.Random, kinds: Mapping[str, tuple[str, ...]]) -> Case:
    """Returns a random case."""
    num_devices = chance.randint(1, 8)
    num_hosts = chance.choice([hosts for hosts in (1, 1, 1, 2, 4) if num_devices % hosts == 0])
    kind = chance.choice(("text", "text", *kinds))
    is_sparse = chance.random() < 0.35
    sizes = mesh_of(num_devices, chance, is_sparse)
    if kind == "rl":
        sizes["fsdp"], sizes["context"], sizes["pipeline"] = (
            num_devices // (sizes["tensor"] * sizes["expert"]),
            1,
            1,
        )
        sizes["data"] = 1
    axes = [f"ici_{axis}_parallelism={size}" for axis, size in sizes.items()]
    parts_of_pass = num_devices // (sizes["tensor"] * sizes["context"] * sizes["pipeline"])
    if sizes["pipeline"] > 1:
        microbatches = chance.choice((2, 4))
        axes.append(f"num_pipeline_microbatches={microbatches}")
        parts_of_pass *= microbatches
    if sizes["context"] > 1:
        by_heads = ("ulysses",) if _HEADS % (sizes["tensor"] * sizes["context"]) == 0 else ()
        axes.append(f"context_parallel_strategy={chance.choice(('ring', *by_heads, 'all_gather'))}")
        axes.append(f"context_parallel_load_balance={chance.random() < 0.5}".lower())
    simulated = ["--simulate-devices", str(num_devices)]
    if num_hosts > 1:
        simulated += ["--simulate-hosts", str(num_hosts)]
    is_scanned = sizes["pipeline"] > 1 or chance.random() < 0.6
    trained = [
        *kinds[kind],
        *_TRAINED,
        *(_SPARSE if is_sparse else ()),
        f"scan_layers={is_scanned}".lower(),
    ]
    if kind == "rl":
        trained += [
            f"batch_size={chance.choice((6, 7, 8))}",
            f"num_iterations={chance.choice((1, 2))}",
            "steps=4",
        ]
        cut = [f"micro_batch_size={chance.choice((8, 12, 20))}", "batch_padding=true"]
        return Case(("rl", RL), tuple(trained), (*cut, *axes, *simulated), ("micro_batch_size=-1",))
    trained += [*(_BALANCED if is_sparse else ()), "vocab_size=512", "steps=5"]
    if chance.random() < 0.5:
        batch, largest = chance.choice([(f"global_batch_size={size}", size) for size in _BATCHES])
    else:
        ramp, largest = chance.choice(list(_RAMPS.items()))
        batch = f"batch_size_schedule={ramp}"
    if num_hosts > 1 and chance.random() < 0.3:
        axes.append(f"expansion_factor_real_data={num_hosts}")
    held = [rows for rows in (1, 2, 3, 4) if rows * num_devices >= parts_of_pass]
    cut = [f"per_device_batch_size={chance.choice(held)}", "batch_padding=true"]
    whole = (f"per_device_batch_size={largest}", "--simulate-devices", "1")
    return Case(("train",), (*trained, batch), (*cut, *axes, *simulated), whole)


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
    """Trains in an empty folder; returns how it failed, or None."""
    variables = {"XLA_FLAGS": QUICK_TO_COMPILE, "PYTHONPATH": str(Path(__file__).parents[2])}
    inherited = {name: value for name, value in os.environ.items() if name != "PJRT_NPROC"}
    with open(folder / "log.txt", "w+b") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "maxbatch", *arguments, f"run_dir={folder / 'run'}"],
            env=inherited | variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"hangs: it lasts longer than {limit_s:.0f} s"
        log.seek(0)
        return (
            None
            if code == 0
            else f"exit code {code}: {log.read()[-2000:].decode(errors='replace')}"
        )


class Search:
    """Runs of random cases in a folder, beside the runs on one device that they are compared
    with.
    """

    def __init__(self, folder: Path, limit_s: float) -> None:
        self._folder, self._limit_s = folder, limit_s
        self._whole: dict[tuple[str, ...], list[dict[str, Any]]] = {}

    def failure_of(self, case: Case) -> str | None:
        """Returns how a case fails, or None."""
        if case.trained not in self._whole:
            records = self._run(case, case.whole)
            if isinstance(records, str):
                return f"on one device: {records}"
            self._whole[case.trained] = records
        found, expected = self._run(case, case.layout), self._whole[case.trained]
        if isinstance(found, str):
            return found
        same = [key for key in _SAME if key in expected[0]]
        try:
            assert_same_run(found, expected, same, _CLOSE)
        except (AssertionError, ValueError) as error:
            return f"differs from one device: {error}"
        return None

    def _run(self, case: Case, layout: Sequence[str]) -> list[dict[str, Any]] | str:
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            arguments = (*case.command, *case.trained, *layout)
            return run(arguments, Path(folder), self._limit_s) or read_metrics(Path(folder) / "run")


def main(argv: Sequence[str] | None = None) -> int:
    """Trains on random meshes; returns 0 if every run ends by itself and equals one device's."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.programs.meshes",
        description=" ".join(__doc__.partition("\n\n")[0].split()),
    )
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--load", type=int, default=1, help="busy processes beside the runs")
    parser.add_argument("--axis", choices=_AXES, help="of every mesh, with two devices or more")
    parser.add_argument("--limit", type=float, default=240, help="seconds of a run")
    asked = parser.parse_args(argv)
    sys.stdout.reconfigure(line_buffering=True)
    chance, begun = random.Random(asked.seed), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="maxbatch-meshes-") as folder, busy_cores(asked.load):
        search, kinds = Search(Path(folder), asked.limit), _kinds(Path(folder))
        for number in range(1, asked.runs + 1):
            started, case = time.monotonic(), case_of(chance, kinds)
            while asked.axis and f"ici_{asked.axis}_parallelism=1" in case.layout:
                case = case_of(chance, kinds)
            failure = search.failure_of(case)
            line = shlex.join((*case.command, *case.trained, *case.layout))
            if failure:
                print(
                    f"meshes: seed {asked.seed}, run {number}: {line}\n{failure}", file=sys.stderr
                )
                return 1
            print(f"{number}/{asked.runs} in {time.monotonic() - started:.1f} s: {line}")
    print(f"all of {asked.runs} runs are those of one device; {time.monotonic() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
