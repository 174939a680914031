"""The three runs that a stranger is asked about: `questions.md` here shows them, and tests hold the page to them."""

from __future__ import annotations

from pathlib import Path

from driftlens.runs.manifest import Manifest
from driftlens.runs.run import DriftRun
from tests.runs.drawn_runs import run_of
from tests.runs.judged import at

NUM = 500
RUNS = {
    "good": at(base=[310, 330, 290], expert=[470, 480, 460], merged=[462, 474, 455]),
    "below": at(base=[330, 340, 300], expert=[450, 470, 440], merged=[260, 300, 210], cal=[320, 345, 262]),
    "expert": at(base=[330, 400, 300], expert=[450, 310, 440], merged=[400, 330, 380]),
}
"""Right answers of 500: a good merge, a merge below its base, and one of whose experts is itself bad."""
BY_LAYER = {2: (0.12, 0.08, 0.16), 3: (0.44, 0.38, 0.5)}


def stranger(manifest: Manifest, name: str) -> DriftRun:
    """One of the runs, with the predictions of its test samples."""
    made = run_of(manifest, RUNS[name], NUM, BY_LAYER, stored=True)
    run = DriftRun(Path("runs") / name, made.manifest)
    run._frames |= made._frames
    return run
