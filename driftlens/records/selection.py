"""How a calibration's settings were chosen, in a sentence that terminal, card, report and dashboard share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from driftlens.errors import DataError
from driftlens.records.run import DriftRun

_NAMES = {"lam": "lambda", "rho": "rho", "alpha": "alpha"}
_TOLD = {
    *("score", "start", "chosen", "is_start_kept", "found"),
    *("advantage", "standard_error", "candidates", "seconds"),
}
"""Entries of the record that the sentence is made from."""


def selection_sentences(run: DriftRun, name: str) -> list[str]:
    """What was chosen instead of what, by which held-out advantage and at what cost; none where nothing was chosen.

    Args:
        run: with the finished calibration.
        name: of the calibration.

    Raises:
        DataError: the run has no finished calibration of that name.
    """
    known = run.manifest.calibrations
    if name not in known:
        raise DataError(f"the run has no calibration {name!r}; it has {', '.join(known) or 'none'}")
    if not known[name].automatic:
        return []
    if not known[name].selection.keys() >= _TOLD:
        # A run from before the manifest told, or a chooser of the caller's own, which may keep any record.
        return [
            f"Settings were chosen from the calibration samples; calibrations/{name}/config.yaml says how."
        ]
    return [_sentence(known[name].selection)]


def _sentence(record: Mapping[str, Any]) -> str:
    tried = {tuple(trial[key] for key in _NAMES) for trial in record["candidates"]}
    cost = f"{len(tried)} settings tried in {record['seconds']:.0f} s"
    preset = record.get("preset", "")
    if not record["is_start_kept"]:
        origin = f"{preset}'s" if preset else "the given"
        return (
            f"Settings were chosen on held-out calibration samples: {_named(record['chosen'])} instead of {origin} "
            f"{_values(record['start'])}; {_gap(record)}; {cost}."
        )
    kept = f"{preset} was kept" if preset else f"the given {_named(record['start'])} were kept"
    if record["found"] == record["start"]:
        reason = "no other candidate did better"
    else:
        reason = (
            f"the best other candidate, {_named(record['found'])}, was not clearly better: {_gap(record)}"
        )
    return f"Settings were compared on held-out calibration samples and {kept}, as {reason}; {cost}."


def _gap(record: Mapping[str, Any]) -> str:
    """The held-out advantage of what was found over the start, with as many decimals as its error deserves."""
    has_heads = record["score"].startswith("KL")
    what, unit = ("KL", " nat") if has_heads else ("relative drift", "")
    advantage, error = record["advantage"], record["standard_error"]
    if advantage is None or error is None:
        return "it could not be solved for without the deciding samples"
    decimals = max(0, 1 - math.floor(math.log10(error))) if error > 0 else 3
    moved = f"{'higher' if advantage < 0 else 'lower'} by {abs(advantage):.{decimals}f}{unit}"
    return f"held-out {what} {moved} (standard error {error:.{decimals}f})"


def _named(settings: Mapping[str, float]) -> str:
    return ", ".join(f"{title} {settings[key]:g}" for key, title in _NAMES.items())


def _values(settings: Mapping[str, float]) -> str:
    return ", ".join(f"{settings[key]:g}" for key in _NAMES)
