"""`maxbatch` as a user runs it, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.measurement import BenchmarkError

# The model that schedules of the batch are compared with: rows of 64 bytes, all in one pass.
SMALL_MODEL = (
    "base_emb_dim=64",
    "base_num_query_heads=4",
    "base_num_kv_heads=2",
    "head_dim=16",
    "base_mlp_dim=192",
    "base_num_decoder_layers=2",
    "max_target_length=64",
    "per_device_batch_size=64",
)


def environment(**variables: str | Path) -> dict[str, str]:
    """This process's environment with one CPU device, and with `variables`."""
    inherited = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return {
        **inherited,
        "JAX_PLATFORMS": "cpu",
        **{name: str(value) for name, value in variables.items()},
    }


def start(
    module: str, *arguments: str, log: Path, cache: Path, **variables: str
) -> subprocess.Popen[bytes]:
    """Starts `python -m module arguments`, with output to `log` and caches in `cache`."""
    with open(log, "wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env=environment(XDG_CACHE_HOME=cache, **variables),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def finish(process: subprocess.Popen[bytes], log: Path, seconds: float | None = None) -> None:
    """Waits for a command's end.

    Raises:
      BenchmarkError: it failed, or was killed because it took longer than `seconds`.
    """
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise BenchmarkError(f"{process.args!r} took longer than {seconds:.0f} s") from None
    if code:
        raise BenchmarkError(
            f"{process.args!r} ended with {code}:\n{log.read_text(errors='replace')[-2000:]}"
        )


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    """The records of a run, one per update."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
