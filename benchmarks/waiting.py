"""(h) The share of a step spent waiting for data: prepared tokens on the disk, and in a distant
object store.

The share of a run is the metrics' own figure. The store is an emulator (`test` extra) behind a
proxy that adds 50 ms to every request.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from benchmarks.commands import finish, metrics_of, start
from benchmarks.measurement import Measurement
from benchmarks.requests import prepare
from maxbatch.api import open_feed
from maxbatch.config.loading import load_config
from tests.helpers.stores import SCHEMES, serving

BAR = 0.01
REMOTE_BAR = 0.05
_DELAY_S, _STEP_S, _ROWS = 0.05, 0.1, 16
_MODEL = (
    "base_emb_dim=256",
    "base_num_query_heads=8",
    "base_num_kv_heads=4",
    "base_mlp_dim=1024",
    "base_num_decoder_layers=10",
)
_QUICK_MODEL = ("base_num_decoder_layers=1",)
_RUN = (
    "per_device_batch_size=8",
    "enable_checkpointing=false",
    "eval_interval=-1",
    "generate_prompt=",
)


def measure(quick: bool) -> list[Measurement]:
    """The share of the time of all updates but the first that was spent waiting for a batch."""
    return [_of_a_run(quick), *(_of_a_far_store(scheme, quick) for scheme in SCHEMES)]


def _of_a_run(quick: bool) -> Measurement:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cache, log, tokens, run_dir = (
            folder / "cache",
            folder / "log",
            folder / "tokens",
            folder / "run",
        )
        finish(start("maxbatch", "prepare", "--output", str(tokens), log=log, cache=cache), log)
        data = ("dataset_type=tokens", f"dataset_path={tokens}", f"run_dir={run_dir}")
        model = _QUICK_MODEL if quick else _MODEL
        steps = f"steps={6 if quick else 30}"
        finish(start("maxbatch", "train", *model, *_RUN, *data, steps, log=log, cache=cache), log)
        records = metrics_of(run_dir)[1:]
        waited, lasted = (sum(r[key] for r in records) for key in ("data_wait_s", "step_time_s"))
        shares = [r["data_wait_fraction"] for r in records]
        return Measurement(
            "share of step time waiting for data", waited / lasted, samples=shares, bar=BAR
        )


def _of_a_far_store(scheme: str, quick: bool) -> Measurement:
    """Measures the feed of a run with steps of 100 ms, on any machine."""
    steps = 10 if quick else 200
    with serving(scheme) as store, tempfile.TemporaryDirectory() as folder:
        bucket = store.bucket()
        prepare(bucket, Path(folder))
        store.plan(delay_s=_DELAY_S)
        data = ("dataset_type=tokens", f"dataset_path={bucket}/tokens", "max_target_length=256")
        config = load_config(overrides=[*data, f"per_device_batch_size={_ROWS}", f"steps={steps}"])
        waits, begun = [], time.perf_counter()
        with open_feed(config) as feed:
            for _ in feed:
                waits.append(time.perf_counter() - begun)
                time.sleep(_STEP_S)
                begun = time.perf_counter()
    shares = [wait / (wait + _STEP_S) for wait in waits[1:]]
    waited = sum(waits[1:])
    name = f"{scheme} 50 ms away, {_ROWS} rows in 100 ms: share of the time waiting for data"
    return Measurement(
        name, waited / (waited + _STEP_S * len(shares)), samples=shares, bar=REMOTE_BAR
    )
