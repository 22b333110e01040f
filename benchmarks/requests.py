"""(m) Requests that a run in an object store makes, counted at the proxy before an emulator of the
store.

Needs the emulators of the `test` extra.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.measurement import BenchmarkError, Measurement
from maxbatch.cli import main
from maxbatch.config.loading import load_config
from maxbatch.run.own import Parts
from maxbatch.run.pretraining import train
from maxbatch.run.record.recorder import Output
from tests.helpers.stores import SCHEMES, Store, serving
from tests.helpers.tiny import TINY_MODEL

ROWS = 16  # B
READS_BESIDE_ROWS = 8
# beside the arrays, with the run's id and the config of the session before
OBJECTS_OF_A_RESUME = 11
WRITES_A_MINUTE = 6
_WARM_UP = 3  # updates
_RUN = (
    *TINY_MODEL,
    "dataset_type=tokens",
    "generate_prompt=",
    "eval_interval=-1",
    f"per_device_batch_size={ROWS}",
    f"global_batch_size={ROWS}",
)
_ARRAYS = re.compile(r"/checkpoints/\d+/(params|opt_state)/")
# Metrics, in parts where they have grown large, and the lease.
_STEADY = re.compile(r"metrics\.jsonl|\.lease")


class _Paced(Output):
    """Records the time of each update, and delays it."""

    def __init__(self, step_s: float) -> None:
        self._step_s, self.times = step_s, list[float]()

    def append(self, record: dict[str, Any]) -> None:
        time.sleep(self._step_s)
        self.times.append(time.time())


def measure(quick: bool) -> list[Measurement]:
    """Reads of an update, shuffled and in order; objects that a resume reads; writes per minute of
    a steady run.
    """
    found = []
    for scheme in SCHEMES:
        with serving(scheme) as store, tempfile.TemporaryDirectory() as folder:
            bucket = store.bucket()
            prepare(bucket, Path(folder))
            found += [
                reads_of_an_update(store, bucket, "true", bar=ROWS + READS_BESIDE_ROWS),
                reads_of_an_update(store, bucket, "false", bar=ROWS),
                objects_of_a_resume(store, bucket),
                writes_a_minute(store, bucket, seconds=2 if quick else 120),
            ]
    return found


def prepare(bucket: str, folder: Path) -> None:
    """Writes tokens into a bucket, enough that rows of an update are unlikely to be adjacent."""
    documents = folder / "documents.jsonl"
    documents.write_text(
        "\n".join(json.dumps({"text": f"{number} " + "word " * 400}) for number in range(5000))
    )
    if main(
        [
            "prepare",
            "dataset_type=jsonl",
            f"dataset_path={documents}",
            "--output",
            f"{bucket}/tokens",
        ]
    ):
        raise BenchmarkError("the tokens could not be prepared")


def _train(bucket: str, name: str, *overrides: str, step_s: float = 0.0) -> list[float]:
    """Trains in a bucket; returns the time of each update."""
    clock = _Paced(step_s)
    data = (f"dataset_path={bucket}/tokens", f"run_dir={bucket}/{name}")
    train(load_config(overrides=[*_RUN, *data, *overrides]), parts=Parts(outputs=(clock,)))
    return clock.times


def reads_of_an_update(store: Store, bucket: str, shuffled: str, bar: float) -> Measurement:
    """Counts reads of any kind, of a run that is neither starting nor ending."""
    steps = 40
    store.forget()
    order = f"enable_data_shuffling={shuffled}"
    times = _train(
        bucket, f"shuffled-{shuffled}", order, f"steps={steps}", "checkpoint_period=1000"
    )
    reads = [
        at
        for at, method, *_ in store.requests()
        if method == "GET" and times[_WARM_UP - 1] < at <= times[-1]
    ]
    what = "shuffled rows" if shuffled == "true" else "rows side by side"
    return Measurement(
        f"{store.scheme}: reads of an update of {ROWS} {what}",
        len(reads) / (steps - _WARM_UP),
        bar=bar,
    )


def objects_of_a_resume(store: Store, bucket: str) -> Measurement:
    """Counts the objects beside the arrays that a resumed run reads until its first update."""
    _train(bucket, "resumed", "steps=6", "checkpoint_period=2")
    store.forget()
    begun = time.time()
    (first, *_) = _train(bucket, "resumed", "steps=7")
    # Rows do not count: training reads `tokens` by range.
    read = {
        name
        for at, method, path, _, status in store.requests()
        if method == "GET"
        and status in (200, 206)
        and begun <= at <= first
        and (name := _object(path, bucket))
        and not _ARRAYS.search(name)
        and not name.endswith("tokens.bin")
    }
    detail = {"objects": sorted(read)}
    name = f"{store.scheme}: objects read by a resume, beside arrays"
    return Measurement(name, len(read), bar=OBJECTS_OF_A_RESUME, detail=detail)


def _object(path: str, bucket: str) -> str | None:
    """Returns the name of the object whose content a GET asks for; None for a listing or its
    metadata.
    """
    name = bucket.partition("://")[2]
    url, _, query = path.partition("?")
    if bucket.startswith("s3"):
        key = url.removeprefix(f"/{name}").strip("/")
        return f"/{key}" if key and "list-type" not in query else None
    match = re.search(rf"/b/{name}/o/(.+)", url)
    return (
        f"/{match[1]}" if match and ("alt=media" in query or url.startswith("/download")) else None
    )


def writes_a_minute(store: Store, bucket: str, seconds: float) -> Measurement:
    """Counts writes of the metrics and the lease by a run that is neither starting, saving nor
    ending.
    """
    step_s = 0.1
    store.forget()
    steps = f"steps={int(seconds / step_s)}"
    times = _train(bucket, "steady", steps, "checkpoint_period=100000", step_s=step_s)
    writes = [
        at
        for at, method, path, *_ in store.requests()
        if method in ("PUT", "POST", "DELETE")
        and _STEADY.search(path)
        and times[0] < at < times[-1]
    ]
    minutes = (times[-1] - times[0]) / 60
    name = f"{store.scheme}: writes a minute of metrics and lease"
    return Measurement(name, len(writes) / minutes, bar=WRITES_A_MINUTE)
