"""What an analysis by a spec has to do, and the making of its merge: counted from shapes and numbers of samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from driftlens.data.samples import SampleSet
from driftlens.data.task_data import TaskData
from driftlens.jobs.analyze.answers import SPARE_TOKENS
from driftlens.jobs.preflight.costs import Effort, LayerCost, TaskLoad, Workload, size_text, width_of
from driftlens.jobs.study.merging import PIECE, merge_of
from driftlens.jobs.study.opening import OpenModels, heads_of, settings_of
from driftlens.merging.method import MergeMethod
from driftlens.runs.layout import MOST_THUMBS
from driftlens.spec import RunSpec

_TARGETS = 64
"""How many answers are looked at to know how long they are."""


@dataclass(frozen=True)
class Load:
    """The analysis of a spec, one of its samples, and the making of its merge."""

    work: Workload
    sample: SampleSet
    merge: Effort


def load_of(
    spec: RunSpec,
    models: OpenModels,
    data: Mapping[str, TaskData],
    layers: tuple[LayerCost, ...],
    device: torch.device,
) -> Load:
    """The load of a spec whose models and data could be opened, on the device that it is computed on."""
    tasks, scored = {}, heads_of(spec, models)
    for task, opened in data.items():
        diagnosis, test = opened.diagnosis, opened.test
        speaks = models.architecture.lm is not None
        has_classes = test.labels is not None and (task in scored or speaks)
        answer = _answer_tokens(test) if speaks and not has_classes else 0
        tasks[task] = TaskLoad(
            diagnosis=len(diagnosis),
            test=len(test) if has_classes or answer else 0,
            answer=answer,
            ids=len(opened.calibration) + len(diagnosis) + len(test),
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
        ahead=int(device.type == "cuda"),
    )
    more = 0
    if spec.merge is not None:
        entry, chosen = merge_of(spec, spec.merge.method, spec.merge.parameters)
        more = merge_passes(entry, chosen, data, models) * sum(layer.operations for layer in layers)
        shapes = [shape for layer in _matrices(models) for _, shape in layer]
        more += sum(int(entry.work(chosen, len(spec.tasks), *shape)) for shape in shapes)
    sample = next(iter(data.values())).diagnosis
    return Load(work, sample, Effort({("blocks", width_of(layers)): more}))


def _answer_tokens(test: SampleSet) -> int:
    """Tokens of an answer at most, by the first targets; 0 where there are none."""
    reader = None if test.texts is None else test.texts.reader
    if reader is None or not len(test) or not test.text(0).target:
        return 0
    targets = (test.text(at).target for at in range(min(_TARGETS, len(test))))
    return max(len(reader.answer_tokens(target)) for target in targets) + SPARE_TOKENS


def merge_passes(
    entry: MergeMethod, settings: Mapping[str, Any], data: Mapping[str, TaskData], models: OpenModels
) -> int:
    """How often every layer runs on one sample, there and back counted as three, at most.

    Raises:
        SpecError: it would be more often than anybody waits for.
    """
    lm = models.architecture.lm
    rows = 1 if lm is None else next(iter(models.sources.values())).headers[lm.key].shape[0]
    counts = [(len(at.calibration), len(at.class_names or at.answers()) or rows) for at in data.values()]
    if entry.reads_moments:
        return sum(count for count, _ in counts) * (2 if entry.reads == "prefix" else 1)
    return 3 * sum(entry.runs(settings, *count) for count in counts) if entry.scores else 0


def merge_cost(
    entry: MergeMethod, num_tasks: int, models: OpenModels, samples: int, layers: tuple[LayerCost, ...]
) -> str:
    """How often the files are read, and what is in memory at a time."""
    headers = next(iter(models.sources.values())).headers
    largest = max(torch.Size(header.shape).numel() for header in headers.values())
    # In float32 and at a time: the base's, each expert's, the result, and one to compute with.
    words = (num_tasks + 3) * min(largest, PIECE if entry.reads == "entry" else largest)
    if entry.reads_moments:
        # In float64, once for all sites that read the same.
        widths = [{read: shape[1] for read, shape in layer}.values() for layer in _matrices(models)]
        words += max(sum(2 * width * width for width in layer) for layer in widths) * num_tasks
        words += 2 * samples * max((layer.state_bytes for layer in layers), default=0) // 4
    words += entry.held(num_tasks) * sum(torch.Size(header.shape).numel() for header in headers.values())
    passes = entry.passes + entry.reads_moments  # which runs the experts first
    is_known = entry.held(1) > 0 or entry.reads not in ("model", "samples")
    least = "" if is_known else "at least "
    times = "once" if passes == 1 else f"{passes} times"
    return f"every file is read {times}, with {least}{size_text(4 * words)} in memory"


def _matrices(models: OpenModels) -> list[list[tuple[str, tuple[int, ...]]]]:
    """By layer what each linear module reads, and the shape of its matrix."""
    headers = next(iter(models.sources.values())).headers
    found = []
    for layer in models.architecture.chain.layers:
        sites = [site for site in layer.sites if site.kind == "linear"]
        slots = [(site.input, layer.parameters.get(f"{site.name}.weight")) for site in sites]
        found.append([(input, slot.shape(headers[slot.key].shape)) for input, slot in slots if slot])
    return found
