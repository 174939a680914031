"""Check results as sentences and a table."""

from __future__ import annotations

from driftlens.records.checks import CheckReport
from driftlens_reports.content import Section, Table
from driftlens_reports.sections.outline import TITLES
from driftlens_reports.sections.tabulate import table
from driftlens_reports.sections.verdict import outcome_of
from driftlens_reports.sections.verdict_words import check_sentence

_RELATIONS = {"<=": "≤", ">=": "≥"}


def checks_section(self_checks: CheckReport, checks: CheckReport | None) -> Section:
    """The self-checks that every run has, and the user's checks where there are any."""
    sentences = [check_sentence(outcome_of(self_checks), "self-check")]
    tables = [_table("self-checks", "Self-checks: claims that are exact in theory", self_checks)]
    if checks is not None:
        sentences.append(check_sentence(outcome_of(checks), "check"))
        tables.append(_table("checks", "Checks asked for", checks))
    return Section(name="checks", title=TITLES["checks"], sentences=tuple(sentences), tables=tuple(tables))


def _table(name: str, heading: str, report: CheckReport) -> Table:
    rows = [
        (
            result.title,
            result.status,
            result.value,
            f"{_RELATIONS.get(result.relation, result.relation)} {result.threshold:g}",
            result.margin,
            result.n,
            result.where,
            result.reason,
        )
        for result in report.results
    ]
    return table(
        name,
        heading,
        {
            "check": "text",
            "status": "text",
            "value": "error",
            "wanted": "text",
            "margin": "error",
            "rows": "count",
            "where": "text",
            "reason": "text",
        },
        rows,
    )
