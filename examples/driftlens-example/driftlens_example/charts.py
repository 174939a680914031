"""A chart: how heavy the tail of the drift is, layer by layer."""

import plotly.express as px

from driftlens_reports.charts.chart import Drawn, chart
from driftlens_reports.charts.picking import layer_rows


@chart(
    "drift-tail",
    title="Tail of the drift",
    section="drift",
    rank=900,
    presets=("standard",),
    needs=("layers", ("drift_l2_median", "drift_l2_q90")),
    caption="90 % quantile of the drift over its median, over diagnosis samples.",
    hint="Far above 1, a few samples drift much further than most.",
)
def drift_tail(run, options):
    """Plot a line per task and variant."""
    rows = layer_rows(run, options)[["task", "variant", "layer", "drift_l2_median", "drift_l2_q90"]]
    rows = rows.assign(tail=rows["drift_l2_q90"] / rows["drift_l2_median"])
    figure = px.line(rows, x="layer", y="tail", color="task", line_dash="variant", labels={"tail": "q90 / median"})
    return Drawn(figure, alt=f"The largest ratio is {rows['tail'].max():.3g}.", data=rows)
