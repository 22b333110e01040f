"""Runs with random budgets of `max_tokens_per_pass` are the runs without the key.

    python -m tests.programs.budgets --runs 24 --seed 1

trains four updates of texts, conversations, pairs and prompts, of dense models and of experts, whose
samples have mixed lengths, a few tokens, the length of a row, or more, in constant batches and in
ramps. Budgets are random, on 1, 2 or 4 devices of random meshes or of two hosts, one of which may
read all samples; some runs are resumed on another layout with another budget, or with none. Kinds
and models take turns. Every update is compared with that of a row a sample on one device. A run that
differs ends the search with its settings.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

from maxbatch import load_config
from maxbatch import testing as pods
from maxbatch.config.config import Config
from maxbatch.kinds.prompt import run as policy_run
from maxbatch.run.pretraining import train
from maxbatch.system.hardware.cpu_devices import make_cpu_devices
from tests.helpers.command import QUICK_TO_COMPILE
from tests.helpers.corpus import write_jsonl
from tests.helpers.policies import KEYS, RL, responses_soon_ended, reward_file
from tests.helpers.tiny import ONE_LAYER, TINY_MODEL, UNMEASURED, UNSAVED, read_metrics

UPDATES, LENGTH = 4, 32
_SAME = ("step", "samples_seen", "tokens_seen", "data_fingerprint", "loss_weight", "tokens")
_SAME_IF_THERE = (
    "routing_fingerprint",
    "dropped_tokens",
    "expert_load_max",
    "skip_reason",
)
_CLOSE = {  # relative
    "loss": 2e-4,
    "grad_norm": 3e-4,
    "margin": 3e-4,
    "load_balance_loss": 2e-4,
    "router_z_loss": 2e-4,
    "entropy": 2e-4,
    "reward": 1e-6,
    "response_length": 1e-6,
}
_LEAST = 1e-5  # of a difference: losses of rl are near 0
_TRAINED = (
    *TINY_MODEL,
    ONE_LAYER,
    f"max_target_length={LENGTH}",
    "learning_rate=1e-2",
    "learning_rate_schedule=constant",
    "warmup_steps_fraction=0",
    "generate_prompt=",
    "eval_interval=-1",
    UNMEASURED,
)
_BATCHES = ("global_batch_size=7", "global_batch_size=16", "batch_size_schedule=0:5 10:19")
# words of a text, an answer
_LENGTHS = {"mixed": (1, 14), "short": (1, 1), "full": (16, 16), "longer": (10, 40)}
_EXPERTS = (
    "decoder_block=mixtral",
    "num_experts=4",
    "num_experts_per_tok=2",
    "norm_topk_prob=true",
    "base_moe_mlp_dim=24",
)
_TERMS = ("load_balance_loss_weight=0.1", "router_z_loss_weight=0.01")
_BIAS = ("routed_bias=true", "routed_bias_update_rate=0.01")
_MODELS = {
    "dense": (),
    "capacity": (*_EXPERTS, *_TERMS, "capacity_factor=1", "load_balance_scope=sequence"),
    "dropless": (*_EXPERTS, *_TERMS, "load_balance_scope=sequence"),
    "balanced": (*_EXPERTS, *_TERMS, *_BIAS, "load_balance_scope=global"),
}
_MESHES: dict[int, Sequence[tuple[str, ...]]] = {
    1: [()],
    2: [
        (),
        ("ici_data_parallelism=2",),
        ("ici_tensor_parallelism=2",),
        ("ici_context_parallelism=2",),
    ],
    4: [
        (),
        ("ici_data_parallelism=2",),
        ("ici_data_parallelism=4",),
        ("ici_tensor_parallelism=2", "ici_data_parallelism=2"),
        (
            "ici_context_parallelism=2",
            "context_parallel_strategy=ring",
            "context_parallel_load_balance=true",
        ),
    ],
}


class Layout(NamedTuple):
    """A part of a run: its last update and the keys of its layout."""

    steps: int
    keys: tuple[str, ...]
    num_devices: int
    num_hosts: int

    def __str__(self) -> str:
        where = f"{self.num_devices} devices of {self.num_hosts} hosts"
        return f"{shlex.join(self.keys)} on {where}"


class Kinds:
    """The keys of each kind of run, drawn anew for every run.

    Args:
      folder: has the data.
    """

    names = ("text", "sft", "joined", "dpo", "orpo", "grpo", "gspo")

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self._folder, self._chance = folder, chance
        words = random.Random(0)

        def some(least: int, most: int) -> str:
            return "".join(words.choice("abcdefgh") for _ in range(words.randint(least, 2 * most)))

        for name, (least, most) in _LENGTHS.items():
            answers = [some(least, most) for _ in range(300)]
            others = [some(least, most) for _ in range(300)]
            by_file = {
                "texts": [{"text": text} for text in answers],
                "chats": [
                    {"prompt": f"{i}?", "completion": answer} for i, answer in enumerate(answers)
                ],
                "pairs": [
                    {"prompt": f"{i}?", "chosen": chosen, "rejected": rejected}
                    for i, (chosen, rejected) in enumerate(zip(answers, others, strict=True))
                ],
            }
            for of_kind, records in by_file.items():
                write_jsonl(folder / f"{of_kind}-{name}.jsonl", records)
        self._reward = reward_file(folder)

    def keys(self, name: str, model: str) -> tuple[str, ...]:
        """Returns the keys of a run of a kind, but for its layout and budget. Prompts have neither
        capacities nor terms of balance.
        """
        if name in ("grpo", "gspo"):
            of_model = {"dense": (), "balanced": (*_EXPERTS, *_BIAS)}.get(model, _EXPERTS)
            return (*of_model, *self._of_prompts(name))
        records = {"text": "texts", "sft": "chats", "joined": "chats"}.get(name, "pairs")
        lengths = self._chance.choice(sorted(_LENGTHS))
        keys = [
            *_TRAINED,
            *_MODELS[model],
            "dataset_type=jsonl",
            f"dataset_path={self._folder}/{records}-{lengths}.jsonl",
            f"data_cache_dir={self._folder}/cache",
            f"packing={str(name == 'joined').lower()}",
            self._chance.choice(_BATCHES),
        ]
        if records == "chats":
            keys += ["use_sft=true"]
        if records == "pairs":
            keys += ["use_dpo=true", f"dpo_algo={name}"]
        if records != "texts":
            keys += [f"overlong={self._chance.choice(('truncate', 'drop'))}"]
            if lengths in ("full", "longer"):
                keys[-1] = "overlong=truncate"
        return tuple(keys)

    def _of_prompts(self, name: str) -> tuple[str, ...]:
        chance = self._chance
        modes = ("token-mean", "sequence-mean", "sequence-mean-token-mean")
        return (
            *KEYS,
            self._reward,
            f"batch_size={chance.choice((3, 8))}",
            f"loss_algo={'gspo-token' if name == 'gspo' else 'grpo'}",
            f"loss_agg_mode={chance.choice(modes)}",
            f"grpo_beta={chance.choice((0, 0.1))}",
            f"off_policy_steps={chance.choice((0, 1))}",
            "learning_rate_schedule=constant",
            "warmup_steps_fraction=0",
        )


def layout_of(chance: random.Random, steps: int, keys: Sequence[str]) -> Layout:
    """Returns a random layout with a random budget for a run, or one without."""
    is_sampled = any(key.startswith("loss_algo=") for key in keys)
    is_of_pairs = "use_dpo=true" in keys
    length = 24 if is_sampled else LENGTH
    num_devices = chance.choice((1, 2, 4))
    num_hosts = 2 if num_devices == 4 and chance.random() < 0.4 else 1
    layout = list(chance.choice(_MESHES[num_devices]))
    if "num_experts=4" in keys and num_devices == 4 and chance.random() < 0.5:
        layout = ["ici_data_parallelism=2", "ici_expert_parallelism=2"]
    if num_hosts > 1 and chance.random() < 0.6:
        layout = [*layout, "expansion_factor_real_data=2"]
    if steps == UPDATES and chance.random() < 0.1:
        if is_sampled:
            return Layout(steps, (*layout, "batch_padding=true"), num_devices, num_hosts)
        layout += ["per_device_batch_size=2", "batch_padding=true"]
        return Layout(steps, tuple(layout), num_devices, num_hosts)
    rows = chance.choice((1, 2, 3, 8))
    shared = any("tensor" in key or "context" in key for key in layout)
    least = 2 if is_of_pairs and (num_devices == 1 or shared) else 1
    rest = chance.choice((0, 1, length - 1))
    layout.append(f"max_tokens_per_pass={max(least, rows) * length + rest}")
    return Layout(steps, tuple(layout), num_devices, num_hosts)


def train_config(config: Config, num_devices: int, *_: object) -> None:
    """Trains on the first devices; on several hosts each calls it, with all devices."""
    devices = jax.devices()[:num_devices]
    if config.recipe.is_sampled:
        with responses_soon_ended():
            policy_run.train_policy(config, devices)
    else:
        train(config, devices)


def train_part(keys: Sequence[str], layout: Layout, run_dir: Path) -> list[dict[str, Any]]:
    """Trains a part of a run, and returns the lines of all parts so far."""
    base = [RL] if any(key.startswith("loss_algo=") for key in keys) else [None]
    overrides = [*keys, *layout.keys, f"steps={layout.steps}", f"run_dir={run_dir}"]
    config = load_config(*base, overrides=overrides)
    if layout.num_hosts > 1:
        trained = partial(train_config, config, layout.num_devices)
        pods.run(trained, devices=layout.num_devices, hosts=layout.num_hosts, timeout=900)
    else:
        train_config(config, layout.num_devices)
    return read_metrics(run_dir)


def differences(lines: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the figures in which the updates of two runs differ."""
    found = [] if len(lines) == len(expected) else [f"{len(lines)} updates, not {len(expected)}"]
    for line, other in zip(lines, expected, strict=False):
        for name in (*_SAME, *_SAME_IF_THERE, *_CLOSE):
            ours, theirs, tolerance = line.get(name), other.get(name), _CLOSE.get(name)
            is_same = ours == theirs
            if tolerance is not None and None not in (ours, theirs):
                is_same = abs(ours - theirs) <= max(_LEAST, tolerance * abs(theirs))
            if not is_same:
                found.append(f"{other['step']}: {name} {ours}, not {theirs}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Trains with random budgets; returns 0 if every update is that of a row a sample."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.programs.budgets",
        description=" ".join(__doc__.partition("\n\n")[0].split()),
    )
    parser.add_argument("--runs", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=1, help="leaves out the runs before it")
    parser.add_argument("--only", help="a kind")
    asked = parser.parse_args(argv)
    sys.stdout.reconfigure(line_buffering=True)
    os.environ["XLA_FLAGS"] = QUICK_TO_COMPILE
    make_cpu_devices(4)
    chance, begun = random.Random(asked.seed), time.monotonic()
    known: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="maxbatch-budgets-") as folder:
        kinds = Kinds(Path(folder), chance)
        names = [asked.only] if asked.only else chance.sample(kinds.names, len(kinds.names))
        models = chance.sample(sorted(_MODELS), len(_MODELS))
        for number in range(1, asked.runs + 1):
            started = time.monotonic()
            name = names[number % len(names)]
            model = models[(number + number // len(models)) % len(models)]
            keys = kinds.keys(name, model)
            middle = [chance.randrange(1, UPDATES)] if chance.random() < 0.4 else []
            parts = [layout_of(chance, steps, keys) for steps in (*middle, UPDATES)]
            if number < asked.first:
                continue
            text = f"{name} {model}: {shlex.join(keys)}: {', then '.join(map(str, parts))}"
            print(f"{number}/{asked.runs} {text}")
            if keys not in known:
                is_sampled = any(key.startswith("loss_algo=") for key in keys)
                rows = () if is_sampled else ("per_device_batch_size=7", "batch_padding=true")
                whole = Layout(UPDATES, (*rows, UNSAVED), 1, 1)
                known[keys] = train_part(keys, whole, Path(folder, f"{number}-rows"))
            run_dir, lines = Path(folder, str(number)), list[dict[str, Any]]()
            for part in parts:
                saved = part._replace(keys=(*part.keys, *(() if middle else (UNSAVED,))))
                lines = train_part(keys, saved, run_dir)
            if differing := differences(lines, known[keys]):
                print(f"budgets: seed {asked.seed}, run {number}: {text}", *differing,
                      sep="\n", file=sys.stderr)  # fmt: skip
                return 1
            passes = [line.get("num_passes") for line in lines]
            print(f"  in {time.monotonic() - started:.1f} s, passes {passes}")
    seconds = time.monotonic() - begun
    print(f"all of {asked.runs} runs are those of a row a sample; {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
