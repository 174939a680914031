"""Calibration images under corruptions, from one source image."""

from __future__ import annotations

from collections.abc import Sequence

from driftlens.records.run import DriftRun
from driftlens_reports.paper import captions
from driftlens_reports.paper.exhibit import Exhibited, ExhibitOptions, Panel
from driftlens_reports.paper.plate import Plate, framed_note
from driftlens_reports.paper.style import figure, venue_of

SEVERITY = 3
KINDS = ("clean", "Gaussian noise", "motion blur", "fog")
_MISSING = "needs a study with corrupted calibration images; runs of this version hold none"


@figure("corruptions", title="Calibration images under corruptions", paper="Figure 4")
def corruptions(runs: Sequence[DriftRun], options: ExhibitOptions) -> Exhibited:
    """One image, clean and under each corruption; notes until a run holds a corruption study."""
    rows, columns = (2, 2) if venue_of(options.width) == "icml-column" else (1, 4)
    plate = Plate(options.width, rows * (options.width / columns + 0.04 * options.width))
    cells = plate.figure.subplots(rows, columns, squeeze=False)
    for axes, kind in zip(cells.ravel(), KINDS, strict=True):
        axes.set_box_aspect(1)
        framed_note(axes, Panel(kind if kind == "clean" else f"{kind}, severity {SEVERITY}", _MISSING))
    plate.lack("corrupted calibration images", _MISSING)
    caption = ["The same calibration image, clean and under each corruption.", *captions.origin(runs)]
    return plate.exhibited(captions.together([*caption, *captions.gaps(plate.missing)]))
