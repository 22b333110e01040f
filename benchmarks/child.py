"""A process that runs one benchmark, started by `__main__`: `python -m benchmarks.child NAME
OUT.json full|quick`.
"""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.measurement import BenchmarkError
from maxbatch.system.hardware.cpu_devices import give_cpu_devices_threads


def main(name: str, output: str, size: str) -> int:
    """Measures and writes the records; returns 1 if the benchmark has none."""
    quick = size == "quick"
    give_cpu_devices_threads()
    try:
        measurements = importlib.import_module(f"benchmarks.{name}").measure(quick)
    except BenchmarkError as error:
        print(f"benchmarks: {name}: {error}", file=sys.stderr)
        return 1
    if quick:
        measurements = [replace(measurement, bar=None) for measurement in measurements]
    Path(output).write_text(json.dumps([measurement.to_dict() for measurement in measurements]))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
