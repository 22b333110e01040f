"""What `maxbatch fit` prints for a person."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rich.table import Table

from maxbatch.commands.fit.choices import Choice
from maxbatch.plan.view import plan_console
from maxbatch.training.compile.memory import gigabytes
from maxbatch.training.compile.target import Target


def show(choices: Sequence[Choice], target: Target, wants_batch: bool) -> None:
    """Prints the answer, its memory by kind, and the ways to a stated global batch, the best first."""
    best, console = choices[0], plan_console()
    print(
        f"per_device_batch_size={best.per_device_batch_size} is the largest that fits {target.name} "
        f"(remat_policy={best.remat_policy}):"
    )
    print(
        f"{gigabytes(best.verdict.needed_bytes)} of {gigabytes(best.verdict.available_bytes)} per device "
        f"({target.memory_source})"
    )
    if best.next_verdict is not None and not best.next_verdict.fits:
        print(f"the next larger micro-batch needs {gigabytes(best.next_verdict.needed_bytes)}")
    kinds = Table("memory per device", "bytes", "")
    for kind, size in dataclasses.asdict(best.parts).items():
        name = "activations and other temporaries" if kind == "activations" else kind
        kinds.add_row(name, f"{size:,}", gigabytes(size))
    console.print(kinds)
    if not wants_batch:
        return
    batch = best.shape.micro_batch * best.shape.max_micro_batches
    table = Table(
        "remat", "per device", "micro-batch x steps", "needed", "compute", "memory", "network", "step at least",
        title=f"ways to a global batch of {batch:,}, the best first",
    )  # fmt: skip
    for choice in choices:
        costs = choice.cost
        seconds = (costs.compute_s, costs.memory_s, costs.collectives_s, costs.step_s) if costs else ()
        table.add_row(
            choice.remat_policy,
            str(choice.per_device_batch_size),
            f"{choice.shape.micro_batch:,} x {choice.shape.max_micro_batches}",
            gigabytes(choice.verdict.needed_bytes),
            *(f"{s * 1e3:,.0f} ms" for s in seconds),
        )
    console.print(table)
