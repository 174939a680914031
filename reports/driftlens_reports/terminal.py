"""Saved runs and what commands find of them, in plain text for the terminal."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from driftlens.base.intervals import Interval, mean_over_tasks, p_of, wilson
from driftlens.base.metrics import ACCURACY, METRICS, metric_called, title_of
from driftlens.base.variants import calibrated, title
from driftlens.base.words import counted
from driftlens.findings.before_after import calibration_sheets, selection_sentences
from driftlens.findings.checks import CheckReport, self_checks
from driftlens.findings.compare import Comparison, comparison_table, mean_score_change
from driftlens.findings.features import DRIFT
from driftlens.findings.listing import RunSummary
from driftlens.findings.measures import SCORE, level
from driftlens.findings.projection import Projection
from driftlens.findings.reading import (
    NOT_MEASURED,
    Kind,
    error,
    estimate,
    is_measured,
    number,
    p_value,
    percent,
    points,
    points_interval,
    printable,
    setting_text,
    size,
    written,
)
from driftlens.findings.scores import main_metrics
from driftlens.findings.summary import final_sheet
from driftlens.findings.swept import ABLATION, CONTROL, ablation_sheets, settings_of
from driftlens.findings.table import Table
from driftlens.findings.verdict import others_sheet, task_sheet, verdict
from driftlens.runs.equality import TOLERANCE, Equality
from driftlens.runs.run import DriftRun
from driftlens.runs.verify import VerifyResult
from driftlens_reports import facts
from driftlens_reports.facts import check_sentence, origin_sentence

_SHOWN = 5
"""How many of the differences between two runs are listed."""
_OTHER_ENDS = (("warn", "warned"), ("skip", "skipped"))
_INDICATIVE = "Distances on the plane are indicative only; these numbers come from the features themselves."
_FACTORS = ("lam", "rho", "alpha", "n")


def aligned(rows: Sequence[Sequence[str]], num_names: int) -> list[str]:
    """Lines with columns as wide as a terminal shows them; the first `num_names` are names, the others numbers."""
    from rich.cells import cell_len

    clean = [[printable(cell) for cell in row] for row in rows]
    widths = [max(cell_len(row[column]) for row in clean) for column in range(len(clean[0]))]
    lines = []
    for row in clean:
        gaps = [" " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)]
        names = [cell + gap for cell, gap in zip(row[:num_names], gaps[:num_names], strict=True)]
        numbers = [gap + cell for cell, gap in zip(row[num_names:], gaps[num_names:], strict=True)]
        lines.append("  ".join([*names, *numbers]))
    return lines


def summary(run: DriftRun, *, verbose: bool = False) -> str:
    """What a run found: the verdict, a row per task, other models; of a verbose reader every table and check."""
    parts = [[f"{run.name} ({run.id})", *facts.stamps(run)], *_verdict_parts(run)]
    if verbose:
        final = final_sheet(run)
        parts += [
            _section(final.title, _sheet_lines(final)[1:] if final.rows else []),
            *(_section(*part) for part in _score_sections(run)),
            _section("Where the final drift comes from", [*map(origin_sentence, facts.origins(run))]),
            _section("Decisions", facts.decision_sentences(run)),
            _section("Self-checks", [check_sentence(check) for check in self_checks(run).results]),
        ]
        parts += [_section("Notices", run.manifest.notices)] if run.manifest.notices else []
    else:
        at = shlex.quote(str(run.path))
        parts.append([f"`driftlens -v show {at}` tells all: every table, decisions, self-checks, notices."])
    return "\n\n".join("\n".join(printable(line) for line in part) for part in parts)


def _verdict_parts(run: DriftRun, name: str = "") -> Iterator[list[str]]:
    """The verdict, then a row per task, then the models that it leaves out."""
    judgement = verdict(run, name)
    yield [*judgement.sentences]
    for sheet in (task_sheet(run, judgement), others_sheet(run, judgement)):
        if sheet.rows:
            yield _sheet_lines(sheet)


def accuracy_text(run: DriftRun) -> str:
    """Scores of every variant on every task with intervals, one line per task and metric, and one for the mean."""
    (_, own), *attached = _score_sections(run)
    lines = [*(own or [NOT_MEASURED]), *(line for part in attached for line in ("", *_section(*part)))]
    return "\n".join(map(printable, lines))


def listing_text(runs: Sequence[RunSummary]) -> str:
    """One line per run; below it, why a run can't be read, and what later work left undone."""
    header = ["folder", "name", "state", "tasks", "variants", "size", "largest final drift of merged"]
    rows = []
    for run in runs:
        counts = [str(len(run.tasks)), str(len(run.variants)), size(run.bytes)]
        rows.append([run.path.name, run.name, run.state, *counts, _largest_drift(run)])
    problems = [printable(f"{run.path.name}: {run.problem}") for run in runs if run.problem]
    left = [printable(f"{run.path.name}: {text}") for run in runs for text in run.left]
    return "\n".join([*aligned([header, *rows], num_names=3), *problems, *left])


def verification_text(result: VerifyResult) -> str:
    """What `verify` found: the verdict first, then the files that differ."""
    verdict = "unchanged" if result.ok else "not as they were written"
    by_kind = (("missing", result.missing), ("changed", result.changed), ("not listed", result.unlisted))
    files = [printable(f"{how}: {name}") for how, names in by_kind for name in names]
    return "\n".join([f"{counted(result.checked, 'file')} checked: {verdict}", *files])


def _section(heading: str, lines: Sequence[str]) -> list[str]:
    return [heading, *(f"  {line}" for line in lines or [NOT_MEASURED])]


def sheet_text(sheet: Table) -> str:
    """A table under its title, with its notes below."""
    return "\n".join(map(printable, _sheet_lines(sheet)))


def _sheet_lines(sheet: Table) -> list[str]:
    """Title, columns and notes of a table; a column of names starts at the left."""
    names = [shown for shown in sheet.shown() if shown.kind == "text"]
    rows = aligned(sheet.texts(ascii_only=True, gap="-"), num_names=len(names))
    return [*filter(None, [sheet.title, *rows, sheet.notes()])]


def _score_sections(run: DriftRun) -> Iterator[tuple[str, list[str]]]:
    """Own scores, a line per task and metric; below them those that another tool has measured."""
    rows = run.accuracy()
    rows = rows[rows["value"].notna()]
    is_attached = rows["metric"].map(lambda name: metric_called(name).is_attached).astype(bool)
    own = rows[~is_attached]
    is_accuracy = own["metric"].nunique() == 0 or set(own["metric"]) == {ACCURACY.name}
    yield f"{'Accuracy' if is_accuracy else 'Scores'} on test samples", _score_lines(own)
    if is_attached.any():
        yield "Scores attached from other tools", _score_lines(rows[is_attached])


def _score_lines(rows: pd.DataFrame) -> list[str]:
    there = dict.fromkeys(rows["variant"])
    variants = [name for name in ("base", "expert", "merged") if name in there]
    variants += [name for name in there if name not in variants]
    metrics = {name: metric_called(name) for name in rows["metric"].unique()}
    says = [] if [*metrics] == [ACCURACY.name] else [f"{at.title}: {at.described}" for at in metrics.values()]
    header = ["task", *(["metric"] if says else []), *map(title, variants), "samples"]
    scores = {
        (name, task): {
            variant: Interval(*ends)
            for variant, ends in zip(
                own["variant"],
                own[["value", "ci_low", "ci_high"]].to_numpy(dtype=float, na_value=math.nan).tolist(),
                strict=True,
            )
        }
        for (task, name), own in rows.groupby(["task", "metric"], sort=False)
    }
    counts = rows.groupby(["metric", "task"], sort=False)["n"].max().fillna(0)

    def line(task: str, name: str, at: Mapping[str, Interval], count: Any) -> list[str]:
        cells = [estimate(at.get(of, Interval(math.nan)), metrics[name].kind) for of in variants]
        named = [task, *([metrics[name].title] if says else [])]
        return [*named, *cells, str(count) if count else ""]

    lines = [line(str(task), name, at, counts[name, task]) for (name, task), at in scores.items()]
    for name in (name for name, metric in metrics.items() if metric.is_averaged):
        of_tasks = [at for (own, _), at in scores.items() if own == name]
        shared = [variant for variant in variants if all(variant in at for at in of_tasks)]
        means = {variant: mean_over_tasks([at[variant] for at in of_tasks]) for variant in shared}
        if len(of_tasks) > 1:
            lines.append(line(f"mean of {len(of_tasks)}", name, means, counts[name].sum()))
    return [*aligned([header, *lines], num_names=2 if says else 1), *says] if lines else []


def _largest_drift(run: RunSummary) -> str:
    if not run.final_drift:
        return NOT_MEASURED
    worst = max(run.final_drift, key=lambda task: run.final_drift[task])
    return f"{number(run.final_drift[worst])} ({worst})"


def checks_text(report: CheckReport) -> str:
    """One line per check, what went wrong in words, and a count; that no check could be executed is said."""
    header = ["", "check", "value", "margin", "rows", "samples"]
    rows = [
        [
            *(result.status, result.title, _value(result.value), _value(result.margin), str(result.n)),
            str(result.samples or ""),
        ]
        for result in report.results
    ]
    lines = aligned([header, *rows], num_names=2)
    lines += [
        f"{result.status}: {result.title}: {result.reason}" for result in report.results if result.reason
    ]
    counts = [f"{report.count('pass')} passed", f"{report.count('fail')} failed"]
    counts += [f"{report.count(status)} {words}" for status, words in _OTHER_ENDS if report.count(status)]
    if not report.executed:
        counts.append("no check was executed, so nothing is known")
    return "\n".join(printable(line) for line in [*lines, ", ".join(counts)])


def comparison_text(
    comparison: Comparison, equal: Equality | None = None, tolerance: float = TOLERANCE
) -> str:
    """Whether two runs are equal, mean changes, then every task before and after; no tables of zeros."""
    before, after = (f"{run.name} ({run.id})" for run in (comparison.before, comparison.after))
    parts = [[before] if comparison.before is comparison.after else [f"before: {before}", f"after: {after}"]]
    parts += [] if equal is None else [equality_text(equal, tolerance).split("\n")]
    parts += (
        [[f"Not the same in both: {text}" for text in comparison.mismatches]] if comparison.mismatches else []
    )
    is_equal = equal is not None and equal.bit_equal
    pairs = [
        (pair, rows)
        for pair, rows in comparison.tasks.groupby(["before", "after"], sort=False)
        if not is_equal or pair[0] != pair[1]
    ]
    heads = {pair: " -> ".join(map(title, pair)) for pair, _ in pairs}
    if len(pairs) > 1:
        parts.append([f"{heads[pair]}: {text}" for pair, rows in pairs for text in _mean(rows)])
    for pair, rows in pairs:
        mean = _mean(rows) if len(pairs) == 1 else []
        parts.append([heads[pair], *mean, *_sheet_lines(comparison_table(rows))[1:], *_notes(rows)])
    if comparison.notes and pairs:
        parts.append([f"{note[:1].upper()}{note[1:]}." for note in comparison.notes])
    return "\n\n".join("\n".join(printable(line) for line in part) for part in parts if part)


def equality_text(compared: Equality, tolerance: float) -> str:
    """Whether two runs are equal: to the last bit, within a tolerance, or where not."""
    if compared.bit_equal:
        values, tables = counted(compared.num_values, "value"), counted(len(compared.tables), "table")
        return f"Equal to the last bit: {values} in {tables}."
    largest = (
        f"the largest difference of a number is {error(compared.largest)} of its column ({compared.where})"
    )
    if compared.within(tolerance):
        return printable(f"Equal within {tolerance:g}: {largest}.")
    lines = [f"Not equal within {tolerance:g}" + (f": {largest}." if compared.where else ".")]
    lines += compared.unequal[:_SHOWN]
    if len(compared.unequal) > _SHOWN:
        lines.append(f"and {len(compared.unequal) - _SHOWN} more (--json lists all)")
    return "\n".join(printable(line) for line in lines)


def projections_text(projections: Sequence[Projection]) -> str:
    """How far each layout can be trusted, one line per variant; what a reader must know besides."""
    where = ["task", "layer", "method", "variant"]
    header = [*where, "points", "cosine", "L2 drift", "kept neighbours", "trust"]
    rows = [
        [
            *(entry.settings.task, str(entry.settings.layer), entry.method, title(row["variant"])),
            *(str(row["n_shown"]), number(row["mean_cosine"]), number(row["mean_drift"])),
            *(percent(row["knn_overlap"]), number(row["trustworthiness"])),
        ]
        for entry in projections
        for row in entry.quality.to_dict("records")
    ]
    notes = dict.fromkeys(
        f"{entry.settings.task}, {entry.settings.method}: {text}"
        for entry in projections
        for text in entry.notes
    )
    return "\n".join(
        [*aligned([header, *rows], num_names=len(where)), *map(printable, [*notes, _INDICATIVE])]
    )


def _notes(rows: pd.DataFrame) -> list[str]:
    """Where both answered the same samples: how many each side gained, and whether that may be chance."""
    return [
        f"{row['task']}: of {row['paired_n']} {row['paired_split']} samples answered by both, {row['gained']} are "
        f"gained and {row['lost']} lost: {points(row['paired_change'])} points "
        f"({points_interval(row['paired_ci_low'], row['paired_ci_high'])}), McNemar p {p_value(row['p_value'])}"
        for row in rows.to_dict("records")
        if row["paired_n"]
    ]


def _mean(rows: pd.DataFrame) -> list[str]:
    change = mean_score_change(rows)
    if len(rows) < 2 or not is_measured(change.low):
        return []
    kind: Kind = "points" if metric_called(rows["metric"].iloc[0]).kind == "share" else "signed"
    p = p_value(p_of(change))
    return [f"mean change over {counted(len(rows), 'task')}: {estimate(change, kind)}, p {p}"]


def _value(value: float) -> str:
    return "" if math.isnan(value) else number(value)


def first_numbers_text(run: DriftRun, name: str) -> str:
    """One line per task: final drift and score of the merged and of the calibrated model, and nothing else."""
    variants = ("merged", calibrated(name))
    metrics = main_metrics(run)
    of = title_of(dict.fromkeys(metrics.get(task, ACCURACY) for task in run.tasks))
    is_share = all(metric.kind == "share" for metric in metrics.values())
    kinds, columns = dict[str, Kind](task="text"), [[*run.tasks]]
    for about, head, kind in ((DRIFT, "L2 drift", "number"), (SCORE, of, "share" if is_share else "number")):
        for variant in variants:
            rows = [level(run, about, task, variant) for task in run.tasks]
            kinds |= {f"{head} {title(variant)}{end}": kind for end in ("", " low", " high")}
            columns += [[getattr(row, end) for row in rows] for end in ("value", "low", "high")]
        kinds |= {"samples" if about is DRIFT else "test samples": "count"}
        columns.append([row.n for row in rows])
    return "\n".join(_sheet_lines(Table.of("first", "", kinds, [*zip(*columns, strict=True)])))


def before_after_text(run: DriftRun, name: str, *, verbose: bool = False) -> str:
    """The verdict on a calibration, a row per task, its notices, how its settings were chosen; verbose, its tables."""
    sheets = calibration_sheets(run, name)  # says which calibrations there are when this is none
    notices = [f"Notice: {text}." for text in run.manifest.calibrations[name].notices]
    parts = [*_verdict_parts(run, name), [*notices, *selection_sentences(run, name)]]
    parts += [_sheet_lines(sheet) for sheet in sheets] if verbose else []
    return "\n\n".join("\n".join(map(printable, part)) for part in parts if part)


def sweep_text(run: DriftRun, name: str) -> str:
    """The points of one sweep in the order of what is varied, and below them what the numbers are."""
    if name.endswith(ABLATION):
        return "\n\n".join(map(sheet_text, ablation_sheets(run, name)))
    rows = run.sweeps()
    rows = rows[rows["sweep"] == name]
    varied = [] if name.endswith(CONTROL) else name.rpartition(":")[2].split("+")
    for factor in set(varied) - {*rows}:
        rows = rows.assign(**{factor: [setting_text(settings_of(row)[factor]) for _, row in rows.iterrows()]})
    factors = [at for at in dict.fromkeys([*_FACTORS, *varied]) if rows[at].notna().any()]
    swept = _sweep_points(rows, factors)
    swept = swept.sort_values("point" if varied in ([], ["corruption"]) else varied, kind="stable")
    has_accuracy = bool(swept["accuracy"].notna().any())
    others = [
        metric for metric in METRICS.values() if metric is not ACCURACY and rows[metric.name].notna().any()
    ]
    scored = ["accuracy", "95 % interval", "std"] * has_accuracy + [metric.title for metric in others]
    lines = [[*factors, "L2 drift", "relative", "cosine", "KL", *scored, "s"]]
    for _, point in swept.iterrows():
        settings = [at if isinstance(at := point[factor], str) else f"{at:g}" for factor in factors]
        features = [number(point[column]) for column in ("drift_l2_mean", "drift_rel", "cos_mean", "kl")]
        ends = f"{written(point['low'], 'share', '')} to {written(point['high'], 'share', '')}"
        scores = [percent(point["accuracy"]), ends, percent(point["std"])] * has_accuracy
        scores += [written(point[metric.name], metric.kind) for metric in others]
        lines.append([*settings, *features, *scores, number(point["seconds"])])
    means = f"{name}: means of {counted(rows['task'].nunique(), 'task')}, {counted(rows['seed'].nunique(), 'seed')}"
    notes = [means, *_sweep_notes(run, rows, has_accuracy=has_accuracy)]
    return "\n".join([*aligned(lines, num_names=0), "", "; ".join(notes)])


def _sweep_notes(run: DriftRun, rows: pd.DataFrame, *, has_accuracy: bool) -> Iterator[str]:
    if has_accuracy:
        tested = int(rows.groupby("task")["n_test"].max().sum())
        yield f"interval: over {counted(tested, 'test sample')} of these tasks"
        if rows["seed"].nunique() > 1:
            yield "std: between seeds"
    rhos = set(rows["rho"].dropna())
    if rhos - {1.0}:
        rho = f"{rhos.pop():g}" if len(rhos) == 1 else "rho"
        step = run.manifest.merge.get("title", "the merge")
        yield f"the anchor is base + {rho} (merged - base), so {rho} times the step of {step}"
    yield "a sweep keeps no samples, so its drifts and cosines have no interval"


def _sweep_points(rows: pd.DataFrame, factors: Sequence[str]) -> pd.DataFrame:
    """Means over tasks, then over seeds, which share their test samples: so ends are averaged like their values."""
    measured = ["drift_l2_mean", "drift_rel", "cos_mean", "kl", *METRICS, "seconds"]
    points_of, means = ["point", *factors], []
    for key, own in rows.astype({"n": float}).groupby(["seed", *points_of]):
        scored = own[["accuracy", "n_test"]].dropna().astype(float).to_numpy()
        accuracy = Interval(math.nan)
        if len(scored) == len(own):
            accuracy = mean_over_tasks([Interval(at, *wilson(round(at * n), int(n))) for at, n in scored])
        ends = {"low": accuracy.low, "high": accuracy.high}
        means.append({**dict(zip(["seed", *points_of], key, strict=True)), **own[measured].mean(), **ends})
    groups = pd.DataFrame(means).groupby(points_of)
    return groups[[*measured, "low", "high"]].mean().assign(std=groups["accuracy"].std()).reset_index()
