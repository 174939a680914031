"""Moments of one norm, grown batch by batch and task by task."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from driftlens.engine.problems import NormProblem
from driftlens.linalg.norm_affine import NormMoments
from driftlens.models.chain import Parameters, Site


class NormSums:
    """Sums over normalised rows of the merged model; the wanted output is the expert's affine map of the same rows.

    Args:
        site: a layer norm or an RMS norm.
        rule: by which tokens count.
        fold: a task's moments into those of the tasks before.
        dtype: of the sums.
    """

    def __init__(
        self,
        site: Site,
        *,
        rule: str,
        fold: Callable[[NormMoments | None, NormMoments], NormMoments],
        dtype: torch.dtype,
    ) -> None:
        self.site = site
        self.rule = rule
        self._fold = fold
        self._dtype = dtype
        self._task: tuple[Tensor, Tensor, Tensor] | None = None
        self._total: NormMoments | None = None

    def add(self, rows: Tensor, weights: Tensor | None) -> None:
        """Add one batch of the task at hand: what the merged model feeds the norm [T, k], and how much rows count."""
        unit = normalised(self.site, rows)
        if weights is None:
            count = torch.tensor(len(rows), dtype=self._dtype, device=rows.device)
            sums = unit.sum(dim=0), unit.square().sum(dim=0), count
        else:
            weighted = unit * weights[:, None]
            sums = weighted.sum(dim=0), (weighted * unit).sum(dim=0), weights.sum()
        # Converted copies of whole batches would take longer than the sums; those of batches are kept in `dtype`.
        first, second, count = (part.to(self._dtype) for part in sums)
        if self._task is not None:
            first, second, count = first + self._task[0], second + self._task[1], count + self._task[2]
        self._task = first, second, count

    def end_task(self, expert: Parameters) -> None:
        """Fold the task at hand into the sums over tasks; its moments are means, of weight 1."""
        assert self._task is not None
        first, second, count = self._task
        shift = expert.get(f"{self.site.name}.bias")
        moments = NormMoments.of_affine(
            mean=first / count,
            second=second / count,
            scale=expert[f"{self.site.name}.weight"].to(self._dtype),
            shift=None if shift is None else shift.to(self._dtype),
            weight_sum=torch.ones((), dtype=self._dtype, device=first.device),
        )
        self._total = self._fold(self._total, moments)
        self._task = None

    def problem(self, merged: Parameters, base: Parameters | None) -> NormProblem:
        """What is to be solved; `merged` and `base` are the whole layer's parameters."""
        assert self._total is not None
        mine = [f"{self.site.name}.{part}" for part in ("weight", "bias")]
        return NormProblem(
            site=self.site,
            moments=self._total,
            merged={name: merged[name] for name in mine if name in merged},
            base=None if base is None else {name: base[name] for name in mine if name in base},
        )


def normalised(site: Site, rows: Tensor) -> Tensor:
    """Rows as the norm sees them before its scale and shift, [T, k]."""
    eps = torch.finfo(rows.dtype).eps if site.eps is None else site.eps
    if site.kind == "layer_norm":
        return F.layer_norm(rows, rows.shape[-1:], eps=eps)
    return rows * torch.rsqrt(rows.square().mean(dim=-1, keepdim=True) + eps)
