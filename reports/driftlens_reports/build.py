"""Drift reports: one content, built once from a saved run, written in as many formats as one likes.

    dl.Report(run, preset="standard").save("out/", formats=["html", "json", "md"])

| format | files |
|---|---|
| html | report.html: interactive charts, one file that asks the network for nothing |
| html-light | report-light.html: drawings, no script, below 1 MB |
| json | report.json, by the schema in report.schema.json |
| md | report.md for a pull-request comment, figures/*.png |
| csv | csv/*.csv, a file per table, and their units |
| latex | latex/*.tex, fragments to input |
"""

from __future__ import annotations

import difflib
import functools
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

from driftlens.errors import SpecError
from driftlens.files import PathLike, atomic_path
from driftlens.records.checks import CheckReport, check
from driftlens.records.contents import attach
from driftlens.records.run import DriftRun, open_run
from driftlens_reports.content import ReportContent
from driftlens_reports.sections.compose import Composed, compose
from driftlens_reports.sections.outline import outline

Checks: TypeAlias = CheckReport | PathLike | Mapping[str, Any]


class Report:
    """A report on a run; nothing is read before it is asked for.

    Args:
        run: a run, or its folder.
        preset: which sections and charts: summary, standard, calibration or full.
        sections: only these sections, with the preset's charts; None is all of the preset.
        raw: whether to include charts and tables of single samples.
        checks: results of checks, a YAML file of them, or the mapping in it, shown beside the self-checks.

    Raises:
        SpecError: there is no such preset or section, or the checks make no sense.
        RunError: the run can't be read.
    """

    def __init__(
        self,
        run: DriftRun | PathLike,
        preset: str = "standard",
        *,
        sections: Sequence[str] | None = None,
        raw: bool = False,
        checks: Checks | None = None,
    ) -> None:
        self.run = run if isinstance(run, DriftRun) else open_run(run)
        self._outline = outline(preset, sections, raw=raw)
        self._checks = (
            checks if checks is None or isinstance(checks, CheckReport) else check(self.run, checks)
        )

    @property
    def content(self) -> ReportContent:
        """Everything the report says, as a pydantic model.

        Raises:
            RunError: a table can't be read.
        """
        return self._composed.content

    @functools.cached_property
    def _composed(self) -> Composed:
        return compose(self.run, self._outline, self._checks)

    def files(self, formats: Iterable[str] = ("html", "json", "md")) -> dict[str, bytes]:
        """The report's files by path relative to its folder, the same bytes at every call.

        Raises:
            SpecError: there is no such format.
            RunError: a table can't be read.
        """
        writers = [_FORMATS[_known(name)] for name in formats]
        if not writers:
            raise SpecError("no format is chosen", hint=f"There are {', '.join(_FORMATS)}.")
        return {name: data for write in writers for name, data in write(self.run, self._composed).items()}

    def save(self, folder: PathLike, formats: Iterable[str] = ("html", "json", "md")) -> list[pathlib.Path]:
        """Write the report into `folder`, every file whole or not at all, and return their paths.

        Raises:
            SpecError: there is no such format.
            RunError: a table can't be read, or a file can't be written.
        """
        paths = []
        for name, data in self.files(formats).items():
            path = pathlib.Path(folder) / name
            with atomic_path(path, need=len(data)) as written:
                written.write_bytes(data)
            paths.append(path)
        return paths

    def attach(self, formats: Iterable[str] = ("html", "json", "md")) -> list[pathlib.Path]:
        """Write the report into the run's own folder `reports`, where the run lists it among its files.

        Raises:
            SpecError: there is no such format.
            RunError: a table can't be read, or a file can't be written.
            RunLockedError: another process is writing to the run.
        """
        paths = []
        for name, data in self.files(formats).items():
            with attach(self.run.path, f"reports/{name}") as written:
                written.write_bytes(data)
            paths.append(self.run.path / "reports" / name)
        return paths


def formats() -> tuple[str, ...]:
    """The names of all formats."""
    return tuple(_FORMATS)


def _known(name: str) -> str:
    if name not in _FORMATS:
        near = difflib.get_close_matches(name, _FORMATS, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else ""
        raise SpecError(f"a report has no format {name!r}; there are {', '.join(_FORMATS)}", hint=hint)
    return name


def _html(run: DriftRun, made: Composed) -> dict[str, bytes]:
    from driftlens_reports.formats.page import interactive_page

    return {"report.html": interactive_page(made.content, made.drawn)}


def _html_light(run: DriftRun, made: Composed) -> dict[str, bytes]:
    from driftlens_reports.formats.page import light_page

    return {"report-light.html": light_page(made.content, made.drawn)}


def _json(run: DriftRun, made: Composed) -> dict[str, bytes]:
    from driftlens_reports.formats.tables import json_document

    return {"report.json": json_document(made.content)}


def _md(run: DriftRun, made: Composed) -> dict[str, bytes]:
    from driftlens_reports.formats.inline import picture
    from driftlens_reports.formats.pull_request import MAIN, markdown

    paths = {name: f"figures/{name}.png" for name in made.drawn if name == MAIN}
    pictures = {path: picture(made.drawn[name].figure) for name, path in paths.items()}
    return {"report.md": markdown(made.content, paths), **pictures}


def _csv(run: DriftRun, made: Composed) -> dict[str, bytes]:
    from driftlens_reports.formats.tables import spreadsheets

    return {f"csv/{name}": data for name, data in spreadsheets(run, made.content).items()}


def _latex(run: DriftRun, made: Composed) -> dict[str, bytes]:
    from driftlens_reports.formats.fragments import fragments

    return {f"latex/{name}": data for name, data in fragments(made.content).items()}


_FORMATS: Mapping[str, Callable[[DriftRun, Composed], dict[str, bytes]]] = MappingProxyType(
    {"html": _html, "html-light": _html_light, "json": _json, "md": _md, "csv": _csv, "latex": _latex}
)
