"""Memory and disk that jobs need, summed from file headers, layer shapes and sample counts.

Nothing is timed, and no model runs: one sample passes the stem, to see how many bytes a boundary holds. Entry point:
`needs_of`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import psutil
import torch

from driftlens.calibration.calibrator import Calibrator
from driftlens.checkpoints.tensor_sources import KEPT_OPEN, StateSource
from driftlens.engine.sites import select_sites
from driftlens.engine.walk import waiting_bytes
from driftlens.experiment.loading import OpenModels
from driftlens.experiment.merging import PIECE
from driftlens.experiment.study import Study
from driftlens.linalg.gram import solve_bytes
from driftlens.merging.method import MergeMethod
from driftlens.models.chain import Layer
from driftlens.pipelines.drift import unmerged_bytes
from driftlens.results.formatting import size
from driftlens.utils.variants import expert_of

_FLOAT16, _FLOAT32, _FLOAT64 = 2, 4, 8


@dataclass(frozen=True)
class Needs:
    """Bytes that a job holds in memory at its peak and adds to the run directory, by what they are."""

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
        """Return the sums and their parts as plain JSON values."""
        totals = {"memory_bytes": self.memory_bytes, "disk_bytes": self.disk_bytes}
        return {**totals, "memory": dict(self.memory), "disk": dict(self.disk)}

    def text(self) -> str:
        """Return the sums and their parts in one line."""
        return f"{_summed(self.memory)} in memory; {_summed(self.disk)} on disk"


def _summed(parts: Mapping[str, int]) -> str:
    listed = ", ".join(f"{name} {size(count)}" for name, count in parts.items() if count)
    return f"about {size(sum(parts.values()))} ({listed})"


class _Sizes(NamedTuple):
    """Bytes and numbers of one study, of which all needs are made up.

    Attributes:
        source: a model, for its headers.
        boundary: bytes of the features of one sample at a boundary, of one model.
        width: of pooled features.
        largest_layer: bytes of the parameters of the largest layer, in the dtype of the computation.
        activations: bytes of the outputs of a block's linear modules for one batch.
        calibration_features: bytes of the features of expert and merged model for all calibration samples, at one
            boundary.
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
    """Return what `analyze` needs and, where there is something to calibrate with, what `calibrate` needs.

    Args:
        study: the opened models and samples.
        models: the checkpoints, from which the size of a saved model follows.
        merge: the method that the analysis merges the experts with, or None if they are merged already.
        calibrator: the calibrator to plan for, or None to plan for no calibration.
        patterns: the sites to calibrate, as in `select_sites`.
    """
    sizes, pool = _sizes(study), study.pool
    # Larger files are mapped only while a tensor is read.
    files = [
        sum(header.nbytes for header in pool.source(name).headers.values())
        for name in pool.names
        if name not in study.adapters
    ]
    resident = {
        "libraries": psutil.Process().memory_info().rss,
        "small files": sum(count for count in files if count <= KEPT_OPEN),
    }
    model_bytes = sum(header.nbytes for header in models.own_form.headers.values())
    measuring = _measuring(study, sizes, len(study.variants)) | {
        "base as peft runs it": unmerged_bytes(study)
    }
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
        # The expert's layer, the merged model's, the base's, and the new one.
        "layers": 4 * sizes.largest_layer,
        "features": min(budget, features),
        "statistics": _statistics(study, sizes, sites),
        "activations": sizes.activations,
    }
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
        for layer in chain.layers[1:]  # of the stem's table a batch reads some rows
    ]
    outputs = []
    for block in chain.blocks:
        shapes = _linear_shapes(block, source)
        # A token passes few experts of a mixture: the first stands for them.
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
    """Return what is in memory while the drift of so many variants of a task is measured."""
    models, layers = 1 + num_variants, len(study.pool.chain.layers)
    samples = max(len(data.diagnosis) for data in study.tasks.values())
    batch = next(iter(study.tasks.values())).diagnosis.batch_size
    budget, at_boundary = study.settings.feature_budget, models * sizes.boundary
    checked = at_boundary * min(samples, batch) * layers  # one batch at every boundary
    pooled = models * layers * samples * sizes.width * _FLOAT32
    return {
        "layers": models * sizes.largest_layer,
        "features": min(budget, at_boundary * samples) + min(budget, checked) + pooled,
        "activations": sizes.activations,
    }


def _stored_features(study: Study, sizes: _Sizes, num_models: int) -> int:
    """Return the bytes of the pooled features that a run stores of so many models, in float16."""
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
    """Return the bytes of Gram matrices, cross moments and factors of the layer that has the most of them."""
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
    """Return what a merge method holds beside the merged model: tensors, whole models, and moments."""
    headers, num_tasks = sizes.source.headers, len(study.tasks)
    numbers = [torch.Size(header.shape).numel() for header in headers.values()]
    # In float32 and at a time: the base's, each expert's, the result, and one to compute with.
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


def _larger(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
    """Return the phase that holds more, as phases follow one another."""
    return dict(first if sum(first.values()) > sum(second.values()) else second)
