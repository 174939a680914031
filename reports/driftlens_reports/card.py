"""What is shared of a run without a server: a picture of 1200 x 630 pixels, as links are previewed, and a badge."""

from __future__ import annotations

import io
import itertools
import pathlib
import textwrap
from functools import partial
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from driftlens.results.formatting import estimate, is_measured, printable, signs, unbroken, written
from driftlens.results.projection import looked_at
from driftlens.results.verdict import Headline, headline, verdict
from driftlens.runs.run import DriftRun, open_run
from driftlens.utils.errors import DataError, counted
from driftlens.utils.files import PathLike, write_text_atomic
from driftlens.utils.variants import part_of
from driftlens_reports.charts.picking import worst_task
from driftlens_reports.charts.theme import LIGHT
from driftlens_reports.formats import save_files
from driftlens_reports.formats.page import called, reach
from driftlens_reports.paper.exhibit import PAGE, sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 1200, 630
"""Pixels of the picture."""
_VERDICT = "## Verdict\n\n"
"""What the picture stands under in a model card."""
_PAIR = 0.605
"""Where the two pictures of features begin, in parts of the width."""
_LINE = 40
"""Letters of the sentence in a line, in its size."""
_SHORT = {"good": "good", "mixed": "unclear", "bad": "worse than base", "none": "not measured"}


def save_card(
    run: DriftRun | PathLike, out: pathlib.Path | None = None, name: str = ""
) -> list[pathlib.Path]:
    """Write the picture and the badge of a run.

    Args:
        run: a run or its directory.
        out: the picture to write, a PNG; the badge is written next to it. `card.png` in the run's `reports` if None.
        name: the calibration to show; the newest if empty.

    Returns:
        The paths of picture and badge.

    Raises:
        DataError: the run has no such calibration.
        RunError: a table can't be read.
        RunLockedError: the files go into the run, and another process is writing there.
    """
    opened = run if isinstance(run, DriftRun) else open_run(run)
    if name:
        opened.calibration_info(name)  # says which there are
    picture = "card.png" if out is None else out.name
    files = {picture: share_card(opened, name), "badge.svg": badge(opened, name).encode()}
    return save_files(opened, files, None if out is None else out.parent)


def put_beside(folder: pathlib.Path, run: DriftRun, name: str) -> None:
    """Picture and badge beside saved weights of the calibration `name`, and the picture in the model card there."""
    picture, *_ = save_card(run, folder / "card.png", name)
    card, line = folder / "README.md", f"![What was measured]({picture.name})\n\n"
    text = card.read_text(encoding="utf-8") if card.is_file() else ""
    if _VERDICT in text and line not in text:
        write_text_atomic(card, text.replace(_VERDICT, _VERDICT + line, 1))


def share_card(run: DriftRun, name: str = "") -> bytes:
    """The PNG of a run, or of its calibration `name`: headline, bar, the features of one task, and the run's id."""
    from matplotlib.figure import Figure

    from driftlens_reports.paper.plate import short

    found = headline(run, name)
    with sheet(PAGE):
        figure = Figure(figsize=(WIDTH / 100, HEIGHT / 100), dpi=100, facecolor=LIGHT.surface)
        pair = _pair(run, name)
        _write_words(figure, run, found)
        _draw_bar(figure.add_axes((0.05, 0.16, 0.52 if pair else 0.9, 0.16)), found)
        for place, (variant, _, frame) in enumerate(pair):
            shared = {"sharex": figure.axes[-1], "sharey": figure.axes[-1]} if place else {}
            axes = figure.add_axes((_PAIR + 0.18 * place, 0.2, 0.165, 0.3), **shared)
            _draw_points(axes, variant, frame)
        for task in {task for _, task, _ in pair}:
            _say(figure, _PAIR, 0.185, f"features of {short(task, 18)}", fontsize=11, color=LIGHT.quiet)
            expert = {"color": LIGHT.roles["expert"][0], "ha": "right"}
            _say(figure, 0.95, 0.185, "light blue: its expert", fontsize=11, **expert)
        target = io.BytesIO()
        figure.savefig(target, format="png", dpi=100, metadata={})
    return target.getvalue()


def badge(run: DriftRun, name: str = "") -> str:
    """An SVG in the size of other badges: what the repair closes, or what the headline's tone is."""
    found = headline(run, name)
    is_closed = is_measured(found.closed.value) and found.tone in ("good", "mixed")
    value = f"{100 * found.closed.value:.0f} % of the gap closed" if is_closed else _SHORT[found.tone]
    left, right = 62, 14 + round(6.3 * len(value))
    colour = LIGHT.tones.get(found.tone, LIGHT.quiet)
    return str(
        Markup(
            '<svg xmlns="http://www.w3.org/2000/svg" width="{0}" height="20" role="img" aria-label="{1}">'
            '<title>{1}</title><rect width="{0}" height="20" rx="3" fill="{2}"/>'
            '<rect x="{3}" width="{4}" height="20" rx="3" fill="{5}"/><rect x="{3}" width="4" height="20" fill="{5}"/>'
            '<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11" text-anchor="middle">'
            '<text x="{6}" y="14">DriftLens</text><text x="{7}" y="14">{8}</text></g></svg>\n'
        ).format(
            *(left + right, f"DriftLens: {value}", LIGHT.quiet, left, right, colour),
            *(left / 2, left + right / 2, value),
        )
    )


def _say(figure: Figure, x: float, y: float, text: str, **looks: Any) -> None:
    # Names are a stranger's: no formula is read in them.
    figure.text(x, y, printable(text), parse_math=False, **{"va": "top", "color": LIGHT.ink, **looks})


def _write_words(figure: Figure, run: DriftRun, found: Headline) -> None:
    """Names above, the sentence in its colour, every model's number, and where all that is from."""
    say = partial(_say, figure)
    say(0.05, 0.945, "DriftLens", fontsize=17, fontweight="bold", color=LIGHT.roles["expert"][0])
    say(0.95, 0.94, textwrap.shorten(printable(run.name), 60, placeholder="…"), fontsize=15, ha="right")
    sentence = "\n".join(textwrap.wrap(unbroken(signs(found.text)), _LINE)[:4])
    figure.text(
        *(0.05, 0.85, sentence),
        **{"fontsize": 33, "fontweight": "bold", "va": "top", "linespacing": 1.2, "parse_math": False},
        color=LIGHT.tones.get(found.tone, LIGHT.ink),
    )
    for place, (variant, mean) in enumerate(found.tiles.items()):
        x = 0.05 + 0.14 * place
        text, _, ends = estimate(mean, found.kind).partition(" (")
        say(x, 0.49, called(variant)[:14], fontsize=13, color=LIGHT.roles[part_of(variant)][0])
        say(x, 0.45, text, fontsize=22, fontweight="bold")
        say(x, 0.385, ends.removesuffix(")"), fontsize=10, color=LIGHT.quiet)
    where = f"{found.measure}, {found.so_far or counted(len(run.tasks), 'task')}; run {run.id}"
    say(0.05, 0.075, where, fontsize=12, color=LIGHT.quiet)
    if run.manifest.synthetic:
        say(0.95, 0.075, "synthetic demo, no benchmark", fontsize=12, color=LIGHT.quiet, ha="right")


def _draw_bar(axes: Axes, found: Headline) -> None:
    """As on pages: thick what the repair moved, grey what is left to the experts."""
    axes.axis("off")
    if len(found.tiles) < 2:
        return
    low, high = reach(found)
    axes.set(xlim=(low, high), ylim=(-1, 1))
    axes.plot([low, high], [0, 0], color=LIGHT.grid, linewidth=2, zorder=1)
    parts = {part_of(variant): mean.value for variant, mean in found.tiles.items()}
    steps = [(part, parts[part]) for part in ("merged", "calibrated", "expert") if part in parts]
    for (_, start), (part, end) in itertools.pairwise(steps):
        colour = LIGHT.gap if part == "expert" else LIGHT.roles[part][0]
        axes.plot([start, end], [0, 0], color=colour, linewidth=14, solid_capstyle="butt", zorder=2)
    for variant, mean in found.tiles.items():
        colour = LIGHT.roles[part_of(variant)][0]
        if is_measured(mean.low):
            axes.plot([mean.low, mean.high], [0, 0], color=colour, linewidth=4, zorder=3)
        marks = {"markeredgecolor": LIGHT.surface, "markeredgewidth": 2, "clip_on": False, "zorder": 4}
        axes.plot([mean.value], [0], "o", color=colour, markersize=17, **marks)
    for value, side in ((low, "left"), (high, "right")):
        axes.text(value, -0.95, written(value, found.kind), ha=side, fontsize=11, color=LIGHT.quiet)


def _pair(run: DriftRun, name: str) -> list[tuple[str, str, Any]]:
    """Merged and repaired model (without one, expert and merged) on the task that drifts most, in one layout."""
    judged = verdict(run, name)
    if not judged.merged or not run.manifest.layers:
        return []
    pair = (judged.merged, judged.after) if judged.after else ("expert", judged.merged)
    task = worst_task(run, run.tasks, judged.merged)
    try:
        layout = looked_at(run, task)
    except DataError:
        return []  # features are not stored
    frames = dict(iter(layout.frame.groupby("variant", sort=False)))
    return [(variant, task, (frames["expert"], frames[variant])) for variant in pair if variant in frames]


def _draw_points(axes: Axes, variant: str, frames: Any) -> None:
    """The expert's points behind, the variant's before them."""
    behind, before = frames
    is_expert = variant == "expert"
    looks = {"s": 9, "linewidths": 0}
    axes.scatter(
        behind["x"], behind["y"], color=LIGHT.roles["expert"][0], alpha=1 if is_expert else 0.35, **looks
    )
    if not is_expert:
        axes.scatter(before["x"], before["y"], color=LIGHT.roles[part_of(variant)][0], **looks)
    axes.set(xticks=[], yticks=[])
    axes.set_title(printable(called(variant))[:20], fontsize=13, color=LIGHT.ink, parse_math=False)
    for side in axes.spines.values():
        side.set(visible=True, color=LIGHT.grid)
