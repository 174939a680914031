"""The registry of paper figures and tables of saved runs. Entry points: `draw_exhibit`, `export_exhibits`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import pathlib
import re
import shlex
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd

from driftlens.config.requests import ExhibitRequest
from driftlens.results.formatting import strip_control_chars
from driftlens.results.measures import RELATIVE, SCORE, change_on_task
from driftlens.results.verdict import caveat_sentences, shown_repair
from driftlens.runs.manifest import SPEC, package_versions
from driftlens.runs.run import DriftRun
from driftlens.runs.tables import csv_text
from driftlens.utils.errors import DataError, SpecError
from driftlens.utils.files import PathLike, atomic_path
from driftlens.utils.registry import Registry
from driftlens.utils.variants import calibrated_variant, display_name as plain_title
from driftlens_reports.charts.picking import ChartOptions, chosen_tasks, require_known_name, worst_task
from driftlens_reports.charts.words import count_range, split_overlap_notes, use_display_names

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Kind = Literal["figure", "table"]

# Width of each venue's text or column, in inches.
WIDTHS = MappingProxyType({"neurips": 5.5, "icml-column": 3.25, "slide": 10.0})
# The style of pictures that are read on a screen.
PAGE = "page"
# Formats of figures; of figures and tables; of the numbers, provenance and caption draft next to each; all.
PICTURES = ("pdf", "svg", "png")
_DRAWN: Mapping[Kind, tuple[str, ...]] = MappingProxyType({"figure": PICTURES, "table": ("tex",)})
_SIBLINGS = ("csv", "json", "txt")
FORMATS = (*PICTURES, "tex", *_SIBLINGS)

_UNDATED: dict[str, dict[str, None]] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": {}}
# matplotlib's settings are global; a server may draw in several threads.
_SETTINGS = threading.RLock()

# Letters of a caption in an inch of a line, in the usual 9 points.
_LETTERS = 17.5
# The last sentence of the caption of figures that print numbers.
ROUNDED = "Printed numbers are rounded; gains and changes use unrounded values."


@contextlib.contextmanager
def use_venue_style(venue: str) -> Iterator[None]:
    """Apply the matplotlib style of a venue, or of HTML pages, within the context."""
    import matplotlib.style

    folder = pathlib.Path(__file__).parent
    files = [folder / f"{name}.mplstyle" for name in ("common", venue)]
    with _SETTINGS, matplotlib.style.context(files, after_reset=True), warnings.catch_warnings():
        # Names of tasks may have letters that the font lacks.
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        yield


class ExhibitOptions(ExhibitRequest):
    """Options of a paper figure or table, with methods that resolve them for a run."""

    @classmethod
    def from_request(cls, request: ExhibitRequest) -> ExhibitOptions:
        """Create the options from a request, ignoring its other fields."""
        return cls(**{name: getattr(request, name) for name in cls.model_fields})

    @property
    def width(self) -> float:
        """The width of a paper figure in its venue style, in inches."""
        return WIDTHS[self.style]

    @property
    def is_single_column(self) -> bool:
        """True if the figure fits one column of the paper, so that panels are stacked."""
        return self.style == "icml-column"

    def tasks_of(self, run: DriftRun) -> tuple[str, ...]:
        """Return the tasks to show, in the order of the run. Raise DataError if the run lacks one."""
        return tuple(chosen_tasks(run, ChartOptions(tasks=self.tasks)))

    def task_of(self, run: DriftRun) -> str:
        """Return the task of a one-task figure; by default the one with the merged model's largest final drift."""
        if self.task is not None:
            return require_known_name("task", self.task, run.tasks)
        tasks = self.tasks_of(run)
        if not tasks:
            raise DataError(f"run {run.id} has no task to show")
        return worst_task(run, tasks, "merged")

    def median_task_of(self, run: DriftRun) -> str:
        """Return the requested task, else the one with the median change by the calibration."""
        tasks, shown = self.tasks_of(run), self.calibrated_of(run)
        if self.task is not None or not shown or "merged" not in run.variants:
            return self.task_of(run)
        for about in (SCORE, RELATIVE):
            rows = {task: change_on_task(run, about, task, ("merged", shown[-1])) for task in tasks}
            ranked = sorted((row.value, task) for task, row in rows.items() if row.is_measured)
            if ranked and (about is RELATIVE or len({rows[task].about for _, task in ranked}) == 1):
                # The median task: the best or the worst one would mislead.
                return ranked[len(ranked) // 2][1]
        return self.task_of(run)

    def calibrated_of(self, run: DriftRun) -> tuple[str, ...]:
        """Return the calibrated variants to show: the requested ones, or the one that the run shows."""
        if self.calibrated is None:
            return tuple(filter(None, [shown_repair(run)]))
        names = self.calibrated.split(",") if isinstance(self.calibrated, str) else self.calibrated
        # Names are accepted with and without `calibrated:`.
        whole = (calibrated_variant(name) if calibrated_variant(name) in run.variants else name for name in names)
        return tuple(require_known_name("variant", name, run.variants) for name in dict.fromkeys(whole))

    def shows_calibrated(self, run: DriftRun, variant: str) -> bool:
        """Return True if tables show this calibrated variant: by default all, else the requested ones."""
        return self.calibrated is None or variant in self.calibrated_of(run)

    def compared_variants(self, run: DriftRun) -> tuple[str, ...]:
        """Return the variants to compare: merged and the calibrated ones to show."""
        merged = ("merged",) if "merged" in run.variants else ()
        return tuple(dict.fromkeys((*merged, *self.calibrated_of(run))))

    def display_names_of(self, runs: Sequence[DriftRun]) -> Mapping[str, str]:
        """Return display names of tasks and variants: requested names override those in the specs."""
        valid = {name for run in runs for name in (*run.tasks, *run.variants, "expert")}
        valid |= {plain_title(name) for run in runs for name in run.variants}
        for name in self.names:
            require_known_name("task or variant", name, tuple(sorted(valid)))
        in_specs = {str(k): str(v) for run in runs for k, v in spec_section(run, "names").items()}
        names = readable_names(sorted(valid)) | in_specs | self.names
        for run in runs:
            # Columns of tables are found by their heads.
            if len({names.get(task, task) for task in run.tasks}) < len(run.tasks):
                raise DataError(f"two tasks of run {run.name} have one name", hint="Give each its own.")
        return names


_KNOWN_NAMES = {
    **{"featcal": "FeatCal", "prob_surgery": "ProbSurgery", "sun397": "SUN397", "resisc45": "RESISC45"},
    **{"eurosat": "EuroSAT", "svhn": "SVHN", "gtsrb": "GTSRB", "mnist": "MNIST", "dtd": "DTD", "cola": "CoLA"},
    **{"mnli": "MNLI", "mrpc": "MRPC", "qnli": "QNLI", "qqp": "QQP", "rte": "RTE", "sst2": "SST-2", "stsb": "STS-B"},
    **{"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "emnist": "EMNIST", "kmnist": "KMNIST", "stl10": "STL-10"},
}
_MODELS = frozenset(("base", "merged", "expert", "experts"))


def readable_names(names: Sequence[str]) -> dict[str, str]:
    """Return names of tasks and calibrations as papers write them: "mnist" as MNIST, "house_numbers" as House numbers.

    Names with capitals or signs stay, and so do names that would become the same.
    """
    shown = {
        name: _KNOWN_NAMES.get(name, name.replace("_", " ").capitalize() if name.islower() else name)
        for name in names
        if name not in _MODELS and re.fullmatch(r"[\w -]+", name)
    }
    written = [*shown.values()]
    return {name: title for name, title in shown.items() if written.count(title) == 1}


def spec_section(run: DriftRun, name: str) -> Mapping[str, Any]:
    """Return a section of the run's resolved spec as a mapping; empty if it is absent."""
    import yaml

    path = run.path / SPEC
    spec = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else None
    return (spec or {}).get(name) or {}


@dataclass(frozen=True)
class MissingPart:
    """A panel or number that the runs have no data for, and the command that adds it."""

    name: str
    missing: str


@dataclass(frozen=True)
class ExhibitResult:
    """A finished paper figure or table: caption, notes, LaTeX, missing parts, and every number in `data`."""

    data: pd.DataFrame
    caption: str
    notes: tuple[str, ...] = ()
    figure: Figure | None = None
    latex: str | None = None
    missing: tuple[MissingPart, ...] = ()

    @property
    def text(self) -> str:
        """The caption followed by all notes."""
        return " ".join([self.caption, *self.notes])


Draw = Callable[[Sequence[DriftRun], ExhibitOptions], ExhibitResult]


@dataclass(frozen=True)
class _ExhibitEntry:
    name: str
    kind: Kind
    title: str
    draw: Draw


exhibits: Registry[_ExhibitEntry] = Registry("exhibit", "driftlens_reports.paper")


def _register_exhibit(kind: Kind, name: str, *, title: str) -> Callable[[Draw], Draw]:
    def register(draw: Draw) -> Draw:
        exhibits.register(name)(_ExhibitEntry(name, kind, title, draw))
        return draw

    return register


figure = functools.partial(_register_exhibit, "figure")
table = functools.partial(_register_exhibit, "table")


def provenance_sentences(runs: Sequence[DriftRun]) -> Iterator[str]:
    """Yield caption sentences that name the runs, synthetic data and overlapping splits."""
    if runs:
        names = ", ".join(f"{run.name} ({run.id})" for run in runs)
        yield f"{'Run' if len(runs) == 1 else 'Runs'}: {names}."
    for run in runs:
        yield from caveat_sentences(run)
        yield from split_overlap_notes(run)


def sample_count_sentence(rows: pd.DataFrame) -> str:
    """Return a caption sentence on the sample count: "n = 24 samples of the diagnosis split per task."."""
    counts = rows["n"].dropna().astype(int)
    if counts.empty:
        return ""
    per_task = " per task" if rows["task"].nunique() > 1 else ""
    return f"n = {count_range(counts)} samples of the diagnosis split{per_task}."


def split_caption(
    options: ExhibitOptions, sentences: Iterable[str], runs: Sequence[DriftRun], gaps: Iterable[MissingPart] = ()
) -> tuple[str, tuple[str, ...]]:
    """Return a caption of at most two lines and, as notes, the other sentences, provenance and missing parts.

    Args:
        options: the user's options, whose style has the width of a line.
        sentences: the caption's sentences, the most important one first.
        runs: the runs that the exhibit shows.
        gaps: what the runs lack.
    """
    first, *others = (strip_control_chars(sentence) for sentence in dict.fromkeys(sentences) if sentence)
    caption, most = [first], 2 * int(options.width * _LETTERS)
    while others and len(" ".join([*caption, others[0]])) <= most:
        caption.append(others.pop(0))
    lacking = [f"Not shown: {gap.name} ({gap.missing})." for gap in gaps]
    notes = [*others, *map(strip_control_chars, [*provenance_sentences(runs), *lacking])]
    return " ".join(caption), tuple(dict.fromkeys(notes))


_RECORDED = ("created", "spec_digest", "schema_version", "synthetic")
_VERSIONS = ("driftlens", "python", "matplotlib", "numpy", "pandas", "scikit-learn", "umap-learn")


@dataclass(frozen=True, kw_only=True, repr=False)
class Artifact(ExhibitResult):
    """A paper figure or table with its runs and options; `caption` is a draft, `data` has every number shown."""

    exhibit: _ExhibitEntry
    runs: tuple[DriftRun, ...]
    options: ExhibitOptions

    def __repr__(self) -> str:
        return f"<Artifact {self.exhibit.name} of {', '.join(run.id for run in self.runs)}, {len(self.data)} rows>"

    def _repr_png_(self) -> bytes | None:
        return self.content("png") if self.exhibit.kind == "figure" else None

    def _repr_html_(self) -> str | None:
        return self.data.to_html(index=False) if self.exhibit.kind == "table" else None

    def save(self, path: PathLike) -> pathlib.Path:
        """Write the figure or table to `path` in the format of its suffix."""
        target = pathlib.Path(path)
        content = self.content(target.suffix.removeprefix("."))
        with atomic_path(target, need=len(content)) as written:
            written.write_bytes(content)
        return target

    def to_latex(self, path: PathLike | None = None) -> str:
        r"""Return the table as a LaTeX fragment; also write it to `path`, which ends in .tex, if given."""
        if path is not None:
            self.save(path)
        return self.content("tex").decode()

    def content(self, file_format: str) -> bytes:
        """Return the bytes of the figure or table in a file format, such as "pdf" or "csv"."""
        _available_formats(self.exhibit, [file_format])
        if self.figure is not None and file_format in PICTURES:
            written = io.BytesIO()
            with use_venue_style(self.options.style):
                self.figure.savefig(written, format=file_format, metadata=_UNDATED[file_format])
            return written.getvalue()
        if file_format == "csv":
            return csv_text(self.data).encode()
        if file_format == "json":
            return (json.dumps(self.provenance(), indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()
        return (f"{self.caption}\n" if file_format == "txt" else self.latex or "").encode()

    def provenance(self) -> dict[str, Any]:
        """Return runs, settings, versions, the command that draws it again, and missing parts."""
        return {
            "exhibit": self.exhibit.name,
            "kind": self.exhibit.kind,
            "title": self.exhibit.title,
            "command": _export_command(self.exhibit, self.runs, self.options),
            "options": self.options.model_dump(),
            "caption": self.caption,
            "notes": list(self.notes),
            "runs": [
                {
                    **{"id": run.id, "name": run.name},
                    **{key: getattr(run.manifest, key) for key in _RECORDED},
                    "versions": {
                        name: run.manifest.versions[name]
                        for name in (*_VERSIONS, "torch")
                        if name in run.manifest.versions
                    },
                }
                for run in self.runs
            ],
            "versions": {name: number for name, number in package_versions().items() if name in _VERSIONS},
            "missing": [dataclasses.asdict(gap) for gap in self.missing],
        }


def draw_exhibit(name: str, runs: Sequence[DriftRun], options: ExhibitOptions) -> Artifact:
    """Draw a paper figure or table by name.

    Args:
        name: its name in `exhibits`.
        runs: at least one run.
        options: the user's options.
    """
    if not runs:
        raise DataError(f"{name} was given no run", hint="Pass at least one.")
    chosen = exhibits[name]
    look = use_venue_style(options.style) if chosen.kind == "figure" else contextlib.nullcontext()
    with look, use_display_names(options.display_names_of(runs)):
        drawn = dict(vars(chosen.draw(runs, options)))
    return Artifact(**drawn, exhibit=chosen, runs=tuple(runs), options=options)


@dataclass(frozen=True)
class ExportedExhibit:
    """An exported figure or table: name, written files (none without data), and missing parts."""

    name: str
    files: tuple[pathlib.Path, ...]
    missing: tuple[MissingPart, ...]


def export_exhibits(
    runs: Sequence[DriftRun],
    out: PathLike,
    *,
    names: Sequence[str] | None = None,
    formats: Sequence[str] = FORMATS,
    options: ExhibitOptions | None = None,
) -> tuple[ExportedExhibit, ...]:
    """Write paper figures and tables as `<id>.<format>`.

    Args:
        runs: at least one run.
        out: the folder.
        names: exhibits to write; None is all with a measured number.
        formats: formats to write, as far as an exhibit has them.
        options: the user's options.

    Returns:
        An entry per exhibit; `missing` names the commands that fill its gaps.
    """
    for name in formats:
        if name not in FORMATS:
            raise SpecError(f"no format called {name!r}", hint=f"There are {', '.join(FORMATS)}.")
    chosen = {name: exhibits[name] for name in (exhibits if names is None else names)}
    for exhibit in chosen.values() if names is not None else ():
        _available_formats(exhibit, formats)
    written = []
    for name, exhibit in chosen.items():
        drawn = draw_exhibit(name, runs, options or ExhibitOptions())
        # An exhibit chosen by name is written even if it only says what is missing.
        is_written = names is not None or not drawn.data.empty
        suffixes = _available_formats(exhibit, [*formats, *_SIBLINGS]) if is_written else ()
        files = tuple(drawn.save(pathlib.Path(out) / f"{name}.{suffix}") for suffix in suffixes)
        written.append(ExportedExhibit(name, files, drawn.missing))
    return tuple(written)


def _available_formats(exhibit: _ExhibitEntry, formats: Sequence[str]) -> tuple[str, ...]:
    """Return the requested formats that the figure or table supports. Raise SpecError if there are none."""
    possible = (*_DRAWN[exhibit.kind], *_SIBLINGS)
    chosen = tuple(name for name in possible if name in formats)
    if not chosen:
        raise SpecError(
            f"the {exhibit.kind} {exhibit.name} can't be saved as {' or '.join(map(repr, formats))}",
            hint=f"It can be saved as {', '.join(possible)}.",
        )
    return chosen


def _export_command(exhibit: _ExhibitEntry, runs: Sequence[DriftRun], options: ExhibitOptions) -> str:
    # Names only, as a published command must not show private paths.
    folders = [run.path.resolve().name for run in runs]
    flags = [f"--{exhibit.kind}", exhibit.name, "--style", options.style]
    for name in ("calibrated", "task", "tasks", "method"):
        value = getattr(options, name)
        if value != getattr(ExhibitOptions(), name):
            flags += [f"--{name}", value if isinstance(value, str) else ",".join(value)]
    if options.names:
        flags += ["--names", ",".join(f"{name}={shown}" for name, shown in options.names.items())]
    return shlex.join(["driftlens", "export", *folders, *flags])
