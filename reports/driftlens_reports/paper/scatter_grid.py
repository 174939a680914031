"""Every task's matched features, merged above calibrated, each task in a layout of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from driftlens.records.run import DriftRun
from driftlens_reports.paper import captions, choice
from driftlens_reports.paper.exhibit import Exhibited, ExhibitOptions
from driftlens_reports.paper.matched import Layout, draw_pairs, layout_of, points_legend
from driftlens_reports.paper.plate import Plate, legend, short
from driftlens_reports.paper.style import figure, venue_of


@figure("scatter-grid", title="Matched features of every task", paper="Figure 6")
def scatter_grid(runs: Sequence[DriftRun], options: ExhibitOptions) -> Exhibited:
    """Tasks side by side; for each, expert against merged and expert against calibrated features."""
    run, tasks = runs[0], choice.tasks_of(runs[0], options)
    calibrated = choice.calibrated_of(run, options)
    variants = ["merged", *filter(None, [calibrated])]
    across = _columns(len(tasks), options.width)
    bands = max(1, math.ceil(len(tasks) / across))
    # A cell is a square with its title or its cosine.
    rows = 1 if len(tasks) == 1 else 2 * bands  # a single task's two panels stand side by side
    plate = Plate(options.width, rows * (options.width / across + 0.02 * options.width))
    cells = plate.figure.subplots(rows, across, squeeze=False)
    cells = cells.T if rows == 1 else cells
    layouts = []
    for at, task in enumerate(tasks):
        layout = layout_of(run, task, variants, options.layer, options.method)
        layouts.append(layout)
        above, below = cells[2 * (at // across) : 2 * (at // across) + 2, at % across]
        for axes, variant in ((above, "merged"), (below, calibrated)):
            draw_pairs(plate, axes, run, layout, variant, task, layer=options.layer)
        above.set_title(short(task), loc="center")
    for axes in cells.ravel():
        if not axes.has_data() and not axes.texts:
            axes.set_axis_off()
    legend(plate.figure, points_legend(run, variants))
    return plate.exhibited(captions.together(_caption(run, layouts, plate, options)))


def _columns(tasks: int, width: float) -> int:
    if venue_of(width) == "icml-column":
        return min(3, max(tasks, 2))
    return min(4 if tasks <= 12 else 5, max(tasks, 2))


def _caption(
    run: DriftRun, layouts: Sequence[Layout | str], plate: Plate, options: ExhibitOptions
) -> Iterator[str]:
    where = "final layer" if options.layer == "final" else f"layer {run.layer_index(options.layer)} (stem: 1)"
    yield f"Features of every task at the {where}, matched by sample: merged above, calibrated below."
    yield from captions.origin([run])
    drawn = [layout for layout in layouts if isinstance(layout, Layout)]
    if drawn:
        methods = " or ".join(dict.fromkeys(layout.method for layout in drawn))
        yield (
            f"Each task has a joint layout of its own ({methods}, fitted once to all variants; features are "
            "scaled to norm 1): distances can be compared within a task and are not comparable across tasks."
        )
        yield "Below each panel, the mean cosine to the expert's feature, rounded."
    yield captions.samples(run.layers(layer=options.layer))
    trust = "; ".join(f"{layout.task}: {layout.trust}" for layout in drawn if layout.trust)
    yield f"Trustworthiness of the planes: {trust}." if trust else ""
    for layout in drawn:
        yield from layout.notes
    yield from captions.gaps(plate.missing)
