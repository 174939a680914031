"""Exhibits as files: the figure or the LaTeX, and beside it the numbers, their provenance, a caption draft."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from driftlens.runs.manifest import versions
from driftlens.runs.run import DriftRun
from driftlens.runs.tables import csv_text
from driftlens.utils.errors import DataError, SpecError
from driftlens.utils.files import PathLike, atomic_path
from driftlens_reports.paper.exhibit import (
    PICTURES,
    Exhibit,
    Exhibited,
    ExhibitOptions,
    Gap,
    Kind,
    encode,
    exhibits,
)

DRAWN: MappingProxyType[Kind, tuple[str, ...]] = MappingProxyType({"figure": PICTURES, "table": ("tex",)})
"""What a figure or a table itself can be saved as."""

_SIBLINGS = ("csv", "json", "txt")
"""What stands beside each of them: its numbers, where they come from, a caption draft; they are always written."""

FORMATS = tuple(name for names in (*DRAWN.values(), _SIBLINGS) for name in names)
"""Every format that can be asked for."""

_VERSIONS = ("driftlens", "python", "matplotlib", "numpy", "pandas", "scikit-learn", "umap-learn")


@dataclass(frozen=True, kw_only=True, repr=False)
class Artifact(Exhibited):
    """A drawn exhibit that knows what it was drawn from; `caption` is a draft, `data` every number it shows."""

    exhibit: Exhibit
    runs: tuple[DriftRun, ...]
    options: ExhibitOptions

    def __repr__(self) -> str:
        return f"<Artifact {self.exhibit.name} of {', '.join(run.id for run in self.runs)}, {len(self.data)} rows>"

    def _repr_png_(self) -> bytes | None:
        """The figure, for notebooks."""
        return self.content("png") if self.exhibit.kind == "figure" else None

    def _repr_html_(self) -> str | None:
        """The numbers of a table, for notebooks."""
        return self.data.to_html(index=False) if self.exhibit.kind == "table" else None

    def save(self, path: PathLike) -> pathlib.Path:
        """Write it to `path`, whole or not at all, in the format of its suffix; refuses one that it can't have."""
        target = pathlib.Path(path)
        content = self.content(target.suffix.removeprefix("."))
        with atomic_path(target, need=len(content)) as written:
            written.write_bytes(content)
        return target

    def to_latex(self, path: PathLike | None = None) -> str:
        r"""Return the table as a fragment to \input; save it to `path`, which ends in .tex, where one is given."""
        if path is not None:
            self.save(path)
        return self.content("tex").decode()

    def content(self, file_format: str) -> bytes:
        """The bytes of the file in a format, the same at every call in one environment."""
        _possible(self.exhibit, [file_format])
        if self.figure is not None and file_format in DRAWN["figure"]:
            return encode(self.figure, file_format, self.options.style)
        if file_format == "csv":
            return csv_text(self.data).encode()
        if file_format == "json":
            provenance = json.dumps(self.provenance(), indent=2, ensure_ascii=False, allow_nan=False)
            return f"{provenance}\n".encode()
        return (f"{self.caption}\n" if file_format == "txt" else self.latex or "").encode()

    def provenance(self) -> dict[str, Any]:
        """Where the numbers come from: runs, settings, versions, the command that draws it again, what is missing."""
        return {
            "exhibit": self.exhibit.name,
            "kind": self.exhibit.kind,
            "title": self.exhibit.title,
            "command": command(self.exhibit, self.runs, self.options),
            "options": self.options.model_dump(),
            "runs": [_run(run) for run in self.runs],
            "versions": {name: number for name, number in versions().items() if name in _VERSIONS},
            "missing": [dataclasses.asdict(gap) for gap in self.missing],
        }


def draw(name: str, runs: Sequence[DriftRun], options: ExhibitOptions) -> Artifact:
    """The exhibit called `name`, drawn from the runs."""
    if not runs:
        raise DataError(f"{name} was given no run", hint="Pass at least one.")
    chosen = exhibits[name]
    drawn = vars(chosen.draw(runs, options))
    return Artifact(**drawn, exhibit=chosen, runs=tuple(runs), options=options)


@dataclass(frozen=True)
class Exported:
    """One exhibit: its id, its files, none where nothing of it is measured, and the parts that the runs can't fill."""

    name: str
    files: tuple[pathlib.Path, ...]
    missing: tuple[Gap, ...]


def export(
    runs: Sequence[DriftRun],
    out: PathLike,
    *,
    names: Sequence[str] | None = None,
    formats: Sequence[str] = FORMATS,
    options: ExhibitOptions | None = None,
) -> tuple[Exported, ...]:
    """Write exhibits, by default all with a measured number, as `<id>.<format>`, in the formats that each can have.

    Those without one have no files, and `missing` says which command fills them.
    """
    for name in formats:
        if name not in FORMATS:
            raise SpecError(f"no format called {name!r}", hint=f"There are {', '.join(FORMATS)}.")
    chosen = {name: exhibits[name] for name in (exhibits if names is None else names)}
    for exhibit in chosen.values() if names is not None else ():
        _possible(exhibit, formats)
    written = []
    for name, exhibit in chosen.items():
        drawn = draw(name, runs, options or ExhibitOptions())
        if names is None and drawn.data.empty:
            written.append(Exported(name, (), drawn.missing))
            continue
        wanted = _possible(exhibit, [*formats, *_SIBLINGS])
        files = tuple(drawn.save(pathlib.Path(out) / f"{name}.{entry}") for entry in wanted)
        written.append(Exported(name, files, drawn.missing))
    return tuple(written)


def _possible(exhibit: Exhibit, formats: Sequence[str]) -> tuple[str, ...]:
    """Those of the formats that the exhibit can be saved as; refused where it is none of them."""
    possible = (*DRAWN[exhibit.kind], *_SIBLINGS)
    chosen = tuple(name for name in possible if name in formats)
    if not chosen:
        raise SpecError(
            f"the {exhibit.kind} {exhibit.name} can't be saved as {' or '.join(map(repr, formats))}",
            hint=f"It can be saved as {', '.join(possible)}.",
        )
    return chosen


def command(exhibit: Exhibit, runs: Sequence[DriftRun], options: ExhibitOptions) -> str:
    """The command line that draws the exhibit again, with the runs by the names of their folders."""
    folders = [run.path.resolve().name for run in runs]
    flags = [f"--{exhibit.kind}", exhibit.name, "--style", options.style]
    for name in ("calibrated", "task", "tasks", "method"):
        value = getattr(options, name)
        if value != getattr(ExhibitOptions(), name):
            flags += [f"--{name}", value if isinstance(value, str) else ",".join(value)]
    if options.names:
        flags += ["--names", ",".join(f"{name}={shown}" for name, shown in options.names.items())]
    return shlex.join(["driftlens", "export", *folders, *flags])


def _run(run: DriftRun) -> dict[str, Any]:
    recorded = {
        key: getattr(run.manifest, key) for key in ("created", "spec_digest", "schema_version", "synthetic")
    }
    used = {name: number for name, number in run.manifest.versions.items() if name in (*_VERSIONS, "torch")}
    return {"id": run.id, "name": run.name, **recorded, "versions": used}
