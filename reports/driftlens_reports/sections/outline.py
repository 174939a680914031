"""What a report consists of: its sections in order, the charts of each, and the presets that choose among them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from driftlens.errors import SpecError
from driftlens_reports.charts.chart import Chart, charts

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

_HOMES = {
    "layers": "layers",
    "causes": "decomposition",
    "features": "cosine",
    "parameters": "parameters",
    "outputs": "outputs",
}
"""Where a chart goes by the section it declares."""

_ELSEWHERE = {
    **dict.fromkeys(("contributions-heatmap", "contributions", "splits", "adjoint"), "origins"),
    **dict.fromkeys(("calibration-log", "sweeps"), "calibration"),
}
"""Charts that a report has elsewhere than the app."""

_STANDARD = (
    *("layer-drift", "heatmap", "decomposition", "amplification", "contributions-heatmap", "task-cosine"),
    *("backbone-alignment", "accuracy", "margins", "gains", "calibration-log"),
)
_CALIBRATION = (
    *("layer-drift", "heatmap", "base-distance", "task-cosine", "backbone-alignment"),
    *("accuracy", "gains", "flips", "margins", "confidence", "calibration-log", "sweeps"),
)
PER_SAMPLE = frozenset({"scatter", "sample-cosine", "bound"})
"""Charts with a mark for every sample: only in a report that asks for raw data."""


@dataclass(frozen=True)
class Preset:
    """A choice of sections and charts; `charts` None is every chart there is."""

    sections: Sequence[str]
    charts: Sequence[str] | None


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "summary": Preset(("verdict", "layers", "checks", "caveats"), ("layer-drift",)),
        "standard": Preset(tuple(TITLES), _STANDARD),
        "calibration": Preset(
            (
                *("verdict", "setup", "layers", "cosine", "parameters", "outputs"),
                *("calibration", "checks", "caveats", "environment"),
            ),
            _CALIBRATION,
        ),
        "full": Preset(tuple(TITLES), None),
    }
)


@dataclass(frozen=True)
class Outline:
    """What one report consists of."""

    preset: str
    sections: tuple[str, ...]
    raw: bool

    def charts_of(self, section: str) -> list[Chart]:
        """The charts of a section: those named in the preset in its order, then the others by name."""
        named = PRESETS[self.preset].charts
        order = {name: at for at, name in enumerate(_STANDARD + _CALIBRATION)}
        found = [
            chart
            for name, chart in charts.items()
            if section_of(chart) == section
            and (named is None or name in named or name in PER_SAMPLE)
            and (self.raw or name not in PER_SAMPLE)
        ]
        return sorted(found, key=lambda chart: order.get(chart.name, len(order)))


def outline(preset: str = "standard", sections: Sequence[str] | None = None, *, raw: bool = False) -> Outline:
    """The outline of a preset, or of the sections named, with the preset's charts.

    Raises:
        SpecError: there is no such preset or section.
    """
    _check("preset", preset, PRESETS)
    if sections is not None and not sections:
        raise SpecError("no section is chosen", hint=f"There are {', '.join(TITLES)}.")
    for name in sections or ():
        _check("section", name, TITLES)
    chosen = PRESETS[preset].sections if sections is None else sections
    return Outline(preset, tuple(name for name in TITLES if name in chosen), raw)


def section_of(chart: Chart) -> str:
    """The section of a report in which a chart stands."""
    return _ELSEWHERE.get(chart.name, _HOMES[chart.section])


def _check(kind: str, name: str, known: Mapping[str, object]) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else ""
        raise SpecError(f"a report has no {kind} {name!r}; there are {', '.join(known)}", hint=hint)
