"""What the walk hands to a calibrator, and what it gets back: problems of one layer, and their solutions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from driftlens.base.devices import summing
from driftlens.engine.attached import Attachment
from driftlens.linalg.gram import GramPool, GramSum, JointMoments, add_scaled, single
from driftlens.linalg.output_cross import OutputCross, OutputSums
from driftlens.linalg.ridge import Moments, NormMoments
from driftlens.models.chain import Parameters, Site, SiteKind


@dataclass(frozen=True)
class LinearProblem:
    """Linear sites of one layer that read the same rows, so that they share a Gram matrix.

    Attributes:
        sites: in the order in which their outputs are stacked in `moments`.
        moments: of all tasks together, each counting its task weight; outputs are those of `sites`, stacked.
        expert_bias: by site, the average of the experts' biases over tasks, each counting its task weight.
        merged: the sites' parameters in the merged model, by the layer's own names.
        base: the same in the base, or None without one.
        num_rows: of an expert of a mixture, over how many rows that count anything the moments are; one number.
    """

    sites: tuple[Site, ...]
    moments: Moments
    expert_bias: Mapping[str, Tensor]
    merged: Parameters
    base: Parameters | None
    num_rows: Sequence[int] = ()


@dataclass(frozen=True)
class NormProblem:
    """One norm of one layer; `moments` are of all tasks together, each counting 1. The rest as in `LinearProblem`."""

    site: Site
    moments: NormMoments
    merged: Parameters
    base: Parameters | None


@dataclass(frozen=True)
class StepProblem:
    """Linear sites of one layer that read the same rows, their inputs taken after all sites before them were solved.

    Attributes:
        sites: in the order in which their outputs are stacked.
        folds: moments of every fold of the samples, all tasks together, each counting its task weight.
        tasks: output metric and moments of every task over all folds, where the calibrator has an output metric.
        has_bias: whether the last input is the constant that the biases belong to.
        merged: the sites' parameters in the merged model, by the layer's own names.
        task_weight_sum: sum over tasks of the task weights.
        num_rows: of every fold.
        has_views: whether some of the samples are copies of others.
    """

    sites: tuple[Site, ...]
    folds: Sequence[JointMoments]
    tasks: Sequence[tuple[Tensor, JointMoments]]
    has_bias: bool
    merged: Parameters
    task_weight_sum: float
    num_rows: Sequence[int] = ()
    has_views: bool = False


Problem = LinearProblem | NormProblem


@dataclass(frozen=True)
class SiteReport:
    """What the solve of one site did.

    Attributes:
        site: the module's path in the library's own names; a calibrator gives its name in the layer.
        kind: of the solve; `kept` where an expert of a mixture has too few rows and stays as merged.
        lam: ridge, relative to a Gram matrix of Frobenius norm 1; 0 without an anchor.
        objective_before: objective (Eq. 15 or 57) at the merged parameters; None where nobody asked for it.
        objective_after: objective at the calibrated parameters; never more than before.
        weight_change: |dW|_F / |W|_F against the merged weight, scale and shift together for a norm; None where that
            is zero.
        condition_estimate: of the matrix that was inverted, estimated; None where that is two by two or a number.
        smallest_eigenvalue: of that matrix, estimated.
        task_weight_sum: sum over tasks of the task weights omega; the number of tasks for a norm.
        task_weight_share: task_weight_sum / (task_weight_sum + lam): how much of a bias is the tasks', not the
            anchor's; None where there is no bias.
        seconds: time spent on the solve.
        upstream_ridge: ridge of the repair of what upstream sites left; None where a calibrator has no such repair.
        upstream_share: share in [0, 1] of that repair which held-out samples supported.
        stationarity_error: of the equations that the weights solve, see `stationarity_error` in `linalg.cholesky`; None
            for iterations, or where nothing is solved.
        num_rows: rows that an expert of a mixture was sent; None for what every token passes.
        change: how much of the way from the merged parameters is left in the dtype that is saved; the entries of a
            `Change` in `base.rounding`.
    """

    site: str
    kind: SiteKind | Literal["kept"]
    lam: float
    objective_before: float | None
    objective_after: float | None
    weight_change: float | None
    condition_estimate: float | None = None
    smallest_eigenvalue: float | None = None
    task_weight_sum: float | None = None
    task_weight_share: float | None = None
    seconds: float = 0.0
    upstream_ridge: float | None = None
    upstream_share: float | None = None
    stationarity_error: float | None = None
    num_rows: int | None = None
    change: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SiteUpdate:
    """New parameters of one site, by the layer's own names, and how they came about."""

    parameters: Mapping[str, Tensor]
    report: SiteReport

    @classmethod
    def kept(cls, site: Site, num_rows: int) -> SiteUpdate:
        """Return the update of an expert of a mixture that has too few rows and stays as merged."""
        return cls({}, SiteReport(site.name, "kept", 0.0, None, None, 0.0, num_rows=num_rows))


@dataclass(frozen=True)
class Wanted:
    """Which moments of a linear site a calibrator wants.

    `expert_share` is a in the wanted output W_i (a x_expert + (1 - a) x_merged) (FeatCal, Eq. 10, alpha);
    `token_weights` the adapter's rule by which tokens count, `uniform` counts all alike. Masked tokens never count.
    """

    expert_share: float
    token_weights: str


class InputSums(NamedTuple):
    """Sums over the rows of one task that belong to inputs alone: Gram matrix [k, k], inputs [k], weights [].

    `num_rows` [] are those that count anything.
    """

    gram: GramSum
    rows: Tensor
    weight_sum: Tensor
    num_rows: Tensor


class TaskMoments:
    """Growing sums over the rows of one task.

    `gram` [k, k] and `rows` [k] are of what the merged model feeds the sites, `cross` of the wanted outputs with that,
    `weight_sum` says how much all rows count together.
    """

    def __init__(self, inputs: InputSums, cross: OutputCross, *, is_known: bool = False) -> None:
        self.gram, self.rows, self.weight_sum, self.num_rows = inputs
        self.cross = cross
        self._is_known = is_known

    @summing()
    def sums(self, biases: Mapping[str, Tensor]) -> TaskSums:
        """Return the sums of all rows, with the expert's biases by site."""
        inputs = InputSums(self.gram, self.rows, self.weight_sum, self.num_rows)
        return TaskSums(inputs, self.cross.sums(self.gram), biases)

    def add(
        self, rows: Tensor, expert_rows: Tensor, expert_outputs: Sequence[Tensor], weights: Tensor | None
    ) -> None:
        """Add rows, arguments as for `LinearSums.add`."""
        self.cross.add(rows, expert_rows, expert_outputs, weights)
        if self._is_known:
            return
        rows, weights = single(rows), None if weights is None else single(weights)
        if weights is None:
            self.weight_sum += len(rows)
            self.num_rows += len(rows)
            self.rows += rows.sum(dim=0).to(self.rows.device)
        else:
            parts = weights.sum(), weights.count_nonzero(), weights @ rows
            for total, part in zip((self.weight_sum, self.num_rows, self.rows), parts, strict=True):
                total += part.to(total.device)
            # With both factors of the product scaled by the root, each row counts its weight.
            rows = rows * weights.sqrt()[:, None]
        self.gram.add_rows(rows)


@dataclass(frozen=True)
class TaskSums:
    """Sums over the rows of one task: the unit that calibrators fold, and that processes send.

    `outputs` are of the wanted outputs with the inputs, `biases` the expert's, by site.
    """

    inputs: InputSums
    outputs: OutputSums
    biases: Mapping[str, Tensor]


class WeightedFold:
    """Moments of linear sites: sums over tasks, each divided by its rows' weight and multiplied by its task weight.

    `task_weight` says how much a task counts, from the Frobenius norm of its mean Gram matrix.
    """

    def __init__(self, grams: GramPool, task_weight: Callable[[Tensor], Tensor]) -> None:
        self._grams = grams
        self._task_weight = task_weight
        self._gram: GramSum | None = None
        self._energy: Tensor | None = None
        self._bias: dict[str, Tensor] = {}

    def _begun(self, num_outputs: int, like: Tensor) -> GramSum:
        if self._gram is None:
            self._gram = self._grams.lend(len(like), like.dtype, like.device)
            self._cross = like.new_zeros(num_outputs, len(like))
            self._rows, self._targets = torch.zeros_like(like), like.new_zeros(num_outputs)
            self._weight, self._count = like.new_zeros(()), like.new_zeros(())
        return self._gram

    @summing()
    def add(self, task: TaskSums) -> None:
        """Take in one task, unless no row of it counts; its memory serves the next task afterwards."""
        inputs, sums = task.inputs, task.outputs
        gram = self._begun(len(sums.target), inputs.rows)
        self._count += inputs.num_rows
        weight = self._task_weight(inputs.gram.norm() / inputs.weight_sum)
        # Not asked in Python, which would have to wait for every task and group: a task without rows adds zeros.
        omega = torch.where(inputs.num_rows > 0, weight, 0.0)
        scale = torch.where(inputs.num_rows > 0, weight / inputs.weight_sum, 0.0)
        gram.add(inputs.gram, scale)
        add_scaled(self._cross, sums.cross, scale)
        if sums.energy is not None:
            energy = scale * sums.energy.to(self._rows)
            self._energy = energy if self._energy is None else self._energy + energy
        self._rows += scale * inputs.rows
        self._targets += (scale * sums.target).to(self._rows.device)
        self._weight += omega
        for name, bias in task.biases.items():
            self._bias[name] = self._bias.get(name, 0.0) + omega * bias.to(self._rows)

    @property
    def num_rows(self) -> int:
        """How many rows of all tasks count anything."""
        return int(self._count)

    def moments(self) -> Moments:
        """Of all tasks together, divided by the sum of their task weights."""
        assert self._gram is not None
        return Moments(
            gram=self._gram.full().div_(self._weight),
            output_cross=self._cross.div_(self._weight),
            mean_in=self._rows / self._weight,
            mean_target=self._targets / self._weight,
            target_energy=None if self._energy is None else self._energy / self._weight,
            weight_sum=self._weight,
        )

    def mean_bias(self) -> dict[str, Tensor]:
        """The experts' biases by site, each counting its task weight."""
        return {name: bias / self._weight for name, bias in self._bias.items()}


@dataclass(frozen=True)
class CalibratedLayer:
    """One layer, calibrated, or a part of it.

    Attributes:
        layer: its index; 1 is the stem.
        updates: calibrated parameters by the layer's own names, in the pool's dtype and on its device, holding only
            what the checkpoint's own dtype can hold.
        reports: one per site.
        drift_l2_mean: by task, the mean over samples of the norm of the pooled drift that leaves the calibrated layer;
            empty for the last layer walked, which is not run again.
        attachments: what is attached to the last layer, by task.
    """

    layer: int
    updates: Mapping[str, Tensor] = field(default_factory=dict)
    reports: Sequence[SiteReport] = ()
    drift_l2_mean: Mapping[str, float] = field(default_factory=dict)
    attachments: Mapping[str, Attachment] = field(default_factory=dict)
