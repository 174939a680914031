"""The gallery of a run: a few figures as small pictures, and a light report; the README's pictures, of another run.

python -m tests.reports.gallery RUN OUT [--opening RUN] [--docs FOLDER]
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

from PIL import Image

from driftlens.base.files import PathLike
from driftlens.runs.run import DriftRun, open_run
from driftlens_reports.build import Report
from driftlens_reports.paper.exhibit import ExhibitOptions
from driftlens_reports.paper.export import draw
from tests.reports.morph import write_morph

# Without setup and environment, which name folders and versions of one machine.
SECTIONS = ("verdict", "layers", "decomposition", "origins", "cosine", "outputs", "calibration", "checks")
FIGURES = (
    "intro",
    "drift",
    "decomposition",
    "contributions",
    "amplification",
    "output-drift",
)

DOCS = {
    "drift.png": "decomposition",
    "shares.png": "contributions",
    "images.png": "intro",
}
"""Pictures of the site's pages, by file name, and the figure in each."""


def write_gallery(run: DriftRun, out: PathLike) -> tuple[Path, ...]:
    """The files written to the folder `out`: a picture of each figure, and `report-light.html`.

    Raises:
        RunError: the run can't be read, or the folder can't be written to.
    """
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    pictures = [draw(name, [run], ExhibitOptions()).save(folder / f"{name}.png") for name in FIGURES]
    Report(run, sections=SECTIONS).save(folder, formats=["html-light"])
    return (*pictures, folder / "report-light.html")


def _write_small(run: DriftRun, path: Path, name: str = "intro") -> None:
    """A figure of a run, by default the opening one, as small as a page shows it."""
    drawn = io.BytesIO(draw(name, [run], ExhibitOptions()).content("png"))
    with Image.open(drawn) as picture:
        picture = picture.convert("RGB")
        picture.thumbnail((1400, 1400))
        picture.quantize(96).save(path, optimize=True)


def main() -> None:
    """Write the gallery of one run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", help="a run directory")
    parser.add_argument("out", help="the folder to write to")
    parser.add_argument("--docs", metavar="FOLDER", help="where the pictures of the site's pages go")
    parser.add_argument("--opening", metavar="RUN", help="the run of the README's hero.png and morph.gif")
    arguments = parser.parse_args()
    if arguments.opening:
        _write_small(open_run(arguments.opening), Path(arguments.out) / "hero.png")
        write_morph(open_run(arguments.opening), Path(arguments.out) / "morph.gif")
    if arguments.docs:
        for picture, name in DOCS.items():
            _write_small(open_run(arguments.run), Path(arguments.docs) / picture, name)
    for path in write_gallery(open_run(arguments.run), arguments.out):
        print(path)


if __name__ == "__main__":
    main()
