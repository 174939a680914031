"""The first thing a reader sees: one sentence with its tone, a number for every model, and how much of a gap is closed.

Made from the rows that the verdict stands on, and the same on every surface. It claims what intervals support alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from driftlens.results.formatting import Kind, is_measured
from driftlens.results.measures import RELATIVE, mean_change
from driftlens.results.verdict import Gap, Verdict, change_of_gap, verdict
from driftlens.runs.run import DriftRun, remembered
from driftlens.utils.errors import counted
from driftlens.utils.intervals import Interval, ratio
from driftlens.utils.variants import part_of, title

_Tone = Literal["good", "mixed", "bad", "none"]
ORDER = ("base", "merged", "baseline", "calibrated", "expert")
"""Parts of models in the order of tiles, and of dots on the bar."""


@dataclass(frozen=True)
class Headline:
    """One sentence, and the numbers that stand beside it.

    Attributes:
        text: the sentence, without a full stop.
        tone: what colours it.
        so_far: "9 of 20 tasks measured" where some are still to come; else empty.
        tiles: every model's mean, base first and experts last, by variant.
        kind: how these numbers are written.
        measure: what they are of.
        closed: the share of the gap from the merged model to the experts that the repair closes; NaN without a repair,
            or where there is no clear gap.
    """

    text: str
    tone: _Tone
    so_far: str
    tiles: dict[str, Interval]
    kind: Kind
    measure: str
    closed: Interval


@remembered
def headline(run: DriftRun, name: str = "") -> Headline:
    """The headline of a run, and of one calibration: `name`, or the one that was added last."""
    judged = verdict(run, name)
    ordered = sorted(judged.means, key=lambda variant: ORDER.index(part_of(variant)))
    num_tasks = len(judged.tasks)
    so_far = (
        f"{num_tasks} of {counted(len(run.tasks), 'task')} measured" if num_tasks < len(run.tasks) else ""
    )
    closed = _closed(judged)
    text, tone = _said(run, judged, closed) if judged.means else ("Nothing was measured yet", "none")
    tiles = {variant: judged.means[variant] for variant in ordered}
    return Headline(text, tone, so_far, tiles, judged.measure.kind, judged.measure.title, closed)


def _gap(judged: Verdict, variant: str, against: str) -> Gap | None:
    pairs = {(gap.variant, gap.against): gap for gap in judged.gaps}
    return pairs.get((variant, against))


def _closed(judged: Verdict) -> Interval:
    """The repair's share of the way to the experts; of drift that of the way to none."""
    repair, behind = _gap(judged, judged.after, judged.merged), _gap(judged, judged.merged, "expert")
    if repair is None:
        return Interval(math.nan)
    if judged.measure.role == RELATIVE.role:
        return ratio(_turned(repair.change), judged.means[judged.merged])
    return ratio(repair.change, _turned(behind.change)) if behind and behind.side < 0 else Interval(math.nan)


def _turned(change: Interval) -> Interval:
    """The same change the other way round."""
    return Interval(-change.value, -change.high, -change.low, change.n)


def _said(run: DriftRun, judged: Verdict, closed: Interval) -> tuple[str, _Tone]:
    """The sentence and its tone: first whether the last model is worth using, then what the repair did."""
    last = judged.after if judged.after in judged.means else judged.merged
    over_base, behind = _gap(judged, last, "base"), _gap(judged, judged.merged, "expert")
    repair = _gap(judged, judged.after, judged.merged)
    of_drift = judged.measure.role == RELATIVE.role
    if over_base is not None and over_base.side < 0:
        return _below_base(judged, over_base, "Repaired, and still" if repair else ""), "bad"
    if repair is None:
        return _of_merge(run, judged, over_base, behind)
    if repair.side < 0:
        return (
            f"The repair {title(last)} makes it worse, by {change_of_gap(repair, judged.measure.kind)}",
            "bad",
        )
    target = "drift" if of_drift else "gap to the experts"
    share = _share(closed)
    if not repair.side:
        return f"The repair closes no clear part of the {target}" + (f": {share}" if share else ""), "mixed"
    if not is_measured(closed.value):
        if behind is not None and behind.side < 0:
            return "Repair helps; which part of the gap to the experts it closes, can't be told", "good"
        return "Repair helps, where merging had left no clear gap to the experts", "good"
    verb = "takes away" if of_drift else "closes"
    gain = "" if over_base is None or over_base.side else ", yet shows no clear gain over the base"
    return f"Repair {verb} {share} of the {target}{gain}", "mixed" if gain else "good"


def _below_base(judged: Verdict, gap: Gap, still: str) -> str:
    """That a model is clearly worse than its base; not to use it, where no task says otherwise."""
    kind, num_tasks = judged.measure.kind, len(judged.tasks)
    if judged.measure.role == RELATIVE.role:
        words = "farther from its experts than the base"
    else:
        words = f"worse than its base by {change_of_gap(gap, kind)}" + " points" * (kind == "share")
    if num_tasks > 1:
        words += f", clearly on {len(gap.worse)} of {num_tasks} tasks"
    words += f" but better on {len(gap.better)}" if gap.better else ": don't use it"
    return f"{still} {words}" if still else words[:1].upper() + words[1:]


def _of_merge(run: DriftRun, judged: Verdict, over_base: Gap | None, behind: Gap | None) -> tuple[str, _Tone]:
    """What there is to say of a merge that nobody repaired and that isn't clearly worse than its base."""
    if not judged.merged:
        return "No merged model to hold against base and experts", "none"
    if behind is not None and not behind.side:
        return "Merging leaves no clear gap to the experts", "good"
    if over_base is None:
        if behind is None:
            return (
                f"Nothing to hold {title(judged.merged)} against: neither base nor experts measured",
                "none",
            )
        unit = " points" * (judged.measure.kind == "share")
        way = "better than" if behind.side > 0 else "behind"
        tone: _Tone = "good" if behind.side > 0 else "mixed"
        return f"{change_of_gap(behind, judged.measure.kind)}{unit} {way} the experts", tone
    if not over_base.side:
        return "No clear gain over the base", "mixed"
    if judged.measure.role == RELATIVE.role:
        return "Nearer to the experts than the base", "good"
    gain = mean_change(run, judged.measure, judged.tasks, ("base", "expert")) if behind else None
    kept = ratio(over_base.change, gain.interval) if gain and gain.side > 0 else Interval(math.nan)
    text = f"Merging keeps {_share(kept)} of what the experts gain over the base" if _share(kept) else ""
    return text or "Better than its base", "good"


def _share(share: Interval) -> str:
    """ "48 % (42 to 54 %)"; empty where it isn't known."""
    if not is_measured(share.value):
        return ""
    ends = f" ({100 * share.low:.0f} to {100 * share.high:.0f} %)" if is_measured(share.low) else ""
    return f"{100 * share.value:.0f} %{ends}"


def sentence(found: Headline) -> str:
    """The headline where there is nothing but text."""
    return f"{found.text}{f' ({found.so_far})' if found.so_far else ''}."
