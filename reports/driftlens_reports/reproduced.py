"""What a suite's runs measure beside what was published of it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from driftlens.errors import SpecError
from driftlens.records.arena import arena_rows
from driftlens.records.reading import Kind, Sheet
from driftlens.records.run import DriftRun
from driftlens.suites.reproduce import Printed
from driftlens.variants import calibrated
from driftlens_reports.paper.grid import AVERAGE
from driftlens_reports.paper.published import canonical, merger_title, notes_on, published_tables

MEAN = "mean"
_ROWS = {"base": {"pretrained", "base"}, "expert": {"finetunedstl"}}


def reproduced_rows(runs: Mapping[str, DriftRun], printed: Printed | None) -> list[dict[str, Any]]:
    """A row per merge, model and task, the mean over tasks under `mean`; base and experts once.

    Keys: merger, model (`base`, `expert`, `merged` or a repair), method, task, value, low and high (fractions, 95 %
    over test samples), n, and, where something is published, published (a fraction) with a note, and inside: whether
    it lies in the interval after rounding to the printed digit. What is not measured or printed is None.

    Args:
        runs: by merge method.
        printed: what was published; None leaves those keys out.

    Raises:
        SpecError: the paper has no such table.
        DataError, RunError: as for `arena_rows`.
    """
    rows = []
    for at, (merger, run) in enumerate(runs.items()):
        for row in arena_rows(run):
            model = "expert" if row["model"] == "experts" else row["model"]
            is_shared = model in ("base", "expert")
            if at and is_shared:
                continue
            named = {
                "merger": "" if is_shared else merger,
                "model": model,
                "method": row.get("method", model),
            }
            ends = {key: row.get(key) for key in ("low", "high", "n")}
            rows.append({**named, "task": MEAN, "value": row["score"], **ends})
            variant = model if model in ("base", "merged", "expert") else calibrated(model)
            for own in run.accuracy(variant=variant).to_dict("records"):
                ends = {"low": own["ci_low"], "high": own["ci_high"], "n": own["n"]}
                rows.append({**named, "task": own["task"], "value": own["value"], **ends})
    return rows if printed is None else [row | _published(row, printed) for row in rows]


def reproduced_sheet(
    name: str, rows: Sequence[Mapping[str, Any]], failed: Mapping[str, str] | None = None
) -> Sheet:
    """The means of the rows, to be read; `failed` says why repairs are missing."""
    means = [row for row in rows if row["task"] == MEAN]
    kinds: dict[str, Kind] = {"merge": "text", "model": "text", "measured": "share"}
    kinds |= {"95 % low": "share", "95 % high": "share"}
    table = [
        [row["merger"] or "-", *(row[key] for key in ("model", "value", "low", "high"))] for row in means
    ]
    said = ["Means over tasks, 95 % intervals over test samples."]
    if any("published" in row for row in means):
        kinds |= {"published": "share", "difference": "points"}
        for row, cells in zip(means, table, strict=True):
            number = row["published"]
            cells += [number, None if number is None else row["value"] - number]
        said += [f"{row['merger']} {row['model']}: {row['note']}".strip() for row in means if row["note"]]
    said += [f"{repair}: not made, as {reason}." for repair, reason in (failed or {}).items()]
    return Sheet("reproduced", f"{name}: measured and published", kinds, table, " ".join(said))


def _published(row: Mapping[str, Any], printed: Printed) -> dict[str, Any]:
    number, note = _looked_up(row, printed)
    if number is None or math.isnan(number):
        return {"published": None, "inside": None, "note": ""}
    low, high, half = row["low"], row["high"], 0.0005  # printed with one digit behind the point, in percent
    is_known = low is not None and high is not None and math.isfinite(low)
    inside = bool(low - half <= number / 100 <= high + half) if is_known else None
    return {"published": number / 100, "inside": inside, "note": note}


def _looked_up(row: Mapping[str, Any], printed: Printed) -> tuple[float | None, str]:
    """The published percentage and what is known to be wrong with it."""
    merger, method = row["merger"], row["method"]
    own = printed.values.get(merger or "", printed.values.get("", {}))
    if row["task"] in own.get(row["model"], own.get(method, {})):
        return own.get(row["model"], own.get(method, {}))[row["task"]], ""
    if not printed.table:
        return None, ""
    tables = published_tables()
    if printed.table not in tables:
        raise SpecError(
            f"published.table: the paper has no table {printed.table!r}; it has {', '.join(tables)}"
        )
    table, title = tables[printed.table], merger_title(merger) if merger else ""
    wanted = _ROWS.get(method) or {_plain(title if method == "merged" else f"w/ {method}")}
    for line in table.rows:
        if (line.merger, True) == (title, _plain(line.name) in wanted) and printed.model in ("", line.model):
            for column, value in line.values.items():
                if column == AVERAGE if row["task"] == MEAN else canonical(column) == canonical(row["task"]):
                    return value, " ".join(entry.note for entry in notes_on(table, line, column))
    return None, ""


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
