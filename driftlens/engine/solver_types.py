"""What the walk hands to a calibrator, and what it gets back: problems of one layer, and their solutions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from driftlens.engine.pool import Attachment
from driftlens.linalg.gram import JointMoments
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
