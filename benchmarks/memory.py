"""Anonymous memory of `maxbatch prepare` and of a stream, with four times as many documents.

The memory is the largest sum over a command's process and its children, polled; mapped files do not
count, since the system drops their pages. `best_fit` computes its packing in memory; its figure is
bytes per document.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measurement import BenchmarkError, Measurement

BAR = 1.2
_DOCUMENTS, _TIMES = 1_000_000, 4
_POLL_S = 0.01
_READ = """
import random, sys
from maxbatch import load_config
from maxbatch.data.stream.stream import open_stream
stream = open_stream(load_config(overrides=["dataset_type=tokens", "max_target_length=128", *sys.argv[1:]]))
draw = random.Random(0)
for _ in range(50):
    stream.batch([draw.randrange(10**12) for _ in range(16)])
"""
_STREAMS = {
    "concatenate": (),
    "one document a row": ("packing=false",),
    "held-out documents": ("eval_fraction=0.1",),
}


def measure(quick: bool) -> list[Measurement]:
    """Ratios of peaks, and the bytes per document of `best_fit`."""
    count = 20_000 if quick else _DOCUMENTS
    with tempfile.TemporaryDirectory() as name:
        few, many = (_peaks(Path(name, str(size)), size) for size in (count, _TIMES * count))
    measured = [
        Measurement(
            f"{what}: peak of {_TIMES * count:,} documents over {count:,}",
            many[what] / few[what],
            bar=BAR,
            detail={"few_bytes": few[what], "many_bytes": many[what]},
        )
        for what in ("prepare", *_STREAMS)
    ]
    packing = (many["best_fit"] - few["best_fit"]) / ((_TIMES - 1) * count)
    return [*measured, Measurement("best_fit: bytes a document", packing, "B")]


def _peaks(folder: Path, num_documents: int) -> dict[str, int]:
    folder.mkdir()
    with open(folder / "web.jsonl", "w") as file:
        for number in range(num_documents):
            file.write(json.dumps({"text": f"document {number} " + "x" * (number % 20)}) + "\n")
    cache = f"data_cache_dir={folder / 'cache'}"
    data = ("dataset_type=jsonl", f"dataset_path={folder / 'web.jsonl'}", cache)
    command = (
        "-m",
        "maxbatch",
        "prepare",
        *data,
        "--workers",
        "1",
        "--output",
        str(folder / "tokens"),
    )
    found = {"prepare": _peak(command)}
    for name, keys in {**_STREAMS, "best_fit": ("packing_strategy=best_fit",)}.items():
        found[name] = _peak(("-c", _READ, f"dataset_path={folder / 'tokens'}", cache, *keys))
    return found


def _peak(arguments: tuple[str, ...]) -> int:
    """Returns the peak anonymous memory of a Python process and its children, in bytes."""
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL)
    most = 0
    while process.poll() is None:
        most = max(most, _anonymous(process.pid))
        time.sleep(_POLL_S)
    if process.returncode:
        raise BenchmarkError(
            f"{' '.join(arguments)[:200]} ended with exit code {process.returncode}"
        )
    return most


def _anonymous(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # it has ended
        return 0
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    return (int(found[1]) << 10 if found else 0) + sum(_anonymous(int(child)) for child in children)
