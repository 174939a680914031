"""The jobs that a page may ask for, as arguments of the command line, and the spec files that one may read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from driftlens.config.requests import DEFAULT_METHOD, CalibrationRequest, SweepRequest
from driftlens.results.verdict import merges_to_compare
from driftlens.runs.manifest import COMPARISON, MANIFEST, MERGES, SPEC, read_manifest
from driftlens.runs.run import DriftRun
from driftlens.utils.errors import SpecError, join_names
from driftlens.utils.files import list_folder
from driftlens_app.calibration import available_methods, require_free_name
from driftlens_app.processes import JobRequest, Kind, newest_job
from driftlens_app.settings import Settings, is_file_inside, is_inside, require_root_exists

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,79}")
_PROGRESS = ("--progress", "jsonl")
_SUFFIXES = (".yaml", ".yml")
# Larger YAML files are not offered as specs, nor more than this many files.
MAX_SPEC_BYTES = 1_000_000
_MAX_FILES = 200
# Default folder of `driftlens demo`.
DEMO = "driftlens-demo"

SUITES = {
    "text": "Texts: a small language model and four experts",
    "image": "Images: a small CLIP and eight experts",
}
"""Values of `driftlens demo --suite`, with labels."""


def demo_request(settings: Settings, suite: str = "text") -> JobRequest:
    """Build the job request of a demo run; an unfinished demo is restarted."""
    run = settings.root / DEMO
    earlier = newest_job(run)
    force = ("--force",) if earlier is not None and _has_readable_manifest(run) else ()
    arguments = ("demo", "--suite", suite, "--out", str(run), *force, *_PROGRESS)
    return JobRequest("demo", "Demo run", run, arguments, {"suite": suite})


def merge_comparisons(root: Path) -> list[str]:
    """List the folders in the root that store a comparison of merges, newest first."""
    files = [folder / COMPARISON for folder in list_folder(root) if is_file_inside(folder / COMPARISON)]
    return [file.parent.name for file in sorted(files, key=lambda file: -file.stat().st_mtime_ns)]


def _new_run_folder(settings: Settings, name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise SpecError(
            f"{name!r} is not a valid folder name",
            hint="Use at most 80 letters, digits, `-`, `_` and `.`.",
        )
    run = settings.root / name
    if run.is_symlink() or (run.exists() and not run.is_dir()):
        raise SpecError(f"{name} exists already", hint="Choose another name.")
    return run


def new_spec_path(settings: Settings, name: str) -> Path:
    """Return the path of a new spec file; raise SpecError if the name is taken."""
    run, file = _new_run_folder(settings, name), settings.root / f"{name}.yaml"
    # `exists` is False for a dangling link, which writing would follow.
    for place in (run, file):
        if place.exists() or place.is_symlink():
            raise SpecError(f"{place.name} exists already", hint="Choose another name.")
    return file


def analyze_request(settings: Settings, spec: str, name: str) -> JobRequest:
    """Build the job request of an analysis in the new folder `name`, or in one that a job left unfinished."""
    run, file = _new_run_folder(settings, name), spec_file_path(settings.root, spec)
    resume = ("--resume",) if _has_readable_manifest(run) and newest_job(run) is not None else ()
    # A run has one name, that of its folder, whatever the spec calls it.
    arguments = ("analyze", str(file), "--out", str(run), f"--set=name={json.dumps(name)}", *resume, *_PROGRESS)
    return JobRequest("analyze", name, run, arguments, {"spec": spec, "name": name})


def resume_request(run: DriftRun) -> JobRequest:
    """Build the job request that resumes a stopped analysis."""
    arguments = ("analyze", str(run.path / SPEC), "--out", str(run.path), "--resume", *_PROGRESS)
    return JobRequest("analyze", run.path.name, run.path, arguments)


def _request_for_run(kind: Kind, name: str, run: DriftRun, /, *words: str, **settings: Any) -> JobRequest:
    """Build the job request of a command that adds results to an existing run."""
    # Positional-only, since `settings` may have the keys `kind` and `name`.
    return JobRequest(kind, name, run.path, (kind, str(run.path), *words, *_PROGRESS), settings)


def calibrate_request(run: DriftRun, request: CalibrationRequest) -> JobRequest:
    """Build the job request of a calibration; raise SpecError if its name is taken."""
    require_free_name(request, run.manifest.calibrations)
    # Without a name, the calibration is named after the method that it chooses.
    name = request.name or "auto"
    return _request_for_run("calibrate", name, run, *request.to_cli_args(), **request.model_dump(mode="json"))


def sweep_request(run: DriftRun) -> JobRequest:
    """Build the job request of a sweep of FeatCal's coefficients around their published values, one at a time."""
    method = available_methods()[DEFAULT_METHOD]
    preset = str(method.preset_for(run.manifest.model_kinds))
    words = ["--resume", f"--preset={preset}"]
    for name, factors in method.swept.items():
        if name not in method.of_base or "base" in run.variants:
            high, centre = method.settings[name].get("maximum"), method.presets[preset][name]
            values = sorted({min(factor * centre, high or math.inf) for factor in factors})
            words.append(f"--param={name}={','.join(f'{value:g}' for value in values)}")
    return _request_for_run("sweep", join_names(method.swept), run, *words)


def compare_methods_request(run: DriftRun, names: Sequence[str]) -> JobRequest:
    """Build the job request that calibrates one run with several methods on the same samples."""
    if not names:
        raise SpecError("no method is selected", hint="Select at least two.")
    return _request_for_run("sweep", ",".join(names), run, *SweepRequest(methods=names).to_cli_args())


def compare_merges_request(run: DriftRun) -> JobRequest:
    """Build the job request that ranks merges of the run's experts, each with its default settings."""
    where = (str(run.path / SPEC), f"--compare={merges_to_compare(run)}", f"--out={run.path / MERGES}")
    return JobRequest("merge", run.path.name, run.path, ("merge", *where, *_PROGRESS))


def attribution_request(run: DriftRun) -> JobRequest:
    """Build the job request that attributes drift to layers for variants without attribution."""
    return JobRequest("explain", run.path.name, run.path, ("analyze", str(run.path), *_PROGRESS))


def _has_readable_manifest(folder: Path) -> bool:
    try:
        read_manifest(folder)
    # RunError is an OSError.
    except OSError:
        return False
    return True


def spec_files(root: Path) -> list[str]:
    """List the YAML spec files in the root and its folders, without the specs stored in runs."""
    require_root_exists(root)
    folders = [root, *(child for child in list_folder(root) if child.is_dir())]
    paths = [
        file.relative_to(root).as_posix()
        for folder in folders
        if not folder.name.startswith(".") and not (folder / MANIFEST).exists() and is_inside(folder, root)
        for file in list_folder(folder)
        if file.suffix.lower() in _SUFFIXES and file.is_file() and is_inside(file, root)
        if file.stat().st_size <= MAX_SPEC_BYTES
    ]
    return sorted(paths)[:_MAX_FILES]


def spec_file_path(root: Path, relative: str) -> Path:
    """Return the path of a listed spec file; raise SpecError for any other path from the browser."""
    if relative not in spec_files(root):
        raise SpecError(f"this folder has no spec {relative!r}", hint="Choose one from the list.")
    return root / relative
