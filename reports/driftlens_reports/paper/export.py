"""Exhibits into a folder: each in the formats asked for, with its siblings, the same bytes every time."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from dataclasses import dataclass

from driftlens.errors import SpecError
from driftlens.files import PathLike
from driftlens.records.run import DriftRun
from driftlens_reports.paper.artifact import DRAWN, SIBLINGS, draw
from driftlens_reports.paper.exhibit import ExhibitOptions, Kind, Panel, exhibits
from driftlens_reports.paper.style import WIDTHS

FORMATS = tuple(name for names in (*DRAWN.values(), SIBLINGS) for name in names)
"""Every format that can be asked for; the siblings are always written."""


@dataclass(frozen=True)
class Exported:
    """One exhibit that was written.

    Attributes:
        name: its id.
        files: what was written.
        missing: parts that the runs can't fill; they are framed notes.
    """

    name: str
    files: tuple[pathlib.Path, ...]
    missing: tuple[Panel, ...]


def export(
    runs: Sequence[DriftRun],
    out: PathLike,
    *,
    names: Sequence[str] | None = None,
    formats: Sequence[str] = FORMATS,
    options: ExhibitOptions | None = None,
) -> tuple[Exported, ...]:
    """Write exhibits as `<id>.<format>`; a file that is there is replaced.

    Args:
        runs: the saved runs.
        out: folder for the files; made where there is none.
        names: ids of exhibits; None is all.
        formats: some of `FORMATS`; a format that a kind of exhibit doesn't have is left out for it.
        options: the writer's choice.

    Raises:
        SpecError: no such exhibit or format, or the formats leave nothing of an exhibit that was asked for.
        DataError: the runs lack a task or variant that was asked for.
        RunError: a table can't be read, or a file can't be written.
    """
    chosen = list(dict.fromkeys(exhibits if names is None else names))
    _check(chosen if names is not None else [], formats)
    return tuple(
        _export(name, runs, pathlib.Path(out), formats, options or ExhibitOptions()) for name in chosen
    )


def width_of(style: str) -> float:
    """The width of a venue's text or column, in inches.

    Raises:
        SpecError: there is no such style.
    """
    if style not in WIDTHS:
        raise SpecError(f"no style called {style!r}", hint=f"There are {', '.join(WIDTHS)}.")
    return WIDTHS[style]


def check_kind(name: str, kind: Kind) -> str:
    """The name, if the exhibit is of this kind.

    Raises:
        SpecError: there is no such exhibit, or it is of the other kind.
    """
    if exhibits[name].kind != kind:
        raise SpecError(
            f"{name!r} is no {kind} but a {exhibits[name].kind}",
            hint=f"Ask for it with --{exhibits[name].kind} {name}.",
        )
    return name


def _check(named: Sequence[str], formats: Sequence[str]) -> None:
    for file_format in formats:
        if file_format not in FORMATS:
            raise SpecError(f"no format called {file_format!r}", hint=f"There are {', '.join(FORMATS)}.")
    for name in named:
        possible = (*DRAWN[exhibits[name].kind], *SIBLINGS)
        if not set(formats) & set(possible):
            raise SpecError(
                f"the {exhibits[name].kind} {name} can't be saved as {' or '.join(formats)}",
                hint=f"It can be saved as {', '.join(possible)}.",
            )


def _export(
    name: str, runs: Sequence[DriftRun], out: pathlib.Path, formats: Sequence[str], options: ExhibitOptions
) -> Exported:
    drawn = draw(name, runs, options)
    wanted = [entry for entry in drawn.formats if entry in formats or entry in SIBLINGS]
    files = tuple(drawn.save(out / f"{name}.{entry}") for entry in wanted)
    return Exported(name, files, drawn.exhibited.missing)
