"""The audit: a verdict on every promise, with the smallest counterexample and the cause of a broken
one.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from maxbatch.around.auditing.bench import Bench, Broken
from maxbatch.around.auditing.causes import CAUSES, cause, divides_by_zero, terms
from maxbatch.around.auditing.compare import LEAST as LEAST_DISTANCE
from maxbatch.around.auditing.compare import TIMES
from maxbatch.around.auditing.data import Data, RowSpec
from maxbatch.around.auditing.promises import PROMISES, Promise, Side, whole
from maxbatch.around.auditing.resuming import ImportMake
from maxbatch.around.auditing.trainer import Layout, Make, Refused, Subject
from maxbatch.system.errors import ConfigError

LEAST = {"length": 4, "vocab_size": 4, "updates": 2, "seed": 0}
_ROWS = 8


@dataclass(frozen=True)
class Case:
    """The smallest counterexample of a broken promise."""

    rows: int  # including rows of zero weight
    padding_rows: int  # rows of zero weight after the others
    layout: Layout
    updates: int  # updates after which the runs differ
    trained_tokens: tuple[int, ...]  # of each micro-batch, or of each device if there is one pass
    saved_after: int = 0  # updates before the resume; 0: none
    in_new_process: bool = False  # the resume is

    def __str__(self) -> str:
        devices, passes, per_pass = self.layout
        cut = f"{_many(passes, 'pass', 'passes')} of {per_pass} on {_many(devices, 'device')}"
        padding = f" ({self.padding_rows} of padding)" if self.padding_rows else ""
        saved = f", saved after {self.saved_after}" if self.saved_after else ""
        saved += ", resumed in a new process" * self.in_new_process
        tokens = " + ".join(map(str, self.trained_tokens))
        return (
            f"{_many(self.rows, 'row')}{padding}, {cut}, {_many(self.updates, 'update')}{saved}; "
            f"tokens {tokens}"
        )


@dataclass(frozen=True)
class Verdict:
    """The verdict on one promise."""

    promise: str  # a name of the table of promises
    sentence: str
    status: str  # "holds", "broken" or "not applicable"
    # the reason if not applicable, the extent of a partial trial, or the exception that broke it
    reason: str = ""
    cause: str | None = None  # a name of the table of causes, if an experiment proves it
    # of a broken promise: the cause in words, or its effect if no cause is proved
    explanation: str = ""
    # the parameter that differs most; None: only the reported loss differs
    array: str | None = None
    # its difference, relative to the movement of the parameters; None: not a number
    by: float | None = None
    loss_by: float | None = None  # the relative difference of the reported loss; 0: none
    terms: tuple[str, ...] = ()  # reported scalars beside the loss that change with it
    case: Case | None = None


@dataclass(frozen=True)
class Audit:
    """The result of an audit: a verdict on every promise.

    Attributes:
      verdicts: in the order of the table of promises.
      spread: of the parameters over permutations of the same rows, relative to their movement
        (median of the arrays).
      tolerance: the largest difference allowed of parameters: 10 spreads plus 1e-5.
      loss_spread, loss_tolerance: the same for the reported loss, relative to it; None if none is
        reported.
      nan: the effect of a weight that is NaN; no promise covers it.
    """

    verdicts: tuple[Verdict, ...]
    spread: float
    tolerance: float
    loss_spread: float | None
    loss_tolerance: float | None
    nan: str

    @property
    def holds(self) -> bool:
        """Whether no promise is broken."""
        return not self.broken

    @property
    def broken(self) -> tuple[Verdict, ...]:
        """The verdicts on broken promises."""
        return tuple(verdict for verdict in self.verdicts if verdict.status == "broken")

    def to_json(self) -> dict[str, object]:
        """Returns the audit as an object of JSON."""
        promises = [asdict(verdict) for verdict in self.verdicts]
        for promise, verdict in zip(promises, self.verdicts, strict=True):
            if verdict.case is not None:
                promise["case"]["layout"] = verdict.case.layout._asdict()
        return {
            "holds": self.holds,
            "spread": self.spread,
            "tolerance": self.tolerance,
            "loss_spread": self.loss_spread,
            "loss_tolerance": self.loss_tolerance,
            "nan": self.nan,
            "promises": promises,
        }

    def __str__(self) -> str:
        """Returns the broken promises, a line each."""
        lines = [
            f"{each.promise}: {each.explanation}; smallest case: {each.case}"
            for each in self.broken
        ]
        return "\n".join(lines) or "no promise is broken"


def audit(
    make: Make,
    *,
    length: int = 8,
    vocab_size: int = 8,
    updates: int = 4,
    seed: int = 0,
    import_make: ImportMake | None = None,
) -> Audit:
    """Runs a trainer on the same rows in different layouts, and judges whether its update depends
    on the layout.

    Args:
      make: is called with a `Layout` (`num_devices`, `gradient_accumulation_steps`,
        `rows_per_pass`) and returns a trainer: an object with `init()`, which returns a new state,
        `step(state, batch)`, which returns the state after one update on the whole batch and a
        mapping of scalars ("loss" among them, or None), and `params(state)`, which returns a
        mapping of names to NumPy arrays. It raises an exception for a layout that it does not
        support. A batch is a dict of NumPy arrays, [B, L]: `tokens` (int32), `weights` (float32, of
        each token as the one predicted) and `segments` (int32, 0 at padding).
      length: L, tokens of a row.
      vocab_size: V; the tokens are 1 to V - 1.
      updates: over which two runs are compared.
      seed: of the rows.
      import_make: a picklable function that returns `make` in a new process, which resumes a saved
        state. None: the new process imports `make` by its name; a `make` without one, such as a
        lambda, is resumed only in this process.

    Returns:
      A verdict on every promise. `audit(make).holds` is what a test asserts.

    Raises:
      ConfigError: the trainer cannot be used.
    """
    for name, value in (
        ("length", length),
        ("vocab_size", vocab_size),
        ("updates", updates),
        ("seed", seed),
    ):
        if value < LEAST[name]:
            raise ConfigError(
                f"{name}={value}: must be at least {LEAST[name]}; works: {name}={LEAST[name]}"
            )
    subject = Subject(make)
    bench = Bench(subject, Data(length, vocab_size, updates, seed), import_make)
    judged: list[tuple[Promise, Broken | None, str]] = []
    for promise in PROMISES:
        broken, reason = bench.first_broken(promise, promise.rows)
        judged.append((promise, broken, reason))
    # a fault that appears only with these rows was rounding
    if any(broken for _, broken, _ in judged):
        other = Bench(subject, Data(length, vocab_size, updates, seed + 1), import_make)
        judged = [
            (promise, broken and other.first_broken(promise, promise.rows)[0] and broken, reason)
            for promise, broken, reason in judged
        ]
    verdicts: list[Verdict] = []
    causes: dict[str, str | None] = {promise.name: None for promise, broken, _ in judged if broken}
    for promise, broken, reason in judged:
        if broken is None:
            status = "not applicable" if reason else "holds"
            if promise.name == "resume" and not reason and bench.no_process:
                reason = f"in this process, and no new one could try: {bench.no_process}"
            verdicts.append(Verdict(promise.name, promise.sentence, status, reason))
            continue
        smallest = bench.smallest(promise, broken)
        causes[promise.name] = cause(bench, promise.name, smallest, causes)
        verdicts.append(_verdict(bench, promise, smallest, causes[promise.name]))
    within, reports_loss = bench.tolerance, bool(bench.base.losses)
    return Audit(
        tuple(verdicts),
        spread=within.spread,
        tolerance=LEAST_DISTANCE + TIMES * within.spread,
        loss_spread=within.loss if reports_loss else None,
        loss_tolerance=within.of_loss if reports_loss else None,
        nan=_nan(bench),
    )


def _verdict(bench: Bench, promise: Promise, broken: Broken, name: str | None) -> Verdict:
    side, gap = broken.trial.second, broken.difference
    weights = bench.data.batches(side.rows)[0]["weights"]
    tokens = tuple(int(weights[slice(*piece)].sum()) for piece in side.pieces)
    case = Case(
        side.rows.rows_given,
        side.rows.padding,
        side.layout,
        gap.update,
        tokens,
        side.save_after,
        side.in_new_process,
    )
    by = gap.by if gap.array and np.isfinite(gap.by) and not broken.trial.must_differ else None
    return Verdict(
        promise.name,
        promise.sentence,
        "broken",
        reason=broken.raised,
        cause=name,
        explanation=CAUSES[name] if name else _effect(bench, promise, broken),
        array=gap.array,
        by=by,
        loss_by=gap.loss_by if np.isfinite(gap.loss_by) else None,
        terms=()
        if broken.raised or broken.trial.must_differ
        else tuple(terms(bench, broken.trial)),
        case=case,
    )


def _effect(bench: Bench, promise: Promise, broken: Broken) -> str:
    """Returns the effect of a broken promise whose cause is not proved."""
    if not broken.raised and divides_by_zero(bench, broken.trial.second):
        return "a row, a micro-batch or a device without a trained token gives NaN, as 0 / 0 does"
    return f"{promise.effect}; cause not recognised"


def _nan(bench: Bench) -> str:
    """Returns the effect of a NaN among the weights of the second update, in one pass and in one of
    two passes.
    """
    rows = RowSpec(_ROWS, poisoned=True)
    in_one, in_two = (
        _after_nan(bench, Side(layout, rows)) for layout in (whole(_ROWS), Layout(1, 2, _ROWS // 2))
    )
    return (
        in_one if in_one == in_two else f"{in_one} if the batch is one pass; {in_two} if it is two"
    )


def _after_nan(bench: Bench, side: Side) -> str:
    try:
        run = bench.run(side)
    except Refused as refused:
        return f"the trainer raises {refused}"
    finite = [all(np.isfinite(array).all() for array in params.values()) for params in run.params]
    if not finite[2]:
        return "the parameters are no longer finite" if not finite[-1] else "the parameters recover"
    if all(np.array_equal(run.params[1][name], run.params[2][name]) for name in run.params[1]):
        return "the update is skipped"
    return "the parameters stay finite and change"


def _many(number: int, name: str, plural: str = "") -> str:
    return f"{number} {name if number == 1 else plural or name + 's'}"
