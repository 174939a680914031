"""What is known of a calibration before the command line is asked: what the last one took, what is in its way."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from driftlens.errors import DriftLensError
from driftlens.files import free_bytes
from driftlens.progress_sinks import duration
from driftlens.records.layout import SPEC
from driftlens.records.lock import require_unlocked
from driftlens.records.run import DriftRun
from driftlens.spec import RunSpec, load_spec
from driftlens_app.texts import plain
from driftlens_reports.wording import size


def show_outlook(run: DriftRun) -> None:
    """Draw what a calibration would stumble over, and what the last work of its kind took on this run."""
    for text in obstacles(run):
        st.warning(f"A calibration can't begin: {plain(text)}", icon=":material/warning:")
    st.caption(plain(past_cost(run)))


def obstacles(run: DriftRun) -> list[str]:
    """What would stop any calibration of the run, as far as files tell; a dry run finds more."""
    try:
        require_unlocked(run.path)
        if run.manifest.architecture.get("loader") == "live":
            return ["the run was made from live modules, which are not there any more"]
        files = _weights(load_spec(run.path / SPEC))
        return [*_missing(files), *_lack_of_room(run, files)]
    except DriftLensError as error:
        return [". ".join(filter(None, (error.message, error.hint)))]


def past_cost(run: DriftRun) -> str:
    """What the run's last calibration took, or its analysis where there was none: measured, not estimated.

    Raises:
        RunError: the table of resources can't be read.
    """
    phases = run.manifest.phases
    what, of_it = "The analysis", {name for name in phases if not name.startswith("calibrate:")}
    for name in run.manifest.calibrations:  # in the order in which they were finished
        if own := {phase for phase in phases if f"{phase}:".startswith(f"calibrate:{name}:")}:
            what, of_it = f"The calibration {name}", own
    took = duration(sum(phases[name].seconds for name in of_it))
    rows = run.resources()
    peak = rows[rows["phase"].isin(of_it)]["peak_rss_bytes"].dropna()
    memory = "" if peak.empty else f" and up to {size(peak.max())} of memory"
    return f"{what} of this run took {took}{memory}. Press Estimate for the settings above."


def _weights(spec: RunSpec) -> list[Path]:
    """The files and folders of weights that the spec names; a name from the Hub is none."""
    parts = [spec.base, spec.merged, *spec.experts.values()]
    files = dict.fromkeys(Path(part.weights) for part in parts if part is not None)
    return [file for file in files if file.is_absolute()]


def _missing(files: list[Path]) -> list[str]:
    gone = [file for file in files if not file.exists()]
    if not gone:
        return []
    more = f" and {len(gone) - 1} more" if len(gone) > 1 else ""
    return [f"there is no file {gone[0]}{more}; the run's spec names weights that have moved or were removed"]


def _lack_of_room(run: DriftRun, files: list[Path]) -> list[str]:
    """Whether not even the calibrated weights would fit, which are as large as one of these files."""
    need = max((file.stat().st_size for file in files if file.is_file()), default=0)
    free = free_bytes(run.path)
    return [f"its weights need {size(need)}, and the disk has {size(free)} free"] if free < need else []
