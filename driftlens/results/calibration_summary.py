"""Tables and sentences about a calibration: scores and drift before and after, the anchor alone, and the choice.

With rho other than 1 the anchor is another merge of the same experts. Its variant, the control, is analyzed, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

import pandas as pd

from driftlens.results.formatting import (
    Kind,
    Table,
    format_bytes,
    format_percent,
    format_short,
    format_signed,
    format_value,
    is_measured,
)
from driftlens.results.measures import (
    COSINE,
    DRIFT,
    DRIFT_CHANGE,
    RELATIVE,
    SCORE,
    Measure,
    MeasuredValue,
    change_on_task,
    common_measures,
    describe_change,
    mean_change,
    mean_on_tasks,
    pairing_by_task,
    pairing_note,
    value_on_task,
    variant_score,
)
from driftlens.results.verdict import final_drift_table
from driftlens.runs.run import DriftRun, cache_on_run
from driftlens.runs.tables import json_value
from driftlens.utils.errors import pluralize
from driftlens.utils.intervals import Interval, interval_p_value, mean_over_tasks
from driftlens.utils.variants import (
    ACCURACY,
    calibrated_variant,
    describe_metrics,
    display_name,
    metric_by_name,
    metrics_title,
)

_MOST_MOVES = 5


def variants_in_table(run: DriftRun, name: str) -> tuple[str, ...]:
    """Return the variants that a calibration's table compares: merged, control, calibrated, expert."""
    control = run.calibration_info(name).control
    return ("merged", *([control] if control else []), calibrated_variant(name), "expert")


def before_after_rows(run: DriftRun, name: str) -> pd.DataFrame:
    """Return drift, cosine and score of every model of a calibration, one row per task and model.

    Columns: task, variant, model (its title), drift (mean norm of the final drift), relative and cosine, each with
    its `_error` (half its 95 % interval), metric (the task's main metric), score, low, high, n, and accuracy (the
    score if that is its metric). Experts have a score only. Missing values are NaN. `attrs["notices"]` are the
    calibration's.
    """
    rows = []
    for task in run.tasks:
        for variant in variants_in_table(run, name):
            row: dict[str, Any] = {"task": task, "variant": variant, "model": display_name(variant)}
            for about in (DRIFT, RELATIVE, COSINE):
                finding = value_on_task(run, about, task, variant)
                # Intervals of means are symmetric (Student), so half of one is enough.
                row |= {about.name: finding.value, f"{about.name}_error": finding.high - finding.value}
            score = value_on_task(run, SCORE, task, variant)
            # Other metrics must not appear as accuracy in a column of that name.
            accuracy = score.value if score.about.name == ACCURACY.name else math.nan
            row |= {"accuracy": accuracy, "low": score.low, "high": score.high, "n": score.n}
            rows.append(row | {"metric": score.about.name, "score": score.value})
    frame = pd.DataFrame(rows)
    frame.attrs["notices"] = list(run.manifest.calibrations[name].notices)
    return frame


def _changes_from_merged(run: DriftRun, name: str, about: Measure) -> list[MeasuredValue]:
    """Return the changes from merged to calibrated model by task; empty if either was not measured."""
    pair = ("merged", variants_in_table(run, name)[-2])
    # Without a merged model there is nothing to compare with.
    return [change_on_task(run, about, task, pair) for task in run.tasks] if {*pair} <= {*run.variants} else []


def score_changes(run: DriftRun, name: str) -> list[MeasuredValue]:
    """Return the score change of each task that was scored before and after, or whose answers are stored."""
    return [row for row in _changes_from_merged(run, name, SCORE) if row.n or row.answers is not None]


def final_drift_changes(run: DriftRun, name: str) -> list[tuple[MeasuredValue, MeasuredValue]]:
    """Return the absolute and relative change of the mean final drift of each task with stored samples."""
    both = (_changes_from_merged(run, name, about) for about in (DRIFT, DRIFT_CHANGE))
    return [(drift, relative) for drift, relative in zip(*both, strict=True) if relative.n]


def calibration_json(run: DriftRun, name: str) -> dict[str, Any]:
    """Return the content of `driftlens calibrate --json` about the effect of a calibration."""
    pair = ("merged", variants_in_table(run, name)[-2])
    variants = [variant for variant in variants_in_table(run, name) if variant in run.variants]
    scores = []
    for row in score_changes(run, name):
        metric = metric_by_name(row.about.name)
        before, after = (variant_score(run, row.task, variant, metric) for variant in pair)
        scores.append(
            {"task": row.task, "metric": metric.name, "change": row.value, "low": row.low, "high": row.high}
            | {"n": row.n, "is_paired": row.paired, "paired": row.answers, "split": row.answered}
            | {"before": before, "after": after}
        )
    drifts = [
        {"task": drift.task, "is_paired": drift.paired, **vars(drift.interval), "relative": relative.interval}
        for drift, relative in final_drift_changes(run, name)
    ]
    means = []
    for about, tasks in common_measures(run, variants):
        ends = (variants[0], variants[-1])
        by_variant = {variant: mean_on_tasks(run, about, tasks, variant).interval for variant in variants}
        change = mean_change(run, about, tasks, ends).interval if len(variants) > 1 else Interval(math.nan)
        means.append({"measure": about.name, "tasks": tasks, "means": by_variant, "change": change, "about": about})
    return {
        **{"before_after": before_after_rows(run, name), "accuracy_changes": scores},
        **{"drift_changes": drifts, "means": means},
    }


def score_change_note(rows: Sequence[MeasuredValue]) -> str:
    """Return a sentence on how the confidence intervals of these score changes were computed."""
    is_counted = any(row.answered == "diagnosis" for row in rows)
    counted = "Answers that changed are counted on the diagnosis samples." if is_counted else ""
    return " ".join(filter(None, [pairing_note(pairing_by_task(rows)), counted]))


def calibration_effect_tables(run: DriftRun, name: str) -> list[Table]:
    """Return the tables of a calibration that have rows."""
    changes = score_changes(run, name)
    title = f"{display_name(calibrated_variant(name))}: final feature of every model on every task"
    sheets = (
        final_drift_table(run, variants_in_table(run, name)[:-1], f"before-after-{name}", title),
        _score_table(before_after_rows(run, name), name),
        _drift_change_table(run, name),
        _score_change_table(name, changes),
        _changed_answers_table(name, changes),
        _weight_change_table(run, name),
        _interpolation_table(run, name),
    )
    return [sheet for sheet in sheets if sheet.rows]


def _describe_metrics(metrics: Iterable[str]) -> tuple[str, bool, list[str]]:
    """Return the title of the scores, True if all metrics are fractions, and explanations of the metrics."""
    measures = [metric_by_name(name) for name in dict.fromkeys(metrics)] or [ACCURACY]
    says = [] if measures == [ACCURACY] else describe_metrics(measures)
    return metrics_title(measures), all(metric.kind == "share" for metric in measures), says


def _score_table(rows: pd.DataFrame, name: str) -> Table:
    scored = rows[rows["score"].notna()]
    score, is_share, says = _describe_metrics(scored["metric"])
    columns = ["task", "model", *(["metric"] if says else []), "score", "low", "high", "n"]
    kinds: dict[str, Kind] = dict.fromkeys(columns[:-4], "text")
    kind: Kind = "share" if is_share else "number"
    kinds |= dict.fromkeys(("score" if says else "accuracy", "95 % low", "95 % high"), kind)
    kinds["test samples"] = "count"
    interval = "Wilson's interval" if is_share else "95 % intervals"
    return Table.of(
        f"{'scores' if says else 'accuracies'}-{name}",
        f"{display_name(calibrated_variant(name))}: {score} of every model on every task",
        kinds,
        scored[columns].to_numpy(dtype=object).tolist(),
        " ".join([f"On test samples, with {interval}. Each expert is scored on its own task.", *says]),
    )


def _drift_change_table(run: DriftRun, name: str) -> Table:
    changes = final_drift_changes(run, name)
    paired = ", paired by sample" if all(drift.paired for drift, _ in changes) else ""
    return Table.of(
        f"drift-change-{name}",
        f"{display_name(calibrated_variant(name))}: change of the final L2 drift against the merged model",
        {
            **{"task": "text", "change": "number", "95 % low": "number", "95 % high": "number"},
            **{"relative": "share", "relative low": "share", "relative high": "share", "samples": "count"},
        },
        [(drift.task, *drift.ends, *relative.ends, drift.n) for drift, relative in changes],
        f"Mean over diagnosis samples, with Student's intervals{paired}.",
    )


def _score_change_table(name: str, changes: Sequence[MeasuredValue]) -> Table:
    measured = [row for row in changes if row.n]
    score, is_share, says = _describe_metrics(row.about.name for row in measured)
    kind: Kind = "points" if is_share else "number"
    kinds: dict[str, Kind] = {"task": "text", **({"metric": "text"} if says else {}), "change": kind}
    unit = ", in points" if is_share else ""
    return Table.of(
        f"{'score' if says else 'accuracy'}-change-{name}",
        f"{display_name(calibrated_variant(name))}: change of {score} against the merged model{unit}",
        {**kinds, "95 % low": kind, "95 % high": kind, "test samples": "count"},
        [(row.task, *([row.about.name] if says else []), *row.ends, row.n) for row in measured],
        score_change_note(changes),
    )


def _changed_answers_table(name: str, changes: Sequence[MeasuredValue]) -> Table:
    rows: list[tuple[Any, ...]] = [
        (
            *(row.task, row.answered, counts.n, counts.gained, counts.lost),
            *(counts.difference, counts.ci_low, counts.ci_high, counts.p_value),
        )
        for row in changes
        if (counts := row.answers) is not None
    ]
    # Answers on test and on diagnosis samples are different quantities, so their mean has no meaning.
    if len(rows) > 1 and len({row[1] for row in rows}) == 1:
        mean = mean_over_tasks([Interval(*row[5:8]) for row in rows])
        sums = [sum(row[column] for row in rows) for column in (2, 3, 4)]
        rows.append((f"mean of {len(rows)}", rows[0][1], *sums, *mean.ends, interval_p_value(mean)))
    return Table.of(
        f"answers-changed-{name}",
        f"{display_name(calibrated_variant(name))}: changed answers on samples with stored answers",
        {
            **{"task": "text", "split": "text", "samples": "count", "to right": "count", "to wrong": "count"},
            **{"change": "points", "95 % low": "points", "95 % high": "points", "p": "p"},
        },
        rows,
        f"Change in points of {_describe_metrics(row.about.name for row in changes if row.answers)[0]} with Tango's "
        "interval for paired answers and McNemar's mid-p. The mean over tasks combines the intervals (MOVER) and "
        "takes its p from the result.",
    )


def _weight_change_table(run: DriftRun, name: str) -> Table:
    """Return the solved modules with the largest relative weight changes."""
    rows = run.calibration(name)
    rows = rows[rows["weight_change"].notna()].sort_values("weight_change", ascending=False, kind="stable")
    kinds: dict[str, Kind] = {"module": "text", "layer": "count", "weight change": "share"}
    columns, note = (
        ["site", "layer", "weight_change"],
        "Change of the saved weights relative to the norm of the merged.",
    )
    # The objective was measured of the solved weights, which are saved as they are only without interpolation.
    if run.calibration_info(name).interpolation.get("share", 1) == 1:
        before = rows["objective_before"].astype(float)
        # An objective of 0 before has no ratio; NaN is shown as a gap.
        rows = rows.assign(left=rows["objective_after"].astype(float) / before.where(before > 0))
        columns, kinds = [*columns, "left"], kinds | {"objective left": "share"}
        note += " Objective relative to before, on calibration samples (100 %: unchanged)."
    title = f"{display_name(calibrated_variant(name))}: largest weight moves"
    moves = rows[columns].head(_MOST_MOVES).to_numpy(dtype=object).tolist()
    return Table.of(f"weight-moves-{name}", title, kinds, moves, note)


def calibration_sentences(run: DriftRun, name: str) -> list[str]:
    """Return sentences on how the settings of a calibration were chosen, and on adapters saved from it."""
    return [*auto_choice_sentences(run, name), *adapter_sentences(run, name)]


def adapter_sentences(run: DriftRun, name: str) -> list[str]:
    """Return a sentence on how much of a calibration its saved LoRA adapters keep; empty without any."""
    saved = run.calibration_info(name).adapter
    if not saved:
        return []
    rows, scored = saved["tasks"], dict[str, list[Mapping[str, Any]]]()
    for row in rows:
        if (score := row.get("metric")) is not None:
            metric = metric_by_name(score)
            scored.setdefault("" if metric.is_averaged else score, []).append(row)
    text = (
        f"Adapters of rank {saved['rank']} ({format_bytes(saved['bytes'])}) keep {format_percent(saved['kept'])} of "
        f"the change of {pluralize(saved['low_rank'], 'linear module')} (squared Frobenius norm)"
    )
    for of_kind in scored.values():
        metrics = [metric_by_name(row["metric"]) for row in of_kind]
        kind: Kind = "share" if all(metric.kind == "share" for metric in metrics) else "number"
        about = Measure(metrics_title(metrics), kind, metrics[0].worse, "test")
        score, change = (
            mean_over_tasks([_interval_of_row(row, *columns) for row in of_kind])
            for columns in (("score", "low", "high"), ("change", "change_low", "change_high"))
        )
        before = score.value - change.value
        text += (
            f"; {about.title} {format_value(score.value, kind)} (repaired {format_value(before, kind)}; "
            f"{describe_change(about, before, change)}; n = {score.n:,})"
        )
    drift, repaired = (fmean(row[column] or math.nan for row in rows) for column in ("drift", "drift_repaired"))
    return [f"{text}; relative drift {format_short(drift)} (repaired {format_short(repaired)})."]


def _interval_of_row(row: Mapping[str, Any], *columns: str) -> Interval:
    value, low, high = (math.nan if row[column] is None else row[column] for column in columns)
    return Interval(value, low, high, row["n"])


def auto_choice_sentences(run: DriftRun, name: str) -> list[str]:
    """Return sentences on settings that `calibrate --auto` chose: held-out advantage and cost; else empty."""
    info, sentences = run.calibration_info(name), list[str]()
    if info.automatic and "compared" in info.selection:
        sentences += _model_selection_sentences(info.selection)
    elif info.automatic:
        # Older runs and choosers of plug-ins may have other records.
        place = f"calibrations/{name}/config.yaml"
        sentences.append(f"Settings were chosen on the calibration samples; see {place}.")
    if info.interpolation:
        curve, share = info.interpolation.get("curve"), info.interpolation["share"]
        why = f", the share with the lowest held-out {_selection_criterion_name(curve[0])}" if curve else ""
        sentences.append(f"All weights are base + {share:g} (repaired - base){why}.")
    return sentences


def _selection_criterion_name(record: Mapping[str, Any]) -> str:
    """Return the name of the criterion that compared candidates; older records spell it differently."""
    if "judged_by" in record:
        names = {
            "disagreement": "expected disagreement",
            "hellinger": "Hellinger distance",
            "drift_rel": "relative drift",
        }
        return names[record["judged_by"]]
    score = record.get("what") or record["score"]
    return next((name for name in ("KL", "Hellinger distance") if score.startswith(name)), "relative drift")


def _interpolation_table(run: DriftRun, name: str) -> Table:
    """Return held-out scores and drift by interpolation factor, if one was chosen."""
    interpolation = run.calibration_info(name).interpolation
    curve = interpolation.get("curve", [])
    criterion = _selection_criterion_name(curve[0]) if curve else ""
    columns = [f"{measure}{end}" for measure in ("score", "drift") for end in ("", "_low", "_high")]
    return Table.of(
        f"shares-{name}",
        f"{display_name(calibrated_variant(name))}: held-out {criterion} and drift by interpolation factor",
        {
            **dict.fromkeys(("share", criterion, f"{criterion} low", f"{criterion} high"), "number"),
            **{"drift": "number", "drift low": "number", "drift high": "number", "samples": "count"},
        },
        [[entry["share"], *(entry[column] for column in columns), entry["n"]] for entry in curve],
        "Held-out means over tasks with 95 % intervals (Student's t); relative drift of the final feature. The chosen "
        "model is fitted to all samples.",
    )


def _model_selection_sentences(record: Mapping[str, Any]) -> list[str]:
    """Return sentences on the chosen model, its advantage, a return to the base, and every candidate."""
    candidates = {entry["name"]: entry for entry in record["compared"]}
    # `best` is empty in a record where no candidate could be solved for.
    choice, best = candidates[record["choice"]], candidates.get(record["best"], {})
    criterion = _selection_criterion_name(record)
    interval = f"95 % interval, {record['correction']}"
    if choice["name"] == "merged":
        text = "nothing was clearly better than the merged model"
        if best:
            text += f": the best of the others, {best['title']}, {_describe_advantage(best, criterion, interval)}"
    elif choice["name"] == "base":
        advantage = _describe_advantage(choice, criterion, interval)
        text = f"the base was chosen, which {advantage}, and nothing was clearly better"
    else:
        text = f"{choice['title']} was chosen, which {_describe_advantage(choice, criterion, interval)}"
    numbers = [
        f"{entry['title']} {_format_candidate_score(entry)}"
        # Differences are to the merged model's score on the candidate's own samples.
        + (f" [{pluralize(entry['n'], 'sample')}]" if entry.get("n", choice["n"]) != choice["n"] else "")
        for entry in candidates.values()
    ]
    advice = "Advice: don't use the merge; the base is as near to the experts."
    return [
        f"On held-out calibration samples {text}; {pluralize(record['num_calibrations'], 'calibration')} tried in "
        f"{record['seconds']:.0f} s.",
        *([advice] if record["base_stands"] else []),
        f"Held-out {criterion} ({pluralize(choice['n'], 'sample')}; difference to the merged model): "
        f"{'; '.join(numbers)}.",
    ]


def _describe_advantage(entry: Mapping[str, Any], criterion: str, interval: str) -> str:
    """Describe the advantage of a candidate over the merged model."""
    if entry.get("advantage") is None:
        return "could not be solved for"
    gap, low, high = entry["advantage"], entry["low"], entry["high"]
    way = "lower"
    # Records store the advantage, merged minus candidate; readers get the sign as a word.
    if gap < 0:
        way, gap = "higher", -gap
        low, high = (None, None) if low is None else (-high, -low)
    unit = " nat" if criterion == "KL" else ""
    ends = "" if low is None else f" ({interval}: {format_short(low)} to {format_short(high)})"
    return f"has a held-out {criterion} {way} than the merged model's by {format_short(gap)}{unit}{ends}"


def _format_candidate_score(entry: Mapping[str, Any]) -> str:
    if entry.get("score") is None:
        return entry.get("error") or "could not be solved for"
    if entry.get("advantage") is None:
        return format_short(entry["score"])
    # Minus: records store the advantage, readers expect candidate minus merged.
    ends = "" if entry["low"] is None else f", {format_signed(-entry['high'])} to {format_signed(-entry['low'])}"
    return f"{format_short(entry['score'])} ({format_signed(-entry['advantage'])}{ends})"


_MIB = 2**20


def leaderboard_rows(run: DriftRun, names: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Return one row per calibration, best score first, after base and merged model and before the experts.

    Keys: model, method, score with `low` and `high`; `change` over the merged model and `behind` (difference to the
    first calibration), each with its ends, paired by sample; relative and cosine (of the final feature), seconds of
    calibrating, energy_wh, peak_mib (resident so far), added (number of added parameters), task_id (True if the task
    of an input must be known), found_out (mean share of test samples whose task was classified correctly), n (test
    samples of the mean). Missing values are NaN or None. `names` are of calibrations; None takes all.
    """
    chosen = [*run.manifest.calibrations] if names is None else [*names]
    # An unknown name raises here, with the list of all names.
    for name in chosen:
        run.calibration_info(name)
    rows = [
        _variant_means_and_change(run, calibrated_variant(name), name) | _calibration_cost(run, name)
        for name in chosen
    ]
    # Repairs without a score come last.
    rows.sort(key=lambda row: -row["score"] if math.isfinite(row["score"]) else math.inf)
    scored = [row for row in rows if math.isfinite(row["score"])]
    leader = next((row["model"] for row in scored), "")
    for row in scored:
        if row["model"] != leader:
            row |= _gap_to_best_calibration(run, calibrated_variant(leader), calibrated_variant(row["model"]))
    starts = [_variant_means_and_change(run, name, name) for name in ("base", "merged") if name in run.variants]
    return [*starts, *rows, _variant_means_and_change(run, "expert", "experts")]


def leaderboard_table(
    run: DriftRun, names: Sequence[str] | None = None, failed: Mapping[str, str] | None = None
) -> Table:
    """Return the rows of `leaderboard_rows` as a table without empty columns.

    Args:
        run: the run.
        names: names of calibrations; None takes all.
        failed: reasons for missing repairs, by name.
    """
    rows = leaderboard_rows(run, names)
    leader = "against the best"
    columns: dict[str, tuple[Kind, str]] = {
        "model": ("text", "model"),
        **{"score": ("share", "score"), "95 % low": ("share", "low"), "95 % high": ("share", "high")},
        "against merged": ("points", "change"),
        **{f"change {end}": ("points", f"change_{end}") for end in ("low", "high")},
        leader: ("points", "behind"),
        **{f"{leader}, {end}": ("points", f"behind_{end}") for end in ("low", "high")},
        **{"relative drift": ("share", "relative"), "cosine": ("number", "cosine")},
        **{"seconds": ("number", "seconds"), "energy (Wh)": ("number", "energy_wh")},
        **{"memory (MiB)": ("count", "peak_mib"), "added numbers": ("count", "added")},
        "needs task": ("text", "task_id"),
        "task found out": ("share", "found_out"),
    }
    columns = {
        head: (kind, key)
        for head, (kind, key) in columns.items()
        # Energy, added parameters and the like are empty for most runs; empty columns would hide the rest.
        if head == "model" or any(is_measured(row.get(key)) for row in rows)
    }
    n = max((row["n"] for row in rows), default=0)
    paired = {
        row["model"]: row.get("change_paired", True) and row.get("behind_paired", True)
        for row in rows
        if is_measured(row.get("change_low")) or is_measured(row.get("behind_low"))
    }
    notes = [
        f"Means over {pluralize(len(run.tasks), 'task')}" + (f", {n} test samples" if n else "") + ".",
        pairing_note(paired),
        "Ranking on the same samples slightly favours the best repair. One draw of calibration samples. Seconds: "
        "calibration only; memory: peak of the process so far; energy: all programs.",
    ]
    notes += [f"{name}: not made, as {reason}." for name, reason in (failed or {}).items()]
    return Table.from_rows("arena", "Repairs compared", columns, rows, " ".join(filter(None, notes)))


@cache_on_run
def _calibration_cost(run: DriftRun, name: str) -> dict[str, Any]:
    """Return the method of a calibration and its cost: seconds, energy, memory; None where not measured."""
    info, used = run.calibration_info(name), run.resources()
    phase = used.loc[used["phase"] == f"calibrate:{name}", ["peak_rss_bytes", "energy_wh"]]
    peak, energy = (json_value(value) for value in phase.iloc[0]) if len(phase) else (None, None)
    return {
        **{"method": info.method, "seconds": info.seconds, "energy_wh": energy},
        # The peak is that of the process up to this phase: it can only grow from one calibration to the next.
        "peak_mib": None if peak is None else round(peak / _MIB),
        **{"added": info.attached, "task_id": info.attached > 0},
        "found_out": fmean(info.found_out.values()) if info.found_out else None,
    }


@cache_on_run
def _gap_to_best_calibration(run: DriftRun, leader: str, variant: str) -> dict[str, Any]:
    """Return the difference in mean score from the best calibration, paired by sample; empty without scores."""
    scored = [(about, tasks) for about, tasks in common_measures(run, [leader, variant]) if about.role == SCORE.role]
    return _flatten_change("behind", mean_change(run, *scored[0], (leader, variant))) if scored else {}


def _flatten_change(name: str, change: MeasuredValue) -> dict[str, Any]:
    """Return a change, its interval ends and its `paired` flag as columns with the prefix `name`."""
    ends = {f"{name}_{end}": getattr(change, end) for end in ("low", "high", "paired")}
    return {name: change.value, **ends}


@cache_on_run
def _variant_means_and_change(run: DriftRun, variant: str, name: str) -> dict[str, Any]:
    """Return means of one variant, and the change from the merged model to it."""
    is_after = variant not in ("base", "merged") and "merged" in run.variants
    row: dict[str, Any] = {"model": name, "score": math.nan, "n": 0}
    for about, tasks in common_measures(run, ["merged", variant] if is_after else [variant]):
        average = mean_on_tasks(run, about, tasks, variant)
        if about.role == SCORE.role:
            row |= {"score": average.value, "low": average.low, "high": average.high, "n": average.n}
            if is_after:
                row |= _flatten_change("change", mean_change(run, about, tasks, ("merged", variant)))
        elif about in (RELATIVE, COSINE):
            row[about.name] = average.value
    return row
