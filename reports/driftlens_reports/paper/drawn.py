"""Figures that no chart of the report shows: sweeps, a line per run; corrupted images; self-checks and their limits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rcParams
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

from driftlens.base.metrics import ACCURACY
from driftlens.findings.checks import CheckResult
from driftlens.findings.checks import self_checks as checks_of
from driftlens.findings.reading import printable
from driftlens.findings.swept import level, over_seeds, sweep_named, swept_methods, with_scores
from driftlens.runs.run import DriftRun
from driftlens.suites.reproduce import GRIDS, SAMPLES
from driftlens_reports.charts.words import between, spaced, title
from driftlens_reports.facts import check_sentence
from driftlens_reports.paper.exhibit import ROUNDED, Exhibited, ExhibitOptions, figure, origin
from driftlens_reports.paper.figures import Plate, legend, short
from driftlens_reports.paper.marks import GUIDE, number
from driftlens_reports.paper.published import CORRUPTED, family, method_title, published_tables, source

MEAN = "accuracy (average over tasks), mean over seeds"
SPREAD = "accuracy (average over tasks), std over seeds"

FACTORS = {"lam": "λ (ridge)", "alpha": "α (expert share of target)", "rho": "ρ (anchor)"}
_LEVELS: dict[str, Any] = {"merged": (0, (1, 2)), "base": (0, (4, 1.5, 1, 1.5))}
"""What calibrated models are compared with, and its dash."""
_EXAMPLES: Mapping[str, Sequence[Any]] = {**GRIDS, "n": SAMPLES, "corruption": [*CORRUPTED]}

_LOOKS = (
    ("#D55E00", "s", "-"),
    ("#7A3300", "o", (0, (5, 1.5))),
    ("#F0A050", "D", (0, (1.2, 1.2))),
    ("#A8481C", "v", (0, (5, 1.5, 1, 1.5))),
)
"""Colour, marker and dash of runs in one panel: all calibrated, hence all orange."""

PRINTED = "tab:ta8-full-data-efficiency"
_PRINTED_LOOKS = (("#2E9E6B", "v"), ("#9467BD", "^"), ("#444444", "s"))

FLOOR = 1e-16
"""Where an error of exactly zero stands: a logarithmic axis has no place for it."""

_MARKS = ("o", "s", "D", "v", "^", "X")


@figure("sweeps", title="Sensitivity to the coefficients", paper="Figure 5")
def sweeps(runs: Sequence[DriftRun], options: ExhibitOptions) -> Exhibited:
    """A panel per coefficient, a line per run (an upstream merge), a mark at the run's own setting."""
    narrow = options.is_narrow
    plate = Plate(options.width, options.width * (1.7 if narrow else 0.42), "sweeps")
    panels = plate.figure.subplots(3, 1, sharey=True) if narrow else plate.figure.subplots(1, 3, sharey=True)
    entries: dict[str, Artist] = {}
    drawn: list[pd.DataFrame] = []
    notes: list[str] = []
    for letter, factor, axes in zip("abc", FACTORS, panels, strict=True):
        lines, points_of = _draw_lines(plate, axes, runs, letter, factor, options)
        entries, drawn = lines | entries, [*drawn, *points_of.values()]
        if not points_of:
            plate.note(axes, f"({letter}) accuracy by {FACTORS[factor]}", sweeping(factor))
            continue
        axes.set_xlabel(FACTORS[factor])
        axes.set_title(f"({letter})")
        if factor == "lam":
            # Labelled in plain digits: 0.05, not a power that would need mathematical text.
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(numticks=6))
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.xaxis.set_minor_formatter(NullFormatter())
            settings = [sweep_points(run, factor, options.tasks_of(run))["setting"] for run in runs]
            if any((values <= 0).any() for values in settings):
                notes.append(f"({letter}) λ = 0 was measured too; it has no place on a logarithmic axis.")
    for axes in panels if narrow else panels[:1]:
        if axes.has_data():
            axes.set_ylabel("accuracy" if narrow else "accuracy, average over tasks")
            axes.yaxis.set_major_formatter(lambda value, _: number(value, ".4~%"))
    legend(plate.figure, entries, columns=2 if narrow else 3)
    what = (
        "Accuracy, averaged over tasks, when one coefficient of the calibration varies and the others stay."
    )
    if drawn:
        marked = "the ring or dashed line marks the run's own setting"
        notes = [f"One line per run, that is, per upstream merge; {marked}.", *notes]
    behind = _behind(runs, drawn, options) if drawn else ()
    return plate.exhibited([what, *origin(runs), *behind, *notes, ROUNDED])


@figure("data-efficiency", title="Accuracy by calibration samples per task", paper="Figure 3")
def data_efficiency(runs: Sequence[DriftRun], options: ExhibitOptions) -> Exhibited:
    """One line per run, mean and standard deviation over seeds; the paper's curves when asked for."""
    narrow = options.is_narrow
    plate = Plate(options.width, options.width * (0.8 if narrow else 0.48), "data-efficiency")
    axes = plate.figure.subplots()
    entries, points_of = _draw_lines(plate, axes, runs, "a", "n", options)
    entries |= _draw_printed(plate, axes) if options.paper else {}
    if entries:
        counts = {float(x) for line in axes.lines if line.get_marker() != "None" for x in line.get_xdata()}
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted(counts))
        axes.xaxis.set_major_formatter(lambda value, _: printable(spaced(round(value))))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("calibration samples per task")
        axes.set_ylabel("accuracy, average over tasks")
        axes.yaxis.set_major_formatter(lambda value, _: number(value, ".4~%"))
        legend(plate.figure, entries, columns=2 if narrow else 3)
    if not points_of:
        # Where the paper's curves fill the plot, the caption alone says what the runs lack.
        lack = "accuracy by calibration samples", f"{sweeping('n')}, with test data that have labels"
        plate.lack(*lack) if entries else plate.note(axes, *lack)
    what = "Accuracy, averaged over tasks, by the number of calibration samples per task."
    measured = [run for run in runs if run.id in points_of]
    behind = _behind(measured, list(points_of.values()), options) if points_of else ()
    printed = (
        f"Dotted and hollow: as printed in {published_tables()[PRINTED].number} of {source()} "
        "(other models, other data); mean and standard deviation over 3 seeds."
    )
    notes = [printed] if options.paper else []
    return plate.exhibited([what, *origin(runs), *behind, *notes, ROUNDED])


@figure("corruptions", title="Calibration images under corruptions", paper="Figure 4")
def corruptions(runs: Sequence[DriftRun], options: ExhibitOptions) -> Exhibited:
    """One calibration image of the first run that has any, clean and under each corruption."""
    run = next((run for run in runs if run.corruptions()), runs[0])
    shown = run.corruptions()
    names = [*dict.fromkeys(name for name in (*CORRUPTED, *shown) if name in shown)] or [*CORRUPTED]
    columns = 2 if options.is_narrow else min(len(names), 4)
    rows = -(-len(names) // columns)
    height = rows * (options.width / columns + 0.04 * options.width)
    plate = Plate(options.width, height, "corruptions")
    cells = plate.figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in cells:
        axes.set_axis_off()
    for axes, name in zip(cells, names, strict=False):
        axes.set_box_aspect(1)
        if name not in shown:
            axes.set_axis_on()
            plate.note(axes, corruption_title(name), corrupting(runs))
            continue
        axes.imshow(shown[name], interpolation="nearest")
        axes.set_title(corruption_title(name), loc="center")
        plate.record("a", run, "mean pixel", shown[name].mean() / 255, corruption=name)
    seeds = run.sweeps().query("corruption.notna()")["seed"].unique()
    drawn = f"Drawn with seed {min(seeds)}." if len(seeds) else ""
    what = "The same calibration image, clean and under each corruption (kinds and strengths of ImageNet-C)."
    return plate.exhibited([what, drawn, *origin([run])])


def corruption_title(name: str) -> str:
    """What figures and tables call a corruption."""
    kind, _, severity = name.partition(":")
    if kind == "none":
        return "clean"
    return f"{kind.replace('_', ' ').replace('gaussian', 'Gaussian').replace('jpeg', 'JPEG')}, severity {severity}"


def sweep_points(run: DriftRun, factor: str, tasks: Sequence[str], method: str = "featcal") -> pd.DataFrame:
    """By value of `factor`, ascending: setting, mean, std (n - 1) over seeds that have all tasks, seeds, n_test."""
    rows = run.sweeps()
    rows = with_scores(run, rows[(rows["sweep"] == sweep_named(factor, method)) & rows["task"].isin(tasks)])
    rows = rows.assign(setting=rows[factor].astype(str if factor == "corruption" else float))
    points = over_seeds(rows, "setting", "score", len(tasks)).rename(columns={"std over seeds": "std"})
    return points[points["mean"].notna()].drop(columns=["tested_low", "tested_high"])


def _draw_lines(
    plate: Plate, axes: Axes, runs: Sequence[DriftRun], panel: str, factor: str, options: ExhibitOptions
) -> tuple[dict[str, Artist], dict[str, pd.DataFrame]]:
    """A line per run, its deviations and levels; returns the legend's lines by name, and the points by run id."""
    entries: dict[str, Artist] = {}
    points_of: dict[str, pd.DataFrame] = {}
    names = [run.name for run in runs]
    thin = rcParams["axes.linewidth"]
    methods = {run.id: swept_methods(run, factor) if factor == "n" else ["featcal"] for run in runs}
    every = [(run, method) for run in runs for method in methods[run.id]]
    for (run, method), (colour, marker, dash) in zip(every, itertools.cycle(_LOOKS)):
        tasks = options.tasks_of(run)
        points = sweep_points(run, factor, tasks, method)
        points = points[points["setting"] > 0] if factor == "lam" else points
        if points.empty:
            continue
        is_first = run.id not in points_of
        points_of[run.id] = points if is_first else pd.concat([points_of[run.id], points])
        x, mean, spread = (points[name].to_numpy(dtype=float) for name in ("setting", "mean", "std"))
        name = run.id if names.count(run.name) > 1 else run.name
        if methods[run.id] != ["featcal"]:
            name = method_title(method) if len(runs) == 1 else f"{name}, {method_title(method)}"
        (entries[name],) = axes.plot(x, mean, color=colour, marker=marker, linestyle=dash)
        axes.vlines(x, mean - spread, mean + spread, color=colour, linewidth=1.3 * thin)
        for quantity, values in ((MEAN, mean), (SPREAD, spread)):
            plate.record(panel, run, quantity, values, method=method, **{factor: list(x)})
        for variant, dots in _LEVELS.items() if is_first else ():
            height = level(run, variant, ACCURACY.name, tasks)
            if not math.isnan(height):
                axes.axhline(height, color=colour, linewidth=1.3 * thin, linestyle=dots)
                plate.record(panel, run, "accuracy (average over tasks)", height, variant=variant)
                label = f"{short(title(variant))}{f', {short(name)}' if len(runs) > 1 else ''}"
                frame: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
                note = axes.annotate(label, (0.99, height), (0, 1.5), **frame)
                note.set(color=colour, ha="right", va="bottom")
                note.set(fontsize=rcParams["xtick.labelsize"], in_layout=False)
                note.set_bbox({"facecolor": "white", "alpha": 0.7, "linewidth": 0, "pad": 0.5})
        if factor in FACTORS:
            _mark_default(axes, run, factor, points, options.calibrated_of(run)[-1:], colour)
    return entries, points_of


def sweeping(factor: str) -> str:
    """The command that measures what an exhibit of this sweep shows."""
    values = ",".join(f"{value:g}" if isinstance(value, float) else str(value) for value in _EXAMPLES[factor])
    return f"`driftlens sweep RUN --param {factor}={values}` measures it"


def corrupting(runs: Sequence[DriftRun]) -> str:
    """How runs get what exhibits of corrupted images show."""
    has_images = any(family(run) == "image" for run in runs)
    return sweeping("corruption") if has_images else "no run given has images to corrupt"


def _mark_default(
    axes: Axes, run: DriftRun, factor: str, points: pd.DataFrame, calibrated: Sequence[str], colour: str
) -> None:
    """Ring the point of the run's own setting, or draw a line there where the sweep has no such point."""
    info = run.manifest.calibrations.get("".join(calibrated).removeprefix("calibrated:"))
    setting = None if info is None else info.settings.get(factor)
    if not isinstance(setting, (int, float)):
        return
    default = points[np.isclose(points["setting"], setting, rtol=1e-9, atol=0)]
    style: dict[str, Any] = {"color": colour, "label": GUIDE}
    if default.empty:
        axes.axvline(setting, linewidth=rcParams["axes.linewidth"], linestyle=(0, (4, 2)), **style)
    else:
        (ring,) = axes.plot(default["setting"], default["mean"], linestyle="", marker="o", **style)
        ring.set(markerfacecolor="none", markersize=2.4 * ring.get_markersize())


def _draw_printed(plate: Plate, axes: Axes) -> Mapping[str, Artist]:
    """The paper's curves: dotted and hollow, so that nobody takes them for measured ones."""
    entries: dict[str, Artist] = {}
    thin = rcParams["axes.linewidth"]
    for row, (colour, marker) in zip(published_tables()[PRINTED].rows, _PRINTED_LOOKS, strict=True):
        counts = [float(column.removeprefix("n=")) for column in row.values]
        mean = np.array(list(row.values.values())) / 100
        spread = np.array([row.spread[column] for column in row.values]) / 100
        style: dict[str, Any] = {"color": colour, "marker": marker, "markerfacecolor": "white"}
        (line,) = axes.plot(counts, mean, linestyle=(0, (1, 1.5)), linewidth=1.3 * thin, **style)
        axes.vlines(counts, mean - spread, mean + spread, color=colour, linewidth=thin)
        entries[f"paper: {row.name}"] = line
        for quantity, values in ((MEAN, mean), (SPREAD, spread)):
            plate.record("a", None, quantity, values, source="paper", variant=row.name, n=counts)
    return entries


def _behind(
    runs: Sequence[DriftRun], points: Sequence[pd.DataFrame], options: ExhibitOptions
) -> Iterator[str]:
    """What stands behind the points: tasks, test samples, seeds, the merged model's level."""
    rows = pd.concat(points)
    counts = sorted({len(options.tasks_of(run)) for run in runs})
    yield f"Averages are over {' or '.join(map(str, counts))} task{'' if counts == [1] else 's'}."
    if rows["n_test"].notna().any():
        yield f"Accuracy on {between(rows['n_test'].dropna().astype(int))} test samples per task."
    if (rows["seeds"] == 1).all():
        yield "One seed per point, so no spread is shown."
    else:
        yield f"Points: mean over {between(rows['seeds'])} seeds; bars: one standard deviation over seeds (n - 1)."
    levels = (level(run, name, ACCURACY.name, options.tasks_of(run)) for run in runs for name in _LEVELS)
    if not all(map(math.isnan, levels)):
        yield "Levels: the merged model before calibration (dotted) and the base (dashed and dotted), where measured."


@figure("self-checks", title="Self-checks and their limits")
def self_checks(runs: Sequence[DriftRun], options: ExhibitOptions) -> Exhibited:
    """A row per claim, a mark per run, and the limit up to which the claim counts as holding."""
    checks_of_runs = [(run, checks_of(run).results) for run in runs]
    plate = Plate(options.width, options.width * (0.85 if options.is_narrow else 0.42), "self-checks")
    axes = plate.figure.subplots()
    if all(math.isnan(check.value) for _, checks in checks_of_runs for check in checks):
        plate.note(axes, "self-checks", "`driftlens analyze` computes them")
    else:
        _draw_limits(plate, axes, checks_of_runs[0][1])
        entries = {
            short(run.name, 28): _draw_errors(plate, axes, run, checks, _MARKS[place % len(_MARKS)])
            for place, (run, checks) in enumerate(checks_of_runs)
        }
        _set_axes(axes, [check.metric for check in checks_of_runs[0][1]])
        if len(runs) > 1:
            legend(plate.figure, entries)
    caption = [
        "Largest error of each claim that is exact in theory, over all rows of the tables.",
        *origin(runs),
        "Shaded: up to the limit beyond which rounding and quadrature explain nothing more; hollow: beyond it.",
    ]
    if any(check.value <= FLOOR for _, checks in checks_of_runs for check in checks):
        caption.append(f"Errors below {FLOOR:.0e}, zero included, stand at the left edge.")
    for run, checks in checks_of_runs:
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
    for row, check in enumerate(checks):
        if math.isnan(check.value):
            axes.text(FLOOR, row, " not measured", va="center", color="#777777")
            continue
        place, fill = max(check.value, FLOOR), "#222222" if check.status == "pass" else "white"
        axes.plot([place], [row], marker=marker, color="#222222", markerfacecolor=fill)
        if check.status == "fail":
            axes.annotate("fails", (place, row), (6, 0), textcoords="offset points", va="center")
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
