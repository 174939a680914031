"""Import of scores that lm-evaluation-harness measured. Entry point: `attach_scores`."""

from __future__ import annotations

import hashlib
import logging
import math
import pathlib
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

import pandas as pd
from pydantic import TypeAdapter

from driftlens.runs.manifest import read_manifest, utc_now
from driftlens.runs.run import DriftRun, is_analyzed, open_run, resume_command
from driftlens.runs.writer import RunWriter
from driftlens.utils.errors import DataError, RunError, add_error_context, did_you_mean, shorten_list
from driftlens.utils.files import PathLike, parse_json, regular_file
from driftlens.utils.intervals import share_interval
from driftlens.utils.variants import ATTACHED, expert_name, metric_by_name

_Z = NormalDist().inv_cdf(0.975)
_ERROR = "_stderr"
# Spellings of missing and infinite numbers.
_NO_NUMBERS = ("nan", "inf", "-inf", "infinity", "none")
# Numbers among the metrics of a task that are counts.
_COUNTS = ("sample_len", "sample_count")


log = logging.getLogger("driftlens")


def attach_scores(run: PathLike, variant: str, results: PathLike) -> DriftRun:
    """Add scores measured by lm-evaluation-harness (0.3 or 0.4) to a variant of a run.

    Scores go into the accuracy table under the tool's names, `harness:acc` for example. Intervals come from standard
    errors or counts in the file. Percentages become shares in [0, 1]. Values that are not finite are left out and
    logged. Attaching again replaces earlier results of the same tasks.

    Args:
        run: folder of a finished run.
        variant: the model that was measured, also `expert:TASK`.
        results: the file of results.

    Raises:
        DataError: the file is not readable or not of this tool, or the run has no such variant.
        RunError: the run is unfinished.
    """
    folder, file = pathlib.Path(run), pathlib.Path(results)
    manifest = read_manifest(folder)
    models = [*manifest.variants, *map(expert_name, manifest.tasks)]
    if variant not in models:
        raise DataError(
            f"the run has no variant {variant!r}; it has {', '.join(models) or 'none'}",
            hint=did_you_mean(variant, models),
        )
    if not is_analyzed(manifest):
        raise RunError(f"{folder} is unfinished", hint=f"`{resume_command(folder, manifest)}` resumes it.")
    with add_error_context(file):
        content = regular_file(file).read_bytes()
        document = TypeAdapter(dict[str, Any]).validate_python(parse_json(content))
        scores = TypeAdapter(dict[str, dict[str, Any]]).validate_python(document.get("results", {}))
        rows = [
            {"variant": variant, **row} for row in _accuracy_rows(scores, _section_or_empty(document, "n-samples"))
        ]
    lost = [
        f"{task} {key}"
        for task, by_metric in scores.items()
        for key, value in by_metric.items()
        if _ERROR not in key and str(value).lower() in _NO_NUMBERS
    ]
    if lost:
        log.warning("notice: %s: left out, no finite number: %s", file, shorten_list(lost, 5))
    settings = _section_or_empty(document, "config")
    about = {
        **{"variant": variant, "file": file.name, "sha256": hashlib.sha256(content).hexdigest()},
        **{"tool": "lm-evaluation-harness", "version": document.get("lm_eval_version"), "date": document.get("date")},
        **{name: settings.get(name) for name in ("model", "model_args", "limit")},
        **{"tasks": list(dict.fromkeys(row["task"] for row in rows)), "left_out": lost, "attached": utc_now()},
    }
    with RunWriter.resume(folder) as writer:
        writer.append("accuracy", pd.DataFrame(rows), replace=True)
        writer.update_manifest(attached={f"{variant} {file.name}": about})
    return open_run(folder)


def _accuracy_rows(scores: Mapping[str, Mapping[str, Any]], counts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of the accuracy table for the scores of a file."""
    rows = []
    for task, by_metric in scores.items():
        counted = _section_or_empty(counts, task).get("effective")
        n = counted if isinstance(counted, int) and counted > 0 else None
        for key, value in by_metric.items():
            # Version 0.4 writes "acc,none" and "acc_stderr,none", 0.3 without the filter.
            name, comma, part = key.partition(",")
            if name.endswith(_ERROR) or name in _COUNTS or not _is_finite_number(value):
                continue
            stated: Any = by_metric.get(f"{name}{_ERROR}{comma}{part}")
            error = float(stated) if _is_finite_number(stated) else 0.0
            metric = metric_by_name(f"{ATTACHED}{name if part in ('', 'none') else key}")
            low, high = (
                sign * math.inf if end is None else end for end, sign in zip(metric.range, (-1, 1), strict=True)
            )
            # Some tasks write shares as percentages.
            if metric.kind == "share" and 1 < value <= 100:
                value, error = value / 100, error / 100
            if not low <= value <= high:
                raise DataError(f"{name} of {task} is {value:g}; expected {low:g} to {high:g}")
            ends = (math.nan, math.nan)
            # A standard error of 0 comes from equal answers; it is no certainty.
            if error > 0:
                ends = max(value - _Z * error, low), min(value + _Z * error, high)
            # Only a whole number of right answers is a share with Wilson's interval; means of partial scores aren't.
            elif n is not None and metric.kind == "share" and math.isclose(value * n, round(value * n)):
                ends = share_interval(value, n).ends[1:]
            row = {"task": task, "metric": metric.name, "value": float(value), "n": n}
            rows.append(row | dict(zip(("ci_low", "ci_high"), ends, strict=True)))
    if not rows:
        raise DataError("the results hold no number", hint="Give the results_*.json of `lm_eval --output_path`.")
    return rows


def _section_or_empty(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    part = document.get(name)
    return part if isinstance(part, dict) else {}


def _is_finite_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
