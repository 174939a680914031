"""Check results as JUnit XML, which continuous integration services show test by test."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

from driftlens.records.checks import CheckReport, CheckResult

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that no XML document may hold, escaped or not."""


def junit_xml(report: CheckReport) -> str:
    """One test suite, called like the run, with a test case per result; a warning passes and says so."""
    counts = {
        "tests": len(report.results),
        "failures": report.count("fail"),
        "errors": 0,
        "skipped": report.count("skip"),
    }
    attributes = {name: str(count) for name, count in counts.items()}
    root = ElementTree.Element("testsuites", attributes)
    suite = ElementTree.SubElement(root, "testsuite", {"name": _safe(report.run.name), **attributes})
    for result in report.results:
        case = ElementTree.SubElement(
            suite, "testcase", {"classname": f"driftlens.{result.metric}", "name": _safe(result.title)}
        )
        _add_outcome(case, result)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="utf-8", xml_declaration=True).decode() + "\n"


def _add_outcome(case: ElementTree.Element, result: CheckResult) -> None:
    reason = _safe(result.reason)
    if result.status == "fail":
        ElementTree.SubElement(case, "failure", {"type": "check", "message": reason}).text = reason
    elif result.status == "skip":
        ElementTree.SubElement(case, "skipped", {"message": reason})
    elif result.status == "warn":
        ElementTree.SubElement(case, "system-out").text = f"warning: {reason}"


def _safe(text: str) -> str:
    return _NOT_XML.sub("\ufffd", text)
