"""Preflight: everything that can be known of a spec before an analysis, in seconds and in one go."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from driftlens.access import Access
from driftlens.data.task_data import TaskData
from driftlens.layers import select_layers
from driftlens.merging.method import READS, MergeMethod, merge_methods
from driftlens.models.architecture import Architecture, load_architecture
from driftlens.models.chain import Layer
from driftlens.models.sources import TensorHeader
from driftlens.pipeline.analyze.phases import suitable_threads
from driftlens.pipeline.preflight.costs import (
    Cost,
    LayerCost,
    TaskLoad,
    Workload,
    estimate,
    layer_costs,
    size_text,
)
from driftlens.pipeline.preflight.models import check_models
from driftlens.pipeline.preflight.outcome import Preflight
from driftlens.pipeline.preflight.tasks import check_data, check_heads, check_ties, score_experts
from driftlens.pipeline.study.merging import PIECE, merge_of
from driftlens.pipeline.study.opening import (
    OpenModels,
    calibration_settings,
    open_study,
    resolve_device,
    settings_of,
)
from driftlens.pipeline.study.suspicion import suspicions
from driftlens.records.layout import MOST_THUMBS
from driftlens.spec import RunSpec


def preflight(spec: RunSpec, *, deep: bool = False, access: Access = Access()) -> Preflight:
    """What is wrong, odd or fine about a spec, its checkpoints and its data, and what an analysis will take.

    Errors become findings, so that all are seen at once. Of the checkpoints, headers and a few matrices are read.

    Args:
        spec: the run.
        deep: also score every expert on its own task, which runs the models.
        access: what may be used, and on which device.
    """
    checks = Preflight()
    place = checks.attempt("device", lambda: resolve_device(access.device or spec.compute.device))
    if place is not None:
        checks.ok("device", f"{place}, {spec.compute.dtype}")
    architecture = _check_architecture(spec, checks, access)
    models = None if architecture is None else check_models(spec, architecture, checks, access)
    data = check_data(spec, architecture, checks, access)
    layers: tuple[LayerCost, ...] = ()
    if architecture is not None and data:
        sample, dtype = next(iter(data.values())).diagnosis().load([0]), getattr(torch, spec.compute.dtype)
        layers = layer_costs(
            architecture, sample, dtype, spec.layers.pool or architecture.chain.modality.pool
        )
    if models is not None:
        check_heads(spec, models, data, layers[-1].width if layers else None, checks)
        checks.findings += suspicions(models.architecture.chain, models.sources)
    _check_merge(spec, models, data, layers, checks)
    _check_calibration(spec, checks)
    checks.ok("metrics", ", ".join(sorted({"drift", *spec.metrics.options})))
    if models is not None and place is not None and not checks.problems:
        checks.cost = _cost(spec, models, data, layers, place)
    if deep and checks.problems:
        checks.notice("experts", "not scored: the problems above come first")
    elif deep:
        opened = checks.attempt("experts", lambda: open_study(spec, access=access))
        if opened is not None:
            with suitable_threads(None, "validate", opened[0]):
                score_experts(opened[0], checks)
    return checks


def _check_architecture(spec: RunSpec, checks: Preflight, access: Access) -> Architecture | None:
    loader, source = spec.architecture.loader, spec.architecture.source or ""
    found = checks.attempt("architecture", lambda: load_architecture(loader, source, offline=access.offline))
    if found is None:
        return None
    paths = [layer.path for layer in found.chain.layers]
    settings = ", ".join(f"{name} {value}" for name, value in found.chain.settings.items())
    checks.ok(
        "architecture", f"{found.adapter} with {len(paths)} layers: {settings}", _quick_gelu_hint(found)
    )
    for text in found.notices:
        checks.notice("architecture", text)
    check_ties(found.chain, checks)
    stored = checks.attempt("layers", lambda: select_layers(paths, spec.layers.select))
    if stored is not None:
        checks.ok("layers", f"{len(stored)} of {len(paths)} are stored; all are walked")
    return found


def _quick_gelu_hint(architecture: Architecture) -> str:
    """What weights don't show and users of OpenAI's get wrong most often."""
    if architecture.loader != "open-clip" or architecture.chain.settings.get("activation") != "gelu":
        return ""
    import open_clip

    twin = f"{architecture.source.replace('/', '-')}-quickgelu"
    if twin not in open_clip.list_models():
        return ""
    return f"OpenAI's weights, and what was fine-tuned from them, need {twin}."


def _check_merge(
    spec: RunSpec,
    models: OpenModels | None,
    data: Mapping[str, TaskData],
    layers: tuple[LayerCost, ...],
    checks: Preflight,
) -> None:
    merge = spec.merge
    if merge is None:
        return
    found = checks.attempt("merge", lambda: merge_of(spec, merge.method, merge.parameters))
    if found is None:
        return
    entry, settings = found
    parts = [f"{entry.title} ({entry.source})", *(f"{name} {value}" for name, value in settings.items())]
    text = f"{', '.join(parts)}; it reads {READS[entry.reads]}"
    if entry.reads_sites:
        text += f", and merges all else by {merge_methods[entry.others].title}"
    if models is not None and models.sources:
        samples = sum(len(opened.calibration()) for opened in data.values())
        text += f"; {_merge_cost(entry, len(spec.tasks), models, samples, layers)}"
    checks.ok("merge", text)


def _check_calibration(spec: RunSpec, checks: Preflight) -> None:
    if spec.calibration is None:
        return
    found = checks.attempt("calibration", lambda: calibration_settings(spec))
    if found is not None:
        settings = ", ".join(f"{name} {value}" for name, value in found.items())
        checks.ok("calibration", f"{spec.calibration.method}: {settings}")


def _merge_cost(
    entry: MergeMethod, num_tasks: int, models: OpenModels, samples: int, layers: tuple[LayerCost, ...]
) -> str:
    """How often the files are read, and what is in memory at a time."""
    headers = next(iter(models.sources.values())).headers
    largest = max(torch.Size(header.shape).numel() for header in headers.values())
    # In float32 and at a time: the base's, each expert's, the result, and one to compute with.
    words = (num_tasks + 3) * min(largest, PIECE if entry.reads == "entry" else largest)
    if entry.reads == "moments":
        words += max(_moment_words(layer, headers) for layer in models.architecture.chain.layers) * num_tasks
        words += 2 * samples * max((layer.state_bytes for layer in layers), default=0) // 4
    passes = entry.passes + (entry.reads == "moments")  # which runs the experts first
    least = "at least " if entry.reads in ("model", "samples") else ""
    times = "once" if passes == 1 else f"{passes} times"
    return f"every file is read {times}, with {least}{size_text(4 * words)} in memory"


def _moment_words(layer: Layer, headers: Mapping[str, TensorHeader]) -> int:
    """Words of one task's moments of a layer, in float64; sites that read the same share theirs."""
    slots = {
        site.input: layer.parameters[f"{site.name}.weight"] for site in layer.sites if site.kind == "linear"
    }
    widths = [slot.shape(headers[slot.key].shape)[1] for slot in slots.values()]
    return sum(2 * width * width for width in widths)


def _cost(
    spec: RunSpec,
    models: OpenModels,
    data: Mapping[str, TaskData],
    layers: tuple[LayerCost, ...],
    device: torch.device,
) -> Cost:
    tasks = {}
    for task, opened in data.items():
        diagnosis, test = opened.diagnosis(), opened.test()
        is_scored = task in spec.heads and test.labels is not None
        tasks[task] = TaskLoad(
            diagnosis=len(diagnosis),
            test=len(test) if is_scored else 0,
            ids=len(opened.calibration()) + len(diagnosis) + len(test),
            thumbs=min(len(diagnosis), MOST_THUMBS) if opened.has_pictures else 0,
        )
    saved = 0 if spec.merge is None else sum(header.nbytes for header in models.own_form.headers.values())
    explained = 1 + len(spec.baselines)
    work = Workload(
        layers=layers,
        tasks=tasks,
        variants=explained + (spec.base is not None),
        explained=explained,
        settings=settings_of(spec, models.architecture.chain),
        batch_size=spec.data.defaults.batch_size,
        merged_bytes=saved,
    )
    sample = next(iter(data.values())).diagnosis()
    return estimate(work, sample, device, getattr(torch, spec.compute.dtype))
