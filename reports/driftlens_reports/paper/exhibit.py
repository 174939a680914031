"""What an exhibit is: saved runs in, a figure or a table out, with the plotted numbers and a caption draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import pandas as pd

from driftlens.records.run import DriftRun
from driftlens.registry import Registry

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Kind = Literal["figure", "table"]


@dataclass(frozen=True)
class ExhibitOptions:
    """What a writer may choose.

    Attributes:
        tasks: only these; None is all.
        task: the task of exhibits about one task; None is the one with the largest final drift of the merged model.
        calibrated: the variant called "calibrated"; None is the last one of the run.
        baseline: the variant compared with; None is the anchor-only control where there is one, else `merged`.
        layer: layer index, "final" or module path, for exhibits of one layer.
        width: of the venue's text or column, in inches.
        digits: decimals of percentages in tables.
        method: projection of matched features: pca, umap or tsne.
        paper: whether figures show the paper's printed numbers beside measured ones, in a style of their own.
    """

    tasks: Sequence[str] | None = None
    task: str | None = None
    calibrated: str | None = None
    baseline: str | None = None
    layer: int | str = "final"
    width: float = 5.5
    digits: int = 1
    method: str = "pca"
    paper: bool = False


@dataclass(frozen=True)
class Panel:
    """A part of an exhibit that the runs can't fill: what is missing, and the command that adds it."""

    name: str
    missing: str


@dataclass(frozen=True)
class Exhibited:
    """A drawn exhibit.

    Attributes:
        data: every number it shows, a tidy row each, unrounded; column `source` is `measured` or `paper`.
        caption: a draft, with n, dispersion, split and rounding.
        figure: of a figure, made within the packaged matplotlib style; None for a table.
        latex: of a table, an `\\input`-able booktabs fragment; None for a figure.
        missing: parts that the runs can't fill.
    """

    data: pd.DataFrame
    caption: str
    figure: Figure | None = None
    latex: str | None = None
    missing: tuple[Panel, ...] = ()


Draw = Callable[[Sequence[DriftRun], ExhibitOptions], Exhibited]


@dataclass(frozen=True)
class Exhibit:
    """One figure or table.

    Attributes:
        name: its id, for example `intro`; files are called `<id>.<format>`.
        kind: figure or table.
        title: what it shows, in a few words.
        paper: where the paper has its like, for example "Figure 1"; empty for ours.
        draw: draws it from runs; parts that the runs can't fill are framed notes, never invented numbers.
    """

    name: str
    kind: Kind
    title: str
    paper: str
    draw: Draw


exhibits: Registry[Exhibit] = Registry("exhibit", "driftlens_reports.paper")


def exhibit(name: str, *, kind: Kind, title: str, paper: str = "") -> Callable[[Draw], Draw]:
    """Decorator that files a drawing function as the exhibit `name`."""

    def file(draw: Draw) -> Draw:
        exhibits.register(name)(Exhibit(name, kind, title, paper, draw))
        return draw

    return file
