"""Runs with `reproducible_sums` on random layouts have the hashes of one device, to the last bit.

    python -m tests.programs.to_the_bit --runs 30 --seed 1

trains ten updates on 1, 2, 3, 4 or 8 devices of 1, 2 or 4 hosts, over random axes (data, fsdp),
rows or tokens per pass and expansions, with padding or without, with a constant batch or a ramp, in
float32 or bfloat16, of dense models and of experts, on text, chats or pairs, or of adapters, some of
them stopped in the middle and resumed on another layout, on one core and on all. Kinds and types take
turns. `state_hash` and the other figures of every update are compared with those of the same run
on one device in one pass. A run that differs ends the search with the command that did.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.helpers.corpus import write_jsonl
from tests.helpers.tiny import LENGTH, TINY_RUN, read_metrics

UPDATES = 10
_SAME = (
    "step",
    "loss",
    "grad_norm",
    "data_fingerprint",
    "gradient_noise_scale",
    "state_hash",
)
# of some kinds
_SAME_IF_THERE = (
    "margin",
    "pair_accuracy",
    "load_balance_loss",
    "router_z_loss",
    "expert_load_max",
    "routing_fingerprint",
    "dropped_tokens",
)
_TRAINED = (
    *TINY_RUN,
    "reproducible_sums=true",
    "gradient_noise_scale=true",
    "learning_rate=1e-3",
    # a part of a run is shorter, and the other schedules follow its length
    "learning_rate_schedule=constant",
    "warmup_steps_fraction=0",
    f"steps={UPDATES}",
)
_BATCHES = ("global_batch_size=16", "global_batch_size=24", "batch_size_schedule=0:8 32:16 96:24")
_FORMS = (
    ("scan_layers=true",),
    ("scan_layers=false", "opt_type=sgd"),
    ("scan_layers=true", "opt_type=lion", "parameter_average_half_life=4Kt"),
    ("scan_layers=false", "adam_b1_half_life=4Kt", "skip_step_on_spikes=true"),
)
_PACKING = ("packing=true", "packing=false")
_EXPERTS = (
    (
        "decoder_block=mixtral",
        "num_experts=4",
        "num_experts_per_tok=2",
        "norm_topk_prob=true",
        "load_balance_loss_weight=0.1",
        "load_balance_scope=global",
        "router_z_loss_weight=0.01",
    ),
    (
        "decoder_block=qwen3_moe",
        "num_experts=4",
        "num_experts_per_tok=2",
        "norm_topk_prob=true",
        "routed_bias=true",
        "routed_bias_update_rate=0.01",
        "load_balance_loss_weight=0.1",
        "capacity_factor=1.0",
    ),
)
_BUDGET = "max_tokens_per_pass=4096"  # of kinds whose samples share rows
_TYPES = ((), ("dtype=bfloat16",), ("dtype=bfloat16", "weight_dtype=bfloat16"))


class Layout(NamedTuple):
    """A part of a run: its last update, and the arguments of its layout."""

    steps: int
    arguments: tuple[str, ...]
    is_on_one_core: bool


class Kinds:
    """The keys of each kind of run, drawn anew for every run.

    Args:
      folder: has the data, and the model of adapters.
    """

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self._folder, self._chance = folder, chance
        lengths = random.Random(0)
        asked = [f"q{i} " + "a" * lengths.randrange(6) for i in range(400)]
        chats = [{"prompt": q, "completion": "b" * lengths.randrange(1, 12)} for q in asked]
        pairs = [
            {"prompt": q, "chosen": " y" * (1 + i % 3), "rejected": " n" * (1 + i % 4)}
            for i, q in enumerate(asked)
        ]
        write_jsonl(folder / "chats.jsonl", chats)
        write_jsonl(folder / "pairs.jsonl", pairs)
        self.by_name: dict[str, Callable[[], tuple[str, ...]]] = {
            "dense": self._packed,
            "sparse": lambda: (*chance.choice(_EXPERTS), "base_moe_mlp_dim=32", *self._packed()),
            "sft": lambda: (*self._records("chats"), "use_sft=true", *self._packed()),
            "pairs": self._of_pairs,
            "adapters": self._of_adapters,
            "passes": self._of_passes,
        }

    def _packed(self) -> tuple[str, ...]:
        return (self._chance.choice(_PACKING),)

    def _records(self, name: str) -> tuple[str, ...]:
        cache = f"data_cache_dir={self._folder / 'cache'}"
        return ("dataset_type=jsonl", f"dataset_path={self._folder / name}.jsonl", cache)

    def _of_pairs(self) -> tuple[str, ...]:
        algorithm = self._chance.choice(("dpo", "dpo", "orpo"))
        keys = ("use_dpo=true", f"dpo_algo={algorithm}", "packing=false")
        return (*self._records("pairs"), *keys)

    def _of_passes(self) -> tuple[str, ...]:
        kinds = ("dense", "sparse", "sft", "pairs", "pairs")
        return (*self.by_name[self._chance.choice(kinds)](), _BUDGET)

    def _of_adapters(self) -> tuple[str, ...]:
        base = self._folder / "base"
        if not base.exists():
            trained = (*_TRAINED, "scan_layers=true", "global_batch_size=8")
            one = Layout(1, ("--simulate-devices", "1"), False)
            lines = train(trained, one, base, 600)
            assert not isinstance(lines, str), lines
        return ("lora_rank=2", f"load_parameters_path={base}", *self._packed())


def layout_of(chance: random.Random, steps: int, has_budget: bool) -> Layout:
    """Returns a random layout, with a budget of tokens or with rows per pass."""
    num_devices = chance.choice((1, 2, 3, 4, 8))
    hosts = chance.choice([n for n in (1, 1, 2, 4) if num_devices % n == 0])
    data = chance.choice([n for n in (1, 2, 3, 4) if num_devices % n == 0])
    rows = chance.choice((1, 2, 3, 4, 8))
    budget = f"max_tokens_per_pass={max(2, rows) * LENGTH + chance.choice((0, 5))}"
    cut = (f"per_device_batch_size={rows}", "batch_padding=true")
    arguments = [
        *((budget,) if has_budget else cut),
        f"ici_data_parallelism={data}",
        *("--simulate-devices", str(num_devices)),
    ]
    if hosts > 1:
        arguments += ["--simulate-hosts", str(hosts)]
        if chance.random() < 0.4:
            arguments.append(f"expansion_factor_real_data={hosts}")
    return Layout(steps, tuple(arguments), chance.random() < 0.5)


def train(
    trained: Sequence[str], layout: Layout, run_dir: Path, limit_s: float
) -> list[dict[str, Any]] | str:
    """Trains a part of a run; returns its lines, or how it failed."""
    arguments = [*trained, f"steps={layout.steps}", *layout.arguments, f"run_dir={run_dir}"]
    cores = ["taskset", "-c", "0"] if layout.is_on_one_core else []
    variables = {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [*cores, sys.executable, "-m", "maxbatch", "train", *arguments],
        env={name: value for name, value in os.environ.items() if name != "PJRT_NPROC"} | variables,
        capture_output=True,
        text=True,
        timeout=limit_s,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        return f"exit code {done.returncode}: {done.stderr[-2000:]}"
    return read_metrics(run_dir)


def figures(lines: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """Returns the figures of each update that must be the same."""
    return [
        [line[name] for name in _SAME] + [line.get(name) for name in _SAME_IF_THERE]
        for line in lines
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Trains on random layouts; returns 0 if every update has the hashes of one device."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.programs.to_the_bit",
        description=" ".join(__doc__.partition("\n\n")[0].split()),
    )
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="a kind")
    parser.add_argument("--limit", type=float, default=600, help="seconds of a start")
    asked = parser.parse_args(argv)
    sys.stdout.reconfigure(line_buffering=True)
    chance, begun = random.Random(asked.seed), time.monotonic()
    whole = Layout(UPDATES, ("--simulate-devices", "1"), False)
    known: dict[tuple[str, ...], list[list[Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="maxbatch-bits-") as folder:
        kinds = Kinds(Path(folder), chance).by_name
        names = [asked.only] if asked.only else chance.sample(sorted(kinds), len(kinds))
        types = chance.sample(_TYPES, len(_TYPES))
        for number in range(1, asked.runs + 1):
            started = time.monotonic()
            name = names[number % len(names)]
            keys = (
                *kinds[name](),
                *chance.choice(_FORMS),
                *types[number // len(names) % len(types)],
                chance.choice(_BATCHES),
            )
            trained = (*_TRAINED, *keys)
            rows = () if _BUDGET in keys else ("per_device_batch_size=24",)
            middle = [chance.randrange(2, UPDATES - 1)] if chance.random() < 0.4 else []
            parts = [layout_of(chance, steps, _BUDGET in keys) for steps in (*middle, UPDATES)]
            run_dir = Path(folder, str(number))
            lines: list[dict[str, Any]] | str = []
            if trained not in known:
                one = whole._replace(arguments=(*rows, *whole.arguments))
                lines = train(trained, one, Path(folder, f"{number}-whole"), asked.limit)
                if not isinstance(lines, str):
                    known[trained] = figures(lines)
            for part in parts:
                lines = (
                    lines if isinstance(lines, str) else train(trained, part, run_dir, asked.limit)
                )
            words = [
                shlex.join(part.arguments) + (" on one core" if part.is_on_one_core else "")
                for part in parts
            ]
            text = f"{shlex.join(keys)}: {f', from update {middle} on '.join(words)}"
            differing = (
                []
                if isinstance(lines, str)
                else [
                    expected[0]
                    for expected, found in zip(known[trained], figures(lines), strict=False)
                    if expected != found
                ]
            )
            if isinstance(lines, str) or differing or len(lines) != UPDATES:
                failure = lines if isinstance(lines, str) else f"updates {differing} differ"
                print(
                    f"to_the_bit: seed {asked.seed}, run {number}: {text}\n{failure}",
                    file=sys.stderr,
                )
                return 1
            print(f"{number}/{asked.runs} {name} in {time.monotonic() - started:.1f} s: {text}")
    seconds = time.monotonic() - begun
    print(f"all of {asked.runs} runs are those of one device to the last bit; {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
