"""The content of a report, put together from a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import driftlens
from driftlens.errors import DataError
from driftlens.records.checks import CheckReport, run_self_checks
from driftlens.records.listing import current_state
from driftlens.records.run import DriftRun
from driftlens_reports import facts
from driftlens_reports.charts.chart import Chart, ChartOptions, Drawn
from driftlens_reports.charts.words import overlap_notes
from driftlens_reports.content import Figure, ReportContent, RunInfo, Section, Table
from driftlens_reports.sections.calibration import calibration_sentences, calibration_tables
from driftlens_reports.sections.caveats import caveat_sentences
from driftlens_reports.sections.checks import checks_section
from driftlens_reports.sections.environment import environment_section
from driftlens_reports.sections.findings import (
    accuracy_table,
    cosine_sentences,
    decision_sentences,
    origin_sentences,
)
from driftlens_reports.sections.glossary import glossary_section
from driftlens_reports.sections.outline import TITLES, Outline
from driftlens_reports.sections.setup import setup_section
from driftlens_reports.sections.tabulate import frame_table
from driftlens_reports.sections.verdict import verdict_of, verdict_section

_SENTENCES: Mapping[str, Callable[[DriftRun], Sequence[str]]] = {
    "origins": origin_sentences,
    "cosine": lambda run: list(cosine_sentences(run)),
    "outputs": decision_sentences,
    "calibration": calibration_sentences,
}
_TABLES: Mapping[str, Callable[[DriftRun], Sequence[Table]]] = {
    "outputs": lambda run: [accuracy_table(run)],
    "calibration": calibration_tables,
}


@dataclass(frozen=True)
class Composed:
    """A report's content, and the drawn charts behind its figures for formats that show them.

    Attributes:
        content: all words and numbers.
        drawn: by name of the figure; those that are missing are not there.
    """

    content: ReportContent
    drawn: Mapping[str, Drawn]


def compose(run: DriftRun, outline: Outline, checks: CheckReport | None = None) -> Composed:
    """The content of a report on `run`.

    Args:
        run: the run.
        outline: which sections and charts.
        checks: results of the user's checks, shown beside the self-checks.

    Raises:
        RunError: a table can't be read.
    """
    figures: dict[str, list[Figure]] = {}
    drawn: dict[str, Drawn] = {}
    for section in outline.sections:
        made = [_figure(run, chart) for chart in outline.charts_of(section)]
        figures[section] = [figure for figure, _ in made]
        drawn |= {figure.name: picture for figure, picture in made if picture is not None}
    everything = [figure for found in figures.values() for figure in found]
    verdict = verdict_of(run)
    special: Mapping[str, Callable[[], Section]] = {
        "verdict": lambda: verdict_section(run, verdict),
        "setup": lambda: setup_section(run),
        "checks": lambda: checks_section(run_self_checks(run), checks),
        "caveats": lambda: Section(
            name="caveats", title=TITLES["caveats"], sentences=tuple(caveat_sentences(run, everything))
        ),
        "glossary": glossary_section,
        "environment": lambda: environment_section(run),
    }
    sections = [
        special[name]() if name in special else _section(run, name, figures[name])
        for name in outline.sections
    ]
    content = ReportContent(
        driftlens=driftlens.__version__,
        preset=outline.preset,
        raw=outline.raw,
        run=_run_info(run),
        stamps=(*facts.stamps(run), *overlap_notes(run)),
        verdict=verdict,
        sections=tuple(sections),
    )
    return Composed(content, drawn)


def _section(run: DriftRun, name: str, figures: Sequence[Figure]) -> Section:
    sentences = _SENTENCES[name](run) if name in _SENTENCES else []
    tables = [entry for entry in (_TABLES[name](run) if name in _TABLES else []) if entry.rows]
    return Section(
        name=name,
        title=TITLES[name],
        sentences=tuple(sentences),
        tables=tuple(tables),
        figures=tuple(figures),
    )


def _figure(run: DriftRun, chart: Chart) -> tuple[Figure, Drawn | None]:
    drawn, lacking = _drawn(run, chart)
    figure = Figure(
        name=chart.name,
        title=chart.title,
        caption=chart.caption,
        hint=chart.hint,
        alt=drawn.alt if drawn else "",
        notes=drawn.notes if drawn else (),
        missing=lacking,
        data=frame_table(f"figure-{chart.name}", chart.title, drawn.data) if drawn else None,
    )
    return figure, drawn


def _drawn(run: DriftRun, chart: Chart) -> tuple[Drawn | None, str]:
    """The drawn chart, or why it can't be drawn; a run may also lack the variant that a chart compares with."""
    options = ChartOptions()
    try:
        lacking = chart.missing(run, options)
        # Not `draw`, which would ask the same question again.
        return (chart.render(run, options), "") if lacking is None else (None, lacking)
    except DataError as error:
        return None, f"{error.message}."


def _run_info(run: DriftRun) -> RunInfo:
    manifest = run.manifest
    return RunInfo(
        id=run.id,
        name=run.name,
        state=current_state(run),
        created=manifest.created,
        synthetic=manifest.synthetic,
        spec_digest=manifest.spec_digest,
        schema_version=manifest.schema_version,
        tasks=run.tasks,
        variants=run.variants,
    )
