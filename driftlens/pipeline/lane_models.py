"""Calibrations that walk side by side as models of a study: solved in groups that fit into memory, one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from driftlens.engine.lanes import Lane
from driftlens.engine.pool import ModelPool, expert_of
from driftlens.engine.side_by_side import Parts, calibrate_side_by_side
from driftlens.pipeline.calibrated_weights import with_parameters
from driftlens.pipeline.study import Study
from driftlens.progress import Reporter

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
        solutions = calibrate_side_by_side(
            pool,
            parts,
            lanes[first : first + size],
            sites=sites,
            base=base,
            feature_budget=study.settings.feature_budget,
            spill=spill,
            on_step=lambda layer, task, done=done: reporter.step(  # type: ignore[misc]
                phase, done + max(0, layer - 1), total, f"layer {layer} of {last}, task {task}"
            ),
        )
        for index, solution in enumerate(solutions):
            lane = first + index
            label = f"calibration {lane + 1} of {len(lanes)}"
            reporter.step(phase, (group + 1) * last + lane, total, label)
            pool.add(LANE, with_parameters(pool.chain, pool.source("merged"), like, solution.updates))
            yield lane, solution.seconds
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
