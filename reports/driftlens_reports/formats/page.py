"""The HTML formats, from one template: interactive with plotly inlined, and light with pictures and no script."""

from __future__ import annotations

import base64
import functools
import hashlib
import itertools
import json
import math
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import plotly.graph_objects as go
from markupsafe import Markup, escape

from driftlens.results.formatting import (
    Table,
    format_estimate,
    format_value,
    is_measured,
    keep_units_together,
    map_code_spans,
    strip_control_chars,
    typeset_signs,
)
from driftlens.runs.run import DriftRun
from driftlens.utils.intervals import Interval
from driftlens.utils.variants import display_name, variant_kind
from driftlens_reports.charts.chart import Drawn
from driftlens_reports.charts.theme import colour_role, palette
from driftlens_reports.content import ReportContent, ReportHeadline
from driftlens_reports.paper.exhibit import ExhibitOptions, draw_exhibit

# Letters beyond which a column's texts may break anywhere.
_LONG = 24
# Rows of a figure's data table beyond which a browser gets slow; the JSON and CSV formats have them.
_MOST_ROWS = 2_000
_MOST_BYTES = 950_000
# Charts, and the paper figures that a page without scripts shows in their place.
_EXHIBITS = {
    "accuracy": "intro",
    "layer-drift": "drift",
    "decomposition": "decomposition",
    "contributions-heatmap": "contributions",
    "amplification": "amplification",
    "flips": "output-drift",
    "scatter": "scatter-grid",
}

# Rules for the block; the colours that they name are a page's own.
STYLE = pathlib.Path(__file__).with_name("headline.css").read_text("utf-8")


def interactive_page(
    content: ReportContent, drawn: Mapping[str, Drawn], dark: Mapping[str, go.Figure] | None = None
) -> bytes:
    """Return the report as one offline HTML file with interactive plotly charts.

    Args:
        content: the report.
        drawn: the charts, by name.
        dark: the figures of the dark theme, by name; only differences are stored.
    """
    from plotly.offline import get_plotlyjs

    scripts = (get_plotlyjs(), pathlib.Path(__file__).with_name("report.js").read_text(encoding="utf-8"))
    sources = [f"'{csp_hash(source)}'" for source in scripts]
    if any(trace.type.endswith("gl") for entry in drawn.values() for trace in entry.figure.data):
        # Plotly's WebGL traces compile their drawing commands; only a full report has any.
        sources.append("'unsafe-eval'")
    # Two scripts of ours, and what plotly needs: images that it makes of charts, and styles that it sets.
    policy = f"script-src {' '.join(sources)}; style-src 'unsafe-inline'; img-src data: blob:"
    plots = {name: json.loads(entry.figure.to_json()) for name, entry in drawn.items()}
    # Of the dark theme, only differences are stored.
    for name, figure in (dark or {}).items():
        plots[name]["dark"] = _nested_differences(plots[name], json.loads(figure.to_json()))
    shown = {name for name, table in content.figure_tables.items() if len(table.rows) <= _MOST_ROWS}
    return _render_html(content, shown, plots=plots, scripts=scripts, policy=policy)


def _nested_differences(light: Any, dark: Any) -> Any:
    """Return the settings of `dark` that differ from `light`, in the same nesting."""
    if isinstance(dark, list) and any(isinstance(entry, dict) for entry in dark):
        light, dark = dict(enumerate(light)), dict(enumerate(dark))
    if not isinstance(light, dict) or not isinstance(dark, dict):
        return dark
    return {key: _nested_differences(light.get(key), value) for key, value in dark.items() if value != light.get(key)}


def light_page(content: ReportContent, pictures: Mapping[str, _EmbeddedImage]) -> bytes:
    """Return the report as static HTML without scripts; the largest pictures are dropped above a size limit."""
    pictures = dict(pictures)
    page = _render_html(content, set(), pictures=pictures)
    while pictures and len(page) > _MOST_BYTES:
        del pictures[max(pictures, key=lambda name: len(pictures[name].source))]
        page = _render_html(content, set(), pictures=pictures)
    return page


@dataclass(frozen=True)
class _EmbeddedImage:
    """An image embedded in an HTML page as a data URL, with its caption."""

    source: str
    caption: str


def static_figures(run: DriftRun, names: Iterable[str]) -> dict[str, _EmbeddedImage]:
    """Return static paper figures in place of the named charts, where the run has their data."""
    pictures = {}
    for name in names:
        if name in _EXHIBITS:
            drawn = draw_exhibit(_EXHIBITS[name], [run], ExhibitOptions())
            if len(drawn.data):
                encoded = base64.b64encode(drawn.content("png")).decode()
                pictures[name] = _EmbeddedImage(f"data:image/png;base64,{encoded}", drawn.text)
    return pictures


def _render_html(
    content: ReportContent,
    shown_data: set[str],
    *,
    pictures: Mapping[str, _EmbeddedImage] | None = None,
    plots: Mapping[str, Any] | None = None,
    scripts: Sequence[str] = (),
    policy: str = "",
) -> bytes:
    """Render the report as HTML from a template; all text of the run is escaped."""
    environment = _jinja_environment()
    themes = {"light": palette(False), "dark": palette(True)}
    style = environment.get_template("report.css.jinja").render(**themes)
    policy = policy or f"style-src '{csp_hash(style)}'; img-src data:"
    text = environment.get_template("report.html.jinja").render(
        content=content,
        # Style sheet and scripts come from this package, so they need no escaping.
        style=Markup(style),
        scripts=[Markup(source) for source in scripts],
        plots=plots or {},
        policy=f"default-src 'none'; {policy}; base-uri 'none'; form-action 'none'",
        headline=headline_html(content.verdict.headline),
        pictures=pictures or {},
        shown_data=shown_data,
        opened=("layers", "cosine"),  # a click opens the other sections
    )
    return text.encode()


def csp_hash(source: str) -> str:
    """Return the hash by which a content security policy allows an inline style sheet or script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()


@functools.cache
def _jinja_environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent),
        # Escaped quotes would break style sheets, which hold no text of a run.
        autoescape=lambda name: not (name or "").endswith(".css.jinja"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Compact: plots are most of the page.
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    environment.globals.update(zip=zip)
    environment.filters.update(
        anchor=_html_anchor,
        looks=_column_css_classes,
        prose=_sentence_html,
        signs=typeset_signs,
        written=format_value,
    )
    return environment


def _sentence_html(text: str) -> Markup:
    """Escape a sentence for HTML, with text between backticks as code."""
    html = map_code_spans(
        typeset_signs(text),
        lambda part: keep_units_together(str(escape(part))),
        Markup("<code>{}</code>").format,
    )
    return Markup(html)


def _html_anchor(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", name)


def _column_css_classes(table: Table) -> list[str]:
    """Return the CSS classes of each column shown in an HTML table; empty for columns of numbers."""
    _, *texts = table.formatted_rows()
    is_long = [any(len(row[index]) > _LONG for row in texts) for index, _ in enumerate(table.display_columns())]
    looks = ["text long" if long else "text" for long in is_long]
    return [look if shown.kind == "text" else "" for look, shown in zip(looks, table.display_columns(), strict=True)]


def headline_html(head: ReportHeadline) -> Markup:
    """Return the headline as escaped HTML: sentence, score tiles and score bar."""
    so_far = Markup('<p class="so-far">{}</p>').format(head.so_far) if head.so_far else ""
    tiles = Markup("").join(_model_tile_html(head, variant) for variant in head.tiles)
    return Markup('<section class="headline {}"><p class="says">{}</p>{}<dl class="tiles">{}</dl>{}</section>').format(
        head.tone,
        keep_units_together(typeset_signs(strip_control_chars(head.text))),
        so_far,
        tiles,
        _score_bar_svg(head),
    )


def standalone_headline(head: ReportHeadline, *, dark: bool = False) -> str:
    """Return the headline as HTML with its own CSS and the score bar as an image, for Streamlit and notebooks."""
    theme = palette(dark)
    colours = {name: getattr(theme, name) for name in ("surface", "grid", "quiet", "gap")}
    colours |= {**theme.tones, **{f"role-{role}": colour for role, colour in theme.roles.items()}}
    variables = "".join(f"--{name}:{colour};" for name, colour in colours.items())
    html = str(headline_html(head))
    if drawing := str(_score_bar_svg(head)):
        svg = re.sub(r"var\(--([\w-]+)\)", lambda match: colours[match[1]], drawing)
        image = Markup('<img class="bar" alt="{}" src="data:image/svg+xml;base64,{}">')
        html = html.replace(drawing, image.format(_bar_label(head), base64.b64encode(svg.encode()).decode()))
    return f"<style>.headline{{{variables}}}{STYLE}</style>{html}"


def tile_label(variant: str) -> str:
    """Return the label of a model on its score tile."""
    return "experts" if variant == "expert" else display_name(variant)


def _model_tile_html(head: ReportHeadline, variant: str) -> Markup:
    mean, name = head.tiles[variant], strip_control_chars(tile_label(variant))
    ends = (math.nan if end is None else end for end in (mean.low, mean.high))
    text, _, interval = format_estimate(Interval(mean.value, *ends, mean.n), head.kind).partition(" (")
    return Markup(
        '<div class="tile"><dt title="{}"><span class="dot {}"></span>{}</dt><dd class="value">{}</dd>'
        '<dd class="ends">{}</dd></div>'
    ).format(
        name,
        colour_role(head.roles, variant),
        name,
        keep_units_together(text),
        keep_units_together(interval.removesuffix(")")) or head.measure,
    )


def score_axis_range(head: ReportHeadline) -> tuple[float, float]:
    """Return the ends of the score axis, which contains all intervals."""
    ends = [end for mean in head.tiles.values() for end in (mean.low, mean.high) if is_measured(end)]
    low, high = min(ends), max(ends)
    if head.kind == "share":
        # The epsilon absorbs rounding, by which an exact tenth would move to the next one.
        low, high = math.floor(10 * low + 1e-9) / 10, math.ceil(10 * high - 1e-9) / 10
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _score_bar_svg(head: ReportHeadline) -> Markup:
    """Draw the scores of all models on one axis as SVG: the repair in colour, the remaining gap in grey."""
    if len(head.tiles) < 2:
        return Markup("")
    low, high = score_axis_range(head)

    def place(value: float) -> float:
        return 2 + 96 * (value - low) / (high - low)

    def bar_segment(start: float, end: float, thickness: int, colour: str) -> Markup:
        left, right = sorted((place(start), place(end)))
        return Markup('<rect x="{:.2f}%" y="{}" width="{:.2f}%" height="{}" fill="var(--{})"/>').format(
            left, 16 - thickness / 2, right - left, thickness, colour
        )

    by_kind = {variant_kind(name): name for name in head.tiles}
    path = [by_kind[kind] for kind in ("merged", "calibrated", "expert") if kind in by_kind]
    marks = [bar_segment(low, high, 2, "grid")]
    for before, after in itertools.pairwise(path):
        colour = "gap" if after == "expert" else f"role-{colour_role(head.roles, after)}"
        marks.append(bar_segment(head.tiles[before].value, head.tiles[after].value, 10, colour))
    for name, mean in head.tiles.items():
        if is_measured(mean.low) and is_measured(mean.high):
            marks.append(bar_segment(mean.low, mean.high, 3, f"role-{colour_role(head.roles, name)}"))
        dot = '<circle cx="{:.2f}%" cy="16" r="7" fill="var(--role-{})" stroke="var(--surface)" stroke-width="2"/>'
        marks.append(Markup(dot).format(place(mean.value), colour_role(head.roles, name)))
    for x, anchor, value in ((2, "start", low), (98, "end", high)):
        text = Markup('<text x="{}%" y="42" text-anchor="{}" fill="var(--quiet)">{}</text>')
        marks.append(text.format(x, anchor, format_value(value, head.kind)))
    return Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" class="bar" role="img" aria-label="{}" width="100%" height="46"'
        ' font-size="12" font-family="sans-serif">{}</svg>'
    ).format(_bar_label(head), Markup("").join(marks))


def _bar_label(head: ReportHeadline) -> str:
    models = ", ".join(
        f"{tile_label(name)} {format_value(mean.value, head.kind)}" for name, mean in head.tiles.items()
    )
    return strip_control_chars(f"{head.measure} on one scale: {models}")
