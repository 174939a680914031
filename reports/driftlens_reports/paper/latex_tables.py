"""Tables of runs: scores by task, the cost of calibrations, and self-checks, as LaTeX by pandas' `Styler`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from driftlens.results.checks import run_self_checks, self_check_command
from driftlens.results.formatting import map_code_spans, strip_control_chars
from driftlens.results.measures import main_metrics, score_change, variant_score
from driftlens.runs.run import DriftRun
from driftlens.runs.schema import CALIBRATE
from driftlens.utils.intervals import Interval, mean_over_tasks
from driftlens.utils.variants import (
    ACCURACY,
    Metric,
    calibrated_variant,
    control_variant,
    is_control,
    variant_kind,
)
from driftlens_reports.charts.words import count_range, task_title, variant_title
from driftlens_reports.paper.exhibit import (
    ExhibitOptions,
    ExhibitResult,
    MissingPart,
    spec_section,
    split_caption,
    table,
)

AVERAGE, GAIN = "Avg.", "Gain"
_TIME, _ENERGY, _MEMORY, _SPEEDUP = "Time (s)", "Energy (Wh)", "Memory (GiB)", "Speed-up"
# Columns up to which every cell shows its interval; wider tables show that of the average and the gain only.
_MOST_INTERVALS = 9
_COLUMNS = ("part", "block", "row", "run", "variant", "column", "value", "text", "ci_low", "ci_high", "n")

_SPECIAL = {
    **{letter: f"\\{letter}" for letter in "{}$&#_%"},
    # At the start of a line these would be read as arguments of the line break before.
    **{letter: f"{{{letter}}}" for letter in "[]*"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "`": r"\textasciigrave{}",
    "…": r"\dots{}",
    "\ufffd": "?",
    "−": "$-$",
    **{"±": r"$\pm$", "×": r"$\times$", "≤": r"$\le$", "≥": r"$\ge$"},
    **{"λ": r"$\lambda$", "ρ": r"$\rho$", "α": r"$\alpha$"},
}
# Letters that fonts would join to a dash or bend in code, and where a long command may break.
_LITERAL = {"-": "{-}", "'": r"\textquotesingle{}", ",": r",\allowbreak{}"}
_COMMAND = re.compile(r"\\[a-zA-Z]+|[{}$\\]")
_NUMBER = re.compile(r"\$?[-+\d]|\\textbf\{[\d$]|--|$")
# Letters of small type that fit into one column and across a page.
_COLUMN, _PAGE = 60, 76
_NEEDS = "% Needs \\usepackage{booktabs,graphicx}\n"


@dataclass(frozen=True)
class _TableCell:
    """One table cell, unrounded: text, or a number with its 95 % interval; NaN where not measured."""

    value: float | str
    low: float = math.nan
    high: float = math.nan
    n: int = 0
    digits: int | None = 1
    is_signed: bool = False
    is_best: bool = False

    @classmethod
    def from_fraction(cls, share: Interval, *, is_signed: bool = False) -> _TableCell:
        """Create a cell that shows a fraction in percent."""
        return cls(*(100 * end for end in share.ends), n=share.n, is_signed=is_signed)

    def text(self, *, has_interval: bool) -> str:
        """Format the cell as LaTeX, rounded, with the larger half of its interval."""
        if isinstance(self.value, str):
            return escape_latex(self.value)
        text = format_number(self.value, self.digits)
        text = f"+{text}" if self.is_signed and self.value > 0 else text
        text = rf"\textbf{{{text}}}" if self.is_best else text
        half = max(self.value - self.low, self.high - self.value)
        if has_interval and math.isfinite(half):
            text += rf" $\pm$ {format_number(half, self.digits)}"
        return text


@dataclass(frozen=True)
class _TableRow:
    """One row of a LaTeX table: cells by column; `block` is the run's name if there are several runs."""

    label: str
    cells: Mapping[str, _TableCell]
    run: str
    variant: str = ""
    block: str = ""


@table("accuracy", title="Scores by task")
def _score_table(runs: Sequence[DriftRun], options: ExhibitOptions) -> ExhibitResult:
    """Return the table of every model's score by task, the average, and the paired gain over the merged model."""
    parts: dict[tuple[str, ...], list[_TableRow]] = {}
    used = []
    for run in runs:
        metrics = {task: metric for task, metric in main_metrics(run).items() if metric.is_averaged}
        shown = {task: metrics[task] for task in options.tasks_of(run) if task in metrics}
        if shown:
            heads = tuple(_task_column_header(task, metric) for task, metric in shown.items())
            parts.setdefault(heads, []).extend(_score_table_rows(run, options, shown, len(runs) > 1))
            used.append(run)
    counts = [
        cell.n
        for lines in parts.values()
        for line in lines
        for head, cell in line.cells.items()
        if head not in (AVERAGE, GAIN) and cell.n
    ]
    notes = [
        "±: larger half of a 95 % interval over test samples; gains are paired where single answers are stored.",
        "Bold: significantly better than the next best (base and experts excluded).",
    ]
    if counts:
        notes.insert(0, f"{count_range(counts)} test samples per task.")
    if any(metric.kind != "share" for run in used for metric in main_metrics(run).values() if metric.is_averaged):
        notes.append("Correlations are times 100; averages mix them with accuracies.")
    missing = [] if used else [MissingPart("Measured rows", "`driftlens analyze RUN` adds the scores of a run")]
    caption = f"Scores (%) by task. {GAIN}: points of the average over the merged model."
    return _finish_tables(
        "accuracy", options, "Model", [*parts.values()], caption, used, notes if used else [], missing
    )


def _task_column_header(task: str, metric: Metric) -> str:
    return task_title(task) if metric == ACCURACY else f"{task_title(task)} ({metric.title})"


def _score_table_rows(
    run: DriftRun, options: ExhibitOptions, metrics: Mapping[str, Metric], is_one_of_many: bool
) -> list[_TableRow]:
    method = str(run.manifest.merge.get("title") or spec_section(run, "merge").get("method", ""))
    merged = variant_title("merged")
    labels = {"base": variant_title("base"), "expert": "experts"}
    labels["merged"] = f"{merged} ({method.replace('_', ' ')})" if method and merged == "merged" else merged
    labels |= {variant: variant_title(variant) for variant in _variants_after_merged(run, options)}
    lines = []
    for variant, label in labels.items():
        scores = {task: variant_score(run, task, variant, metric) for task, metric in metrics.items()}
        if all(math.isnan(score.value) for score in scores.values()):
            continue
        cells = {
            _task_column_header(task, metrics[task]): _TableCell.from_fraction(score) for task, score in scores.items()
        }
        cells[AVERAGE] = _TableCell.from_fraction(mean_over_tasks([*scores.values()]))
        if variant not in ("base", "expert", "merged") and "merged" in run.variants:
            pair = ("merged", variant)
            gains = [score_change(run, run, task, pair, metric) for task, metric in metrics.items()]
            cells[GAIN] = _TableCell.from_fraction(mean_over_tasks(gains), is_signed=True)
        lines.append(_TableRow(label, cells, run.id, variant, run.name if is_one_of_many else ""))
    return _mark_significant_best(run, lines, metrics)


def _mark_significant_best(
    run: DriftRun, lines: Sequence[_TableRow], metrics: Mapping[str, Metric]
) -> list[_TableRow]:
    """Mark the best cell of each column if its paired lead over the next best is significant."""
    rivals = [line for line in lines if line.variant not in ("base", "expert")]
    columns = {_task_column_header(task, metric): [task] for task, metric in metrics.items()} | {AVERAGE: [*metrics]}
    best = set()
    for column, tasks in columns.items():
        ranked = sorted(rivals, key=lambda line: -float(line.cells[column].value))
        ranked = [line for line in ranked if not math.isnan(float(line.cells[column].value))]
        if len(ranked) > 1:
            pair = (ranked[1].variant, ranked[0].variant)
            lead = mean_over_tasks([score_change(run, run, task, pair, metrics[task]) for task in tasks])
            best |= {(ranked[0].variant, column)} if lead.low > 0 else set()
    return [
        replace(
            line,
            cells={
                column: replace(cell, is_best=(line.variant, column) in best) for column, cell in line.cells.items()
            },
        )
        for line in lines
    ]


def _variants_after_merged(run: DriftRun, options: ExhibitOptions) -> tuple[str, ...]:
    """Return the table's variants after merged: baselines, then each control with its calibration."""
    names = [name for name in run.variants if variant_kind(name) == "baseline" and not is_control(name)]
    for variant in run.variants:
        if variant_kind(variant) == "calibrated" and options.shows_calibrated(run, variant):
            control = control_variant(variant.partition(":")[2])
            names += [name for name in (control, variant) if name in run.variants]
    return tuple(names)


@table("runtime", title="Cost of a calibration")
def _calibration_cost_table(runs: Sequence[DriftRun], options: ExhibitOptions) -> ExhibitResult:
    """Return the table of time, energy, memory and speed-up of every calibration."""
    lines: list[_TableRow] = []
    for run in runs:
        used = run.resources().set_index("phase")
        for name, info in run.manifest.calibrations.items():
            variant = calibrated_variant(name)
            if variant not in run.variants or not options.shows_calibrated(run, variant):
                continue
            row = used.loc[f"calibrate:{name}"] if f"calibrate:{name}" in used.index else {}
            costs = (info.seconds, row.get("energy_wh"), row.get("peak_rss_bytes"))
            time, energy, memory = (math.nan if pd.isna(cost) else float(cost) for cost in costs)
            baseline = float(lines[0].cells[_TIME].value) if lines else time
            cells = {
                _SPEEDUP: _TableCell(baseline / time if time > 0 else math.nan, digits=None),
                _TIME: _TableCell(time),
                _ENERGY: _TableCell(energy),
                _MEMORY: _TableCell(memory / 2.0**30),
            }
            lines.append(_TableRow(task_title(name), cells, run.id, variant, run.name if len(runs) > 1 else ""))
    over = f" Speed-up: over {lines[0].label}." if lines else ""
    about = (
        "Wall time of the calibration alone; peak resident memory of the process up to its end; energy where the "
        "machine reports it."
    )
    missing = [] if lines else [MissingPart("Measured rows", f"`{CALIBRATE}` adds one")]
    shown = [run for run in runs if run.manifest.calibrations]
    caption = f"Cost of calibrating a merged model.{over}"
    return _finish_tables(
        "runtime", options, "Calibration", [lines], caption, shown, [about] if lines else [], missing
    )


@table("self-checks", title="Self-checks")
def _self_checks_table(runs: Sequence[DriftRun], options: ExhibitOptions) -> ExhibitResult:
    """Return the table of self-checks: largest error of each identity that is exact in theory, limit and location."""
    lines, missing = [], []
    for run in runs:
        block = run.name if len(runs) > 1 else ""
        for check in run_self_checks(run).results:
            holds = ("yes" if check.status == "pass" else "NO") if check.where else "not measured"
            cells = {
                "Claim": _TableCell(check.claim),
                "Largest error": _TableCell(check.value, digits=None),
                "Limit": _TableCell(check.threshold, digits=None),
                "Holds": _TableCell(holds),
                "Where": _TableCell(check.where or "--"),
            }
            lines.append(_TableRow(check.metric, cells, run.id, block=block))
            if not check.where:
                name = ", ".join(filter(None, [check.metric, block]))
                missing.append(MissingPart(name, f"`{self_check_command(check.metric)}` measures it"))
    caption = (
        "Self-checks: claims that are exact in theory, and the largest error over all tasks, variants and layers."
    )
    note = "A check that was not measured does not count as holding."
    return _finish_tables("self-checks", options, "Check", [lines], caption, runs, [note], missing)


def _finish_tables(
    name: str,
    options: ExhibitOptions,
    label: str,
    parts: Sequence[Sequence[_TableRow]],
    caption: str,
    runs: Sequence[DriftRun],
    notes: Sequence[str],
    missing: Sequence[MissingPart],
) -> ExhibitResult:
    """Convert tables to LaTeX and plain data, one LaTeX table each."""
    lacking = [f"Not shown: {gap.name} ({gap.missing})." for gap in missing]
    frames = [_latex_cell_frame(lines, label) for lines in parts or [[]]]
    latex = latex_tables(frames, name, [caption] * len(frames), [*notes, *lacking])
    return ExhibitResult(
        _long_format_data(parts),
        *split_caption(options, [caption, *notes], runs, missing),
        latex=latex,
        missing=tuple(missing),
    )


def _latex_cell_frame(lines: Sequence[_TableRow], label: str) -> pd.DataFrame:
    """Return a data frame of LaTeX cells, with run names first if there are several runs."""
    heads = list(dict.fromkeys(head for line in lines for head in line.cells))
    gap = _TableCell(math.nan)
    with_interval = heads if len(heads) <= _MOST_INTERVALS else [AVERAGE, GAIN]
    rows = []
    for line in lines:
        cells = {
            escape_latex(head): line.cells.get(head, gap).text(has_interval=head in with_interval) for head in heads
        }
        rows.append({label: escape_latex(line.label), **cells})
    frame = pd.DataFrame(rows)
    if any(line.block for line in lines):
        blocks = pd.Series([escape_latex(line.block) for line in lines])
        # Each run is named once, in the first of its rows.
        frame.insert(0, "Run", blocks.mask(blocks == blocks.shift(), ""))
    return frame


def _long_format_data(parts: Sequence[Sequence[_TableRow]]) -> pd.DataFrame:
    rows = [
        {
            **{
                "part": part,
                "block": line.block,
                "row": line.label,
                "run": line.run,
                "variant": line.variant,
            },
            "column": head,
            "value": math.nan if isinstance(cell.value, str) else cell.value,
            "text": cell.value if isinstance(cell.value, str) else "",
            **{"ci_low": cell.low, "ci_high": cell.high, "n": cell.n or None},
        }
        for part, lines in enumerate(parts, start=1)
        for line in lines
        for head, cell in line.cells.items()
    ]
    return pd.DataFrame(rows, columns=list(_COLUMNS)).astype({"value": "float64", "n": "Int64"})


def escape_latex(text: str) -> str:
    """Escape text for LaTeX: no command, markup or line break remains."""
    return "".join(_SPECIAL.get(letter, letter) for letter in strip_control_chars(text))


def sentence_latex(text: str) -> str:
    """Escape a sentence for LaTeX, with text between backticks as code."""

    def latex_code(part: str) -> str:
        literal = "".join(_LITERAL.get(letter, letter) for letter in escape_latex(part))
        return rf"\texttt{{{literal}}}".replace(r"\_", r"{\char95}")

    return map_code_spans(text, escape_latex, latex_code)


def format_number(value: float, digits: int | None = None) -> str:
    """Format a number with fixed decimals, or with three significant digits; a dash for NaN."""
    if math.isnan(value):
        return "--"
    if digits is not None:
        return _with_latex_minus(f"{value:.{digits}f}")
    mantissa, _, exponent = f"{value:.3g}".partition("e")
    if not exponent:
        return _with_latex_minus(mantissa)
    power = f"$10^{{{int(exponent)}}}$"
    return power if mantissa == "1" else rf"{_with_latex_minus(mantissa)} $\times$ {power}"


def _with_latex_minus(text: str) -> str:
    # A hyphen is too short for a minus.
    return text.replace("-", "$-$")


def latex_tables(frames: Sequence[pd.DataFrame], name: str, captions: Sequence[str], notes: Sequence[str]) -> str:
    """Return one LaTeX table environment per data frame, with numbered labels.

    Args:
        frames: cells and heads as LaTeX, see `latex_table`.
        name: suffix of the labels after `tab:drift-`.
        captions: a plain sentence per frame.
        notes: plain sentences below the last table.
    """
    names = [name, *(f"{name}-{number}" for number in range(2, len(frames) + 1))]
    below = [*[()] * (len(frames) - 1), notes]
    return "\n".join(map(latex_table, frames, names, captions, below))


def latex_table(frame: pd.DataFrame, name: str, caption: str, notes: Sequence[str] = ()) -> str:
    """Return a data frame as a LaTeX table environment.

    Args:
        frame: escaped cells and heads; the index is not shown.
        name: suffix of the label after `tab:drift-`.
        caption: a plain sentence.
        notes: plain sentences below the table.
    """
    label = f"tab:drift-{re.sub(r'[^A-Za-z0-9.:-]+', '-', name)}"
    below = " ".join(map(sentence_latex, notes))
    below = f"\\par\\smallskip{{\\footnotesize\\raggedright {below}\\par}}\n" if below else ""
    if frame.empty:
        head = (
            f"{_NEEDS}\\begin{{table}}[t]\n\\centering\n\\caption{{{sentence_latex(caption)}}}\n\\label{{{label}}}\n"
        )
        return f"{head}{below}\\end{{table}}\n"
    width = sum(
        3 + max(len(_COMMAND.sub("", str(text))) for text in (head, *frame.iloc[:, place]))
        for place, head in enumerate(frame.columns)
    )
    environment = "table*" if width > _COLUMN else "table"
    # Words are aligned to the left, numbers to the right.
    columns = (frame.iloc[:, place] for place in range(frame.shape[1]))
    text = frame.style.hide(axis="index").to_latex(
        hrules=True,
        caption=sentence_latex(caption),
        label=label,
        environment=environment,
        position="t",
        position_float="centering",
        column_format="".join("r" if all(map(_NUMBER.match, cells)) else "l" for cells in columns),
    )
    # pandas' Styler has no option for the font size.
    text = text.replace("\\begin{tabular}", "\\footnotesize\n\\begin{tabular}", 1)
    if width > _PAGE:
        text = text.replace("\\begin{tabular}", "\\resizebox{\\linewidth}{!}{%\n\\begin{tabular}", 1)
        text = text.replace("\\end{tabular}", "\\end{tabular}}", 1)
    return _NEEDS + text.replace(f"\\end{{{environment}}}", f"{below}\\end{{{environment}}}")
