"""What README and docs say of the embedded suites' demo runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from driftlens.runs.run import DriftRun
from tools.build_demo.__main__ import RECORD

ROOT = Path(__file__).parents[1]
RESIDUAL = "calibrated:residual"
ROWS = {"image": ("| image demo:", "| images,"), "text": ("| text demo:", "| text,")}
"""How the rows of README and docs/why.md begin."""
SETTINGS = {"image": (0.05, 2.0, 0.3), "text": (1e-5, 0.5, 0.15)}


def has_published_numbers(run: DriftRun, suite: str) -> None:
    """All of the pages' means, of models that the package holds: only rounding can move a sample or two."""
    settings = run.manifest.calibrations["featcal"].settings
    assert (settings["lam"], settings["rho"], settings["alpha"]) == SETTINGS[suite]
    experts = run.accuracy().query("variant == 'expert'").set_index("task")["value"]
    accuracies = json.loads(RECORD.read_text())[suite]["test_accuracy"]
    measured = {name: each["expert"] for name, each in accuracies.items()}
    assert dict(experts) == pytest.approx(measured, abs=0.01)
    assert run.layers(variant=RESIDUAL, layer="final")["closure_error"].max() < 1e-4
    variants = ("base", "merged", "calibrated:featcal", RESIDUAL, "expert")
    rows = run.accuracy().groupby("variant")["value"].mean()
    found = [100 * float(rows[variant]) for variant in variants]
    readme, why = (
        (ROOT / name).read_text(encoding="utf-8").replace("**", "") for name in ("README.md", "docs/why.md")
    )
    lines = [line for page in (readme, why) for line in page.splitlines() if line.startswith(ROWS[suite])]
    assert len(lines) == 2
    for line in lines:
        numbers = [float(number) for number in re.findall(r"([\d.]+) %", line)]
        assert numbers == pytest.approx(found, abs=0.3), line
    if suite == "text":
        (closed,) = re.findall(r"closes (\d+) % of the gap", readme)
        assert float(closed) == pytest.approx(100 * (found[3] - found[1]) / (found[4] - found[1]), abs=1)
