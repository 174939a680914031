"""What numbers rest on: models, data and settings, software and machine, what the work cost, and the words used."""

from __future__ import annotations

from collections.abc import Iterator

from driftlens.base.variants import title
from driftlens.findings.reading import Kind
from driftlens.findings.table import Table
from driftlens.runs.run import DriftRun

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
    yield f"Architecture: {architecture or _UNKNOWN}. Inputs by: {manifest.preprocessing or _UNKNOWN}."
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
    return Table.of("models", "Models", {**kinds, "digest (first 16)": "text", "source": "text"}, rows)


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
    return Table.of("samples", "Samples by task", kinds, rows)


def _layers(run: DriftRun) -> Table:
    rows = [(layer.index, layer.role, layer.path) for layer in run.manifest.layers]
    return Table.of("layers", "Layers", {"layer": "count", "role": "text", "path": "text"}, rows)


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
        Table.of(
            "environment", "Software and machine", {"what": "text", "name": "text", "value": "text"}, values
        ),
        Table.of("resources", "Time, memory and energy", kinds, costs, note),
    ]


_TERMS = """
base | W_base | The model that every expert was fine-tuned from.
expert | W_i | The model fine-tuned on one task.
merged | W_mer | One model made from the weights of all experts.
calibrated | W_cal | The merged model after calibration.
anchor only | W_anc | The anchor of a calibration by itself, another merge where rho is not 1.
layer | l | One step of the model in forward order: 1 the stem, then the blocks, last the head.
drift | e | Feature of a model minus the expert's, for the same sample, leaving a layer.
final drift | e_L | Drift leaving the head.
relative drift |  | Norm of the drift against the norm of the expert's feature, sums over samples.
of base distance |  | Norm of the drift against the distance from base to expert; 100 %: as far as the base.
local mismatch | m | What a layer adds: merged layer minus expert layer, both on the expert's input.
propagation | p | What a layer passes on: merged layer on the merged input minus on the expert's. e = m + p.
cross term |  | 2 <m, p> / |e|^2: positive where mismatch and propagation add up, negative where they cancel.
amplification | |p| / |e_in| | Norm of the propagation against that of the incoming drift.
path-averaged Jacobian | A | The merged layer's Jacobian, averaged from expert to merged input; p = A e_in.
growth condition | gamma > eta | Amplification minus 1 exceeds mismatch against incoming drift: it must grow.
share of the final drift | P m_l | A layer's mismatch carried to the end, along the final drift; signed.
remainder |  | Share of the final drift that belongs to no layer: quadrature error.
closure error |  | Drift here against that of ordinary forward passes of the models in their own library.
Jacobian error |  | |p - A e_in| / |p|: how far the numbers are from an identity that is exact in theory.
task vector | tau | Weights minus the base's.
margin | mu | The expert's best score minus its second best.
certified |  | A decision that the drift is too small to flip, by its margin.
flipped |  | A decision that differs from the expert's.
95 % interval |  | Wilson's of a share of samples, Student's of a mean; of a mean over tasks, over their samples.
"""
"""A line per term, in the order in which a reader meets them: the term, its symbol, its meaning."""


def glossary_table() -> Table:
    """The terms."""
    terms = [[part.strip() for part in line.split(" | ")] for line in _TERMS.strip().splitlines()]
    return Table.of("glossary", "Terms", {"term": "text", "symbol": "text", "meaning": "text"}, terms)
