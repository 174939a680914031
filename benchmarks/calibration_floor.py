"""Arithmetic floors of calibrations: the necessary multiplications and the measured rate of products."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from benchmarks.reference_calibration import Clock

WIDTH, INNER, TOKENS, HEADS = 768, 3072, 50, 12
GROUPS = ((3 * WIDTH, WIDTH), (WIDTH, WIDTH), (INNER, WIDTH), (WIDTH, INNER))
"""(outputs, inputs) of the sites that share an input: queries, keys and values; out; fc1; fc2."""
FOLDS, SKETCH = 4, 256
"""Of residual calibration: parts of the samples, and the inputs to which the sums of a fold are projected."""


@dataclass(frozen=True)
class Rates:
    """Multiply-adds per second of a large matrix product, in 1e9."""

    float32: float
    float64: float

    @classmethod
    def mean_of(cls, rates: Sequence[Rates]) -> Rates:
        """Return the mean of some measurements."""
        return cls(
            *(statistics.mean(of) for of in zip(*((rate.float32, rate.float64) for rate in rates), strict=True))
        )


def product_rates(device: torch.device) -> Rates:
    """Measured on a product of the size of an MLP's first half on 16 images."""
    rates = {}
    for dtype in (torch.float32, torch.float64):
        left = torch.ones(16 * TOKENS, WIDTH, dtype=dtype, device=device)
        right = torch.ones(WIDTH, INNER, dtype=dtype, device=device)
        clock = Clock(device)
        for turn in range(9):
            if turn == 1:  # the first product warms up
                clock = Clock(device)
            clock(lambda: left @ right)  # noqa: B023 - called at once
        rates[dtype] = 8 * 16 * TOKENS * WIDTH * INNER / clock.seconds / 1e9
    return Rates(rates[torch.float32], rates[torch.float64])


@dataclass(frozen=True)
class ElementwiseSeconds:
    """Seconds of necessary steps that are no products, measured alone.

    Attributes:
        block: those of a block on 16 images, in one pass: two layer norms, the softmax, the first residual sum, GELU,
            and all biases but fc2's. What follows that is left out, as the first pass of the merged model ends there.
        sums: adding the Gram matrices and cross moments of one task to sums in float64, in one block.
    """

    block: float
    sums: float


@torch.no_grad()
def elementwise_seconds(device: torch.device) -> ElementwiseSeconds:
    """Measure the least of some turns."""
    generator = torch.Generator().manual_seed(0)
    x, inner = (torch.randn(16 * TOKENS, width, generator=generator).to(device) for width in (WIDTH, INNER))
    scores = torch.randn(16, HEADS, TOKENS, TOKENS, generator=generator).to(device)
    # Gram matrices are symmetric, so half their entries are enough.
    parts = [torch.ones(o * k + k**2 // 2, dtype=torch.float64, device=device) for o, k in GROUPS]
    totals = [torch.zeros_like(part) for part in parts]

    def block() -> None:
        for _ in range(2):
            F.layer_norm(x, (WIDTH,), x[0], x[0])
        for _ in range(4):  # biases of queries, keys, values and out
            x + x[0]
        scores.softmax(dim=-1)
        x + x
        F.gelu(inner + inner[0])

    def sums() -> None:
        for total, part in zip(totals, parts, strict=True):
            total.add_(part, alpha=0.5)

    return ElementwiseSeconds(*(min(_seconds(steps, device) for _ in range(8)) for steps in (block, sums)))


def _seconds(steps: Callable[[], None], device: torch.device) -> float:
    clock = Clock(device)
    clock(steps)
    return clock.seconds


def floor_seconds(tasks: int, samples: int, blocks: int, rates: Rates, *, objectives: bool = False) -> float:
    """Seconds of the counted products alone.

    Per block: one expert forward and two of the merged model, the first without fc2's output (after the last block
    nothing is run again); half a Gram product per distinct input; the cheapest of three forms of the cross moment; one
    Cholesky factor and solve per Gram matrix, in float64. The stem runs twice per image. With `objectives`, also half a
    product of weights and Gram matrix per solve, and one per task where targets are not computed row by row.
    """
    rows = samples * TOKENS
    attention = 2 * TOKENS * WIDTH
    whole, partial = 12 * WIDTH**2 + attention, 8 * WIDTH**2 + attention
    forwards = tasks * rows * (blocks * (whole + partial) + (blocks - 1) * whole - (whole - partial))
    stem = 2 * tasks * samples * (TOKENS - 1) * 3 * 32**2 * WIDTH
    sums = blocks * tasks * sum(rows * k**2 / 2 + _cross(rows, o, k, objectives) for o, k in GROUPS)
    sums += blocks * sum(o * k**2 / 2 for o, k in GROUPS) * objectives
    solves = blocks * sum(k**3 / 6 + o * k**2 for o, k in GROUPS)
    return (forwards + stem + sums) / (rates.float32 * 1e9) + solves / (rates.float64 * 1e9)


def residual_floor_seconds(tasks: int, samples: int, blocks: int, rates: Rates) -> float:
    """Return seconds of the counted products alone, of residual calibration with its defaults.

    Per block and row: five passes of the expert (one to store features, one again for gradients, one for the targets of
    the solve, and two backward passes, which need gradients of inputs only); one forward pass of the calibrated model,
    continued step by step; the products of the expert's and the merged weights with each input; half a Gram product
    per distinct input; and the cross moments of two targets. Per block, in float64: the sketch with two power
    iterations, the projection of the sums of every fold, and two Cholesky factors and solves per Gram matrix, for the
    local and the upstream part. The stem runs twice per image.
    """
    rows = tasks * samples * TOKENS
    forward = 12 * WIDTH**2 + 2 * TOKENS * WIDTH
    per_row = 6 * forward + sum(2 * o * k + k**2 / 2 + 2 * o * k for o, k in GROUPS)
    stem = 2 * tasks * samples * (TOKENS - 1) * 3 * 32**2 * WIDTH
    choices = sum(2 * k**2 * SKETCH + FOLDS * SKETCH * (k**2 + 2 * o * k) for o, k in GROUPS)
    solves = sum(2 * (k**3 / 6 + o * k**2) for o, k in GROUPS)
    in_float64 = blocks * (choices + solves)
    return (blocks * rows * per_row + stem) / (rates.float32 * 1e9) + in_float64 / (rates.float64 * 1e9)


def _cross(rows: int, o: int, k: int, objectives: bool) -> float:
    """Through every row's output, through E[target input'] alone, or with the expert's outputs at hand."""
    return min(2 * rows * o * k, rows * k**2 + o * k**2 * (1.5 if objectives else 1), rows * o * k + o * k**2)
