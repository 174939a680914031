"""Moments of linear sites that read the same rows, grown batch by batch and task by task."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from driftlens.engine.problems import LinearFold, LinearProblem, TaskMoments, Wanted
from driftlens.linalg.gram import GramPool, GramSum
from driftlens.linalg.output_cross import output_cross
from driftlens.models.chain import Parameters, Site


class LinearSums:
    """Sums over rows of one group of sites: one Gram matrix, and the outputs wanted from every site, stacked.

    Args:
        sites: all reading the same rows, and of which the same is wanted.
        wanted: which outputs are.
        fold: what becomes of every task's moments.
        dtype: of the sums; products are taken in the dtype of the rows.
        objectives: whether the energy of the wanted outputs is summed up, without which there are no objectives.
        grams: where Gram sums come from; the moments live in them until they are taken back.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        *,
        wanted: Wanted,
        fold: LinearFold,
        dtype: torch.dtype,
        objectives: bool,
        grams: GramPool,
    ) -> None:
        self.sites = tuple(sites)
        self.wanted = wanted
        self._fold = fold
        self._dtype = dtype
        self._objectives = objectives
        self._task: TaskMoments | None = None
        self._grams = grams
        self._gram: GramSum | None = None  # of the task at hand; its memory serves task after task

    def add(
        self,
        rows: Tensor,
        expert_rows: Tensor,
        expert_outputs: Sequence[Tensor],
        weights: Tensor | None,
        expert: Parameters,
        num_rows: int,
    ) -> None:
        """Add one batch of the task at hand.

        Args:
            rows: what the merged model feeds the sites, [T, k].
            expert_rows: what the expert feeds them, [T, k].
            expert_outputs: what each site of the expert makes of that, [T, o].
            weights: how much each row counts, [T]; None counts each 1.
            expert: the expert's parameters.
            num_rows: about how many rows all batches of the task have together.
        """
        if self._gram is None:
            self._gram = self._grams.lend(rows.shape[1], self._dtype, rows.device)
        if self._task is None:
            self._gram.clear()
            weight = stacked(expert, self.sites)
            cross = output_cross(
                weight,
                _stacked_bias(expert, self.sites),
                alpha=self.wanted.expert_share,
                num_rows=num_rows,
                dtype=self._dtype,
                energies=self._objectives,
            )
            self._task = TaskMoments(self._gram, cross, shape=weight.shape)
        self._task.add(rows, expert_rows, expert_outputs, weights)

    def end_task(self, expert: Parameters) -> None:
        """Fold the task at hand into the sums over tasks."""
        assert self._task is not None
        biases = {site.name: expert.get(f"{site.name}.bias") for site in self.sites}
        self._task.biases = {name: bias for name, bias in biases.items() if bias is not None}
        self._fold.add(self._task)
        self._task = None

    def problem(self, merged: Parameters, base: Parameters | None) -> LinearProblem:
        """What is to be solved; `merged` and `base` are the whole layer's parameters."""
        mine = [f"{site.name}.{part}" for site in self.sites for part in ("weight", "bias")]
        return LinearProblem(
            sites=self.sites,
            moments=self._fold.moments(),
            expert_bias=self._fold.mean_bias(),
            merged={name: merged[name] for name in mine if name in merged},
            base=None if base is None else {name: base[name] for name in mine if name in base},
        )


def stacked(parameters: Parameters, sites: Sequence[Site]) -> Tensor:
    """The weights of some sites below each other, [O, k]; not a copy where there is one site."""
    weights = [parameters[f"{site.name}.weight"] for site in sites]
    return weights[0] if len(weights) == 1 else torch.cat(weights)


def _stacked_bias(parameters: Parameters, sites: Sequence[Site]) -> Tensor:
    weights = (parameters[f"{site.name}.weight"] for site in sites)
    biases = (parameters.get(f"{site.name}.bias") for site in sites)
    return torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)])
