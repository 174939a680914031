"""What a reader who reads nothing else should know: what is wrong, how sure that is, where it comes from, what to do.

The same words stand first in terminal, model card, report and dashboard. A word such as "worse" is said only where the
95 % interval of the difference excludes 0.
"""

from __future__ import annotations

import itertools
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from driftlens.results.checks import self_checks
from driftlens.results.formatting import Kind, is_measured, written
from driftlens.results.frame import Measure, paired_by_task, pairing
from driftlens.results.measures import (
    COSINE,
    DRIFT,
    RELATIVE,
    SCORE,
    change,
    common,
    level,
    main_metrics,
    mean,
    mean_change,
)
from driftlens.results.recommendations import comparison, nearer_merge, next_command
from driftlens.results.table import Table
from driftlens.runs.run import DriftRun, remembered
from driftlens.runs.tables import plain
from driftlens.utils.errors import counted, some_of
from driftlens.utils.intervals import Interval, mean_over_tasks
from driftlens.utils.metrics import ACCURACY
from driftlens.utils.rounding import COARSE, Change
from driftlens.utils.variants import calibrated, calibration_of, is_control, part_of, title

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
        tasks: on which every compared model was measured; `means` are over them.
        merged: the merged model, or the baseline that takes its place; empty without, as is the calibrated `after`.
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
    """The verdict on the merged model and on one calibration: `name`, or the one that was added last."""
    uncalibrated = [variant for variant in run.variants if part_of(variant) in ("merged", "baseline")]
    merged = "merged" if "merged" in uncalibrated else next(iter(uncalibrated), "")
    repairs = [variant for variant in run.variants if part_of(variant) == "calibrated"]
    after = calibrated(name) if name else next(reversed(repairs), "")
    judged = _judged_by(run, merged, after)
    source = _source_of(run, merged)
    if judged is None:
        nothing = ("Nothing was measured that a verdict could rest on.", *_of_source(source, merged))
        return Verdict(RELATIVE, (), merged, after, {}, (), "", (), source, "", nothing)
    about, tasks, compared = judged
    pairs = [(merged, "expert"), (merged, "base"), (after, merged), (after, "base")]
    gaps = {
        pair: _gap(run, about, tasks, pair)
        for pair in (*pairs, (after, "expert"), ("expert", "base"))
        if {*pair} <= {*compared}
    }
    last = after if after in compared else merged
    behind = {task: level(run, RELATIVE, task, last).value for task in tasks}
    if about.role == SCORE.role:
        gap = gaps.get((last, "expert"))
        behind = {task: abs(gap.by_task[task].value) for task in gap.worse} if gap else {}
    worst = max(behind, key=lambda task: behind[task], default="")
    bad = gaps["expert", "base"].worse if ("expert", "base") in gaps else ()
    to_experts = gaps.get((after or merged, "expert"))
    command = next_command(run, to_experts.side if to_experts else -1, bad)
    shown = tuple(gaps[pair] for pair in pairs if pair in gaps)
    means = {variant: mean(run, about, tasks, variant).interval for variant in compared}
    judgement = Verdict(about, tasks, merged, after, means, shown, worst, bad, source, command, ())
    on_worst = {variant: level(run, about, worst, variant).interval for variant in means} if worst else {}
    which = " (newest calibration)" if len(repairs) > 1 and after == repairs[-1] else ""
    unchanged = run.calibration_info(calibration_of(after) or "").is_what if after else ""
    failed = self_checks(run).count("fail")
    nearer = [*nearer_merge(comparison(run))] if merged == "merged" else []
    nearer += _lost(run, merged, after)
    return replace(judgement, sentences=_sentences(judgement, on_worst, which, unchanged, failed, nearer))


def _lost(run: DriftRun, merged: str, after: str) -> list[str]:
    """That most of what the merge or the calibration changes is lost to the number type that it is saved in."""
    of_merge = (run.manifest.merge or {}).get("change") if merged == "merged" else None
    of_calibration = run.calibration_info(calibration_of(after) or "").change if after else None
    records = {"the merge": of_merge, "the calibration": of_calibration}
    changes = {what: Change(**change) for what, change in records.items() if change}
    return [
        f"{change.dtype} loses about {100 * change.lost_share:.0f} % of the entries that {what} changes."
        for what, change in changes.items()
        if change.lost_share >= COARSE
    ]


def _judged_by(
    run: DriftRun, merged: str, after: str
) -> tuple[Measure, tuple[str, ...], tuple[str, ...]] | None:
    """What models are judged by, the tasks on which all were measured, and the models; None without any."""
    wanted = [name for name in ("base", "expert", merged, after) if name in (*run.variants, "expert")]
    scored = [name for name in wanted if any(level(run, SCORE, task, name).is_measured for task in run.tasks)]
    is_scored = bool({merged, after} & {*scored})
    compared = scored if is_scored else [name for name in wanted if name != "expert"]
    groups = common(run, compared) if {merged, after} & {*compared} else []
    role = SCORE.role if is_scored else RELATIVE.role
    groups = [(about, tasks) for about, tasks in groups if about.role == role]
    most = max(groups, key=lambda group: len(group[1]), default=None)
    return (*most, tuple(compared)) if most else None


def _sentences(
    judgement: Verdict,
    on_worst: Mapping[str, Interval],
    which: str,
    unchanged: str,
    failed: int,
    nearer: Sequence[str],
) -> tuple[str, ...]:
    """The verdict in words, of levels on the worst task, `which` calibration it is, and how many checks `failed`.

    `nearer` says which merge is nearer to the experts, and what a number type loses.
    """
    bad = [f"Experts worse than base: {some_of(judgement.bad_experts, 2)}."] if judgement.bad_experts else []
    is_told = len(judgement.tasks) > 1 and judgement.worst and not bad
    worst = [f"Worst: {judgement.worst} ({_values(on_worst, judgement.measure.kind)})."] if is_told else []
    end = [f"Self-checks failed: {failed}."] if failed else []
    end += [f"Next: `{judgement.command}`."] if judgement.command else []
    is_unchanged = [f"The calibrated model is {unchanged}."] if unchanged else []
    sentences: tuple[str, ...] = ()
    # Tasks are counted as far as that leaves room: for the source, or else for experts that are bad themselves.
    for counting, whole, rank in _ROOM:
        parts = (
            (0, [_of_means(judgement), *is_unchanged, *_of_gaps(judgement, which, counting)]),
            (1, [*bad, *nearer]),
            (3, worst),
            (2, _of_source(judgement.source, judgement.merged, whole=whole)),
            (0, end),
        )
        ranked = [(at, text) for at, texts in parts for text in texts]
        sentences = _fitting(ranked)
        if all(text in sentences for at, text in ranked if at < rank):
            break
    return sentences


def _fitting(ranked: Sequence[tuple[int, str]]) -> tuple[str, ...]:
    """Those sentences that fit in, each beside all of a lower rank, in the order given."""
    left, fitting = MOST_WORDS, set[str]()
    for _, text in sorted(ranked, key=lambda entry: entry[0]):
        left -= num_words(text)
        fitting |= {text} if left >= 0 else set()
    return tuple(text for _, text in ranked if text in fitting)


def num_words(text: str) -> int:
    """Words and numbers; a command is one."""
    return len(re.findall(r"`[^`]*`|\S*\w\S*", text))


def shareable(run: DriftRun, text: str) -> str:
    """A sentence or command for a file that others read: where the run lies tells them nothing, and may name who."""
    return text.replace(shlex.quote(str(run.path)), shlex.quote(run.path.absolute().name))


def _gap(run: DriftRun, about: Measure, tasks: tuple[str, ...], pair: tuple[str, str]) -> Gap:
    backwards = (pair[1], pair[0])
    by_task = {task: change(run, about, task, backwards) for task in tasks}
    over = mean_change(run, about, tasks, backwards)
    better, worse = (tuple(task for task, row in by_task.items() if row.side == way) for way in (1, -1))
    intervals = {task: row.interval for task, row in by_task.items()}
    return Gap(*pair, over.interval, intervals, over.side, better, worse)


def _of_means(judgement: Verdict) -> str:
    """What every model has, side by side."""
    what, n = judgement.measure.title, max(mean.n for mean in judgement.means.values())
    over = "" if len(judgement.tasks) > 1 else f" on {judgement.tasks[0]}"
    counts = [f"{len(judgement.tasks)} tasks"] * (len(judgement.tasks) > 1) + [f"n = {n}"] * bool(n)
    behind = f" ({', '.join(counts)})" if counts else ""
    return f"{what[:1].upper()}{what[1:]}{over}{behind}: {_values(judgement.means, judgement.measure.kind)}."


def _values(judgement: Mapping[str, Interval], kind: Kind) -> str:
    return ", ".join(f"{_called(variant)} {written(mean.value, kind)}" for variant, mean in judgement.items())


def _called(variant: str) -> str:
    return "experts" if variant == "expert" else title(variant)


def _of_gaps(judgement: Verdict, which: str, counting: str) -> Iterator[str]:
    """A sentence per model, with what it is compared with; units and the number of tasks are said once."""
    for variant, gaps in itertools.groupby(judgement.gaps, lambda gap: gap.variant):
        clauses = "; ".join(
            _of_gap(gap, judgement, counting, is_first=gap is judgement.gaps[0]) for gap in gaps
        )
        yield f"{title(variant)}{which if part_of(variant) == 'calibrated' else ''}: {clauses}."


def _of_gap(gap: Gap, judgement: Verdict, counting: str, *, is_first: bool) -> str:
    change = change_of_gap(gap, judgement.measure.kind) + " points" * (
        judgement.measure.kind == "share" and is_first
    )
    is_counted = counting == "all" or (counting == "mixed" and bool(gap.better and gap.worse))
    begins = gap is next((other for other in judgement.gaps if other.side), gap)
    counts = (
        _counts(gap, len(judgement.tasks), is_first=begins) if is_counted and len(judgement.tasks) > 1 else ""
    )
    if not gap.side:
        counted_change = f"{change}; {counts}" if counts else change
        return f"no clear difference to {_called(gap.against)} ({counted_change})"
    way = "better" if gap.side > 0 else "worse"
    return f"{change} {way} than {_called(gap.against)}{f' ({counts})' if counts else ''}"


def change_of_gap(gap: Gap, kind: Kind) -> str:
    """How much it is with the longer half of its interval, signed where it isn't clear which way.

    Where that half would reach 0 and the interval doesn't, both ends stand there instead.
    """
    change, digits = (gap.change.scaled(100), ".1f") if kind == "share" else (gap.change, ".3g")
    value = f"{abs(change.value):{digits}}" if gap.side else f"{change.value:+{digits}}"
    if not is_measured(change.low):
        return value
    half = f"{max(change.value - change.low, change.high - change.value):{digits}}"
    # As printed, since a reader subtracts what is printed.
    if gap.side and float(half) >= float(value):
        low, high = sorted(abs(end) for end in (change.low, change.high))
        return f"{value} ({low:{digits}} to {high:{digits}})"
    return f"{value} +- {half}"


def _counts(gap: Gap, num_tasks: int, *, is_first: bool) -> str:
    """On how many tasks the change is clear, first those that go the way of the mean."""
    sides = {"better": len(gap.better), "worse": len(gap.worse)}
    way, other = ("better", "worse") if gap.side >= 0 else ("worse", "better")
    if sides[other] and not (is_first and gap.side):
        return f"{counted(sides[way], 'task')} {way}, {sides[other]} {other}"
    if not gap.side:
        return f"{sides[way]} {way}" if sides[way] else ""
    if not is_first:
        return f"{sides[way]}/{num_tasks}"
    on = "all" if sides[way] == num_tasks else f"{sides[way]} of {num_tasks}"
    return f"clear on {on}" + (f", {sides[other]} {other}" if sides[other] else "")


def _source_of(run: DriftRun, variant: str) -> Source | None:
    """The layer with the largest share of a variant's final drift; None where no share was measured."""
    by_layer = shares(run, variant)
    if not by_layer:
        return None
    (layer, (share, by_task)), *others = by_layer.items()
    # Without an interval any other layer may carry as much.
    rivals = tuple(run.layer_name(at) for at, (other, _) in others if not other.high < share.low)
    return Source(layer, run.layer_name(layer), share, min(by_task), max(by_task), rivals)


@remembered
def shares(run: DriftRun, variant: str, task: str | None = None) -> dict[int, tuple[Interval, list[float]]]:
    """Every layer's share of the final drift, the largest first: the mean over tasks, and that of every task."""
    rows = run.layers(task, variant) if variant else run.layers().head(0)
    by_layer: dict[int, tuple[Interval, list[float]]] = {}
    rows = rows[rows["final_share"].notna()].filter(regex="^(layer|final_share.*|jacobian_samples)$")
    for layer in rows["layer"].unique().tolist():
        by_task = [share_of(row) for row in rows[rows["layer"] == layer].to_dict("records")]
        by_layer[layer] = mean_over_tasks(by_task), [share.value for share in by_task]
    return dict(sorted(by_layer.items(), key=lambda item: -item[1][0].value))


def share_of(row: Mapping[Any, Any]) -> Interval:
    """A layer's share of the final drift with its interval, which older runs lack, from its row of the layer table."""
    values = [plain(row.get(f"final_share{end}")) for end in ("", "_low", "_high")]
    share, low, high = (math.nan if value is None else float(value) for value in values)
    return Interval(share, low, high, plain(row["jacobian_samples"]) or 0)


def _of_source(source: Source | None, variant: str, *, whole: bool = True) -> Iterator[str]:
    if source is None:
        return
    start = f"Largest source{' not clear' * bool(source.rivals)}: {source.name}"
    if not whole:
        others = source.rivals[0] if len(source.rivals) == 1 else counted(len(source.rivals), "other")
        yield f"{start}{f' or {others}' * bool(source.rivals)}."
        return
    share, n = source.share, f" (n = {source.share.n})" if source.share.n else ""
    is_known = is_measured(share.low)
    ends = f"{100 * share.low:.0f} to {100 * share.high:.0f} %" if is_known else f"{100 * share.value:.0f} %"
    rivals = f"; or {some_of(source.rivals, 1)}" * bool(source.rivals)
    yield f"{start}, {ends} of {title(variant)}'s drift{n}{rivals}."


def task_sheet(run: DriftRun, judgement: Verdict) -> Table:
    """A row per task and one for their mean: every model, a change, the drift that is left, the main source."""
    if not judgement.means:
        return Table.of("tasks", "Task by task", {"task": "text"}, [])
    heads = {variant: title(variant) for variant in judgement.means}
    heads |= {variant: variant for variant in heads if [*heads.values()].count(heads[variant]) > 1}
    gap = next(
        (gap for gap in judgement.gaps if gap.against == judgement.merged), next(iter(judgement.gaps), None)
    )
    last = judgement.after if judgement.after in heads else judgement.merged
    what = f"{heads[gap.variant]} - {heads[gap.against]}" if gap else ""
    unit: Kind = "points" if judgement.measure.kind == "share" else "number"
    kinds: dict[str, Kind] = {"task": "text", **dict.fromkeys(heads.values(), judgement.measure.kind)}
    kinds |= dict.fromkeys((what, "95 % low", "95 % high"), unit) if gap else {}
    kinds |= {} if judgement.measure.role == RELATIVE.role else {"relative drift": "share"}
    sources = {task: next(iter(shares(run, judgement.merged, task).items()), None) for task in run.tasks}
    # Where all tasks have the same one, the verdict's own sentence says it.
    kinds |= {"main source": "text"} if len({source[0] for source in sources.values() if source}) > 1 else {}

    def row_of(task: str, values: Mapping[str, Interval], change: Interval | None) -> dict[str, Any]:
        row = {"task": task, **{heads[variant]: interval.value for variant, interval in values.items()}}
        ends = {what: change.value, "95 % low": change.low, "95 % high": change.high} if change else {}
        return row | ends

    rows = []
    for task in run.tasks:
        is_common = task in judgement.tasks  # elsewhere its score may be of another metric
        values = {variant: level(run, judgement.measure, task, variant) for variant in heads if is_common}
        row = row_of(task, values, gap.by_task.get(task) if gap else None)
        row["relative drift"] = level(run, RELATIVE, task, last).value
        if (largest := sources[task]) is not None:
            row["main source"] = f"{run.layer_name(largest[0])} {100 * largest[1][0].value:.0f} %"
        rows.append(row)
    if len(judgement.tasks) > 1:
        rows.append(row_of(f"mean of {len(judgement.tasks)}", judgement.means, gap.change if gap else None))
    table = [[row.get(head) for head in kinds] for row in rows]
    heading, note = (
        f"Task by task: {judgement.measure.title}",
        _note_on_tasks(run, judgement, gap, last, "main source" in kinds),
    )
    return Table.of("tasks", heading, kinds, table, note)


def _note_on_tasks(run: DriftRun, judgement: Verdict, gap: Gap | None, last: str, has_source: bool) -> str:
    """What the columns of `task_sheet` are of, and how its intervals were taken."""
    note = f"Relative drift is that of {title(last)} (pooled feature)"
    if judgement.source and has_source:
        num_tasks, n = len(shares(run, judgement.merged)[judgement.source.layer][1]), judgement.source.share.n
        share_n = f", n = {n // num_tasks} a task" if n else ""
        note += (
            f"; main source is the largest share of {title(judgement.merged)}'s drift (full state{share_n})"
        )
    rows = (
        [change(run, judgement.measure, task, (gap.against, gap.variant)) for task in gap.by_task]
        if gap
        else []
    )
    by_task = paired_by_task(rows)
    if judgement.measure.role == RELATIVE.role and not all(by_task.values()):
        return f"{note}."  # whose samples differ, which no single answers would mend
    return f"{note}. {pairing(by_task)}".rstrip()


def others_sheet(
    run: DriftRun, judgement: Verdict, *, controls: bool = True, everyone: bool = False
) -> Table:
    """Return means over tasks of what the verdict leaves out: other calibrations, baselines, with `controls` anchors.

    With `everyone` of all models, experts last.
    """
    is_drift = judgement.measure.role == RELATIVE.role
    rows = []
    names = [name for name in run.variants if everyone or name not in judgement.means]
    names += ["expert"] * (everyone and "expert" in judgement.means)
    for variant in (name for name in names if controls or not is_control(name)):
        means = {about.title: mean(run, about, tasks, variant) for about, tasks in common(run, [variant])}
        average, drift = (
            means.get(name, Interval(math.nan)) for name in (judgement.measure.title, RELATIVE.title)
        )
        rows.append((title(variant), *average.ends, drift.value))
    what = "mean" if is_drift else f"mean {judgement.measure.title}"
    kind = judgement.measure.kind
    kinds = {"model": "text", what: kind, "95 % low": kind, "95 % high": kind, "relative drift": "share"}
    which = "All" if everyone else "Other"
    return Table.of("others", f"{which} models, means over tasks", kinds, rows)


def summary_sheet(run: DriftRun) -> Table:
    """A row per task, then their mean: what base, experts, merged and calibrated models score, and their final drift.

    Scores have 95 % intervals; a model that was not measured has no columns.
    """
    listed = dict.fromkeys(("base", "expert", *run.variants))
    named = {name: title(name) for name in listed if part_of(name) != "baseline"}
    heads = {name: name if [*named.values()].count(head) > 1 else head for name, head in named.items()}
    metrics = [main_metrics(run).get(task, ACCURACY) for task in run.tasks]
    names = [*run.tasks]
    has_mean = len(names) > 1 and len(set(metrics)) == 1
    if has_mean:
        names.append(f"mean of {len(names)}")

    def measured(of: Measure) -> dict[str, list[Interval]]:
        """By heading, what was measured of every model on the tasks, and its mean."""
        columns = dict[str, list[Interval]]()
        for variant, head in heads.items():
            cells = [level(run, of, task, variant) for task in run.tasks]
            if any(cell.is_measured for cell in cells):
                columns[head] = [*cells, *([mean_over_tasks(cells)] if has_mean else [])]
        return columns

    scores, drifts = measured(SCORE), measured(RELATIVE)
    kind: Kind = "share" if all(metric.kind == "share" for metric in metrics) else "number"
    kinds: dict[str, Kind] = {"task": "text", "metric": "text", "test samples": "count"}
    kinds |= {f"{head}{end}": kind for head in scores for end in ("", " low", " high")}
    kinds |= {f"drift of {head}": "share" for head in drifts}
    rows: list[list[Any]] = []
    for place, (name, metric) in enumerate(zip(names, [*metrics, *metrics[:1]], strict=False)):
        cells = [column[place] for column in scores.values()]
        ends = [end for cell in cells for end in cell.ends]
        n = max((cell.n for cell in cells), default=0) or None
        rows.append([name, metric.title, n, *ends, *(column[place].value for column in drifts.values())])
    note = "95 % intervals over samples. Drift is that of the final feature, against the expert's norm."
    return Table.of("summary", f"{run.name} ({run.id})", kinds, rows, note)


def final_sheet(run: DriftRun) -> Table:
    """How far each variant's final features are from each task's expert, with intervals; the base's distance beside."""
    final = run.layers(layer="final") if run.manifest.layers else run.layers()
    to_base = final.set_index(["task", "variant"])["drift_vs_base"].to_dict()
    rows = []
    for task in run.tasks:
        for variant in (variant for variant in run.variants if (task, variant) in to_base):
            drift, relative, cosine = (
                level(run, about, task, variant) for about in (DRIFT, RELATIVE, COSINE)
            )
            distance = plain(to_base[task, variant])
            halves = [*_with_half(drift), *_with_half(relative), distance, *_with_half(cosine)]
            rows.append((task, title(variant), *halves, drift.n))
    return Table.of(
        "final-drift",
        "Final feature against each task's expert",
        {
            **{"task": "text", "model": "text", "L2 drift": "number", "L2 drift +-": "number"},
            **{"relative drift": "share", "relative drift +-": "share", "of base distance": "share"},
            **{"cosine": "number", "cosine +-": "number", "samples": "count"},
        },
        rows,
        "Means over diagnosis samples, with half their 95 % interval. Relative: against the norm of the expert's "
        "feature, taken as known. Of base distance: against the distance from base to expert.",
    )


def routing_sheet(run: DriftRun) -> Table:
    """Of mixtures of experts, how many tokens go to other experts than in the expert model, and what that changes."""
    layers = run.layers()
    rows = [
        (
            row["task"],
            title(row["variant"]),
            run.layer_name(row["layer"]),
            row["rerouted"],
            row["rerouted_share"],
            row["n"],
        )
        for row in layers[layers["rerouted"].notna()].to_dict("records")
    ]
    return Table.of(
        "routing",
        "Tokens that go to other experts than in the expert model",
        {
            **{"task": "text", "model": "text", "layer": "text", "tokens sent elsewhere": "share"},
            **{"share of the drift behind it": "share", "samples": "count"},
        },
        rows,
        "The share of drift is what sending them elsewhere changes in the layer's features, projected on their drift; "
        "the rest has the same routes. Table `routing` counts the tokens of every expert.",
    )


def _with_half(row: Interval) -> tuple[float, float]:
    return row.value, row.high - row.value
