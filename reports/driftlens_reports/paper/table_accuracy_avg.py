"""Average accuracies over suites and backbones, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from driftlens.records.run import DriftRun
from driftlens_reports.paper.choice import tasks_of
from driftlens_reports.paper.comparison import scored, test_note
from driftlens_reports.paper.exhibit import Exhibited, ExhibitOptions, Panel, exhibit
from driftlens_reports.paper.framing import framed, paper_note
from driftlens_reports.paper.grid import Block, Cell, Column, Grid, Line
from driftlens_reports.paper.measured import column_titles, method_lines, reference_lines
from driftlens_reports.paper.places import backbone, family, merger
from driftlens_reports.paper.printed import printed_blocks
from driftlens_reports.paper.published import AVERAGE, published_tables


@exhibit("accuracy-avg", kind="table", title="Average accuracy by suite and backbone", paper="Table 2")
def accuracy_avg(runs: Sequence[DriftRun], options: ExhibitOptions) -> Exhibited:
    """One column per suite and backbone: the paper's, then those that only the runs have."""
    table = published_tables()["tab:clip-extended-avg"]
    used = [run for run in scored(runs) if family(run) == "image"]
    titles = _titles(used, options)
    printed = printed_blocks(table)
    measured = {name: _block(runs_, titles, options) for name, runs_ in _by_merger(used).items()}
    references = _merged_lines(used, titles, options, references=True)
    blocks = [Block((*references, *printed[""].lines))]
    blocks += [block for name, block in measured.items() if name not in printed]
    for name, block in printed.items():
        blocks += [measured[name], block] if name in measured else [block] if name else []
    columns = [
        Column(title, options.digits, has_gain=True)
        for title in dict.fromkeys([*table.columns, *titles.values()])
    ]
    return framed(
        "accuracy-avg",
        [Grid(tuple(columns), tuple(blocks))],
        caption="Accuracy (%), averaged over the tasks of each suite.",
        runs=used,
        notes=[test_note(used), paper_note(table)],
        missing=[]
        if used
        else [Panel("Measured rows", "`driftlens evaluate RUN` adds the accuracies of a run.")],
    )


def _titles(runs: Sequence[DriftRun], options: ExhibitOptions) -> Mapping[str, str]:
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


def _by_merger(runs: Sequence[DriftRun]) -> Mapping[str, Sequence[DriftRun]]:
    return {name: [run for run in runs if merger(run) == name] for name in dict.fromkeys(map(merger, runs))}


def _block(runs: Sequence[DriftRun], titles: Mapping[str, str], options: ExhibitOptions) -> Block:
    return Block(_merged_lines(runs, titles, options, references=False))


def _merged_lines(
    runs: Sequence[DriftRun], titles: Mapping[str, str], options: ExhibitOptions, *, references: bool
) -> tuple[Line, ...]:
    """One line per label, with the average of each run in the run's column."""
    lines: dict[str, Line] = {}
    together = " ".join(run.id for run in runs)
    for run in runs:
        columns = column_titles(run, tasks_of(run, options))
        found = reference_lines(run, columns) if references else method_lines(run, columns, options)
        for line in found:
            if AVERAGE not in line.cells:
                continue
            cells: dict[str, Cell] = dict(lines[line.label].cells) if line.label in lines else {}
            cells[titles[run.id]] = line.cells[AVERAGE]
            lines[line.label] = Line(line.label, cells, line.role, "measured", together, line.variant)
    return tuple(lines.values())
