"""The content of a report, put together from a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import driftlens
from driftlens.errors import DataError
from driftlens.records.checks import CheckReport, run_self_checks
from driftlens.records.listing import current_state
from driftlens.records.run import DriftRun
from driftlens_reports import facts
from driftlens_reports.charts.chart import Chart, ChartOptions, Drawn
from driftlens_reports.charts.words import overlap_notes
from driftlens_reports.content import Figure, ReportContent, RunInfo, Table, frame_table
from driftlens_reports.sections.findings import (
    accuracy_table,
    calibration_sentences,
    calibration_tables,
    caveat_sentences,
    cosine_sentences,
    decision_sentences,
    origin_sentences,
)
from driftlens_reports.sections.outline import Outline, section
from driftlens_reports.sections.setup import (
    environment_tables,
    glossary_table,
    setup_sentences,
    setup_tables,
)
from driftlens_reports.sections.verdict import checks_parts, verdict_of, verdict_tables


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
    for name in outline.sections:
        made = [_figure(run, chart) for chart in outline.charts_of(name)]
        figures[name] = [figure for figure, _ in made]
        drawn |= {figure.name: picture for figure, picture in made if picture is not None}
    everything = [figure for found in figures.values() for figure in found]
    verdict = verdict_of(run)
    # What a section says besides its charts; the others have charts alone.
    said: Mapping[str, Callable[[], tuple[Iterable[str], Iterable[Table]]]] = {
        "verdict": lambda: (verdict.sentences, verdict_tables(run, verdict)),
        "setup": lambda: (setup_sentences(run), setup_tables(run)),
        "origins": lambda: (origin_sentences(run), ()),
        "cosine": lambda: (cosine_sentences(run), ()),
        "outputs": lambda: (decision_sentences(run), [accuracy_table(run)]),
        "calibration": lambda: (calibration_sentences(run), calibration_tables(run)),
        "checks": lambda: checks_parts(run_self_checks(run), checks),
        "caveats": lambda: (caveat_sentences(run, everything), ()),
        "glossary": lambda: ((), [glossary_table()]),
        "environment": lambda: ((), environment_tables(run)),
    }
    sections = [
        section(name, *(said[name]() if name in said else ((), ())), figures[name])
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
