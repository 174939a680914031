"""Where drift comes from at each layer: what the layer adds, what it passes on, and how the two meet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from driftlens.records.run import DriftRun
from driftlens.variants import title
from driftlens_reports.paper import captions, choice
from driftlens_reports.paper.exhibit import Exhibited, ExhibitOptions
from driftlens_reports.paper.plate import Plate, guide, legend, short
from driftlens_reports.paper.series import by_layer, draw_line, layer_axis
from driftlens_reports.paper.style import figure, look_of, venue_of

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

_PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "drift_l2_mean": ("drift e", {}),
    "mismatch_l2_mean": ("local mismatch m", {"color": "#117733", "linestyle": (0, (4, 1.5)), "marker": "^"}),
    "propagation_l2_mean": (
        "propagation p",
        {"color": "#332288", "linestyle": (0, (1.2, 1.2)), "marker": "P"},
    ),
}
_MISSING = "`driftlens analyze` measures it"


@figure("decomposition", title="Local mismatch and propagation by layer")
def decomposition(runs: Sequence[DriftRun], options: ExhibitOptions) -> Exhibited:
    """Mean norms of drift, mismatch and propagation, and their cross term; merged and calibrated side by side."""
    run, task = runs[0], choice.task_of(runs[0], options)
    variants = ["merged", choice.calibrated_of(run, options)]
    narrow = venue_of(options.width) == "icml-column"
    plate = Plate(options.width, options.width * (1.1 if narrow else 0.62))
    above, below = plate.figure.subplots(2, 2, sharex="col", sharey="row", height_ratios=[2, 1])
    entries: dict[str, Artist] = {}
    for letter, variant, norms, cross in zip("ab", variants, above, below, strict=True):
        rows = None if variant is None else by_layer(run, task, variant)
        if variant is None or rows is None or rows["mismatch_l2_mean"].isna().all():
            command = f"`{choice.CALIBRATE}` adds it" if variant is None else _MISSING
            plate.note(norms, f"({letter}) norms", command)
            plate.note(cross, f"({letter}) cross term", command)
            continue
        entries |= _draw_norms(plate, norms, run, letter, rows, task, variant)
        _draw_cross_term(plate, cross, run, letter, rows, task, variant)
        plate.title(norms, f"({letter}) {short(title(variant), 28)}, {short(task)}")
    if above[0].has_data():
        above[0].set(ylabel="mean L2 norm\n(feature units)", ylim=(0, None))
        below[0].set_ylabel("cross term")
    legend(plate.figure, entries)
    return plate.exhibited(captions.together(_caption(run, task, plate)))


def _draw_norms(
    plate: Plate, axes: Axes, run: DriftRun, panel: str, rows: pd.DataFrame, task: str, variant: str
) -> dict[str, Artist]:
    lines: dict[str, Artist] = {}
    for quantity, (name, look) in _PARTS.items():
        style: dict[str, Any] = {"color": "#222222", "linestyle": "-", "marker": "o"} | look
        lines[name] = draw_line(plate, axes, run, panel, rows, quantity, task=task, variant=variant, **style)
    axes.grid(axis="y")
    return lines


def _draw_cross_term(
    plate: Plate, axes: Axes, run: DriftRun, panel: str, rows: pd.DataFrame, task: str, variant: str
) -> None:
    look, values = look_of(variant), rows["cross_term"].to_numpy(dtype=float)
    axes.bar(rows.index, values, 0.7, color=look.colour, edgecolor="white", linewidth=0, hatch=look.hatch)
    guide(axes, y=0)
    plate.record(panel, run, "cross_term", values, task=task, variant=variant, layer=list(rows.index))
    layer_axis(axes, run)


def _caption(run: DriftRun, task: str, plate: Plate) -> Iterator[str]:
    yield f"Drift of task {task} by layer, split exactly into e = m + p."
    yield from captions.origin([run])
    yield (
        "Above: mean norms over samples of the drift e leaving each layer, of the local mismatch m that the layer "
        "adds (taken on expert features) and of the propagation p that it passes on."
    )
    yield (
        "Below: 2<m, p> / |e|^2, a ratio of sums over samples: positive where m and p add up, negative where they "
        "cancel. Norms alone do not add up."
    )
    yield captions.samples(run.layers(task))
    yield from captions.gaps(plate.missing)
