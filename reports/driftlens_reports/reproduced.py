"""What a suite's runs measure beside what was published of it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from driftlens.base.errors import SpecError
from driftlens.base.variants import calibrated
from driftlens.findings.before_after import arena_rows
from driftlens.findings.reading import Kind
from driftlens.findings.swept import ABLATION, ablation_sheets, over_seeds, with_scores
from driftlens.findings.table import Table
from driftlens.runs.attaching import attached_shares
from driftlens.runs.run import DriftRun
from driftlens.runs.tables import plain, plain_rows
from driftlens.suites.reproduce import PROTOCOLS, Printed, Suite
from driftlens_reports.paper.grid import AVERAGE
from driftlens_reports.paper.published import CORRUPTED, canonical, merger_title, notes_on, published_tables

MEAN = "mean"
_COSTS = {
    "Time (s)": ("seconds", 1.0),
    "GPU energy (Wh)": ("energy_wh", 1.0),
    "CPU RSS (GiB)": ("peak_mib", 1024.0),
}
_ROWS = {"base": {"pretrained", "base"}, "expert": {"finetunedstl"}}


@dataclass(frozen=True)
class Shown:
    """What a protocol measured beside what is printed: rows as plain values, and the same to be read."""

    rows: list[dict[str, Any]]
    sheets: list[Table]


def shown(
    suite: Suite,
    protocol: str,
    runs: Mapping[str, DriftRun],
    names: Sequence[str],
    failed: Mapping[str, str] | None = None,
) -> Shown:
    """What the runs of a suite's protocol say, by merge method, of the calibrations `names`."""
    study, sheets = PROTOCOLS[protocol], list[Table]()
    lacks = [f"{repair}: not made, as {reason}." for repair, reason in (failed or {}).items()]
    title = f"{suite.title}, protocol {protocol}"
    if study.ablate:
        rows = []
        for merger, run in runs.items():
            every = run.sweeps()
            every = every[every["sweep"].str.endswith(ABLATION)]
            rows += [{"merger": merger, **row} for row in plain_rows(every)]
            sheets += [sheet for name in every["sweep"].unique() for sheet in ablation_sheets(run, name)]
        return Shown(rows, sheets)
    if study.is_excess:
        rows = [{"merger": merger, **row} for merger, run in runs.items() for row in plain_rows(run.excess())]
        return Shown(rows, [_excess_sheet(title, runs)])
    if study.vary is not None:
        rows = swept_rows(runs, suite.published, protocol, [*study.vary(suite)])
        about = "95 % over draws where there are several, else over test samples."
        return Shown(rows, [_sheet(title, rows, about)])
    if protocol == "runtime":
        rows = cost_rows(runs, suite.published, names)
        return Shown(rows, [_cost_sheet(title, rows, lacks)])
    printed, is_attached = suite.published, suite.published is not None and suite.published.attached
    rows = reproduced_rows(runs, None if is_attached else printed, names)
    sheets = [_sheet(title, rows, "95 % over test samples.", lacks)]
    if printed is not None and is_attached:
        brought = attached_rows(runs, printed, names)
        rows += brought
        about = "of scores that `driftlens attach` has brought, 95 % as the tool tells them."
        sheets += [_sheet(title, brought, about)] if brought else []
    return Shown(rows, sheets)


def reproduced_rows(
    runs: Mapping[str, DriftRun], printed: Printed | None, names: Sequence[str]
) -> list[dict[str, Any]]:
    """A row per merge, model and task, the mean over tasks under `mean`, in fractions; base and experts once."""
    rows = []
    for index, (merger, run) in enumerate(runs.items()):
        for row in _repairs(run, names):
            model = "expert" if row["model"] == "experts" else row["model"]
            is_shared = model in ("base", "expert")
            if index and is_shared:
                continue
            named = {
                "merger": "" if is_shared else merger,
                "model": model,
                "method": row.get("method", model),
            }
            ends = {key: row.get(key) for key in ("low", "high", "n")}
            rows.append({**named, "task": MEAN, "value": row["score"], **ends})
            variant = model if model in ("base", "merged", "expert") else calibrated(model)
            for score in run.accuracy(variant=variant).to_dict("records"):
                ends = {"low": score["ci_low"], "high": score["ci_high"], "n": score["n"]}
                rows.append({**named, "task": score["task"], "value": score["value"], **ends})
    return rows if printed is None else [row | _published(row, printed) for row in rows]


def attached_rows(
    runs: Mapping[str, DriftRun], printed: Printed, names: Sequence[str]
) -> list[dict[str, Any]]:
    """The same of what other tools measured, by benchmark; the mean where all of the paper's table are there."""
    table = published_tables()[printed.table]
    wanted = [canonical(name) for name in table.columns if name != AVERAGE]
    rows = []
    for merger, run in runs.items():
        found = attached_shares(run)
        found = found.assign(model=found["variant"].astype(str).str.removeprefix("calibrated:"))
        mask = found["model"].isin(["base", "merged", "expert", *names])
        best = found[mask].sort_values("value", kind="stable").drop_duplicates(["model", "task"], keep="last")
        for model, scores in best.groupby("model", sort=False):
            info = run.manifest.calibrations.get(str(model))
            row = {"merger": "" if model in ("base", "expert") else merger, "model": str(model)}
            row |= {"method": str(model) if info is None else info.method, "value": None, "n": None}
            by_task = {str(at["task"]): at for at in scores.to_dict("records")}
            values = [at["value"] for name, at in by_task.items() if canonical(name) in wanted]
            if len(values) == len(wanted):
                mean = {"task": MEAN, "value": sum(values) / len(values), "low": None, "high": None}
                rows.append(row | mean)
            for task, at in by_task.items():
                ends = {"low": plain(at["ci_low"]), "high": plain(at["ci_high"]), "n": plain(at["n"])}
                rows.append({**row, "task": task, "value": at["value"], **ends})
    return [row | _published(row, printed) for row in rows]


def swept_rows(
    runs: Mapping[str, DriftRun], printed: Printed | None, protocol: str, factors: Sequence[str]
) -> list[dict[str, Any]]:
    """A row per merge, method and point of a protocol's sweeps; ends over draws, of one draw over test samples."""
    table, rows = "" if printed is None else printed.protocols.get(protocol, ""), []
    for merger, run in runs.items():
        every = with_scores(run, run.sweeps())
        every = every.assign(varied=[str(name).rpartition(":")[2] for name in every["sweep"]])
        for _, point in every[every["varied"].isin(factors)].groupby(["sweep", "point"], sort=False):
            first = point.iloc[0]
            varied, setting = first["varied"], plain(first[first["varied"]])
            (reached,) = over_seeds(point, "point", "score", point["task"].nunique()).to_dict("records")
            ends = ("low", "high") if reached["seeds"] > 1 else ("tested_low", "tested_high")
            row = {"merger": merger, "model": first["method"], "method": first["method"], "task": MEAN}
            row |= {"varied": varied, "at": setting, "value": reached["mean"], "draws": reached["seeds"]}
            row |= {key: plain(reached[end]) for key, end in zip(("low", "high"), ends, strict=True)}
            column = f"n={setting}" if varied == "n" else CORRUPTED.get(str(setting), "")
            rows.append(row | (_published(row, Printed(table=table), column) if table else {}))
    rows.sort(key=lambda row: (row["merger"], factors.index(row["varied"])))
    return rows


def cost_rows(
    runs: Mapping[str, DriftRun], printed: Printed | None, names: Sequence[str]
) -> list[dict[str, Any]]:
    """A row per merge, repair and cost: value and published in the cost's own unit; errors as for `reproduced_rows`."""
    table, rows = "" if printed is None else printed.protocols.get("runtime", ""), []
    for merger, run in runs.items():
        for repair in _repairs(run, names):
            for cost, (key, unit) in _COSTS.items() if "seconds" in repair else ():
                value = repair[key]
                row = {"merger": merger, "model": repair["model"], "method": repair["method"], "cost": cost}
                row |= {"task": MEAN, "value": None if value is None else value / unit}
                number = _looked_up(row, Printed(table=table), cost)[0] if table else None
                rows.append(row | {"published": number})
    return rows


def _repairs(run: DriftRun, names: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of the run's arena with only those calibrations."""
    return arena_rows(run, [name for name in run.manifest.calibrations if name in names])


def _sheet(title: str, rows: Sequence[Mapping[str, Any]], about: str, lacks: Sequence[str] = ()) -> Table:
    """The means of the rows."""
    means = [{**row, "merger": row["merger"] or "-"} for row in rows if row["task"] == MEAN]
    columns: dict[str, tuple[Kind, str]] = {"merge": ("text", "merger"), "model": ("text", "model")}
    if any("varied" in row for row in means):
        columns["varied"] = ("text", "setting")
        means = [{**row, "setting": f"{row['varied']} {row['at']}"} for row in means]
    columns |= {"measured": ("share", "value"), "95 % low": ("share", "low"), "95 % high": ("share", "high")}
    notes = ["Means over tasks,", about]
    is_published = any("published" in row for row in means)
    if is_published:
        columns |= {"published": ("share", "published"), "difference": ("points", "difference")}
        for row in means:
            is_known = row["published"] is not None
            row["difference"] = row["value"] - row["published"] if is_known else None
        notes += [f"{row['merger']} {row['model']}: {row['note']}".strip() for row in means if row["note"]]
    heading = f"{title}: {'measured and published' if is_published else 'measured'}"
    return Table.from_rows("reproduced", heading, columns, means, " ".join([*notes, *lacks]))


def _excess_sheet(title: str, runs: Mapping[str, DriftRun]) -> Table:
    kinds: dict[str, Kind] = {"merge": "text", "fitted on features of": "text", "layer": "count"}
    kinds |= {"lost share": "share", "largest at": "text", "its share": "share"}
    table: list[list[Any]] = []
    for merger, run in runs.items():
        for (inputs, layer), sites in run.excess().groupby(["inputs", "layer"], sort=False):
            shares = (sites["excess"] / sites["gain"]).astype(float)
            worst = [sites["site"][shares.idxmax()], float(shares.max())]
            lost = float(sites["excess"].sum() / sites["gain"].sum())
            table.append([merger, f"the {inputs}", int(layer), lost, *worst])
    note = (
        "J_dep(W_src) - J_dep(W_dep) against what the fit on deployed features gains over the merged weights, linear "
        "modules of a layer together; one draw of calibration samples. Above 100 % the fit is worse than none."
    )
    return Table.of("excess", f"{title}: excess of fits on other features", kinds, table, note)


def _cost_sheet(title: str, rows: Sequence[Mapping[str, Any]], lacks: Sequence[str]) -> Table:
    columns: dict[str, tuple[Kind, str]] = {"merge": ("text", "merger"), "model": ("text", "model")}
    columns |= {"cost": ("text", "cost"), "measured": ("number", "value")}
    if any(row["published"] is not None for row in rows):
        columns["published"] = ("number", "published")
    note = (
        "Of calibrating alone; memory is the process's peak by then, energy that of all programs. Published costs "
        "are those of another machine."
    )
    heading = f"{title}: measured and published"
    return Table.from_rows("costs", heading, columns, rows, " ".join([note, *lacks]))


def _published(row: Mapping[str, Any], printed: Printed, column: str | None = None) -> dict[str, Any]:
    number, note = _looked_up(row, printed, column)
    if number is None or math.isnan(number):
        return {"published": None, "inside": None, "note": ""}
    low, high, half = row["low"], row["high"], 0.0005  # printed with one digit behind the point, in percent
    is_known = low is not None and high is not None and math.isfinite(low)
    inside = bool(low - half <= number / 100 <= high + half) if is_known else None
    return {"published": number / 100, "inside": inside, "note": note}


def _looked_up(
    row: Mapping[str, Any], printed: Printed, wanted_column: str | None = None
) -> tuple[float | None, str]:
    """The published number and what is known to be wrong with it: of a column, else of the row's task or mean."""
    merger, method = row["merger"], row["method"]
    by_model = printed.values.get(merger or "", printed.values.get("", {}))
    by_task = by_model.get(row["model"], by_model.get(method, {}))
    if row["task"] in by_task:
        return by_task[row["task"]], ""
    if not printed.table:
        return None, ""
    tables = published_tables()
    if printed.table not in tables:
        listed = ", ".join(tables)
        raise SpecError(f"published.table: the paper has no table {printed.table!r}; it has {listed}")
    table, title = tables[printed.table], merger_title(merger) if merger else ""
    wanted = _ROWS.get(method) or {_plain(title if method == "merged" else f"w/ {method}")}
    named = AVERAGE if wanted_column is None and row["task"] == MEAN else wanted_column
    for line in table.rows:
        if (line.merger, True) == (title, _plain(line.name) in wanted) and printed.model in ("", line.model):
            for column, value in line.values.items():
                is_wanted = canonical(column) == canonical(row["task"])
                if named is not None:
                    is_wanted = column == named
                if is_wanted and not math.isnan(value):
                    return value, " ".join(entry.note for entry in notes_on(table, line, column))
    return None, ""


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
