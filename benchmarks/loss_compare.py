"""Losses and data fingerprints of two checkouts, side by side: `python -m benchmarks.loss_compare
BEFORE AFTER`.

Runs the same commands with the package of each checkout and compares their metrics, update by
update. A change that must not affect training passes if every fingerprint is equal, no loss differs
by more than a tolerance, and no gradient norm by more than ten times as much.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

_SMALL = ("steps=12", "base_num_decoder_layers=2")
_TEXTS = ("dataset_type=jsonl", "dataset_path=documents.jsonl")
# The runs to compare, by name: a command and its arguments.
CASES = {
    "default": ("train",),
    "ramp": (
        "train",
        "steps=16",
        "enable_rampup_batch_size=true",
        "per_device_batch_size_start=2",
        "per_device_batch_size_increment=2",
        "per_device_batch_size=8",
        "gradient_accumulation_steps=2",
        "global_rampup_samples=300",
        "--simulate-devices",
        "4",
    ),
    "tensor_fsdp_best_fit": (
        "train",
        *_SMALL,
        *_TEXTS,
        "packing_strategy=best_fit",
        "ici_tensor_parallelism=2",
        "per_device_batch_size=4",
        "scan_layers=true",
        "gradient_accumulation_steps=2",
        "eval_fraction=0.1",
        "eval_interval=6",
        "--simulate-devices",
        "4",
    ),
    "schedule_muon": (
        "train",
        *_SMALL,
        "opt_type=muon",
        "batch_size_schedule=0:8 40:16",
        "per_device_batch_size=8",
    ),
    "sft": (
        "train",
        *_SMALL,
        "use_sft=true",
        "dataset_type=jsonl",
        "dataset_path=pairs.jsonl",
        "per_device_batch_size=8",
    ),
    "lora": (
        "train",
        *_SMALL,
        *_TEXTS,
        "lora_rank=4",
        "load_parameters_path=model",
        "per_device_batch_size=8",
    ),
    "pairs": (
        "train",
        *_SMALL,
        "use_dpo=true",
        "dpo_algo=orpo",
        "dataset_type=jsonl",
        "dataset_path=answers.jsonl",
        "per_device_batch_size=8",
    ),
    "experts": (
        "train",
        *_SMALL,
        *_TEXTS,
        "decoder_block=mixtral",
        "num_experts=4",
        "num_experts_per_tok=2",
        "norm_topk_prob=true",
        "load_balance_loss_weight=0.01",
        "ici_expert_parallelism=2",
        "per_device_batch_size=4",
        "--simulate-devices",
        "2",
    ),
    "int8": ("train", *_SMALL, *_TEXTS, "quantization=int8", "per_device_batch_size=8"),
    "two_hosts_expansion": (
        "train",
        *_SMALL,
        *_TEXTS,
        "expansion_factor_real_data=2",
        "per_device_batch_size=4",
        "--simulate-hosts",
        "2",
    ),
    "rl": ("rl", "steps=6"),
    "rl_filtered_behind": ("rl", "steps=6", "filter_groups=true", "off_policy_steps=1"),
}


def main(argv: list[str] | None = None) -> int:
    """Compares two checkouts.

    Returns:
      0 if all cases agree, 1 if one does not or a command failed.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loss_compare", description=__doc__)
    parser.add_argument("before", type=Path, help="a checkout")
    parser.add_argument("after", type=Path, help="another checkout")
    parser.add_argument(
        "--cases", nargs="+", choices=CASES, default=list(CASES), help="default: all"
    )
    parser.add_argument(
        "--tolerance", type=float, default=1e-5, help="largest relative difference of a loss"
    )
    arguments = parser.parse_args(argv)
    table = Table(
        "case", "updates", "fingerprints", "largest relative difference of a loss", "of a norm", ""
    )
    agree = True
    for case in arguments.cases:
        before, after = (
            _metrics(checkout.resolve(), case) for checkout in (arguments.before, arguments.after)
        )
        same_data = [r["data_fingerprint"] for r in before] == [
            r["data_fingerprint"] for r in after
        ]
        loss, norm = (_largest_difference(before, after, name) for name in ("loss", "grad_norm"))
        passed = (
            bool(before)
            and same_data
            and loss <= arguments.tolerance
            and norm <= 10 * arguments.tolerance
        )
        agree = agree and passed
        table.add_row(
            case,
            str(len(before)),
            "equal" if same_data else "differ",
            f"{loss:.1e}",
            f"{norm:.1e}",
            "pass" if passed else "miss",
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    return int(not agree)


def _largest_difference(
    before: list[dict[str, Any]], after: list[dict[str, Any]], name: str
) -> float:
    pairs = [(a[name] or 0.0, b[name] or 0.0) for a, b in zip(after, before, strict=True)]
    return max(abs(a - b) / (abs(b) or 1.0) for a, b in pairs)


def _metrics(checkout: Path, case: str) -> list[dict[str, Any]]:
    """Runs a case with the package of a checkout, in a folder and with caches of its own."""
    with tempfile.TemporaryDirectory(prefix="maxbatch-compare-") as folder:
        _write_texts(Path(folder))
        variables = {
            "PYTHONPATH": str(checkout),
            "JAX_PLATFORMS": "cpu",
            "XDG_CACHE_HOME": str(Path(folder, "cache")),
        }
        command, *overrides = CASES[case]
        runs = [(command, "run_dir=run", *overrides)]
        if "load_parameters_path=model" in overrides:
            runs.insert(0, ("train", "run_dir=model", *_SMALL, *_TEXTS, "per_device_batch_size=8"))
        for run in runs:
            subprocess.run(
                [sys.executable, "-m", "maxbatch", *run],
                cwd=folder,
                env=os.environ | variables,
                check=True,
                stdout=subprocess.DEVNULL,
            )
        return [
            json.loads(line)
            for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()
        ]


def _write_texts(folder: Path) -> None:
    rng = random.Random(0)
    words = ["batch", "micro", "step", "ramp", "token", "shard", "mesh", "host", "sample", "update"]
    with (
        open(folder / "documents.jsonl", "w") as documents,
        open(folder / "pairs.jsonl", "w") as pairs,
        open(folder / "answers.jsonl", "w") as answers,
    ):
        for _ in range(2000):
            text = " ".join(rng.choices(words, k=rng.randint(3, 120)))
            documents.write(json.dumps({"text": text}) + "\n")
            pairs.write(
                json.dumps({"prompt": text[:40], "completion": text[40:120] or "none"}) + "\n"
            )
            answers.write(
                json.dumps({"prompt": text[:20], "chosen": text[20:60] or "yes", "rejected": "no"})
                + "\n"
            )


if __name__ == "__main__":
    sys.exit(main())
