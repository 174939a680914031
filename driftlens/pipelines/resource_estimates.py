"""Memory and disk that jobs need, summed from file headers, layer shapes and sample counts.

Nothing is timed, and no model runs: one sample passes the stem, to see how many bytes a boundary holds. Entry point:
`needs_of`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import psutil
import torch

from driftlens.calibration.calibrator import Calibrator
from driftlens.checkpoints.tensor_sources import KEPT_OPEN, StateSource
from driftlens.engine.pool import ModelPool
from driftlens.engine.sites import select_sites
from driftlens.engine.walk import waiting_bytes
from driftlens.experiment.loading import OpenModels
from driftlens.experiment.merging import PIECE
from driftlens.experiment.study import Study
from driftlens.linalg.gram import solve_bytes
from driftlens.merging.method import MergeMethod
from driftlens.models.chain import Layer, LayerChain
from driftlens.pipelines.drift import unmerged_bytes
from driftlens.results.formatting import size

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
        models: the checkpoints, which tell how large a saved model is.
        merge: the method that the analysis merges the experts with, or None if they are merged already.
        calibrator: the calibrator to plan for, or None to plan for no calibration.
        patterns: the sites to calibrate, as in `select_sites`.
    """
    counts = _Counts(study)
    resident = {"libraries": psutil.Process().memory_info().rss, "small files": counts.kept_files}
    model_bytes = sum(header.nbytes for header in models.own_form.headers.values())
    measuring = counts.measuring(len(study.variants))
    if merge is not None:
        merging = {"merging": model_bytes + _merge_bytes(study, counts, merge)}
        resident["small files"] += model_bytes if model_bytes <= KEPT_OPEN else 0
    else:
        merging = {}
    peft = {"base as peft runs it": unmerged_bytes(study)}
    disk = {
        "features": counts.stored_features(1 + len(study.variants)),
        "weights": model_bytes if merge is not None else 0,
    }
    needs = {"analyze": Needs(resident | _larger(merging, measuring | peft), disk)}
    if calibrator is not None and len(study.calibration_sets) == len(study.tasks):
        needs["calibrate"] = _calibration_needs(counts, calibrator, patterns, resident, model_bytes)
    return needs


def _calibration_needs(
    counts: _Counts,
    calibrator: Calibrator,
    patterns: Collection[str] | None,
    resident: Mapping[str, int],
    model_bytes: int,
) -> Needs:
    """Return what a calibration and the analysis of its variants need."""
    study = counts.study
    chain, budget = study.pool.chain, study.settings.feature_budget
    sites: Mapping[int, Collection[str]] = {}
    if calibrator.takes_sites:
        sites = select_sites(chain, sites=None if patterns is None else [*patterns], update=calibrator.update)
    second_moments = len(study.tasks) * calibrator.waiting_bytes(study.pool, sites)
    features = counts.calibration_features + second_moments
    solving = {
        # The expert's layer, the merged model's, the base's, and the new one.
        "layers": 4 * counts.largest_layer,
        "features": min(budget, features),
        "statistics": _statistics(chain, counts.source, sites, budget),
        "activations": counts.activations,
    }
    made = 1 if calibrator.anchor_reach == 1 or not study.has_base else 2
    memory = {**resident, **_larger(solving, counts.measuring(len(study.variants) + made))}
    disk = {"features": counts.stored_features(made), "weights": made * model_bytes}
    return Needs(memory, disk | {"features while it runs": max(0, features - budget)})


class _Counts:
    """Bytes of a study's layers, boundaries and features."""

    def __init__(self, study: Study) -> None:
        self.study, self.pool = study, study.pool
        self.source = self.pool.source(self.pool.names[0])
        task, data = next(iter(study.tasks.items()))
        self.batch = data.diagnosis.batch_size
        expert, sample = self.pool.expert(task), data.diagnosis.load([0])
        self.boundary = waiting_bytes(self.pool, expert, sample)
        """Features of one sample at a boundary, of one model."""
        self.width = _feature_width(self.pool, expert, sample, study)

    @property
    def kept_files(self) -> int:
        """Files that stay mapped; larger ones are mapped only while a tensor is read."""
        sizes = {
            name: sum(header.nbytes for header in self.pool.source(name).headers.values())
            for name in self.pool.names
            if name not in self.study.adapters
        }
        return sum(count for count in sizes.values() if count <= KEPT_OPEN)

    @property
    def largest_layer(self) -> int:
        """Parameters of the largest layer, in the dtype of the computation."""
        headers, layers = self.source.headers, self.pool.chain.layers
        counts = [
            sum(torch.Size(slot.shape(headers[slot.key].shape)).numel() for slot in layer.parameters.values())
            for layer in layers[1:]  # of the stem's table a batch reads some rows
        ]
        return max(counts) * self.pool.dtype.itemsize

    @property
    def activations(self) -> int:
        """Outputs of a block's linear modules for one batch."""
        outputs = []
        for layer in self.pool.chain.blocks:
            shapes = _linear_shapes(layer, self.source)
            # A token passes few experts of a mixture: the first stands for them.
            sites = [site for site in layer.sites if site.name in shapes and site.expert in (None, 0)]
            outputs.append(sum(shapes[site.name][0] for site in sites))
        return self.batch * self.boundary * max(outputs, default=0) // max(1, self.width)

    @property
    def calibration_features(self) -> int:
        """Features of the expert and of the merged model for all calibration samples, at one boundary."""
        sets = self.study.calibration_sets.values()
        return 2 * self.boundary * sum(samples.num_read for samples in sets)

    def measuring(self, num_variants: int) -> dict[str, int]:
        """Return what is in memory while the drift of so many variants of a task is measured."""
        models, layers = 1 + num_variants, len(self.pool.chain.layers)
        samples = max(len(data.diagnosis) for data in self.study.tasks.values())
        budget, at_boundary = self.study.settings.feature_budget, models * self.boundary
        checked = at_boundary * min(samples, self.batch) * layers  # one batch at every boundary
        pooled = models * layers * samples * self.width * _FLOAT32
        return {
            "layers": models * self.largest_layer,
            "features": min(budget, at_boundary * samples) + min(budget, checked) + pooled,
            "activations": self.activations,
        }

    def stored_features(self, num_models: int) -> int:
        """Return the bytes of the pooled features that a run stores of so many models, in float16."""
        samples = sum(len(data.diagnosis) for data in self.study.tasks.values())
        stored = len(self.study.settings.stored_layers | {1, len(self.pool.chain.layers)})
        return num_models * stored * samples * self.width * _FLOAT16


def _feature_width(pool: ModelPool, model: str, sample: object, study: Study) -> int:
    """Return the width of the pooled features that leave the stem."""
    state, side = pool.begun(sample)
    stem = pool.chain.layers[0]
    out = pool.layer_map(model, stem, "")(state, side)
    return stem.vectors(out, side, study.settings.pool).shape[-1]


def _linear_shapes(layer: Layer, source: StateSource) -> dict[str, tuple[int, int]]:
    """Return [outputs, inputs] of the layer's linear modules, by name."""
    shapes = {}
    for site in layer.sites:
        slot = layer.parameters.get(f"{site.name}.weight")
        if site.kind == "linear" and slot is not None:
            rows, columns = slot.shape(source.headers[slot.key].shape)
            shapes[site.name] = rows, columns
    return shapes


def _statistics(
    chain: LayerChain, source: StateSource, sites: Mapping[int, Collection[str]], budget: int
) -> int:
    """Return the bytes of Gram matrices, cross moments and factors of the layer that has the most of them."""
    largest = 0
    for layer in chain.layers:
        shapes = _linear_shapes(layer, source)
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
        largest = max(largest, dense + min(budget, mixture))
    return largest


def _merge_bytes(study: Study, counts: _Counts, method: MergeMethod) -> int:
    """Return what a merge method holds beside the merged model: tensors, whole models, and moments."""
    headers, num_tasks = counts.source.headers, len(study.tasks)
    sizes = [torch.Size(header.shape).numel() for header in headers.values()]
    # In float32 and at a time: the base's, each expert's, the result, and one to compute with.
    largest = min(max(sizes), PIECE) if method.reads == "entry" else max(sizes)
    needed = _FLOAT32 * ((num_tasks + 3) * largest + method.held(num_tasks) * sum(sizes))
    if method.reads_moments:
        squares = []
        for layer in study.pool.chain.layers:
            shapes = _linear_shapes(layer, counts.source)
            widths = {site.input: shapes[site.name][1] for site in layer.sites if site.name in shapes}
            squares.append(sum(width**2 for width in widths.values()))
        needed += _FLOAT64 * num_tasks * max(squares) + counts.calibration_features
    return needed


def _larger(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
    """Return the phase that holds more, as phases follow one another."""
    return dict(first if sum(first.values()) > sum(second.values()) else second)
