"""Setup and provenance: which models, data and settings stand behind the numbers."""

from __future__ import annotations

from collections.abc import Iterator

from driftlens.records.run import DriftRun
from driftlens.variants import title
from driftlens_reports.content import Section, Table
from driftlens_reports.sections.outline import TITLES
from driftlens_reports.sections.tabulate import table

_UNKNOWN = "not recorded"


def setup_section(run: DriftRun) -> Section:
    """Models with their digests, samples by task, and how the numbers were computed."""
    return Section(
        name="setup",
        title=TITLES["setup"],
        sentences=tuple(_sentences(run)),
        tables=tuple(entry for entry in (_models(run), _samples(run), _layers(run)) if entry.rows),
    )


def _sentences(run: DriftRun) -> Iterator[str]:
    manifest = run.manifest
    yield f"Run {run.id}, begun {manifest.created}, finished {manifest.finished or _UNKNOWN}."
    yield f"Spec digest {manifest.spec_digest or _UNKNOWN}; tables of schema {manifest.schema_version}."
    architecture = ", ".join(f"{name} {value}" for name, value in manifest.architecture.items())
    yield f"Architecture: {architecture or _UNKNOWN}. Pixels by: {manifest.preprocessing or _UNKNOWN}."
    seeds = ", ".join(f"{name} {seed}" for name, seed in manifest.seeds.items())
    asked = "were" if manifest.deterministic else "were not"
    yield (
        f"Computed on {manifest.device or _UNKNOWN} in {manifest.dtype or _UNKNOWN}; seeds: {seeds or _UNKNOWN}; "
        f"deterministic algorithms {asked} asked for."
    )


def _models(run: DriftRun) -> Table:
    rows = [
        (title(name), name, info.parameters, info.digest[:16], info.source)
        for name, info in run.manifest.models.items()
    ]
    return table(
        "models",
        "Models",
        {
            "model": "text",
            "variant": "text",
            "parameters": "count",
            "digest (first 16)": "text",
            "source": "text",
        },
        rows,
    )


def _samples(run: DriftRun) -> Table:
    ids = run.manifest.sample_ids
    splits = ("calibration", "diagnosis", "test")
    rows = [
        (
            task,
            len(run.manifest.classes[task]) if task in run.manifest.classes else None,
            *(len(ids[split][task]) if task in ids.get(split, {}) else None for split in splits),
        )
        for task in run.tasks
    ]
    return table(
        "samples",
        "Samples by task",
        {"task": "text", "classes": "count", **dict.fromkeys(splits, "count")},
        rows,
    )


def _layers(run: DriftRun) -> Table:
    rows = [(layer.index, layer.role, layer.path) for layer in run.manifest.layers]
    return table("layers", "Layers", {"layer": "count", "role": "text", "path": "text"}, rows)
