"""What the walk hands to a calibrator, and what it gets back: problems of one layer, and their solutions."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from driftlens.linalg.gram import GramPool
from driftlens.linalg.norm_affine import NormMoments
from driftlens.linalg.ridge import Moments
from driftlens.models.chain import Parameters, Site, SiteKind

if TYPE_CHECKING:
    from driftlens.engine.linear_sums import TaskMoments


@dataclass(frozen=True)
class LinearProblem:
    """Linear sites of one layer that read the same rows, so that they share a Gram matrix.

    Attributes:
        sites: in the order in which their outputs are stacked in `moments`.
        moments: of all tasks together, each counting its task weight; outputs are those of `sites`, stacked.
        expert_bias: by site, the average of the experts' biases over tasks, each counting its task weight.
        merged: the sites' parameters in the merged model, by the layer's own names.
        base: the same in the base, or None without one.
    """

    sites: tuple[Site, ...]
    moments: Moments
    expert_bias: Mapping[str, Tensor]
    merged: Parameters
    base: Parameters | None


@dataclass(frozen=True)
class NormProblem:
    """One norm of one layer; `moments` are of all tasks together, each counting 1. The rest as in `LinearProblem`."""

    site: Site
    moments: NormMoments
    merged: Parameters
    base: Parameters | None


Problem = LinearProblem | NormProblem


@dataclass(frozen=True)
class SiteReport:
    """What the solve of one site did.

    Attributes:
        site: the module's path in the library's own names; a calibrator gives its name in the layer.
        kind: of the solve.
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
    """

    site: str
    kind: SiteKind
    lam: float
    objective_before: float | None
    objective_after: float | None
    weight_change: float | None
    condition_estimate: float | None = None
    smallest_eigenvalue: float | None = None
    task_weight_sum: float | None = None
    task_weight_share: float | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class SiteUpdate:
    """New parameters of one site, by the layer's own names, and how they came about."""

    parameters: Mapping[str, Tensor]
    report: SiteReport


@dataclass(frozen=True)
class Wanted:
    """Which moments of a linear site a calibrator wants.

    Attributes:
        expert_share: a in the wanted output W_i (a x_expert + (1 - a) x_merged) (FeatCal, Eq. 10, alpha).
        token_weights: the adapter's rule by which tokens count; `uniform` counts all alike. Masked tokens never count.
    """

    expert_share: float
    token_weights: str


class LinearFold(Protocol):
    """Per-task moments of one group of linear sites on their way to the moments that are solved from."""

    def add(self, task: TaskMoments) -> None:
        """Take in one task; its memory serves the next task afterwards."""
        ...

    def moments(self) -> Moments:
        """What is solved from."""
        ...

    def mean_bias(self) -> dict[str, Tensor]:
        """By site, the experts' biases folded as the moments are."""
        ...


class ClosedForm(Protocol):
    """A calibrator that solves from moments: it says which it wants, folds those of the tasks, and solves.

    It never holds a model. One file in `driftlens.calibration` each; `driftlens.calibration.calibrator.ClosedFormBase`
    has defaults for all but `solve`.

    Attributes:
        solve_dtype: `float32` or `float64`, in which moments are summed and systems solved.
        update: kinds of parameters that are solved for: `linear`, `bias`, `norm`.
    """

    solve_dtype: str
    update: Sequence[str]

    @property
    def moments_key(self) -> Hashable:
        """Equal for calibrators that want the same moments and fold them alike."""
        ...

    def check(self, *, has_base: bool) -> None:
        """Refuse settings that make no sense.

        Raises:
            SpecError: names the setting and what was expected.
        """
        ...

    def wants(self, site: Site, *, in_last_block: bool) -> Wanted:
        """Which moments of a site are wanted."""
        ...

    def fold(self, grams: GramPool) -> LinearFold:
        """An empty fold of tasks for one group of linear sites; Gram matrices come from `grams`."""
        ...

    def fold_norm(self, total: NormMoments | None, task: NormMoments) -> NormMoments:
        """A norm's moments of one more task folded into those of the tasks before."""
        ...

    def solve(self, problem: Problem) -> Sequence[SiteUpdate]:
        """New parameters of the problem's sites; nothing that is handed in is modified.

        The Gram matrix of a linear problem is lent for this call: its memory serves the next layer too.

        Raises:
            NumericsError: the moments hold NaN or infinite entries.
            SingularGramError: a system can't be solved as asked.
        """
        ...


@dataclass(frozen=True)
class CalibratedLayer:
    """One layer, calibrated.

    Attributes:
        layer: its index; 1 is the stem.
        updates: calibrated parameters by the layer's own names, in the pool's dtype and on its device, holding only
            what the checkpoint's own dtype can hold.
        reports: one per site.
        drift_l2_mean: by task, the mean over samples of the norm of the pooled drift that leaves the calibrated layer;
            empty for the last layer walked, which is not run again.
        seconds: its own work, and an equal share of what it had in common with calibrations beside it.
    """

    layer: int
    updates: Mapping[str, Tensor]
    reports: Sequence[SiteReport]
    drift_l2_mean: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
