"""A store of 10⁹ documents opens at once, and its rows are read, in memory that does not grow with
the documents.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from maxbatch.data.store.token_store import MANIFEST, OFFSETS, ONE_SHARD, VERSION
from tests.helpers.command import environment

DOCUMENTS, WRITTEN, LENGTH = 10**9, 10**6, 2048
PROGRAM = f"""
import json, random, time
from maxbatch import load_config
from maxbatch.data.stream.stream import open_stream

config = load_config(overrides=["dataset_type=tokens", "dataset_path=tokens", "max_target_length={LENGTH}"])
begin = time.process_time()
stream = open_stream(config)
opened, documents = time.process_time() - begin, stream.stats()["documents"]
draw = random.Random(0)
begin = time.process_time()
rows = [stream[draw.randrange(10**15)] for _ in range(50)]
read = (time.process_time() - begin) / 50
segments = [int(row["segments"].max()) for row in rows]
status = open("/proc/self/status").read()  # its own peak; that of getrusage is inherited from its parent
peak = int(status.partition("VmHWM:")[2].split()[0])
print(json.dumps(dict(documents=documents, opened=opened, read=read, segments=segments, peak_kb=peak)))
"""


def write_store(folder: Path) -> int:
    """Writes a store whose last 10⁶ documents have tokens; the others are empty, and holes of its
    files.

    Returns:
      Its tokens.
    """
    folder.mkdir()
    lengths = np.random.default_rng(0).lognormal(6.2, 1, WRITTEN).astype(np.int64) + 1
    ends, header = np.cumsum(lengths), folder / "header"
    tokens = int(ends[-1])
    np.lib.format.open_memmap(header, "w+", np.int64, (DOCUMENTS + 1,)).flush()
    with open(header.rename(folder / OFFSETS), "r+b") as file:
        file.seek(-8 * WRITTEN, 2)
        file.write(ends.data)
    with open(folder / ONE_SHARD, "wb") as file:
        file.truncate(2 * tokens)
    sizes = {name: (folder / name).stat().st_size for name in (ONE_SHARD, OFFSETS)}
    manifest = {
        "version": VERSION,
        "content": "0" * 32,
        "documents": DOCUMENTS,
        "tokens": tokens,
        "text_bytes": tokens,
        "skipped_records": 0,
        "held_out": [],
        "tokenizer": "byte",
        "vocab_size": 258,
        "dtype": "uint16",
        "bos": [256],
        "eos": [257],
        "hashed_as": "uint8",
        "sizes": sizes,
        "offsets_crc32": 0,
        "signature": "0" * 32,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return tokens


def test_a_billion_documents_open_within_seconds_and_every_row_is_found(tmp_path: Path) -> None:
    tokens = write_store(tmp_path / "tokens")
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert found["documents"] == DOCUMENTS and found["opened"] < 10 and found["read"] < 0.1
    assert found["peak_kb"] < 500_000
    assert 2 < np.mean(found["segments"]) < 2 + 2 * LENGTH * WRITTEN / tokens
