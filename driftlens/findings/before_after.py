"""A calibration's before and after, in tables; its anchor alone is a row like the others.

With rho other than 1 the anchor is another merge of the same experts, and its variant, the control, is analysed like
any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from driftlens.base.errors import DataError
from driftlens.base.intervals import Interval, mean_over_tasks, p_of
from driftlens.base.metrics import ACCURACY, metric_called, title_of
from driftlens.base.variants import calibrated, title
from driftlens.base.words import counted
from driftlens.findings.features import COSINE, DRIFT, DRIFT_CHANGE, RELATIVE
from driftlens.findings.frame import Finding, paired_by_task, pairing
from driftlens.findings.measures import SCORE, change, common, level, mean, mean_change
from driftlens.findings.reading import (
    Kind,
    brief,
    signed,
)
from driftlens.findings.scores import score_of
from driftlens.findings.swept import rho_control
from driftlens.findings.table import Table
from driftlens.runs.run import DriftRun

_MOST_MOVES = 5


def compared_variants(run: DriftRun, name: str) -> tuple[str, ...]:
    """The variants of a calibration's table: merged, the control where there is one, calibrated, expert."""
    known = run.manifest.calibrations
    if name not in known:
        there = ", ".join(known) or "none"
        raise DataError(f"the run has no calibration {name!r}; it has {there}")
    control = known[name].control
    return ("merged", *([control] if control else []), calibrated(name), "expert")


def before_after(run: DriftRun, name: str) -> pd.DataFrame:
    """The numbers of a calibration's table, one row per task and model.

    Columns: task, variant, model (what a reader calls the variant), drift (mean norm of the final drift), drift_error
    (half its 95 % interval), relative, cosine, each with its `_error`, metric (what the task is judged by), score, low,
    high, n, and accuracy, the score where that is its metric. The expert has a score only; what was not measured is
    NaN. Where the same calibration was measured at rho 1 too, that is a model of its own, without errors of drift.
    `attrs["notices"]` are the calibration's.
    """
    known = {(row.about.role, row.task, row.variant): row for row in rho_control(run, name)}
    at_rho_1 = dict.fromkeys(variant for _, _, variant in known)
    *variants, expert = compared_variants(run, name)
    rows = []
    for task in run.tasks:
        for variant in (*variants, *at_rho_1, expert):
            row: dict[str, Any] = {"task": task, "variant": variant, "model": title(variant)}
            for about in (DRIFT, RELATIVE, COSINE):
                own = known.get((about.role, task, variant)) or level(run, about, task, variant)
                row |= {about.name: own.value, f"{about.name}_error": own.high - own.value}
            score = known.get((SCORE.role, task, variant)) or level(run, SCORE, task, variant)
            metric = score.about.name
            row |= {"accuracy": score.value if metric == ACCURACY.name else math.nan}
            row |= {"low": score.low, "high": score.high}
            rows.append(row | {"n": score.n, "metric": metric, "score": score.value})
    frame = pd.DataFrame(rows)
    frame.attrs["notices"] = list(run.manifest.calibrations[name].notices)
    return frame


def _changed(run: DriftRun, name: str) -> tuple[str, str] | None:
    """The merged and the calibrated variant; None in a run that has no merged model, or not this variant."""
    pair = ("merged", compared_variants(run, name)[-2])
    return pair if {*pair} <= {*run.variants} else None


def score_changes(run: DriftRun, name: str) -> list[Finding]:
    """One entry per task that was scored before and after, or whose answers are stored.

    A run that has no merged model, or not this variant, has none. Errors as for `before_after`.
    """
    pair = _changed(run, name)
    rows = [change(run, SCORE, task, pair) for task in run.tasks] if pair else []
    return [row for row in rows if row.n or row.answers is not None]


def final_drift_changes(run: DriftRun, name: str) -> list[tuple[Finding, Finding]]:
    """How a calibration changes the mean final drift of each task, and that against the drift before.

    Paired by sample; none without a merged model, or where samples are not stored. Errors as for `before_after`.
    """
    pair = _changed(run, name)
    rows = [
        (change(run, DRIFT, task, pair), change(run, DRIFT_CHANGE, task, pair))
        for task in run.tasks
        if pair and run.manifest.layers
    ]
    return [(drift, relative) for drift, relative in rows if relative.n]


def calibration_document(run: DriftRun, name: str) -> dict[str, Any]:
    """What `driftlens calibrate --json` tells of what a calibration changes.

    Errors as for `before_after`.
    """
    rows, pair = before_after(run, name), ("merged", compared_variants(run, name)[-2])
    variants = [variant for variant in compared_variants(run, name) if variant in run.variants]
    scores = [
        {
            **{"task": row.task, "change": row.value, "low": row.low, "high": row.high, "n": row.n},
            **{"is_paired": row.paired, "paired": row.answers, "split": row.answered},
            "metric": row.about.name,
            **{
                side: score_of(run, row.task, variant, metric_called(row.about.name))
                for side, variant in zip(("before", "after"), pair, strict=True)
            },
        }
        for row in score_changes(run, name)
    ]
    drifts = [
        {
            **{"task": drift.task, "is_paired": drift.paired, **vars(drift.interval)},
            "relative": relative.interval,
        }
        for drift, relative in final_drift_changes(run, name)
    ]
    means = [
        {
            **{"measure": about.name, "tasks": tasks},
            "means": {variant: mean(run, about, tasks, variant).interval for variant in variants},
            "change": mean_change(run, about, tasks, (variants[0], variants[-1])).interval
            if len(variants) > 1
            else Interval(math.nan),
            "about": about,
        }
        for about, tasks in common(run, variants)
    ]
    return {"before_after": rows, "accuracy_changes": scores, "drift_changes": drifts, "means": means}


def score_change_note(rows: Sequence[Finding]) -> str:
    """What a reader must know about the intervals of these changes."""
    is_counted = any(row.answered == "diagnosis" for row in rows)
    counted = "Answers that changed are counted on the diagnosis samples." if is_counted else ""
    return " ".join(filter(None, [pairing(paired_by_task(rows)), counted]))


def calibration_sheets(run: DriftRun, name: str) -> list[Table]:
    """The tables of a calibration, wherever it is told of; those without rows are left out.

    Errors as for `before_after`.
    """
    changes = score_changes(run, name)
    rows = before_after(run, name)
    sheets = (
        *(_features(run, rows, name), _scores(rows, name), _drifts(run, name)),
        *(_changes(name, changes), _answers(name, changes), _moves(run, name)),
    )
    return [sheet for sheet in sheets if sheet.rows]


def _features(run: DriftRun, rows: pd.DataFrame, name: str) -> Table:
    scored = ["accuracy", "low", "high", "n", "metric", "score"]
    kept = rows[rows["variant"] != "expert"].drop(columns=["variant", *scored])
    return Table.of(
        f"before-after-{name}",
        f"{title(calibrated(name))}: final feature of every model on every task",
        {
            **{"task": "text", "model": "text", "L2 drift": "number", "L2 drift +-": "number"},
            **{"relative drift": "share", "relative drift +-": "share"},
            **{"cosine": "number", "cosine +-": "number"},
        },
        kept.to_numpy(dtype=object).tolist(),
        f"Means over {_counted(run)} with half their 95 % interval (Student's t; the expert's norm is taken as known).",
    )


def _told(metrics: Iterable[str]) -> tuple[str, bool, list[str]]:
    """What scores of these metrics are called, whether all are shares, and what each is unless all are accuracies."""
    measures = [metric_called(name) for name in dict.fromkeys(metrics)] or [ACCURACY]
    says = [] if measures == [ACCURACY] else [f"{at.title.capitalize()}: {at.described}" for at in measures]
    return title_of(measures), all(at.kind == "share" for at in measures), says


def _scores(rows: pd.DataFrame, name: str) -> Table:
    kept = rows[rows["score"].notna()]
    of, is_share, says = _told(kept["metric"])
    columns = ["task", "model", *(["metric"] if says else []), "score", "low", "high", "n"]
    kinds: dict[str, Kind] = dict.fromkeys(columns[:-4], "text")
    kind: Kind = "share" if is_share else "number"
    kinds |= dict.fromkeys(("score" if says else "accuracy", "95 % low", "95 % high"), kind)
    kinds["test samples"] = "count"
    interval = "Wilson's interval" if is_share else "95 % intervals"
    return Table.of(
        f"{'scores' if says else 'accuracies'}-{name}",
        f"{title(calibrated(name))}: {of} of every model on every task",
        kinds,
        kept[columns].to_numpy(dtype=object).tolist(),
        " ".join([f"On test samples, with {interval}. Each expert is scored on its own task.", *says]),
    )


def _counted(run: DriftRun) -> str:
    """How many diagnosis samples the final drift of a task rests on."""
    rows = run.layers(layer="final") if run.manifest.layers else run.layers()
    counts = rows["n"].dropna()
    if counts.empty:
        return "diagnosis samples"
    low, high = int(counts.min()), int(counts.max())
    return f"{low if low == high else f'{low} to {high}'} diagnosis samples per task"


def _drifts(run: DriftRun, name: str) -> Table:
    changes = final_drift_changes(run, name)
    paired = ", paired by sample" if all(drift.paired for drift, _ in changes) else ""
    return Table.of(
        f"drift-change-{name}",
        f"{title(calibrated(name))}: change of the final L2 drift against the merged model",
        {
            **{"task": "text", "change": "number", "95 % low": "number", "95 % high": "number"},
            **{"relative": "share", "relative low": "share", "relative high": "share", "samples": "count"},
        },
        [(drift.task, *_parts(drift), *_parts(relative), drift.n) for drift, relative in changes],
        f"Of the mean over diagnosis samples; intervals are Student's{paired}.",
    )


def _parts(found: Interval) -> tuple[float, float, float]:
    return found.value, found.low, found.high


def _changes(name: str, changes: Sequence[Finding]) -> Table:
    measured = [row for row in changes if row.n]
    of, is_share, says = _told(row.about.name for row in measured)
    kind: Kind = "points" if is_share else "number"
    kinds: dict[str, Kind] = {"task": "text", **({"metric": "text"} if says else {}), "change": kind}
    return Table.of(
        f"{'score' if says else 'accuracy'}-change-{name}",
        f"{title(calibrated(name))}: change of {of} against the merged model{', in points' if is_share else ''}",
        {**kinds, "95 % low": kind, "95 % high": kind, "test samples": "count"},
        [
            (row.task, *([row.about.name] if says else []), row.value, row.low, row.high, row.n)
            for row in measured
        ],
        score_change_note(changes),
    )


def _answers(name: str, changes: Sequence[Finding]) -> Table:
    rows: list[tuple[Any, ...]] = [
        (row.task, row.answered, at.n, at.gained, at.lost, at.difference, at.ci_low, at.ci_high, at.p_value)
        for row in changes
        if (at := row.answers) is not None
    ]
    if len(rows) > 1 and len({row[1] for row in rows}) == 1:
        mean = mean_over_tasks([Interval(*row[5:8]) for row in rows])
        sums = [sum(row[at] for row in rows) for at in (2, 3, 4)]
        rows.append((f"mean of {len(rows)}", rows[0][1], *sums, *_parts(mean), p_of(mean)))
    return Table.of(
        f"answers-changed-{name}",
        f"{title(calibrated(name))}: answers that changed on the samples whose answers are stored",
        {
            **{"task": "text", "split": "text", "samples": "count", "to right": "count", "to wrong": "count"},
            **{"change": "points", "95 % low": "points", "95 % high": "points", "p": "p"},
        },
        rows,
        f"Change in points of {_told(row.about.name for row in changes if row.answers)[0]} on these samples, with "
        "Tango's interval for paired answers, and McNemar's mid-p. The mean over tasks combines their intervals "
        "(MOVER; samples of different tasks are independent) and has its p from its own.",
    )


def _moves(run: DriftRun, name: str) -> Table:
    """The solved modules whose weights moved furthest, relative to their norm, the furthest first."""
    rows = run.calibration(name)
    rows = rows[rows["weight_change"].notna()].sort_values("weight_change", ascending=False, kind="stable")
    before = rows["objective_before"].astype(float)
    rows = rows.assign(left=rows["objective_after"].astype(float) / before.where(before > 0))
    return Table.of(
        f"weight-moves-{name}",
        f"{title(calibrated(name))}: largest weight moves",
        {"module": "text", "layer": "count", "weight change": "share", "objective left": "share"},
        rows[["site", "layer", "weight_change", "left"]].head(_MOST_MOVES).to_numpy(dtype=object).tolist(),
        "Norm of the change against the norm of the weights; objective after against before, on calibration samples "
        "(100 % is unchanged).",
    )


_SETTINGS = {"lam": "lambda", "rho": "rho", "alpha": "alpha"}
_TOLD = {
    *("score", "start", "chosen", "is_start_kept", "found"),
    *("advantage", "standard_error", "candidates", "seconds"),
}
"""Entries of the record that the sentence is made from."""


def selection_sentences(run: DriftRun, name: str) -> list[str]:
    """What was chosen instead of what, by which held-out advantage and at what cost; none where nothing was chosen.

    Args:
        run: with the finished calibration.
        name: of the calibration.
    """
    compared_variants(run, name)  # says which calibrations there are when this is none
    known = run.manifest.calibrations
    if not known[name].automatic:
        return []
    if known[name].selection.keys() >= _COMPARED:
        return _comparison_sentences(known[name].selection)
    if not known[name].selection.keys() >= _TOLD:
        # A run from before the manifest told, or a chooser of the caller's own, which may keep any record.
        return [
            f"Settings were chosen from the calibration samples; calibrations/{name}/config.yaml says how."
        ]
    return [_selection_sentence(known[name].selection)]


_COMPARED = {"compared", "choice", "kept", "best", "base_stands", "score", "correction", "seconds"}
"""Entries of the records of choices among methods."""


def _comparison_sentences(record: Mapping[str, Any]) -> list[str]:
    """What was chosen and by how much, whether to use the merge at all, and the numbers of every candidate."""
    candidates = {entry["name"]: entry for entry in record["compared"]}
    choice, best = candidates[record["choice"]], candidates.get(record["best"], {})
    what = "KL" if record["score"].startswith("KL") else "relative drift"
    interval = f"95 % interval, {record['correction']}"
    if record["kept"] == "merged":
        text = "the merged model was kept as it is, as nothing was clearly better"
        if best:
            text += f": the best of the others, {best['title']}, {_lower(best, what, interval)}"
    elif record["kept"] == "base":
        text = f"the base was chosen, which {_lower(choice, what, interval)}, and nothing was clearly better"
    else:
        text = f"{choice['title']} was chosen, which {_lower(choice, what, interval)}"
    said = [
        f"On held-out calibration samples {text}; {counted(record['num_calibrations'], 'calibration')} tried in "
        f"{record['seconds']:.0f} s."
    ]
    if record["base_stands"]:
        said.append("Advice: don't use the merge, as the base is as near to the experts.")
    numbers = [f"{entry['title']} {_scored(entry)}" for entry in candidates.values()]
    n = choice["n"]
    return [
        *said,
        f"Held-out {what} ({counted(n, 'sample')}; difference to the merged model): {'; '.join(numbers)}.",
    ]


def _lower(entry: Mapping[str, Any], what: str, interval: str) -> str:
    """By how much a candidate is better than the merged model."""
    if entry.get("advantage") is None:
        return "could not be solved for"
    gap = entry["advantage"]
    unit = " nat" if what == "KL" else ""
    ends = "" if entry["low"] is None else f" ({interval}: {brief(entry['low'])} to {brief(entry['high'])})"
    way = "higher" if gap < 0 else "lower"
    return f"has a held-out {what} {way} than the merged model's by {brief(abs(gap))}{unit}{ends}"


def _scored(entry: Mapping[str, Any]) -> str:
    if entry.get("score") is None:
        return entry.get("error") or "could not be solved for"
    if entry.get("advantage") is None:
        return brief(entry["score"])
    ends = "" if entry["low"] is None else f", {signed(-entry['high'])} to {signed(-entry['low'])}"
    return f"{brief(entry['score'])} ({signed(-entry['advantage'])}{ends})"


def _selection_sentence(record: Mapping[str, Any]) -> str:
    tried = {tuple(trial[key] for key in _SETTINGS) for trial in record["candidates"]}
    cost = f"{counted(len(tried), 'setting')} tried in {record['seconds']:.0f} s"
    preset = record.get("preset", "")
    if record.get("is_merged_kept"):
        return (
            "Settings were compared on held-out calibration samples and the merged model was kept as it is, as no "
            f"calibration was clearly better: with {_named(record['found'])}, {_gap(record, 'over_merged')}; {cost}."
        )
    if not record["is_start_kept"]:
        origin = f"{preset}'s" if preset else "the given"
        return (
            f"Settings were chosen on held-out calibration samples: {_named(record['chosen'])} instead of {origin} "
            f"{_values(record['start'])}; {_gap(record)}; {cost}."
        )
    kept = f"{preset} was kept" if preset else f"the given {_named(record['start'])} were kept"
    if record["found"] == record["start"]:
        reason = "no other candidate did better"
    else:
        reason = (
            f"the best other candidate, {_named(record['found'])}, was not clearly better: {_gap(record)}"
        )
    return f"Settings were compared on held-out calibration samples and {kept}, as {reason}; {cost}."


def _gap(record: Mapping[str, Any], over: str = "") -> str:
    """The held-out advantage of what was found over the start, with as many decimals as its error deserves."""
    has_heads = record["score"].startswith("KL")
    what, unit = ("KL", " nat") if has_heads else ("relative drift", "")
    told = record[over] if over else record
    advantage, error = told["advantage"], told["standard_error"]
    if advantage is None or error is None:
        return "it could not be solved for without the deciding samples"
    decimals = max(0, 1 - math.floor(math.log10(error))) if error > 0 else 3
    moved = f"{'higher' if advantage < 0 else 'lower'} by {abs(advantage):.{decimals}f}{unit}"
    return f"held-out {what} {moved} (standard error {error:.{decimals}f})"


def _named(settings: Mapping[str, float]) -> str:
    return ", ".join(f"{title} {settings[key]:g}" for key, title in _SETTINGS.items())


def _values(settings: Mapping[str, float]) -> str:
    return ", ".join(f"{settings[key]:g}" for key in _SETTINGS)
