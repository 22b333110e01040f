"""One report of a test's phase, merged from the hosts' reports."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import pytest
from _pytest._code.code import ExceptionChainRepr, ExceptionRepr, ReprFileLocation, ReprTraceback

from maxbatch.testing.hosts import Failure, Round
from maxbatch.testing.messages import Reported
from maxbatch.testing.pod import named

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_MOST_SHOWN = 3  # failures shown with their traceback
_Chain = list[tuple[ReprTraceback, ReprFileLocation | None, str | None]]


@dataclass
class Merged:
    """The report of a phase over all hosts."""

    outcome: Literal["passed", "failed", "skipped"] = "passed"
    longrepr: Any = None
    wasxfail: str | None = None  # the reason of an expected failure
    raises: bool = False  # a host failed, other than by passing unexpectedly
    user_properties: list[tuple[str, object]] = field(default_factory=list)
    sections: list[tuple[str, str]] = field(default_factory=list)


class _Shown(NamedTuple):
    hosts: list[int]
    heading: str  # "": the hosts
    message: str  # of pytest's summary
    chain: _Chain


def merge(item: pytest.Item, phase: str, outcome: Round) -> Merged:
    """Returns one report of the answers of all hosts.

    The phase failed if it failed on any host; equal failures count once. If the first failure was
    expected (xfail), so were those that followed from it.
    """
    answers = {
        host: answer
        for host, answer in sorted(outcome.answers.items())
        if isinstance(answer, Reported)
    }
    reports = {host: _report(item, answer) for host, answer in answers.items()}
    every = list(reports.values())
    merged = Merged()
    for host, report in reports.items():
        merged.sections += [(f"{title} (host {host})", text) for title, text in report.sections]
        merged.user_properties += [
            pair for pair in report.user_properties if pair not in merged.user_properties
        ]
    merged.wasxfail = next(
        (report.wasxfail for report in every if hasattr(report, "wasxfail")), None
    )
    skipped = {host: report for host, report in reports.items() if report.skipped}
    expected = [host for host, report in skipped.items() if hasattr(report, "wasxfail")]
    passed_wrongly = {host: report for host, report in reports.items() if _is_strict_xpass(report)}
    causes = [failure for failure in outcome.failures if failure.host not in passed_wrongly]
    if causes and causes[0].host in expected:
        merged.outcome, merged.longrepr = "skipped", skipped[causes[0].host].longrepr
    elif causes:
        merged.outcome, merged.raises = "failed", True
        merged.longrepr = _representation(
            item, [_shown(failure, reports.get(failure.host)) for failure in causes]
        )
    elif passed_wrongly:
        merged.outcome, merged.longrepr = "failed", next(iter(passed_wrongly.values())).longrepr
    elif len(skipped) == len(every) and skipped:
        merged.outcome, merged.longrepr = "skipped", next(iter(skipped.values())).longrepr
    elif skipped and phase == "setup":
        why = next(iter(skipped.values())).longrepr
        text = (
            f"skipped on {named(list(skipped))} alone: {why[2] if isinstance(why, tuple) else why}"
        )
        merged.outcome, merged.raises = "failed", True
        merged.longrepr = _representation(item, [_Shown(list(skipped), "", text, [_text(text)])])
    return merged


def _report(item: pytest.Item, answer: Reported) -> pytest.TestReport:
    report = item.config.hook.pytest_report_from_serializable(
        config=item.config, data=dict(answer.report)
    )
    assert isinstance(report, pytest.TestReport)
    return report


def _is_strict_xpass(report: pytest.TestReport) -> bool:
    return (
        report.failed
        and isinstance(report.longrepr, str)
        and report.longrepr.startswith("[XPASS(strict)]")
    )


def _shown(failure: Failure, report: pytest.TestReport | None) -> _Shown:
    shown = report.longrepr if failure.report and report else failure.text
    if isinstance(shown, ExceptionRepr):
        chain: _Chain = [(shown.reprtraceback, shown.reprcrash, None)]
        if isinstance(shown, ExceptionChainRepr):
            chain = list(shown.chain)
        return _Shown([failure.host], "", shown.reprcrash.message if shown.reprcrash else "", chain)
    text = str(shown).strip("\n")
    return _Shown(
        [failure.host], failure.what, failure.what or text.rpartition("\n")[2], [_text(text)]
    )


def _representation(item: pytest.Item, failures: Sequence[_Shown]) -> ExceptionChainRepr:
    """Returns the failures in pytest's own form, which pytest-xdist can send, each under its
    hosts.
    """
    groups: dict[object, list[_Shown]] = {}
    for failure in failures:
        crash = failure.chain[-1][1]
        where = (crash.path, crash.lineno) if crash else str(failure.chain[0][0])
        groups.setdefault((failure.heading, _ADDRESS.sub("", failure.message), where), []).append(
            failure
        )
    shown = [
        min(group, key=lambda failure: failure.hosts)._replace(
            hosts=sorted(host for failure in group for host in failure.hosts)
        )
        for group in groups.values()
    ]
    chain: _Chain = []
    for failure in shown[:_MOST_SHOWN]:
        heading = f"{named(failure.hosts)} {failure.heading}".strip()
        chain += [_text(f"{' ' + heading + ' ':-^80}"), *failure.chain]
    for failure in shown[_MOST_SHOWN:]:
        chain.append(_text(f"{named(failure.hosts)}: {failure.message}"))
    first = shown[0]
    at = first.chain[-1][1]
    path, line = (at.path, at.lineno) if at else (str(item.path), (item.location[1] or 0) + 1)
    message = f"{named(first.hosts)}{' ' if first.heading else ': '}{first.message}"
    traceback, _, description = chain[-1]
    chain[-1] = (traceback, ReprFileLocation(path, line, message), description)
    return ExceptionChainRepr(chain)


def _text(text: str) -> tuple[ReprTraceback, None, None]:
    return ReprTraceback(reprentries=[], extraline=text.rstrip(), style="long"), None, None
