"""What a reader who reads nothing else should know: what is wrong, how sure that is, where it comes from, what to do.

The same words stand first in terminal, model card, report and dashboard. A word such as "worse" is said only where the
95 % interval of the difference excludes 0.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from driftlens.records.checks import self_checks
from driftlens.records.intervals import Interval, mean_over_tasks
from driftlens.records.listing import is_live
from driftlens.records.outcomes import (
    MEASURES,
    Measure,
    Outcome,
    TaskMeans,
    outcome_change,
    outcomes,
    score_change,
    task_means,
)
from driftlens.records.reading import Kind, Sheet, is_measured, written
from driftlens.records.run import DriftRun, remembered
from driftlens.records.swept import rho_control
from driftlens.records.tables import plain
from driftlens.variants import calibrated, part_of, title

MOST_WORDS = 60
"""Of the verdict, numbers among them."""
_ROOM = (("all", True, 3), ("mixed", True, 3), ("mixed", False, 3), ("none", False, 3), ("none", False, 0))
"""For which changes tasks are counted, whether the source's share is told, and the rank below which all must fit in."""


@dataclass(frozen=True)
class Gap:
    """How one model differs from another: `change` on the mean over tasks, by its 95 % interval.

    `side` is 1 where that says that the model is better, -1 where worse, 0 where it can't tell; `better` and `worse`
    are the tasks on which their own intervals say so.
    """

    variant: str
    against: str
    change: Interval
    by_task: Mapping[str, Interval]
    side: int
    better: tuple[str, ...]
    worse: tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """The layer with the largest share of a variant's final drift, a mean over tasks that lie from `low` to `high`.

    The intervals of `rivals` overlap its, so that they may carry as much.
    """

    layer: int
    name: str
    share: Interval
    low: float
    high: float
    rivals: tuple[str, ...]


@dataclass(frozen=True)
class Verdict:
    """The verdict on a run, in numbers and in words.

    Attributes:
        measure: what models are judged by: the tasks' own scores, or relative drift where nothing was scored.
        tasks: on which every compared model was measured.
        merged: the merged model, or the baseline that takes its place; empty without.
        after: the calibrated variant; empty without.
        means: by variant, `expert` for each task's own, over those tasks.
        gaps: merged against experts and base, calibrated against merged and base, those that there are.
        worst: the task that is furthest behind its expert, if clearly so; else empty.
        bad_experts: tasks whose expert is clearly worse than the base.
        source: None where no share was measured.
        command: what to do next; empty where none can.
        sentences: all of it in at most 60 words, numbers among them and a command one; what has no room is left out,
            first on how many tasks a change is clear, then the worst task, then the source's share, then the source.
    """

    measure: Measure
    tasks: tuple[str, ...]
    merged: str
    after: str
    means: Mapping[str, Interval]
    gaps: tuple[Gap, ...]
    worst: str
    bad_experts: tuple[str, ...]
    source: Source | None
    command: str
    sentences: tuple[str, ...]


@remembered
def verdict(run: DriftRun, name: str = "") -> Verdict:
    """The verdict on the merged model and on one calibration: `name`, or the one that was added last.

    Raises:
        RunError: a table can't be read.
    """
    others = [variant for variant in run.variants if part_of(variant) in ("merged", "baseline")]
    merged = "merged" if "merged" in others else next(iter(others), "")
    made = [variant for variant in run.variants if part_of(variant) == "calibrated"]
    after = calibrated(name) if name else next(reversed(made), "")
    wanted = [
        variant for variant in ("base", "expert", merged, after) if variant in (*run.variants, "expert")
    ]
    found = outcomes(run, wanted)
    scored = [v for v in wanted if any(e.variant == v and is_measured(e.score.value) for e in found)]
    is_scored = bool({merged, after} & set(scored))
    compared = scored if is_scored else [variant for variant in wanted if variant != "expert"]
    means = task_means(run, compared)
    means = [at for at in means if (at.about.split == "test" if is_scored else at.measure == "relative")]
    source = source_of(run, merged)
    if not means or not {merged, after} & set(compared):
        nothing = ("Nothing was measured that a verdict could rest on.", *_of_source(source, merged))
        return Verdict(MEASURES["relative"], (), merged, after, {}, (), "", (), source, "", nothing)
    mean = max(means, key=lambda mean: len(mean.tasks))
    of = "score" if is_scored else "relative"
    cells = {(entry.task, entry.variant): entry for entry in found}
    pairs = [(merged, "expert"), (merged, "base"), (after, merged), (after, "base")]
    gaps = {
        pair: _gap(run, of, mean, cells, pair)
        for pair in (*pairs, (after, "expert"), ("expert", "base"))
        if set(pair) <= set(compared)
    }
    last = after if after in compared else merged
    behind = {task: cells[task, last].relative.value for task in mean.tasks}
    if is_scored:
        gap = gaps.get((last, "expert"))
        behind = {task: abs(gap.by_task[task].value) for task in gap.worse} if gap else {}
    worst = max(behind, key=lambda task: behind[task], default="")
    bad = gaps["expert", "base"].worse if ("expert", "base") in gaps else ()
    command = _next(run, gaps, merged, after)
    own = {variant: getattr(cells[worst, variant], of) for variant in compared} if worst else {}
    told = tuple(gaps[pair] for pair in pairs if pair in gaps)
    is_told = len(mean.tasks) > 1 and worst and not bad
    failed = self_checks(run).count("fail")

    def further(whole: bool) -> Iterator[tuple[int, str]]:
        yield 1, f"Experts worse than base: {_listed(bad)}." if bad else ""
        yield 3, f"Worst: {worst} ({_values(own, mean.about.kind)})." if is_told else ""
        yield from ((2, text) for text in _of_source(source, merged, whole=whole))
        yield 0, f"Self-checks failed: {failed}." if failed else ""
        yield 0, f"Next: `{command}`." if command else ""

    which = f" (last of {len(made)})" if len(made) > 1 and after == made[-1] else ""
    said: tuple[str, ...] = ()
    # Tasks are counted as far as that leaves room: for the source, or else for experts that are bad themselves.
    for counted, whole, rank in _ROOM:
        first = (_of_means(mean), *_of_gaps(told, mean, which, counted))
        ranked = [*((0, text) for text in first), *further(whole)]
        said = _fitting(ranked)
        if all(text in said for at, text in ranked if text and at < rank):
            break
    return Verdict(mean.about, mean.tasks, merged, after, mean.means, told, worst, bad, source, command, said)


def _fitting(ranked: Sequence[tuple[int, str]]) -> tuple[str, ...]:
    """Those sentences that fit in, each beside all of a lower rank, in the order given."""
    left, kept = MOST_WORDS, set[str]()
    for _, text in sorted(ranked, key=lambda entry: entry[0]):
        left -= num_words(text)
        kept |= {text} if left >= 0 else set()
    return tuple(text for _, text in ranked if text and text in kept)


def num_words(text: str) -> int:
    """Words and numbers; a command is one."""
    return len(re.findall(r"`[^`]*`|\S*\w\S*", text))


def shareable(run: DriftRun, text: str) -> str:
    """A sentence or command for a file that others read: where the run lies tells them nothing, and may name who."""
    return text.replace(shlex.quote(str(run.path)), shlex.quote(run.path.absolute().name))


def _gap(
    run: DriftRun, of: str, mean: TaskMeans, found: Mapping[tuple[str, str], Outcome], pair: tuple[str, str]
) -> Gap:
    sign = 1 if mean.about.worse == "lower" else -1
    by_task = {
        task: outcome_change(run, of, found[task, pair[1]], found[task, pair[0]]) for task in mean.tasks
    }
    start, end = (mean.means[name].value for name in reversed(pair))
    change = replace(mean_over_tasks([*by_task.values()]), value=end - start)
    sides = {task: sign * _side(at) for task, at in by_task.items()}
    better, worse = (tuple(task for task, side in sides.items() if side == way) for way in (1, -1))
    return Gap(*pair, change, by_task, sign * _side(change), better, worse)


def _side(change: Interval) -> int:
    """1 where the whole interval lies above 0, -1 where below, 0 where it holds 0 or is not known."""
    return (change.low > 0) - (change.high < 0)


def _next(run: DriftRun, gaps: Mapping[tuple[str, str], Gap], merged: str, after: str) -> str:
    """The command that most likely helps; empty for live modules, which no command can open."""
    sides = {pair: gap.side for pair, gap in gaps.items()}
    at = shlex.quote(str(run.path))
    if is_live(run.manifest):
        return ""
    if ("expert", "base") in gaps and gaps["expert", "base"].worse:
        return f"driftlens validate {at}/spec.yaml --deep"
    if sides.get((after or merged, "expert"), -1) >= 0:
        return f"driftlens report {at}"
    if not any(info.automatic for info in run.manifest.calibrations.values()):
        return f"driftlens calibrate {at} --name best --auto"
    return f"driftlens advise {at} --search"


def _of_means(mean: TaskMeans) -> str:
    """What every model has, side by side."""
    what, n = mean.about.title, max(at.n for at in mean.means.values())
    over = "" if len(mean.tasks) > 1 else f" on {mean.tasks[0]}"
    counts = [f"{len(mean.tasks)} tasks"] * (len(mean.tasks) > 1) + [f"n = {n}"] * bool(n)
    counted = f" ({', '.join(counts)})" if counts else ""
    return f"{what[:1].upper()}{what[1:]}{over}{counted}: {_values(mean.means, mean.about.kind)}."


def _values(found: Mapping[str, Interval], kind: Kind) -> str:
    return ", ".join(f"{_called(variant)} {written(at.value, kind)}" for variant, at in found.items())


def _called(variant: str) -> str:
    return "experts" if variant == "expert" else title(variant)


def _of_gaps(gaps: Sequence[Gap], mean: TaskMeans, which: str, counted: str) -> Iterator[str]:
    """A sentence per model, with what it is compared with; units and the number of tasks are said once."""
    said = [_of_gap(gap, mean, counted, is_first=gap is gaps[0]) for gap in gaps]
    for variant in dict.fromkeys(gap.variant for gap in gaps):
        own = "; ".join(text for gap, text in zip(gaps, said, strict=True) if gap.variant == variant)
        yield f"{title(variant)}{which if part_of(variant) == 'calibrated' else ''}: {own}."


def _of_gap(gap: Gap, mean: TaskMeans, counted: str, *, is_first: bool) -> str:
    is_share, num_tasks = mean.about.kind == "share", len(mean.tasks)
    change, digits = (gap.change.scaled(100), ".1f") if is_share else (gap.change, ".3g")
    # Towards 0, where that is excluded: a reader who subtracts finds what the words say.
    halves = change.value - change.low, change.high - change.value
    half = halves[change.value < 0] if gap.side else max(halves)
    ends = f" +- {half:{digits}}" if is_measured(half) else ""
    sides = {"better": len(gap.better), "worse": len(gap.worse)}
    is_counted = num_tasks > 1 and (counted == "all" or (counted == "mixed" and all(sides.values())))
    if not gap.side:
        counts = ", ".join(f"{k} {way}" for way, k in sides.items() if k and is_counted)
        counts = f"; {counts}" if counts else ""
        unit = " points" if is_share and is_first else ""
        return f"no clear difference to {_called(gap.against)} ({change.value:+{digits}}{ends}{unit}{counts})"
    way, other = ("better", "worse") if gap.side > 0 else ("worse", "better")
    reverse = f", {sides[other]} {other}" if sides[other] else ""
    on = "all" if sides[way] == num_tasks else f"{sides[way]} of {num_tasks}"
    counts = f" ({f'clear on {on}' if is_first else sides[way]}{reverse})" if is_counted else ""
    unit = " points" if is_share and is_first else ""
    return f"{abs(change.value):{digits}}{ends}{unit} {way} than {_called(gap.against)}{counts}"


def source_of(run: DriftRun, variant: str) -> Source | None:
    """The layer with the largest share of a variant's final drift; None where no share was measured."""
    found = shares(run, variant)
    if not found:
        return None
    (layer, (share, by_task)), *others = found.items()
    # Without an interval any other layer may carry as much.
    rivals = tuple(run.layer_name(at) for at, (other, _) in others if not other.high < share.low)
    return Source(layer, run.layer_name(layer), share, min(by_task), max(by_task), rivals)


@remembered
def shares(run: DriftRun, variant: str, task: str | None = None) -> dict[int, tuple[Interval, list[float]]]:
    """Every layer's share of the final drift, the largest first: the mean over tasks, and that of every task."""
    rows = run.layers(task, variant) if variant else run.layers().head(0)
    found: dict[int, tuple[Interval, list[float]]] = {}
    rows = rows[rows["final_share"].notna()].filter(regex="^(layer|final_share.*|jacobian_samples)$")
    for layer in rows["layer"].unique().tolist():
        by_task = [share_of(row) for row in rows[rows["layer"] == layer].to_dict("records")]
        found[layer] = mean_over_tasks(by_task), [at.value for at in by_task]
    return dict(sorted(found.items(), key=lambda item: -item[1][0].value))


def share_of(row: Mapping[Any, Any] | pd.Series[Any], column: str = "final_share") -> Interval:
    """A layer's share of the final drift with its interval, which older runs lack, from its row of the layer table."""
    values = [plain(row.get(name)) for name in (column, f"{column}_low", f"{column}_high")]
    share, low, high = (math.nan if value is None else float(value) for value in values)
    return Interval(share, low, high, plain(row["jacobian_samples"]) or 0)


def _of_source(source: Source | None, variant: str, *, whole: bool = True) -> Iterator[str]:
    if source is None:
        return
    start = f"Largest source{' not clear' * bool(source.rivals)}: {source.name}"
    if not whole:
        others = source.rivals[0] if len(source.rivals) == 1 else f"{len(source.rivals)} others"
        yield f"{start}{f' or {others}' * bool(source.rivals)}."
        return
    share, n = source.share, f" (n = {source.share.n})" if source.share.n else ""
    known = is_measured(share.low)
    ends = f"{100 * share.low:.0f} to {100 * share.high:.0f} %" if known else f"{100 * share.value:.0f} %"
    rivals = f"; or {_listed(source.rivals, most=1)}" * bool(source.rivals)
    yield f"{start}, {ends} of {title(variant)}'s drift{n}{rivals}."


def _listed(names: Sequence[str], most: int = 2) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def task_sheet(run: DriftRun, found: Verdict) -> Sheet:
    """A row per task and one for their mean: every model, a change, the drift that is left, the main source."""
    if not found.means:
        return Sheet("tasks", "Task by task", {"task": "text"}, [])
    heads = {variant: title(variant) for variant in found.means}
    heads |= {variant: variant for variant in heads if [*heads.values()].count(heads[variant]) > 1}
    gap = next((gap for gap in found.gaps if gap.against == found.merged), next(iter(found.gaps), None))
    last = found.after if found.after in heads else found.merged
    of = "relative" if found.measure == MEASURES["relative"] else "score"
    unit: Kind = "points" if found.measure.kind == "share" else "number"
    what = f"{heads[gap.variant]} - {heads[gap.against]}" if gap else ""
    kinds: dict[str, Kind] = {"task": "text", **dict.fromkeys(heads.values(), found.measure.kind)}
    kinds |= dict.fromkeys((what, "95 % low", "95 % high"), unit) if gap else {}
    kinds |= {} if of == "relative" else {"relative drift": "share"}
    kinds |= {"main source": "text"} if found.source else {}
    cells = {(entry.task, entry.variant): entry for entry in outcomes(run, [*heads])}

    def with_change(row: dict[str, Any], change: Interval) -> dict[str, Any]:
        return {**row, what: change.value, "95 % low": change.low, "95 % high": change.high}

    rows: list[dict[str, Any]] = []
    for task in run.tasks:
        row = {head: getattr(cells[task, variant], of).value for variant, head in heads.items()}
        row = row if task in found.tasks else {}  # its score may be of another metric
        row |= {"task": task, "relative drift": cells[task, last].relative.value}
        for layer, (share, _) in [*shares(run, found.merged, task).items()][:1]:
            row["main source"] = f"{run.layer_name(layer)} {100 * share.value:.0f} %"
        rows.append(with_change(row, gap.by_task[task]) if gap and task in gap.by_task else row)
    if len(found.tasks) > 1:
        row = {head: found.means[variant].value for variant, head in heads.items()}
        row |= {"task": f"mean of {len(found.tasks)}"}
        rows.append(with_change(row, gap.change) if gap else row)
    note = f"Relative drift is that of {title(last)} (pooled feature)"
    if found.source:
        num_tasks, n = len(shares(run, found.merged)[found.source.layer][1]), found.source.share.n
        share_n = f", n = {n // num_tasks} a task" if n else ""
        note += f"; main source is the largest share of {title(found.merged)}'s drift (full state{share_n})"
    note += ". "
    note += "95 % intervals over samples, "
    pairs = [score_change(run, task, (gap.against, gap.variant)) for task in gap.by_task] if gap else []
    is_paired = of == "relative" or all(at.is_paired for at in pairs)
    note += (
        "paired." if is_paired else "not paired on all tasks, as single answers are not stored, so too wide."
    )
    heading = f"Task by task: {found.measure.title}"
    return Sheet("tasks", heading, kinds, [[row.get(head) for head in kinds] for row in rows], note)


def others_sheet(run: DriftRun, found: Verdict) -> Sheet:
    """Means over tasks of what the verdict leaves out: anchors alone, controls, other calibrations, baselines."""
    rows = []
    for variant in run.variants:
        if variant not in found.means:
            means = {mean.about.title: mean.means[variant] for mean in task_means(run, [variant])}
            at, drift = (
                means.get(name, Interval(math.nan)) for name in (found.measure.title, "relative drift")
            )
            rows.append((title(variant), at.value, at.low, at.high, drift.value))
    of = "relative" if found.measure == MEASURES["relative"] else "score"
    for own in filter(None, (rho_control(run, name) for name in run.manifest.calibrations)):
        at = mean_over_tasks([getattr(entry, of) for entry in own if entry.task in found.tasks])
        drift = mean_over_tasks([entry.relative for entry in own])
        rows.append((title(own[0].variant), at.value, at.low, at.high, drift.value))
    what = "mean" if found.measure == MEASURES["relative"] else f"mean {found.measure.title}"
    kind = found.measure.kind
    kinds = {"model": "text", what: kind, "95 % low": kind, "95 % high": kind, "relative drift": "share"}
    return Sheet("others", "Other models, means over tasks", kinds, rows)
