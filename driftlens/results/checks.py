"""Checks of a run's numbers against bounds (`check`), and self-checks of claims that are exact in theory.

A check passes only on measured numbers; otherwise it is skipped with a reason. Users write checks as a YAML file:

checks:
  - {metric: accuracy, change: {points: [merged, "calibrated:featcal"]}, per: task, gte: -0.01}
"""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, StrictInt, StrictStr, model_validator

from driftlens.config.types import (
    Name,
    Number,
    SpecSection,
    Text,
    field_error,
    read_yaml_mapping,
    validate_section,
)
from driftlens.results.formatting import Kind, Table, format_number, strip_control_chars
from driftlens.results.measures import drift_changes, score_change, variant_score
from driftlens.runs.run import DriftRun, cache_on_run, open_run
from driftlens.runs.schema import TABLES
from driftlens.utils.errors import (
    ChecksFailedError,
    DataError,
    LayerNotFoundError,
    did_you_mean,
)
from driftlens.utils.files import PathLike
from driftlens.utils.intervals import Interval
from driftlens.utils.variants import ATTACHED, METRICS, calibrated_variant, metric_by_name

_Relation = Literal[">=", "<=", ">", "<"]
CHECKED_TABLES = ("layers", "outputs", "accuracy", "params", "calibration")

# Columns that can be compared with a bound; true counts as 1.
_NUMBERS = {
    name: {column.name for column in TABLES[name].columns if column.dtype != "str" and column.name != "layer"}
    for name in CHECKED_TABLES
}

_RELATIONS: Mapping[str, _Relation] = {"gte": ">=", "lte": "<=", "gt": ">", "lt": "<"}


def _parse_change(value: Any) -> Any:
    """Return the kind (`points`, `relative`, `from`) and the two variants of a change to be checked."""
    if isinstance(value, dict) and set(value) == {"from", "to"}:
        value = {"relative": [value["from"], value["to"]]}
    if not isinstance(value, dict) or len(value) != 1 or not set(value) <= {"points", "relative"}:
        raise field_error("expected two variants", 'For example {points: [merged, "calibrated:featcal"]}.')
    [(kind, ends)] = value.items()
    if not isinstance(ends, (list, tuple)) or len(ends) != 2:
        raise field_error(f"{kind}: expected two variants", f"For example {{{kind}: [base, merged]}}.")
    return {kind: tuple(ends)}


# A name or a layer; strict, because `layer: true` would select layer 1.
_Value = StrictInt | StrictStr
_Change = Annotated[dict[Literal["points", "relative"], tuple[Name, Name]], BeforeValidator(_parse_change)]


class Check(SpecSection):
    """One entry of a checks file: a metric of a table, the rows to select, and bounds on their values.

    `metric` is a numeric column of the table `home`. `where` selects rows (`layer` may be "final"); `per` splits them
    into groups that are checked separately. `agg` reduces a group to one value: "worst" is the row nearest to breaking
    a bound, so that every row must hold. With `change` the value is the change between two variants.
    """

    metric: Text
    table: Literal["layers", "outputs", "accuracy", "params", "calibration"] | None = None
    where: dict[str, _Value] = Field(default_factory=dict)
    per: Annotated[tuple[Text, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)] = ()
    agg: Literal["worst", "mean", "max", "min", "median"] = "worst"
    gte: Number | None = None
    lte: Number | None = None
    gt: Number | None = None
    lt: Number | None = None
    change: _Change | None = None
    severity: Literal["error", "warn"] = "error"
    name: Name | None = None

    @model_validator(mode="before")
    @classmethod
    def _expand_score_name(cls, entry: Any) -> Any:
        """Expand `metric: accuracy` to the value column of that score's rows."""
        metric = entry.get("metric") if isinstance(entry, Mapping) else None
        if isinstance(metric, str) and (metric in METRICS or metric.startswith(ATTACHED)):
            where = entry.get("where", {})
            # A malformed `where` is left for the field validator, which names the path of the error.
            rows = {"where": {**where, "metric": metric}} if isinstance(where, Mapping) else {}
            return {"table": "accuracy", **entry, **rows, "metric": "value"}
        return entry

    @model_validator(mode="after")
    def _require_valid_fields(self) -> Self:
        if not self.bounds:
            raise field_error("no bound", "Give at least one of gte, lte, gt, lt.")
        table = _find_table_of_metric(self.metric, self.table)
        columns = _selectable_columns(table)
        # The calibration table names calibrations; `variant` is derived from the name when rows are read.
        keys = [*TABLES[table].key, *(["variant"] if table == "calibration" else [])]
        for option, names, allowed in (("where", self.where, columns), ("per", self.per, keys)):
            for column in names:
                if column not in allowed:
                    hint = did_you_mean(column, allowed)
                    raise field_error(
                        f"{option}: no {column!r} in the table {table!r}; it has {', '.join(allowed)}", hint
                    )
        # A change already fixes both variants; choosing one more would leave no rows.
        for column in ("variant", "name"):
            if self.change is not None and (column in self.where or column in self.per):
                raise field_error(f"change compares two variants, so {column!r} can't choose one", "Leave it out.")
        return self

    @property
    def bounds(self) -> dict[_Relation, float]:
        """The bounds that the entry sets."""
        limits = {relation: getattr(self, key) for key, relation in _RELATIONS.items()}
        return {relation: bound for relation, bound in limits.items() if bound is not None}

    @property
    def metric_table(self) -> str:
        """The table that holds the metric."""
        return _find_table_of_metric(self.metric, self.table)

    @property
    def is_relative(self) -> bool:
        """True if a change is (to - from) / |from|, False if it is to - from in the metric's unit."""
        return not self.change or "relative" in self.change

    @property
    def title(self) -> str:
        """The name of the check in messages."""
        if self.name:
            return self.name
        where = dict(self.where)
        metric = str(where.pop("metric", self.metric)) if self.metric == "value" else self.metric
        words = [metric if self.agg == "worst" else f"{self.agg} {metric}"]
        for kind, (start, end) in (self.change or {}).items():
            words.append(f"{'change' if kind == 'relative' else 'difference'} from {start} to {end}")
        words.append(" and ".join(f"{relation} {bound:g}" for relation, bound in self.bounds.items()))
        rows = ", ".join(f"{key} is {value}" for key, value in where.items())
        return " ".join(words) + (f" where {rows}" if rows else "")


class _ChecksFile(SpecSection):
    """A file of checks."""

    checks: Annotated[tuple[Check, ...], Field(min_length=1)]


def load_checks(source: PathLike | Mapping[str, Any]) -> list[Check]:
    """Load checks from a YAML file or a mapping."""
    if isinstance(source, Mapping):
        return [*validate_section(_ChecksFile, dict(source), "checks").checks]
    raw = read_yaml_mapping(Path(source), "checks", "Begin with a line `checks:`.")
    return [*validate_section(_ChecksFile, raw, str(source)).checks]


def _find_table_of_metric(metric: str, table: str | None) -> str:
    """Return the table that has the metric as a column: the named one, or the only one."""
    columns = sorted(set().union(*_NUMBERS.values()) if table is None else _NUMBERS[table])
    if metric not in columns:
        text = "no table has a number" if table is None else f"the table {table!r} has no number"
        raise field_error(f"metric: {text} called {metric!r}", did_you_mean(metric, columns))
    homes = [name for name in CHECKED_TABLES if metric in _NUMBERS[name]] if table is None else [table]
    if len(homes) > 1:
        raise field_error(f"metric: {metric!r} is a column of {', '.join(homes)}", f"Add `table: {homes[0]}`.")
    return homes[0]


def _selectable_columns(table: str) -> list[str]:
    columns = [column.name for column in TABLES[table].columns if column.dtype == "str" or column.name == "layer"]
    return [*columns, "variant"] if table == "calibration" else columns


Status = Literal["pass", "warn", "fail", "skip"]
Array = NDArray[np.float64]

# Groups of rows in which a column may be undefined, such as amplification at the stem.
_GAPS_BY = {"layers": "layer", "calibration": "kind"}
# Significant digits of a value that is printed next to its limit, one more than elsewhere.
_DIGITS = 4
_WRITTEN = {"<=": "≤", ">=": "≥"}


@dataclass(frozen=True)
class CheckResult:
    """The result of one check for one group of rows.

    Attributes:
        group: the values that the rows share, by column of `per`; `where`: the row of a single value.
        status: pass, warn or fail; skip if the required numbers are incomplete.
        value: the value that was compared; NaN without one.
        relation: relation of the bound that is nearest to being broken.
        margin: distance of the value from the bound; negative if it is broken.
        n: number of measured rows.
        samples: number of samples behind the value of a single row; 0 if the table doesn't count them.
        reason: reason for skipping or failing; empty after passing.
        ci_low: lower end of the 95 % interval of a row's score, change of score, or change of mean drift; else NaN.
    """

    name: str
    metric: str
    group: Mapping[str, str | int]
    status: Status
    value: float
    relation: _Relation
    threshold: float
    margin: float
    n: int
    where: str = ""
    reason: str = ""
    ci_low: float = math.nan
    ci_high: float = math.nan
    samples: int = 0

    @property
    def claim(self) -> str:
        """The check's name without the metric; for a self-check, the identity that holds exactly in theory."""
        return self.name.removeprefix(f"{self.metric}: ")

    @property
    def title(self) -> str:
        """The check's name, with its group."""
        group = ", ".join(f"{key} {value}" for key, value in self.group.items())
        return f"{self.name} [{group}]" if group else self.name


@dataclass(frozen=True)
class CheckReport:
    """The results of all checks of a run, in the order of the checks."""

    run: DriftRun
    results: tuple[CheckResult, ...]

    def count(self, status: Status) -> int:
        """Return the number of results with this status."""
        return sum(result.status == status for result in self.results)

    @property
    def executed(self) -> int:
        """The number of checks that were not skipped for missing values."""
        return len(self.results) - self.count("skip")

    @property
    def failed(self) -> tuple[CheckResult, ...]:
        """The results that fail the run."""
        return tuple(result for result in self.results if result.status == "fail")

    def table(self, name: str = "checks", heading: str = "Checks", kind: Kind = "number") -> Table:
        """Return a table with a row per check; `kind` is the format of values."""
        kinds: dict[str, Kind] = {
            **{"check": "text", "status": "text", "value": kind, "wanted": "text", "margin": kind},
            **{"rows": "count", "where": "text", "reason": "text"},
        }
        rows = []
        for result in self.results:
            wanted = f"{_WRITTEN.get(result.relation, result.relation)} {result.threshold:g}"
            row = (result.title, result.status, result.value, wanted, result.margin)
            rows.append((*row, result.n, result.where, result.reason))
        return Table.of(name, heading, kinds, rows)

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()

    def raise_if_failed(self) -> CheckReport:
        """Return this report unless a check failed. One that was skipped or only warns does not fail.

        Raises:
            ChecksFailedError: a check failed; each is named with its value and bound.
        """
        if self.failed:
            lines = [f"{result.title}: {result.reason}" for result in self.failed]
            count = f"{len(lines)} of {self.executed} checks failed"
            raise ChecksFailedError("; ".join([count, *lines]), results=self.failed)
        return self


def check(run: DriftRun | PathLike, tests: PathLike | Mapping[str, Any] | None = None) -> CheckReport:
    """Run checks on a run and return the report; `check(...).raise_if_failed()` stops a script.

    Args:
        run: a run, or its folder.
        tests: a YAML file of checks, or the mapping in it; None runs the built-in self-checks.

    Raises:
        SpecError: the checks make no sense; path, value and remedy are named.
        RunError: the run, or one of its tables, can't be read.
    """
    opened = run if isinstance(run, DriftRun) else open_run(run)
    if tests is None:
        return run_self_checks(opened)
    return CheckReport(
        opened, tuple(result for entry in load_checks(tests) for result in _evaluate_check(opened, entry))
    )


def _evaluate_check(run: DriftRun, check: Check) -> list[CheckResult]:
    try:
        rows, shown, tasks = _select_rows(run, check)
    except (_NoRowsError, LayerNotFoundError) as error:
        return [_skipped_result(check, {}, error.message)]
    # A task without rows must not make a check pass unnoticed.
    absent = [task for task in tasks if not (rows["task"] == task).any()]
    # With `per: task` such tasks are groups of their own.
    alone = absent if "task" in check.per else []
    results = []
    for values, part in rows.groupby(list(check.per), sort=False) if check.per else [((), rows)]:
        plain = [value if isinstance(value, str) else int(value) for value in values]  # type: ignore[call-overload]
        group = dict(zip(check.per, plain, strict=True))
        results.append(_evaluate_row_group(check, group, part, shown, [] if alone else absent))
    return results + [_skipped_result(check, {"task": task}, "not measured on this task") for task in alone]


def _evaluate_row_group(
    check: Check,
    group: Mapping[str, str | int],
    rows: pd.DataFrame,
    shown: Sequence[str],
    absent_tasks: Sequence[str],
) -> CheckResult:
    """Evaluate a check on one group of rows; `shown` are the columns that identify the group."""
    lacking = _describe_missing_rows(rows, shown, absent_tasks)
    rows = rows[rows["value"].notna()]
    values = rows["value"].to_numpy(dtype=float)
    if not len(values):
        return _skipped_result(check, group, lacking)
    # How far each value is on the right side of the bound that is nearest to being broken.
    margins = np.min([_margin_to_bound(relation, bound, values) for relation, bound in check.bounds.items()], axis=0)
    judged = {"worst": margins.argmin(), "max": values.argmax(), "min": values.argmin()}.get(check.agg)
    # The mean of +inf and -inf is NaN, which is skipped below, and numpy would warn.
    with np.errstate(invalid="ignore"):
        value = float(getattr(np, check.agg)(values) if judged is None else values[judged])
    if math.isnan(value):
        return _skipped_result(check, group, f"the {check.agg} of infinite values is not a number")
    # With several bounds the one nearest to being broken decides.
    margin, relation = min(
        (_margin_to_bound(relation, bound, value), relation) for relation, bound in check.bounds.items()
    )
    holds = margin > 0 or (margin == 0 and relation in (">=", "<="))
    # Missing rows might break the bound, but a broken bound stays broken.
    if holds and lacking:
        return _skipped_result(check, group, lacking)
    row = pd.Series(dtype=float) if judged is None else rows.iloc[judged]
    low, high, samples = (row.get(name, math.nan) for name in ("low", "high", "n"))
    count = 0 if pd.isna(samples) else int(samples)
    bound, place = check.bounds[relation], "" if judged is None else _row_name(row, shown)
    size, at = f" (n = {count})" if count else "", f" at {place}" if place else ""
    reason = (
        "" if holds else f"{format_number(value, _DIGITS)}{size}{at}, wanted {relation} {_format_all_digits(bound)}"
    )
    status: Status = "pass" if holds else "warn" if check.severity == "warn" else "fail"
    return CheckResult(
        *(check.title, check.metric, group, status, value, relation, bound, margin),
        *(len(values), place, reason, float(low), float(high), count),
    )


def _format_all_digits(value: float) -> str:
    """Format a number with all digits that matter and no exponent."""
    # Ten digits hide the rounding of binary fractions: 0.1 + 0.2 is written as 0.3.
    return format(Decimal(f"{value:.10g}"), "f")


def _margin_to_bound(relation: _Relation, bound: float, value: Any) -> Any:
    """Return the distance of values from a bound, positive where the bound holds."""
    return value - bound if relation in (">=", ">") else bound - value


def _skipped_result(check: Check, group: Mapping[str, str | int], reason: str) -> CheckResult:
    relation, bound = next(iter(check.bounds.items()))
    return CheckResult(
        check.title, check.metric, group, "skip", math.nan, relation, bound, math.nan, n=0, reason=reason
    )


class _NoRowsError(DataError):
    """Raised if a check selects no rows."""


def _select_rows(run: DriftRun, check: Check) -> tuple[pd.DataFrame, list[str], list[str]]:
    """Return the rows of a check with `value` and interval ends, the columns that identify them, and its tasks."""
    rows = _rows_with_metric_value(run, check)
    selected = dict(check.where)
    if check.metric_table == "params" and not {"scope", "path"} & set(selected):
        selected["scope"] = "backbone"  # otherwise modules, layers and backbone would be mixed
    if "layer" in selected:
        selected["layer"] = run.layer_index(selected["layer"])
    for column, value in selected.items():
        rows = rows[(rows[column] == value).fillna(False).to_numpy(dtype=bool)]
        if rows.empty:
            raise _missing_row_error(run, check, column, value)
    key = [column for column in TABLES[check.metric_table].key if column in rows]
    if check.change is not None:
        ends = next(iter(check.change.values()))
        for variant in ends:
            if not (rows["variant"] == variant).any():
                raise _missing_row_error(run, check, "variant", variant)
        key = [column for column in key if column not in ("variant", "name")]
        rows = _changes_between_variants(rows, key, *ends, relative=check.is_relative)
        if check.metric_table == "accuracy" or check.metric == "drift_l2_mean":
            rows = _add_change_intervals(rows, run, check, ends)
    elif check.metric_table == "accuracy" and check.metric == "value":
        rows = rows.rename(columns={"ci_low": "low", "ci_high": "high"})
    shown = [column for column in key if column not in selected and column not in check.per]
    tasks = [task for task in run.tasks if selected.get("task", task) == task] if "task" in key else []
    return rows, shown, tasks


def _rows_with_metric_value(run: DriftRun, check: Check) -> pd.DataFrame:
    """Return the rows of a table with the checked metric in a column `value`."""
    rows: pd.DataFrame = getattr(run, check.metric_table)()  # a run's tables are its methods
    if rows.empty:
        raise _NoRowsError(f"the run has no rows in its table {check.metric_table!r}")
    if check.metric_table == "calibration":
        rows = rows.assign(variant=rows["name"].map(calibrated_variant))
    rows = rows.assign(value=rows[check.metric].astype("Float64").astype("float64"))
    # A metric that was never measured is skipped; it must not pass.
    if rows["value"].isna().all():
        raise _NoRowsError(f"{check.metric} was not measured")
    if check.metric_table not in _GAPS_BY:
        return rows
    # A layer or kind without any value is undefined there, not missing.
    return rows[rows["value"].groupby(rows[_GAPS_BY[check.metric_table]]).transform("count") > 0]


def _missing_row_error(run: DriftRun, check: Check, column: str, value: object) -> _NoRowsError:
    names = {"task": run.tasks, "variant": run.variants}.get(column, ())
    if names and value not in names and value != "expert":
        return _NoRowsError(f"the run has no {column} {value!r}; it has {', '.join(names)}")
    return _NoRowsError(f"{check.metric} was not measured where {column} is {value}")


def _changes_between_variants(
    rows: pd.DataFrame, key: list[str], start: str, end: str, *, relative: bool
) -> pd.DataFrame:
    """Return the change of each row between two variants; NaN if a value is missing or the start is 0."""
    sides = [rows[rows["variant"] == variant].set_index(key)["value"] for variant in (start, end)]
    both = pd.concat(sides, axis=1, keys=["start", "end"])
    size = both["start"].abs()
    # NaN instead of infinity: a change from 0 is skipped, not failed.
    change = (both["end"] - both["start"]) / (size.where(size > 0) if relative else 1.0)
    return change.rename("value").reset_index()


def _add_change_intervals(rows: pd.DataFrame, run: DriftRun, check: Check, change: tuple[str, str]) -> pd.DataFrame:
    ends: list[Interval] = []
    if check.metric_table == "accuracy":
        for task, name in zip(rows["task"], rows["metric"], strict=True):
            metric = metric_by_name(name)
            score = score_change(run, run, task, change, metric)
            # Intervals of scores are absolute, so a relative change has none.
            interval = Interval(math.nan) if check.is_relative else score.interval
            ends.append(replace(interval, n=variant_score(run, task, change[1], metric).n))
    else:
        by_task = {task: drift_changes(run, run, task, change) for task in rows["task"].unique()}
        kind = "relative" if check.is_relative else "difference"
        places = zip(rows["task"], rows["layer"], strict=True)
        changes = [by_task[task].get(layer) for task, layer in places]
        ends = [Interval(math.nan) if one is None else getattr(one, kind) for one in changes]
    return rows.assign(low=[e.low for e in ends], high=[e.high for e in ends], n=[e.n or math.nan for e in ends])


def _describe_missing_rows(rows: pd.DataFrame, shown: Sequence[str], absent_tasks: Sequence[str]) -> str:
    if absent_tasks:
        return f"not measured on {', '.join(absent_tasks)}"
    missing = rows[rows["value"].isna()]
    if missing.empty:
        return ""
    row = _row_name(missing.iloc[0], shown)
    return f"{len(missing)} of {len(rows)} rows were not measured" + (f", first {row}" if row else "")


def _row_name(row: pd.Series[Any], columns: Sequence[str]) -> str:
    return ", ".join(f"{column} {row[column]}" for column in columns if row[column] != "")


# Claims that are exact in theory, by name: text, table, column of the error, and its largest accepted value.
# Shares by prefix swaps are left out: they telescope to the drift that divides them, so they can't fail.
_CLAIMS = {
    "closure": ("drift equals that of ordinary forward passes", "layers", "closure_error", 1e-4),
    "Jacobian": ("propagation equals Jacobian times incoming drift", "layers", "jacobian_error", 1e-2),
    "contributions": ("shares of the final drift sum to 1", "layers", "remainder_share", 1e-2),
    "closed form": ("weights solve their normal equations", "calibration", "stationarity_error", 1e-5),
    "softmax": ("its change is the integral of its Jacobian", "outputs", "softmax_integral_error", 1e-9),
    "cross-entropy": ("its change is the integral of its gradient", "outputs", "ce_integral_error", 1e-6),
}


# Columns that locate an error, and their prefixes.
_PLACE = {
    **{"task": "task ", "variant": "", "name": "calibration ", "layer": "", "site": ""},
    "sample_id": "sample ",
}


def self_check_command(claim: str) -> str:
    """Return the command that adds the measurements for a self-check to a run."""
    _, table, column, _ = _CLAIMS[claim]
    return TABLES[table].command_to_fill([column])


@cache_on_run
def run_self_checks(run: DriftRun) -> CheckReport:
    """Return a report of the largest error of each exact identity, such as e = m + p, that a run tests."""
    return CheckReport(run, tuple(_run_self_check(run, name) for name in _CLAIMS))


def _run_self_check(run: DriftRun, name: str) -> CheckResult:
    claim, table, column, limit = _CLAIMS[name]
    rows = getattr(run, table)()
    measured = rows[rows[column].notna()]
    # Errors may be signed, such as the remainder; the limit holds for their size.
    errors = measured[column].abs().to_numpy(dtype=float)
    title = f"{name}: {claim}"
    if not len(errors):
        return CheckResult(title, name, {}, "skip", math.nan, "<=", limit, math.nan, 0, reason="not measured")
    worst, largest = measured.iloc[int(errors.argmax())], float(errors.max())
    place = {key: worst[key] for key in _PLACE if key in rows}
    place |= {"layer": run.layer_name(place["layer"])} if "layer" in place else {}
    where = ", ".join(f"{_PLACE[key]}{value}" for key, value in place.items())
    found = f"{format_number(largest, _DIGITS)} at {where}, wanted <= {_format_all_digits(limit)}"
    status: Status = "pass" if largest <= limit else "fail"
    reason = "" if status == "pass" else found
    return CheckResult(title, name, {}, status, largest, "<=", limit, limit - largest, len(errors), where, reason)


def junit_xml(report: CheckReport) -> str:
    """Return a check report as JUnit XML, one test case per result; warnings pass with a message."""
    counts = {"tests": len(report.results), "failures": report.count("fail"), "errors": 0}
    attributes = {name: str(count) for name, count in (counts | {"skipped": report.count("skip")}).items()}
    root = ElementTree.Element("testsuites", attributes)
    # Of control characters XML forbids most, escaped or not.
    suite = ElementTree.SubElement(root, "testsuite", {"name": strip_control_chars(report.run.name), **attributes})
    for result in report.results:
        names = {"classname": f"driftlens.{result.metric}", "name": strip_control_chars(result.title)}
        case = ElementTree.SubElement(suite, "testcase", names)
        reason = strip_control_chars(result.reason)
        if result.status != "skip":
            measured = {"value": result.value, "ci_low": result.ci_low, "ci_high": result.ci_high, "n": result.samples}
            # NaN, which is unequal to itself, marks what was not measured.
            texts = {name: _format_all_digits(value) for name, value in measured.items() if value == value and value}
            texts["bound"] = f"{result.relation} {_format_all_digits(result.threshold)}"
            texts["at"] = strip_control_chars(result.where)
            properties = ElementTree.SubElement(case, "properties")
            for name, text in texts.items():
                ElementTree.SubElement(properties, "property", {"name": name, "value": text})
        if result.status == "fail":
            ElementTree.SubElement(case, "failure", {"type": "check", "message": reason}).text = reason
        elif result.status == "skip":
            ElementTree.SubElement(case, "skipped", {"message": reason})
        elif result.status == "warn":
            ElementTree.SubElement(case, "system-out").text = f"warning: {reason}"
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="utf-8", xml_declaration=True).decode() + "\n"
