"""`python -m benchmarks [NAME ...]`: measures, prints a table, writes JSON; exits with 1 if a bar
is missed.

Each benchmark runs in a process of its own, because the number of simulated devices is fixed when
JAX starts, and with caches of its own, so that nothing depends on what ran before.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

# name: simulated devices of the process that measures
NUM_DEVICES = {
    "step": 4,
    "process": 1,
    "accumulation": 4,
    "passes": 1,
    "stages": 1,
    "feed": 4,
    "startup": 1,
    "prepare": 1,
    "memory": 1,
    "noise_scale": 4,
    "to_the_bit": 1,
    "waiting": 1,
    "requests": 1,
    "sampler": 1,
    "overlap": 1,
    "ahead": 1,
    "batch_warmup": 1,
    "finetune": 1,
    "reading": 8,
    "experts": 1,
    "quality": 1,
    "evaluate": 1,
    "gpu": 1,  # its children see the GPU
}


def main(argv: list[str] | None = None) -> int:
    """Runs the named benchmarks.

    Returns:
      0 if every bar is reached, 1 if one is missed or a benchmark failed.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"some of: {', '.join(NUM_DEVICES)} (default: all)"
    )
    parser.add_argument(
        "--json", type=Path, default=Path(__file__).parent / "results.json", help="where results go"
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes: shows that it runs; no bar holds"
    )
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.names) - NUM_DEVICES.keys():
        parser.error(
            f"no benchmark is called {', '.join(sorted(unknown))}; there are "
            f"{', '.join(NUM_DEVICES)}"
        )

    console = Console(width=None if sys.stdout.isatty() else 120)
    results: dict[str, list[dict[str, Any]] | None] = {}
    for name in arguments.names or NUM_DEVICES:
        results[name] = _measure(name, arguments.quick)
        console.print(_table(name, results[name]))
    arguments.json.write_text(
        json.dumps(
            {"machine": _machine(), "quick": arguments.quick, "benchmarks": results}, indent=1
        )
    )
    print(f"written to {arguments.json}")
    return int(
        any(
            records is None or any(r["passed"] is False for r in records)
            for records in results.values()
        )
    )


def _measure(name: str, quick: bool) -> list[dict[str, Any]] | None:
    """Returns the records of one benchmark; None if it failed, with a message."""
    with tempfile.TemporaryDirectory(prefix="maxbatch-benchmark-") as folder:
        output = Path(folder, "records.json")
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={NUM_DEVICES[name]}",
            "XDG_CACHE_HOME": str(Path(folder, "cache")),
            "PYTHONPATH": os.pathsep.join(
                filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")))
            ),
        }
        command = (
            sys.executable,
            "-m",
            "benchmarks.child",
            name,
            str(output),
            "quick" if quick else "full",
        )
        if subprocess.run(command, env=environment).returncode:
            return None
        return json.loads(output.read_text())


def _machine() -> dict[str, Any]:
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "jax": version("jax"),
    }


def _table(name: str, records: list[dict[str, Any]] | None) -> Table:
    table = Table(title=name, title_justify="left")
    table.add_column("measured")
    for column in ("value", "bar", "min", "median", "max"):
        table.add_column(column, justify="right")
    table.add_column("")
    for record in records or ():
        unit = f" {record['unit']}" if record["unit"] else ""

        def figure(key: str, record: dict[str, Any] = record, unit: str = unit) -> str:
            return "" if record[key] is None else f"{record[key]:.3f}{unit}"

        bar = "" if record["bar"] is None else f"{record['sense']} {record['bar']:g}{unit}"
        verdict = {None: "", True: "[green]pass[/]", False: "[red]miss[/]"}[record["passed"]]
        table.add_row(
            record["name"],
            figure("value"),
            bar,
            figure("min"),
            figure("median"),
            figure("max"),
            verdict,
        )
    if records is None:
        table.add_row("failed", "", "", "", "", "", "[red]miss[/]")
    return table


if __name__ == "__main__":
    sys.exit(main())
