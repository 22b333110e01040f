"""The output of `maxbatch fit`: one JSON object, or tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rich.table import Table

from maxbatch.around.compile.modelled import has_clock
from maxbatch.around.fit.choices import Choice, Wanted
from maxbatch.around.fit.meshes import mesh_text
from maxbatch.around.fit.ways import Way
from maxbatch.config.values import value_text
from maxbatch.run.compile.memory import gigabytes
from maxbatch.system.terminal.terminal import PipeConsole


def record(
    choices: Sequence[Choice], ways: Sequence[Way], wanted: Wanted, skipped: Sequence[str]
) -> dict[str, object]:
    """Returns the object of `--json`: the best choice, the next larger size, all compilations, the
    ways left out.
    """
    following, target = choices[0].next_verdict, wanted.target
    next_size = following and {"fits": following.fits, "hbm_bytes_needed": following.needed_bytes}
    figures = {
        **choices[0].to_dict(),
        "mesh": mesh_text(choices[0].mesh, wanted.config),
        "target": target.name,
        "num_devices": len(target.devices),
        "memory_source": target.memory_source,
        "ranked_by": _ranked_by(wanted),
        "next_size": next_size,
        "asked": [
            {
                "mesh": mesh_text(way.oracle.mesh, wanted.config),
                "remat_policy": way.oracle.config.remat_policy,
                "micro_batch_size_to_train_on": shape.micro_batch,
                "gradient_accumulation_steps": shape.max_micro_batches,
                "fits": asked.verdict.fits,
                "hbm_bytes_needed": asked.verdict.needed_bytes,
                "compile_s": round(asked.verdict.seconds, 2),
                "cached": asked.cached,
            }
            for way in ways
            for shape, asked in way.oracle.asked.items()
        ],
    }
    if wanted.states_batch or wanted.any_mesh:
        figures["alternatives"] = [choice.to_dict() for choice in choices]
        figures["no_time_for"] = list(skipped)
    return figures


def _ranked_by(wanted: Wanted) -> str:
    if not has_clock(wanted.target):
        return "micro_batch_size_to_train_on"
    return "modelled_step_s" if wanted.states_batch else "modelled_tokens_per_second_per_device"


def show(choices: Sequence[Choice], wanted: Wanted, skipped: Sequence[str]) -> None:
    """Prints the best choice, its memory by kind, and all alternatives, the best first."""
    best, target, console = choices[0], wanted.target, PipeConsole()
    is_largest = best.next_verdict is None or not best.next_verdict.fits
    what = (
        "the largest that fits"
        if is_largest
        else "the fastest that fits by the compiler's clock on"
    )
    ((key, value),) = best.stated.items()
    print(f"{key}={value_text(value)} is {what} {target.name} (remat_policy={best.remat_policy}):")
    if wanted.any_mesh:
        print(f"the mesh: {mesh_text(best.mesh, wanted.config)}")
    needed, available = (
        gigabytes(best.verdict.needed_bytes),
        gigabytes(best.verdict.available_bytes),
    )
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
    if wanted.states_batch or wanted.any_mesh:
        _show_ways(choices, wanted)
    if skipped:
        print(f"no time for: {'; '.join(skipped)}. The same command again continues with them")


def _show_ways(choices: Sequence[Choice], wanted: Wanted) -> None:
    timed = has_clock(wanted.target)
    columns = ["mesh"] if wanted.any_mesh else []
    is_packed = "max_tokens_per_pass" in choices[0].stated
    columns += ["remat", "tokens per pass" if is_packed else "per device"]
    columns += ["rows x most passes" if is_packed else "micro-batch x steps", "needed"]
    columns += ["compute", "kernels", "exposed", "modelled step", "MFU"] if timed else []
    to = (
        f"a global batch of {choices[0].global_batch:,}"
        if wanted.states_batch
        else "run, each with its largest batch"
    )
    table = Table(*columns, title=f"ways to {to}, the best first")
    for choice in choices:
        modelled, cut = (
            choice.modelled,
            f"{choice.shape.micro_batch:,} x {choice.shape.max_micro_batches}",
        )
        axes = " x ".join(f"{axis} {size}" for axis, size in choice.mesh.sizes.items() if size > 1)
        cells = [axes or "1 device"] if wanted.any_mesh else []
        cells += [
            choice.remat_policy,
            *(value_text(value) for value in choice.stated.values()),
            cut,
            gigabytes(choice.verdict.needed_bytes),
        ]
        if timed:
            cells += [
                f"{(cycles or 0) / 1e6:,.0f}M"
                for cycles in (modelled.compute_cycles, modelled.kernel_cycles)
            ]
            cells += [gigabytes(modelled.exposed_collective_bytes)]
            cells += [
                f"{(modelled.modelled_step_s or 0) * 1e3:,.0f} ms",
                f"{modelled.modelled_mfu or 0:.1%}",
            ]
        table.add_row(*cells)
    PipeConsole().print(table)
    if not timed:
        print(
            "no compiler's clock for these devices: the larger micro-batch comes first, then the "
            "least recomputation"
        )


def _modelled(choice: Choice) -> str:
    modelled = choice.modelled
    return (
        f"modelled, not measured: {(modelled.modelled_step_s or 0) * 1e3:,.0f} ms an update, "
        f"{modelled.modelled_tokens_per_second_per_device or 0:,.0f} tokens/s per device, MFU "
        f"{modelled.modelled_mfu or 0:.1%}"
    )
