"""Checks of a run's numbers against bounds: what a continuous integration job asks of a merge.

A check passes only on numbers that are there. What was not measured is skipped, with the reason. `self_checks` are
claims that are exact in theory, with the error up to which they count as holding: this is the one home of those limits.
"""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from driftlens.errors import ChecksFailedError
from driftlens.records.check_rows import Absent, Selection, select
from driftlens.records.run import DriftRun

Relation = Literal[">=", "<=", ">", "<"]
Severity = Literal["error", "warn"]
Status = Literal["pass", "warn", "fail", "skip"]
Aggregate = Literal["worst", "mean", "max", "min", "median"]

Array = NDArray[np.float64]
Number = TypeVar("Number", float, Array)

_AVERAGES: Mapping[str, Callable[[Array], float]] = {
    "mean": lambda values: float(np.mean(values)),
    "median": lambda values: float(np.median(values)),
}


@dataclass(frozen=True)
class Check:
    """One bound on some rows of a table. `spec.checks` makes these from a file, and refuses what makes no sense.

    Attributes:
        metric: a numeric column of `table`.
        table: name of the table.
        bounds: what the value is held against.
        where: which rows: column to value; `layer` may be "final".
        per: columns that each group of rows, judged by itself, shares.
        aggregate: what of a group is judged; "worst" is the row nearest to breaking a bound, so every row must hold.
        change: the variants (from, to) whose relative change, (to - from) / |from|, is judged row by row.
        severity: whether breaking it fails the run or only warns.
        name: what messages call it.
    """

    metric: str
    table: str
    bounds: Mapping[Relation, float]
    where: Mapping[str, str | int] = field(default_factory=dict)
    per: tuple[str, ...] = ()
    aggregate: Aggregate = "worst"
    change: tuple[str, str] | None = None
    severity: Severity = "error"
    name: str = ""


@dataclass(frozen=True)
class CheckResult:
    """How one check ended for one group of rows.

    Attributes:
        name: of the check.
        metric: what was judged.
        group: what the rows share, by `per`.
        status: pass, warn or fail; skip where the numbers it needs are not all there.
        value: what was held against the bound; NaN where there is none.
        relation: of the bound that is nearest to being broken.
        threshold: that bound.
        margin: how far the value is on the right side of it; negative where it is broken.
        n: measured rows behind the value.
        where: the row that the value is of, where it is of one.
        reason: why it was skipped, or how it failed; empty where it passed.
        ci_low: lower end of the value's 95 % interval, paired by sample: of the change of a row's mean drift; else NaN.
        ci_high: its upper end.
    """

    name: str
    metric: str
    group: Mapping[str, str | int]
    status: Status
    value: float
    relation: Relation
    threshold: float
    margin: float
    n: int
    where: str = ""
    reason: str = ""
    ci_low: float = math.nan
    ci_high: float = math.nan

    @property
    def title(self) -> str:
        """The check's name, with its group."""
        group = ", ".join(f"{key} {value}" for key, value in self.group.items())
        return f"{self.name} [{group}]" if group else self.name


@dataclass(frozen=True)
class CheckReport:
    """How all checks of a run ended, in the order they were given."""

    run: DriftRun
    results: tuple[CheckResult, ...]

    def count(self, status: Status) -> int:
        """How many checks ended so."""
        return sum(result.status == status for result in self.results)

    @property
    def executed(self) -> int:
        """How many checks had the numbers they need."""
        return len(self.results) - self.count("skip")

    @property
    def failed(self) -> tuple[CheckResult, ...]:
        """The results that fail the run."""
        return tuple(result for result in self.results if result.status == "fail")

    def raise_if_failed(self) -> CheckReport:
        """This report, unless a check failed. One that was skipped or only warns does not.

        Raises:
            ChecksFailedError: a check failed; each is named with its value and bound.
        """
        if self.failed:
            lines = [f"{result.title}: {result.reason}" for result in self.failed]
            count = f"{len(lines)} of {self.executed} checks failed"
            raise ChecksFailedError("; ".join([count, *lines]), results=self.failed)
        return self


def run_checks(run: DriftRun, checks: Sequence[Check]) -> CheckReport:
    """The verdicts of `checks` on a run, one per check and group.

    Raises:
        RunError: a table can't be read.
    """
    return CheckReport(run, tuple(result for check in checks for result in _judge(run, check)))


def run_self_checks(run: DriftRun) -> CheckReport:
    """The verdicts of what every run checks about itself.

    Raises:
        RunError: a table can't be read.
    """
    return CheckReport(run, tuple(_of_self_check(check) for check in self_checks(run)))


def _of_self_check(check: SelfCheck) -> CheckResult:
    is_measured = not math.isnan(check.largest)
    reason = "" if check.holds else "not measured"
    if is_measured and not check.holds:
        reason = f"{check.largest:.2g} at {check.where}, wanted <= {check.limit:g}"
    return CheckResult(
        name=f"{check.name}: {check.claim}",
        metric=check.name,
        group={},
        status="pass" if check.holds else "fail" if is_measured else "skip",
        value=check.largest,
        relation="<=",
        threshold=check.limit,
        margin=check.limit - check.largest,
        n=check.n,
        where=check.where,
        reason=reason,
    )


def _judge(run: DriftRun, check: Check) -> list[CheckResult]:
    found = select(run, check.table, check.metric, check.where, check.per, check.change)
    if isinstance(found, Absent):
        return [_skipped(check, {}, found.reason)]
    return [_judge_group(check, selection) for selection in found]


def _judge_group(check: Check, selection: Selection) -> CheckResult:
    measured = np.flatnonzero(selection.rows["value"].notna())
    values = selection.rows["value"].to_numpy(dtype=float)[measured]
    if not len(values):
        return _skipped(check, selection.group, selection.lacking)
    at = _judged_row(check, values)
    with np.errstate(invalid="ignore"):
        value = _AVERAGES[check.aggregate](values) if at is None else float(values[at])
    if math.isnan(value):
        return _skipped(check, selection.group, f"the {check.aggregate} of infinite values is no number")
    margin, relation = min(
        (_margin(relation, bound, value), relation) for relation, bound in check.bounds.items()
    )
    holds = margin > 0 or (margin == 0 and relation in (">=", "<="))
    if holds and selection.lacking:
        return _skipped(check, selection.group, selection.lacking)
    place = "" if at is None else selection.row_name(int(measured[at]))
    low, high = math.nan, math.nan
    if at is not None and "low" in selection.rows:
        low, high = selection.rows[["low", "high"]].to_numpy(dtype=float)[measured[at]]
    reason = f"{value:.6g}{f' at {place}' if place else ''}, wanted {relation} {check.bounds[relation]:g}"
    return CheckResult(
        check.name,
        check.metric,
        selection.group,
        status="pass" if holds else "warn" if check.severity == "warn" else "fail",
        value=value,
        relation=relation,
        threshold=check.bounds[relation],
        margin=margin,
        n=len(values),
        where=place,
        reason="" if holds else reason,
        ci_low=float(low),
        ci_high=float(high),
    )


def _judged_row(check: Check, values: Array) -> int | None:
    """The row whose value is judged; None where it is no row's."""
    if check.aggregate == "worst":
        margins = [_margin(relation, bound, values) for relation, bound in check.bounds.items()]
        return int(np.min(margins, axis=0).argmin())
    if check.aggregate in ("max", "min"):
        return int(values.argmax() if check.aggregate == "max" else values.argmin())
    return None


def _margin(relation: Relation, bound: float, value: Number) -> Number:
    """How far a value is on the right side of a bound."""
    return value - bound if relation in (">=", ">") else bound - value


def _skipped(check: Check, group: Mapping[str, str | int], reason: str) -> CheckResult:
    relation, bound = next(iter(check.bounds.items()))
    return CheckResult(
        check.name, check.metric, group, "skip", math.nan, relation, bound, math.nan, n=0, reason=reason
    )


@dataclass(frozen=True)
class SelfCheck:
    """The largest error of one exact claim over all rows; NaN when it was not measured.

    Attributes:
        name: short name.
        claim: what is exact in theory.
        largest: the largest error found.
        limit: up to which the claim counts as holding; beyond what rounding and quadrature explain, it does not.
        where: the row with the largest error.
        n: rows behind it.
    """

    name: str
    claim: str
    largest: float
    limit: float
    where: str
    n: int = 0

    @property
    def holds(self) -> bool:
        """Whether the claim was checked and holds."""
        return self.largest <= self.limit  # false for NaN


def self_checks(run: DriftRun) -> list[SelfCheck]:
    """The largest error of each claim that a run checks about itself.

    Raises:
        RunError: a table can't be read.
    """
    layers, outputs = run.layers(), run.outputs()
    sums = _share_sums(layers)
    return [
        _largest(layers, "closure_error", 1e-4, "closure", "drift equals that of ordinary forward passes"),
        _largest(
            layers, "jacobian_error", 1e-2, "Jacobian", "propagation equals Jacobian times incoming drift"
        ),
        _largest(sums, "remainder", 1e-2, "contributions", "shares of the final drift sum to 1"),
        _largest(
            outputs, "softmax_integral_error", 1e-9, "softmax", "its change is the integral of its Jacobian"
        ),
        _largest(
            outputs, "ce_integral_error", 1e-6, "cross-entropy", "its change is the integral of its gradient"
        ),
    ]


def _share_sums(layers: pd.DataFrame) -> pd.DataFrame:
    """How far the shares of each task and variant are from their exact sum, at the head's row.

    Those by prefix swaps telescope to the very drift that they are divided by, whatever a layer does: no check.
    """
    last = layers.groupby(["task", "variant"], sort=False).tail(1)
    return last.assign(remainder=last["remainder_share"].astype(float).abs())


def _largest(rows: pd.DataFrame, column: str, limit: float, name: str, claim: str) -> SelfCheck:
    measured = rows[rows[column].notna()]
    if measured.empty:
        return SelfCheck(name, claim, math.nan, limit, "")
    worst = measured.iloc[int(measured[column].to_numpy(dtype=float).argmax())]
    place = f"layer {worst['layer']}" if "layer" in measured else f"sample {worst['sample_id']}"
    where = f"task {worst['task']}, {worst['variant']}, {place}"
    return SelfCheck(name, claim, float(worst[column]), limit, where, len(measured))


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
