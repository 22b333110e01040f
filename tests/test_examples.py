"""Every example runs as it stands, and does what it says."""

from __future__ import annotations

import csv
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import jax
import pytest

import maxbatch
from tests.helpers.batch_page import rows_of
from tests.helpers.tiny import read_metrics

EXAMPLES = Path(__file__).parents[1] / "examples"
# The promises that each adapter breaks, with the fault; of the others each holds, but for devices on one device.
MEANS = dict.fromkeys(("uneven", "empty", "remainder", "padding"), "mean of means")
AUDITED = {"audit_optax": {}, "audit_nnx": {}, "audit_multisteps": MEANS, "audit_maxbatch": {}}


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
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {
        "own_loop",
        "own_loss",
        "own_logger",
        "audit_torch",
        "balance_gradient",
        *AUDITED,
    }


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


def test_a_balance_gradient_depends_on_the_cut_as_the_pages_tell() -> None:
    found = example("balance_gradient").main()
    page = (EXAMPLES.parent / "docs" / "experts.md").read_text()
    lines = re.findall(r"^\| (.+) \| (?:each row|the batch).* \|((?: [\d.e-]+, [\d.e-]+ \|){5})$", page, re.M)
    assert len(lines) == len(found)
    for (name, cells), figures in zip(lines, found.values(), strict=True):
        for cell, (length, distance) in zip(cells.split("|"), figures, strict=False):
            assert [float(x) for x in cell.split(",")] == [
                pytest.approx(length, rel=0.05),
                pytest.approx(distance, rel=0.05, abs=1e-6),
            ]
        most = max(distance for _, distance in figures)
        assert most <= 1e-5 if "maxbatch" in name or "seq" in name else most > 0.3
    formulas = {"balance-beside-a-sum": "MaxText", "balance-of-rows": "seq_aux_loss", "balance-of-passes": "torchtitan",
                "balance-so-far": "global_aux_loss"}  # fmt: skip
    assert formulas.keys() == rows_of("Balance losses of experts").keys()
    assert all(sum(formula in name for name in found) == 1 for formula in formulas.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["audit_optax", "audit_multisteps"])
def test_an_audit_of_an_adapter_finds_what_it_has(name: str) -> None:
    check_audit(name)


@pytest.mark.slow
@pytest.mark.pages
@pytest.mark.parametrize("name", ["audit_nnx", "audit_maxbatch"])
def test_an_audit_that_compiles_much_finds_what_the_page_tells(name: str) -> None:
    check_audit(name)


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.parametrize(
    ("make", "broken"), [("make", {"uneven", "empty", "remainder", "padding"}), ("make_exact", set[str]())]
)
def test_an_audit_finds_the_mean_of_means_of_an_average_over_devices(make: str, broken: set[str]) -> None:
    pytest.importorskip("torch")
    found = maxbatch.audit(getattr(example("audit_torch"), make), updates=2)
    assert {each.promise for each in found.broken} == broken, str(found)
    assert all(each.fault == "mean of means" for each in found.broken)


def check_audit(name: str) -> None:
    found = maxbatch.audit(example(name).make, updates=2)
    assert {each.promise: each.fault for each in found.broken} == AUDITED[name], str(found)
    left_out = {each.promise for each in found.verdicts if each.status == "not applicable"}
    assert left_out == ({"devices"} if name in ("audit_nnx", "audit_multisteps") else set())
