"""Draws the pictures of README and docs from runs.

python -m tests.reports.gallery IMAGES TEXTS

IMAGES is a run of `driftlens demo --suite image`, TEXTS one of `driftlens demo`.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

from PIL import Image

from driftlens.runs.run import DriftRun, open_run
from driftlens_reports.paper.exhibit import ExhibitOptions, draw_exhibit
from tests.reports.morph import write_morph

ROOT = Path(__file__).parents[2]
DOCS = {"drift.png": "decomposition", "shares.png": "contributions", "images.png": "intro"}
"""Pictures of the site's pages by file name, and the figure in each."""


def write_docs(run: DriftRun, folder: Path) -> None:
    """Write the pictures of the site's pages, as small as a page shows them."""
    for file, name in DOCS.items():
        drawn = io.BytesIO(draw_exhibit(name, [run], ExhibitOptions()).content("png"))
        with Image.open(drawn) as picture:
            picture = picture.convert("RGB")
            picture.thumbnail((1400, 1400))
            picture.quantize(96).save(folder / file, optimize=True)


def main() -> None:
    """Write all pictures to their places in the repository."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("images", help="a run directory")
    parser.add_argument("texts", help="a run directory")
    arguments = parser.parse_args()
    write_docs(open_run(arguments.images), ROOT / "docs/assets")
    write_morph(open_run(arguments.texts), ROOT / "reports/gallery/morph.gif")


if __name__ == "__main__":
    main()
