"""Drift reports of saved runs as HTML, JSON, Markdown, CSV and LaTeX. Entry point: `Report`."""

from __future__ import annotations

import functools
import html
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import driftlens
from driftlens.results.checks import CheckReport, check
from driftlens.results.verdict import caveat_sentences
from driftlens.runs.run import DriftRun, current_state, open_run
from driftlens.utils.files import PathLike
from driftlens_reports.charts.chart import Chart, ChartOptions, Drawn, charts
from driftlens_reports.charts.words import split_overlap_notes
from driftlens_reports.content import Figure, ReportContent, RunInfo, Section, table_from_frame
from driftlens_reports.formats import save_files
from driftlens_reports.formats.page import interactive_page, light_page, static_figures
from driftlens_reports.formats.text_formats import csv_files, latex_tables_by_file, report_json, report_markdown
from driftlens_reports.sections import (
    PRESETS,
    TITLES,
    report_verdict,
    require_known_names,
    section_charts,
    section_content,
)

Checks: TypeAlias = CheckReport | PathLike | Mapping[str, Any]


class Report:
    """A report on a saved run in HTML, JSON, Markdown, CSV or LaTeX. Tables are read on demand.

    Args:
        run: a run, or its folder.
        preset: which sections and charts: summary, standard, calibration, or full, which has single samples too.
        sections: only these sections, with the preset's charts; None is all of the preset.
        checks: results of checks, a YAML file of them, or the mapping in it; shown next to the self-checks.

    Raises:
        SpecError: the preset or a section is unknown, or the checks are invalid.
        RunError: the run can't be read.
    """

    def __init__(
        self,
        run: DriftRun | PathLike,
        preset: str = "standard",
        *,
        sections: Sequence[str] | None = None,
        checks: Checks | None = None,
    ) -> None:
        self.run = run if isinstance(run, DriftRun) else open_run(run)
        require_known_names("preset", [preset], PRESETS)
        chosen = PRESETS[preset] if sections is None else sections
        require_known_names("section", chosen, TITLES)
        # In reading order, whatever the order of the request.
        self._preset, self._sections = preset, [name for name in TITLES if name in chosen]
        self._checks = checks if checks is None or isinstance(checks, CheckReport) else check(self.run, checks)

    @property
    def content(self) -> ReportContent:
        """The sections, tables, figures and verdict of the report, as a pydantic model."""
        return self._content_and_charts[0]

    @functools.cached_property
    def _content_and_charts(self) -> tuple[ReportContent, Mapping[str, Drawn]]:
        """The report content, and the drawn charts by name, without charts whose data is missing."""
        run, names = self.run, self._sections
        figures: dict[str, list[Figure]] = {}
        drawn: dict[str, Drawn] = {}
        for name in names:
            pairs = [_draw_report_figure(run, chart) for chart in section_charts(name, self._preset)]
            figures[name] = [figure for figure, _ in pairs]
            drawn |= {figure.name: picture for figure, picture in pairs if picture is not None}
        # Caveats list the missing figures of all sections, so all charts are drawn first.
        everything = [figure for group in figures.values() for figure in group]
        judged = report_verdict(run)
        sections = []
        for name in names:
            sentences, tables = section_content(name, run, judged, self._checks, everything)
            section = Section(
                name=name,
                title=TITLES[name],
                sentences=tuple(sentences),
                tables=tuple(table for table in tables if table.rows),
                figures=tuple(figures[name]),
            )
            sections.append(section)
        recorded = ("created", "synthetic", "spec_digest", "schema_version")
        content = ReportContent(
            driftlens=driftlens.__version__,
            preset=self._preset,
            run=RunInfo(
                id=run.id,
                name=run.name,
                state=current_state(run),
                tasks=run.tasks,
                variants=run.variants,
                **{name: getattr(run.manifest, name) for name in recorded},
            ),
            stamps=(*caveat_sentences(run), *split_overlap_notes(run)),
            verdict=judged,
            sections=tuple(sections),
        )
        return content, drawn

    def _repr_html_(self) -> str:
        """Return the static HTML page in an iframe, for notebooks."""
        # The light page: a notebook file stores every output.
        page = html.escape(self.files(["html-light"])["report-light.html"].decode())
        return f'<iframe srcdoc="{page}" title="Drift report" width="100%" height="640"></iframe>'

    def files(self, formats: Iterable[str] = ("html", "json", "md")) -> dict[str, bytes]:
        """Return the bytes of the report's files, keyed by path relative to the report folder."""
        chosen = [formats] if isinstance(formats, str) else list(formats)
        require_known_names("format", chosen, FORMATS)
        return {
            file: data for name in chosen for file, data in FORMATS[name](self.run, *self._content_and_charts).items()
        }

    def save(
        self, folder: PathLike | None = None, formats: Iterable[str] = ("html", "json", "md")
    ) -> list[pathlib.Path]:
        """Write the report into `folder`, or into the run's own `reports`, and return the paths.

        Raises:
            SpecError: there is no such format.
            RunError: a table can't be read, or a file can't be written.
            RunLockedError: the files go into the run, and another process is writing to it.
        """
        return save_files(self.run, self.files(formats), None if folder is None else pathlib.Path(folder))


def _draw_report_figure(run: DriftRun, chart: Chart) -> tuple[Figure, Drawn | None]:
    drawn, lacking = chart.try_draw(run, ChartOptions())
    figure = Figure(
        name=chart.name,
        title=chart.title,
        caption=chart.caption,
        hint=chart.hint,
        alt=drawn.alt if drawn else "",
        notes=drawn.notes if drawn else (),
        missing=lacking,
        data=table_from_frame(f"figure-{chart.name}", chart.title, drawn.data) if drawn else None,
    )
    return figure, drawn


def _interactive_report_html(run: DriftRun, content: ReportContent, drawn: Mapping[str, Drawn]) -> bytes:
    # `render`, not `draw`: drawing the light chart has checked that nothing is missing.
    dark = {name: charts[name].render(run, ChartOptions(dark=True)).figure for name in drawn}
    return interactive_page(content, drawn, dark)


# The files of each format, by path.
FORMATS: Mapping[str, Callable[[DriftRun, ReportContent, Mapping[str, Drawn]], dict[str, bytes]]] = {
    "html": lambda run, content, drawn: {"report.html": _interactive_report_html(run, content, drawn)},
    "html-light": lambda run, content, drawn: {"report-light.html": light_page(content, static_figures(run, drawn))},
    "json": lambda run, content, drawn: {"report.json": report_json(content)},
    "md": lambda run, content, drawn: {"report.md": report_markdown(content)},
    "csv": lambda run, content, drawn: csv_files(run, content),
    "latex": lambda run, content, drawn: latex_tables_by_file(content),
}
