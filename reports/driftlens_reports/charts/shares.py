"""Colours and hatches of what becomes of a decision: heavier is worse, also without colour."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from driftlens_reports.charts.theme import palette


@dataclass(frozen=True)
class Outcome:
    """One outcome of a decision: its column, where in the sequential scale its colour stands, its hatch."""

    name: str
    shade: int
    hatch: str


CERTIFIED = Outcome("certified", 1, "")
KEPT_ONLY = Outcome("kept without certificate", 3, "/")
KEPT = Outcome("kept", 1, "")
FLIPPED = Outcome("flipped", 5, "x")


def marker(outcome: Outcome, *, dark: bool) -> dict[str, Any]:
    """How bars of the outcome are filled."""
    colours = palette(dark)
    return {
        "color": colours.sequential[outcome.shade],
        "line": {"color": colours.quiet, "width": 0.5},
        "pattern": {"shape": outcome.hatch, "fillmode": "overlay", "size": 6, "solidity": 0.25},
    }
