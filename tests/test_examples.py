"""Every example runs as it stands, and does what it says."""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import jax
import pytest

from tests.helpers.tiny import read_metrics

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(autouse=True)
def promote_as_users_do() -> Iterator[None]:
    """Examples run with JAX's own defaults."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {"own_loop", "own_loss", "own_logger"}


def test_a_loop_of_ones_own_learns() -> None:
    losses = example("own_loop").main()
    assert len(losses) == 20 and losses[-1] < losses[0]


def test_a_loss_of_ones_own_learns_and_resumes() -> None:
    module = example("own_loss")
    assert module.main("run").position.step == 20
    metrics = read_metrics("run")
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    assert module.main("run").position.step == 20


def test_a_logger_of_ones_own_has_every_record() -> None:
    example("own_logger").main("run")
    with Path("run.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["data_fingerprint"] for row in rows] == [m["data_fingerprint"] for m in read_metrics("run")]
