"""(m) Weights of 3 billion parameters from safetensors onto 8 devices, against the library
`safetensors` alone.

The files are random, 2 bytes a value, of Llama 3.2 3B's shapes. They are read with
`weight_dtype=bfloat16` onto fsdp=8, and by the library, which only brings every tensor into memory.
Each side reads twice in a process of its own, in turns, and the second time counts: the first
includes allocating the memory and filling the file cache. The peak is that of the whole process,
including mapped files and imports.
"""

from __future__ import annotations

import importlib.util
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from benchmarks.measurement import BenchmarkError, Measurement, ratio
from maxbatch.around.huggingface.arrays.tensors import parameter_places, tensor_shapes
from maxbatch.around.huggingface.folder.model_fields import config_json
from maxbatch.config.loading import load_config
from maxbatch.parallel.mesh import make_mesh
from maxbatch.system.storage.safetensors import write_tensors
from maxbatch.update.state import abstract_model
from tests.helpers.parameters import load_parameters

SPEED, MEMORY = 0.8, 1.3
_BLOCK = 2**25  # random values, of which the files are made
_LAYERS_A_FILE = 7
_QUICK = ("base_num_decoder_layers=2", "vocab_size=1000", "base_mlp_dim=256", "base_emb_dim=128")


def measure(quick: bool) -> list[Measurement]:
    """The ratio of the speeds, and of the peak to the weights."""
    if importlib.util.find_spec("safetensors") is None:
        print(
            "benchmarks: reading: skipped: needs the library safetensors (the extra parity)",
            file=sys.stderr,
        )
        return []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        num_bytes = _write_model(folder, _QUICK if quick else ())
        seconds: dict[str, list[float]] = {"maxbatch": [], "safetensors": []}
        peaks = []
        for turn in range(2 if quick else 4):
            for side in sorted(seconds, reverse=turn % 2 == 1):
                found = _read_apart(side, folder)
                seconds[side].append(found["seconds"])
                if side == "maxbatch":
                    peaks.append(found["peak_bytes"] / num_bytes)
        speed = ratio(
            "speed of safetensors alone",
            seconds["safetensors"],
            seconds["maxbatch"],
            bar=SPEED,
            sense="at least",
        )
        peak = Measurement("peak memory over the weights'", max(peaks), samples=peaks, bar=MEMORY)
        return [speed, peak, Measurement("weights", num_bytes / 1e9, "GB")]


def _write_model(folder: Path, overrides: tuple[str, ...]) -> int:
    """Writes a folder of random weights; returns their bytes."""
    config = load_config(overrides=["model_name=llama3.2-3b", *overrides])
    shapes = tensor_shapes(parameter_places(config.model, abstract_model(config.decoder)[1]))
    block = np.random.default_rng(0).integers(0, 0x3F80, _BLOCK, np.uint16)

    def arrays(names: list[str]) -> Iterator[np.ndarray]:
        for name in names:
            yield np.resize(block, shapes[name]).view("bfloat16")

    names, step = list(shapes), 9 * _LAYERS_A_FILE
    for number, first in enumerate(range(0, len(names), step)):
        some = names[first : first + step]
        write_tensors(
            folder / f"{number}.safetensors",
            "BF16",
            {name: shapes[name] for name in some},
            arrays(some),
        )
    (folder / "config.json").write_text(json.dumps(config_json(config.decoder, "bfloat16", {})))
    return sum(2 * math.prod(shape) for shape in shapes.values())


def _read_apart(side: str, folder: Path) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.reading", side, folder], capture_output=True, text=True
    )
    if done.returncode:
        raise BenchmarkError(f"reading by {side} failed:\n{done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _read(side: str, folder: Path) -> float:
    """Reads the weights; returns the seconds."""
    if side == "maxbatch":
        overrides = ["weight_dtype=bfloat16", "dataset_type=synthetic", "ici_fsdp_parallelism=8"]
        mesh = make_mesh(load_config(overrides=overrides))
        began = time.perf_counter()
        jax.block_until_ready(load_parameters(folder, overrides, mesh)[2])
        return time.perf_counter() - began
    from safetensors import safe_open

    began = time.perf_counter()
    found = []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as opened:
            found += [opened.get_tensor(name) for name in opened.keys()]  # noqa: SIM118
    return time.perf_counter() - began


if __name__ == "__main__":
    _, seconds = (_read(sys.argv[1], Path(sys.argv[2])) for _ in range(2))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": seconds, "peak_bytes": peak}))
