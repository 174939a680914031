"""Tables of scores: accuracies by task, averages, and the experts by themselves."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from driftlens.records.run import DriftRun
from driftlens.variants import control_of, is_control, part_of, title
from driftlens_reports.paper.captions import span
from driftlens_reports.paper.exhibit import ExhibitOptions
from driftlens_reports.paper.grid import Block, Cell, Column, Grid, Line, Role, with_average
from driftlens_reports.paper.printed import (
    Family,
    backbone,
    canonical,
    family,
    merger,
    printed_blocks,
    printed_cell,
    titles_of,
)
from driftlens_reports.paper.published import AVERAGE, PublishedTable, published_tables
from driftlens_reports.paper.table import Table, needed, table

MOST_GAINS = 9
"""Columns up to which each cell shows its gain; wider tables show that of the average only."""

_EVALUATE = "`driftlens evaluate RUN` adds the accuracies of a run."
_FULL = {
    "accuracy-full-l14-8": "tab:clip-vit-l14-full",
    "accuracy-full-b32-14": "tab:clip-14task-b32-full",
    "accuracy-full-l14-14": "tab:clip-14task-l14-full",
    "accuracy-full-b32-20": "tab:clip-20task-b32-full",
    "accuracy-full-l14-20": "tab:clip-20task-l14-full",
}
_PARTS = {
    "Base": ("base", "Pre-trained"),
    "Expert": ("expert", "Fine-tuned (STL)"),
    "Merged": ("merged", "Task Arithmetic"),
}
"""The columns of the table of experts: the variant in a run, and the row of the paper's table."""
_BEST_SINGLE = "Fine-tuned (STL) is the best of base and single experts, column by column."

Member = tuple[DriftRun, Mapping[str, str]]
"""A run with the column of each of its tasks that is shown."""


@table("accuracy", title="Accuracy by task", label="tab:clip-vit-b32-results")
def accuracy(runs: Sequence[DriftRun], options: ExhibitOptions, printed: PublishedTable) -> Table:
    """Accuracy of every run of image classifiers, those on the paper's CLIP-ViT-B/32 and eight tasks together."""
    used = _scored(runs, "image")
    alike = [run for run in used if titles_of(run, printed)]
    return Table(
        [
            *_measured_grids([run for run in used if run not in alike], options),
            _joint_grid(alike, printed, options),
        ],
        "Accuracy (%) by task. References first, then a block per merger: the merged model as it is, with baselines, "
        "and calibrated; “anchor only” is what a calibration's anchor does without calibration.",
        used,
        [_test_note(used)],
        needed(used, _EVALUATE),
    )


def _full(runs: Sequence[DriftRun], options: ExhibitOptions, printed: PublishedTable) -> Table:
    """The larger backbone, and suites of 14 and 20 tasks."""
    alike = [run for run in _scored(runs) if titles_of(run, printed)]
    what = f"no run given is about {printed.model} and exactly these {printed.suite}"
    return Table(
        [_joint_grid(alike, printed, options)],
        f"Accuracy (%) of {printed.model} merged from {printed.suite}.",
        alike,
        [_test_note(alike)],
        needed(alike, f"{what}; `driftlens analyze` and `driftlens evaluate` make one."),
    )


for _name, _label in _FULL.items():
    _about = f"{published_tables()[_label].model}, {published_tables()[_label].suite}"
    table(_name, title=f"Accuracy by task, {_about}", label=_label)(_full)


@table("accuracy-avg", title="Average accuracy by suite and backbone", label="tab:clip-extended-avg")
def accuracy_avg(runs: Sequence[DriftRun], options: ExhibitOptions, printed: PublishedTable) -> Table:
    """One column per suite and backbone, the paper's and those that only the runs have."""
    used = _scored(runs, "image")
    suites = _suites(used, options)
    ours = [
        Block(_averages([run for run in used if merger(run) == name], suites, options))
        for name in dict.fromkeys(map(merger, used))
    ]
    references = _averages(used, suites, options, references=True)
    blocks = _beside(references, [block for block in ours if block.lines], printed_blocks(printed))
    filled = {head for block in blocks for line in block.lines for head in line.cells}
    heads = [head for head in dict.fromkeys([*printed.columns, *suites.values()]) if head in filled]
    return Table(
        [Grid(tuple(Column(head, options.digits, has_gain=True) for head in heads), blocks)],
        "Accuracy (%), averaged over the tasks of each suite.",
        used,
        [_test_note(used)],
        needed(used, _EVALUATE),
    )


@table("experts", title="Experts by task", label="tab:clip-vit-b32-results")
def experts(runs: Sequence[DriftRun], options: ExhibitOptions, printed: PublishedTable) -> Table:
    """One line per task: base, its own expert, the merged model, and what merging costs."""
    used = _scored(runs)
    blocks = [Block(tuple(_by_task(run, options)), run.name if len(used) > 1 else "") for run in used]
    rows = {head: row for row in printed.rows for head, (_, name) in _PARTS.items() if row.name == name}
    theirs = []
    for column in printed.columns if rows else ():
        cells = {head: printed_cell(printed, row, column) for head, row in rows.items()}
        theirs.append(Line(column, _with_cost(cells), "reference", "paper"))
    heads = [Column(head, options.digits, best=None) for head in (*_PARTS, "Cost")]
    return Table(
        [Grid((*heads, Column("n", 0, best=None)), (*blocks, Block(tuple(theirs))), first="Task")],
        "Accuracy (%) of each task's own expert. Cost: points that the merged model loses against it.",
        used,
        [_test_note(used)],
        needed(used, _EVALUATE),
    )


@table("corruption", title="Accuracy under corrupted calibration", label="tab:ta8-corrupted-calibration")
def corruption(runs: Sequence[DriftRun], options: ExhibitOptions, printed: PublishedTable) -> Table:
    """The paper's rows: clean images and three corruptions of the calibration images, tested on clean ones."""
    columns = tuple(Column(title, options.digits) for title in printed.columns)
    # No table of a run holds scores by corruption yet.
    return Table(
        [Grid(columns, tuple(printed_blocks(printed).values()))],
        "Accuracy (%), averaged over tasks, on clean test images after calibrating on corrupted ones. Without "
        "calibration there is nothing to corrupt, so the merged model has a clean column only.",
        missing=needed(
            (),
            "a study that calibrates on clean, noisy, blurred and foggy images (severity 3) and tests on clean ones "
            "fills them; runs don't hold one yet.",
        ),
    )


@table("accuracy-text", title="Scores of text-to-text models", label="tab:flan-t5-results")
def accuracy_text(runs: Sequence[DriftRun], options: ExhibitOptions, printed: PublishedTable) -> Table:
    """Exact match by task, Spearman's rank correlation for STS-B; a block per model."""
    caption = "FLAN-T5 on GLUE: exact match (%), for STS-B Spearman's rank correlation (times 100)."
    how = "runs of FLAN-T5 models fill them, which DriftLens can't load yet."
    heads = {name: "STS-B (Spearman)" if name == "STS-B" else name for name in printed.columns}
    rows = [
        dataclasses.replace(row, values={heads[name]: value for name, value in row.values.items()})
        for row in printed.rows
    ]
    printed = dataclasses.replace(printed, columns=tuple(heads.values()), rows=rows)
    return _by_model(_scored(runs, "text"), options, printed, caption, how)


@table("accuracy-llm", title="Scores of language models by domain", label="tab:mergebench-llama-results")
def accuracy_llm(runs: Sequence[DriftRun], options: ExhibitOptions, printed: PublishedTable) -> Table:
    """MergeBench scores: base, the best single expert of each column, merged, calibrated; a block per model."""
    caption = "MergeBench (%): HumanEval+ and MBPP+ report pass@1, the others accuracy."
    how = "runs of Llama models fill them, which DriftLens can't load yet."
    return _by_model(_scored(runs, "language"), options, printed, caption, how)


@table("experts-llm", title="Single experts of merged language models", label="tab:mergebench-expert-results")
def experts_llm(runs: Sequence[DriftRun], options: ExhibitOptions, printed: PublishedTable) -> Table:
    """MergeBench scores of base and single experts; the last line of a model is the best of each column."""
    caption = "Single experts on MergeBench (%): HumanEval+ and MBPP+ report pass@1."
    how = (
        "a run scores each expert on its own task; scores of each expert on every domain come with evaluations of "
        "language models."
    )
    # Runs score an expert on its own task alone, so none can fill the columns of other domains.
    return _by_model((), options, printed, caption, how)


def _by_model(
    used: Sequence[DriftRun], options: ExhibitOptions, printed: PublishedTable, caption: str, how: str
) -> Table:
    """These runs, and the paper's table with a group of blocks per model."""
    blocks = [
        dataclasses.replace(block, title=model if at == 0 else "", group=model)
        for model in dict.fromkeys(row.model for row in printed.rows)
        for at, block in enumerate(printed_blocks(printed, model=model).values())
    ]
    columns = _score_columns([title for title in printed.columns if title != AVERAGE], options)
    grids = [*_measured_grids(used, options), Grid(columns, tuple(blocks))]
    if any(row.name == "Fine-tuned (STL)" and row.model for row in printed.rows):
        caption = f"{caption} {_BEST_SINGLE}"
    return Table(grids, caption, used, [_test_note(used)], needed(used, how))


def shown_variants(run: DriftRun, options: ExhibitOptions) -> tuple[str, ...]:
    """What stands under the merged model: baselines, then each calibration after its control.

    With `options.calibrated`, other calibrations and their controls are left out.
    """
    others = [name for name in run.variants if part_of(name) == "baseline" and not is_control(name)]
    for variant in run.variants:
        if part_of(variant) == "calibrated" and options.calibrated in (None, variant):
            control = control_of(variant.partition(":")[2])
            others += [name for name in (control, variant) if name in run.variants]
    return tuple(others)


def _scored(runs: Sequence[DriftRun], kind: Family | None = None) -> list[DriftRun]:
    """The runs that have any score, of all kinds of models or one."""
    return [run for run in runs if len(run.accuracy()) and kind in (None, family(run))]


def _test_note(runs: Sequence[DriftRun]) -> str:
    """How many test samples are behind the measured scores."""
    counts = [int(n) for run in runs for n in run.accuracy()["n"].dropna()]
    if not counts:
        return ""
    return f"Measured on {span(counts)} test samples per task; 95 % Wilson intervals stand in the CSV file."


def _score_columns(titles: Sequence[str], options: ExhibitOptions) -> tuple[Column, ...]:
    """A column per task, and their average."""
    is_wide = len(titles) >= MOST_GAINS
    tasks = [Column(title, options.digits, has_gain=not is_wide) for title in titles]
    return (*tasks, Column(AVERAGE, options.digits, has_gain=True))


def _measured_grids(runs: Sequence[DriftRun], options: ExhibitOptions) -> list[Grid]:
    """One grid per choice of tasks: their columns, references, a block per run."""
    by_columns: dict[tuple[str, ...], list[Member]] = {}
    for run in runs:
        titles = _column_titles(run, options)
        by_columns.setdefault(tuple(titles.values()), []).append((run, titles))
    return [
        Grid(_score_columns(titles, options), (Block(_references(members)), *_blocks(members, options)))
        for titles, members in by_columns.items()
    ]


def _joint_grid(runs: Sequence[DriftRun], printed: PublishedTable, options: ExhibitOptions) -> Grid:
    """The paper's table, and above each of its blocks those of the runs with the same tasks and backbone."""
    wanted = {canonical(task) for task in options.tasks or ()}
    columns = [name for name in printed.columns if name != AVERAGE]
    columns = [name for name in columns if canonical(name) in wanted] or columns
    members: list[Member] = []
    for run in runs:
        tasks = {title: task for task, title in titles_of(run, printed).items()}
        members.append((run, {tasks[name]: name for name in columns if tasks[name] in options.tasks_of(run)}))
    theirs = printed_blocks(printed, columns=columns)
    blocks = _beside(_references(members), list(_blocks(members, options)), theirs)
    return Grid(_score_columns(columns, options), blocks)


def _beside(
    references: Sequence[Line], ours: Sequence[Block], printed: Mapping[str, Block]
) -> tuple[Block, ...]:
    """References, then our blocks, those of a merger that the paper has too above the paper's own."""
    theirs = dict(printed)
    blocks = [Block((*references, *theirs.pop("", Block(())).lines))]
    blocks += [block for block in ours if block.lines[0].label not in theirs]
    for name, block in theirs.items():
        blocks += [*(own for own in ours if own.lines[0].label == name), block]
    return tuple(blocks)


def _references(members: Sequence[Member]) -> tuple[Line, ...]:
    """Base and experts of the runs, once each; several runs are told apart by name."""
    found: dict[tuple[object, ...], Line] = {}
    for run, titles in members:
        for line in _reference_lines(run, titles):
            told = line if len(members) == 1 else dataclasses.replace(line, label=f"{line.label}, {run.name}")
            # Runs on the same suite share base and experts.
            found.setdefault((line.label, *(line.number(title) for title in titles.values())), told)
    return tuple(found.values())


def _blocks(members: Sequence[Member], options: ExhibitOptions) -> Iterator[Block]:
    """A block per run; several runs are told apart by name."""
    for run, titles in members:
        lines = _method_lines(run, titles, options)
        if lines:
            yield Block(lines, run.name if len(members) > 1 else "")


def _column_titles(run: DriftRun, options: ExhibitOptions) -> Mapping[str, str]:
    """The column head of each task: its name, and its metric where that is not accuracy."""
    metrics = _metrics_of(run)
    return {
        task: task if metrics.get(task, "accuracy") == "accuracy" else f"{task} ({metrics[task]})"
        for task in options.tasks_of(run)
    }


def _reference_lines(run: DriftRun, titles: Mapping[str, str]) -> tuple[Line, ...]:
    """Base and experts, in percent; `titles` names the column of each task shown."""
    lines = [
        _line(run, "base", "Base", titles, "reference"),
        _line(run, "expert", "Experts", titles, "reference"),
    ]
    return tuple(line for line in lines if line.cells)


def _method_lines(run: DriftRun, titles: Mapping[str, str], options: ExhibitOptions) -> tuple[Line, ...]:
    """The merged model, baselines, and each calibration after its anchor-only control, in percent."""
    lines = [_line(run, "merged", merger(run), titles, "plain")]
    for variant in shown_variants(run, options):
        role: Role = "own" if part_of(variant) == "calibrated" else "other"
        lines.append(_line(run, variant, f"w/ {title(variant)}", titles, role))
    return tuple(line for line in lines if line.cells)


def _line(run: DriftRun, variant: str, label: str, titles: Mapping[str, str], role: Role) -> Line:
    """One variant's scores in each task's metric, and their average; what was not scored has no cell."""
    rows = run.accuracy(variant=variant)
    rows = rows[(rows["metric"] == rows["task"].map(_metrics_of(run))) & rows["value"].notna()]
    scores = {row["task"]: row for row in rows.to_dict("records")}
    cells = {column: _cell(scores[task]) for task, column in titles.items() if task in scores}
    return with_average(Line(label, cells, role, "measured", run.id, variant), list(titles.values()))


def _metrics_of(run: DriftRun) -> Mapping[str, str]:
    """What is shown of each scored task: accuracy, or its first metric where it has none."""
    metrics = run.accuracy().groupby("task", sort=False)["metric"].unique()
    return {
        str(task): "accuracy" if "accuracy" in names else str(names[0]) for task, names in metrics.items()
    }


def _cell(row: Mapping[Any, Any]) -> Cell:
    low, high = (math.nan if pd.isna(row[end]) else 100 * row[end] for end in ("ci_low", "ci_high"))
    return Cell(100 * row["value"], n=None if pd.isna(row["n"]) else int(row["n"]), low=low, high=high)


def _suites(runs: Sequence[DriftRun], options: ExhibitOptions) -> Mapping[str, str]:
    """Each run's column, by id: suite and backbone; two runs of one merger never share a column."""
    titles: dict[str, str] = {}
    taken: set[tuple[str, str]] = set()
    for run in runs:
        count = len(options.tasks_of(run))
        title = f"{count} task{'s' if count > 1 else ''}, {backbone(run) or run.name}"
        if (merger(run), title) in taken:
            title = f"{title} ({run.id})"
        taken.add((merger(run), title))
        titles[run.id] = title
    return titles


def _averages(
    runs: Sequence[DriftRun], suites: Mapping[str, str], options: ExhibitOptions, *, references: bool = False
) -> tuple[Line, ...]:
    """One line per label, with the average of each run in the run's column."""
    lines: dict[str, Line] = {}
    together = " ".join(run.id for run in runs)
    for run in runs:
        titles = _column_titles(run, options)
        for line in _reference_lines(run, titles) if references else _method_lines(run, titles, options):
            if AVERAGE in line.cells:
                before = lines[line.label].cells if line.label in lines else {}
                cells = {**before, suites[run.id]: line.cells[AVERAGE]}
                lines[line.label] = dataclasses.replace(line, cells=cells, run=together)
    return tuple(lines.values())


def _by_task(run: DriftRun, options: ExhibitOptions) -> Iterator[Line]:
    """A run's lines of the table of experts."""
    titles = _column_titles(run, options)
    lines = {head: _line(run, variant, head, titles, "plain") for head, (variant, _) in _PARTS.items()}
    for column in (*titles.values(), AVERAGE):
        cells = {head: line.cells[column] for head, line in lines.items() if column in line.cells}
        counts = {cell.n for cell in cells.values() if cell.n is not None}
        if len(counts) == 1:
            cells["n"] = Cell(counts.pop())
        if cells:
            yield Line(column, _with_cost(cells), "reference", "measured", run.id)


def _with_cost(cells: Mapping[str, Cell]) -> Mapping[str, Cell]:
    if "Expert" not in cells or "Merged" not in cells:
        return cells
    return {**cells, "Cost": Cell(cells["Expert"].number - cells["Merged"].number)}
