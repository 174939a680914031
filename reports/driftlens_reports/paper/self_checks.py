"""The largest error of each exact claim that runs check about themselves, against its limit."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib import rcParams
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter

from driftlens.records.checks import CheckResult
from driftlens.records.checks import self_checks as checks_of
from driftlens.records.run import DriftRun
from driftlens_reports.facts import check_sentence
from driftlens_reports.paper.exhibit import Exhibited, ExhibitOptions, figure, origin
from driftlens_reports.paper.plate import Plate, legend, short

FLOOR = 1e-16
"""Where an error of exactly zero stands: a logarithmic axis has no place for it."""

_MARKS = ("o", "s", "D", "v", "^", "X")


@figure("self-checks", title="Self-checks and their limits")
def self_checks(runs: Sequence[DriftRun], options: ExhibitOptions) -> Exhibited:
    """A row per claim, a mark per run, and the limit up to which the claim counts as holding."""
    found = [(run, checks_of(run).results) for run in runs]
    plate = Plate(options.width, options.width * (0.85 if options.is_narrow else 0.42))
    axes = plate.figure.subplots()
    if all(math.isnan(check.value) for _, checks in found for check in checks):
        plate.note(axes, "self-checks", "`driftlens analyze` computes them")
    else:
        _draw_limits(plate, axes, found[0][1])
        entries = {
            short(run.name, 28): _draw_errors(plate, axes, run, checks, _MARKS[at % len(_MARKS)])
            for at, (run, checks) in enumerate(found)
        }
        _set_axes(axes, [check.metric for check in found[0][1]])
        if len(runs) > 1:
            legend(plate.figure, entries)
    caption = [
        "Largest error of each claim that is exact in theory, over all rows of the tables.",
        *origin(runs),
        "Shaded: up to the limit beyond which rounding and quadrature explain nothing more; hollow: beyond it.",
    ]
    if any(check.value <= FLOOR for _, checks in found for check in checks):
        caption.append(f"Errors below {FLOOR:.0e}, zero included, stand at the left edge.")
    for run, checks in found:
        whose = f"{run.name}: " if len(runs) > 1 else ""
        caption += [f"{whose}{check_sentence(check)}." for check in checks]
    return plate.exhibited(caption)


def _draw_limits(plate: Plate, axes: Axes, checks: Sequence[CheckResult]) -> None:
    places = range(len(checks))
    limits = [check.threshold for check in checks]
    axes.barh(places, [limit - FLOOR for limit in limits], 0.62, left=FLOOR, color="#EFEFEF")
    size = 2.5 * rcParams["lines.markersize"]
    axes.plot(limits, places, linestyle="", marker="|", color="#444444", markersize=size)
    for check in checks:
        plate.record("a", None, f"limit of {check.metric}", check.threshold)


def _draw_errors(
    plate: Plate, axes: Axes, run: DriftRun, checks: Sequence[CheckResult], marker: str
) -> Artist:
    """Draw one run's errors: filled where the claim holds, hollow where it fails, in words where not measured."""
    for at, check in enumerate(checks):
        if math.isnan(check.value):
            axes.text(FLOOR, at, " not measured", va="center", color="#777777", fontsize="small")
            continue
        place, fill = max(check.value, FLOOR), "#222222" if check.status == "pass" else "white"
        axes.plot([place], [at], marker=marker, color="#222222", markerfacecolor=fill)
        if check.status == "fail":
            axes.annotate("fails", (place, at), (6, 0), textcoords="offset points", va="center")
        plate.record("a", run, f"error of {check.metric}", check.value)
    return axes.plot([], [], linestyle="", marker=marker, color="#444444")[0]


def _set_axes(axes: Axes, names: Sequence[str]) -> None:
    axes.set_xscale("log")
    axes.set_xlim(FLOOR, 40 * axes.dataLim.x1)  # room for words beside the last mark
    axes.xaxis.set_major_locator(LogLocator(numticks=8))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0e}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("largest error (relative; shaded: within the limit)")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
