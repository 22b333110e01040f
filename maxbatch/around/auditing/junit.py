"""An audit as a JUnit XML file, which CI systems show: one test case for each promise."""

from __future__ import annotations

import re
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from maxbatch.around.auditing.audit import Audit

# https://www.w3.org/TR/xml/#charsets
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_xml(name: str, outcome: Audit) -> str:
    """Returns the XML of an audit: a failure for a broken promise, skipped for one that is not
    applicable.

    Args:
      name: of the test suite, such as `trainer.py:make`.
    """
    broken = len(outcome.broken)
    skipped = sum(verdict.status == "not applicable" for verdict in outcome.verdicts)
    suite = _suite(name, tests=len(outcome.verdicts), failures=broken, errors=0, skipped=skipped)
    for verdict in outcome.verdicts:
        case = SubElement(suite, "testcase", classname=_text(name), name=verdict.promise)
        if verdict.status == "broken":
            message = "; ".join(filter(None, (verdict.explanation, verdict.reason)))
            failure = SubElement(
                case, "failure", type=verdict.cause or "not recognised", message=_text(message)
            )
            failure.text = _text(f"{verdict.sentence}: broken\nsmallest case: {verdict.case}")
        elif verdict.status == "not applicable":
            SubElement(case, "skipped", message=_text(verdict.reason))
    return _document(suite)


def junit_xml_of_error(name: str, message: str) -> str:
    """Returns the XML of an audit that could not run: one test case with an error."""
    suite = _suite(name, tests=1, failures=0, errors=1, skipped=0)
    SubElement(
        SubElement(suite, "testcase", classname=_text(name), name="audit"),
        "error",
        message=_text(message),
    )
    return _document(suite)


def _suite(name: str, **counts: int) -> Element:
    return Element(
        "testsuite",
        {"name": _text(f"maxbatch audit {name}")} | {key: str(n) for key, n in counts.items()},
    )


def _document(suite: Element) -> str:
    suites = Element("testsuites")
    suites.append(suite)
    indent(suites)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{tostring(suites, encoding="unicode")}\n'


def _text(text: str) -> str:
    """Returns a text without the characters that XML does not allow."""
    return _NOT_XML.sub("?", text)
