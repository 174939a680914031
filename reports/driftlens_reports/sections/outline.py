"""What a report consists of: its sections in order, the charts of each, and the presets that choose among them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from driftlens.base.errors import SpecError
from driftlens_reports.charts.chart import Chart, by_rank, charts

TITLES = MappingProxyType(
    {
        "verdict": "Verdict",
        "setup": "Setup and provenance",
        "layers": "Layer curves",
        "decomposition": "Decomposition",
        "origins": "Where the final drift comes from",
        "cosine": "Expert cosine",
        "parameters": "Parameter alignment",
        "outputs": "Output drift",
        "calibration": "Calibration log",
        "checks": "Check results",
        "caveats": "Caveats",
        "glossary": "Glossary",
        "environment": "Environment",
    }
)
"""Every section in reading order."""

PRESETS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "summary": ("verdict", "layers", "checks", "caveats"),
        "standard": tuple(TITLES),
        "calibration": (
            *("verdict", "setup", "layers", "cosine", "parameters", "outputs"),
            *("calibration", "checks", "caveats", "environment"),
        ),
        "full": tuple(TITLES),
    }
)
"""The sections of each preset. Charts say themselves which presets they belong to; `full` has them all."""


@dataclass(frozen=True)
class Outline:
    """What one report consists of."""

    preset: str
    sections: tuple[str, ...]
    raw: bool

    def charts_of(self, section: str) -> list[Chart]:
        """The charts that stand in a section of this report, by rank."""
        return by_rank(
            chart
            for chart in charts.values()
            if chart.place.report == section
            and (self.raw or not chart.per_sample)
            and (self.preset in ("full", *chart.presets) or chart.per_sample)
        )


def outline(preset: str = "standard", sections: Sequence[str] | None = None, *, raw: bool = False) -> Outline:
    """The outline of a preset, or of the sections named, with the preset's charts; SpecError names an unknown one."""
    check_known("preset", preset, PRESETS)
    if sections is not None and not sections:
        raise SpecError("no section is chosen", hint=f"There are {', '.join(TITLES)}.")
    for name in sections or ():
        check_known("section", name, TITLES)
    chosen = PRESETS[preset] if sections is None else sections
    return Outline(preset, tuple(name for name in TITLES if name in chosen), raw)


def check_known(kind: str, name: str, known: Mapping[str, object]) -> None:
    """Raises SpecError with the nearest one where a report has no such section, preset or format."""
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else ""
        raise SpecError(f"a report has no {kind} {name!r}; there are {', '.join(known)}", hint=hint)
