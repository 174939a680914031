"""How task vectors lie to the experts', layer by layer and by kind of module."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from driftlens import variants
from driftlens.records.run import DriftRun
from driftlens_reports.charts.axes import layer_axis, layer_title
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart
from driftlens_reports.charts.module_groups import group_of
from driftlens_reports.charts.picking import ANALYZE, absent, chosen_tasks, chosen_variants, needs, ordered
from driftlens_reports.charts.theme import NUMBER, TICK_NUMBER, apply_theme, look
from driftlens_reports.charts.words import counted, data_key, joined, literal, shown
from driftlens_reports.wording import number

if TYPE_CHECKING:
    import plotly.graph_objects as go

HEIGHT = 420
_VALUE = "mean cosine of task vectors"


def _params(run: DriftRun, options: ChartOptions) -> pd.DataFrame:
    rows = run.params()
    rows = rows[rows["scope"].isin(["layer", "module"]) & rows["cos"].notna()]
    return ordered(rows, chosen_tasks(run, options), chosen_variants(run, options))


def _missing(run: DriftRun, options: ChartOptions) -> str | None:
    if len(_params(run, options)):
        return None
    return needs("params", ["cos"])(run, options) or absent("params", ["cos"], ANALYZE)


def _summary(rows: pd.DataFrame, by: str) -> pd.DataFrame:
    """Mean, lowest and highest cosine of each variant at each value of `by`."""
    groups = rows.groupby(["variant", by], sort=False)["cos"]
    columns = {
        _VALUE: groups.mean(),
        "lowest": groups.min(),
        "highest": groups.max(),
        "cosines": groups.size(),
    }
    return pd.DataFrame(columns).reset_index()


def _by_layer(run: DriftRun, rows: pd.DataFrame) -> pd.DataFrame:
    index = {layer.path: layer.index for layer in run.manifest.layers}
    layers = rows[rows["scope"] == "layer"]
    layers = layers.assign(layer=layers["path"].map(index))
    return _summary(layers[layers["layer"].notna()].astype({"layer": int}), "layer").sort_values(
        ["variant", "layer"],
        key=lambda column: column if column.name == "layer" else column.map(_order(rows)),
    )


def _order(rows: pd.DataFrame) -> dict[str, int]:
    return {str(name): at for at, name in enumerate(rows["variant"].unique())}


def _by_group(run: DriftRun, rows: pd.DataFrame) -> pd.DataFrame:
    modules = rows[rows["scope"] == "module"]
    groups = {path: group_of(run, path) for path in modules["path"].unique()}
    return _summary(modules.assign(**{"module group": modules["path"].map(groups)}), "module group")


@chart(
    "alignment",
    title="Task vectors by layer and module",
    section="parameters",
    caption="Mean cosine of each variant's task vector to the same task's expert's, left by layer and right by kind of "
    "module, with whiskers from the lowest to the highest task and module; no samples are involved.",
    hint="A task vector is a model's weights minus the base's. Low layers or modules are where the merge left the "
    "expert's direction. Calibration may lower these cosines while it brings features closer: it repairs what the "
    "merged model computes, not how its weights look.",
    missing=_missing,
)
def draw(run: DriftRun, options: ChartOptions) -> Drawn:
    """Two panels on one axis of cosines."""
    from plotly.subplots import make_subplots

    params = _params(run, options)
    layers, groups = _by_layer(run, params), _by_group(run, params)
    figure = make_subplots(1, 2, shared_yaxes=True, horizontal_spacing=0.04)
    for variant in params["variant"].unique():
        for place, rows, by in ((1, layers, "layer"), (2, groups, "module group")):
            part = rows[rows["variant"] == variant]
            figure.add_trace(_trace(run, part, str(variant), by, dark=options.dark), row=1, col=place)
    apply_theme(figure, dark=options.dark, key=data_key(run, "alignment", options), height=HEIGHT)
    figure.update_layout(scattermode="group", scattergap=0.4)
    figure.update_xaxes(**layer_axis(run), title_text=layer_title(run), col=1)
    figure.update_xaxes(type="category", title_text="module (name inside its block)", showgrid=False, col=2)
    figure.update_yaxes(tickformat=TICK_NUMBER)
    figure.update_yaxes(title_text="cosine of task vectors (1: same direction)", col=1)
    figure.update_yaxes(showticklabels=False, col=2)
    num_tasks = params["task"].nunique()
    return Drawn(
        figure,
        alt=f"Cosine of task vectors to the experts', mean over {counted(num_tasks, 'task')}, lowest to highest "
        f"layer: {_extremes_in_words(layers)}.",
        data=pd.concat([layers, groups], ignore_index=True).astype({"layer": "Int64"}),
        notes=(
            f"Means over {counted(num_tasks, 'task')}, right also over blocks. Whiskers: lowest to highest of them.",
        ),
    )


def _trace(run: DriftRun, rows: pd.DataFrame, variant: str, by: str, *, dark: bool) -> go.Scatter:
    import plotly.graph_objects as go

    style = look(run.variants, variant, dark=dark)
    is_layer = by == "layer"
    whiskers = {
        "array": (rows["highest"] - rows[_VALUE]).tolist(),
        "arrayminus": (rows[_VALUE] - rows["lowest"]).tolist(),
        "color": style.colour,
        "thickness": 1,
        "width": 2,
    }
    where = "layer %{x}" if is_layer else "%{x}"
    return go.Scatter(
        x=rows[by].tolist() if is_layer else [literal(str(group)) for group in rows[by]],
        y=rows[_VALUE].tolist(),
        error_y=whiskers,
        mode="markers",
        marker={"color": style.colour, "symbol": style.symbol, "size": 7},
        name=shown(variant),
        legendgroup=variant,
        offsetgroup=variant,
        showlegend=is_layer,
        text=[
            f"{number(low)} to {number(high)} over {count}"
            for low, high, count in zip(rows["lowest"], rows["highest"], rows["cosines"], strict=True)
        ],
        hovertemplate=f"{where}<br>mean cosine %{{y:{NUMBER}}}<br>%{{text}}",
    )


def _extremes_in_words(layers: pd.DataFrame) -> str:
    parts = []
    for variant, rows in layers.groupby("variant", sort=False):
        ends = [rows.loc[rows[_VALUE].idxmin()], rows.loc[rows[_VALUE].idxmax()]]
        values = [f"{number(end[_VALUE])} (layer {end['layer']})" for end in ends]
        parts.append(f"{variants.title(str(variant))} {' to '.join(values)}")
    return joined(parts)
