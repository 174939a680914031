"""The page of figures in docs, made from the stored figures: `python -m benchmarks.table`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.figures import Figure, read_figures

PAGE = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"

HEAD = """# Benchmarks

`make bench` measures figures, stores them in `benchmarks/figures.csv` and writes this page from them; `make bench
NAMES="memory text"` measures some. `python -m benchmarks NAME` only prints. Durations of different machines or versions
are not comparable.

The real image and text models are not part of this repository. Texts are answered by a small Llama unless the row names
T5. A range in brackets is a 95 % interval; ± is a standard error over draws of samples unless stated otherwise.
"""


class Subject(NamedTuple):
    """A group of benchmarks on the page, with the settings that their rows share."""

    title: str
    settings: str
    benchmarks: Sequence[str]
    picture: str = ""


SUBJECTS = (
    Subject(
        "Repairs compared",
        "64 unlabelled calibration samples per task, Task Arithmetic 0.3, published settings, four tasks, five draws "
        "of samples. Scores are means over tasks on all test samples (2,740 images, accuracy; 800 texts, exact match). "
        "Surgery adds 16,384 numbers per task, ProbSurgery 131,072, and both need the task of an input; the others add "
        "none. On the texts, residual calibration, Surgery and ProbSurgery are not clearly better than FeatCal.",
        ("repairs", "embeddings", "language_experts"),
    ),
    Subject(
        "Automatic choice",
        "`automatic`: `--auto` on five draws of 64 samples of each of three real suites. Calibration samples were "
        "training samples of experts, and the merge was at least as good as the base. Rows without a version of "
        "torch are of a version that compared more candidates. `criteria`: sub-suites of the three suites, drawn "
        "at random: three or four tasks, merge strengths 0.2 to 0.6, 8, 16 or 64 samples per task, in about half "
        "of the sub-suites not seen by the experts; in some, experts are moved 50 to 70 % back to the base and "
        "merged with strength 1 to 2, so that the base is strong. Values are regrets: test score of the best of 14 "
        "candidates minus that of the chosen one, with the 95 % interval over sub-suites. Candidates are made from "
        "one half of the samples, and judged on the other half and on an augmented copy of each sample, unless the "
        "row says otherwise. Experts beyond the trained ones are extrapolated from the base by 1.5 to 1.75. In two "
        "of these three sub-suites, the best model lies between base and repair and is better than the experts "
        "themselves, which no distance to the experts can find.",
        ("automatic", "criteria"),
    ),
    Subject(
        "Merge methods with and without FeatCal",
        "Published settings, one seed, 128 calibration samples per task. The change is FeatCal minus merged in points "
        "with its 95 % interval, paired by test sample. `slerp` merges two experts only.",
        ("mergers",),
    ),
    Subject(
        "Speed",
        "CPU seconds of interleaved runs, float32 features, float64 solves.",
        (
            "attribution",
            "calibration",
            "residual",
            "text",
            "processes",
            "peers",
            "merging",
            "commands",
            "why",
            "growth",
            "device",
        ),
        "![CPU time of diagnosis, FeatCal and residual calibration against layers, width, tasks and samples]"
        "(assets/growth.png)",
    ),
    Subject("Memory", "Peak resident memory of one process.", ("memory", "mixtures")),
    Subject(
        "Large models",
        "Two layers are measured, in CPU seconds per layer. Time and memory of whole models are these, scaled by "
        "counted multiplications and bytes; traffic is counted.",
        ("layers",),
    ),
    Subject(
        "Dashboard and reports",
        "Runs of 8 tasks, 12 blocks and 256 samples, in a headless browser that draws in software.",
        ("report", "dashboard", "pages", "explorer"),
    ),
)


def page(figures: Sequence[Figure]) -> str:
    """Return the page: the machines, then the figures by subject."""
    places = list(dict.fromkeys((figure.machine, figure.torch) for figure in figures))
    letters = {place: chr(ord("A") + number) for number, place in enumerate(places)}
    machines = (
        f"- {letters[machine, torch]}: {machine}, torch {torch or 'not noted; the date is that of the commit'}"
        for machine, torch in places
    )
    return "\n".join([HEAD, "Machines:", "", *machines, *_sections(figures, letters), ""])


def _sections(figures: Sequence[Figure], letters: dict[tuple[str, str], str]) -> Iterator[str]:
    for subject in SUBJECTS:
        rows = [figure for name in subject.benchmarks for figure in figures if figure.benchmark == name]
        if rows:
            yield f"\n## {subject.title}\n\n{subject.settings}\n"
            yield "| benchmark | figure | value | target | measured |\n|---|---|---|---|---|"
        for row in rows:
            where = f"{row.date}, {row.commit}, {letters[row.machine, row.torch]}"
            yield f"| `{row.benchmark}` | {row.figure} | {row.value} | {row.target} | {where} |"
        if rows and subject.picture:
            yield f"\n{subject.picture}"


if __name__ == "__main__":
    PAGE.write_text(page(read_figures()), encoding="utf-8")
