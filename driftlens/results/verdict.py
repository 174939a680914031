"""The verdict on a run: the problem, its certainty and source, the next command, and its tables.

Terminal, model card, report and dashboard show the same words. Words such as "worse" appear only if the 95 % interval
of the difference excludes 0.
"""

from __future__ import annotations

import itertools
import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import pandas as pd

from driftlens.results.checks import run_self_checks
from driftlens.results.formatting import Kind, Table, format_estimate, format_short, format_value, is_measured
from driftlens.results.measures import (
    COSINE,
    DRIFT,
    RELATIVE,
    SCORE,
    Measure,
    accuracy_by_class_means,
    change_on_task,
    common_measures,
    main_metrics,
    mean_change,
    mean_on_tasks,
    pairing_by_task,
    pairing_note,
    share_of_true,
    value_on_task,
)
from driftlens.runs.manifest import COMPARISON, MERGES
from driftlens.runs.run import DriftRun, cache_on_run, has_live_modules, last_job_state, resume_command
from driftlens.runs.tables import json_value
from driftlens.utils.errors import pluralize, shorten_list, start_sentence
from driftlens.utils.files import parse_json
from driftlens.utils.intervals import Interval, interval_ratio, mean_over_tasks, share_interval
from driftlens.utils.variants import (
    ACCURACY,
    COARSE,
    calibrated_variant,
    calibration_name,
    display_name,
    is_control,
    variant_kind,
)

# Merges to compare, with and without a base.
_CONTENDERS = {True: ("average", "ties", "iso_c", "tsv_m"), False: ("average", "regmean")}
_LOWER = {
    "disagreement": "expected disagreement {} lower",
    "hellinger": "Hellinger distance {} lower",  # of comparisons made by earlier versions, as KL
    "kl": "KL {} nat lower",
    "drift_rel": "relative drift {} lower",
}


def recommend_command(run: DriftRun, side: int, bad: Sequence[str]) -> str:
    """Return the command to run next, given the verdict; empty for models in memory.

    Args:
        run: the run.
        side: -1 if the last model is clearly worse than the experts.
        bad: tasks with bad experts, see `Verdict`.
    """
    path = shlex.quote(str(run.path))
    # Modules in memory have no path that a command could name.
    if has_live_modules(run.manifest):
        return ""
    if not run.manifest.finished:
        return resume_command(run.path)
    scored = {*run.accuracy()["variant"]}
    # Only repairs were scored; this adds what they are compared with.
    if scored and not scored & {"base", "merged", "expert"}:
        return f"driftlens analyze {path}"
    # A bad expert limits every merge and repair, so it comes first.
    if bad:
        return f"driftlens validate {path}/spec.yaml --deep"
    if side >= 0:
        return f"driftlens report {path}"
    compared = _load_merge_ranking(run)
    if (better := _nearest_better_merge(compared, _held_out_distance(run, compared))) is not None:
        merge = json.dumps({"method": better["method"], **better["settings"]})
        sets = f"--set {shlex.quote(f'merge={merge}')} --set merged=null"
        return f"driftlens analyze {path}/spec.yaml {sets} --out {path}-{shlex.quote(better['method'])}"
    # A single expert has no other merges to compare.
    if not compared and len(run.tasks) > 1:
        return f"driftlens merge {path}/spec.yaml --compare {merges_to_compare(run)} --out {path}/{MERGES}"
    chosen = [info.method for info in run.manifest.calibrations.values() if info.automatic]
    if not chosen:
        return f"driftlens calibrate {path} --auto"
    # A choice between many methods; only FeatCal has a setting that is worth a closer look.
    return f"driftlens sweep {path} --param alpha=0.15,0.3,0.6" if "featcal" in chosen else f"driftlens report {path}"


def merges_to_compare(run: DriftRun) -> str:
    """Return the merge methods to compare with the run's own, which is compared anyway, separated by commas."""
    own = run.manifest.merge.get("method")
    return ",".join(method for method in _CONTENDERS["base" in run.variants] if method != own)


def _merge_ranking_sentences(compared: Mapping[str, Any]) -> Iterator[str]:
    """Yield sentences on a comparison of merges: the clearly nearer one, its ties, and samples that mislead."""
    if overlap := compared.get("trained_on"):
        yield f"The ranking of merges is unreliable: {overlap}."
    elif (row := _nearest_better_merge(compared)) is not None:
        value, low, high = (format_short(row[f"nearer{end}"]) for end in ("", "_low", "_high"))
        lower = _LOWER[compared["score"]].format(value)
        yield f"{row['merge']} is nearer to the experts than this merge: {lower} ({low} to {high})."
        first = [other["merge"] for other in compared["merges"] if other["place"] == 1 or other.get("is_tied")]
        if others := [name for name in first if name != row["merge"]]:
            way = "Not clearly farther" if row["merge"] in first else "Nearer still"
            yield f"{way}: {', '.join(others)}."


@cache_on_run
def _load_merge_ranking(run: DriftRun) -> Mapping[str, Any]:
    """Load the stored comparison of the run's merge with other merge methods; empty without one."""
    try:
        ranking = dict(parse_json((run.path / MERGES / COMPARISON).read_text(encoding="utf-8")))
        [*_merge_ranking_sentences(ranking)]  # fails on a file that is no comparison
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return ranking


def _nearest_better_merge(compared: Mapping[str, Any], distance: float = math.inf) -> Mapping[str, Any] | None:
    """Return the best of the merges that are clearly nearer to the experts than the present one, or None.

    Args:
        compared: the stored comparison; one on samples that the experts were trained on ranks nothing.
        distance: the held-out distance of the repaired model, which the merge must be below.
    """
    nearer = [
        row
        for row in compared.get("merges", ())
        if row["method"] and (row.get("nearer_low") or 0) > 0 and not row.get(compared["score"], 0) > distance
    ]
    return None if compared.get("trained_on") else min(nearer, key=lambda row: row["place"], default=None)


def _held_out_distance(run: DriftRun, compared: Mapping[str, Any]) -> float:
    """Return the smallest distance to the experts that `--auto` measured of its choice; infinity if unknown."""
    records = [info.selection for info in run.manifest.calibrations.values() if info.automatic]
    scores = [
        entry.get("score")
        for record in records
        for entry in record.get("compared", ())
        if entry["name"] == record.get("choice") and record.get("judged_by") == compared.get("score")
    ]
    return min((score for score in scores if score is not None), default=math.inf)


@dataclass(frozen=True)
class ModelGap:
    """The difference between two models: `change` of the mean over tasks, with its 95 % interval.

    `side` is 1 if the model is clearly better, -1 if clearly worse, 0 if undecided; `better` and `worse` are the
    tasks on which their own intervals decide.
    """

    variant: str
    against: str
    change: Interval
    by_task: Mapping[str, Interval]
    side: int
    better: tuple[str, ...]
    worse: tuple[str, ...]


@dataclass(frozen=True)
class _DriftSource:
    """The layer that contributes most to a variant's final drift; `rivals` are not clearly smaller."""

    layer: int
    name: str
    share: Interval
    rivals: tuple[str, ...]


@dataclass(frozen=True)
class Verdict:
    """The verdict on a run, in numbers and in words.

    Attributes:
        measure: the measure that compares models: the tasks' own scores, or relative drift without scores.
        tasks: tasks on which every compared model was measured; `means` are over them.
        merged: the merged model, or the baseline that replaces it; may be empty, as may the calibrated `after`.
        gaps: merged against experts and base, calibrated against merged and base, as far as measured.
        worst: the task that is furthest below its expert, if clearly so; else empty.
        bad_experts: tasks whose expert is clearly worse than the base, near chance or far less accurate than its
            features.
        source: None if no share was measured.
        command: the next command; may be empty.
    """

    measure: Measure
    tasks: tuple[str, ...]
    merged: str
    after: str
    means: Mapping[str, Interval]
    gaps: tuple[ModelGap, ...]
    worst: str
    bad_experts: tuple[str, ...]
    source: _DriftSource | None
    command: str
    sentences: tuple[str, ...]

    def gap_between(self, variant: str, against: str) -> ModelGap | None:
        """Return the difference of `variant` from `against`; None if it was not measured."""
        return next((gap for gap in self.gaps if (gap.variant, gap.against) == (variant, against)), None)


def repairs_of(run: DriftRun) -> list[str]:
    """Return the calibrated variants of a run, the oldest first."""
    return [variant for variant in run.variants if variant_kind(variant) == "calibrated"]


def _reference_variant(run: DriftRun) -> str:
    """Return the merged model, or the baseline that takes the place of a missing one; empty without both."""
    uncalibrated = [variant for variant in run.variants if variant_kind(variant) in ("merged", "baseline")]
    return "merged" if "merged" in uncalibrated else next(iter(uncalibrated), "")


@cache_on_run
def shown_repair(run: DriftRun) -> str:
    """Return the calibrated variant that stands for the run: the pinned one, else the best; empty without any.

    A calibration that is clearly better than the merged model comes before all others. Then one whose weights are all
    it needs comes before one that must know the task of an input, and then the larger gain counts. Of equal ones the
    newest is taken.
    """
    repairs = repairs_of(run)
    pinned = calibrated_variant(run.manifest.pinned)
    if pinned in repairs or len(repairs) < 2:
        return pinned if pinned in repairs else "".join(repairs)
    merged = _reference_variant(run)

    def _rank(variant: str) -> tuple[bool, int, bool, float]:
        about, tasks, compared = _choose_verdict_measure(run, merged, variant) or (RELATIVE, (), ())
        info = run.manifest.calibrations.get(calibration_name(variant) or "")
        is_alone = info is None or not info.attached
        if variant not in compared:
            return False, -1, is_alone, -math.inf
        gain, side = mean_on_tasks(run, about, tasks, variant).interval, 0
        if merged in compared:
            change = mean_change(run, about, tasks, (merged, variant))
            gain, side = change.interval, change.side
        return about.role == SCORE.role, side, is_alone, about.sign * gain.value

    return max(reversed(repairs), key=_rank)


@cache_on_run
def verdict(run: DriftRun, name: str = "") -> Verdict:
    """Return the verdict on a run and one calibration, by default `shown_repair`: gaps, drift source, next command."""
    merged = _reference_variant(run)
    after = calibrated_variant(name) if name else shown_repair(run)
    judged = _choose_verdict_measure(run, merged, after)
    source = _main_drift_source(run, merged)
    if judged is None:
        nothing = ("No measurements to base a verdict on.", *_drift_source_sentence(source, merged))
        return Verdict(RELATIVE, (), merged, after, {}, (), "", (), source, "", nothing)
    about, tasks, compared = judged
    pairs = [(merged, "expert"), (merged, "base"), (after, merged), (after, "base")]
    gaps = {
        pair: _gap_between_models(run, about, tasks, pair)
        # The last two pairs are needed for the command and for bad experts, and not shown.
        for pair in (*pairs, (after, "expert"), ("expert", "base"))
        if {*pair} <= {*compared}
    }
    last = after if after in compared else merged
    behind = {task: value_on_task(run, RELATIVE, task, last).value for task in tasks}
    if about.role == SCORE.role:
        gap = gaps.get((last, "expert"))
        # Only tasks whose own interval is below the expert: others may be last by chance.
        behind = {task: abs(gap.by_task[task].value) for task in gap.worse} if gap else {}
    worst = max(behind, key=lambda task: behind[task], default="")
    below = gaps["expert", "base"].worse if ("expert", "base") in gaps else ()
    bad = tuple(
        task
        for task in tasks
        if task in below or _chance_of_bad_expert(run, about, task) or _accuracy_of_features(run, about, task)
    )
    # Without a gap to the experts, assume that the model is worse: the next command then looks for a repair.
    to_experts = gaps.get((after or merged, "expert"))
    command = recommend_command(run, to_experts.side if to_experts else -1, bad)
    shown = tuple(gaps[pair] for pair in pairs if pair in gaps)
    means = {variant: mean_on_tasks(run, about, tasks, variant).interval for variant in compared}
    judgement = Verdict(about, tasks, merged, after, means, shown, worst, bad, source, command, ())
    return replace(judgement, sentences=tuple(_verdict_sentences(run, judgement)))


def _choose_verdict_measure(
    run: DriftRun, merged: str, after: str
) -> tuple[Measure, tuple[str, ...], tuple[str, ...]] | None:
    """Return the measure for comparing models, the tasks on which all were measured, and the models."""
    names = [name for name in ("base", "expert", merged, after) if name in (*run.variants, "expert")]
    # Scores are compared if the merged or repaired model has any; otherwise relative drift is.
    scored = [name for name in names if any(value_on_task(run, SCORE, task, name).is_measured for task in run.tasks)]
    is_scored = bool({merged, after} & {*scored})
    compared = scored if is_scored else [name for name in names if name != "expert"]
    groups = common_measures(run, compared) if {merged, after} & {*compared} else []
    role = SCORE.role if is_scored else RELATIVE.role
    groups = [(about, tasks) for about, tasks in groups if about.role == role]
    # Tasks with metrics of different kinds have no common mean: the larger group is judged.
    most = max(groups, key=lambda group: len(group[1]), default=None)
    return (*most, tuple(compared)) if most else None


def _verdict_sentences(run: DriftRun, judgement: Verdict) -> Iterator[str]:
    tasks, kind, after = judgement.tasks, judgement.measure.kind, judgement.after
    name, n = judgement.measure.title, max(mean.n for mean in judgement.means.values())
    over = "" if len(tasks) > 1 else f" on {tasks[0]}"
    counts = [f"{len(tasks)} tasks"] * (len(tasks) > 1) + [f"n = {n}"] * bool(n)
    behind = f" ({', '.join(counts)})" if counts else ""
    yield f"{start_sentence(name)}{over}{behind}: {_format_variant_values(judgement.means, kind)}."
    calibration = calibration_name(after) or ""
    info = run.calibration_info(calibration) if after else None
    if info is not None and info.unchanged_text:
        yield f"The calibrated model is {info.unchanged_text}."
    elif info is not None and info.model_description:
        percent = 100 * info.interpolation["share"]
        yield f"`{calibration}` keeps {percent:.3g} % of the repair and {100 - percent:.3g} % of the base weights."
    repairs = repairs_of(run)
    for variant, gaps in itertools.groupby(judgement.gaps, lambda gap: gap.variant):
        which = ""
        if len(repairs) > 1 and variant == shown_repair(run):
            is_pinned = variant == calibrated_variant(run.manifest.pinned)
            which = " (pinned)" if is_pinned else f" (best of {len(repairs)} calibrations on these samples)"
        yield f"{display_name(variant)}{which}: {'; '.join(_describe_gap(gap, judgement) for gap in gaps)}."
    yield from _other_repairs_sentence(run, judgement)
    chances = {task: _chance_of_bad_expert(run, judgement.measure, task) for task in judgement.bad_experts}
    if below := [task for task in chances if _is_below_base(run, judgement.measure, task)]:
        yield f"Experts worse than base: {shorten_list(below, 2)}."
    if near := [
        f"{task} ({format_value(value_on_task(run, SCORE, task, 'expert').value, 'share')}, chance "
        f"{format_value(chance, 'share')})"
        for task, chance in chances.items()
        if chance
    ]:
        yield f"Experts not clearly above chance: {shorten_list(near, 2)}."
    features = {task: _accuracy_of_features(run, judgement.measure, task) for task in judgement.bad_experts}
    if misread := [
        f"{task} ({format_value(value_on_task(run, SCORE, task, 'expert').value, 'share')}, nearest class mean "
        f"{format_value(share, 'share')})"
        for task, share in features.items()
        if share
    ]:
        yield f"Experts far less accurate than their features: {shorten_list(misread, 2)}."
    is_merged = judgement.merged == "merged"
    if is_merged:
        yield from _merge_ranking_sentences(_load_merge_ranking(run))
    of_merge = (run.manifest.merge or {}).get("change") if is_merged else None
    for model, record in {"the merge": of_merge, "the calibration": info and info.change}.items():
        # `max`: a merge that changes no entry loses none, and has no percentage.
        if record and record.get("lost", 0) >= COARSE * max(record.get("changed", 0), 1):
            lost = 100 * record["lost"] / record["changed"]
            yield f"{record['dtype']} loses about {lost:.0f} % of the entries that {model} changes."
    if len(tasks) > 1 and judgement.worst and not judgement.bad_experts:
        worst = {name: value_on_task(run, judgement.measure, judgement.worst, name) for name in judgement.means}
        yield f"Worst: {judgement.worst} ({_format_variant_values(worst, kind)})."
    yield from _drift_source_sentence(judgement.source, judgement.merged)
    if failed := run_self_checks(run).count("fail"):
        yield f"Self-checks failed: {failed}."
    if judgement.command:
        yield f"Next: `{judgement.command}`."


def _is_below_base(run: DriftRun, about: Measure, task: str) -> bool:
    return "base" in run.variants and change_on_task(run, about, task, ("base", "expert")).side < 0


def _chance_of_bad_expert(run: DriftRun, about: Measure, task: str) -> float:
    """Return the accuracy of guessing if a task's expert is not clearly above it and nearer to it than to 1; else 0."""
    score, chance = value_on_task(run, SCORE, task, "expert"), _chance(run, about, task)
    return chance if score.low <= chance and score.value < (1 + chance) / 2 else 0.0


def _accuracy_of_features(run: DriftRun, about: Measure, task: str) -> float:
    """Return the accuracy of an expert's nearest class means if prompt or labels don't fit its features; else 0.

    They don't if the expert is clearly nearer to chance than to 1, and its class means clearly nearer to 1. An expert
    that has not learned its task is near chance in both.
    """
    score, chance = value_on_task(run, SCORE, task, "expert"), _chance(run, about, task)
    middle = (1 + chance) / 2
    if not (chance and score.high < middle):
        return 0.0
    by_means = accuracy_by_class_means(run, task)
    return by_means.value if by_means.low > middle else 0.0


def _chance(run: DriftRun, about: Measure, task: str) -> float:
    """Return the accuracy of guessing; 0 if the task is not judged by accuracy, or its classes are unknown."""
    classes = run.manifest.classes.get(task, ())
    is_accuracy = about.role == SCORE.role and value_on_task(run, SCORE, task, "expert").about.name == ACCURACY.name
    return 1 / len(classes) if is_accuracy and len(classes) > 1 else 0.0


def _other_repairs_sentence(run: DriftRun, judgement: Verdict) -> Iterator[str]:
    """Yield sentences on the other calibrations: how the shown one compares with this one, and their means."""
    about, tasks, best = judgement.measure, judgement.tasks, shown_repair(run)
    others = {
        variant: mean_on_tasks(run, about, tasks, variant).value
        for variant in repairs_of(run)
        if variant != judgement.after and all(value_on_task(run, about, task, variant).is_measured for task in tasks)
    }
    ranked = sorted(others, key=lambda variant: -about.sign * others[variant])
    if best in others:
        gap = _gap_between_models(run, about, tasks, (best, judgement.after))
        yield f"{display_name(best)}, which the run shows: {_describe_gap(gap, judgement)}."
    if ranked:
        means = [f"{display_name(variant)} {format_value(others[variant], about.kind)}" for variant in ranked]
        yield f"Other calibrations: {shorten_list(means, 3)}."


def hide_run_path(run: DriftRun, text: str) -> str:
    """Replace the path of the run in a text by its folder name, for files that others read."""
    return text.replace(shlex.quote(str(run.path)), shlex.quote(run.path.absolute().name))


def _gap_between_models(run: DriftRun, about: Measure, tasks: tuple[str, ...], pair: tuple[str, str]) -> ModelGap:
    """Return the difference between two models: mean over tasks, and the tasks on which it is clear."""
    # `change` goes from the first to the second, a gap from `against` to `variant`.
    backwards = (pair[1], pair[0])
    by_task = {task: change_on_task(run, about, task, backwards) for task in tasks}
    over = mean_change(run, about, tasks, backwards)
    better, worse = (tuple(task for task, row in by_task.items() if row.side == way) for way in (1, -1))
    intervals = {task: row.interval for task, row in by_task.items()}
    return ModelGap(*pair, over.interval, intervals, over.side, better, worse)


def _format_variant_values(judgement: Mapping[str, Interval], kind: Kind) -> str:
    return ", ".join(
        f"{_variant_title(variant)} {format_value(mean.value, kind)}" for variant, mean in judgement.items()
    )


def _variant_title(variant: str) -> str:
    return "experts" if variant == "expert" else display_name(variant)


def _describe_gap(gap: ModelGap, judgement: Verdict) -> str:
    # The first gap names the unit for all.
    is_first = not judgement.gaps or gap is judgement.gaps[0]
    unit = " points" * (judgement.measure.kind == "share" and is_first)
    change = format_gap(gap, judgement.measure.kind) + unit
    counts = _describe_clear_tasks(gap, len(judgement.tasks)) if len(judgement.tasks) > 1 else ""
    if not gap.side:
        counted_change = f"{change}; {counts}" if counts else change
        return f"no significant difference from {_variant_title(gap.against)} ({counted_change})"
    way = "better" if gap.side > 0 else "worse"
    return f"{change} {way} than {_variant_title(gap.against)}{f' ({counts})' if counts else ''}"


def format_gap(gap: ModelGap, kind: Kind) -> str:
    """Format a difference as value ± half its interval (or both ends); signed if the interval contains 0."""
    change, digits = (gap.change.scaled(100), ".1f") if kind == "share" else (gap.change, ".3g")
    value = f"{abs(change.value):{digits}}" if gap.side else f"{change.value:+{digits}}"
    if not is_measured(change.low):
        return value
    half = f"{max(change.value - change.low, change.high - change.value):{digits}}"
    # As printed, because a reader subtracts printed numbers.
    if gap.side and float(half) >= float(value):
        low, high = sorted(abs(end) for end in (change.low, change.high))
        return f"{value} ({low:{digits}} to {high:{digits}})"
    return f"{value} +- {half}"


def _describe_clear_tasks(gap: ModelGap, num_tasks: int) -> str:
    """Describe on how many tasks the interval of a change excludes 0, by direction."""
    sides = {"better": len(gap.better), "worse": len(gap.worse)}
    if not gap.side:
        return ", ".join(f"{way} on {count}" for way, count in sides.items() if count)
    way, other = ("better", "worse") if gap.side > 0 else ("worse", "better")
    on = "all" if sides[way] == num_tasks else f"{sides[way]} of {num_tasks}"
    return f"clear on {on}" + (f", {sides[other]} {other}" if sides[other] else "")


def _main_drift_source(run: DriftRun, variant: str) -> _DriftSource | None:
    """Return the layer with the largest share of a variant's final drift; None if no share was measured."""
    by_layer = layer_drift_shares(run, variant)
    if not by_layer:
        return None
    (layer, share), *others = by_layer.items()
    leaders = _leaders_of_halves(run, variant)
    # Without an interval any other layer may carry as much.
    rivals = tuple(run.layer_name(rival) for rival, other in others if not other.high < share.low or rival in leaders)
    return _DriftSource(layer, run.layer_name(layer), share, rivals)


def _leaders_of_halves(run: DriftRun, variant: str) -> set[int]:
    """Return the layer with the largest share of the final drift in each half of every task's samples."""
    rows = run.samples(variant=variant)
    rows = rows[rows["final_share"].notna()]
    final = rows[rows["layer"] == rows["layer"].max()].set_index(["task", "sample_id"])["drift_l2"] ** 2
    # A task's share is a mean of its samples' shares, weighted by their final drift.
    energy = final.reindex(pd.MultiIndex.from_frame(rows[["task", "sample_id"]])).to_numpy(dtype=float)
    rows = rows.assign(energy=energy, part=rows["final_share"].astype(float) * energy)
    rows["half"] = rows.groupby(["task", "layer"]).cumcount() % 2
    sums = rows.groupby(["half", "task", "layer"])[["part", "energy"]].sum()
    means = (sums["part"] / sums["energy"]).groupby(["half", "layer"]).mean().unstack("layer").fillna(-math.inf)
    return {*means.columns.to_numpy()[means.to_numpy().argmax(axis=1)].tolist()} if len(means) else set()


@cache_on_run
def layer_drift_shares(run: DriftRun, variant: str) -> dict[int, Interval]:
    """Return every layer's share of the final drift, mean over tasks, largest first."""
    rows = run.layers(variant=variant) if variant else run.layers().head(0)
    rows = rows[rows["final_share"].notna()].filter(regex="^(layer|final_share.*|jacobian_samples)$")
    by_layer: dict[Any, Interval] = {
        layer: mean_over_tasks([row_drift_share(row) for row in part.to_dict("records")])
        for layer, part in rows.groupby("layer")
    }
    return dict(sorted(by_layer.items(), key=lambda item: -item[1].value))


def row_drift_share(row: Mapping[Any, Any]) -> Interval:
    """Return the share of final drift and its interval from a row of the layer table."""
    values = [json_value(row.get(f"final_share{end}")) for end in ("", "_low", "_high")]
    share, low, high = (math.nan if value is None else float(value) for value in values)
    return Interval(share, low, high, json_value(row["jacobian_samples"]) or 0)


def _drift_source_sentence(source: _DriftSource | None, variant: str) -> Iterator[str]:
    if source is None:
        return
    share, n = source.share, f" (n = {source.share.n})" if source.share.n else ""
    is_known = is_measured(share.low)
    ends = f"{100 * share.low:.0f} to {100 * share.high:.0f} %" if is_known else f"{100 * share.value:.0f} %"
    rivals = f", or {shorten_list(source.rivals, 1)} (too close to call)" if source.rivals else ""
    yield f"Main source of {display_name(variant)}'s drift: {source.name}, {ends}{n}{rivals}."


_Tone = Literal["good", "mixed", "bad", "none"]
# Parts of models in the order of tiles, and of dots on the bar.
ORDER = ("base", "merged", "baseline", "calibrated", "expert")


@dataclass(frozen=True)
class Headline:
    """One sentence that sums up a run, and the numbers shown next to it.

    Attributes:
        text: the sentence, without a full stop.
        so_far: "9 of 20 tasks measured" while some are missing; else empty.
        tiles: every model's mean, base first and experts last, by variant.
        roles: the role of each of these models, see `DriftRun.roles`.
        closed: the share of the gap from merged model to experts that the repair closes; NaN without a repair or a
            clear gap.
    """

    text: str
    tone: _Tone
    so_far: str
    tiles: dict[str, Interval]
    roles: dict[str, str]
    kind: Kind
    measure: str
    closed: Interval


@cache_on_run
def headline(run: DriftRun, name: str = "") -> Headline:
    """Return the headline of a run and of one calibration, by default `shown_repair`."""
    judged = verdict(run, name)
    ordered = sorted(judged.means, key=lambda variant: ORDER.index(variant_kind(variant)))
    num_tasks = len(judged.tasks)
    so_far = f"{num_tasks} of {pluralize(len(run.tasks), 'task')} measured" if num_tasks < len(run.tasks) else ""
    closed = _closed_share_of_gap(judged)
    text, tone = _headline_text_and_tone(run, judged, closed) if judged.means else ("Nothing was measured yet", "none")
    tiles = {variant: judged.means[variant] for variant in ordered}
    roles = {variant: run.roles.get(variant, variant_kind(variant)) for variant in ordered}
    return Headline(text, tone, so_far, tiles, roles, judged.measure.kind, judged.measure.title, closed)


def _closed_share_of_gap(judged: Verdict) -> Interval:
    """Return the share of the gap between merged model and experts that the calibration closes."""
    repair, behind = (
        judged.gap_between(judged.after, judged.merged),
        judged.gap_between(judged.merged, "expert"),
    )
    if repair is None:
        return Interval(math.nan)
    if judged.measure.role == RELATIVE.role:
        return interval_ratio(_negated_interval(repair.change), judged.means[judged.merged])
    # Without a clear gap the denominator may be 0, and the share anything.
    return (
        interval_ratio(repair.change, _negated_interval(behind.change))
        if behind and behind.side < 0
        else Interval(math.nan)
    )


def _negated_interval(change: Interval) -> Interval:
    return Interval(-change.value, -change.high, -change.low, change.n)


def _headline_text_and_tone(run: DriftRun, judged: Verdict, closed: Interval) -> tuple[str, _Tone]:
    """Return the headline's sentence and tone (good, mixed, bad) from the gaps of the last model."""
    last = judged.after if judged.after in judged.means else judged.merged
    over_base, behind = judged.gap_between(last, "base"), judged.gap_between(judged.merged, "expert")
    repair = judged.gap_between(judged.after, judged.merged)
    of_drift = judged.measure.role == RELATIVE.role
    if judged.bad_experts:
        return _bad_experts_text(run, judged), "bad"
    if over_base is not None and over_base.side < 0:
        return _worse_than_base_text(judged, over_base, "Repaired, and still" if repair else ""), "bad"
    if repair is None:
        return _unrepaired_merge_headline(run, judged, over_base, behind)
    if repair.side < 0:
        return (
            f"The repair {display_name(last)} makes it worse, by {format_gap(repair, judged.measure.kind)}",
            "bad",
        )
    target = "drift" if of_drift else "gap to the experts"
    share = _format_share(closed)
    if not repair.side:
        return f"The repair closes no clear part of the {target}" + (f": {share}" if share else ""), "mixed"
    if not is_measured(closed.value):
        if behind is not None and behind.side < 0:
            return "Repair helps; its share of the gap to the experts is unknown", "good"
        return "Repair helps, where merging had left no clear gap to the experts", "good"
    verb = "takes away" if of_drift else "closes"
    gain = "" if over_base is None or over_base.side else ", yet shows no clear gain over the base"
    return f"Repair {verb} {share} of the {target}{gain}", "mixed" if gain else "good"


def _bad_experts_text(run: DriftRun, judged: Verdict) -> str:
    """Return the headline of a run with bad experts: no other number holds then."""
    bad, about = judged.bad_experts, judged.measure
    is_one = len(bad) == 1
    faults = {
        "worse than its base" if is_one else "worse than the base": _is_below_base,
        "not clearly above chance": _chance_of_bad_expert,
        f"far less accurate than {'its' if is_one else 'their'} features": _accuracy_of_features,
    }
    kinds = [text for text, has_fault in faults.items() if any(has_fault(run, about, task) for task in bad)]
    experts = f"expert of {bad[0]} is" if is_one else f"experts of {shorten_list(bad, 2)} are"
    return f"Check prompt and labels first: the {experts} {' or '.join(kinds)}"


def _worse_than_base_text(judged: Verdict, gap: ModelGap, still: str) -> str:
    kind, num_tasks = judged.measure.kind, len(judged.tasks)
    if judged.measure.role == RELATIVE.role:
        words = "farther from its experts than the base"
    else:
        words = f"worse than its base by {format_gap(gap, kind)}" + " points" * (kind == "share")
    if num_tasks > 1:
        words += f", clearly on {len(gap.worse)} of {num_tasks} tasks"
    words += f" but better on {len(gap.better)}" if gap.better else ": don't use it"
    return f"{still} {words}" if still else start_sentence(words)


def _unrepaired_merge_headline(
    run: DriftRun, judged: Verdict, over_base: ModelGap | None, behind: ModelGap | None
) -> tuple[str, _Tone]:
    """Return sentence and tone for a merge without calibration that is not clearly worse than its base."""
    if not judged.merged:
        return "No merged model to compare with base and experts", "none"
    if behind is not None and not behind.side:
        return "Merging leaves no clear gap to the experts", "good"
    if over_base is None:
        if behind is None:
            return (
                f"Nothing to compare {display_name(judged.merged)} with: neither base nor experts measured",
                "none",
            )
        unit = " points" * (judged.measure.kind == "share")
        way = "better than" if behind.side > 0 else "behind"
        tone: _Tone = "good" if behind.side > 0 else "mixed"
        return f"{format_gap(behind, judged.measure.kind)}{unit} {way} the experts", tone
    if not over_base.side:
        return "No clear gain over the base", "mixed"
    if judged.measure.role == RELATIVE.role:
        return "Nearer to the experts than the base", "good"
    gain = mean_change(run, judged.measure, judged.tasks, ("base", "expert")) if behind else None
    kept = interval_ratio(over_base.change, gain.interval) if gain and gain.side > 0 else Interval(math.nan)
    text = f"Merging keeps {_format_share(kept)} of the experts' gain over the base" if _format_share(kept) else ""
    return text or "Better than its base", "good"


def _format_share(share: Interval) -> str:
    """Format a share with its interval, "48 % (42 to 54 %)"; empty if it is unknown."""
    if not is_measured(share.value):
        return ""
    ends = f" ({100 * share.low:.0f} to {100 * share.high:.0f} %)" if is_measured(share.low) else ""
    return f"{100 * share.value:.0f} %{ends}"


def headline_sentence(shown: Headline) -> str:
    """Return the headline as one plain sentence."""
    return f"{shown.text}{f' ({shown.so_far})' if shown.so_far else ''}."


_SYNTHETIC = (
    "Synthetic demo: DriftLens generated samples and models. The numbers show how the tool works; they are no "
    "benchmark."
)


def caveat_sentences(run: DriftRun) -> list[str]:
    """Return caveats to show before any number: synthetic data, unfinished run, warnings."""
    notes = [_SYNTHETIC] if run.manifest.synthetic else []
    state, damage = last_job_state(run)
    if damage:
        notes.append(damage)
    # Without a finish time tables may be missing, however the last job ended.
    if not run.manifest.finished and state != "done":
        notes.append(f"This run is {state.replace('unknown', 'unfinished')}; missing parts may follow.")
    elif state not in ("done", "unknown"):
        job = "A job is still running" if state == "running" else f"The last job is {state}"
        notes.append(f"{job} on this run; the results below are finished.")
    return notes + [f"Warning: {text}" for text in run.manifest.warnings]


def agreement_sentence(run: DriftRun) -> Iterator[str]:
    """Yield a sentence on how often each model predicts the same as the expert; no labels needed."""
    shares = []
    for variant in run.variants:
        flipped = share_of_true(run.outputs(variant=variant)["flipped"])
        if flipped.n:
            same = share_interval(1 - flipped.value, flipped.n)
            shares.append(f"{display_name(variant)} {format_estimate(same, 'share')}")
    if shares:
        yield f"Same answer as the expert (n = {flipped.n}, without labels): {', '.join(shares)}."


def task_table(run: DriftRun, judgement: Verdict) -> Table:
    """Return a row per task and one for their mean: every model, a change with its interval, the remaining drift."""
    if not judgement.means:
        return Table.of("tasks", "Task by task", {"task": "text"}, [])
    about, heads = judgement.measure, _unique_variant_titles([*judgement.means])
    # The change from the merged model, or else the first that was measured.
    gaps = sorted(judgement.gaps, key=lambda gap: gap.against != judgement.merged)[:1]
    last = judgement.after if judgement.after in heads else judgement.merged
    is_drift = about.role == RELATIVE.role
    unit: Kind = "points" if about.kind == "share" else "number"
    kinds: dict[str, Kind] = {"task": "text", **dict.fromkeys(heads.values(), about.kind)}
    for gap in gaps:
        difference = f"{heads[gap.variant]} - {heads[gap.against]}"
        kinds |= dict.fromkeys((difference, "95 % low", "95 % high"), unit)
    kinds |= {} if is_drift else {"relative drift": "share"}
    unknown, rows = Interval(math.nan), []
    for task in run.tasks:
        # On other tasks scores may be of another metric.
        is_common = task in judgement.tasks
        values = [value_on_task(run, about, task, variant).value if is_common else math.nan for variant in heads]
        ends = [end for gap in gaps for end in gap.by_task.get(task, unknown).ends]
        drift = [] if is_drift else [value_on_task(run, RELATIVE, task, last).value]
        rows.append([task, *values, *ends, *drift])
    if len(judgement.tasks) > 1:
        values = [mean.value for mean in judgement.means.values()]
        ends = [end for gap in gaps for end in gap.change.ends]
        rows.append([f"mean of {len(judgement.tasks)}", *values, *ends, *([] if is_drift else [math.nan])])
    note = f"Relative drift is that of {display_name(last)} (pooled feature)."
    changes = [change_on_task(run, about, task, (gap.against, gap.variant)) for gap in gaps for task in gap.by_task]
    by_task = pairing_by_task(changes)
    # No stored answers would pair drifts of different samples.
    if not is_drift or all(by_task.values()):
        note = f"{note} {pairing_note(by_task)}".rstrip()
    return Table.of("tasks", f"Task by task: {about.title}", kinds, rows, note)


def other_models_table(run: DriftRun, judgement: Verdict, *, controls: bool = True, everyone: bool = False) -> Table:
    """Return means over tasks of models that the verdict omits: other calibrations, baselines.

    Args:
        run: the run.
        judgement: its verdict.
        controls: True to include anchors of calibrations.
        everyone: True to include all models, experts last.
    """
    is_drift = judgement.measure.role == RELATIVE.role
    rows = []
    names = [name for name in run.variants if everyone or name not in judgement.means]
    names += ["expert"] * (everyone and "expert" in judgement.means)
    for variant in (name for name in names if controls or not is_control(name)):
        means = {
            about.title: mean_on_tasks(run, about, tasks, variant) for about, tasks in common_measures(run, [variant])
        }
        average, drift = (means.get(name, Interval(math.nan)) for name in (judgement.measure.title, RELATIVE.title))
        rows.append((display_name(variant), *average.ends, drift.value))
    heading = "mean" if is_drift else f"mean {judgement.measure.title}"
    kind = judgement.measure.kind
    kinds = {"model": "text", heading: kind, "95 % low": kind, "95 % high": kind, "relative drift": "share"}
    which = "All" if everyone else "Other"
    return Table.of("others", f"{which} models, means over tasks", kinds, rows)


def summary_table(run: DriftRun) -> Table:
    """Return a row per task, then their mean: scores of measured models with 95 % intervals, and their final drift."""
    variants = [name for name in dict.fromkeys(("base", "expert", *run.variants)) if variant_kind(name) != "baseline"]
    heads = _unique_variant_titles(variants)
    metrics = [main_metrics(run).get(task, ACCURACY) for task in run.tasks]
    # Scores by different metrics have no mean.
    mean = [f"mean of {len(run.tasks)}"] if len(run.tasks) > 1 and len(set(metrics)) == 1 else []

    def values_by_heading(measure: Measure) -> dict[str, list[Interval]]:
        levels = {variant: [value_on_task(run, measure, task, variant) for task in run.tasks] for variant in variants}
        return {
            heads[variant]: [*cells, *(mean_over_tasks(cells) for _ in mean)]
            for variant, cells in levels.items()
            if any(cell.is_measured for cell in cells)
        }

    scores, drifts = values_by_heading(SCORE), values_by_heading(RELATIVE)
    kind: Kind = "share" if all(metric.kind == "share" for metric in metrics) else "number"
    places = range(len(run.tasks) + len(mean))
    counts = [max((cells[place].n for cells in scores.values()), default=0) or None for place in places]
    columns: dict[str, tuple[Kind, Sequence[Any]]] = {
        "task": ("text", [*run.tasks, *mean]),
        "metric": ("text", [metric.title for metric in (*metrics, *metrics[:1])][: len(places)]),
        "test samples": ("count", counts),
    }
    for head, cells in scores.items():
        ends = zip(("", " low", " high"), zip(*(cell.ends for cell in cells), strict=True), strict=True)
        columns |= {f"{head}{end}": (kind, values) for end, values in ends}
    columns |= {f"drift of {head}": ("share", [cell.value for cell in cells]) for head, cells in drifts.items()}
    kinds = {head: kind for head, (kind, _) in columns.items()}
    rows = [*zip(*(values for _, values in columns.values()), strict=True)]
    note = "95 % intervals over samples. Drift: final feature, relative to the expert's norm."
    return Table.of("summary", f"{run.name} ({run.id})", kinds, rows, note)


def _unique_variant_titles(variants: Sequence[str]) -> dict[str, str]:
    """Return display titles of variants; variants with the same title keep their names."""
    titles = {variant: display_name(variant) for variant in variants}
    return {name: name if [*titles.values()].count(head) > 1 else head for name, head in titles.items()}


def final_drift_table(
    run: DriftRun,
    variants: Sequence[str] | None = None,
    name: str = "final-drift",
    title: str = "Final feature against each task's expert",
) -> Table:
    """Return a table of final drift, relative drift and cosine per task and variant (default: all), with intervals."""
    final = run.layers(layer="final") if run.manifest.layers else run.layers()
    to_base = final.set_index(["task", "variant"])["drift_vs_base"].to_dict()
    rows = []
    for task in run.tasks:
        for variant in run.variants if variants is None else variants:
            if (task, variant) not in to_base:
                continue
            values = [value_on_task(run, about, task, variant) for about in (DRIFT, RELATIVE, COSINE)]
            # Intervals of means are symmetric (Student), so half of one is enough.
            drift, relative, cosine = ((value.value, value.high - value.value) for value in values)
            distance = json_value(to_base[task, variant])
            rows.append((task, display_name(variant), *drift, *relative, distance, *cosine, values[0].n))
    return Table.of(
        name,
        title,
        {
            **{"task": "text", "model": "text", "L2 drift": "number", "L2 drift +-": "number"},
            **{"relative drift": "share", "relative drift +-": "share", "of base distance": "share"},
            **{"cosine": "number", "cosine +-": "number", "samples": "count"},
        },
        rows,
        "Means over diagnosis samples with half a 95 % interval. Relative: to the expert's feature norm, taken as "
        "exact. Of base distance: relative to the distance from base to expert.",
    )


def moe_routing_table(run: DriftRun) -> Table:
    """Return a table of tokens routed to other MoE experts than in the expert model, by layer."""
    layers = run.layers()
    rows = []
    for row in layers[layers["rerouted"].notna()].to_dict("records"):
        place = (row["task"], display_name(row["variant"]), run.layer_name(row["layer"]))
        rows.append((*place, row["rerouted"], row["rerouted_share"], row["n"]))
    return Table.of(
        "routing",
        "Tokens routed to other experts than in the expert model",
        {
            **{"task": "text", "model": "text", "layer": "text", "tokens sent elsewhere": "share"},
            **{"share of drift": "share", "samples": "count"},
        },
        rows,
        "Share of drift: the effect of rerouting on the layer's features, projected on their drift. Table `routing` "
        "counts tokens by expert.",
    )
