"""What all calibrations walk on, and what those have in common that solve for weights, layer by layer.

Alive at a time: one layer of the expert at hand, the merged model and the base, what is summed up of one layer, and the
features that wait, those beyond a budget on disk.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from driftlens.checkpoints.tensor_sources import StateSource, written
from driftlens.data.samples import SampleSet
from driftlens.data.views import viewed
from driftlens.engine.pool import Attachment, LayerMap, ModelPool, replaced
from driftlens.engine.sites import SiteRows, rows_and_output, site_path
from driftlens.engine.walk import CachedBatch, FeatureStore, FeatureStream, Parts
from driftlens.linalg.gram import JointMoments
from driftlens.linalg.ridge import Moments, NormMoments
from driftlens.models.chain import Layer, Parameters, Pool, Site, SiteKind, State
from driftlens.utils.devices import exact_products, summing, wide
from driftlens.utils.distributed import ALONE, Team
from driftlens.utils.errors import NumericsError, ShapeError
from driftlens.utils.progress import LayerSteps
from driftlens.utils.rounding import Change
from driftlens.utils.variants import expert_of

EXPERT, MERGED = "expert", "merged"


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

    sites: tuple[Site]
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
        stationarity_error: of the equations that the weights solve, see `stationarity_error` in `linalg.ridge`; None
            for iterations, or where nothing is solved.
        num_rows: rows that an expert of a mixture was sent; None for what every token passes.
        change: how much of the way from the merged parameters is left in the dtype that is saved; the entries of a
            `Change` in `utils.rounding`.
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


Solved = tuple[dict[str, Tensor], list[SiteReport]]
"""A layer's new parameters by its own names, and a report per site."""
_Key = tuple[str, int, int, frozenset[str], frozenset[str], bool]


@dataclass
class ExpertFeatures:
    """A cache of what experts' sites read and return, and of what leaves their layers; 0 bytes cache nothing.

    An expert's features don't depend on the merged model or on a calibrator's settings. A later calibration on the same
    samples that wants the same sites takes them from here, and gets bit-identical weights.
    """

    budget: int = 0
    _num_bytes: int = field(default=0, init=False)
    _passes: dict[_Key, tuple[SiteRows, State]] = field(default_factory=dict, init=False)

    def rows_and_output(
        self,
        batch: CachedBatch,
        layer: Layer,
        expert: Parameters,
        state: State,
        inputs: Collection[str],
        outputs: Collection[str],
        *,
        stops: bool,
    ) -> tuple[SiteRows, State]:
        """Return what `rows_and_output` returns of an expert's layer, from the cache where it was computed before.

        Args:
            batch: some of the task's samples; a cache is asked for the same batches every time.
            layer: the layer to run.
            expert: the expert's parameters of the layer.
            state: the expert's features before the layer.
            inputs: sites whose inputs are wanted.
            outputs: sites whose outputs are wanted.
            stops: whether the layer is left after the last of these sites.
        """
        key = batch.task, batch.start, layer.index, frozenset(inputs), frozenset(outputs), stops
        if key in self._passes:
            return self._passes[key]
        passed = rows_and_output(layer, expert, state, batch.side, inputs, outputs, stops=stops)
        rows, left = passed
        tensors = [*rows.inputs.values(), *rows.outputs.values(), *left.values()]
        # Sites that read the same tensor share its memory.
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        num_bytes = self._num_bytes + sum(storage.nbytes() for storage in storages.values())
        if num_bytes <= self.budget:
            self._num_bytes = num_bytes
            self._passes[key] = passed
        return passed


@dataclass(frozen=True)
class Step:
    """What a calibration is at: told before every batch, and now and then while something is trained.

    `layer` is its index, 0 or less while samples are weighed beforehand; `task` is empty where a layer is finished;
    `label` says the same in words, and `loss` is of what is trained.
    """

    layer: int
    task: str
    done: int
    total: int
    label: str
    loss: float | None = None


@dataclass(frozen=True)
class CalibrationContext:
    """What a calibration walks on, whatever the calibrator; nothing of it is modified.

    Attributes:
        pool: base, merged model and one expert per task.
        parts: calibration samples by task, to which their views are added. Tasks are taken in the order of their
            names.
        sites: layer index -> names of its sites, see `select_sites`; none for what is trained.
        base: the pool's name of the base, or None without one.
        done: layers calibrated before an interruption -> their updates, which are applied and not recomputed.
        feature_budget: bytes of waiting features that may stay in memory, and about as many of sums over experts of a
            mixture, or what an accelerator has room for; experts beyond that are summed up and solved in further runs.
        spill: folder for features beyond the budget, emptied again whatever happens; None keeps all in memory.
        on_step: told of every step; it may raise, `Cancelled` for instance.
        pooling: how one vector per sample is taken for `drift_l2_mean`; None takes what suits the modality.
        team: processes that do the same at the same time, each with tasks of its own; all get all layers.
        objectives: whether reports hold the objectives of linear sites; on CPUs they cost about a tenth of the time.
        seed: every task that is trained draws from a generator of its own.
        like: in whose dtypes the calibrated model is saved; None for the base, or without one the merged model.
        expert_features: cache of what experts make of these samples; by default nothing is cached.
    """

    pool: ModelPool
    parts: Parts
    sites: Mapping[int, Collection[str]] = field(default_factory=dict)
    base: str | None = "base"
    done: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)
    feature_budget: int = 2 << 30
    spill: Path | None = None
    on_step: Callable[[Step], None] = lambda step: None
    pooling: Pool | None = None
    team: Team = ALONE
    objectives: bool = True
    seed: int = 0
    like: StateSource | None = None
    expert_features: ExpertFeatures = field(default_factory=ExpertFeatures)

    def __post_init__(self) -> None:
        parts = {
            task: viewed(part) if isinstance(part, SampleSet) and part.views is not None else part
            for task, part in self.parts.items()
        }
        object.__setattr__(self, "parts", parts)

    @property
    def has_views(self) -> bool:
        """Whether any of the samples is a copy of another one."""
        return any(getattr(part, "original", None) is not None for part in self.parts.values())

    @property
    def tasks(self) -> list[str]:
        """Of all processes, in the order in which they are taken."""
        return sorted(self.parts)

    def store(self) -> FeatureStore:
        """An empty one for the features that wait."""
        return FeatureStore(self.feature_budget, self.spill)


class ClosedForm:
    """A calibrator that never holds a model: `Layerwise` and `Stepwise` solve from moments.

    Attributes:
        solve_dtype: `float32` or `float64`, in which moments are summed and systems solved.
        update: kinds of parameters that are solved for: `linear`, `bias`, `norm`.
        inputs: the features that a layer reads while its moments are summed: `deployed` from the calibrated layers
            before it, `merged` from the merged model, `expert` from the experts.
    """

    solve_dtype: str = "float64"
    update: Sequence[str] = ("linear", "bias", "norm")
    inputs: str = "deployed"

    def solve(self, problem: Any) -> Sequence[SiteUpdate]:
        """Return new parameters of a problem's sites."""
        raise NotImplementedError

    def least_rows(self, width: int) -> int:
        """Return how many rows an expert of a mixture needs in every fold, by its inputs; else it stays as merged."""
        return 1


class CalibrationWalk(ABC):
    """Calibrates every layer that has chosen sites, in forward order, and takes the features through the others.

    A subclass adds `calibrate`. `parts` holds the samples of this process's tasks. Each task's sums go to the main
    process, which adds them in the order of the tasks and solves.
    """

    def __init__(self, context: CalibrationContext, calibrator: ClosedForm) -> None:
        self.context, self.calibrator = context, calibrator
        self.pool, self.team, self.tasks = self.context.pool, self.context.team, self.context.tasks
        self.owners = self.team.owners(self.tasks)
        self.parts = {task: self.context.parts[task] for task in self.team.mine(self.tasks)}
        self.sites = {
            index: names
            for index, names in self.context.sites.items()
            if names and index not in self.context.done
        }
        self.last = max(self.sites, default=0)
        self.steps = LayerSteps(self.last)
        self.stream = FeatureStream(
            self.pool,
            self.parts,
            (EXPERT, MERGED),
            self.context.store(),
            self.tell,
            file_prefix=f"{self.team.rank}-",
        )

    def walked(self) -> Iterator[CalibratedLayer]:
        """Calibrated layers; the walk ends behind the last one with chosen sites."""
        with self.stream.store:
            for layer in self.pool.chain.layers[: self.last]:
                if layer.index not in self.sites:
                    done = self.context.done.get(layer.index, {})
                    self.pass_through(layer, done if self.calibrator.inputs == "deployed" else {})
                    continue
                yield self.calibrate(layer, self.sites[layer.index], is_last=layer.index == self.last)
                num_done, label = self.steps.at(layer.index + 1), f"layer {layer.index} of {self.last}"
                self.context.on_step(Step(layer.index, "", num_done, self.steps.total, label))

    @abstractmethod
    def calibrate(self, layer: Layer, names: Collection[str], *, is_last: bool) -> CalibratedLayer:
        """Solve the sites of one layer; unless it is the last one, take all features to the next boundary."""

    def tell(self, layer: int, task: str) -> None:
        """Say what is at hand; up to 0, how many steps are left of those before the first layer."""
        doing = f"layer {layer} of {self.last}" if layer > 0 else "weighing tokens"
        done = self.steps.at(layer)
        self.context.on_step(Step(layer, task, done, self.steps.total, f"{doing}, task {task}"))

    @torch.no_grad()
    @exact_products()
    def pass_through(self, layer: Layer, done: Mapping[str, Tensor]) -> None:
        """Take all features to the next boundary, the merged model's through the parameters in `done`."""
        merged = self.pool.parameters("merged", layer)
        merged = replaced(layer, merged, {name: value.to(merged[name]) for name, value in done.items()})
        for task in self.parts:
            expert = LayerMap(layer, self.expert(layer, task))
            for batch in self.stream.batches(layer, task):
                self.stream.take(layer, batch, EXPERT, expert, named="the expert")
                self.stream.take(layer, batch, MERGED, LayerMap(layer, merged), named="the merged model")
        self.stream.check()

    def expert(self, layer: Layer, task: str) -> Parameters:
        """Return the parameters of a task's expert."""
        return self.pool.parameters(expert_of(task), layer)

    def advance(self, layer: Layer, merged: Parameters, updates: dict[str, Tensor]) -> dict[str, float]:
        """Pass the merged features through the calibrated layer, and return the mean drift after it by task.

        `updates` become views of the layer's new parameters, see `replaced`.
        """
        calibrated_layer = LayerMap(layer, replaced(layer, merged, updates))
        pooling = self.context.pooling or self.pool.chain.modality.pool
        means: dict[str, Tensor] = {}
        for task in self.parts:
            sizes = []
            for batch in self.stream.batches(layer, task):
                left = self.stream.take(layer, batch, MERGED, calibrated_layer, named="the calibrated model")
                calibrated, expert = (
                    layer.vectors(state, batch.side, pooling) for state in (left, batch.get(EXPERT))
                )
                sizes.append(torch.linalg.vector_norm(wide(calibrated - expert), dim=1))
            if sizes:
                means[task] = torch.cat(sizes).mean()
        self.stream.check()
        # Read in one copy: every read synchronizes with the device.
        own = dict(zip(means, torch.stack([*means.values()]).tolist() if means else (), strict=True))
        drift = {task: mean for part in self.team.gather(own) for task, mean in part.items()}
        return {task: drift[task] for task in self.tasks if task in drift}

    def solved(self, layer: Layer, problems: Iterable[Problem | StepProblem]) -> Solved:
        """Solve problems of one snapshot in the main process; return new parameters and a report per site.

        Parameters are rounded to the dtype in which the calibrated model is saved, so that later layers are fitted to
        what the saved model computes. They are on the pool's device in its dtype. Reports state the rounding loss.
        """
        return self.team.once(partial(self._solve_all, layer, problems))

    @summing()
    def _solve_all(self, layer: Layer, problems: Iterable[Problem | StepProblem]) -> Solved:
        updates: dict[str, Tensor] = {}
        reports: list[SiteReport] = []
        for problem in problems:
            started = time.perf_counter()
            paths = {site.name: site_path(layer, site) for site in problem.sites}
            try:
                # No name for the unrounded solutions: they would be held while the next problem is solved.
                solved = [self._rounded(layer, update) for update in self._solved_or_kept(problem)]
            except NumericsError as error:
                named = ", ".join(paths.values())
                raise type(error)(
                    f"layer {layer.index}, {named}: {error.message}",
                    hint=error.hint,
                    **{**error.context, "layer": layer.index, "sites": named},
                ) from error
            seconds = (time.perf_counter() - started) / len(solved)
            for update in solved:
                reports.append(replace(update.report, site=paths[update.report.site], seconds=seconds))
                updates |= update.parameters
        return updates, reports

    def _solved_or_kept(self, problem: Problem | StepProblem) -> Sequence[SiteUpdate]:
        """Solve a problem, or keep an expert of a mixture that received too few tokens."""
        solve = self.calibrator.solve
        if isinstance(problem, NormProblem) or problem.sites[0].expert is None:
            return solve(problem)
        rows, width = sum(problem.num_rows), problem.merged[f"{problem.sites[0].name}.weight"].shape[1]
        if min(problem.num_rows) < self.calibrator.least_rows(width):
            return [
                SiteUpdate({}, SiteReport(site.name, "kept", 0.0, None, None, 0.0, num_rows=rows))
                for site in problem.sites
            ]
        return [replace(update, report=replace(update.report, num_rows=rows)) for update in solve(problem)]

    def _rounded(self, layer: Layer, update: SiteUpdate) -> SiteUpdate:
        """Round new parameters to the dtype of the saved model."""
        source, parameters, change = self.pool.source("merged"), dict[str, Tensor](), Change("")
        saved = (self.context.like or self.pool.source(self.context.base or "merged")).headers
        for name, value in update.parameters.items():
            slot = layer.parameters[name]
            if (
                expected := slot.shape(source.headers[slot.key].shape)
            ) != value.shape:  # it would be broadcast
                raise ShapeError(f"the solution of {name} is {[*value.shape]}, expected {[*expected]}")
            dtype = saved[slot.key].dtype
            # In float64 a solve differs by its own rounding from what it leaves as it is.
            change += written(source, slot.key, slot.stored(value).float(), dtype, slot.rows)
            parameters[name] = value.to(dtype).to(self.pool.device, self.pool.dtype)
        return SiteUpdate(parameters, replace(update.report, change=vars(change)))
