"""An audit as a JUnit file: a failure for each broken promise, an error where nothing is judged."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from maxbatch.cli import main

TRAINER = """
from tests.around.auditing.numpy_trainer import Trainer
def make(layout):
    if layout.num_devices > 1:
        raise ValueError("one\\x1b device")
    return Trainer(layout, "mean of means")
def useless(layout):
    return 3
"""


def test_a_junit_file_has_a_case_for_each_promise(capsys: pytest.CaptureFixture[str]) -> None:
    Path("trainer.py").write_text(TRAINER)
    assert main(["audit", "trainer.py:make", "--junit", "audit.xml"]) == 1
    suite = ElementTree.parse("audit.xml").getroot()[0]
    assert (suite.get("name"), suite.get("tests")) == ("maxbatch audit trainer.py:make", "10")
    failures = {case.get("name"): failure for case in suite for failure in case.iter("failure")}
    assert failures.keys() == {"uneven", "empty", "remainder", "padding"}
    assert suite.get("failures") == "4" and suite.get("errors") == "0"
    assert {failure.get("type") for failure in failures.values()} == {"mean of means"}
    assert "2 rows, 2 passes of 1 on 1 device, 1 update; tokens 7 + 1" in (
        failures["uneven"].text or ""
    )
    skipped = {
        case.get("name"): each.get("message") for case in suite for each in case.iter("skipped")
    }
    assert (
        skipped == {"devices": "ValueError: one? device, trainer.py:5"}
        and suite.get("skipped") == "1"
    )
    assert capsys.readouterr().out.endswith("broken: uneven, empty, remainder, padding\n")


def test_an_audit_that_judges_nothing_is_an_error_of_the_junit_file(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("trainer.py").write_text(TRAINER)
    assert main(["audit", "trainer.py:useless", "--junit", "audit.xml"]) == 2
    suite = ElementTree.parse("audit.xml").getroot()[0]
    assert suite.get("errors") == "1"
    assert "make: must return an object with init(), step()" in (suite[0][0].get("message") or "")
    assert main(["audit", "trainer.py:useless", "--junit", "nowhere/audit.xml"]) == 2
    assert "nowhere/audit.xml" in capsys.readouterr().err
