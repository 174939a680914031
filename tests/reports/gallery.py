"""The gallery of a run: a few figures as small pictures, and a light report.

python -m tests.reports.gallery RUN OUT
"""

from __future__ import annotations

import argparse
import pathlib

from driftlens.files import PathLike
from driftlens.records.run import DriftRun, open_run
from driftlens_reports.build import Report
from driftlens_reports.paper.exhibit import ExhibitOptions
from driftlens_reports.paper.export import draw

# Without setup and environment, which name folders and versions of one machine.
SECTIONS = ("verdict", "layers", "decomposition", "origins", "cosine", "outputs", "calibration", "checks")
FIGURES = (
    "intro",
    "diagnostics",
    "decomposition",
    "contributions",
    "amplification",
    "output-drift",
    "heatmap",
)


def write_gallery(run: DriftRun, out: PathLike) -> tuple[pathlib.Path, ...]:
    """The files written to the folder `out`: a picture of each figure, and `report-light.html`.

    Raises:
        RunError: the run can't be read, or the folder can't be written to.
    """
    folder = pathlib.Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    pictures = [draw(name, [run], ExhibitOptions()).save(folder / f"{name}.png") for name in FIGURES]
    Report(run, sections=SECTIONS).save(folder, formats=["html-light"])
    return (*pictures, folder / "report-light.html")


def main() -> None:
    """Write the gallery of one run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", help="a run directory")
    parser.add_argument("out", help="the folder to write to")
    arguments = parser.parse_args()
    for path in write_gallery(open_run(arguments.run), arguments.out):
        print(path)


if __name__ == "__main__":
    main()
