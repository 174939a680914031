"""Matched features of one task in one joint 2-D layout: an expert point and a variant's point for every sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from driftlens.errors import DataError, NumericsError
from driftlens.records.run import DriftRun
from driftlens.variants import title
from driftlens_reports.charts.theme import look
from driftlens_reports.charts.thinning import thinned
from driftlens_reports.paper import choice
from driftlens_reports.paper.captions import spaced
from driftlens_reports.paper.marks import SYMBOLS
from driftlens_reports.paper.plate import Plate
from driftlens_reports.paper.style import hairline

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

    from driftlens.projection import Projection

MOST = 400
"""Samples drawn per panel; more would hide one another."""

_METHODS = {"pca": "PCA", "umap": "UMAP", "tsne": "t-SNE"}


@dataclass(frozen=True)
class Layout:
    """One task's features in the plane.

    Attributes:
        task: the task.
        rows: variant, sample_id, label, x, y; the same samples for every variant.
        method: how the plane was found, in words.
        notes: what a reader must know of this layout, in sentences.
        trust: how much of the features' neighbourhoods the plane keeps, by variant; empty with too few samples.
    """

    task: str
    rows: pd.DataFrame
    method: str
    notes: tuple[str, ...]
    trust: str


def layout_of(
    run: DriftRun, task: str, variants: Sequence[str], layer: int | str, method: str
) -> Layout | str:
    """The joint layout of all variants, with the rows of the expert and `variants`; or why there is none.

    It is the one that the run stores, and is computed otherwise. Drawing never changes a run, so it is not stored then.

    Raises:
        RunError: features can't be read.
        SpecError: no such method.
        LayerNotFoundError: the run has no such layer.
    """
    from driftlens.projection import project, stored_projection

    try:
        found = stored_projection(run, task, layer=layer, method=method)
        found = found or project(run, task, layer=layer, method=method, store_it=False)
    except (DataError, NumericsError) as error:
        return error.message
    rows = found.frame[found.frame["variant"].isin(["expert", *variants])]
    kept = thinned(rows[rows["variant"] == "expert"], MOST, by=["label"])["sample_id"]
    notes = [*_thinning(len(kept), int(found.quality["n"].max())), *found.notes]
    return Layout(
        task,
        rows[rows["sample_id"].isin(kept)],
        _METHODS[found.method],
        tuple(f"{task}: {note.removesuffix('.')}." for note in notes),
        _trust(found, variants),
    )


def _thinning(drawn: int, there: int) -> list[str]:
    if drawn == there:
        return []
    return [f"{spaced(drawn)} of {spaced(there)} samples are drawn, evenly from every class"]


def _trust(found: Projection, variants: Sequence[str]) -> str:
    rows = found.quality[found.quality["variant"].isin(variants) & found.quality["trustworthiness"].notna()]
    parts = [
        f"{title(variant)} {value:.2f}"
        for variant, value in zip(rows["variant"], rows["trustworthiness"], strict=True)
    ]
    return ", ".join(parts)


def draw_pairs(
    plate: Plate,
    axes: Axes,
    run: DriftRun,
    layout: Layout | str,
    variant: str | None,
    panel: str,
    *,
    layer: int | str = "final",
) -> None:
    """Draw one panel: expert points, the variant's points and a line between the two of each sample.

    Panels of one layout have the same limits, so that distances can be compared between them. Below stands the mean
    cosine. Without a layout or a variant, or where the layout lacks it, the panel is a note.
    """
    if variant is None:
        plate.note(axes, "calibrated features", f"`{choice.CALIBRATE}` adds them")
    elif isinstance(layout, str):
        plate.note(axes, f"features of {title(variant)}", layout)
    elif variant not in set(layout.rows["variant"]):
        plate.note(axes, f"features of {title(variant)}", "the run has no features of this variant")
    else:
        _draw_points(plate, axes, run, layout, variant, panel)
        cosine = run.value("cos_mean", task=layout.task, variant=variant, layer=layer)
        axes.set_xlabel(f"mean cosine {cosine:.2f}" if not math.isnan(cosine) else "cosine not measured")
        key: dict[str, Any] = {"task": layout.task, "variant": variant, "layer": run.layer_index(layer)}
        plate.record(panel, run, "cos_mean", cosine, **key)


def points_legend(run: DriftRun, variants: Sequence[str]) -> dict[str, Artist]:
    """What a legend says of panels of pairs."""
    from matplotlib.lines import Line2D

    return {title(name): Line2D([], [], linestyle="", **_marks(run, name)) for name in ["expert", *variants]}


def _draw_points(plate: Plate, axes: Axes, run: DriftRun, layout: Layout, variant: str, panel: str) -> None:
    from matplotlib.collections import LineCollection

    points = {
        name: layout.rows[layout.rows["variant"] == name].set_index("sample_id")
        for name in ("expert", variant)
    }
    ids = points["expert"].index
    ends = [points[name].loc[ids, ["x", "y"]].to_numpy(dtype=float) for name in points]
    axes.add_collection(
        LineCollection(np.stack(ends, axis=1), colors="#BBBBBB", linewidths=0.7 * hairline(), zorder=1)
    )
    for name, at in zip(points, ends, strict=True):
        (dots,) = axes.plot(*at.T, linestyle="", alpha=0.8, **_marks(run, name))
        dots.set_markersize((0.7 if len(ids) > 100 else 1.0) * dots.get_markersize())
        for column, quantity in enumerate(("x", "y")):
            key: dict[str, Any] = {"task": layout.task, "variant": name, "sample_id": list(ids)}
            plate.record(panel, run, quantity, at[:, column], **key)
    _frame(axes, layout)


def _marks(run: DriftRun, variant: str) -> dict[str, Any]:
    """Marks of a variant; those of the expert are hollow: one that the variant hits exactly stays visible around it."""
    style = look(run.variants, variant, dark=False)
    face = "none" if variant == "expert" else style.colour
    return {"marker": SYMBOLS[style.symbol], "markerfacecolor": face, "markeredgecolor": style.colour}


def _frame(axes: Axes, layout: Layout) -> None:
    """A square window around all points of the layout, without ticks: the axes of a layout have no unit."""
    low, high = (layout.rows[["x", "y"]].agg(end).to_numpy(dtype=float) for end in ("min", "max"))
    middle, half = (low + high) / 2, 0.54 * max(float((high - low).max()), 1e-9)
    axes.set(xlim=(middle[0] - half, middle[0] + half), ylim=(middle[1] - half, middle[1] + half))
    axes.set(aspect="equal", xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set(visible=True, color="#BBBBBB")
