"""Moments of linear sites that read the same rows, grown batch by batch and task by task."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from driftlens.engine.problems import LinearProblem
from driftlens.linalg.gram import GramPool, GramSum
from driftlens.linalg.moments import Moments
from driftlens.linalg.output_cross import OutputCross, output_cross
from driftlens.linalg.sums import add_scaled
from driftlens.models.chain import Parameters, Site


class LinearSums:
    """Sums over rows of one group of sites: one Gram matrix, and the outputs wanted from every site, stacked.

    Wanted is W_i x_tgt with x_tgt = alpha * expert + (1 - alpha) * merged rows (Eq. 10).

    Args:
        sites: all reading the same rows with the same token weights.
        alpha: share of the expert's rows in the target.
        task_weight: how much a task counts, from the Frobenius norm of its Gram matrix.
        dtype: of the sums; products are taken in the dtype of the rows.
        objectives: whether the energy of the wanted outputs is summed up, without which there are no objectives.
        grams: where Gram sums come from; the moments live in them until they are taken back.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        *,
        alpha: float,
        task_weight: Callable[[Tensor], Tensor],
        dtype: torch.dtype,
        objectives: bool = True,
        grams: GramPool | None = None,
    ) -> None:
        self.sites = tuple(sites)
        self._alpha = alpha
        self._task_weight = task_weight
        self._dtype = dtype
        self._objectives = objectives
        self._task: _Task | None = None
        self._total: _Total | None = None
        self._grams = grams or GramPool()
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
                alpha=self._alpha,
                num_rows=num_rows,
                dtype=self._dtype,
                energies=self._objectives,
            )
            self._task = _Task(self._gram, cross, shape=weight.shape)
        self._task.add(rows, expert_rows, expert_outputs, weights)

    def end_task(self, expert: Parameters) -> None:
        """Fold the task at hand into the sums over tasks."""
        assert self._task is not None
        if self._total is None:
            gram = self._grams.lend(self._task.gram.k, self._dtype, self._task.gram.device)
            self._total = _Total(gram, self._task)
        biases = {site.name: expert.get(f"{site.name}.bias") for site in self.sites}
        self._total.add(self._task, self._task_weight, biases)
        self._task = None

    def problem(self, merged: Parameters, base: Parameters | None) -> LinearProblem:
        """What is to be solved; `merged` and `base` are the whole layer's parameters."""
        assert self._total is not None
        mine = [f"{site.name}.{part}" for site in self.sites for part in ("weight", "bias")]
        return LinearProblem(
            sites=self.sites,
            moments=self._total.moments(),
            expert_bias=self._total.mean_bias(),
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


class _Task:
    """Sums over the rows of one task; `shape` is that of the stacked weights."""

    def __init__(self, gram: GramSum, cross: OutputCross, shape: Sequence[int]) -> None:
        self.gram = gram
        self.cross = cross
        self.shape = shape
        self.rows = torch.zeros(shape[1], dtype=gram.dtype, device=gram.device)
        self.weight_sum = self.rows.new_zeros(())

    def add(
        self, rows: Tensor, expert_rows: Tensor, expert_outputs: Sequence[Tensor], weights: Tensor | None
    ) -> None:
        self.cross.add(rows, expert_rows, expert_outputs, weights)
        if weights is None:
            self.weight_sum += len(rows)
            self.rows += rows.sum(dim=0)
        else:
            self.weight_sum += weights.sum()
            self.rows += weights @ rows
            # With both factors of the product scaled by the root, each row counts its weight.
            rows = rows * weights.sqrt()[:, None]
        self.gram.add_rows(rows)


class _Total:
    """Sums over tasks, each divided by its rows' weight and multiplied by its task weight."""

    def __init__(self, gram: GramSum, like: _Task) -> None:
        outputs, k = like.shape
        self._gram = gram
        self._cross = like.rows.new_zeros(outputs, k)
        self._rows = like.rows.new_zeros(k)
        self._targets = like.rows.new_zeros(outputs)
        self._energy: Tensor | None = None
        self._weight = like.rows.new_zeros(())
        self._bias: dict[str, Tensor] = {}

    def add(
        self, task: _Task, task_weight: Callable[[Tensor], Tensor], biases: dict[str, Tensor | None]
    ) -> None:
        omega = task_weight(task.gram.norm() / task.weight_sum)
        scale = float(omega / task.weight_sum)
        found = task.cross.sums(task.gram)
        self._gram.add(task.gram, scale)
        add_scaled(self._cross, found.cross, scale)
        if found.energy is not None:
            energy = scale * found.energy.to(self._rows.dtype)
            self._energy = energy if self._energy is None else self._energy + energy
        self._rows += scale * task.rows
        self._targets += scale * found.target
        self._weight += omega
        for name, bias in biases.items():
            if bias is not None:
                self._bias[name] = self._bias.get(name, 0.0) + omega * bias.to(self._rows.dtype)

    def moments(self) -> Moments:
        return Moments(
            gram=self._gram.full().div_(self._weight),
            output_cross=self._cross.div_(self._weight),
            mean_in=self._rows / self._weight,
            mean_target=self._targets / self._weight,
            target_energy=None if self._energy is None else self._energy / self._weight,
            weight_sum=self._weight,
        )

    def mean_bias(self) -> dict[str, Tensor]:
        return {name: bias / self._weight for name, bias in self._bias.items()}
