"""Every example runs unchanged, and does what it promises."""

from __future__ import annotations

import csv
import importlib.util
import random
import re
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from types import ModuleType

import jax
import pytest

import maxbatch
from tests.helpers.batch_page import rows_of
from tests.helpers.tiny import read_metrics

EXAMPLES = Path(__file__).parents[1] / "examples"
# The promises that each adapter breaks, with the cause; of the others each holds, but for devices
# on one device.
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
        "audit_transformers",
        "balance_gradient",
        "batch_schedules",
        *AUDITED,
    }


def test_a_loop_of_ones_own_learns() -> None:
    losses = example("own_loop").main()
    assert len(losses) == 20 and losses[-1] < losses[0]


@pytest.mark.runs
def test_a_loss_of_ones_own_learns_and_resumes() -> None:
    module = example("own_loss")
    assert module.main("run").position.step == 20
    metrics = read_metrics("run")
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    assert module.main("run").position.step == 20


@pytest.mark.runs
def test_a_logger_of_ones_own_has_every_record() -> None:
    example("own_logger").main("run")
    with Path("run.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["data_fingerprint"] for row in rows] == [
        m["data_fingerprint"] for m in read_metrics("run")
    ]


def test_a_late_switch_has_the_updates_of_a_walk_over_the_run() -> None:
    rng, late_switch = random.Random(0), example("batch_schedules").late_switch
    for _ in range(50):
        samples, small, large = (
            rng.randrange(200, 20_000),
            rng.choice([8, 24, 64]),
            rng.choice([72, 128, 512]),
        )
        part, whole = rng.randrange(1, 100), 100
        keys = late_switch(samples, small, large, Fraction(part, whole))
        plan = maxbatch.BatchPlan.from_config(
            maxbatch.load_config(
                overrides=[f"{k}={v}" for k, v in keys.items()]
                + ["per_device_batch_size=8", "learning_rate_schedule=constant"]
            )
        )
        walked, position = [], 0
        while position < samples:
            walked.append((position, small if position * whole < part * samples else large))
            position += walked[-1][1]
        firsts = [
            update
            for update, before in zip(walked, [(0, 0), *walked], strict=False)
            if update[1] != before[1]
        ]
        stages = [stage for stage in plan.stages if stage.num_steps]
        assert [(stage.first_sample, stage.global_batch_size) for stage in stages] == firsts
        assert plan.total_steps == len(walked)


def test_nanochats_batch_is_that_of_its_formula() -> None:
    rng, nanochat = random.Random(0), example("batch_schedules").nanochat
    for number in range(500):
        reference, length = rng.randrange(10**8, 10**10), 2 ** rng.randrange(8, 12)
        tokens = int(reference * 2 ** rng.uniform(-6, 12))
        predicted, lower = 2**19 * (tokens / reference) ** 0.383, 1
        while 2 * lower <= predicted:
            lower *= 2
        nearest = lower if predicted / lower < 2**0.5 else 2 * lower
        keys = nanochat(tokens, reference, length)
        assert int(keys["global_batch_size"]) * length == nearest
        if number < 10:
            config = maxbatch.load_config(overrides=[f"{k}={v}" for k, v in keys.items()])
            scale = maxbatch.BatchPlan.from_config(config).stages[0].learning_rate_scale
            assert scale == pytest.approx((nearest / 2**19) ** 0.5)


def test_the_page_shows_the_commands_of_the_batch_schedules() -> None:
    page = (EXAMPLES.parent / "docs" / "train.md").read_text()
    assert all(command in page for command in example("batch_schedules").main())


@pytest.mark.runs
def test_a_balance_gradient_depends_on_the_cut_as_the_pages_tell() -> None:
    found = example("balance_gradient").main()
    page = (EXAMPLES.parent / "docs" / "experts.md").read_text()
    lines = re.findall(
        r"^\| (.+) \| (?:each row|the batch).* \|((?: [\d.e-]+, [\d.e-]+ \|){5})$", page, re.M
    )
    assert len(lines) == len(found)
    for (name, cells), figures in zip(lines, found.values(), strict=True):
        for cell, (length, distance) in zip(cells.split("|"), figures, strict=False):
            assert [float(x) for x in cell.split(",")] == [
                pytest.approx(length, rel=0.05),
                pytest.approx(distance, rel=0.05, abs=1e-6),
            ]
        most = max(distance for _, distance in figures)
        is_exact = "maxbatch" in name or "seq" in name or name == "MaxText"
        assert most <= 1e-5 if is_exact else most > 0.3
    formulas = {
        "balance-beside-a-sum": "MaxText",
        "balance-of-rows": "seq_aux_loss",
        "balance-of-passes": "torchtitan",
        "balance-so-far": "global_aux_loss",
    }
    assert formulas.keys() == rows_of("Balance losses of experts").keys()
    assert all(any(formula in name for name in found) for formula in formulas.values())


@pytest.mark.runs
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
    ("make", "broken"),
    [("make", {"uneven", "empty", "remainder", "padding"}), ("make_exact", set[str]())],
)
def test_an_audit_finds_the_mean_of_means_of_an_average_over_devices(
    make: str, broken: set[str]
) -> None:
    pytest.importorskip("torch")
    found = maxbatch.audit(getattr(example("audit_torch"), make), updates=2)
    check_means(found, broken)


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.parametrize(("make", "broken"), [("make", set[str]()), ("make_of_means", set(MEANS))])
def test_an_audit_finds_the_mean_of_means_of_a_model_that_takes_no_number_of_items(
    make: str, broken: set[str]
) -> None:
    pytest.importorskip("transformers")
    check_means(maxbatch.audit(getattr(example("audit_transformers"), make), updates=2), broken)


def check_means(found: maxbatch.Audit, broken: set[str]) -> None:
    """Where a part has no trained token, the trainer may raise, or Adam may hide the scale of the
    gradient.
    """
    causes = {each.promise: each.cause for each in found.broken}
    assert causes.keys() == broken, str(found)
    assert {causes[promise] for promise in broken - {"empty", "padding"}} <= {"mean of means"}
    assert set(causes.values()) <= {"mean of means", None}


def check_audit(name: str) -> None:
    found = maxbatch.audit(example(name).make, updates=2)
    assert {each.promise: each.cause for each in found.broken} == AUDITED[name], str(found)
    left_out = {each.promise for each in found.verdicts if each.status == "not applicable"}
    assert left_out == ({"devices"} if name in ("audit_nnx", "audit_multisteps") else set())
