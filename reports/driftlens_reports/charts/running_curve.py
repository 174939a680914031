"""The drift of a calibration while it runs: the merged model's layers, and the calibrated ones so far."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from driftlens.records.run import DriftRun
from driftlens.variants import calibrated
from driftlens_reports.charts.axes import layer_axis, layer_title, titled
from driftlens_reports.charts.chart import Drawn
from driftlens_reports.charts.curves import curve, legend_names
from driftlens_reports.charts.panels import panel_grid
from driftlens_reports.charts.theme import TICK_NUMBER, look
from driftlens_reports.charts.words import counted
from driftlens_reports.wording import number

_DRIFT = "mean drift"


def running_curve(run: DriftRun, name: str, found: Mapping[int, float], *, dark: bool) -> Drawn:
    """Mean drift by layer: one line for the merged model, one for the calibration as far as it has come.

    Args:
        run: the run that is being calibrated.
        name: of the calibration; the run need not have it yet.
        found: the calibrated model's mean drift behind each finished layer, by layer index.
        dark: which theme.

    Raises:
        RunError: the layer table can't be read.
    """
    rows = _rows(run, calibrated(name), found)
    variants = list(dict.fromkeys(rows["variant"]))
    # Already its look of later: shades and marks follow from the variants that come before it.
    known = list(dict.fromkeys([*run.variants, *variants]))
    grid = panel_grid(
        [""],
        x_title=layer_title(run),
        y_titles=[titled("mean L2 drift", "layers", "drift_l2_mean")],
        legend=legend_names(rows),
        dark=dark,
        key=f"{run.id} running {name}",
    )
    for variant in variants:
        part = rows[rows["variant"] == variant]
        grid.add(0, curve(part, _DRIFT, look(known, variant, dark=dark), what=_DRIFT, legend=True))
    grid.set_axes(x=layer_axis(run), y={"tickformat": TICK_NUMBER, "rangemode": "tozero"})
    return Drawn(
        grid.figure,
        alt=f"Mean drift by layer while the calibration runs. {_in_words(rows, run, found)}",
        data=rows[["variant", "layer", "role", "path", _DRIFT]],
        notes=(
            "Mean over tasks.",
            "Merged: diagnosis samples; the calibration: calibration samples while it runs.",
        ),
    )


def _rows(run: DriftRun, variant: str, found: Mapping[int, float]) -> pd.DataFrame:
    measured = run.layers()
    merged = measured[measured["variant"] == "merged"].groupby("layer")["drift_l2_mean"].mean()
    lines = {"merged": merged, variant: pd.Series(found, dtype=float).sort_index()}
    rows = pd.concat(
        [
            pd.DataFrame({"variant": name, "layer": line.index, _DRIFT: line.array})
            for name, line in lines.items()
        ],
        ignore_index=True,
    )
    places = {entry.index: entry for entry in run.manifest.layers}
    return rows.assign(
        task="mean over tasks",
        role=[places[layer].role if layer in places else "layer" for layer in rows["layer"]],
        path=[places[layer].path if layer in places else "" for layer in rows["layer"]],
    )


def _in_words(rows: pd.DataFrame, run: DriftRun, found: Mapping[int, float]) -> str:
    if not found:
        return "No layer is calibrated yet."
    layer = max(found)
    there = rows[(rows["layer"] == layer) & (rows["variant"] == "merged")][_DRIFT]
    before = f", merged {number(float(there.iloc[0]))}" if len(there) else ""
    done = f"{counted(len(found), 'layer')} of {len(run.manifest.layers)}"
    return f"{done} so far; at layer {layer}: calibrated {number(found[layer])}{before}."
