"""How task vectors lie to the experts', layer by layer and by kind of module."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from driftlens.records.reading import number
from driftlens.records.run import DriftRun
from driftlens_reports.charts import marks, panels, picking, theme, words
from driftlens_reports.charts.chart import ChartOptions, Drawn, chart

OUTSIDE = "stem and head"
_VALUE = "mean cosine of task vectors"


def group_of(run: DriftRun, path: str) -> str:
    """A module's name inside its block, for example `attn.q_proj`; `OUTSIDE` for modules in no block."""
    place = block_of(run, path)
    return path[len(place) + 1 :] if place else OUTSIDE


def block_of(run: DriftRun, path: str) -> str:
    """Path of the block that holds the module; empty for one in no block."""
    # The trailing dot keeps block 1 from holding what is block 10's.
    blocks = (layer.path for layer in run.manifest.layers if layer.role == "block")
    return next((block for block in blocks if path.startswith(f"{block}.")), "")


def _params(run: DriftRun, options: ChartOptions) -> pd.DataFrame:
    rows = run.params()
    rows = rows[rows["scope"].isin(["layer", "module"]) & rows["cos"].notna()]
    return picking.chosen(run, options, rows)


def _summary(rows: pd.DataFrame, by: str) -> pd.DataFrame:
    """Mean, lowest and highest cosine of each variant at each value of `by`."""
    groups = rows.groupby(["variant", by], sort=False)["cos"]
    ends = {"lowest": groups.min(), "highest": groups.max()}
    return pd.DataFrame({_VALUE: groups.mean(), **ends, "cosines": groups.size()}).reset_index()


@chart(
    "alignment",
    title="Task vectors by layer and module",
    section="parameters",
    rank=20,
    needs=("params", ("cos",)),
    rows=_params,
    caption="Mean cosine of each variant's task vector to the same task's expert's, left by layer and right by kind of "
    "module, with whiskers from the lowest to the highest task and module; no samples are involved.",
    hint="A task vector is a model's weights minus the base's. Low layers or modules are where the merge left the "
    "expert's direction. Calibration may lower these cosines while it brings features closer: it repairs what the "
    "merged model computes, not how its weights look.",
)
def draw(run: DriftRun, options: ChartOptions) -> Drawn:
    """Two panels on one axis of cosines."""
    params = _params(run, options)
    index = {layer.path: layer.index for layer in run.manifest.layers}
    own, modules = (params[params["scope"] == scope] for scope in ("layer", "module"))
    own = own.assign(layer=own["path"].map(index)).dropna(subset="layer").astype({"layer": int})
    layers = _summary(picking.chosen(run, options, own), "layer")
    inside = modules["path"].map({path: group_of(run, path) for path in modules["path"].unique()})
    groups = _summary(modules.assign(**{"module group": inside}), "module group")
    figure = make_subplots(1, 2, shared_yaxes=True, horizontal_spacing=0.04)
    for variant in params["variant"].unique():
        for place, rows, by in ((1, layers, "layer"), (2, groups, "module group")):
            part = rows[rows["variant"] == variant]
            figure.add_trace(_trace(run, part, str(variant), by, dark=options.dark), row=1, col=place)
    theme.apply_theme(figure, height=420, dark=options.dark)
    figure.update_layout(
        scattermode="group",
        scattergap=0.4,
        xaxis={**panels.layer_axis(run), "title_text": panels.layer_title(run)},
        xaxis2={"type": "category", "title_text": "module (name inside its block)", "showgrid": False},
        yaxis={"tickformat": theme.TICK_NUMBER, "title_text": "cosine of task vectors (1: same direction)"},
        yaxis2={"tickformat": theme.TICK_NUMBER, "showticklabels": False},
    )
    tasks = words.counted(params["task"].nunique(), "task")
    said = words.by_variant(
        (variant, words.span(rows, _VALUE, lambda row: f"{number(row[_VALUE])} (layer {row['layer']})"))
        for variant, rows in layers.groupby("variant", sort=False)
    )
    return Drawn(
        figure,
        alt=f"Cosine of task vectors to the experts', mean over {tasks}, lowest to highest layer: {said}.",
        data=pd.concat([layers, groups], ignore_index=True).astype({"layer": "Int64"}),
        notes=(f"Means over {tasks}, right also over blocks. Whiskers: lowest to highest of them.",),
    )


def _trace(run: DriftRun, rows: pd.DataFrame, variant: str, by: str, *, dark: bool) -> go.Scatter:
    style = theme.look(run.variants, variant, dark=dark)
    is_layer = by == "layer"
    ends = marks.whiskers(rows[_VALUE], rows["lowest"], rows["highest"], style.colour, thickness=1, width=2)
    where = "layer %{x}" if is_layer else "%{x}"
    return go.Scatter(
        x=rows[by].tolist() if is_layer else [words.literal(str(group)) for group in rows[by]],
        y=rows[_VALUE].tolist(),
        error_y=ends,
        mode="markers",
        marker={"color": style.colour, "symbol": style.symbol, "size": 7},
        **marks.named(variant, words.shown(variant), legend=is_layer),
        offsetgroup=variant,
        text=[
            f"{number(low)} to {number(high)} over {count}"
            for low, high, count in zip(rows["lowest"], rows["highest"], rows["cosines"], strict=True)
        ],
        hovertemplate=f"{where}<br>mean cosine %{{y:{theme.NUMBER}}}<br>%{{text}}",
    )
