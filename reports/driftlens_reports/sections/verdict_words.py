"""The verdict in sentences, made from its numbers by fixed templates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from driftlens.records.run import DriftRun
from driftlens.variants import title
from driftlens_reports import facts
from driftlens_reports.content import Change, Outcome
from driftlens_reports.sections.comparison import Compared
from driftlens_reports.wording import number, percent, percent_interval, points, points_interval


def verdict_sentences(
    run: DriftRun,
    compared: Compared,
    changes: Sequence[Change],
    worst: facts.FinalDrift | None,
    outcome: Outcome,
) -> Iterator[str]:
    """The verdict in sentences.

    Args:
        run: the run.
        compared: the variants.
        changes: of every measure.
        worst: the task that is worst after calibration, or without one before; None where nothing is measured.
        outcome: how the self-checks ended.
    """
    if not changes:
        yield "Nothing was measured that a verdict could rest on."
    for change in changes:
        yield _change_sentence(change, compared, len(run.tasks))
    if worst is not None:
        among = f" of {len(run.tasks)} tasks" if len(run.tasks) > 1 else ""
        yield (
            f"Worst{among}: {worst.task}, where the final feature of {title(worst.variant)} is "
            f"{percent(worst.relative)} of the expert's norm away (cosine {number(worst.cosine)})."
        )
    yield from _credit_sentences(run, compared, changes)
    yield check_sentence(outcome, "self-check")


def _change_sentence(change: Change, compared: Compared, num_tasks: int) -> str:
    write = percent if change.kind == "share" else number
    of = f"{change.num_tasks} of " if change.num_tasks < num_tasks else ""
    over = (
        f"Mean {change.measure} over {of}{num_tasks} tasks" if num_tasks > 1 else change.measure.capitalize()
    )
    values = [(compared.before, change.before), (compared.after, change.after)]
    said = ", ".join(f"{title(name)} {write(value)}" for name, value in values if name and value is not None)
    if change.change is None:
        return f"{over}: {said}."
    return f"{over}: {said} ({signed(change)}{_interval(change)})."


def _interval(change: Change) -> str:
    """The 95 % interval of a change, in the unit that `signed` has; empty where it is not known."""
    if change.change_low is None or change.change_high is None:
        return ""
    if change.kind == "share":
        return f", 95 % interval {points_interval(change.change_low, change.change_high)}"
    scale = change.before if change.worse == "higher" and change.before else 1.0
    ends = (change.change_low / scale, change.change_high / scale)
    return f", 95 % interval {percent_interval(*ends)}"


def signed(change: Change) -> str:
    """A change in words: a share in points, a length relative to before, anything else in its own unit."""
    assert change.change is not None
    if change.kind == "share":
        return f"{100 * change.change:+.1f} points"
    if change.worse == "higher" and change.relative_change is not None:
        return f"{100 * change.relative_change:+.1f} %"
    return f"{change.change:+.4f}"


def _credit_sentences(run: DriftRun, compared: Compared, changes: Sequence[Change]) -> Iterator[str]:
    """How much of each change the anchor alone makes; where no control tells, that is said."""
    if compared.after is None:
        yield "Not calibrated: `driftlens calibrate RUN --name NAME` adds a variant to compare with."
        return
    if compared.control is None:
        info = run.manifest.calibrations.get(compared.after.partition(":")[2])
        yield (
            "No anchor other than the merged model was used, so none of the change is rescaling."
            if info is not None and not info.control
            else "No control shows what the anchor does by itself, so calibration and rescaling can't be told apart."
        )
        return
    for change in changes:
        if change.measure == "relative drift" or not change.change:
            continue
        assert change.rescaling is not None and change.calibration is not None
        yield (
            f"Of the change in {change.measure}, rescaling (the anchor alone) makes "
            f"{_part(change.rescaling, change)} and calibration {_part(change.calibration, change)}."
        )


def _part(value: float, change: Change) -> str:
    """A part of a change in the measure's own unit: parts that work against each other make no readable shares."""
    if change.kind == "share":
        return f"{points(value)} points"
    return f"{value:+.4g} feature units" if change.measure == "final drift" else f"{value:+.4f}"


def check_sentence(outcome: Outcome, noun: str) -> str:
    """How many checks hold, in words; that none was executed is said."""
    executed = outcome.passed + outcome.warned + outcome.failed
    if not executed:
        return f"No {noun} had the numbers it needs, so nothing is known."
    parts = [f"{outcome.passed} of {executed} {noun}s {'holds' if executed == 1 else 'hold'}"]
    parts += [f"{outcome.failed} failed"] if outcome.failed else []
    parts += [f"{outcome.warned} warned"] if outcome.warned else []
    parts += [f"{outcome.skipped} lack the numbers they need"] if outcome.skipped else []
    return f"{'; '.join(parts)}."
