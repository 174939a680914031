"""What a calibration will take, counted from shapes: forward passes, Gram matrices, solves.

Rough on purpose, like `costs`: what is counted is what grows with the model and the samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from driftlens.engine.pool import ModelPool
from driftlens.models.chain import Layer
from driftlens.pipeline.calibration_plan import CalibrationPlan
from driftlens.pipeline.costs import LIVE_COPIES, LayerCost

FORWARDS = 3
"""Passes through a block per sample: the expert's, the merged one that is listened to, the calibrated one."""


def calibration_operations(plan: CalibrationPlan, pool: ModelPool, layers: Sequence[LayerCost]) -> int:
    """Floating-point operations of the solving walk, two per multiply-add.

    Args:
        plan: of the calibration.
        pool: for the shapes of the sites.
        layers: what each layer of the chain costs on one sample.
    """
    samples, total = sum(plan.counts.values()), 0
    for layer, cost in zip(pool.chain.layers[: max(plan.sites)], layers, strict=False):
        total += FORWARDS * samples * cost.operations
        shapes = list(_shapes(plan, pool, layer))
        tokens = _tokens(shapes, cost, pool) * samples
        for out, width in shapes:
            through_outputs = 2 * tokens * out * width
            through_moments = 2 * width * width * (tokens + len(plan.samples) * out)
            total += tokens * width * width + min(through_outputs, through_moments)
            total += width**3 // 3 + 2 * out * width * width
    return total


def calibration_memory(
    plan: CalibrationPlan, pool: ModelPool, layers: Sequence[LayerCost], budget: int, batch_size: int
) -> int:
    """Peak bytes of the solving walk: solutions, one layer of each model, its moments, the waiting features."""
    solved, moments, weights = 0, 0, 0
    for layer, cost in zip(pool.chain.layers, layers, strict=True):
        shapes = list(_shapes(plan, pool, layer))
        solved += sum(out * width for out, width in shapes) * pool.dtype.itemsize
        moments = max(moments, sum(width * width + out * width for out, width in shapes) * 8)
        weights = max(weights, cost.parameter_bytes)
    state = max(cost.state_bytes for cost in layers)
    waiting = min(2 * state * sum(plan.counts.values()), budget)
    # The saved model is put together from the solutions, which takes them once more.
    return max(2 * solved, solved + 2 * moments + 4 * weights + waiting + batch_size * state * LIVE_COPIES)


def _shapes(plan: CalibrationPlan, pool: ModelPool, layer: Layer) -> Iterator[tuple[int, int]]:
    """[out, in] of every linear site of the layer that is solved for."""
    wanted = plan.sites.get(layer.index, ())
    for site in layer.sites:
        if site.kind == "linear" and site.name in wanted:
            slot = layer.parameters[f"{site.name}.weight"]
            shape = pool.source("merged").headers[slot.key].shape
            rows = shape[0] if slot.rows is None else slot.rows[1] - slot.rows[0]
            yield (shape[1], rows) if slot.transposed else (rows, shape[1])


def _tokens(shapes: Sequence[tuple[int, int]], cost: LayerCost, pool: ModelPool) -> int:
    """Rows per sample that a site reads: the narrowest site is as wide as the features."""
    if not shapes:
        return 0
    return max(1, cost.state_bytes // pool.dtype.itemsize // min(width for _, width in shapes))
