"""Calibrations that walk side by side as models of a study: solved in groups that fit into memory, one at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from driftlens.data.samples import SampleSet
from driftlens.engine.forward_order import Lane, Parts, calibrate_side_by_side
from driftlens.engine.pool import ModelPool
from driftlens.models.chain import ParameterKey
from driftlens.pipeline.calibrate.variants import with_parameters
from driftlens.pipeline.study.study import Study
from driftlens.progress import Reporter
from driftlens.variants import expert_of

LANE = "lane"
"""Name in the study's pool of the calibrated model at hand."""


def solved_lanes(
    study: Study,
    parts: Parts,
    lanes: Sequence[Lane],
    sites: Mapping[int, Sequence[str]],
    reporter: Reporter,
    *,
    phase: str,
    spill: Path | None = None,
) -> Iterator[tuple[int, float]]:
    """The number of each lane and the seconds it took, while the study's pool holds its model as `LANE`.

    Args:
        study: models and settings; `LANE` of its pool is replaced with every step.
        parts: calibration samples in parts.
        lanes: what to solve.
        sites: layer index -> names of its sites.
        reporter: told of every layer and every lane; may cancel.
        phase: what progress events are called.
        spill: folder for features beyond the budget.

    Raises:
        NumericsError: features are NaN or infinite, or a system can't be solved as asked.
        Cancelled: somebody asked to stop.
    """
    pool = study.pool
    base = "base" if study.has_base else None
    like = pool.source(base or expert_of(next(iter(study.tasks))))
    size = max(1, study.settings.feature_budget // _lane_bytes(pool, sites))
    last, num_groups = max(sites), -(-len(lanes) // size)
    total = num_groups * last + len(lanes)
    for group, first in enumerate(range(0, len(lanes), size)):
        done = group * last + first
        group_lanes = lanes[first : first + size]
        updates: list[dict[ParameterKey, Tensor]] = [{} for _ in group_lanes]
        seconds = [0.0] * len(group_lanes)
        for layers in calibrate_side_by_side(
            pool,
            parts,
            group_lanes,
            sites=sites,
            base=base,
            feature_budget=study.settings.feature_budget,
            spill=spill,
            on_step=lambda layer, task, done=done: reporter.step(  # type: ignore[misc]
                phase, done + max(0, layer - 1), total, f"layer {layer} of {last}, task {task}"
            ),
        ):
            for index, found in enumerate(layers):
                updates[index] |= {(found.layer, name): value for name, value in found.updates.items()}
                seconds[index] += found.seconds
        for index, solution in enumerate(updates):
            lane = first + index
            label = f"calibration {lane + 1} of {len(lanes)}"
            reporter.step(phase, (group + 1) * last + lane, total, label)
            pool.add(LANE, with_parameters(pool.chain, pool.source("merged"), like, solution))
            yield lane, seconds[index]
    reporter.step(phase, total, total)


def _lane_bytes(pool: ModelPool, sites: Mapping[int, Sequence[str]]) -> int:
    """Bytes that one lane holds at most: its solution, and the moments of one layer in float64."""
    solution, moments = 0, 0
    for layer in pool.chain.layers:
        shapes = [
            torch.Size(value.shape)
            for name, value in pool.parameters("merged", layer).items()
            if name.rpartition(".")[0] in sites.get(layer.index, ())
        ]
        solution += sum(shape.numel() for shape in shapes) * pool.dtype.itemsize
        # A Gram matrix, its sum over tasks and its factor; likewise the cross moments.
        here = sum(3 * shape[-1] ** 2 + 2 * shape.numel() for shape in shapes if len(shape) == 2)
        moments = max(moments, 8 * here)
    return solution + moments


def part_of(samples: SampleSet, positions: Sequence[int]) -> SampleSet:
    """The samples at some positions, in this order.

    Args:
        samples: the whole set.
        positions: of samples in it; none are needed.
    """
    chosen = tuple(positions)

    def load(wanted: Sequence[int]) -> Any:
        return samples.load([chosen[position] for position in wanted])

    return dataclasses.replace(
        samples,
        ids=tuple(samples.ids[position] for position in chosen),
        labels=None if samples.labels is None else tuple(samples.labels[position] for position in chosen),
        load=load,
    )


def without(samples: SampleSet, ids: Collection[str]) -> SampleSet:
    """The samples whose ids are not among `ids`; the very same set where that is all of them."""
    gone = frozenset(ids)
    kept = [position for position, sample in enumerate(samples.ids) if sample not in gone]
    return samples if len(kept) == len(samples) else part_of(samples, kept)
