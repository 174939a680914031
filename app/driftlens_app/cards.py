"""The few numbers of a run that a reader wants first, each with its worst task: an average alone hides it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from driftlens.records.run import DriftRun
from driftlens.variants import part_of
from driftlens_reports import facts
from driftlens_reports.wording import number, percent


@dataclass(frozen=True)
class Card:
    """One number of a run.

    Attributes:
        label: what it is.
        value: the number in words, over the tasks asked for.
        change: how it differs from the merged model's; empty where nothing is compared.
        worst: which task is worst, and how bad; empty with a single task.
        lower_is_better: which way is an improvement.
        help: what is averaged over what.
    """

    label: str
    value: str
    change: str
    worst: str
    lower_is_better: bool
    help: str


def shown_variant(run: DriftRun, asked: Sequence[str]) -> str | None:
    """The variant that the cards show: the newest calibrated one of those asked for, or of all, else the merged model.

    None where the base is all there is, or all that was asked for.
    """
    candidates = [variant for variant in asked or run.variants if variant not in ("base", "expert")]
    calibrated = [variant for variant in candidates if part_of(variant) == "calibrated"]
    if calibrated:
        return calibrated[-1]
    return "merged" if "merged" in candidates else next(iter(candidates), None)


def cards(run: DriftRun, variant: str, tasks: Sequence[str], *, relative: bool) -> list[Card]:
    """Final drift, cosine, changed decisions and closure of one variant, compared with the merged model.

    Raises:
        RunError: a table can't be read.
    """
    before = "merged" if variant != "merged" and "merged" in run.variants else None
    now = {row.task: row for row in facts.final_drift(run) if row.variant == variant and row.task in tasks}
    then = {row.task: row for row in facts.final_drift(run) if row.variant == before and row.task in tasks}
    drift = "relative" if relative else "drift"
    return [
        _card(
            "Relative final drift" if relative else "Final drift",
            {task: getattr(row, drift) for task, row in now.items()},
            {task: getattr(row, drift) for task, row in then.items()},
            words=number,
            help="Mean L2 distance of the final feature to the expert's, over samples, then over tasks."
            + (" In units of the expert's feature norm." if relative else ""),
        ),
        _card(
            "Cosine to expert",
            {task: row.cosine for task, row in now.items()},
            {task: row.cosine for task, row in then.items()},
            words=number,
            lower_is_better=False,
            help="Mean cosine of the final feature to the expert's, over samples, then over tasks.",
        ),
        _card(
            "Changed decisions",
            _flips(run, variant, tasks),
            _flips(run, before, tasks) if before else {},
            words=percent,
            difference=_points,
            help="Share of diagnosis samples whose predicted class differs from the expert's.",
        ),
    ]


def _card(
    label: str,
    now: dict[str, float],
    then: dict[str, float],
    *,
    words: Callable[[float], str],
    difference: Callable[[float], str] = number,
    help: str,
    lower_is_better: bool = True,
) -> Card:
    measured = {task: value for task, value in now.items() if facts.is_measured(value)}
    worst = (max if lower_is_better else min)(measured, key=lambda task: measured[task], default="")
    return Card(
        label=label,
        value=words(_mean(measured)),
        change=_change(
            _mean(measured), _mean({task: then[task] for task in measured if task in then}), difference
        ),
        worst=f"worst: {worst} {words(measured[worst])}" if len(measured) > 1 else "",
        lower_is_better=lower_is_better,
        help=help,
    )


def _change(now: float, then: float, words: Callable[[float], str]) -> str:
    """The difference in the card's own unit, signed; the sign comes first, as Streamlit reads it."""
    if math.isnan(now) or math.isnan(then):
        return ""
    sign = "-" if now < then else "+"
    return f"{sign}{words(abs(now - then))} against merged"


def _points(share: float) -> str:
    return f"{100 * share:.1f} points"


def _flips(run: DriftRun, variant: str, tasks: Sequence[str]) -> dict[str, float]:
    rows = run.outputs(variant=variant)
    rows = rows[rows["task"].isin(list(tasks)) & rows["flipped"].notna()]
    shares = rows.groupby("task")["flipped"].mean()
    return {str(task): float(share) for task, share in shares.items()}


def _mean(values: dict[str, float]) -> float:
    return sum(values.values()) / len(values) if values else math.nan
