"""Checks as a user writes them: a YAML file of bounds on a run's numbers, refused where it makes no sense.

checks:
  - {metric: accuracy, change: {points: [merged, "calibrated:featcal"]}, per: task, gte: -0.01}
  - {metric: cos_mean, where: {variant: "calibrated:featcal", layer: final}, per: task, gte: 0.80}
  - {metric: drift_l2_mean, where: {layer: final}, change: {from: merged, to: "calibrated:featcal"}, lte: -0.20}
  - {metric: closure_error, agg: max, lte: 1.0e-4, severity: warn}
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from driftlens.config.types import Name, Number, Part, Text, checked, problem
from driftlens.config.yaml_text import read_mapping
from driftlens.runs.schema import TABLES
from driftlens.utils.errors import did_you_mean
from driftlens.utils.files import PathLike
from driftlens.utils.metrics import ATTACHED, METRICS

Relation = Literal[">=", "<=", ">", "<"]
CHECKED_TABLES = ("layers", "outputs", "accuracy", "params", "calibration")

_NUMBERS = {
    name: {column.name for column in TABLES[name].columns if column.dtype != "str" and column.name != "layer"}
    for name in CHECKED_TABLES
}
"""Columns that can be held against a bound; true counts as 1."""

_RELATIONS: Mapping[str, Relation] = {"gte": ">=", "lte": "<=", "gt": ">", "lt": "<"}


def _plain_value(value: Any) -> Any:
    if isinstance(value, str) or type(value) is int:
        return value
    raise problem(f"expected a name or a layer number, got {value!r}")


def _both_ends(value: Any) -> Any:
    """`{points: [a, b]}`, `{relative: [a, b]}` or `{from: a, to: b}`, which is relative, as kind and two variants."""
    if isinstance(value, dict) and set(value) == {"from", "to"}:
        value = {"relative": [value["from"], value["to"]]}
    if not isinstance(value, dict) or len(value) != 1 or not set(value) <= {"points", "relative"}:
        raise problem("expected two variants", 'For example {points: [merged, "calibrated:featcal"]}.')
    [(kind, ends)] = value.items()
    if not isinstance(ends, (list, tuple)) or len(ends) != 2:
        raise problem(f"{kind}: expected two variants", f"For example {{{kind}: [base, merged]}}.")
    return {kind: tuple(ends)}


_Value = Annotated[int | str, BeforeValidator(_plain_value)]
_Change = Annotated[dict[Literal["points", "relative"], tuple[Name, Name]], BeforeValidator(_both_ends)]


class Check(Part):
    """One entry of `checks`: bounds on some rows of a table.

    `metric` is a numeric column of the table `home`; `where` says which rows (`layer` may be "final"), and `per` which
    columns each group of rows, judged by itself, shares. `agg` is what of a group is judged: "worst" is the row nearest
    to breaking a bound, so that every row must hold. With `change` that is what changes between two variants.
    """

    metric: Text
    table: Literal["layers", "outputs", "accuracy", "params", "calibration"] | None = None
    where: dict[str, _Value] = Field(default_factory=dict)
    per: Annotated[
        tuple[Text, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)
    ] = ()
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
    def _score_by_name(cls, entry: Any) -> Any:
        """`metric: accuracy` is the value of that score's rows."""
        metric = entry.get("metric") if isinstance(entry, Mapping) else None
        if isinstance(metric, str) and (metric in METRICS or metric.startswith(ATTACHED)):
            where = entry.get("where", {})
            rows = {"where": {**where, "metric": metric}} if isinstance(where, Mapping) else {}
            return {"table": "accuracy", **entry, **rows, "metric": "value"}
        return entry

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if not self.bounds:
            raise problem("no bound", "Give at least one of gte, lte, gt, lt.")
        table = _table_of(self.metric, self.table)
        columns = _text_columns(table)
        keys = [*TABLES[table].key, *(["variant"] if table == "calibration" else [])]
        for what, names, allowed in (("where", self.where, columns), ("per", self.per, keys)):
            for column in names:
                if column not in allowed:
                    hint = did_you_mean(column, allowed)
                    raise problem(
                        f"{what}: no {column!r} in the table {table!r}; it has {', '.join(allowed)}", hint
                    )
        for column in ("variant", "name"):
            if self.change is not None and (column in self.where or column in self.per):
                raise problem(
                    f"change compares two variants, so {column!r} can't choose one", "Leave it out."
                )
        return self

    @property
    def bounds(self) -> dict[Relation, float]:
        """The bounds that are given."""
        limits = {relation: getattr(self, key) for key, relation in _RELATIONS.items()}
        return {relation: bound for relation, bound in limits.items() if bound is not None}

    @property
    def home(self) -> str:
        """The table that holds the metric."""
        return _table_of(self.metric, self.table)

    @property
    def ends(self) -> tuple[str, str]:
        """The variants from and to which a change is judged, row by row."""
        return next(iter(self.change.values())) if self.change else ("", "")

    @property
    def relative(self) -> bool:
        """Whether a change is (to - from) / |from|, or else to - from in the metric's own unit (points of a share)."""
        return not self.change or "relative" in self.change

    @property
    def title(self) -> str:
        """What messages call it."""
        return self.name or " ".join(self._words())

    def _words(self) -> Iterator[str]:
        where = dict(self.where)
        metric = str(where.pop("metric", self.metric)) if self.metric == "value" else self.metric
        yield metric if self.agg == "worst" else f"{self.agg} {metric}"
        for kind, (start, end) in (self.change or {}).items():
            yield f"{'change' if kind == 'relative' else 'difference'} from {start} to {end}"
        yield " and ".join(f"{relation} {bound:g}" for relation, bound in self.bounds.items())
        if where:
            yield "where " + ", ".join(f"{key} is {value}" for key, value in where.items())


class _Checks(Part):
    """The whole file."""

    checks: Annotated[tuple[Check, ...], Field(min_length=1)]


def load_checks(source: PathLike | Mapping[str, Any]) -> list[Check]:
    """The checks that a file, or the mapping in it, describes."""
    if isinstance(source, Mapping):
        raw, where = copy.deepcopy(dict(source)), "checks"
    else:
        raw, where = read_mapping(Path(source), "checks", "Begin with a line `checks:`."), str(source)
    return [*checked(_Checks, raw, where).checks]


def _table_of(metric: str, table: str | None) -> str:
    """The table that holds `metric`: the one named, or the only one that has such a column."""
    columns = sorted(set().union(*_NUMBERS.values()) if table is None else _NUMBERS[table])
    if metric not in columns:
        text = "no table has a number" if table is None else f"the table {table!r} has no number"
        raise problem(f"metric: {text} called {metric!r}", did_you_mean(metric, columns))
    homes = [name for name in CHECKED_TABLES if metric in _NUMBERS[name]] if table is None else [table]
    if len(homes) > 1:
        raise problem(
            f"metric: {metric!r} stands in the tables {', '.join(homes)}", f"Add `table: {homes[0]}`."
        )
    return homes[0]


def _text_columns(table: str) -> list[str]:
    """Columns that rows can be chosen by."""
    columns = [of.name for of in TABLES[table].columns if of.dtype == "str" or of.name == "layer"]
    return [*columns, "variant"] if table == "calibration" else columns
