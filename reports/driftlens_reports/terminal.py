"""Runs and results of commands as plain text for the terminal. Entry point: `run_summary_text`."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Sequence

import pandas as pd

from driftlens.results import formatting as reading
from driftlens.results.calibration_summary import (
    adapter_sentences,
    calibration_effect_tables,
    calibration_sentences,
)
from driftlens.results.checks import CheckReport, run_self_checks
from driftlens.results.compare import Comparison, comparison_table, mean_score_change
from driftlens.results.formatting import (
    NOT_MEASURED,
    Kind,
    Table,
    format_estimate,
    format_number,
    is_measured,
    strip_control_chars,
)
from driftlens.results.listing import RunSummary
from driftlens.results.measures import SCORE
from driftlens.results.sweep_results import (
    CONTROL,
    FACTORS,
    mean_over_seeds,
    sweep_row_settings,
)
from driftlens.results.verdict import (
    agreement_sentence,
    caveat_sentences,
    final_drift_table,
    headline,
    headline_sentence,
    moe_routing_table,
    other_models_table,
    task_table,
    verdict,
)
from driftlens.runs.run import DriftRun
from driftlens.runs.verify import TOLERANCE, TableDifference, VerifyResult
from driftlens.utils.errors import join_names, pluralize, start_sentence
from driftlens.utils.intervals import interval_p_value
from driftlens.utils.variants import ACCURACY, METRICS, display_name, metric_by_name
from driftlens_reports import facts

# How many of the differences between two runs are listed.
_SHOWN = 5
_OTHER_ENDS = (("warn", "warned"), ("skip", "skipped"))


def _align_columns(rows: Sequence[Sequence[str]], num_names: int) -> list[str]:
    """Align the first `num_names` table columns to the left and the others to the right, by display width."""
    # Cells instead of characters: CJK letters take two.
    from rich.cells import cell_len

    clean = [[strip_control_chars(cell) for cell in row] for row in rows]
    columns = []
    for index, cells in enumerate(zip(*clean, strict=True)):
        width = max(map(cell_len, cells))
        gaps = (" " * (width - cell_len(cell)) for cell in cells)
        columns.append(
            [cell + gap if index < num_names else gap + cell for cell, gap in zip(cells, gaps, strict=True)]
        )
    return ["  ".join(row) for row in zip(*columns, strict=True)]


def has_unicode_terminal() -> bool:
    """Return True if stdout is a terminal that can show Unicode."""
    # A replaced stdout may have no encoding.
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    return sys.stdout.isatty() and encoding == "utf8" and os.environ.get("TERM") != "dumb"


def run_summary_text(run: DriftRun, *, verbose: bool = False, everyone: bool = False) -> str:
    """Return the verdict on a run and one row per task, as text.

    Args:
        run: the run.
        verbose: True to add every table and check.
        everyone: True to list all other models.
    """
    parts = [
        [f"{run.name} ({run.id})", *caveat_sentences(run)],
        *_verdict_paragraphs(run, verbose=verbose, everyone=everyone),
    ]
    saved = [f"{name}: {text}" for name in run.manifest.calibrations for text in adapter_sentences(run, name)]
    parts += [saved] if saved else []
    path = shlex.quote(str(run.path))
    if verbose:
        parts += [_indented_section(heading, lines) for heading, lines in _detail_sections(run, path)]
    else:
        parts.append([f"Full details (all tables, self-checks, notices): `driftlens -v show {path}`"])
    return "\n\n".join("\n".join(strip_control_chars(line) for line in part) for part in parts)


def _detail_sections(run: DriftRun, path: str) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield heading and lines of the sections that only a verbose summary has."""
    final, routing, scores = final_drift_table(run), moe_routing_table(run), facts.accuracy_table(run)
    yield final.title, _table_lines(final)[1:] if final.rows else []
    if routing.rows:
        yield routing.title, _table_lines(routing)[1:]
    yield scores.title, _table_lines(scores)[1:] if scores.rows else []
    yield "Where the final drift comes from", [*facts.drift_sources(run).values()]
    if "merged" in run.variants:
        yield "Layers to look at", facts.layer_advice_text(facts.layer_advice(run), path).splitlines()
    yield "Decisions", [*facts.decision_sentences(run)]
    yield "Self-checks", [facts.self_check_sentence(check) for check in run_self_checks(run).results]
    if run.manifest.notices:
        yield "Notices", run.manifest.notices


def _verdict_paragraphs(
    run: DriftRun, name: str = "", *, verbose: bool, everyone: bool = False
) -> Iterator[list[str]]:
    """Yield paragraphs of the run summary: verdict, rows by task, other models."""
    judgement = verdict(run, name)
    unscored = agreement_sentence(run) if judgement.measure.role != SCORE.role else ()
    # The last sentence is the next command, which stays last.
    yield [
        headline_sentence(headline(run, name)),
        *judgement.sentences[:-1],
        *unscored,
        *judgement.sentences[-1:],
    ]
    others = other_models_table(run, judgement, controls=verbose, everyone=everyone)
    for sheet in (task_table(run, judgement), others):
        if sheet.rows:
            yield _table_lines(sheet)


def run_list_text(runs: Sequence[RunSummary]) -> str:
    """Return a list of runs as text, one line each, followed by problems of unreadable runs."""
    rows = [["folder", "name", "state", "tasks", "variants", "size", "largest final drift of merged"]]
    for run in runs:
        size = reading.format_bytes(run.bytes) if run.bytes else NOT_MEASURED
        drift, worst = max(((drift, task) for task, drift in run.final_drift.items()), default=(0.0, ""))
        largest = f"{format_number(drift)} ({worst})" if worst else NOT_MEASURED
        counts = map(str, (len(run.tasks), len(run.variants)))
        rows.append([run.path.name, run.name, run.state, *counts, size, largest])
    problems = [strip_control_chars(f"{run.path.name}: {run.problem}") for run in runs if run.problem]
    left = [strip_control_chars(f"{run.path.name}: {text}") for run in runs for text in run.left]
    return "\n".join([*_align_columns(rows, num_names=3), *problems, *left])


def verification_text(result: VerifyResult) -> str:
    """Return the result of `driftlens verify` as text: files that differ from their recorded hashes."""
    state = "unchanged" if result.ok else "not as they were written"
    by_kind = (("missing", result.missing), ("changed", result.changed), ("not listed", result.unlisted))
    files = [strip_control_chars(f"{how}: {name}") for how, names in by_kind for name in names]
    return "\n".join([f"{pluralize(result.checked, 'file')} checked: {state}", *files])


def _indented_section(heading: str, lines: Sequence[str]) -> list[str]:
    return [heading, *(f"  {line}" for line in lines or [NOT_MEASURED])]


def table_text(sheet: Table) -> str:
    """Return a table as text with its title above and its notes below."""
    return "\n".join(map(strip_control_chars, _table_lines(sheet)))


def _table_lines(sheet: Table) -> list[str]:
    names = [shown for shown in sheet.display_columns() if shown.kind == "text"]
    rows = _align_columns(sheet.formatted_rows(ascii_only=not has_unicode_terminal(), gap="-"), num_names=len(names))
    return [*filter(None, [sheet.title, *rows, sheet.notes()])]


def checks_text(report: CheckReport) -> str:
    """Return check results as text: one line per check, reasons of failures, and counts."""
    columns: dict[str, tuple[Kind, str]] = {
        **{"": ("text", "status"), "check": ("text", "title"), "value": ("number", "value")},
        **{"margin": ("number", "margin"), "rows": ("count", "n"), "samples": ("count", "samples")},
    }
    rows = [{**vars(check), "title": check.title, "samples": check.samples or None} for check in report.results]
    lines = _align_columns(Table.from_rows("checks", "", columns, rows).formatted_rows(gap=""), num_names=2)
    lines += [f"{check.status}: {check.title}: {check.reason}" for check in report.results if check.reason]
    counts = [f"{report.count('pass')} passed", f"{report.count('fail')} failed"]
    counts += [f"{report.count(status)} {words}" for status, words in _OTHER_ENDS if report.count(status)]
    counts += [] if report.executed else ["no check was executed"]
    return "\n".join(strip_control_chars(line) for line in [*lines, ", ".join(counts)])


def run_comparison_text(
    comparison: Comparison, equal: TableDifference | None = None, tolerance: float = TOLERANCE
) -> str:
    """Return the changes of scores and drift between two runs as text.

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
    parts += [] if equal is None else [run_equality_text(equal, tolerance).split("\n")]
    parts += [[f"Differs between runs: {text}" for text in comparison.mismatches]] if comparison.mismatches else []
    # Bit-identical runs have no change of a variant to itself.
    is_equal = equal is not None and equal.bit_equal
    pairs = [
        (pair, rows)
        for pair, rows in comparison.tasks.groupby(["before", "after"], sort=False)
        if not is_equal or pair[0] != pair[1]
    ]
    heads = {pair: " -> ".join(map(display_name, pair)) for pair, _ in pairs}
    if len(pairs) > 1:
        parts.append([f"{heads[pair]}: {text}" for pair, rows in pairs for text in _mean_score_change_lines(rows)])
    for pair, rows in pairs:
        mean = _mean_score_change_lines(rows) if len(pairs) == 1 else []
        parts.append([heads[pair], *mean, *_table_lines(comparison_table(rows))[1:], *_sample_change_sentences(rows)])
    if comparison.notes and pairs:
        parts.append([f"{start_sentence(note)}." for note in comparison.notes])
    return "\n\n".join("\n".join(strip_control_chars(line) for line in part) for part in parts if part)


def run_equality_text(compared: TableDifference, tolerance: float) -> str:
    """Report as text whether two runs are bit-identical, equal within a tolerance, or where they differ."""
    error = reading.format_error(compared.largest)
    largest = f"largest difference {error} of its column ({compared.where})"
    if compared.bit_equal:
        values, tables = pluralize(compared.num_values, "value"), pluralize(len(compared.tables), "table")
        lines = [f"Bit-identical: {values} in {tables}."]
    elif compared.is_within(tolerance):
        lines = [f"Equal within {tolerance:g}: {largest}."]
    else:
        lines = [f"Not equal within {tolerance:g}" + (f": {largest}." if compared.where else ".")]
        lines += compared.unequal[:_SHOWN]
        if len(compared.unequal) > _SHOWN:
            lines.append(f"and {len(compared.unequal) - _SHOWN} more (--json lists all)")
    if compared.lacking:
        names = join_names(compared.lacking)
        lines.append(f"Not compared, missing in an older run: {names}.")
    return "\n".join(strip_control_chars(line) for line in lines)


def _sample_change_sentences(rows: pd.DataFrame) -> Iterator[str]:
    """Yield a sentence per task on samples gained and lost, with the p-value of McNemar's test."""
    for row in rows[rows["paired_n"] > 0].to_dict("records"):
        ends = reading.format_interval(row["paired_ci_low"], row["paired_ci_high"])
        yield (
            f"{row['task']}: of {row['paired_n']} {row['paired_split']} samples answered by both, {row['gained']} "
            f"gained and {row['lost']} lost: {reading.format_points(row['paired_change'])} points ({ends}), McNemar p "
            f"{reading.format_p_value(row['p_value'])}"
        )


def _mean_score_change_lines(rows: pd.DataFrame) -> list[str]:
    change = mean_score_change(rows)
    if len(rows) < 2 or not is_measured(change.low):
        return []
    metric = metric_by_name(rows["metric"].iloc[0])
    text = format_estimate(change, "points" if metric.kind == "share" else "signed")
    p = reading.format_p_value(interval_p_value(change))
    return [f"mean change of {metric.title} over {pluralize(len(rows), 'task')}: {text}, p {p}"]


def early_results_text(run: DriftRun, name: str) -> str:
    """Return a calibration's scores and drift by task as text, before its attribution has run."""
    return table_text(task_table(run, verdict(run, name)))


def calibration_text(run: DriftRun, name: str, *, verbose: bool = False) -> str:
    """Return the verdict on a calibration as text: scores by task, notices, and how settings were chosen.

    Args:
        run: the run.
        name: the calibration.
        verbose: True to add its tables.
    """
    sheets = calibration_effect_tables(run, name)  # raises DataError with the names of all calibrations
    notices = [f"Notice: {text}." for text in run.manifest.calibrations[name].notices]
    parts = [*_verdict_paragraphs(run, name, verbose=verbose), [*notices, *calibration_sentences(run, name)]]
    parts += [_table_lines(sheet) for sheet in sheets] if verbose else []
    return "\n\n".join("\n".join(map(strip_control_chars, part)) for part in parts if part)


def sweep_text(run: DriftRun, name: str) -> str:
    """Return the results of a sweep as text, in the order of the varied setting."""
    rows = run.sweeps()
    rows = rows[rows["sweep"] == name]
    varied = [] if name.endswith(CONTROL) else name.rpartition(":")[2].split("+")
    # Settings without a column are stored as JSON in `settings`.
    for factor in set(varied) - {*rows}:
        values = [sweep_row_settings(row)[factor] for _, row in rows.iterrows()]
        rows = rows.assign(**{factor: [*map(reading.format_setting, values)]})
    factors = [factor for factor in dict.fromkeys([*FACTORS, *varied]) if rows[factor].notna().any()]
    tasks = rows["task"].nunique()
    swept = rows.drop_duplicates("point")[["point", *factors]].set_index("point")
    for measure in ("drift_l2_mean", "drift_rel", "cos_mean", "kl", *METRICS, "seconds"):
        points = mean_over_seeds(rows, "point", measure, tasks).set_index("point")
        swept[measure] = points["mean"]
        if measure == ACCURACY.name:
            swept[["std", "low", "high"]] = points[["std over seeds", "tested_low", "tested_high"]]
    # Names of corruptions have no order; points do.
    by = "point" if varied in ([], ["corruption"]) else varied
    swept = swept.reset_index().sort_values(by, kind="stable")
    has_accuracy = bool(swept["accuracy"].notna().any())
    metrics = [metric for metric in METRICS.values() if metric is not ACCURACY and rows[metric.name].notna().any()]
    measured = {"L2 drift": "drift_l2_mean", "relative": "drift_rel", "cosine": "cos_mean", "KL": "kl"}
    shares = {"accuracy": "accuracy", "95 % low": "low", "95 % high": "high", "std": "std"} if has_accuracy else {}
    columns: dict[str, tuple[Kind, str]] = {
        **{factor: ("text", factor) for factor in factors},
        **{head: ("number", column) for head, column in measured.items()},
        **{head: ("share", column) for head, column in shares.items()},
        **{metric.title: (metric.kind, metric.name) for metric in metrics},
        "s": ("number", "seconds"),
    }
    swept[factors] = swept[factors].map(lambda value: value if isinstance(value, str) else f"{value:g}")
    lines = Table.from_rows("sweep", name, columns, swept.to_dict("records")).formatted_rows(gap=NOT_MEASURED)
    means = f"{name}: means of {pluralize(tasks, 'task')}, {pluralize(rows['seed'].nunique(), 'seed')}"
    notes = "; ".join([means, *_sweep_notes(run, rows, has_accuracy=has_accuracy)])
    return "\n".join([*_align_columns(lines, num_names=0), "", notes])


def _sweep_notes(run: DriftRun, rows: pd.DataFrame, *, has_accuracy: bool) -> Iterator[str]:
    if has_accuracy:
        # Seeds share the test samples, so these count once.
        tested = int(rows.groupby("task")["n_test"].max().sum())
        yield f"interval: over {pluralize(tested, 'test sample')} of these tasks"
        if rows["seed"].nunique() > 1:
            yield "std: between seeds"
    rhos = set(rows["rho"].dropna())
    if rhos - {1.0}:
        rho = f"{rhos.pop():g}" if len(rhos) == 1 else "rho"
        step = run.manifest.merge.get("title", "the merge")
        yield f"the anchor is base + {rho} (merged - base), so {rho} times the step of {step}"
    yield "sweeps store no samples, so drifts and cosines have no interval"
