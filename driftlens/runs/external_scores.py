"""Import of scores that other tools measured: lm-evaluation-harness, bigcode-evaluation-harness, safety-eval.

Entry point: `attach_scores`.
"""

from __future__ import annotations

import hashlib
import logging
import math
import pathlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
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

_HARNESS, _BIGCODE, _SAFETY = "lm-evaluation-harness", "bigcode-evaluation-harness", "safety-eval"
_Z = NormalDist().inv_cdf(0.975)
_ERROR = "_stderr"
# Spellings of missing and infinite numbers.
_NO_NUMBERS = ("nan", "inf", "-inf", "infinity", "none")
# Numbers among the metrics of a task that are counts.
_COUNTS = ("sample_len", "sample_count")
# Prefixes of metrics over all samples of a task, which come before those of a part.
_WHOLE = ("overall", "micro", "macro")


@dataclass(frozen=True)
class _ExternalResults:
    """Parsed results of another tool: score and standard error by task and metric, and sample counts."""

    tool: str
    scores: Mapping[str, Mapping[str, tuple[float, float]]]
    counts: Mapping[str, int] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)


log = logging.getLogger("driftlens")


def attach_scores(run: PathLike, variant: str, results: PathLike) -> DriftRun:
    """Add scores measured by another tool, such as lm-evaluation-harness, to a variant of a run.

    The tool is lm-evaluation-harness (0.3 or 0.4), bigcode-evaluation-harness or safety-eval. Scores go into the
    accuracy table under the tool's names, `harness:acc` for example. Intervals come from standard errors or counts in
    the file. Percentages become shares in [0, 1]. Values that are not finite are left out and logged. The manifest
    records the file's digest. Attaching again replaces earlier results of the same tasks.

    Args:
        run: folder of a finished run.
        variant: the model that was measured, also `expert:TASK`.
        results: the file of results.

    Raises:
        DataError: the file is not readable or not of these tools, or the run has no such variant.
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
        measured = _parse_results(document)
        rows = [{"variant": variant, **row} for row in _accuracy_rows(measured)]
    # The tool's settings may be NaN or None, too; only scores are reported as left out.
    document.pop("config", None)
    if lost := [*_non_finite_scores(document.get("results", document))]:
        log.warning("notice: %s: left out, no finite number: %s", file, shorten_list(lost, 5))
    about = {
        **{"variant": variant, "file": file.name, "sha256": hashlib.sha256(content).hexdigest()},
        **{"tool": measured.tool, **measured.about, "left_out": lost},
        **{"tasks": list(dict.fromkeys(row["task"] for row in rows)), "attached": utc_now()},
    }
    with RunWriter.resume(folder) as writer:
        writer.append("accuracy", pd.DataFrame(rows), replace=True)
        writer.update_manifest(attached={f"{variant} {file.name}": about})
    return open_run(folder)


def _parse_results(document: dict[str, Any]) -> _ExternalResults:
    if "results" in document:
        _validated_scores(document["results"])
        return _parse_harness_results(document)
    scores = _validated_scores({task: by_metric for task, by_metric in document.items() if task != "config"})
    by_task = {
        task: dict(sorted(_flatten_scores(by_metric, task), key=lambda score: not score[0].startswith(_WHOLE)))
        for task, by_metric in scores.items()
    }
    if isinstance(document.get("config"), dict):
        # The file repeats all options of the command; these decide the numbers.
        kept = {name: document["config"].get(name) for name in ("model", "limit", "n_samples", "temperature")}
        return _ExternalResults(_BIGCODE, by_task, about=kept)
    names = [f"{ATTACHED}{name}" for by_metric in by_task.values() for name in by_metric]
    # safety-eval's files have no marker, so a metric with a known direction has to identify them.
    if names and not any(metric_by_name(name).is_directed for name in names):
        raise DataError(f"{names[0].removeprefix(ATTACHED)!r} is no metric of these tools", hint=_HINT)
    return _ExternalResults(_SAFETY, by_task)


def _validated_scores(scores: object) -> dict[str, dict[str, Any]]:
    return TypeAdapter(dict[str, dict[str, Any]]).validate_python(scores)


def _parse_harness_results(document: Mapping[str, Any]) -> _ExternalResults:
    # Version 0.4 writes "acc,none" and "acc_stderr,none", 0.3 without the filter; 0.4.3 and later count samples.
    scores: dict[str, dict[str, tuple[float, float]]] = {}
    for task, by_metric in document["results"].items():
        scores[task] = {}
        for key, value in by_metric.items():
            name, comma, part = key.partition(",")
            if name.endswith(_ERROR) or name in _COUNTS or not _is_finite_number(value):
                continue
            error = by_metric.get(f"{name}{_ERROR}{comma}{part}")
            shown = name if part in ("", "none") else key
            scores[task][shown] = (float(value), float(error) if _is_finite_number(error) else math.nan)
    stated = {
        task: _section_or_empty(_section_or_empty(document, "n-samples"), task).get("effective") for task in scores
    }
    counts = {task: n for task, n in stated.items() if isinstance(n, int) and n > 0}
    settings = _section_or_empty(document, "config")
    about = {"version": document.get("lm_eval_version"), "date": document.get("date")}
    about |= {name: settings.get(name) for name in ("model", "model_args", "limit")}
    return _ExternalResults(_HARNESS, scores, counts, about)


def _flatten_scores(
    scores: Mapping[str, Any], task: str, before: str = ""
) -> Iterator[tuple[str, tuple[float, float]]]:
    """Yield (metric, score) pairs of one task; metrics of a subset of its samples are named "METRIC,SUBSET"."""
    for key, value in scores.items():
        name = f"{before}{key}"
        if isinstance(value, dict) and not before:
            yield from _flatten_scores(value, task, f"{key},")
        elif _is_finite_number(value):
            # WildJailbreak's harmless prompts should be answered, but use the metric of attacks.
            yield f"{name},benign" if "benign" in task and "," not in name else name, (float(value), math.nan)


def _accuracy_rows(measured: _ExternalResults) -> list[dict[str, Any]]:
    rows = []
    for task, scores in measured.scores.items():
        n = measured.counts.get(task)
        for name, (value, error) in scores.items():
            metric = metric_by_name(f"{ATTACHED}{name}")
            low, high = (
                sign * math.inf if end is None else end for end, sign in zip(metric.range, (-1, 1), strict=True)
            )
            # Some tools write shares as percentages.
            if metric.kind == "share" and 1 < value <= 100:
                value, error = value / 100, error / 100
            if not low <= value <= high:
                raise DataError(f"{name} of {task} is {value:g}; expected {low:g} to {high:g}")
            ends = (math.nan, math.nan)
            # A standard error of 0 comes from equal answers; it is no certainty.
            if error > 0:
                ends = max(value - _Z * error, low), min(value + _Z * error, high)
            # Only a whole number of right answers is a share with Wilson's interval; means of partial scores are
            # not.
            elif n is not None and metric.kind == "share" and math.isclose(value * n, round(value * n)):
                ends = share_interval(value, n).ends[1:]
            row = {"task": task, "metric": metric.name, "value": value, "n": n}
            rows.append(row | dict(zip(("ci_low", "ci_high"), ends, strict=True)))
    if not rows:
        raise DataError("the results hold no number", hint=_HINT)
    return rows


def _non_finite_scores(scores: Mapping[str, Any], before: str = "") -> Iterator[str]:
    """Yield the names of scores that are NaN or infinite, standard errors excluded."""
    for key, value in scores.items():
        if isinstance(value, dict):
            yield from _non_finite_scores(value, f"{before}{key} ")
        elif _ERROR not in key and str(value).lower() in _NO_NUMBERS:
            yield f"{before}{key}"


def _section_or_empty(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    part = document.get(name)
    return part if isinstance(part, dict) else {}


def _is_finite_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


_HINT = (
    "Give the results_*.json of `lm_eval --output_path`, or the file of bigcode-evaluation-harness's "
    "`--metric_output_path` or safety-eval's `--report_output_path`."
)
