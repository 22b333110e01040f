"""Whatever the layout, updates hold the rows of the list that leaves the holes out, and a resume
that changes the holes ahead goes on in that list.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import jax
import numpy as np
import pytest

from maxbatch import BatchPlan
from maxbatch.config.config import Config
from maxbatch.data.feed.feed import Feed
from maxbatch.data.feed.placement import Placement, is_loading
from maxbatch.data.stream.fingerprint import fingerprint
from maxbatch.data.stream.stream import Stream, open_stream
from maxbatch.parallel.mesh import make_mesh
from maxbatch.parallel.sharding import batch_sharding
from maxbatch.plan.batch import ResumePoint
from maxbatch.plan.holes import Holes
from maxbatch.plan.place import Place
from maxbatch.plan.skip_samples import holes_of
from maxbatch.run.compile.ladder import plan_shapes
from tests.helpers.corpus import LENGTH, some_texts, write_jsonl
from tests.helpers.tiny import tiny_config

EPOCH = 40
CONSTANT, RAMP = ("global_batch_size=8",), ("batch_size_schedule=0:4 12:8 37:16",)
HOLES = {
    "one inside of a batch": "10:12",
    "one over an epoch's end": f"{EPOCH - 5}:{EPOCH + 7}",
    "a whole epoch": f"{EPOCH}:{2 * EPOCH}",
    "a thousand": " ".join(f"{3 * i}:{3 * i + 1 + i % 2}" for i in range(1000)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    for name, seed in (("web", 0), ("code", 1)):
        write_jsonl(folder / f"{name}.jsonl", [{"text": text} for text in some_texts(30, seed)])
    return folder


def config_of(folder: Path | None, batch: tuple[str, ...], holes: str, *overrides: str) -> Config:
    """A config of a mixture in a folder, else of an epoch of 40 samples."""
    stated = ("max_target_length=16", "per_device_batch_size=4", *batch, f"skip_samples={holes}")
    data = (f"synthetic_samples={EPOCH}", "num_epochs=3")
    if folder:
        path = f"{folder}/web.jsonl,0.7;{folder}/code.jsonl,0.3"
        data = ("dataset_type=jsonl", f"dataset_path={path}", "packing=false", "train_samples=100")
    return tiny_config(*stated, *data, *overrides)


def updates(
    config: Config, devices: int, expansion: int, start: tuple[int, int] = (0, 0)
) -> Iterator[tuple[int, int, str]]:
    """Yields samples_seen before each update, its samples, and the fingerprint of its rows, on
    hosts of one device of which one in `expansion` loads.
    """
    stream = open_stream(config)
    plan = BatchPlan.from_config(
        config,
        devices,
        samples_per_epoch=stream.samples_per_epoch,
        resume=ResumePoint(start[0], Place(start[1])),
    )
    sharding = batch_sharding(make_mesh(config, jax.devices()[:devices]))
    placement = Placement(sharding, LENGTH, expansion)
    placement._device_loads = np.array([is_loading(host, expansion) for host in range(devices)])
    (shape, *_) = plan_shapes(plan.stages)
    with Feed(stream, plan.manager, lambda *_: shape, placement, start[0]) as feed:
        for staged in feed:
            names = ("tokens", "segments", "weights")
            parts = [
                {
                    name: np.asarray(array[part] if expansion > 1 else array).reshape(-1, LENGTH)
                    for name, array in zip(names, staged.batch[:3], strict=True)
                }
                for part in range(expansion)
            ]
            real = [part["segments"].any(axis=1) for part in parts]
            rows = [
                {name: array[rows] for name, array in part.items()}
                for part, rows in zip(parts, real, strict=True)
            ]
            assert sum(map(np.sum, real)) == staged.planned.num_rows
            yield staged.planned.first_sample, staged.planned.num_rows, fingerprint(rows)


def kept_by(holes: Holes) -> list[int]:
    left_out = {own for first, end in holes for own in range(first, min(end, 5000))}
    return [own for own in range(5000) if own not in left_out]


def assert_from_list(found: list[tuple[int, int, str]], whole: Stream, own: list[int]) -> None:
    """Checks that updates hold the samples of a list, one after the other."""
    for first, count, of_rows in found:
        assert of_rows == fingerprint([whole.batch(own[first : first + count])])
    assert all(a[0] + a[1] == b[0] for a, b in pairwise(found))


@pytest.mark.parametrize("name", HOLES)
@pytest.mark.parametrize(
    ("batch", "is_mixture"),
    [(CONSTANT, False), (RAMP, True)],
    ids=["constant", "ramp of a mixture"],
)
def test_updates_on_any_layout_hold_the_rows_of_the_list(
    name: str, batch: tuple[str, ...], is_mixture: bool, folder: Path
) -> None:
    source = folder if is_mixture else None
    whole = open_stream(config_of(source, batch, ""))
    config = config_of(source, batch, HOLES[name])
    own = kept_by(holes_of(config.plan))
    one_device = list(updates(config, 1, 1))
    assert_from_list(one_device, whole, own)
    total = one_device[-1][0] + one_device[-1][1]
    assert total == (100 if source else sum(number < 3 * EPOCH for number in own))
    assert list(updates(config, 4, 2)) == one_device, "one host of two loads"
    finer = config_of(source, batch, HOLES[name], "per_device_batch_size=1")
    assert list(updates(finer, 2, 1)) == one_device, "more accumulation steps"


@pytest.mark.parametrize(("steps", "batch", "is_mixture"), [(1, CONSTANT, True), (4, RAMP, False)])
def test_a_resume_that_changes_the_holes_ahead_goes_on_in_the_list(
    steps: int, batch: tuple[str, ...], is_mixture: bool, folder: Path
) -> None:
    source = folder if is_mixture else None
    first = config_of(source, batch, "1:3 50:60")
    holes = holes_of(first.plan)
    begun = list(updates(first, 1, 1))[:steps]
    seen = begun[-1][0] + begun[-1][1]
    position = holes.position_after(seen)
    later = Holes([(position, position + 2), (position + 5, position + 9), (70, 85)])
    changed = holes.before(position).merged_with(later)
    config = config_of(source, batch, changed.text)
    rest = list(updates(config, 4, 2, (steps, seen)))
    assert_from_list(begun + rest, open_stream(config_of(source, batch, "")), kept_by(changed))
    assert rest == list(updates(config, 1, 1))[steps:], "as a run that had them from its start"
