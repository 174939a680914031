"""Runs and results of commands as plain text for the terminal. Entry point: `summary`."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence

import pandas as pd

from driftlens.results import formatting as reading
from driftlens.results.calibration_summary import calibration_sheets, selection_sentences
from driftlens.results.checks import CheckReport, self_checks
from driftlens.results.compare import Comparison, comparison_table, mean_score_change
from driftlens.results.formatting import NOT_MEASURED, Kind, Table, estimate, is_measured, number, printable
from driftlens.results.listing import RunSummary
from driftlens.results.measures import SCORE
from driftlens.results.sweep_results import (
    ABLATION,
    CONTROL,
    FACTORS,
    ablation_sheets,
    over_seeds,
    settings_of,
)
from driftlens.results.verdict import (
    agreement,
    final_sheet,
    headline,
    others_sheet,
    routing_sheet,
    sentence,
    stamps,
    task_sheet,
    verdict,
)
from driftlens.runs.run import DriftRun
from driftlens.runs.verify import TOLERANCE, Equality, VerifyResult
from driftlens.utils.errors import counted, listed
from driftlens.utils.intervals import p_of
from driftlens.utils.variants import ACCURACY, METRICS, metric_called, title
from driftlens_reports import facts

# How many of the differences between two runs are listed.
_SHOWN = 5
_OTHER_ENDS = (("warn", "warned"), ("skip", "skipped"))
_INDICATIVE = "Distances on the plane are approximate; these numbers come from the features."


def _align_columns(rows: Sequence[Sequence[str]], num_names: int) -> list[str]:
    """Align the first `num_names` columns to the left and the others to the right, by width in a terminal."""
    # Cells instead of characters: CJK letters take two.
    from rich.cells import cell_len

    clean = [[printable(cell) for cell in row] for row in rows]
    columns = []
    for index, cells in enumerate(zip(*clean, strict=True)):
        widths = [*map(cell_len, cells)]
        gaps = [" " * (max(widths) - width) for width in widths]
        pairs = zip(cells, gaps, strict=True)
        columns.append([f"{cell}{gap}" if index < num_names else f"{gap}{cell}" for cell, gap in pairs])
    return ["  ".join(row) for row in zip(*columns, strict=True)]


def shows_signs() -> bool:
    """Return True if stdout is a terminal that shows Unicode."""
    # A replaced stdout may have no encoding.
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    return sys.stdout.isatty() and encoding == "utf8" and os.environ.get("TERM") != "dumb"


def summary(run: DriftRun, *, verbose: bool = False, everyone: bool = False) -> str:
    """Return the verdict on a run and a row per task.

    Args:
        run: the run.
        verbose: True to add every table and check.
        everyone: True to list all other models.
    """
    parts = [
        [f"{run.name} ({run.id})", *stamps(run)],
        *_verdict_paragraphs(run, verbose=verbose, everyone=everyone),
    ]
    path = shlex.quote(str(run.path))
    if verbose:
        final, routing, scores = final_sheet(run), routing_sheet(run), facts.accuracy_table(run)
        parts += [
            _indented_section(final.title, _table_lines(final)[1:] if final.rows else []),
            *([_indented_section(routing.title, _table_lines(routing)[1:])] if routing.rows else []),
            _indented_section(scores.title, _table_lines(scores)[1:] if scores.rows else []),
            _indented_section("Where the final drift comes from", [*facts.origins(run).values()]),
            _indented_section("Decisions", [*facts.decision_sentences(run)]),
            _indented_section(
                "Self-checks", [facts.check_sentence(check) for check in self_checks(run).results]
            ),
        ]
        if "merged" in run.variants:
            parts.insert(
                -2,
                _indented_section(
                    "Layers to look at", facts.advice_text(facts.advice(run), path).splitlines()
                ),
            )
        parts += [_indented_section("Notices", run.manifest.notices)] if run.manifest.notices else []
    else:
        parts.append([f"Full details (all tables, self-checks, notices): `driftlens -v show {path}`"])
    return "\n\n".join("\n".join(printable(line) for line in part) for part in parts)


def _verdict_paragraphs(
    run: DriftRun, name: str = "", *, verbose: bool, everyone: bool = False
) -> Iterator[list[str]]:
    """Yield the verdict, a row per task, and the other models."""
    judgement = verdict(run, name)
    unscored = agreement(run) if judgement.measure.role != SCORE.role else ()
    # The last sentence is the next command, which stays last.
    yield [sentence(headline(run, name)), *judgement.sentences[:-1], *unscored, *judgement.sentences[-1:]]
    others = others_sheet(run, judgement, controls=verbose, everyone=everyone)
    for sheet in (task_sheet(run, judgement), others):
        if sheet.rows:
            yield _table_lines(sheet)


def listing_text(runs: Sequence[RunSummary]) -> str:
    """Return a line per run, and the problems of runs below."""
    header = ["folder", "name", "state", "tasks", "variants", "size", "largest final drift of merged"]
    rows = []
    for run in runs:
        counts = [
            str(len(run.tasks)),
            str(len(run.variants)),
            reading.size(run.bytes) if run.bytes else NOT_MEASURED,
        ]
        worst = max(run.final_drift, key=lambda task: run.final_drift[task], default="")
        largest = f"{number(run.final_drift[worst])} ({worst})" if worst else NOT_MEASURED
        rows.append([run.path.name, run.name, run.state, *counts, largest])
    problems = [printable(f"{run.path.name}: {run.problem}") for run in runs if run.problem]
    left = [printable(f"{run.path.name}: {text}") for run in runs for text in run.left]
    return "\n".join([*_align_columns([header, *rows], num_names=3), *problems, *left])


def verification_text(result: VerifyResult) -> str:
    """Return the result of `verify`, and the files that differ."""
    verdict = "unchanged" if result.ok else "not as they were written"
    by_kind = (("missing", result.missing), ("changed", result.changed), ("not listed", result.unlisted))
    files = [printable(f"{how}: {name}") for how, names in by_kind for name in names]
    return "\n".join([f"{counted(result.checked, 'file')} checked: {verdict}", *files])


def _indented_section(heading: str, lines: Sequence[str]) -> list[str]:
    return [heading, *(f"  {line}" for line in lines or [NOT_MEASURED])]


def sheet_text(sheet: Table) -> str:
    """Return a table below its title, with its notes."""
    return "\n".join(map(printable, _table_lines(sheet)))


def _table_lines(sheet: Table) -> list[str]:
    names = [shown for shown in sheet.shown() if shown.kind == "text"]
    rows = _align_columns(sheet.texts(ascii_only=not shows_signs(), gap="-"), num_names=len(names))
    return [*filter(None, [sheet.title, *rows, sheet.notes()])]


def checks_text(report: CheckReport) -> str:
    """Return a line per check, the reasons of failures, and a count."""
    columns: dict[str, tuple[Kind, str]] = {
        **{"": ("text", "status"), "check": ("text", "title"), "value": ("number", "value")},
        **{"margin": ("number", "margin"), "rows": ("count", "n"), "samples": ("count", "samples")},
    }
    rows = [
        {**vars(check), "title": check.title, "samples": check.samples or None} for check in report.results
    ]
    lines = _align_columns(Table.from_rows("checks", "", columns, rows).texts(gap=""), num_names=2)
    lines += [f"{check.status}: {check.title}: {check.reason}" for check in report.results if check.reason]
    counts = [f"{report.count('pass')} passed", f"{report.count('fail')} failed"]
    counts += [f"{report.count(status)} {words}" for status, words in _OTHER_ENDS if report.count(status)]
    counts += [] if report.executed else ["no check was executed"]
    return "\n".join(printable(line) for line in [*lines, ", ".join(counts)])


def comparison_text(
    comparison: Comparison, equal: Equality | None = None, tolerance: float = TOLERANCE
) -> str:
    """Return the changes from one run to another.

    Args:
        comparison: the compared runs.
        equal: whether their tables are equal, if that was asked for.
        tolerance: of the equality, relative to each column.
    """
    before, after = (
        f"{run.name} ({run.id}){'' if run.manifest.finished else ', which is unfinished'}"
        for run in (comparison.before, comparison.after)
    )
    parts = [[before] if comparison.before is comparison.after else [f"before: {before}", f"after: {after}"]]
    parts += [] if equal is None else [equality_text(equal, tolerance).split("\n")]
    parts += (
        [[f"Differs between runs: {text}" for text in comparison.mismatches]] if comparison.mismatches else []
    )
    # Bit-identical runs have no change of a variant to itself.
    is_equal = equal is not None and equal.bit_equal
    pairs = [
        (pair, rows)
        for pair, rows in comparison.tasks.groupby(["before", "after"], sort=False)
        if not is_equal or pair[0] != pair[1]
    ]
    heads = {pair: " -> ".join(map(title, pair)) for pair, _ in pairs}
    if len(pairs) > 1:
        parts.append(
            [f"{heads[pair]}: {text}" for pair, rows in pairs for text in _mean_score_change_lines(rows)]
        )
    for pair, rows in pairs:
        mean = _mean_score_change_lines(rows) if len(pairs) == 1 else []
        parts.append(
            [heads[pair], *mean, *_table_lines(comparison_table(rows))[1:], *_sample_change_sentences(rows)]
        )
    if comparison.notes and pairs:
        parts.append([f"{note[:1].upper()}{note[1:]}." for note in comparison.notes])
    return "\n\n".join("\n".join(printable(line) for line in part) for part in parts if part)


def equality_text(compared: Equality, tolerance: float) -> str:
    """Return whether two runs are bit-identical, equal within a tolerance, or where they differ."""
    error = reading.error(compared.largest)
    largest = f"largest difference {error} of its column ({compared.where})"
    if compared.bit_equal:
        values, tables = counted(compared.num_values, "value"), counted(len(compared.tables), "table")
        lines = [f"Bit-identical: {values} in {tables}."]
    elif compared.within(tolerance):
        lines = [f"Equal within {tolerance:g}: {largest}."]
    else:
        lines = [f"Not equal within {tolerance:g}" + (f": {largest}." if compared.where else ".")]
        lines += compared.unequal[:_SHOWN]
        if len(compared.unequal) > _SHOWN:
            lines.append(f"and {len(compared.unequal) - _SHOWN} more (--json lists all)")
    if compared.lacking:
        names = listed(compared.lacking)
        lines.append(f"Not compared, missing in an older run: {names}.")
    return "\n".join(printable(line) for line in lines)


def _sample_change_sentences(rows: pd.DataFrame) -> Iterator[str]:
    """Yield gained and lost samples of each task with McNemar's p."""
    for row in rows[rows["paired_n"] > 0].to_dict("records"):
        ends = reading.points_interval(row["paired_ci_low"], row["paired_ci_high"])
        yield (
            f"{row['task']}: of {row['paired_n']} {row['paired_split']} samples answered by both, {row['gained']} "
            f"gained and {row['lost']} lost: {reading.points(row['paired_change'])} points ({ends}), McNemar p "
            f"{reading.p_value(row['p_value'])}"
        )


def _mean_score_change_lines(rows: pd.DataFrame) -> list[str]:
    change = mean_score_change(rows)
    if len(rows) < 2 or not is_measured(change.low):
        return []
    metric = metric_called(rows["metric"].iloc[0])
    text = estimate(change, "points" if metric.kind == "share" else "signed")
    p = reading.p_value(p_of(change))
    return [f"mean change of {metric.title} over {counted(len(rows), 'task')}: {text}, p {p}"]


def first_numbers_text(run: DriftRun, name: str) -> str:
    """Return a calibration's scores and drift by task, before its attribution has run."""
    return sheet_text(task_sheet(run, verdict(run, name)))


def before_after_text(run: DriftRun, name: str, *, verbose: bool = False) -> str:
    """Return the verdict on a calibration, a row per task, its notices and how its settings were chosen.

    Args:
        run: the run.
        name: the calibration.
        verbose: True to add its tables.
    """
    sheets = calibration_sheets(run, name)  # raises DataError with the names of all calibrations
    notices = [f"Notice: {text}." for text in run.manifest.calibrations[name].notices]
    parts = [*_verdict_paragraphs(run, name, verbose=verbose), [*notices, *selection_sentences(run, name)]]
    parts += [_table_lines(sheet) for sheet in sheets] if verbose else []
    return "\n\n".join("\n".join(map(printable, part)) for part in parts if part)


def sweep_text(run: DriftRun, name: str) -> str:
    """Return the points of a sweep in the order of the varied setting."""
    if name.endswith(ABLATION):
        return "\n\n".join(map(sheet_text, ablation_sheets(run, name)))
    rows = run.sweeps()
    rows = rows[rows["sweep"] == name]
    varied = [] if name.endswith(CONTROL) else name.rpartition(":")[2].split("+")
    # Settings without a column are stored as JSON in `settings`.
    for factor in set(varied) - {*rows}:
        values = [settings_of(row)[factor] for _, row in rows.iterrows()]
        rows = rows.assign(**{factor: [*map(reading.setting_text, values)]})
    factors = [factor for factor in dict.fromkeys([*FACTORS, *varied]) if rows[factor].notna().any()]
    tasks = rows["task"].nunique()
    swept = rows.drop_duplicates("point")[["point", *factors]].set_index("point")
    for measure in ("drift_l2_mean", "drift_rel", "cos_mean", "kl", *METRICS, "seconds"):
        points = over_seeds(rows, "point", measure, tasks).set_index("point")
        swept[measure] = points["mean"]
        if measure == ACCURACY.name:
            swept[["std", "low", "high"]] = points[["std over seeds", "tested_low", "tested_high"]]
    swept = swept.reset_index()
    # Names of corruptions have no order; points do.
    swept = swept.sort_values("point" if varied in ([], ["corruption"]) else varied, kind="stable")
    has_accuracy = bool(swept["accuracy"].notna().any())
    metrics = [
        metric for metric in METRICS.values() if metric is not ACCURACY and rows[metric.name].notna().any()
    ]
    columns: dict[str, tuple[Kind, str]] = {factor: ("text", factor) for factor in factors}
    measured = {"L2 drift": "drift_l2_mean", "relative": "drift_rel", "cosine": "cos_mean", "KL": "kl"}
    columns |= {head: ("number", column) for head, column in measured.items()}
    shares = {"accuracy": "accuracy", "95 % low": "low", "95 % high": "high", "std": "std"}
    columns |= {head: ("share", column) for head, column in shares.items() if has_accuracy}
    columns |= {metric.title: (metric.kind, metric.name) for metric in metrics}
    columns["s"] = ("number", "seconds")
    swept[factors] = swept[factors].map(lambda value: value if isinstance(value, str) else f"{value:g}")
    lines = Table.from_rows("sweep", name, columns, swept.to_dict("records")).texts(gap=NOT_MEASURED)
    means = f"{name}: means of {counted(tasks, 'task')}, {counted(rows['seed'].nunique(), 'seed')}"
    notes = [means, *_sweep_notes(run, rows, has_accuracy=has_accuracy)]
    return "\n".join([*_align_columns(lines, num_names=0), "", "; ".join(notes)])


def _sweep_notes(run: DriftRun, rows: pd.DataFrame, *, has_accuracy: bool) -> Iterator[str]:
    if has_accuracy:
        # Seeds share the test samples, so these count once.
        tested = int(rows.groupby("task")["n_test"].max().sum())
        yield f"interval: over {counted(tested, 'test sample')} of these tasks"
        if rows["seed"].nunique() > 1:
            yield "std: between seeds"
    rhos = set(rows["rho"].dropna())
    if rhos - {1.0}:
        rho = f"{rhos.pop():g}" if len(rhos) == 1 else "rho"
        step = run.manifest.merge.get("title", "the merge")
        yield f"the anchor is base + {rho} (merged - base), so {rho} times the step of {step}"
    yield "sweeps store no samples, so drifts and cosines have no interval"
