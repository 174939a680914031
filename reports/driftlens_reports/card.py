"""A picture of a run to share: 1200 x 630 pixels, the size of link previews. Entry point: `save_summary_image`."""

from __future__ import annotations

import io
import pathlib
import textwrap
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from driftlens.results.formatting import (
    format_estimate,
    format_value,
    is_measured,
    keep_units_together,
    strip_control_chars,
    typeset_signs,
)
from driftlens.results.projection import project
from driftlens.results.verdict import Headline, headline, verdict
from driftlens.runs.run import DriftRun, open_run
from driftlens.utils.errors import DataError, pluralize
from driftlens.utils.files import PathLike, write_text_atomic
from driftlens_reports.charts.picking import worst_task
from driftlens_reports.charts.theme import LIGHT, colour_role
from driftlens_reports.charts.words import shorten_middle
from driftlens_reports.formats import save_files
from driftlens_reports.formats.page import score_axis_range, tile_label
from driftlens_reports.paper.exhibit import PAGE, use_venue_style

# Pixels of the picture.
WIDTH, HEIGHT = 1200, 630
# The heading in a model card below which the picture is linked.
_VERDICT = "## Verdict\n\n"
# Left edge of the two feature plots, as a fraction of the width.
_PAIR = 0.605
# Letters of the sentence in a line, in its size.
_LINE = 40


def save_summary_image(run: DriftRun | PathLike, out: pathlib.Path | None = None, name: str = "") -> pathlib.Path:
    """Save the PNG summary image of a run: headline, scores of all models, features in 2-D.

    Args:
        run: a run or its directory.
        out: the PNG to write; `card.png` in the run's `reports` if None.
        name: the calibration to show; the best or pinned one if empty.

    Returns:
        The path of the picture.

    Raises:
        DataError: the run has no such calibration.
        RunError: a table can't be read.
        RunLockedError: the files go into the run, and another process is writing there.
    """
    opened = run if isinstance(run, DriftRun) else open_run(run)
    if name:
        opened.calibration_info(name)  # says which there are
    files = {"card.png" if out is None else out.name: _summary_image_png(opened, name)}
    return save_files(opened, files, None if out is None else out.parent)[0]


def add_image_to_model_card(folder: pathlib.Path, run: DriftRun, name: str) -> None:
    """Save the summary image next to exported weights of the calibration `name` and link it in the model card."""
    picture = save_summary_image(run, folder / "card.png", name)
    card, line = folder / "README.md", f"![Measurements]({picture.name})\n\n"
    text = card.read_text(encoding="utf-8") if card.is_file() else ""
    if _VERDICT in text and line not in text:
        write_text_atomic(card, text.replace(_VERDICT, _VERDICT + line, 1))


def _summary_image_png(run: DriftRun, name: str) -> bytes:
    head = headline(run, name)
    with use_venue_style(PAGE):
        figure = Figure(figsize=(WIDTH / 100, HEIGHT / 100), dpi=100, facecolor=LIGHT.surface)
        pair = _worst_task_projections(run, name)
        _draw_image_text(figure, run, head)
        _draw_score_bar(figure.add_axes((0.05, 0.16, 0.52 if pair else 0.9, 0.16)), head)
        for place, (variant, _, frame) in enumerate(pair):
            # Both plots have one scale, so that distances compare.
            shared = {"sharex": figure.axes[-1], "sharey": figure.axes[-1]} if place else {}
            axes = figure.add_axes((_PAIR + 0.18 * place, 0.2, 0.165, 0.3), **shared)
            _scatter_features(axes, variant, LIGHT.roles[colour_role(run.roles, variant)], frame)
        for task in {task for _, task, _ in pair}:
            label = f"features of {shorten_middle(task, 18)}"
            _draw_text(figure, _PAIR, 0.185, label, fontsize=11, color=LIGHT.quiet)
            expert = {"color": LIGHT.roles["expert"], "ha": "right"}
            _draw_text(figure, 0.95, 0.185, "light blue: its expert", fontsize=11, **expert)
        target = io.BytesIO()
        figure.savefig(target, format="png", dpi=100, metadata={})
    return target.getvalue()


def _draw_text(figure: Figure, x: float, y: float, text: str, **looks: Any) -> None:
    # Names are untrusted: parse no formulas in them.
    figure.text(x, y, strip_control_chars(text), parse_math=False, **{"va": "top", "color": LIGHT.ink, **looks})


def _draw_image_text(figure: Figure, run: DriftRun, head: Headline) -> None:
    """Draw the run name, headline, score of every model and provenance on the summary image."""
    say = partial(_draw_text, figure)
    say(0.05, 0.945, "DriftLens", fontsize=17, fontweight="bold", color=LIGHT.roles["expert"])
    name = textwrap.shorten(strip_control_chars(run.name), 60, placeholder="…")
    say(0.95, 0.94, name, fontsize=15, ha="right")
    sentence = "\n".join(textwrap.wrap(keep_units_together(typeset_signs(head.text)), _LINE)[:4])
    figure.text(
        *(0.05, 0.85, sentence),
        **{"fontsize": 33, "fontweight": "bold", "va": "top", "linespacing": 1.2, "parse_math": False},
        color=LIGHT.tones.get(head.tone, LIGHT.ink),
    )
    for place, (variant, mean) in enumerate(head.tiles.items()):
        x = 0.05 + 0.14 * place
        text, _, ends = format_estimate(mean, head.kind).partition(" (")
        say(x, 0.49, "\N{BLACK CIRCLE}", fontsize=13, color=LIGHT.roles[colour_role(head.roles, variant)])
        say(x + 0.016, 0.49, tile_label(variant)[:14], fontsize=13)
        say(x, 0.45, text, fontsize=22, fontweight="bold")
        say(x, 0.385, ends.removesuffix(")"), fontsize=10, color=LIGHT.quiet)
    where = f"{head.measure}, {head.so_far or pluralize(len(run.tasks), 'task')}; run {run.id}"
    say(0.05, 0.075, where, fontsize=12, color=LIGHT.quiet)
    if run.manifest.synthetic:
        say(0.95, 0.075, "synthetic demo, no benchmark", fontsize=12, color=LIGHT.quiet, ha="right")


def _draw_score_bar(axes: Axes, head: Headline) -> None:
    """Draw the score of every model with its interval on one axis."""
    axes.axis("off")
    if len(head.tiles) < 2:
        return
    low, high = score_axis_range(head)
    axes.set(xlim=(low, high), ylim=(-1, 1))
    axes.plot([low, high], [0, 0], color=LIGHT.grid, linewidth=2, zorder=1)
    for variant, mean in head.tiles.items():
        colour = LIGHT.roles[colour_role(head.roles, variant)]
        if is_measured(mean.low):
            axes.plot([mean.low, mean.high], [0, 0], color=colour, linewidth=4, zorder=3)
        axes.plot(
            [mean.value], [0], "o", color=colour, markersize=17, mec=LIGHT.surface, mew=2, clip_on=False, zorder=4
        )
    for value, side in ((low, "left"), (high, "right")):
        axes.text(value, -0.95, format_value(value, head.kind), ha=side, fontsize=11, color=LIGHT.quiet)


def _worst_task_projections(run: DriftRun, name: str) -> list[tuple[str, str, Any]]:
    """Return 2-D projections of two models (merged and repaired, or expert and merged) on the task with most drift."""
    judged = verdict(run, name)
    if not judged.merged or not run.manifest.layers:
        return []
    pair = (judged.merged, judged.after) if judged.after else ("expert", judged.merged)
    task = worst_task(run, run.tasks, judged.merged)
    try:
        layout = project(run, task, store_it=False)
    except DataError:
        return []  # features are not stored
    frames = dict(iter(layout.frame.groupby("variant", sort=False)))
    return [(variant, task, (frames["expert"], frames[variant])) for variant in pair if variant in frames]


def _scatter_features(axes: Axes, variant: str, colour: str, frames: Any) -> None:
    experts, points = frames
    # Faded behind another model, whose points must stand out.
    opacity = 1 if variant == "expert" else 0.35
    axes.scatter(experts["x"], experts["y"], 9, LIGHT.roles["expert"], linewidths=0, alpha=opacity)
    if variant != "expert":
        axes.scatter(points["x"], points["y"], 9, colour, linewidths=0)
    axes.set(xticks=[], yticks=[])
    axes.set_title(strip_control_chars(tile_label(variant))[:20], fontsize=13, color=LIGHT.ink, parse_math=False)
    for side in axes.spines.values():
        side.set(visible=True, color=LIGHT.grid)
