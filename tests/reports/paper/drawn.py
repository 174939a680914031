"""Figures drawn for tests, and what they show, read back from their artists."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PathCollection, PolyCollection, QuadMesh
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from numpy.typing import NDArray

from driftlens.cli import main
from driftlens.runs.run import DriftRun
from driftlens_reports.paper import exhibit
from driftlens_reports.paper.exhibit import WIDTHS, Artifact, ExhibitOptions, use_venue_style
from driftlens_reports.paper.plate import GUIDE

Array = NDArray[np.float64]
PAGE = r"""\documentclass[10pt]{article}\usepackage{booktabs,graphicx}%s
\begin{document}%s\end{document}"""


@functools.cache
def draw(name: str, *runs: DriftRun, **options: Any) -> Artifact:
    """The exhibit `name`, drawn once for the same run objects and options."""
    return exhibit.draw_exhibit(name, runs, ExhibitOptions(**options))


def lines(axes: Axes) -> list[Line2D]:
    """The lines that stand for measurements."""
    return [line for line in axes.lines if line.get_label() != GUIDE]


def line_points(line: Line2D) -> Array:
    """Points of a line, [n, 2], without gaps."""
    points = np.column_stack([np.asarray(line.get_xdata(), float), np.asarray(line.get_ydata(), float)])
    return points[~np.isnan(points).any(axis=1)]


def scattered(axes: Axes) -> list[Array]:
    """Points of every scatter, [n, 2]."""
    return [np.asarray(dots.get_offsets()) for dots in axes.collections if isinstance(dots, PathCollection)]


def segments(axes: Axes) -> list[Array]:
    """Ends of every group of single lines, [n, 2, 2]."""
    groups = [entry for entry in axes.collections if isinstance(entry, LineCollection)]
    return [np.array([part for part in group.get_segments() if len(part)]) for group in groups]


def bands(axes: Axes) -> list[Array]:
    """Corners of every filled band, [n, 2]."""
    areas = [entry for entry in axes.collections if isinstance(entry, PolyCollection)]
    return [path.vertices for area in areas for path in area.get_paths()]


def bars(axes: Axes) -> list[Rectangle]:
    """Every bar, in the order of drawing."""
    return [bar for group in axes.containers for bar in group]


def images(axes: Axes) -> list[Array]:
    """Numbers behind the cells of every heatmap, masked ones as NaN."""
    cells = [entry for entry in axes.collections if isinstance(entry, QuadMesh)]
    return [np.ma.filled(entry.get_array().astype(float), np.nan) for entry in cells]


def all_numbers(figure: Figure) -> Array:
    """Every number that stands somewhere on a panel, sorted."""
    return np.sort(np.concatenate([np.ravel(part) for axes in figure.axes for part in _numbers(axes)]))


def _numbers(axes: Axes) -> Iterator[Array]:
    yield np.empty(0)
    yield from (line_points(line) for line in lines(axes))
    yield from scattered(axes)
    yield from segments(axes)
    yield from bands(axes)
    yield from images(axes)
    yield np.array([[bar.get_height(), bar.get_width()] for bar in bars(axes)])


def shows(numbers: Array, value: float) -> bool:
    """Whether `value` is among the sorted `numbers`, up to rounding of float64."""
    at = np.searchsorted(numbers, value)
    near = numbers[max(at - 1, 0) : at + 1]
    return bool(np.isclose(near, value, rtol=1e-12, atol=1e-15).any())


def texts(figure: Figure) -> list[Text]:
    """Every text with letters in it; titles, ticks and legends included."""
    with use_venue_style(next(name for name, width in WIDTHS.items() if width == figure.get_figwidth())):
        figure.draw_without_rendering()
    return [text for text in figure.findobj(Text) if text.get_text().strip()]


def words(figure: Figure) -> str:
    """All words of the figure, with line breaks as spaces."""
    return " ".join(" ".join(text.get_text() for text in texts(figure)).split())


def code_of(*arguments: object) -> int:
    with pytest.raises(SystemExit) as leaving:
        main([str(argument) for argument in arguments])
    return int(leaving.value.code or 0)


def rows_of(latex: str) -> list[list[str]]:
    """The cells of each line, read back as a reader would: without commands, with the letters they stand for."""
    plain = {
        r"\%": "%",
        r"\_": "_",
        r"\#": "#",
        r"\$": "$",
        "$-$": "-",
        r"$\pm$": "±",
        r"\{": "{",
        r"\}": "}",
    }
    found = []
    for line in latex.splitlines():
        if not line.endswith(r"\\"):
            continue
        text = line.removesuffix(r"\\")
        text = re.sub(r"\\(?:textbf|emph|multicolumn\{\d+\}\{\w\})\{((?:[^{}]|\\[{}])*)\}", r"\1", text)
        for letters, meant in plain.items():
            text = text.replace(letters, meant)
        found.append([cell.strip() for cell in re.split(r"(?<!\\)&", text)])
    return found


def typeset(folder: Path, packages: str, body: str, page: str = PAGE) -> str:
    """What pdfLaTeX says of it."""
    if shutil.which("pdflatex") is None:
        pytest.skip("pdflatex is not installed")
    (folder / "all.tex").write_text(page % (packages, body), encoding="utf-8")
    command = ["pdflatex", "-no-shell-escape", "-interaction=nonstopmode", "-halt-on-error", "all.tex"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace")
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout
