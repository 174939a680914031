"""Provenance: models, data and settings behind the numbers, software and machine, and what the work cost."""

from __future__ import annotations

from collections.abc import Iterator

from driftlens.records.run import DriftRun
from driftlens.variants import title
from driftlens_reports.content import Kind, Table
from driftlens_reports.sections.tabulate import table

_UNKNOWN = "not recorded"
_GIB = 2**30


def setup_tables(run: DriftRun) -> list[Table]:
    """Models with their digests, samples by task, and layers."""
    return [_models(run), _samples(run), _layers(run)]


def setup_sentences(run: DriftRun) -> Iterator[str]:
    """How the numbers were computed."""
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
    kinds: dict[str, Kind] = {"model": "text", "variant": "text", "parameters": "count"}
    return table("models", "Models", {**kinds, "digest (first 16)": "text", "source": "text"}, rows)


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
    kinds: dict[str, Kind] = {"task": "text", "classes": "count", **dict.fromkeys(splits, "count")}
    return table("samples", "Samples by task", kinds, rows)


def _layers(run: DriftRun) -> Table:
    rows = [(layer.index, layer.role, layer.path) for layer in run.manifest.layers]
    return table("layers", "Layers", {"layer": "count", "role": "text", "path": "text"}, rows)


def environment_tables(run: DriftRun) -> list[Table]:
    """What the numbers may depend on besides their inputs, and time, memory and energy by phase."""
    manifest = run.manifest
    groups = {
        "version": manifest.versions,
        "platform": manifest.platform,
        "variable": manifest.environment,
        "threads": manifest.threads,
    }
    values = [(group, name, str(value)) for group, found in groups.items() for name, value in found.items()]
    rows = run.resources()
    memory = ["peak_rss_bytes", "peak_gpu_bytes"]
    rows[memory] = rows[memory].astype("Float64") / _GIB
    costs = [tuple(row) for row in rows.astype(object).itertuples(index=False)]
    kinds: dict[str, Kind] = {
        **{"phase": "text", "seconds": "number", "peak memory (GiB)": "number"},
        **{"peak GPU memory (GiB)": "number", "energy (Wh)": "number"},
    }
    note = "Peak memory is that of the whole process up to the end of the phase."
    return [
        table(
            "environment", "Software and machine", {"what": "text", "name": "text", "value": "text"}, values
        ),
        table("resources", "Time, memory and energy", kinds, costs, note=note),
    ]
