"""The output of `maxbatch fit`: one JSON object, or tables for a person."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from maxbatch.commands.fit.choices import Choice
from maxbatch.commands.fit.oracle import CompilerOracle
from maxbatch.plan.view import plan_console
from maxbatch.training.compile.memory import gigabytes
from maxbatch.training.compile.modelled import has_clock
from maxbatch.training.compile.target import Target


def record(
    choices: Sequence[Choice], oracles: Sequence[CompilerOracle], wants_batch: bool, skipped: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns what `--json` prints: the best choice, why not one more, every question, and the policies left out."""
    following, target = choices[0].next_verdict, oracles[0].target
    next_size = following and {"fits": following.fits, "hbm_bytes_needed": following.needed_bytes}
    found = {
        **choices[0].to_dict(),
        "target": target.name,
        "num_devices": len(target.devices),
        "memory_source": target.memory_source,
        "ranked_by": "modelled_step_s" if has_clock(target) else "micro_batch_size_to_train_on",
        "next_size": next_size,
        "asked": [
            {
                "remat_policy": oracle.config.remat_policy,
                "micro_batch_size_to_train_on": shape.micro_batch,
                "gradient_accumulation_steps": shape.max_micro_batches,
                "fits": asked.verdict.fits,
                "hbm_bytes_needed": asked.verdict.needed_bytes,
                "compile_s": round(asked.verdict.seconds, 2),
                "cached": asked.cached,
            }
            for oracle in oracles
            for shape, asked in oracle.asked.items()
        ],
    }
    if wants_batch:
        found["alternatives"] = [choice.to_dict() for choice in choices]
        found["no_time_for"] = list(skipped)
    return found


def show(choices: Sequence[Choice], target: Target, wants_batch: bool) -> None:
    """Prints the answer, its memory by kind, and the ways to a stated global batch, the best first."""
    best, console = choices[0], plan_console()
    is_largest = best.next_verdict is None or not best.next_verdict.fits
    what = "the largest that fits" if is_largest else "the fastest that fits by the compiler's clock on"
    print(
        f"per_device_batch_size={best.per_device_batch_size} is {what} {target.name} "
        f"(remat_policy={best.remat_policy}):"
    )
    needed, available = gigabytes(best.verdict.needed_bytes), gigabytes(best.verdict.available_bytes)
    print(f"{needed} of {available} per device ({target.memory_source})")
    if best.next_verdict is not None and not best.next_verdict.fits:
        print(f"the next larger micro-batch needs {gigabytes(best.next_verdict.needed_bytes)}")
    kinds = Table("memory per device", "bytes", "")
    for kind, size in dataclasses.asdict(best.parts).items():
        name = "activations and other temporaries" if kind == "activations" else kind
        kinds.add_row(name, f"{size:,}", gigabytes(size))
    console.print(kinds)
    if has_clock(target):
        print(_modelled(best))
    if not wants_batch:
        return
    columns = ["remat", "per device", "micro-batch x steps", "needed"]
    columns += ["compute", "kernels", "exposed", "modelled step", "MFU"] if has_clock(target) else []
    table = Table(*columns, title=f"ways to a global batch of {best.global_batch:,}, the best first")
    for choice in choices:
        modelled, cut = choice.modelled, f"{choice.shape.micro_batch:,} x {choice.shape.max_micro_batches}"
        cells = [choice.remat_policy, str(choice.per_device_batch_size), cut, gigabytes(choice.verdict.needed_bytes)]
        if has_clock(target):
            cells += [f"{(cycles or 0) / 1e6:,.0f}M" for cycles in (modelled.compute_cycles, modelled.kernel_cycles)]
            cells += [gigabytes(modelled.exposed_collective_bytes)]
            cells += [f"{(modelled.modelled_step_s or 0) * 1e3:,.0f} ms", f"{modelled.modelled_mfu or 0:.1%}"]
        table.add_row(*cells)
    console.print(table)
    if not has_clock(target):
        print("no compiler's clock for these devices: the larger micro-batch comes first, then the least recomputation")


def _modelled(choice: Choice) -> str:
    one = choice.modelled
    return (
        f"modelled, not measured: {(one.modelled_step_s or 0) * 1e3:,.0f} ms an update, "
        f"{one.modelled_tokens_per_second_per_device or 0:,.0f} tokens/s per device, MFU {one.modelled_mfu or 0:.1%}"
    )
