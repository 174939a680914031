"""One sample's way through the layers: its drift, and each layer's share of its final drift."""

from __future__ import annotations

import pandas as pd

from driftlens.errors import DataError
from driftlens.records.run import DriftRun
from driftlens.variants import title
from driftlens_reports.charts.axes import layer_axis, layer_title
from driftlens_reports.charts.chart import ChartOptions, Drawn
from driftlens_reports.charts.curves import curve, legend_names, parts
from driftlens_reports.charts.panels import panel_grid, reference_line
from driftlens_reports.charts.picking import ANALYZE, chosen_variants, ordered
from driftlens_reports.charts.theme import TICK_NUMBER
from driftlens_reports.charts.words import counted, joined
from driftlens_reports.wording import number

_DRIFT, _SHARE = "drift", "share of final drift"


def sample_curves(run: DriftRun, task: str, sample_id: str, options: ChartOptions) -> Drawn:
    """Drift of one sample by layer, and beside it the layers' shares of its final drift, one line per variant.

    Raises:
        DataError: the run has no such task, or no rows of this sample.
        RunError: the sample table can't be read.
    """
    samples = _drawn_samples(run, task, options)
    rows = _rows(run, samples, task, sample_id)
    measured = [name for name in (_DRIFT, _SHARE) if rows[name].notna().any()]
    names = {_DRIFT: "Drift by layer", _SHARE: "Share of its final drift"}
    grid = panel_grid(
        [names[name] for name in measured],
        x_title=layer_title(run),
        y_titles=["L2 drift (feature units)", "share (ratio)"][: len(measured)],
        legend=legend_names(rows),
        dark=options.dark,
        key=f"{run.id} sample {task} {sample_id}",
        columns=2,
        share_y=False,
    )
    for part in parts(run, rows, dark=options.dark):
        for at, name in enumerate(measured):
            grid.add(at, curve(part.rows, name, part.marks, what=name, legend=part.is_first and at == 0))
    if _SHARE in measured:
        reference_line(grid, 0.0, dark=options.dark, column=measured.index(_SHARE))
    values = {"tickformat": TICK_NUMBER, "rangemode": "tozero"}
    grid.set_axes(x=layer_axis(run), y=[values, {"tickformat": TICK_NUMBER}][: len(measured)])
    return Drawn(
        grid.figure,
        alt=_in_words(rows, sample_id),
        data=rows.drop(columns="n"),
        notes=_notes(samples, has_shares=_SHARE in measured),
    )


def _drawn_samples(run: DriftRun, task: str, options: ChartOptions) -> pd.DataFrame:
    """The task's rows of the sample table that are of the chosen variants, all samples."""
    return ordered(run.samples(task), [task], chosen_variants(run, options))


def _rows(run: DriftRun, samples: pd.DataFrame, task: str, sample_id: str) -> pd.DataFrame:
    rows = samples[samples["sample_id"] == sample_id]
    if rows.empty:
        raise DataError(
            f"task {task!r} has no diagnosis sample {sample_id!r}", hint="Choose one of the table."
        )
    layers = pd.DataFrame(
        [(entry.index, entry.role, entry.path) for entry in run.manifest.layers],
        columns=["layer", "role", "path"],
    )
    rows = rows.merge(layers, on="layer", how="left").rename(
        columns={"drift_l2": _DRIFT, "final_share": _SHARE}
    )
    return rows[["task", "variant", "layer", "role", "path", _DRIFT, _SHARE]].assign(n=1)


def _notes(samples: pd.DataFrame, *, has_shares: bool) -> tuple[str, ...]:
    """What the panels show; without the second one, on how many samples there is one, and what gives more."""
    if has_shares:
        return (
            "Drift of this sample alone, in feature units, and the share of its final drift from each layer.",
        )
    explained = samples.loc[samples["final_share"].notna(), "sample_id"].nunique()
    of_all = f"{explained} of {counted(samples['sample_id'].nunique(), 'sample')}"
    return (
        "Drift of this sample alone, in feature units.",
        f"Contributions were measured on {of_all}; metrics.jacobian.samples in the spec raises it."
        if explained
        else f"Contributions were not measured here; {ANALYZE} --set metrics.contributions=true adds them.",
    )


def _in_words(rows: pd.DataFrame, sample_id: str) -> str:
    last = rows[rows["layer"] == rows["layer"].max()]
    values = [f"{title(row['variant'])} {number(row[_DRIFT])}" for row in last.to_dict("records")]
    return f"Drift of the sample {sample_id} by layer. At the last one: {joined(values)}."
