"""Moments of linear sites that read the same rows, grown batch by batch and task by task."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from driftlens.engine.problems import LinearProblem
from driftlens.linalg.gram import GramSum
from driftlens.linalg.moments import Moments
from driftlens.linalg.output_cross import OutputCross
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
    """

    def __init__(
        self,
        sites: Sequence[Site],
        *,
        alpha: float,
        task_weight: Callable[[Tensor], Tensor],
        dtype: torch.dtype,
        objectives: bool = True,
    ) -> None:
        self.sites = tuple(sites)
        self._alpha = alpha
        self._task_weight = task_weight
        self._dtype = dtype
        self._objectives = objectives
        self._task: _Task | None = None
        self._total: _Total | None = None
        self._gram: GramSum | None = None  # of the task at hand; its memory serves task after task

    def add(
        self, rows: Tensor, expert_rows: Tensor, weights: Tensor | None, expert: Parameters, num_rows: int
    ) -> None:
        """Add one batch of the task at hand.

        Args:
            rows: what the merged model feeds the sites, [T, k].
            expert_rows: what the expert feeds them, [T, k].
            weights: how much each row counts, [T]; None counts each 1.
            expert: the expert's parameters.
            num_rows: about how many rows all batches of the task have together.
        """
        targets = torch.lerp(rows, expert_rows, self._alpha)
        if self._gram is None:
            self._gram = GramSum(rows.shape[1], self._dtype, rows.device)
        if self._task is None:
            self._gram.clear()
            weight = stacked(expert, self.sites)
            cross = OutputCross(weight, num_rows, self._dtype, energies=self._objectives)
            self._task = _Task(self._gram, weight, cross)
        self._task.add(rows, targets, weights)

    def end_task(self, expert: Parameters) -> None:
        """Fold the task at hand into the sums over tasks."""
        assert self._task is not None
        if self._total is None:
            self._total = _Total(self._task)
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


class _Task:
    """Sums over the rows of one task."""

    def __init__(self, gram: GramSum, weight: Tensor, cross: OutputCross) -> None:
        self.gram = gram
        self.weight = weight
        self.cross = cross
        self.rows = torch.zeros(weight.shape[1], dtype=gram.dtype, device=weight.device)
        self.targets = torch.zeros_like(self.rows)
        self.weight_sum = self.rows.new_zeros(())

    def add(self, rows: Tensor, targets: Tensor, weights: Tensor | None) -> None:
        if weights is None:
            self.weight_sum += len(rows)
            self.rows += rows.sum(dim=0)
            self.targets += targets.sum(dim=0)
        else:
            self.weight_sum += weights.sum()
            self.rows += weights @ rows
            self.targets += weights @ targets
            # With both factors of every product scaled by the root, each row counts its weight.
            root = weights.sqrt()[:, None]
            rows, targets = rows * root, targets * root
        self.gram.add_rows(rows)
        self.cross.add(rows, targets)


class _Total:
    """Sums over tasks, each divided by its rows' weight and multiplied by its task weight."""

    def __init__(self, like: _Task) -> None:
        outputs, k = like.weight.shape
        dtype, device = like.rows.dtype, like.rows.device
        self._gram = GramSum(k, dtype, device)
        self._cross = torch.zeros(outputs, k, dtype=dtype, device=device)
        self._rows = torch.zeros(k, dtype=dtype, device=device)
        self._targets = torch.zeros(outputs, dtype=dtype, device=device)
        self._energy: Tensor | None = None
        self._weight = torch.zeros((), dtype=dtype, device=device)
        self._bias: dict[str, Tensor] = {}

    def add(
        self, task: _Task, task_weight: Callable[[Tensor], Tensor], biases: dict[str, Tensor | None]
    ) -> None:
        omega = task_weight(task.gram.norm() / task.weight_sum)
        scale = float(omega / task.weight_sum)
        cross, energy = task.cross.sums()
        self._gram.add(task.gram, scale)
        add_scaled(self._cross, cross, scale)
        if energy is not None:
            energy = scale * energy.to(self._rows.dtype)
            self._energy = energy if self._energy is None else self._energy + energy
        self._rows += scale * task.rows
        self._targets += scale * (task.weight @ task.targets.to(task.weight))
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
