"""The running drift curve of a calibration: one point per finished layer, from the run's events."""

from __future__ import annotations

import json
from collections.abc import Mapping

from driftlens.records.layout import EVENTS
from driftlens_app.jobs.record import Job

_TAIL_BYTES = 1_000_000


def running_drift(job: Job) -> dict[int, float]:
    """Mean drift at the boundary behind each layer that the job has calibrated, by layer index."""
    found: dict[int, float] = {}
    for event in _events(job):
        numbers = event.get("metrics", event)
        layer, drift = numbers.get("layer"), numbers.get("drift_l2_mean")
        if isinstance(layer, int | float) and isinstance(drift, int | float):
            found[int(layer)] = float(drift)
    return dict(sorted(found.items()))


def _events(job: Job) -> list[Mapping[str, object]]:
    """Events since the job began; half a line at the end is left for the next look."""
    try:
        with (job.run / EVENTS).open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and str(event.get("time", "")) >= job.started:
            found.append(event)
    return found
