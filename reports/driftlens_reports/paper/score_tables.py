"""Tables of scores: accuracies by task, averages, and the experts by themselves."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pandas as pd

from driftlens.base.intervals import mean_over_tasks
from driftlens.base.metrics import ACCURACY, Metric
from driftlens.base.variants import control_of, expert_of, is_control, part_of
from driftlens.findings.measures import changed_score, main_metrics
from driftlens.findings.swept import swept_methods
from driftlens.runs.attaching import attached_shares
from driftlens.runs.run import DriftRun
from driftlens_reports.charts.words import between, called, title
from driftlens_reports.paper import published
from driftlens_reports.paper.drawn import corrupting, corruption_title, sweep_points
from driftlens_reports.paper.exhibit import ExhibitOptions, Table, needed, table
from driftlens_reports.paper.grid import (
    AVERAGE,
    Block,
    Cell,
    Column,
    Grid,
    Line,
    Role,
    percent_cell,
    with_average,
)
from driftlens_reports.paper.published import CORRUPTED, Family, PublishedTable, merger, printed_blocks

MOST_GAINS = 9
"""Columns up to which each cell shows its gain; wider tables show that of the average only."""

_EVALUATE = "`driftlens analyze RUN` adds the accuracies of a run."
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
    alike = [run for run in used if published.titles_of(run, printed)]
    grids = _measured_grids([run for run in used if run not in alike], options)
    caption = (
        "Accuracy (%) by task. References first, then a block per merger: the merged model as it is, with baselines, "
        "and calibrated; “anchor only” is what a calibration's anchor does without calibration."
    )
    return _table_of([*grids, _joint_grid(alike, printed, options)], caption, used, _of_images(runs))


def _of_images(runs: Sequence[DriftRun]) -> str:
    """How a table of image models gets rows."""
    is_of_any = not runs or any(published.family(run) == "image" for run in runs)
    return (
        _EVALUATE
        if is_of_any
        else "no run given is of image models; `accuracy-text` and `accuracy-llm` are of others"
    )


def _full(runs: Sequence[DriftRun], options: ExhibitOptions, printed: PublishedTable) -> Table:
    """The larger backbone, and suites of 14 and 20 tasks."""
    alike = [run for run in _scored(runs) if published.titles_of(run, printed)]
    caption = f"Accuracy (%) of {printed.model} merged from {printed.suite}."
    what = f"no run given is about {printed.model} and exactly these {printed.suite}"
    how = f"{what}."
    return _table_of([_joint_grid(alike, printed, options)], caption, alike, how)


for _name, _label in _FULL.items():
    _about = f"{published.published_tables()[_label].model}, {published.published_tables()[_label].suite}"
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
    grid = Grid(tuple(Column(head, options.digits, has_gain=True) for head in heads), blocks)
    return _table_of([grid], "Accuracy (%), averaged over the tasks of each suite.", used, _of_images(runs))


@table("experts", title="Experts by task", label="tab:clip-vit-b32-results")
def experts(runs: Sequence[DriftRun], options: ExhibitOptions, printed: PublishedTable) -> Table:
    """One line per task: base, its own expert, the merged model, and what merging costs."""
    used = _scored(runs)
    blocks = [Block(tuple(_by_task(run, options)), run.name if len(used) > 1 else "") for run in used]
    rows = {head: row for row in printed.rows for head, (_, name) in _PARTS.items() if row.name == name}
    printed_lines = []
    for column in printed.columns if rows else ():
        cells = {head: published.printed_cell(printed, row, column) for head, row in rows.items()}
        printed_lines.append(Line(column, _with_cost(cells), "reference", "paper"))
    heads = [Column(head, options.digits) for head in (*_PARTS, "Cost")]
    columns = (*heads, Column("n", 0))
    grid = Grid(columns, (*blocks, Block(tuple(printed_lines))), first="Task")
    caption = "Accuracy (%) of each task's own expert. Cost: points that the merged model loses against it."
    return _table_of([grid], caption, used, _EVALUATE)


@table("corruption", title="Accuracy under corrupted calibration", label="tab:ta8-corrupted-calibration")
def corruption(runs: Sequence[DriftRun], options: ExhibitOptions, printed: PublishedTable) -> Table:
    """A line per method of a run's sweep of corruptions; the paper's columns first, whose average it is."""
    blocks, used = [], []
    for run in runs:
        if lines := [*_corrupted(run, options)]:
            scores = _lines(run, _column_titles(run, options), options)
            plain = [
                dataclasses.replace(line, cells={"Clean": line.cells[AVERAGE]})
                for line in scores
                if line.variant == "merged" and AVERAGE in line.cells
            ]
            blocks.append(Block((*plain, *lines), run.name if len(runs) > 1 else ""))
            used.append(run)
    heads = dict.fromkeys(
        (*printed.columns, *(head for block in blocks for line in block.lines for head in line.cells))
    )
    blocks = [*_beside((), blocks, printed_blocks(printed))]
    columns = tuple(Column(title, options.digits) for title in heads)
    seeds = sorted({int(seed) for run in used for seed in run.sweeps().query("corruption.notna()")["seed"]})
    notes = [f"Seeds {', '.join(map(str, seeds))}; the average is over the paper's columns."] if used else []
    return Table(
        [Grid(columns, tuple(blocks))],
        "Accuracy (%), averaged over tasks, on clean test images after calibrating on corrupted ones. Without "
        "calibration there is nothing to corrupt, so the merged model has a clean column only.",
        used,
        notes,
        needed(used, corrupting(runs)),
    )


def _corrupted(run: DriftRun, options: ExhibitOptions) -> Iterator[Line]:
    for method in swept_methods(run, "corruption"):
        points = sweep_points(run, "corruption", options.tasks_of(run), method)
        cells = {
            CORRUPTED.get(name, corruption_title(name)): percent_cell(*shown)
            for name, *shown in points[["setting", "mean", "std", "n_test"]].itertuples(index=False)
        }
        if cells:
            label = f"w/ {published.method_title(method)}"
            line = Line(label, cells, "own", "measured", run.id, f"calibrated:{method}")
            yield with_average(line, [*CORRUPTED.values()])


def _table_by_model(
    name: str, title: str, label: str, caption: str, how: str, *, kind: Family | None
) -> None:
    """File a table of runs about one kind of model (None: single language models), and the paper's blocks by model."""

    @table(name, title=title, label=label)
    def draw(runs: Sequence[DriftRun], options: ExhibitOptions, printed: PublishedTable) -> Table:
        used = _scored(runs, kind or "language")
        blocks = [
            dataclasses.replace(block, title=model if place == 0 else "")
            for model in dict.fromkeys(row.model for row in printed.rows)
            for place, block in enumerate(printed_blocks(printed, model=model).values())
        ]
        columns = _score_columns([column for column in printed.columns if column != AVERAGE], options)
        measured = _measured_grids(used, options) if kind else []
        if kind != "text":
            measured += [_domain_grid(run, options, is_single=kind is None) for run in used]
        grids = [*measured, Grid(columns, tuple(blocks))]
        text = f"{caption} {_BEST_SINGLE}" if printed.rows and kind != "text" else caption
        return _table_of(grids, text, used, how)


_table_by_model(
    "accuracy-text",
    "Scores of text-to-text models",
    "tab:flan-t5-results",
    "Scores (%) by task. Published rows: FLAN-T5 on GLUE, exact match, of STS-B Spearman's correlation times 100.",
    "`driftlens analyze` of T5 models (loader hf-t5) fills them.",
    kind="text",
)
_table_by_model(
    "accuracy-llm",
    "Scores of language models by domain",
    "tab:mergebench-llama-results",
    "Scores (%) by domain. Published rows: MergeBench, HumanEval+ and MBPP+ by pass@1, the others by accuracy.",
    "`driftlens analyze` of decoders (loader hf-decoder) fills them.",
    kind="language",
)
_table_by_model(
    "experts-llm",
    "Single experts of merged language models",
    "tab:mergebench-expert-results",
    "Scores (%) of single experts by domain. Published rows: MergeBench, HumanEval+ and MBPP+ by pass@1.",
    "`driftlens analyze` of decoders (loader hf-decoder) scores each expert on its own task, and `driftlens attach RUN "
    "--variant expert:TASK` adds what the lm-evaluation-harness measured of it on others.",
    kind=None,
)


def _domain_grid(run: DriftRun, options: ExhibitOptions, *, is_single: bool) -> Grid:
    """Base, the best single expert and, with `is_single`, every one, else what was merged, by domain."""
    rows = _domain_rows(run, is_single=is_single)
    columns = list(dict.fromkeys(rows["task"]))
    cells: dict[str, dict[str, Cell]] = {}
    for row in rows.to_dict("records"):
        cells.setdefault(row["variant"], {})[row["task"]] = _cell(row)

    def line(label: str, scores: Mapping[str, Cell], role: Role = "reference", name: str = "") -> Line:
        return with_average(Line(label, scores, role, "measured", run.id, name), columns)

    experts = {expert_of(task): f"{called(task)} expert" for task in run.tasks if expert_of(task) in cells}
    references = [line("Base", cells["base"], name="base")] if "base" in cells else []
    references += [line(label, cells[name], name=name) for name, label in experts.items() if is_single]
    best: dict[str, Cell] = {}
    for scores in (cells[name] for name in ("base", *experts) if name in cells):
        best |= {at: cell for at, cell in scores.items() if at not in best or cell.number > best[at].number}
    references += [line("Best single", best)] if best else []
    blocks = [Block(tuple(references))]
    if not is_single:
        wanted = {
            "merged": merger(run),
            **{name: f"w/ {title(name)}" for name in shown_variants(run, options)},
        }
        after = [
            line(label, cells[name], "plain" if name == "merged" else "own", name)
            for name, label in wanted.items()
            if name in cells
        ]
        blocks.append(Block(tuple(after)))
    return Grid(_score_columns(columns, options), tuple(blocks))


def _domain_rows(run: DriftRun, *, is_single: bool) -> pd.DataFrame:
    """The attached scores of each task, which is a domain; of single models without any their own scores."""
    attached = attached_shares(run)
    if len(attached) or not is_single:
        return attached
    scores = _shown_scores(run)
    experts = [*map(expert_of, scores["task"])]
    return scores.assign(variant=scores["variant"].where(scores["variant"] != "expert", experts))


def _table_of(grids: Sequence[Grid], caption: str, used: Sequence[DriftRun], how: str) -> Table:
    """Grids with how many test samples are behind the runs' scores, or with how to get any."""
    counts = [int(n) for run in used for n in _shown_scores(run)["n"].dropna()]
    note = f"Measured on {between(counts)} test samples per task; " if counts else ""
    is_share = all(metric.kind == "share" for run in used for metric in _metrics_of(run).values())
    notes = [f"{note}95 % {'Wilson ' if is_share else ''}intervals stand in the CSV file."] if counts else []
    if not is_share:
        notes.append(
            "Correlations stand times 100, and averages are over them and shares of right answers alike."
        )
    return Table(grids, caption, used, notes, needed(used, how))


def shown_variants(run: DriftRun, options: ExhibitOptions) -> tuple[str, ...]:
    """What stands under the merged model: baselines, then each calibration asked for, after its control."""
    names = [name for name in run.variants if part_of(name) == "baseline" and not is_control(name)]
    for variant in run.variants:
        if part_of(variant) == "calibrated" and options.wants(run, variant):
            control = control_of(variant.partition(":")[2])
            names += [name for name in (control, variant) if name in run.variants]
    return tuple(names)


def _scored(runs: Sequence[DriftRun], kind: Family | None = None) -> list[DriftRun]:
    """The runs that have any score, of all kinds of models or one."""
    return [run for run in runs if len(_shown_scores(run)) and kind in (None, published.family(run))]


def _score_columns(titles: Sequence[str], options: ExhibitOptions) -> tuple[Column, ...]:
    """A column per task, and their average."""
    is_wide = len(titles) >= MOST_GAINS
    tasks = [Column(title, options.digits, has_gain=not is_wide) for title in titles]
    return (*tasks, Column(AVERAGE, options.digits, has_gain=True))


def _measured_grids(runs: Sequence[DriftRun], options: ExhibitOptions) -> list[Grid]:
    """One grid per choice of tasks."""
    by_columns: dict[tuple[str, ...], list[Member]] = {}
    for run in runs:
        titles = _column_titles(run, options)
        by_columns.setdefault(tuple(titles.values()), []).append((run, titles))
    return [
        Grid(_score_columns(titles, options), _stacked(members, options))
        for titles, members in by_columns.items()
    ]


def _joint_grid(runs: Sequence[DriftRun], printed: PublishedTable, options: ExhibitOptions) -> Grid:
    """The paper's table, and above each of its blocks those of the runs with the same tasks and backbone."""
    wanted = {published.canonical(task) for task in options.tasks or ()}
    columns = [name for name in printed.columns if name != AVERAGE]
    columns = [name for name in columns if published.canonical(name) in wanted] or columns
    members: list[Member] = []
    for run in runs:
        tasks = {title: task for task, title in published.titles_of(run, printed).items()}
        members.append((run, {tasks[name]: name for name in columns if tasks[name] in options.tasks_of(run)}))
    heads = {
        name: called(task) for run, titles in members for task, name in titles.items() if called(task) != task
    }
    shown = (dataclasses.replace(at, head=heads.get(at.title, "")) for at in _score_columns(columns, options))
    return Grid(tuple(shown), _stacked(members, options, printed_blocks(printed, columns=columns)))


def _stacked(
    members: Sequence[Member], options: ExhibitOptions, printed: Mapping[str, Block] = MappingProxyType({})
) -> tuple[Block, ...]:
    """Base and experts once each, then a block per run; several runs are told apart by name."""
    references: dict[tuple[object, ...], Line] = {}
    blocks, several = [], len(members) > 1
    for run, titles in members:
        lines = _lines(run, titles, options)
        for line in lines:
            if line.role == "reference":
                # Runs on the same suite share base and experts.
                key = line.label, *(line.number(title) for title in titles.values())
                whose = f", {run.name}" if several else ""
                references.setdefault(key, dataclasses.replace(line, label=f"{line.label}{whose}"))
        rivals = tuple(line for line in lines if line.role != "reference")
        blocks += [Block(rivals, run.name if several else "")] if rivals else []
    return _beside([*references.values()], blocks, printed)


def _beside(
    references: Sequence[Line], measured: Sequence[Block], printed: Mapping[str, Block]
) -> tuple[Block, ...]:
    """References, then our blocks, those of a merger that the paper has too above the paper's own."""
    by_merger = dict(printed)
    blocks = [Block((*references, *by_merger.pop("", Block(())).lines))]
    blocks += [block for block in measured if block.lines[0].label not in by_merger]
    for name, block in by_merger.items():
        blocks += [*(of_run for of_run in measured if of_run.lines[0].label == name), block]
    return tuple(blocks)


def _column_titles(run: DriftRun, options: ExhibitOptions) -> Mapping[str, str]:
    """Column heads of the tasks that have a place among percentages: name, and metric unless that is accuracy."""
    metrics, judged = _metrics_of(run), main_metrics(run)
    return {
        task: f"{called(task)} ({metrics[task].title})"
        if metrics.get(task, ACCURACY) != ACCURACY
        else called(task)
        for task in options.tasks_of(run)
        if task in metrics or task not in judged
    }


def _lines(run: DriftRun, titles: Mapping[str, str], options: ExhibitOptions) -> list[Line]:
    """Lines of the models that were scored, in percent; `titles` names the column of each task shown."""
    wanted: dict[str, tuple[str, Role]] = {"base": ("Base", "reference"), "expert": ("Experts", "reference")}
    wanted["merged"] = (merger(run), "plain")
    for variant in shown_variants(run, options):
        wanted[variant] = (f"w/ {title(variant)}", "own" if part_of(variant) == "calibrated" else "other")
    rows = _shown_scores(run)
    lines = []
    for variant, (label, role) in wanted.items():
        scores = {row["task"]: row for row in rows[rows["variant"] == variant].to_dict("records")}
        cells = {column: _cell(scores[task]) for task, column in titles.items() if task in scores}
        line = Line(label, cells, role, "measured", run.id, variant)
        lines += [with_average(line, [*titles.values()])] if cells else []
    return [*_with_best(run, lines, titles)]


def _with_best(run: DriftRun, lines: Sequence[Line], titles: Mapping[str, str]) -> Iterator[Line]:
    """The lines with the best of each column marked where the 95 % interval to the next best (paired) lies above 0."""
    metrics, best = _metrics_of(run), set()
    rivals = [line for line in lines if line.role != "reference"]
    for column, tasks in {**{name: [task] for task, name in titles.items()}, AVERAGE: [*titles]}.items():
        there = sorted(
            (line for line in rivals if column in line.cells), key=lambda line: -line.number(column)
        )
        if len(there) > 1:
            pair = there[1].variant, there[0].variant
            change = mean_over_tasks([changed_score(run, run, task, pair, metrics[task]) for task in tasks])
            best |= {(there[0].variant, column)} if change.low > 0 else set()
    for line in lines:
        cells = {
            column: dataclasses.replace(cell, is_best=(line.variant, column) in best)
            for column, cell in line.cells.items()
        }
        yield dataclasses.replace(line, cells=cells)


def _metrics_of(run: DriftRun) -> Mapping[str, Metric]:
    """What each task is judged by, of tasks whose scores may be averaged."""
    return {task: metric for task, metric in main_metrics(run).items() if metric.is_averaged}


def _shown_scores(run: DriftRun) -> pd.DataFrame:
    """The rows of the accuracy table by these metrics."""
    names, rows = {task: metric.name for task, metric in _metrics_of(run).items()}, run.accuracy()
    return rows[(rows["metric"] == rows["task"].map(names)) & rows["value"].notna()]


def _cell(row: Mapping[Any, Any]) -> Cell:
    low, high = (math.nan if pd.isna(row[end]) else row[end] for end in ("ci_low", "ci_high"))
    return percent_cell(row["value"], n=row["n"], low=low, high=high)


def _suites(runs: Sequence[DriftRun], options: ExhibitOptions) -> Mapping[str, str]:
    """Each run's column, by id: suite and backbone; two runs of one merger never share a column."""
    titles: dict[str, str] = {}
    taken: set[tuple[str, str]] = set()
    for run in runs:
        count = len(options.tasks_of(run))
        title = f"{count} task{'s' if count > 1 else ''}, {published.backbone(run) or run.name}"
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
        for line in _lines(run, _column_titles(run, options), options):
            if AVERAGE in line.cells and (line.role == "reference") == references:
                before = lines[line.label].cells if line.label in lines else {}
                cells = {**before, suites[run.id]: line.cells[AVERAGE]}
                lines[line.label] = dataclasses.replace(line, cells=cells, run=together)
    return tuple(lines.values())


def _by_task(run: DriftRun, options: ExhibitOptions) -> Iterator[Line]:
    """A run's lines of the table of experts."""
    titles = _column_titles(run, options)
    by_variant = {line.variant: line for line in _lines(run, titles, options)}
    lines = {head: by_variant[variant] for head, (variant, _) in _PARTS.items() if variant in by_variant}
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
