"""Inner products of models' weights on a few matrices, from which distances and fits follow.

Looked at are the first, middle and last block. One matrix of every model is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from driftlens.models.chain import LayerChain, Slot
from driftlens.models.sources import StateSource, check_finite

SAMPLED_ENTRIES = 1 << 18
"""Entries read of each matrix: plenty to tell distances, and little to keep of twenty models at once."""
ROUNDING = 1e-12
"""Share of the weights' energy below which a difference is rounding: squared, float32 rounds to 4e-15."""


@dataclass(frozen=True)
class SampledWeights:
    """Inner products of the models' weights, matrix by matrix.

    Attributes:
        names: of the models in the pool, in the order of rows and columns.
        grams: per matrix the Gram matrix [models, models] of its sampled entries, float64.
    """

    names: tuple[str, ...]
    grams: tuple[Tensor, ...]

    @property
    def experts(self) -> tuple[str, ...]:
        """Names of the experts."""
        return tuple(name for name in self.names if name.startswith("expert:"))

    def distance(self, name: str, anchor: str) -> float:
        """|model - anchor| / |anchor|, the median over matrices."""
        i, j = self.names.index(name), self.names.index(anchor)
        squares = [
            (gram[i, i] - 2 * gram[i, j] + gram[j, j]).clamp_min(0) / gram[j, j] for gram in self.grams
        ]
        return float(torch.stack(squares).nan_to_num(0.0).sqrt().median())


@dataclass(frozen=True)
class Fit:
    """A least-squares fit by task vectors.

    Attributes:
        coefficients: per matrix and expert, [matrices, experts].
        residual: share of the energy that the fit leaves.
    """

    coefficients: Tensor
    residual: float


def sampled_slots(chain: LayerChain, source: StateSource) -> list[Slot]:
    """The matrices of the first, middle and last block, cut to their first rows."""
    blocks = chain.blocks
    chosen = sorted({0, len(blocks) // 2, len(blocks) - 1}) if blocks else []
    found = []
    for slot in (slot for index in chosen for slot in blocks[index].parameters.values()):
        shape = source.headers[slot.key].shape
        if len(shape) >= 2:
            start, stop = slot.rows or (0, shape[0])
            count = max(1, SAMPLED_ENTRIES // torch.Size(shape[1:]).numel())
            found.append(Slot(slot.key, (start, min(stop, start + count))))
    return found


def check_sampled(source: StateSource, slots: Sequence[Slot]) -> None:
    """Refuse a model whose sampled weights hold NaN or infinity.

    Raises:
        NumericsError: they do; the message names the tensor.
    """
    for slot in slots:
        check_finite(source.name, slot.key, source.read(slot.key, slot.rows))


def sample_weights(sources: Mapping[str, StateSource], slots: Sequence[Slot]) -> SampledWeights:
    """The inner products of all models on the given matrices."""
    grams = []
    for slot in slots:
        rows = [source.read(slot.key, slot.rows).double().flatten() for source in sources.values()]
        stacked = torch.stack(rows)
        grams.append(stacked @ stacked.T)
    return SampledWeights(tuple(sources), tuple(grams))


def fit_merge(sampled: SampledWeights, name: str) -> tuple[Fit, Fit] | None:
    """How well task vectors explain a merged model: with one coefficient per expert, and with one per matrix too.

    Task vectors start at the base, and the share is of the merged model's own task vector. Without a base they start at
    the experts' mean; where the merged model is closer to it than the experts, the share is of the experts' energy.

    Returns:
        Both fits, or None where the model is where the task vectors start, up to rounding.
    """
    experts = [sampled.names.index(expert) for expert in sampled.experts]
    each = torch.eye(len(sampled.names), dtype=torch.float64)
    has_base = "base" in sampled.names
    start = each[sampled.names.index("base")] if has_base else each[experts].mean(dim=0)
    vectors, target = each[experts] - start, each[sampled.names.index(name)] - start
    grams = torch.stack(sampled.grams)
    # In these coordinates a model is a vector over models, and a matrix's Gram matrix is the inner product.
    inner, cross = vectors @ grams @ vectors.T, vectors @ (grams @ target)[..., None]
    energies = grams @ target @ target
    size = torch.diagonal(inner, dim1=1, dim2=2).sum() / len(experts)
    energy = energies.sum() if has_base else torch.maximum(energies.sum(), size)
    if energy <= ROUNDING * torch.diagonal(grams, dim1=1, dim2=2).mean(dim=1).sum():
        return None

    def fit(coefficients: Tensor) -> Fit:
        left = energies + (coefficients.mT @ (inner @ coefficients - 2 * cross))[:, 0, 0]
        return Fit(coefficients[..., 0], float(left.sum().clamp_min(0) / energy))

    return fit(_solved(inner.sum(dim=0), cross.sum(dim=0)).expand_as(cross)), fit(_solved(inner, cross))


def _solved(inner: Tensor, cross: Tensor) -> Tensor:
    # Equal experts make it singular, up to what rounding leaves; the smallest solution shares their coefficient.
    return torch.linalg.lstsq(inner, cross, rcond=1e-8, driver="gelsd").solution
