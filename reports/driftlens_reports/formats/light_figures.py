"""Which figures a report without a script draws, and how; the others keep their words and their numbers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from driftlens_reports.charts.theme import look
from driftlens_reports.content import Figure, ReportContent
from driftlens_reports.formats.dot_drawing import Dots, draw_dots
from driftlens_reports.formats.drawing import Drawing, Series
from driftlens_reports.formats.heat_drawing import Heat, draw_heat
from driftlens_reports.formats.line_drawing import Lines, draw_lines
from driftlens_reports.formats.rows import Rows, rows_of
from driftlens_reports.wording import percent

Plan = Lines | Heat | Dots

_LENGTH, _SHARE = "feature units", "fraction"

_PLANS: Mapping[str, tuple[Plan, ...]] = MappingProxyType(
    {
        "layer-drift": (Lines("mean drift", _LENGTH, low="10 % quantile", high="90 % quantile"),),
        "heatmap": (Heat("mean drift", _LENGTH),),
        "base-distance": (Lines("drift / base distance", reference=1.0),),
        "cka": (Heat("cka"),),
        "decomposition": (
            Lines("mismatch", _LENGTH),
            Lines("propagation", _LENGTH),
            Lines("cross term", reference=0.0),
        ),
        "amplification": (
            Lines("amplification", low="lower", high="upper", reference=1.0, open_marks="random gain"),
        ),
        "growth": (Lines("share that grows", "fraction of samples"),),
        "spectral": (Lines("spectral norm", reference=1.0),),
        "contributions-heatmap": (
            Heat("share of final drift", "", is_signed=True, rest="remainder", write=percent),
        ),
        "splits": (
            Lines("carried share", _SHARE, reference=0.0),
            Lines("swapped share", _SHARE, reference=0.0),
        ),
        "task-cosine": (Dots("mean cosine", "-1 to 1", low="low", high="high"),),
        "backbone-alignment": (Dots("cosine of task vectors", "-1 to 1"),),
        "alignment": (
            Lines("mean cosine of task vectors", "-1 to 1", panel="", low="lowest", high="highest"),
        ),
        "accuracy": (Dots("accuracy", "fraction", "low", "high"),),
        "margins": (Dots("flipped", "fraction of decisions"),),
        "gains": (
            Dots("cosine gain", "difference", "cosine gain low", "cosine gain high", reference=0.0),
            Dots(
                "accuracy gain (points)",
                "",
                "accuracy gain (points) low",
                "accuracy gain (points) high",
                reference=0.0,
            ),
        ),
    }
)


def styles_of(content: ReportContent) -> dict[str, Series]:
    """How each variant of the run, and the expert, is drawn; the style sheet has the classes."""
    names = [*content.run.variants, *(["expert"] if "expert" not in content.run.variants else [])]
    return {
        name: Series(f"v{at}", look(content.run.variants, name, dark=False).symbol)
        for at, name in enumerate(names)
    }


def drawings(figure: Figure, styles: Mapping[str, Series]) -> list[Drawing]:
    """The drawings of a figure; none where it is missing, or a table says it better."""
    if figure.data is None:
        return []
    rows = rows_of(figure.data)
    known = {column.name for column in figure.data.columns}
    made: list[Drawing] = []
    for plan in _PLANS.get(figure.name, ()):
        if plan.value not in known or not set(rows.distinct("variant")) <= set(styles):
            continue
        made.append(_drawn(rows, plan, styles))
    return made


def _drawn(rows: Rows, plan: Plan, styles: Mapping[str, Series]) -> Drawing:
    if isinstance(plan, Heat):
        return draw_heat(rows, plan)
    return draw_lines(rows, plan, styles) if isinstance(plan, Lines) else draw_dots(rows, plan, styles)
