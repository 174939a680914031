"""Calibration layer by layer: the loop in forward order, and solves of all sites of a layer from one snapshot."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from driftlens.checkpoints.tensor_sources import StateSource, stored_change
from driftlens.engine.pool import Attachment, LayerMap, ModelPool, with_updated_parameters
from driftlens.engine.sites import (
    ExpertFeatureCache,
    SiteActivations,
    norm_without_affine,
    record_activations,
    require_weight_rule,
    row_weights,
    select_site_parameters,
    site_path,
    stack_site_biases,
    stack_site_weights,
)
from driftlens.engine.walk import CachedBatch, FeatureStore, FeatureStream, LibraryDrift, Parts
from driftlens.linalg.gram import (
    CrossMomentSum,
    GramSum,
    ResidualMoments,
    TargetOutputSums,
    add_scaled,
    half_to_float,
    solve_bytes,
)
from driftlens.linalg.ridge import LinearMoments, NormMoments
from driftlens.models.chain import Layer, Parameters, Pool, SideInputs, Site, SiteKind, State
from driftlens.utils.devices import (
    convert_moments_oom,
    full_precision_matmul,
    moments_budget,
    moments_device,
    to_float64,
)
from driftlens.utils.distributed import ALONE, ProcessGroup
from driftlens.utils.errors import NumericsError, ShapeError
from driftlens.utils.variants import ModelChange, expert_name

EXPERT, MERGED = "expert", "merged"


@dataclass(frozen=True)
class LinearProblem:
    """The regression problem of linear modules that read the same inputs, so that they share a Gram matrix.

    `moments` and `expert_bias` (by site) are averages over tasks by task weight; outputs are stacked in the order of
    `sites`. `num_rows` counts the rows of an expert of a mixture, and is empty for other modules.
    """

    sites: tuple[Site, ...]
    moments: LinearMoments
    expert_bias: Mapping[str, Tensor]
    merged: Parameters
    base: Parameters | None
    num_rows: Sequence[int] = ()


@dataclass(frozen=True)
class NormProblem:
    """The regression problem of one norm's scale and shift: moments of all tasks, each with weight 1."""

    sites: tuple[Site]
    moments: NormMoments
    merged: Parameters
    base: Parameters | None


@dataclass(frozen=True)
class StepwiseProblem:
    """The regression problem of linear modules whose inputs come after all earlier modules were solved.

    `folds` are moments of each fold of the samples, over all tasks by task weight; `tasks` are output metrics and
    moments of each task. With `has_bias`, the last input is the constant that biases belong to. `num_rows` is per fold.
    """

    sites: tuple[Site, ...]
    folds: Sequence[ResidualMoments]
    tasks: Sequence[tuple[Tensor, ResidualMoments]]
    has_bias: bool
    merged: Parameters
    task_weight_sum: float
    num_rows: Sequence[int] = ()
    has_views: bool = False


Problem = LinearProblem | NormProblem


@dataclass(frozen=True)
class SiteReport:
    """The result of the solve of one module (site): a row of the calibration table.

    Attributes:
        site: the module's path in the library's names; a calibrator fills in its name in the layer.
        kind: `kept` for an expert of a mixture that has too few rows and stays as merged.
        lam: ridge, relative to a Gram matrix of Frobenius norm 1; 0 without an anchor.
        objective_before: objective (Eq. 15 or 57) at the merged parameters; None if not computed.
        objective_after: objective at the calibrated parameters; never more than before.
        weight_change: |dW|_F / |W|_F against the merged weight, scale and shift together; None if that is zero.
        condition_estimate: of the inverted matrix; None if it is two by two or a number.
        smallest_eigenvalue: of that matrix, estimated.
        task_weight_sum: sum over tasks of the task weights omega; the number of tasks for a norm.
        task_weight_share: task_weight_sum / (task_weight_sum + lam), the share of a bias that is not the anchor's.
        upstream_ridge: ridge of the repair of upstream errors.
        upstream_share: share in [0, 1] of that repair, chosen on held-out samples.
        stationarity_error: see `driftlens.linalg.ridge.stationarity_error`; None for iterations.
        change: fields of a `driftlens.utils.variants.ModelChange`: the loss by rounding to the saved dtype.
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
    """New parameters of one module (site), by their names in the layer, and the report of the solve."""

    parameters: Mapping[str, Tensor]
    report: SiteReport


@dataclass(frozen=True)
class TargetSpec:
    """The regression target of a linear module, W_i (a x_expert + (1 - a) x_merged) with a = `expert_share` (Eq. 10).

    `token_weights` is the adapter's rule for token weights; `uniform` weighs all alike.
    """

    expert_share: float
    token_weights: str


@dataclass(frozen=True)
class CalibratedLayer:
    """One calibrated layer: its new parameters and reports, or the corrections of its output by task.

    `updates` are in the pool's dtype but rounded to the checkpoint's; `drift_l2_mean` is by task the mean norm of the
    pooled drift after the layer, empty for the last.
    """

    layer: int
    updates: Mapping[str, Tensor] = field(default_factory=dict)
    reports: Sequence[SiteReport] = ()
    drift_l2_mean: Mapping[str, float] = field(default_factory=dict)
    attachments: Mapping[str, Attachment] = field(default_factory=dict)


_Solved = tuple[dict[str, Tensor], list[SiteReport]]
"""New parameters by the layer's names, and a report per site."""


@dataclass(frozen=True)
class CalibrationProgress:
    """The progress of a calibration; `layer` is 0 while token weights are computed, `task` is empty after a layer."""

    layer: int
    task: str
    done: int
    total: int
    label: str
    loss: float | None = None


@dataclass(frozen=True)
class CalibrationContext:
    """The models, samples and resources of a calibration; nothing in it is modified.

    Attributes:
        parts: calibration samples by task, `viewed` if they have views; tasks are processed in the order of names.
        sites: layer index -> names of its sites, see `select_sites`; empty for trained corrections.
        done: layers calibrated before an interruption -> their updates, which are applied and not recomputed.
        feature_budget: bytes of cached features in memory, and about as many for sums over experts of a mixture.
        spill: folder for features beyond the budget, emptied at the end; None keeps all in memory.
        on_step: called at every step; it may raise, `Cancelled` for instance.
        pooling: the pooling of features for `drift_l2_mean`; None takes the modality's default.
        team: the processes of a distributed calibration. Each has tasks of its own; all get all layers.
        objectives: if True, reports hold the objectives of linear sites, for about a tenth of the time on CPUs.
        library: the library's own features of a task's first samples, with which its expert's are compared on the way.
        like: the model in whose dtypes the result is saved; None for the base, or without one the merged model.
    """

    pool: ModelPool
    parts: Parts
    sites: Mapping[int, Collection[str]] = field(default_factory=dict)
    base: str | None = "base"
    done: Mapping[int, Mapping[str, Tensor]] = field(default_factory=dict)
    feature_budget: int = 2 << 30
    spill: Path | None = None
    on_step: Callable[[CalibrationProgress], None] = lambda step: None
    pooling: Pool | None = None
    team: ProcessGroup = ALONE
    objectives: bool = True
    seed: int = 0
    library: Mapping[str, LibraryDrift] = field(default_factory=dict)
    like: StateSource | None = None
    expert_features: ExpertFeatureCache = field(default_factory=ExpertFeatureCache)

    @property
    def has_views(self) -> bool:
        """True if any calibration sample is an altered copy (view) of another sample."""
        return any(getattr(part, "original", None) is not None for part in self.parts.values())

    @property
    def tasks(self) -> list[str]:
        """The tasks of all processes, in processing order."""
        return sorted(self.parts)

    def store(self) -> FeatureStore:
        """Create an empty store for cached features."""
        return FeatureStore(self.feature_budget, self.spill)


class ClosedFormSolver:
    """A calibrator that solves from moments of the features, and never holds a model.

    `update` are the kinds of parameters that are solved for. `inputs` are the features that a layer reads while its
    moments are summed: `deployed` from the calibrated layers before it, or `merged` or `expert` from that model.
    """

    solve_dtype: str = "float64"
    update: Sequence[str] = ("linear", "bias", "norm")
    inputs: str = "deployed"

    def solve(self, problem: Any) -> Sequence[SiteUpdate]:
        """Solve one regression problem; return new parameters of each of its modules."""
        raise NotImplementedError

    def min_rows_to_solve(self, width: int) -> int:
        """Return the least number of rows per fold to solve a mixture's expert; with fewer it stays as merged."""
        return 1


class CalibrationLoop(ABC):
    """The calibration loop: solves the chosen modules of each layer in forward order, and passes features on.

    `parts` holds the samples of this process's tasks. The main process adds the sums of all tasks in their order.
    """

    def __init__(self, context: CalibrationContext, calibrator: ClosedFormSolver) -> None:
        self.context, self.calibrator = context, calibrator
        self.pool, self.team, self.tasks = self.context.pool, self.context.team, self.context.tasks
        self.owners = self.team.owner_ranks(self.tasks)
        self.pooling = self.context.pooling or self.pool.chain.modality.pool
        self.parts = {task: self.context.parts[task] for task in self.team.own_items(self.tasks)}
        self.sites = {
            index: names for index, names in self.context.sites.items() if names and index not in self.context.done
        }
        # Layers after the last solve are never run.
        self.last = max(self.sites, default=0)
        self.is_weighing = False
        self.stream = FeatureStream(
            self.pool,
            self.parts,
            (EXPERT, MERGED),
            self.context.store(),
            self._report_step,
            self._compare_with_library,
            file_prefix=f"{self.team.rank}-",
        )

    def calibrated_layers(self) -> Iterator[CalibratedLayer]:
        """Yield the calibrated layers in forward order, up to the last layer with chosen modules."""
        with self.stream.store:
            for layer in self.pool.chain.layers[: self.last]:
                if layer.index not in self.sites:
                    done = self.context.done.get(layer.index, {})
                    self._propagate_features(layer, done if self.calibrator.inputs == "deployed" else {})
                    continue
                yield self._calibrate_layer(layer, self.sites[layer.index], is_last=layer.index == self.last)
                # A step after the solve, so that an interruption here finds the layer stored.
                label = f"layer {layer.index} of {self.last}"
                self.context.on_step(CalibrationProgress(layer.index, "", layer.index, self.last, label))

    @abstractmethod
    def _calibrate_layer(self, layer: Layer, names: Collection[str], *, is_last: bool) -> CalibratedLayer:
        """Solve the modules `names` of one layer. Unless it `is_last`, pass all features to the next boundary."""

    def _report_step(self, layer: int, task: str) -> None:
        """Report one step to the progress callback, as layer 0 while token weights are computed."""
        layer = 0 if self.is_weighing else layer
        label = f"layer {layer} of {self.last}, task {task}" if layer else f"weighing tokens, task {task}"
        self.context.on_step(CalibrationProgress(layer, task, max(0, layer - 1), self.last, label))

    def _compare_with_library(self, layer: Layer, batch: CachedBatch, model: str, left: State) -> None:
        if model == EXPERT and batch.start == 0 and batch.task in self.context.library:
            self.context.library[batch.task].compare_expert(layer, left)

    @torch.no_grad()
    @full_precision_matmul()
    def _propagate_features(self, layer: Layer, done: Mapping[str, Tensor]) -> None:
        """Pass all models' features through a layer; the merged model uses the stored parameters in `done`."""
        merged = self.pool.parameters("merged", layer)
        # Stored updates come from a file, in its dtype and on the host.
        merged = with_updated_parameters(layer, merged, {name: value.to(merged[name]) for name, value in done.items()})
        for task in self.parts:
            expert = LayerMap(layer, self._expert_parameters(layer, task))
            for batch in self.stream.batches(layer, task):
                self.stream.take(layer, batch, EXPERT, expert, named="the expert")
                self.stream.take(layer, batch, MERGED, LayerMap(layer, merged), named="the merged model")
        self.stream.check()

    def _expert_parameters(self, layer: Layer, task: str) -> Parameters:
        return self.pool.parameters(expert_name(task), layer)

    def _advance_merged_features(
        self, layer: Layer, merged: Parameters, updates: dict[str, Tensor]
    ) -> dict[str, float]:
        """Run the merged features through the calibrated layer; return the mean drift after it by task.

        `updates` become views of the layer's new parameters, see `with_updated_parameters`.
        """
        calibrated = with_updated_parameters(layer, merged, updates)
        means: dict[str, Tensor] = {}
        for task in self.parts:
            sizes = []
            for batch in self.stream.batches(layer, task):
                through = self._calibrated_map(layer, calibrated, batch)
                left = self.stream.take(layer, batch, MERGED, through, named="the calibrated model")
                ours, expert = (
                    layer.pool_state(state, batch.side, self.pooling) for state in (left, batch.get(EXPERT))
                )
                sizes.append(torch.linalg.vector_norm(to_float64(ours - expert), dim=1))
            if sizes:
                means[task] = torch.cat(sizes).mean()
        self.stream.check()
        # Read in one copy: every read synchronizes with the device.
        own = dict(zip(means, torch.stack([*means.values()]).tolist() if means else (), strict=True))
        drift = {task: mean for part in self.team.gather(own) for task, mean in part.items()}
        return {task: drift[task] for task in self.tasks if task in drift}

    def _calibrated_map(
        self, layer: Layer, calibrated: Parameters, batch: CachedBatch
    ) -> Callable[[State, SideInputs], State]:
        """Return the calibrated layer as a function of a batch's features."""
        return LayerMap(layer, calibrated)

    def _solve_on_main_process(self, layer: Layer, problems: Iterable[Problem | StepwiseProblem]) -> _Solved:
        """Solve regression problems in the main process; return new parameters, and a report per module.

        Parameters are rounded to the dtype of the saved model, so that later layers are fitted to what it computes.
        """
        # One process solves, so that all continue with the same bits.
        return self.team.run_on_main(partial(self._solve_problems, layer, problems))

    @convert_moments_oom()
    def _solve_problems(self, layer: Layer, problems: Iterable[Problem | StepwiseProblem]) -> _Solved:
        updates: dict[str, Tensor] = {}
        reports: list[SiteReport] = []
        for problem in problems:
            started = time.perf_counter()
            paths = {site.name: site_path(layer, site) for site in problem.sites}
            try:
                # A name for the unrounded solutions would keep them in memory during the next solve.
                solved = [self._round_to_saved_dtype(layer, update) for update in self._solve_or_keep_expert(problem)]
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

    def _solve_or_keep_expert(self, problem: Problem | StepwiseProblem) -> Sequence[SiteUpdate]:
        """Solve a problem, or keep the merged weights of a mixture expert that received too few tokens."""
        solve = self.calibrator.solve
        if isinstance(problem, NormProblem) or problem.sites[0].expert is None:
            return solve(problem)
        rows, width = sum(problem.num_rows), problem.merged[f"{problem.sites[0].name}.weight"].shape[1]
        # A fold without rows can't be held out, and few rows have no unique solution.
        if min(problem.num_rows) < self.calibrator.min_rows_to_solve(width):
            return [
                SiteUpdate({}, SiteReport(site.name, "kept", 0.0, None, None, 0.0, num_rows=rows))
                for site in problem.sites
            ]
        return [replace(update, report=replace(update.report, num_rows=rows)) for update in solve(problem)]

    def _round_to_saved_dtype(self, layer: Layer, update: SiteUpdate) -> SiteUpdate:
        source, parameters, change = self.pool.source("merged"), dict[str, Tensor](), ModelChange("")
        saved = (self.context.like or self.pool.source(self.context.base or "merged")).headers
        for name, value in update.parameters.items():
            slot = layer.parameters[name]
            if (
                expected := slot.layer_shape(source.headers[slot.key].shape)
            ) != value.shape:  # or assignment would broadcast it
                raise ShapeError(f"the solution of {name} is {[*value.shape]}, expected {[*expected]}")
            dtype = saved[slot.key].dtype
            # In float32, as a float64 solve changes even unchanged parameters by rounding.
            change += stored_change(source, slot.key, slot.to_stored_layout(value).float(), dtype, slot.rows)
            parameters[name] = value.to(dtype).to(self.pool.device, self.pool.dtype)
        return SiteUpdate(parameters, replace(update.report, change=vars(change)))


class LayerwiseCalibrator(ClosedFormSolver):
    """A calibrator that solves all modules of a layer at once, by default towards the experts' outputs."""

    def calibrated_layers(self, context: CalibrationContext) -> Iterator[CalibratedLayer]:
        """Yield the calibrated layers in forward order."""
        return LayerwiseLoop(context, self).calibrated_layers()

    def target_spec(self, site: Site, *, in_last_block: bool) -> TargetSpec:
        """Return the regression target of a linear module."""
        return TargetSpec(1.0, site.token_weights)

    def task_weight(self, gram_norm: Tensor) -> Tensor:
        """Return the weight of a task, given the Frobenius norm of its Gram matrix."""
        return torch.ones_like(gram_norm)

    @abstractmethod
    def solve(self, problem: Problem) -> Sequence[SiteUpdate]:
        """Return new parameters of the problem's modules; nothing in the problem is modified.

        The Gram matrix of a linear problem is valid during this call only: the next layer uses its memory.
        """


class _InputSums(NamedTuple):
    """Sums over one task's input rows: Gram matrix, inputs, weights, and number of rows with nonzero weight."""

    gram: GramSum
    rows: Tensor
    weight_sum: Tensor
    num_rows: Tensor

    def add(self, rows: Tensor, weights: Tensor | None) -> None:
        """Add rows [T, k] with weights [T] to the sums; None gives each row weight 1."""
        rows, weights = half_to_float(rows), None if weights is None else half_to_float(weights)
        if weights is None:
            self.weight_sum.add_(len(rows))
            self.num_rows.add_(len(rows))
            self.rows.add_(rows.sum(dim=0).to(self.rows.device))
        else:
            parts = weights.sum(), weights.count_nonzero(), weights @ rows
            for total, part in zip((self.weight_sum, self.num_rows, self.rows), parts, strict=True):
                total += part.to(total.device)
            # Both factors of the product are scaled by the root, which gives each row its weight.
            rows = rows * weights.sqrt()[:, None]
        self.gram.add_rows(rows)


@dataclass(frozen=True)
class _TaskSums:
    """Sums over one task's rows, as exchanged between processes: inputs, target outputs, biases by module."""

    inputs: _InputSums
    outputs: TargetOutputSums
    biases: Mapping[str, Tensor]


@dataclass(eq=False)
class _LinearSums:
    """Running sums for linear modules with the same inputs: one Gram matrix, and their stacked target outputs.

    Sums over tasks are of each task's mean, times its `task_weight`.
    """

    sites: Sequence[Site]
    target: TargetSpec
    task_weight: Callable[[Tensor], Tensor]
    dtype: torch.dtype
    objectives: bool
    _inputs: _InputSums | None = field(default=None, init=False)
    _cross: CrossMomentSum | None = field(default=None, init=False)
    _total: GramSum | None = field(default=None, init=False)
    _energy: Tensor | None = field(default=None, init=False)
    _bias: dict[str, Tensor] = field(default_factory=dict, init=False)

    def add(
        self,
        rows: Tensor,
        seen: SiteActivations,
        weights: Tensor | None,
        expert: Parameters,
        num_batches: int,
    ) -> None:
        """Add inputs of the merged model, [T, k], with row weights, and the expert's inputs and outputs."""
        if self._cross is None:
            self._cross = CrossMomentSum(
                stack_site_weights(expert, self.sites),
                stack_site_biases(expert, self.sites),
                alpha=self.target.expert_share,
                num_rows=max(1, len(rows)) * max(1, num_batches),
                dtype=self.dtype,
                energies=self.objectives,
            )
            k, device = rows.shape[1], moments_device(self.dtype, rows.device)
            # The memory of the last task's matrix, as the first touch of new memory is slow.
            gram = self._inputs.gram if self._inputs else GramSum(k, self.dtype, device)
            gram.clear()
            zeros = torch.zeros(k, dtype=self.dtype, device=device)
            self._inputs = _InputSums(gram, zeros, zeros.new_zeros(()), zeros.new_zeros(()))
        assert self._inputs is not None
        expert_rows = seen.inputs[self.sites[0].name].flatten(0, -2)
        expert_outputs = [seen.outputs[site.name].flatten(0, -2) for site in self.sites]
        self._cross.add(rows, expert_rows, expert_outputs, weights)
        self._inputs.add(rows, weights)

    @convert_moments_oom()
    def finish_task_sums(self, expert: Parameters) -> _TaskSums | None:
        """Return the sums of the current task and start the next task; None if the layer read no row of it."""
        cross, self._cross = self._cross, None
        if cross is None or self._inputs is None:
            return None
        biases = {site.name: bias for site in self.sites if (bias := expert.get(f"{site.name}.bias")) is not None}
        return _TaskSums(self._inputs, cross.sums(self._inputs.gram), biases)

    @convert_moments_oom()
    def _add_task_sums(self, task: _TaskSums) -> None:
        """Add the sums of one task to those over all tasks, unless all its rows have weight 0."""
        inputs, sums = task.inputs, task.outputs
        if self._total is None:
            like = inputs.rows
            self._total = GramSum(len(like), like.dtype, like.device)
            self._output_cross = like.new_zeros(len(sums.target), len(like))
            self._rows, self._targets = torch.zeros_like(like), like.new_zeros(len(sums.target))
            self._weight, self._count = like.new_zeros(()), like.new_zeros(())
        self._count += inputs.num_rows
        weight = self.task_weight(inputs.gram.norm() / inputs.weight_sum)
        # A branch in Python would synchronize with the device for every task and group.
        omega = torch.where(inputs.num_rows > 0, weight, 0.0)
        scale = torch.where(inputs.num_rows > 0, weight / inputs.weight_sum, 0.0)
        self._total.add(inputs.gram, scale)
        add_scaled(self._output_cross, sums.cross, scale)
        if sums.energy is not None:
            energy = scale * sums.energy.to(self._rows)
            self._energy = energy if self._energy is None else self._energy + energy
        self._rows += scale * inputs.rows
        self._targets += (scale * sums.target).to(self._rows.device)
        self._weight += omega
        for name, bias in task.biases.items():
            self._bias[name] = self._bias.get(name, 0.0) + omega * bias.to(self._rows)

    def problem(self, merged: Parameters, base: Parameters | None) -> LinearProblem:
        """Build the regression problem of the linear modules from the sums over all tasks."""
        assert self._total is not None
        place = self._total.device
        return LinearProblem(
            sites=tuple(self.sites),
            # Divided in place: a second copy of the Gram matrix may not fit.
            moments=LinearMoments(
                gram=self._total.full_matrix().div_(self._weight),
                output_cross=self._output_cross.div_(self._weight),
                mean_in=self._rows / self._weight,
                mean_target=self._targets / self._weight,
                target_energy=None if self._energy is None else self._energy / self._weight,
                weight_sum=self._weight,
            ),
            expert_bias={name: bias / self._weight for name, bias in self._bias.items()},
            merged=select_site_parameters(merged, self.sites, place),
            base=None if base is None else select_site_parameters(base, self.sites, place),
            num_rows=() if self.sites[0].expert is None else (int(self._count),),
        )


@dataclass(eq=False)
class _NormSums:
    """Running sums over normalised rows of the merged model; the target is the expert's affine map of them."""

    sites: tuple[Site]
    target: TargetSpec
    dtype: torch.dtype
    _task: tuple[Tensor, Tensor, Tensor] | None = field(default=None, init=False)
    _total: NormMoments | None = field(default=None, init=False)

    def add(self, rows: Tensor, weights: Tensor | None) -> None:
        """Add inputs of the norm in the merged model, [T, k], with row weights, to the sums."""
        unit = norm_without_affine(self.sites[0], rows)
        weights = rows.new_ones(len(rows)) if weights is None else weights
        weighted = unit * weights[:, None]
        sums = weighted.sum(dim=0), (weighted * unit).sum(dim=0), weights.sum()
        # Converting whole batches to `dtype` would take longer than summing them; only the sums are converted.
        total, squares, count = (part.to(moments_device(self.dtype, part.device), self.dtype) for part in sums)
        if self._task is not None:
            total, squares, count = total + self._task[0], squares + self._task[1], count + self._task[2]
        self._task = total, squares, count

    def finish_task_sums(self, expert: Parameters) -> NormMoments | None:
        """Return the moments of the current task and start the next task; None if the layer read no row of it."""
        task, self._task = self._task, None
        if task is None:
            return None
        total, squares, count = task
        shift = expert.get(f"{self.sites[0].name}.bias")
        return NormMoments.from_affine(
            mean=total / count,
            second=squares / count,
            scale=expert[f"{self.sites[0].name}.weight"].to(total),
            shift=None if shift is None else shift.to(total),
            weight_sum=torch.ones((), dtype=self.dtype, device=total.device),
        )

    def _add_task_sums(self, task: NormMoments) -> None:
        self._total = task if self._total is None else self._total + task

    def problem(self, merged: Parameters, base: Parameters | None) -> NormProblem:
        """Build the regression problem of the norm from the moments over all tasks."""
        total = self._total
        assert total is not None
        place = total.mean.device
        pulls = None if base is None else select_site_parameters(base, self.sites, place)
        return NormProblem(self.sites, total, select_site_parameters(merged, self.sites, place), pulls)


_Sums = _LinearSums | _NormSums


class LayerwiseLoop(CalibrationLoop):
    """The calibration loop that solves all modules of a layer from one snapshot of its features."""

    calibrator: LayerwiseCalibrator

    def __init__(self, context: CalibrationContext, calibrator: LayerwiseCalibrator) -> None:
        super().__init__(context, calibrator)
        # Measured before features fill the device. Processes must agree, as they sum the same sites at the same time.
        self.room = min(self.team.gather(moments_budget(self.pool.device, self.context.feature_budget)))

    @torch.no_grad()
    @full_precision_matmul()
    def _calibrate_layer(self, layer: Layer, names: Collection[str], *, is_last: bool) -> CalibratedLayer:
        merged = self.pool.parameters("merged", layer)
        updates: dict[str, Tensor] = {}
        reports: list[SiteReport] = []
        runs = self._sites_by_pass(layer, merged, names)
        for number, run in enumerate(runs, start=1):
            parts = self._empty_moment_sums(layer, run)
            is_final = number == len(runs)
            self._accumulate_layer_moments(layer, merged, parts, is_final=is_final, moves=is_final and not is_last)
            problems = (part.problem(merged, self._base_site_parameters(layer, part.sites)) for part in parts)
            of_run, reports_of_run = self._solve_on_main_process(layer, problems)
            updates |= of_run
            reports += reports_of_run
            del parts, problems  # free their memory before features pass
        if is_last:
            return CalibratedLayer(layer.index, updates, reports)
        is_deployed = self.calibrator.inputs == "deployed"
        drift = self._advance_merged_features(layer, merged, updates if is_deployed else {})
        return CalibratedLayer(layer.index, updates, reports, drift if is_deployed else {})

    def _sites_by_pass(self, layer: Layer, merged: Parameters, names: Collection[str]) -> list[list[str]]:
        """Split modules into passes over the samples, so that the sums of each pass fit in memory."""
        sites = sorted((site for site in layer.sites if site.name in names), key=lambda x: x.kind != "linear")
        runs: list[list[str]] = [[]]
        total = 0
        for site in sites:
            # Only experts of a mixture are split into runs: other sites of a layer share one pass.
            size = 0 if site.expert is None else solve_bytes(*merged[f"{site.name}.weight"].shape)
            if size and total and total + size > self.room:
                runs.append([])
                total = 0
            runs[-1].append(site.name)
            total += size
        return runs

    def _empty_moment_sums(self, layer: Layer, names: Collection[str]) -> list[_Sums]:
        """Create empty sums for modules; linear ones with equal input and token weights share a Gram matrix."""
        dtype: torch.dtype = getattr(torch, self.calibrator.solve_dtype)
        groups: dict[tuple[str, TargetSpec], list[Site]] = {}
        norms: list[_NormSums] = []
        for site in layer.sites:
            if site.name not in names:
                continue
            target = self.calibrator.target_spec(site, in_last_block=layer is self.pool.chain.blocks[-1])
            require_weight_rule(self.pool.chain, target.token_weights)
            if site.kind == "linear":
                # Sites with one input and one rule share a Gram matrix and its factor.
                groups.setdefault((site.input, target), []).append(site)
            else:
                norms.append(_NormSums((site,), target, dtype))
        weight, objectives = self.calibrator.task_weight, self.context.objectives
        linear = [_LinearSums(sites, target, weight, dtype, objectives) for (_, target), sites in groups.items()]
        return [*linear, *norms]

    def _accumulate_layer_moments(
        self,
        layer: Layer,
        merged: Parameters,
        parts: Sequence[_Sums],
        *,
        is_final: bool,
        moves: bool,
    ) -> None:
        """Accumulate the moments of all tasks; if `moves`, also pass the experts' features to the next layer."""
        for task, owner in self.owners.items():
            expert: Parameters = {}
            if owner == self.team.rank:
                expert = self._expert_parameters(layer, task)
                for batch in self.stream.batches(layer, task):
                    if layer.has_inputs_in(batch.side):
                        self._accumulate_batch_moments(layer, merged, expert, batch, parts, moves=moves)
                    elif is_final:
                        self.stream.take(layer, batch, EXPERT, LayerMap(layer, expert), named="the expert")
            part: Any
            for part in parts:
                of_task = self.team.run_on_rank(owner, partial(part.finish_task_sums, expert))
                if of_task is not None:
                    part._add_task_sums(of_task)
        self.stream.check()

    def _accumulate_batch_moments(
        self,
        layer: Layer,
        merged: Parameters,
        expert: Parameters,
        batch: CachedBatch,
        parts: Sequence[_Sums],
        *,
        moves: bool,
    ) -> None:
        linear = [part for part in parts if isinstance(part, _LinearSums)]
        # Linear sites of one group read the same rows, so one tap per group is enough.
        inputs = {part.sites[0].name for part in linear}
        outputs = {site.name for part in linear for site in part.sites}
        state = batch.get(EXPERT)
        seen, left = self.context.expert_features.record_activations(
            batch, layer, expert, state, inputs, outputs, stops=not moves
        )
        if moves:
            self.stream.store_output(layer, batch, EXPERT, left, named="the expert")
        # With the expert's routes in both models, rows of a mixture's expert are pairs of the same tokens.
        routes = seen.side.routes
        side = batch.side if routes is None else batch.side.with_routes(routes.fixed_copy())
        if self.calibrator.inputs != "expert":
            state = batch.get(MERGED)
        taps = {part.sites[0].name for part in parts}
        rows_of = record_activations(layer, merged, state, side, taps, stops=True)[0].inputs
        # Unknown during the first pass, when batches are still being read.
        num_batches = len(self.stream.cached.get(batch.task, ()))
        for part in parts:
            site = part.sites[0]
            weights = row_weights(
                self.pool.chain, layer, site, rows_of[site.name], state, side, part.target.token_weights
            )
            rows = rows_of[site.name].flatten(0, -2)
            if isinstance(part, _NormSums):
                part.add(rows, weights)
            else:
                part.add(rows, seen, weights, expert, num_batches)

    def _base_site_parameters(self, layer: Layer, sites: Collection[Site]) -> Parameters | None:
        """Return the base model's parameters of some modules; None without a base."""
        names = [f"{site.name}.{part}" for site in sites for part in ("weight", "bias")]
        held = [name for name in names if name in layer.parameters]
        return None if self.context.base is None else self.pool.parameters(self.context.base, layer, held)
