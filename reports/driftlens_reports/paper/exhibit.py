"""What an exhibit is: saved runs in, a figure or a table out, with the plotted numbers and a caption draft."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import pandas as pd

from driftlens.base.errors import DataError, did_you_mean
from driftlens.base.registry import Registry
from driftlens.base.variants import calibrated, part_of
from driftlens.base.variants import title as plain_title
from driftlens.findings.measures import RELATIVE, SCORE, change
from driftlens.findings.reading import printable
from driftlens.runs.run import DriftRun
from driftlens.spec.requests import ExhibitRequest
from driftlens.suites.reproduce import filling
from driftlens_reports.charts.picking import worst_task
from driftlens_reports.charts.words import between, named, overlap_notes
from driftlens_reports.facts import stamps
from driftlens_reports.paper.grid import Column, Grid, shows_gains, tidy, to_latex
from driftlens_reports.paper.published import published_tables, source, spec_section
from driftlens_reports.paper.style import sheet, venue_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Kind = Literal["figure", "table"]

ROUNDED = "Printed numbers are rounded; gains and changes are taken from unrounded values."
"""The last sentence of figures that print numbers."""

_BOLD = "Bold: told apart from the next best of its run by a 95 % interval, base and experts left out."
_GAINS = "Grey: points gained over the block's merged model, of measured rows from unrounded values"
_GAINS_PRINTED = ", of the paper's rows from its printed ones"


class ExhibitOptions(ExhibitRequest):
    """What a writer may choose, and what that means for a run; `width` is in inches."""

    width: float = 5.5

    @property
    def is_narrow(self) -> bool:
        """Whether figures fill a column, where panels stand below one another."""
        return venue_of(self.width) == "icml-column"

    def tasks_of(self, run: DriftRun) -> tuple[str, ...]:
        """The tasks to show, in the order of the run; refuses, as all choices here, what the run lacks."""
        for task in self.tasks or ():
            _check("task", task, run.tasks)
        return tuple(task for task in run.tasks if self.tasks is None or task in self.tasks)

    def task_of(self, run: DriftRun) -> str:
        """The task of an exhibit about one: the one asked for, or that with the merged model's largest final drift."""
        if self.task is not None:
            return _check("task", self.task, run.tasks)
        tasks = self.tasks_of(run)
        if not tasks:
            raise DataError(f"run {run.id} has no task to show")
        return worst_task(run, tasks, "merged")

    def typical_task_of(self, run: DriftRun) -> str:
        """The task asked for, or that with the median change by the calibration shown; as `task_of` without any."""
        tasks, shown = self.tasks_of(run), self.calibrated_of(run)
        if self.task is not None or not shown or "merged" not in run.variants:
            return self.task_of(run)
        for about in (SCORE, RELATIVE):
            rows = {task: change(run, about, task, ("merged", shown[-1])) for task in tasks}
            ranked = sorted((row.value, task) for task, row in rows.items() if row.is_measured)
            if ranked and (about is RELATIVE or len({rows[task].about for _, task in ranked}) == 1):
                return ranked[len(ranked) // 2][1]
        return self.task_of(run)

    def calibrated_of(self, run: DriftRun) -> tuple[str, ...]:
        """The variants called "calibrated": those asked for, or the run's last one; empty where there is none."""
        if self.calibrated is None:
            return tuple(name for name in run.variants if part_of(name) == "calibrated")[-1:]
        asked = self.calibrated.split(",") if isinstance(self.calibrated, str) else self.calibrated
        whole = (calibrated(name) if calibrated(name) in run.variants else name for name in asked)
        return tuple(_check("variant", name, run.variants) for name in dict.fromkeys(whole))

    def wants(self, run: DriftRun, variant: str) -> bool:
        """Whether tables show this calibrated variant: all of them, unless some were asked for."""
        return self.calibrated is None or variant in self.calibrated_of(run)

    def names_of(self, runs: Sequence[DriftRun]) -> Mapping[str, str]:
        """What tasks and variants are called: as asked for, else as the runs' specs say."""
        known = {name for run in runs for name in (*run.tasks, *run.variants, "expert")}
        known |= {plain_title(name) for run in runs for name in run.variants}
        for name in self.names:
            if name not in known:
                unknown = (
                    f"no run has a task or variant {name!r} to name; there are {', '.join(sorted(known))}"
                )
                raise DataError(unknown, hint=did_you_mean(name, sorted(known)))
        names = {str(k): str(v) for run in runs for k, v in spec_section(run, "names").items()}
        names |= self.names
        for run in runs:
            if len({names.get(task, task) for task in run.tasks}) < len(run.tasks):
                raise DataError(
                    f"two tasks of run {run.name} are called the same", hint="Give each its own name."
                )
        return names

    def baseline_of(self, run: DriftRun) -> str:
        """The variant that gains are counted from: the one asked for, or `merged`."""
        asked = "merged" if self.baseline is None else self.baseline
        whole = calibrated(asked) if calibrated(asked) in run.variants else asked
        return _check("variant", whole, run.variants)

    def compared(self, run: DriftRun) -> tuple[str, ...]:
        """The variants of a comparison: those asked for, or in reading order merged, baseline, calibrated."""
        if self.variants is not None:
            return tuple(_check("variant", variant, run.variants) for variant in self.variants)
        wanted = dict.fromkeys(("merged", self.baseline_of(run), *self.calibrated_of(run)))
        return tuple(variant for variant in wanted if variant in run.variants)


def _check(kind: str, name: str, known: tuple[str, ...]) -> str:
    if name not in known:
        raise DataError(f"the run has no {kind} {name!r}; it has {', '.join(known) or 'none'}")
    return name


@dataclass(frozen=True)
class Gap:
    """A part of an exhibit that the runs can't fill: what is missing, and the commands that add it."""

    name: str
    missing: str

    @classmethod
    def of(cls, exhibit: str, name: str, missing: str) -> Gap:
        """The gap, with the protocol that fills this exhibit from a suite."""
        command = filling(exhibit)
        return cls(name, f"{missing.rstrip('.')}; `{command}` fills it" if command else missing)


@dataclass(frozen=True)
class Exhibited:
    """A drawn exhibit; `data`: every number it shows, unrounded; `missing`: what the runs can't fill."""

    data: pd.DataFrame
    caption: str
    figure: Figure | None = None
    latex: str | None = None
    missing: tuple[Gap, ...] = ()


Draw = Callable[[Sequence[DriftRun], ExhibitOptions], Exhibited]


@dataclass(frozen=True)
class Exhibit:
    """One figure or table; `paper`: where the paper has its like, for example "Figure 1"; empty for ours.

    `has_latex`: of a figure, whether it is there as LaTeX, too.
    """

    name: str
    kind: Kind
    title: str
    paper: str
    draw: Draw
    has_latex: bool = False


exhibits: Registry[Exhibit] = Registry("exhibit", "driftlens_reports.paper")


def figure(name: str, *, title: str, paper: str = "", latex: bool = False) -> Callable[[Draw], Draw]:
    """Decorator that files a drawing function as the figure `name`; it runs in the sheet of the width asked for."""

    def file(draw: Draw) -> Draw:
        @functools.wraps(draw)
        def drawn(runs: Sequence[DriftRun], options: ExhibitOptions) -> Exhibited:
            if not runs:
                raise DataError(f"{name} needs a run, got none", hint="Give the folder of a run.")
            with sheet(venue_of(options.width)), named(options.names_of(runs)):
                return draw(runs, options)

        exhibits.register(name)(Exhibit(name, "figure", title, paper, drawn, latex))
        return drawn

    return file


def origin(runs: Sequence[DriftRun]) -> Iterator[str]:
    """Which runs the numbers come from, and what a reader must know about each before any number."""
    if runs:
        names = ", ".join(f"{run.name} ({run.id})" for run in runs)
        yield f"{'Run' if len(runs) == 1 else 'Runs'}: {names}."
    yield from warnings(runs)


def warnings(runs: Sequence[DriftRun]) -> Iterator[str]:
    """What a reader must know about each run before any number."""
    for run in runs:
        yield from stamps(run)
        yield from overlap_notes(run)


def samples(rows: pd.DataFrame) -> str:
    """How many samples are behind the rows: "n = 24 samples of the diagnosis split per task."."""
    counts = rows["n"].dropna().astype(int)
    if counts.empty:
        return ""
    per_task = " per task" if rows["task"].nunique() > 1 else ""
    return f"n = {between(counts)} samples of the diagnosis split{per_task}."


def together(sentences: Iterable[str], gaps: Iterable[Gap] = ()) -> list[str]:
    """The sentences that say something, once each, and what is missing, without control characters of names in them."""
    lacking = [f"Not shown: {gap.name} ({gap.missing})." for gap in gaps]
    return [printable(sentence) for sentence in dict.fromkeys([*sentences, *lacking]) if sentence]


@dataclass(frozen=True)
class Table:
    """What a table shows: grids, of which those without a line are left out, and below them `notes` and `runs`."""

    grids: Sequence[Grid]
    caption: str
    runs: Sequence[DriftRun] = ()
    notes: Sequence[str] = ()
    missing: Sequence[Gap] = ()


Rows = Callable[..., Table]
"""From runs and options to what a table shows; a table that the paper has too is given the paper's as well."""


def table(name: str, *, title: str, label: str = "") -> Callable[[Rows], Rows]:
    """Decorator that files a function as a table; the like of the paper's `label` gets that as a third argument."""
    printed = published_tables()[label] if label else None
    number = printed.number if printed else ""

    def file(rows: Rows) -> Rows:
        def draw(runs: Sequence[DriftRun], options: ExhibitOptions) -> Exhibited:
            with named(options.names_of(runs)):
                if printed is None:
                    return _exhibited(name, rows(runs, options))
                shown = printed if options.paper else dataclasses.replace(printed, rows=())
                note = f"Paper: {number} of {source()}, as printed there." if options.paper else ""
                return _exhibited(name, rows(runs, options, shown), note)

        exhibits.register(name)(Exhibit(name, "table", title, number, draw))
        return rows

    return file


def needed(there: Sequence[object], how: str, what: str = "Measured rows") -> tuple[Gap, ...]:
    """Rows that the runs lack, and how to get them; nothing where something is there."""
    return () if there else (Gap(what, how),)


def plain_columns(*titles: str) -> tuple[Column, ...]:
    """Columns without better or worse, of words or numbers with up to three significant digits."""
    return tuple(Column(title, None) for title in titles)


def _exhibited(name: str, shown: Table, paper_note: str = "") -> Exhibited:
    grids = [grid for grid in shown.grids if grid.lines]
    # What a table can't do without comes first: those that are longer than the table keep only that below it.
    below = together([*warnings(shown.runs), *_legend(grids), paper_note, *shown.notes, *origin(shown.runs)])
    missing = tuple(Gap.of(name, gap.name, gap.missing) for gap in shown.missing)
    return Exhibited(
        tidy(grids),
        " ".join(together([shown.caption, *below], missing)),
        latex=to_latex(grids, name, shown.caption, notes=below, missing=missing),
        missing=missing,
    )


def _legend(grids: Sequence[Grid]) -> Iterator[str]:
    """What bold, shade, grey and daggers mean, where there are any."""
    lines = [line for grid in grids for line in grid.lines]
    columns = [(grid, column) for grid in grids for column in grid.columns]
    if any(cell.is_best for line in lines for cell in line.cells.values()):
        yield _BOLD
    if any(line.role == "own" for line in lines):
        yield "Shaded: calibrated."
    if any(shows_gains(grid, column) for grid, column in columns):
        has_printed = any(line.source == "paper" for line in lines)
        yield f"{_GAINS}{_GAINS_PRINTED if has_printed else ''}."
    notes = [note for line in lines for note in (line.note, *(cell.note for cell in line.cells.values()))]
    if any(notes):
        yield f"† {' '.join(dict.fromkeys(filter(None, notes)))}"
