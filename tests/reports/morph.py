"""A moving picture of a run: final features of its tasks on their way from the merge to the experts."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from PIL import Image

from driftlens.config.requests import ProjectionRequest
from driftlens.results.projection import project
from driftlens.runs.run import DriftRun
from driftlens_reports.charts.words import variant_title

INK, FAINT, EMPTY, BAR = "#1F2933", "#C9D1D9", "#EDF0F3", "#2F6DB5"
STILL, MOVING, LAST = 9, 12, 23
"""Frames that a stage stands still, that lead to the next, and that the last one stands."""


def write_morph(run: DriftRun, path: Path) -> None:
    """Write the picture; what it says of accuracy is said where features stand still, and measured there."""
    repairs = [variant for variant in run.variants if variant.startswith("calibrated:")]
    stages = ["merged", *repairs, "expert"]
    scores = run.accuracy().groupby("variant")["value"].mean()
    points = {task: _points(run, task, stages) for task in run.tasks}
    frames = [_frame(points, stages, scores, time) for time in _times(len(stages))]
    palette = frames[-1].quantize(96, dither=Image.Dither.NONE)
    first, *rest = (frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames)
    first.save(path, save_all=True, append_images=rest, duration=70, loop=0, optimize=True)


def _times(num_stages: int) -> list[float]:
    """Where each frame stands between the stages 0, 1, ...; slow near each."""
    ease = (1 - np.cos(np.pi * np.arange(1, MOVING) / MOVING)) / 2
    between = [[float(stage)] * STILL + [stage + float(part) for part in ease] for stage in range(num_stages - 1)]
    return [time for part in between for time in part] + [float(num_stages - 1)] * LAST


def _points(run: DriftRun, task: str, stages: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Classes of a task's samples [n], and where these lie in its joint layout at every stage [stages, n, 2]."""
    frame = project(run, task, ProjectionRequest(layer="final"), store_it=False).frame
    by_variant = {name: rows.set_index("sample_id") for name, rows in frame.groupby("variant")}
    ids = by_variant["expert"].index
    places = [by_variant[stage].loc[ids, ["x", "y"]].to_numpy(dtype=float) for stage in stages]
    return pd.factorize(by_variant["expert"]["label"], sort=True)[0], np.stack(places)


def _frame(points: dict[str, Any], stages: list[str], scores: pd.Series, time: float) -> Image.Image:
    """One frame: a panel each task, and below it how far the mean accuracy is."""
    before = min(int(time), len(stages) - 2)
    part = time - before
    figure = Figure(figsize=(9, 3.35), dpi=110)
    panels = figure.subplots(1, len(points))
    figure.subplots_adjust(left=0.012, right=0.988, top=0.845, bottom=0.2, wspace=0.05)
    for axes, (task, (classes, places)) in zip(panels, points.items(), strict=True):
        drawn = (1 - part) * places[before] + part * places[before + 1]
        axes.scatter(*drawn.T, s=9, c=matplotlib.colormaps["tab10"](classes % 10), linewidths=0, alpha=0.75)
        low, high = places.min(axis=(0, 1)), places.max(axis=(0, 1))
        middle, half = (low + high) / 2, 0.53 * float((high - low).max())
        axes.set(xlim=(middle[0] - half, middle[0] + half), ylim=(middle[1] - half, middle[1] + half))
        axes.set(xticks=[], yticks=[], aspect="equal")
        axes.set_title(task, fontsize=9, color=INK, pad=3)
        for spine in axes.spines.values():
            spine.set(color=FAINT)
    ends = [float(scores[stages[stage]]) for stage in (before, before + 1)]
    text: dict[str, Any] = {"y": 0.945, "fontsize": 14, "color": INK, "va": "center"}
    if part in (0, 1):
        figure.text(x=0.012, s=variant_title(stages[before + int(part)]), weight="bold", **text)
        figure.text(x=0.988, s=f"accuracy {ends[int(part)]:.0%}", ha="right", **text)
    else:
        figure.text(x=0.012, s=f"{variant_title(stages[before])} → {variant_title(stages[before + 1])}", **text)
    bar = figure.add_axes((0.012, 0.075, 0.976, 0.05), xlim=(0, 1), ylim=(0, 1))
    bar.axis("off")
    bar.axhspan(0, 1, color=EMPTY)
    bar.barh(0.5, (1 - part) * ends[0] + part * ends[1], height=1, color=BAR)
    for stage in ("base", *stages):
        score = float(scores[stage])
        bar.plot([score, score], [-0.35, 1], color=INK, linewidth=0.8, clip_on=False)
        # The last two stages lie close to each other, and near the end.
        place, side = {stages[-1]: (1.0, "right"), stages[-2]: (score + 0.005, "right")}.get(stage, (score, "center"))
        bar.text(place, -0.55, f"{variant_title(stage)} {score:.0%}", fontsize=7.5, ha=side, va="top", color=INK)
    data = io.BytesIO()
    figure.savefig(data, format="png")
    return Image.open(data).convert("RGB")
