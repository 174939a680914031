"""The page that both HTML formats share: its template, its style sheet, and the policy that closes it off."""

from __future__ import annotations

import base64
import functools
import hashlib
import pathlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from driftlens_reports.charts.theme import Palette, palette
from driftlens_reports.content import ReportContent, Table, written
from driftlens_reports.sections.verdict import signed

if TYPE_CHECKING:
    import jinja2

_LONG = 24
"""Letters beyond which a column's texts may break anywhere."""


@dataclass(frozen=True)
class Extras:
    """What one HTML format adds to the page.

    Attributes:
        dark: whether the page follows a reader's wish for dark colours.
        drawn: SVG by name of the figure, harmless already.
        shown_data: figures whose numbers stand below them.
        plots: JSON by name of the figure, escaped for a script element.
        scripts: JavaScript, in the order in which it runs.
        policy: the part of the security policy about scripts and what they need; empty without scripts.
    """

    dark: bool
    drawn: Mapping[str, str]
    shown_data: frozenset[str]
    plots: Mapping[str, str] = field(default_factory=dict)
    scripts: Sequence[str] = ()
    policy: str = ""


def render(content: ReportContent, extras: Extras) -> bytes:
    """The page; everything that came with the run is escaped."""
    from markupsafe import Markup

    environment = _environment()
    style = environment.get_template("report.css.jinja").render(
        light=_theme(dark=False), dark=_theme(dark=True) if extras.dark else None, twins=_twins()
    )
    policy = extras.policy or f"style-src '{digest(style)}'"
    text = environment.get_template("report.html.jinja").render(
        content=content,
        # Ours, not the run's: the style sheet and scripts stand as they are.
        style=Markup(style),
        scripts=[Markup(source) for source in extras.scripts],
        plots={name: Markup(source) for name, source in extras.plots.items()},
        policy=f"default-src 'none'; {policy}; base-uri 'none'; form-action 'none'",
        drawn={name: Markup(drawing) for name, drawing in extras.drawn.items()},
        shown_data=extras.shown_data,
    )
    return text.encode()


def digest(source: str) -> str:
    """The hash by which a policy allows one inline style sheet or script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()


def template_text(name: str) -> str:
    """The text of a packaged file of this folder."""
    return pathlib.Path(__file__).with_name(name).read_text(encoding="utf-8")


@functools.cache
def _environment() -> jinja2.Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(template_text),
        autoescape=lambda name: not (name or "").endswith(".css.jinja"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(zip=zip)
    environment.filters.update(
        anchor=anchor,
        looks=_looks,
        signed=signed,
        written=written,
    )
    return environment


def anchor(name: str) -> str:
    """A name as an id of an element."""
    return re.sub(r"[^A-Za-z0-9]+", "-", name)


def _looks(table: Table) -> list[str]:
    """Style classes of each column; empty for numbers."""
    longest = [max(map(len, column), default=0) for column in zip(*table.texts(), strict=True)]
    return [
        ("text long" if letters > _LONG else "text") if column.kind == "text" else ""
        for column, letters in zip(table.columns, longest or [0] * len(table.columns), strict=True)
    ]


def _theme(*, dark: bool) -> dict[str, Any]:
    """What the style sheet needs of one theme."""
    return {
        "palette": palette(dark),
        "soft": "#1E1E1E" if dark else "#F7F7F5",
        "stamp": "#3D3212" if dark else "#FFF3D6",
        "bad": "#FF9A8A" if dark else "#B3261E",
    }


def _twins() -> dict[str, str]:
    """The dark colour of every colour that drawings have in light, as these write it."""

    def colours(theme: Palette) -> list[str]:
        shades = [shade for role in theme.roles.values() for shade in role]
        return [theme.ink, theme.quiet, theme.grid, theme.gap, *shades]

    return {
        light.lower(): dark
        for light, dark in zip(colours(palette(False)), colours(palette(True)), strict=True)
    }
