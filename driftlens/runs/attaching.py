"""Scores that another tool has measured, beside a run's own: results of the lm-evaluation-harness."""

from __future__ import annotations

import hashlib
import math
import pathlib
from collections.abc import Iterator, Mapping
from statistics import NormalDist
from typing import Any

import pandas as pd

from driftlens.base.errors import DataError, RunError, did_you_mean
from driftlens.base.files import PathLike, from_json, plain_file
from driftlens.base.metrics import ATTACHED, metric_called
from driftlens.base.variants import expert_of
from driftlens.runs.manifest import read_manifest
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.standing import is_analyzed
from driftlens.runs.status import utc_now
from driftlens.runs.writer import RunWriter

_Z = NormalDist().inv_cdf(0.975)
_ERROR = "_stderr"
_COUNTS = ("sample_len", "sample_count")
"""Numbers beside the metrics of a task that are none."""


def attach(run: PathLike, variant: str, results: PathLike) -> DriftRun:
    """Put the results of an lm-evaluation-harness file (0.3 or 0.4) into a run, as scores of one of its models.

    They stand in the accuracy table under the names that the harness gives, `harness:acc` for example, of the tasks
    that it names; intervals are of the standard errors it states. The manifest keeps the file's digest. Attached again,
    a task's results take the place of the earlier ones. `variant` is what the harness has measured, `expert:TASK` too.
    """
    folder, file = pathlib.Path(run), pathlib.Path(results)
    manifest = read_manifest(folder)
    known = [*manifest.variants, *map(expert_of, manifest.tasks)]
    if variant not in known:
        raise DataError(
            f"the run has no variant {variant!r}; it has {', '.join(known) or 'none'}",
            hint=did_you_mean(variant, known),
        )
    if not is_analyzed(manifest):
        raise RunError(f"{folder} is unfinished", hint="`driftlens analyze ... --resume` goes on with it.")
    content = _content(file)
    document = _document(content, file)
    rows = [{"variant": variant, **row} for row in _rows(document, file)]
    settings = _part(document, "config")
    about = {
        **{"variant": variant, "file": file.name, "sha256": hashlib.sha256(content).hexdigest()},
        "tool": "lm-evaluation-harness",
        **{"version": document.get("lm_eval_version"), "date": document.get("date")},
        **{name: settings.get(name) for name in ("model", "model_args", "limit")},
        **{"tasks": list(dict.fromkeys(row["task"] for row in rows)), "attached": utc_now()},
    }
    with RunWriter.resume(folder) as writer:
        writer.append("accuracy", pd.DataFrame(rows), replace=True)
        writer.describe(attached={f"{variant} {file.name}": about})
    return open_run(folder)


def _content(file: pathlib.Path) -> bytes:
    try:
        return plain_file(file).read_bytes()
    except OSError as error:
        raise DataError(
            f"{file} can't be read: {error.strerror}",
            hint="Give the file that `lm_eval --output_path` wrote.",
        ) from error


def _document(content: bytes, file: pathlib.Path) -> dict[str, Any]:
    try:
        found = from_json(content)
    except ValueError as error:
        raise _refused(file, f"no JSON: {str(error).splitlines()[0]}") from error
    results = found.get("results") if isinstance(found, dict) else None
    if not isinstance(results, dict) or not all(isinstance(scores, dict) for scores in results.values()):
        raise _refused(file, "an object with `results: {task: {metric: value}}` is expected")
    return found


def _rows(found: Mapping[str, Any], file: pathlib.Path) -> list[dict[str, Any]]:
    counts = _part(found, "n-samples")
    rows = [
        {"task": task, **row, "n": _count(counts.get(task))}
        for task, scores in found["results"].items()
        for row in _scores(scores)
    ]
    if not rows:
        raise _refused(file, "its `results` hold no number")
    return rows


def _scores(scores: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The metrics of one task: version 0.4 writes "acc,none" and "acc_stderr,none", 0.3 without the filter."""
    for key, value in scores.items():
        name, comma, filter_ = key.partition(",")
        if name.endswith(_ERROR) or name in _COUNTS or not _is_number(value):
            continue
        metric = metric_called(f"{ATTACHED}{name if filter_ in ('', 'none') else key}")
        error = scores.get(f"{name}{_ERROR}{comma}{filter_}")
        half = _Z * float(error) if error is not None and _is_number(error) else math.nan
        low, high = (
            math.inf * sign if end is None else end for end, sign in zip(metric.range, (-1, 1), strict=True)
        )
        # The first of two where the second is NaN.
        ends = {"ci_low": max(value - half, low), "ci_high": min(value + half, high)}
        yield {"metric": metric.name, "value": float(value), **ends}


def _part(found: Mapping[str, Any], name: str) -> dict[str, Any]:
    part = found.get(name)
    return part if isinstance(part, dict) else {}


def _count(stated: Any) -> int | None:
    """How many samples of a task were measured; 0.4.3 and later say so."""
    count = stated.get("effective") if isinstance(stated, dict) else None
    return count if isinstance(count, int) and count > 0 else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _refused(file: pathlib.Path, reason: str) -> DataError:
    return DataError(
        f"{file} is no results file of the lm-evaluation-harness: {reason}",
        hint="Give the results_*.json that `lm_eval --output_path` wrote.",
    )
