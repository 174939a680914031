"""What a merge takes before anybody has tried: passes over files, memory, runs of models, operations on matrices."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from driftlens.base.threads import computing_with
from driftlens.data.task_data import TaskData
from driftlens.jobs.preflight.rehearsal import size_text
from driftlens.jobs.study.merging import PIECE
from driftlens.jobs.study.opening import OpenModels
from driftlens.merging.method import MergeMethod
from driftlens.models.chain import LayerChain


def model_runs(
    entry: MergeMethod, settings: Mapping[str, Any], data: Mapping[str, TaskData], models: OpenModels
) -> int:
    """How often a model runs on one sample, there and back, as the method says of itself; 0 where it runs none."""
    if entry.reads_moments:
        passes = 2 if entry.reads == "prefix" else 1
        return passes * sum(len(task.calibration) for task in data.values())
    if not entry.scores:
        return 0
    lm = models.architecture.lm
    rows = 1 if lm is None else next(iter(models.sources.values())).headers[lm.key].shape[0]
    counts = ((len(of.calibration), len(of.class_names or of.answers()) or rows) for of in data.values())
    return sum(entry.runs(settings, *count) for count in counts)


def merge_text(entry: MergeMethod, num_tasks: int, models: OpenModels, waiting: int) -> str:
    """How often the files are read, and what is in memory at a time, `waiting` bytes of features among it."""
    headers = next(iter(models.sources.values())).headers
    largest = max(torch.Size(header.shape).numel() for header in headers.values())
    # In float32 and at a time: the base's, each expert's, the result, and one to compute with.
    needed = 4 * (num_tasks + 3) * min(largest, PIECE if entry.reads == "entry" else largest)
    if entry.reads_moments:
        # In float64, once for all sites that read the same.
        widths = [
            {read: columns for read, (_, columns) in layer}.values()
            for layer in _matrices(models.architecture.chain, models)
        ]
        needed += 8 * num_tasks * max(sum(width * width for width in layer) for layer in widths) + waiting
    needed += 4 * entry.held(num_tasks) * sum(torch.Size(header.shape).numel() for header in headers.values())
    passes = entry.passes + entry.reads_moments  # which runs the experts first
    is_known = entry.held(1) > 0 or entry.reads not in ("model", "samples")
    times = "once" if passes == 1 else f"{passes} times"
    return f"every file is read {times}, with {'' if is_known else 'at least '}{size_text(needed)} in memory"


def work_of(
    entry: MergeMethod, settings: Mapping[str, Any], num_tasks: int, chain: LayerChain, models: OpenModels
) -> float:
    """Operations of a method on all matrices of a chain, beyond a few per entry, as it says of itself."""
    return sum(
        entry.work(settings, num_tasks, *shape) for layer in _matrices(chain, models) for _, shape in layer
    )


def seconds_of_work(operations: float, chain: LayerChain, models: OpenModels) -> float:
    """Seconds of so many operations on matrices as large as the chain's, by one thread, as merges compute."""
    rows, columns = max((shape for layer in _matrices(chain, models) for _, shape in layer), default=(1, 1))
    matrix = torch.ones(rows, columns)
    with computing_with(1):
        matrix @ matrix[: min(64, rows)].mT
        started = time.perf_counter()
        matrix @ matrix[: min(64, rows)].mT
        rate = 2 * rows * columns * min(64, rows) / (time.perf_counter() - started)
    return operations / rate


def _matrices(chain: LayerChain, models: OpenModels) -> list[list[tuple[str, tuple[int, int]]]]:
    """By layer what each linear module reads, and the shape of its matrix."""
    headers = next(iter(models.sources.values())).headers
    found = []
    for layer in chain.layers:
        sites = [site for site in layer.sites if site.kind == "linear"]
        slots = [(site.input, layer.parameters.get(f"{site.name}.weight")) for site in sites]
        found.append([(read, slot.shape(headers[slot.key].shape)) for read, slot in slots if slot])
    return found  # type: ignore[return-value]
