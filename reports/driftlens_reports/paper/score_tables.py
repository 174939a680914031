"""Tables of scores: accuracies by task, averages, and the experts by themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from driftlens.records.run import DriftRun
from driftlens_reports.paper.choice import tasks_of
from driftlens_reports.paper.exhibit import ExhibitOptions
from driftlens_reports.paper.grid import Block, Cell, Column, Grid, Line
from driftlens_reports.paper.places import Family, backbone, merger, titles_of
from driftlens_reports.paper.printed import printed_blocks, printed_cell
from driftlens_reports.paper.published import AVERAGE, PublishedTable, published_tables
from driftlens_reports.paper.scores import (
    column_titles,
    joint_grid,
    measured_grids,
    method_lines,
    reference_lines,
    score_columns,
    scored,
    test_note,
)
from driftlens_reports.paper.table import Table, needed, paper_table

_EVALUATE = "`driftlens evaluate RUN` adds the accuracies of a run."
_FULL = {
    "accuracy-full-l14-8": "tab:clip-vit-l14-full",
    "accuracy-full-b32-14": "tab:clip-14task-b32-full",
    "accuracy-full-l14-14": "tab:clip-14task-l14-full",
    "accuracy-full-b32-20": "tab:clip-20task-b32-full",
    "accuracy-full-l14-20": "tab:clip-20task-l14-full",
}
_EXPERTS = {"Pre-trained": "Base", "Fine-tuned (STL)": "Expert", "Task Arithmetic": "Merged"}
_BEST_SINGLE = "Fine-tuned (STL) is the best of base and single experts, column by column."


@paper_table("accuracy", title="Accuracy by task", label="tab:clip-vit-b32-results")
def accuracy(runs: Sequence[DriftRun], options: ExhibitOptions, printed: PublishedTable) -> Table:
    """Accuracy of every run of image classifiers, and of the paper's CLIP-ViT-B/32 on eight tasks."""
    used = scored(runs, "image")
    alike = [run for run in used if titles_of(run, printed)]
    return Table(
        [
            *measured_grids([run for run in used if run not in alike], options),
            joint_grid(alike, printed, options),
        ],
        "Accuracy (%) by task. References first, then a block per merger: the merged model as it is, with baselines, "
        "and calibrated; “anchor only” is what a calibration's anchor does without calibration.",
        used,
        [test_note(used)],
        needed(used, _EVALUATE),
    )


def _full(runs: Sequence[DriftRun], options: ExhibitOptions, printed: PublishedTable) -> Table:
    """The larger backbone, and suites of 14 and 20 tasks."""
    alike = [run for run in scored(runs) if titles_of(run, printed)]
    what = f"no run given is about {printed.model} and exactly these {printed.suite}"
    return Table(
        [joint_grid(alike, printed, options)],
        f"Accuracy (%) of {printed.model} merged from {printed.suite}.",
        alike,
        [test_note(alike)],
        needed(alike, f"{what}; `driftlens analyze` and `driftlens evaluate` make one."),
    )


for _name, _label in _FULL.items():
    _about = f"{published_tables()[_label].model}, {published_tables()[_label].suite}"
    paper_table(_name, title=f"Accuracy by task, {_about}", label=_label)(_full)


@paper_table("accuracy-avg", title="Average accuracy by suite and backbone", label="tab:clip-extended-avg")
def accuracy_avg(runs: Sequence[DriftRun], options: ExhibitOptions, printed: PublishedTable) -> Table:
    """One column per suite and backbone: the paper's, then those that only the runs have."""
    used = scored(runs, "image")
    titles = _suites(used, options)
    theirs = printed_blocks(printed)
    ours = {
        name: Block(_averages([run for run in used if merger(run) == name], titles, options))
        for name in dict.fromkeys(map(merger, used))
    }
    blocks = [Block((*_averages(used, titles, options, references=True), *theirs[""].lines))]
    blocks += [block for name, block in ours.items() if name not in theirs]
    for name, block in theirs.items():
        blocks += [*([ours[name]] if name in ours else []), *([block] if name else [])]
    heads = dict.fromkeys([*printed.columns, *titles.values()])
    return Table(
        [Grid(tuple(Column(head, options.digits, has_gain=True) for head in heads), tuple(blocks))],
        "Accuracy (%), averaged over the tasks of each suite.",
        used,
        [test_note(used)],
        needed(used, _EVALUATE),
    )


@paper_table("experts", title="Experts by task", label="tab:clip-vit-b32-results")
def experts(runs: Sequence[DriftRun], options: ExhibitOptions, printed: PublishedTable) -> Table:
    """One line per task: base, its own expert, the merged model, and what merging costs."""
    used = scored(runs)
    blocks = [Block(_by_task(run, options), run.name if len(used) > 1 else "") for run in used]
    rows = {_EXPERTS[row.name]: row for row in printed.rows if row.name in _EXPERTS}
    theirs = [
        _with_cost(column, {name: printed_cell(printed, rows[name], column) for name in _EXPERTS.values()})
        for column in printed.columns
    ]
    heads = [Column(head, options.digits, best=None) for head in (*_EXPERTS.values(), "Cost")]
    columns = (*heads, Column("n", 0, best=None))
    return Table(
        [Grid(columns, (*blocks, Block(tuple(theirs))), first="Task")],
        "Accuracy (%) of each task's own expert. Cost: points that the merged model loses against it.",
        used,
        [test_note(used)],
        needed(used, _EVALUATE),
    )


@paper_table(
    "corruption", title="Accuracy under corrupted calibration", label="tab:ta8-corrupted-calibration"
)
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


@paper_table("accuracy-text", title="Scores of text-to-text models", label="tab:flan-t5-results")
def accuracy_text(runs: Sequence[DriftRun], options: ExhibitOptions, printed: PublishedTable) -> Table:
    """Exact match by task, Spearman's rank correlation for STS-B; a block per model."""
    caption = "FLAN-T5 on GLUE: exact match (%), for STS-B Spearman's rank correlation (times 100)."
    how = "runs of FLAN-T5 models fill them, which DriftLens can't load yet."
    return _by_model(runs, options, _renamed(printed, "STS-B", "STS-B (Spearman)"), "text", caption, how)


@paper_table(
    "accuracy-llm", title="Scores of language models by domain", label="tab:mergebench-llama-results"
)
def accuracy_llm(runs: Sequence[DriftRun], options: ExhibitOptions, printed: PublishedTable) -> Table:
    """MergeBench scores: base, the best single expert of each column, merged, calibrated; a block per model."""
    caption = f"MergeBench (%): HumanEval+ and MBPP+ report pass@1, the others accuracy. {_BEST_SINGLE}"
    how = "runs of Llama models fill them, which DriftLens can't load yet."
    return _by_model(runs, options, printed, "language", caption, how)


@paper_table(
    "experts-llm", title="Single experts of merged language models", label="tab:mergebench-expert-results"
)
def experts_llm(runs: Sequence[DriftRun], options: ExhibitOptions, printed: PublishedTable) -> Table:
    """MergeBench scores of base and single experts; the last line of a model is the best of each column."""
    caption = f"Single experts on MergeBench (%): HumanEval+ and MBPP+ report pass@1. {_BEST_SINGLE}"
    how = (
        "a run scores each expert on its own task; scores of each expert on every domain come with evaluations of "
        "language models."
    )
    # Runs score an expert on its own task alone, so none can fill the columns of other domains.
    return _by_model((), options, printed, "language", caption, how)


def _by_model(
    runs: Sequence[DriftRun],
    options: ExhibitOptions,
    printed: PublishedTable,
    kind: Family,
    caption: str,
    how: str,
) -> Table:
    """The runs about this kind of model, and the paper's table with a group of blocks per model."""
    used = scored(runs, kind)
    blocks = [
        dataclasses.replace(block, title=model if at == 0 else "", group=model)
        for model in dict.fromkeys(row.model for row in printed.rows)
        for at, block in enumerate(printed_blocks(printed, model=model).values())
    ]
    columns = score_columns([title for title in printed.columns if title != AVERAGE], options)
    grids = [*measured_grids(used, options), Grid(columns, tuple(blocks))]
    return Table(grids, caption, used, [test_note(used)], needed(used, how))


def _renamed(printed: PublishedTable, column: str, shown: str) -> PublishedTable:
    """The table with another head on one column."""

    def named(name: str) -> str:
        return shown if name == column else name

    rows = [
        dataclasses.replace(row, values={named(name): value for name, value in row.values.items()})
        for row in printed.rows
    ]
    return dataclasses.replace(printed, columns=tuple(map(named, printed.columns)), rows=rows)


def _suites(runs: Sequence[DriftRun], options: ExhibitOptions) -> Mapping[str, str]:
    """Each run's column, by id: suite and backbone; two runs of one merger never share a column."""
    titles: dict[str, str] = {}
    taken: set[tuple[str, str]] = set()
    for run in runs:
        count = len(tasks_of(run, options))
        title = f"{count} task{'s' if count > 1 else ''}, {backbone(run) or run.name}"
        if (merger(run), title) in taken:
            title = f"{title} ({run.id})"
        taken.add((merger(run), title))
        titles[run.id] = title
    return titles


def _averages(
    runs: Sequence[DriftRun], titles: Mapping[str, str], options: ExhibitOptions, *, references: bool = False
) -> tuple[Line, ...]:
    """One line per label, with the average of each run in the run's column."""
    lines: dict[str, Line] = {}
    together = " ".join(run.id for run in runs)
    for run in runs:
        columns = column_titles(run, options)
        for line in reference_lines(run, columns) if references else method_lines(run, columns, options):
            if AVERAGE in line.cells:
                cells = dict(lines[line.label].cells) if line.label in lines else {}
                cells[titles[run.id]] = line.cells[AVERAGE]
                lines[line.label] = Line(line.label, cells, line.role, "measured", together, line.variant)
    return tuple(lines.values())


def _by_task(run: DriftRun, options: ExhibitOptions) -> tuple[Line, ...]:
    """A run's lines of the table of experts."""
    titles = column_titles(run, options)
    names = {"base": "Base", "expert": "Expert", "merged": "Merged"}
    shown = [*reference_lines(run, titles), *method_lines(run, titles, options)]
    found = {names[line.variant]: line for line in shown if line.variant in names}
    lines = []
    for title in (*titles.values(), AVERAGE):
        cells = {name: line.cells[title] for name, line in found.items() if title in line.cells}
        counts = {cell.n for cell in cells.values() if cell.n is not None}
        if len(counts) == 1:
            cells["n"] = Cell(counts.pop())
        if cells:
            line = _with_cost(title, cells)
            lines.append(dataclasses.replace(line, source="measured", run=run.id))
    return tuple(lines)


def _with_cost(label: str, cells: dict[str, Cell]) -> Line:
    if "Expert" in cells and "Merged" in cells:
        cells["Cost"] = Cell(cells["Expert"].number - cells["Merged"].number)
    return Line(label, cells, "reference", "paper")
