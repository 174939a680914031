"""Estimates of the memory and disk of jobs, from headers, layer shapes and sample counts. Entry point: `needs_of`.

Only the stem runs, on one sample, to measure the size of features at a layer boundary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import psutil
import torch

from driftlens.calibration.calibrator import Calibrator
from driftlens.checkpoints.lora import LoraSource
from driftlens.checkpoints.tensor_sources import KEPT_OPEN, StateSource
from driftlens.engine.sites import select_sites
from driftlens.engine.walk import waiting_bytes
from driftlens.experiment.loading import OpenModels
from driftlens.experiment.merging import PIECE
from driftlens.experiment.study import Study
from driftlens.linalg.gram import solve_bytes
from driftlens.merging.method import MergeMethod
from driftlens.models.chain import Layer
from driftlens.results.formatting import size
from driftlens.utils.variants import expert_of

_FLOAT16, _FLOAT32, _FLOAT64 = 2, 4, 8


@dataclass(frozen=True)
class Needs:
    """The bytes of a job by purpose: `memory` at its peak, and `disk` added to the run directory."""

    memory: Mapping[str, int]
    disk: Mapping[str, int]

    @property
    def memory_bytes(self) -> int:
        """The peak of memory."""
        return sum(self.memory.values())

    @property
    def disk_bytes(self) -> int:
        """The growth of the run directory."""
        return sum(self.disk.values())

    def as_dict(self) -> dict[str, object]:
        """Return the sums and their parts as JSON values."""
        totals = {"memory_bytes": self.memory_bytes, "disk_bytes": self.disk_bytes}
        return {**totals, "memory": dict(self.memory), "disk": dict(self.disk)}

    def text(self) -> str:
        """Return the sums and their parts in one line."""
        return f"{_summed(self.memory)} in memory; {_summed(self.disk)} on disk"


def _summed(parts: Mapping[str, int]) -> str:
    listed = ", ".join(f"{name} {size(count)}" for name, count in parts.items() if count)
    return f"about {size(sum(parts.values()))} ({listed})"


class _Sizes(NamedTuple):
    """Sizes of a study from which all needs are computed.

    Attributes:
        source: a model, for its headers.
        boundary: bytes of one sample's features at a layer boundary, per model.
        width: number of pooled features.
        largest_layer: bytes of the largest layer's parameters, in the dtype of the computation.
        activations: bytes of the outputs of a block's linear modules for one batch.
        calibration_features: bytes of the features of expert and merged model at one boundary, for all calibration
            samples.
    """

    source: StateSource
    boundary: int
    width: int
    largest_layer: int
    activations: int
    calibration_features: int


def needs_of(
    study: Study,
    models: OpenModels,
    *,
    merge: MergeMethod | None = None,
    calibrator: Calibrator | None = None,
    patterns: Collection[str] | None = None,
) -> dict[str, Needs]:
    """Estimate the needs of `analyze`, with a merge if there is one, and of `calibrate` if there is a calibrator."""
    sizes, pool = _sizes(study), study.pool
    # Larger files are memory-mapped only while a tensor is read.
    files = [
        sum(header.nbytes for header in pool.source(name).headers.values())
        for name in pool.names
        if not isinstance(models.stored.get(name), LoraSource)
    ]
    resident = {
        "libraries": psutil.Process().memory_info().rss,
        "small files": sum(count for count in files if count <= KEPT_OPEN),
    }
    model_bytes = sum(header.nbytes for header in models.own_form.headers.values())
    measuring = _measuring(study, sizes, len(study.variants))
    disk = {"features": _stored_features(study, sizes, 1 + len(study.variants)), "weights": 0}
    merging = {}
    if merge is not None:
        merging = {"merging": model_bytes + _merge_bytes(study, sizes, merge)}
        resident["small files"] += model_bytes if model_bytes <= KEPT_OPEN else 0
        disk["weights"] = model_bytes
    needs = {"analyze": Needs(resident | _larger(merging, measuring), disk)}
    if calibrator is None or len(study.calibration_sets) < len(study.tasks):
        return needs
    sites: Mapping[int, Collection[str]] = {}
    if calibrator.takes_sites:
        chosen = None if patterns is None else [*patterns]
        sites = select_sites(pool.chain, sites=chosen, update=calibrator.update)
    budget = study.settings.feature_budget
    features = sizes.calibration_features + len(study.tasks) * calibrator.waiting_bytes(pool, sites)
    solving = {
        # The layer of the expert, the merged model, the base and the result.
        "layers": 4 * sizes.largest_layer,
        "features": min(budget, features),
        "statistics": _statistics(study, sizes, sites),
        "activations": sizes.activations,
    }
    # The control of an anchor is a second variant with its own weights and features.
    made = 1 if calibrator.anchor_reach == 1 or not study.has_base else 2
    needs["calibrate"] = Needs(
        resident | _larger(solving, _measuring(study, sizes, len(study.variants) + made)),
        {
            "features": _stored_features(study, sizes, made),
            "weights": made * model_bytes,
            "features while it runs": max(0, features - budget),
        },
    )
    return needs


def _sizes(study: Study) -> _Sizes:
    pool, (task, data) = study.pool, next(iter(study.tasks.items()))
    chain, source = pool.chain, pool.source(pool.names[0])
    expert, sample = expert_of(task), data.diagnosis.load([0])
    boundary = waiting_bytes(pool, expert, sample)
    state, side = pool.begun(sample)
    out = pool.layer_map(expert, chain.layers[0], "")(state, side)
    width = chain.layers[0].vectors(out, side, study.settings.pool).shape[-1]
    numbers = [
        sum(
            torch.Size(slot.shape(source.headers[slot.key].shape)).numel()
            for slot in layer.parameters.values()
        )
        # A batch reads few rows of the stem's table.
        for layer in chain.layers[1:]
    ]
    outputs = []
    for block in chain.blocks:
        shapes = _linear_shapes(block, source)
        # A token passes few experts of a mixture, so only the first counts.
        sites = [site for site in block.sites if site.name in shapes and site.expert in (None, 0)]
        outputs.append(sum(shapes[site.name][0] for site in sites))
    read = sum(samples.num_read for samples in study.calibration_sets.values())
    return _Sizes(
        source,
        boundary,
        width,
        max(numbers) * pool.dtype.itemsize,
        data.diagnosis.batch_size * boundary * max(outputs, default=0) // max(1, width),
        2 * boundary * read,
    )


def _measuring(study: Study, sizes: _Sizes, num_variants: int) -> dict[str, int]:
    """Return the bytes in memory while the drift of some variants of a task is measured."""
    models, layers = 1 + num_variants, len(study.pool.chain.layers)
    samples = max(len(data.diagnosis) for data in study.tasks.values())
    batch = next(iter(study.tasks.values())).diagnosis.batch_size
    budget, at_boundary = study.settings.feature_budget, models * sizes.boundary
    # One batch at all boundaries.
    checked = at_boundary * min(samples, batch) * layers
    pooled = models * layers * samples * sizes.width * _FLOAT32
    return {
        "layers": models * sizes.largest_layer,
        "features": min(budget, at_boundary * samples) + min(budget, checked) + pooled,
        "activations": sizes.activations,
    }


def _stored_features(study: Study, sizes: _Sizes, num_models: int) -> int:
    """Return the bytes of the pooled float16 features that a run stores for some models."""
    samples = sum(len(data.diagnosis) for data in study.tasks.values())
    stored = len(study.settings.stored_layers | {1, len(study.pool.chain.layers)})
    return num_models * stored * samples * sizes.width * _FLOAT16


def _linear_shapes(layer: Layer, source: StateSource) -> dict[str, tuple[int, int]]:
    """Return [outputs, inputs] of the layer's linear modules, by name."""
    shapes = {}
    for site in layer.sites:
        slot = layer.parameters.get(f"{site.name}.weight")
        if site.kind == "linear" and slot is not None:
            rows, columns = slot.shape(source.headers[slot.key].shape)
            shapes[site.name] = rows, columns
    return shapes


def _statistics(study: Study, sizes: _Sizes, sites: Mapping[int, Collection[str]]) -> int:
    """Return the largest number of bytes of Gram matrices, cross moments and factors in one layer."""
    largest = 0
    for layer in study.pool.chain.layers:
        shapes = _linear_shapes(layer, sizes.source)
        outputs: defaultdict[tuple[str, int | None], int] = defaultdict(int)
        widths: dict[tuple[str, int | None], int] = {}
        for site in layer.sites:
            if site.name in sites.get(layer.index, ()) and site.name in shapes:
                rows, columns = shapes[site.name]
                group = site.input, site.expert
                outputs[group] += rows
                widths[group] = columns
        sums = {group: solve_bytes(count, widths[group]) for group, count in outputs.items()}
        dense = sum(count for (_, expert), count in sums.items() if expert is None)
        mixture = sum(count for (_, expert), count in sums.items() if expert is not None)
        largest = max(largest, dense + min(study.settings.feature_budget, mixture))
    return largest


def _merge_bytes(study: Study, sizes: _Sizes, method: MergeMethod) -> int:
    """Return the bytes of tensors, models and moments of a merge method, without the merged model."""
    headers, num_tasks = sizes.source.headers, len(study.tasks)
    numbers = [torch.Size(header.shape).numel() for header in headers.values()]
    # Float32 tensors at the same time: base, experts, result, and one temporary.
    largest = min(max(numbers), PIECE) if method.reads == "entry" else max(numbers)
    needed = _FLOAT32 * ((num_tasks + 3) * largest + method.held(num_tasks) * sum(numbers))
    if method.reads_moments:
        squares = []
        for layer in study.pool.chain.layers:
            shapes = _linear_shapes(layer, sizes.source)
            widths = {site.input: shapes[site.name][1] for site in layer.sites if site.name in shapes}
            squares.append(sum(width**2 for width in widths.values()))
        needed += _FLOAT64 * num_tasks * max(squares) + sizes.calibration_features
    return needed


def _larger(phase: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """Return the phase with more bytes, because phases run one after the other."""
    return dict(phase if sum(phase.values()) > sum(other.values()) else other)
