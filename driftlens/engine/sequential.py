"""Residual calibration of a layer in steps: q, k and v, then out, fc1 and fc2, each on the outputs of the last step.

The target of a site is the expert's output. If the output is added to a residual stream, the target also contains the
difference between the two models' streams, so that the sum matches the expert's.

Tokens and tasks are weighed by random backward passes of the experts, without labels. With v ~ N(0, I) and f a
sample's final feature, g = d<v, f / |f|> / dy at the output y of a site; the energy of a token is the mean of |g|^2
over two such v. Gradients go back layer by layer, each layer recomputed alone.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from driftlens.engine.calibrating import (
    EXPERT,
    MERGED,
    CalibratedLayer,
    CalibrationContext,
    CalibrationLoop,
    ClosedFormSolver,
    SiteReport,
    StepwiseProblem,
)
from driftlens.engine.pool import LayerMap, ModelPool, with_updated_parameters
from driftlens.engine.sites import (
    ENTERED,
    find_residual_streams,
    record_activations,
    require_weight_rule,
    residual_stream,
    row_weights,
    stack_site_weights,
)
from driftlens.engine.walk import CachedBatch
from driftlens.linalg.gram import GramSum, ResidualSums, half_to_float
from driftlens.linalg.ridge import BIAS_INPUT
from driftlens.models.chain import ExpertRoutes, Layer, LayerChain, Parameters, SideInputs, Site, State
from driftlens.utils.devices import full_precision_matmul, to_device, to_float64, to_float64_device
from driftlens.utils.errors import DataError, NumericsError
from driftlens.utils.variants import expert_name

# Names of the routes that are cached with a batch, and of their parts.
_ROUTES, _CHOSEN, _GATES = "routes", "chosen experts", "gates"
# Least number of rows per product; products of few rows are slow.
_AT_ONCE = 2048
# Least weight of a task relative to others: an expert with constant outputs would divide by zero.
_LEAST = 1e-12

_NUM_PASSES = 2
# Bounds of token weights, relative to their mean: a token without gradient still counts a little.
_LEAST_ENERGY, _FLOOR = 1e-4, 0.02


@dataclass
class _GroupSums:
    """Running moments of one group of modules: by fold, and by task with its output metric and weight."""

    folds: list[ResidualSums]
    tasks: dict[str, tuple[Tensor, ResidualSums]]
    norms: dict[str, Tensor]
    factors: dict[str, float]
    num_rows: list[int]

    def add(self, other: _GroupSums) -> None:
        """Add the sums of one more task."""
        for fold, more in zip(self.folds, other.folds, strict=True):
            fold.join(more)
        self.tasks |= other.tasks
        self.norms |= other.norms
        self.factors |= other.factors
        self.num_rows = [before + more for before, more in zip(self.num_rows, other.num_rows, strict=True)]

    def problem(self, group: _SiteGroup, merged: Parameters, *, has_views: bool) -> StepwiseProblem:
        """Build the regression problem of the group from the sums, with Gram matrices scaled to mean norm 1."""
        norms = [self.norms[task] for task in sorted(self.norms)]
        # All inputs may be 0, which can't be scaled to norm 1.
        scale = 1 / float(torch.stack(norms).mean()) if sum(norms) > 0 else 1.0
        return StepwiseProblem(
            group.sites,
            [sums.moments(scale) for sums in self.folds],
            [(metric, sums.moments(scale)) for metric, sums in (self.tasks[task] for task in sorted(self.tasks))],
            group.has_bias,
            {name: value for name, value in merged.items() if name.rpartition(".")[0] in group.names},
            scale * sum(self.factors[task] for task in sorted(self.factors)),
            self.num_rows,
            has_views,
        )


class StepwiseCalibrator(ClosedFormSolver):
    """A calibrator that solves a layer's modules in steps, each on inputs recorded after the previous step.

    `order`, `residual`, `weights`, `mu` and `seed` are the settings of `ResidualCal`.
    """

    order: str
    residual: float
    weights: str
    mu: float
    seed: int

    @property
    @abstractmethod
    def num_folds(self) -> int:
        """The number of cross-validation folds of the samples; 1 without held-out samples."""

    def calibrated_layers(self, context: CalibrationContext) -> Iterator[CalibratedLayer]:
        """Yield the calibrated layers in forward order."""
        return _StepwiseLoop(context, self).calibrated_layers()

    def extra_cache_bytes(self, pool: ModelPool, sites: Mapping[int, Collection[str]]) -> int:
        """Return the bytes per task that cached second moments of gradients take, in float32."""
        headers = pool.source("merged").headers
        stacked_slots = (
            [layer.parameters[f"{site.name}.weight"] for site in group.sites]
            for layer in pool.chain.layers
            for group in linear_site_groups(layer, sites.get(layer.index, ()))
        )
        widths = (sum(slot.layer_shape(headers[slot.key].shape)[0] for slot in slots) for slots in stacked_slots)
        return 4 * sum(width**2 for width in widths) if self.mu else 0

    def require_enough_samples(self, count: int, task: str) -> None:
        """Raise a `DataError` if a task has fewer distinct samples than folds."""
        if count < self.num_folds:
            raise DataError(
                f"task {task!r} has {count} different calibration samples, which {self.num_folds} folds can't share",
                hint=f"Add samples, or set folds to at most {count}, or cv=off.",
                task=task,
            )


class _StepwiseLoop(CalibrationLoop):
    """The calibration loop that solves a layer in steps; the experts' module outputs are cached until then."""

    calibrator: StepwiseCalibrator

    def __init__(self, context: CalibrationContext, calibrator: StepwiseCalibrator) -> None:
        super().__init__(context, calibrator)
        self.groups: dict[int, list[_SiteGroup]] = {}
        self.weighted: dict[str, dict[_Key, _TokenWeights]] = {}
        self.energies: dict[str, dict[_Key, float]] = {}
        self.folds: dict[str, dict[str, int]] = {}
        self.chosen: dict[CachedBatch, ExpertRoutes] = {}
        # Modules of the current layer whose outputs no longer change, and the names under which these are cached.
        self.solved: set[str] = set()
        self.outputs: defaultdict[CachedBatch, list[str]] = defaultdict(list)
        self.stream.hashes = True

    @torch.no_grad()
    @full_precision_matmul()
    def _calibrate_layer(self, layer: Layer, names: Collection[str], *, is_last: bool) -> CalibratedLayer:
        if not self.groups:
            self._prepare_folds_and_weights(layer)
        groups, merged = self.groups[layer.index], self.pool.parameters("merged", layer)
        student, updates = merged, dict[str, Tensor]()
        reports: list[SiteReport] = []
        streams = self._run_experts_through_layer(layer, student, needs_output=not is_last)
        for step in self._groups_by_solve_step(groups):
            solved: dict[str, Tensor] = {}
            for number, group in step:
                # One pass per group, and its solve before the next pass: their sums together may not fit in memory.
                sums = self._group_moment_sums(layer, student, merged, number, group, streams)
                problems = (sums.problem(group, merged, has_views=self.context.has_views) for _ in range(1))
                parameters, group_reports = self._solve_on_main_process(layer, problems)
                solved |= parameters
                reports += group_reports
                self._drop_from_batches(_targets_name(group))
            updates |= solved
            # Sites that read the output of a mixture run again, as its experts are solved after them.
            if not layer.num_experts:
                self.solved.update(name for _, group in step for name in group.names)
            student, solved = merged, {}  # frees the parameters of the last step before new ones are made
            student = with_updated_parameters(layer, merged, updates)
        drift = {} if is_last else self._advance_merged_features(layer, merged, updates)
        self._drop_from_batches(_ROUTES, *{*itertools.chain.from_iterable(self.outputs.values())})
        self.solved, self.outputs = set(), defaultdict(list)
        return CalibratedLayer(layer.index, updates, reports, drift)

    def _drop_from_batches(self, *names: str) -> None:
        for batch in itertools.chain.from_iterable(self.stream.cached.values()):
            for name in names:
                batch.drop(name)

    def _calibrated_map(
        self, layer: Layer, calibrated: Parameters, batch: CachedBatch
    ) -> Callable[[State, SideInputs], State]:
        """Return the calibrated layer as a function of a batch's features, which continues from the last step."""
        known = self._known_outputs(batch)
        return lambda state, side: record_activations(layer, calibrated, state, side, (), known=known)[1]

    def _known_outputs(self, batch: CachedBatch) -> State:
        """Return the cached outputs of the calibrated modules of the current layer, by site."""
        return {site: y for name in self.outputs[batch] for site, y in batch.get(name).items()}

    def _groups_by_solve_step(self, groups: Sequence[_SiteGroup]) -> list[list[tuple[int, _SiteGroup]]]:
        """Split numbered groups of modules into steps; each step is solved from one snapshot of the features."""
        if self.calibrator.order == "block":
            return [list(enumerate(groups))]
        steps: dict[Hashable, list[tuple[int, _SiteGroup]]] = {}
        done = Counter[int]()
        for number, group in enumerate(groups):
            site = group.sites[0]
            key = site.input if site.expert is None else done[site.expert]
            done.update([] if site.expert is None else [site.expert])
            steps.setdefault(key, []).append((number, group))
        return [[group] for step in steps.values() for group in step]

    def _prepare_folds_and_weights(self, first_layer: Layer) -> None:
        """Read all samples, assign cross-validation folds, and compute gradient token weights of all layers."""
        for layer in self.pool.chain.layers:
            if layer.index in self.sites:
                names = self.sites[layer.index]
                # Groups are numbered once: token weights refer to them by layer and number.
                self.groups[layer.index] = linear_site_groups(layer, names)
                for group in self.groups[layer.index]:
                    require_weight_rule(self.pool.chain, group.sites[0].token_weights)
        self.is_weighing = True
        self.folds = {task: self._assign_folds(task, first_layer) for task in self.parts}
        if self.calibrator.weights == "gradient":
            for task in self.parts:
                self.weighted[task] = self._gradient_token_weights(task)
            self._gather_gradient_energies()
        self.is_weighing = False

    def _gather_gradient_energies(self) -> None:
        own = {task: {key: entry.energy for key, entry in groups.items()} for task, groups in self.weighted.items()}
        self.energies = {task: by_key for part in self.team.gather(own) for task, by_key in part.items()}

    def _assign_folds(self, task: str, first_layer: Layer) -> dict[str, int]:
        """Return the cross-validation fold of each sample by digest; equal samples and copies share a fold."""
        # Sorted digests assign folds independently of the order of samples.
        batches = self.stream.batches(first_layer, task)
        different = sorted({digest for batch in batches for digest in batch.originals})
        self.calibrator.require_enough_samples(len(different), task)
        return {digest: place % self.calibrator.num_folds for place, digest in enumerate(different)}

    def _gradient_token_weights(self, task: str) -> dict[_Key, _TokenWeights]:
        sums = self._accumulate_gradient_sums(task)
        self.stream.check()
        for (layer, _), entry in sums.items():
            if entry.energies and not bool(torch.isfinite(torch.cat(entry.energies)).all()):
                raise NumericsError(
                    f"gradients of the expert of {task!r} are NaN or infinite at layer {layer}",
                    hint="Set compute.dtype to float32, or weights to uniform.",
                )
        return {key: entry.weighted() for key, entry in sums.items()}

    def _accumulate_gradient_sums(self, task: str) -> dict[_Key, _GradientSums]:
        """Run a task's expert forward and backward; return gradient sums for token weights, by group of modules.

        The gradients' second moments are cached with the task's first batch: they may be larger than the model.
        """
        # Gradients are not needed before the first chosen layer.
        layers = self.pool.chain.layers[min(self.groups) - 1 :]
        self._cache_expert_features(task, layers)
        sums: dict[_Key, _GradientSums] = {}
        for layer in reversed(layers):
            parameters = self._expert_parameters(layer, task)
            entered = EXPERT if layer is layers[0] else _expert_features_name(layer.index - 1)
            sees = all(layer.has_inputs_in(batch.side) for batch in self.stream.cached[task])
            groups = self.groups.get(layer.index, ()) if sees else ()
            counts: list[list[Tensor]] = [[] for _ in groups]
            energies: list[list[Tensor]] = [[] for _ in groups]
            moments: list[GramSum | None] = [None for _ in groups]
            for batch in self.stream.batches(layer, task):
                side = batch.side.with_routes(ExpertRoutes()) if layer.num_experts else batch.side
                gradients_of = self._backpropagate_layer(layer, groups, parameters, batch, side, entered)
                for number, group in enumerate(groups):
                    y, gradients = gradients_of[number]
                    state = batch.get(entered)
                    count = _row_weights_or_ones(self.pool.chain, layer, group.sites[0], y, state, side)
                    if group.sites[0].expert is not None:  # the gradients include an expert's gates
                        count = count.ne(0).to(count)
                    counts[number].append(count)
                    rows = [g.reshape(-1, g.shape[-1]) for g in gradients]
                    energies[number].append(sum((g.square().sum(1) for g in rows), count * 0) / len(rows))
                    for g in rows if self.calibrator.mu > 0 else ():
                        moment = moments[number] = moments[number] or GramSum(
                            g.shape[1], half_to_float(g).dtype, g.device
                        )
                        moment.add_rows(g * count.sqrt()[:, None])
                # The expert's features before the first layer are still needed by the solve.
                if entered != EXPERT:
                    batch.drop(entered)
            for number, summed in enumerate(moments):
                entry = sums[layer.index, number] = _GradientSums(
                    _copy_to_one_buffer(counts[number]), _copy_to_one_buffer(energies[number])
                )
                if summed is not None:
                    full = summed.full_matrix()
                    entry.traces.append(to_float64(full).trace())
                    self.stream.cached[task][0].put(_gradient_moment_name((layer.index, number)), {"moment": full})
        for batch in self.stream.cached[task]:
            for number in range(self._num_backward_passes):
                batch.drop(f"back-{number}")
        return sums

    def _cache_expert_features(self, task: str, layers: Sequence[Layer]) -> None:
        """Run the expert forward and cache its features before every layer."""
        entered = EXPERT
        for layer in layers[:-1]:
            expert = self.pool.layer_map(expert_name(task), layer, task)
            for batch in self.stream.batches(layer, task):
                left = expert(batch.get(entered), batch.side)
                self.stream.store_output(layer, batch, _expert_features_name(layer.index), left, named="the expert")
            entered = _expert_features_name(layer.index)

    def _backpropagate_layer(
        self,
        layer: Layer,
        groups: Sequence[_SiteGroup],
        parameters: Parameters,
        batch: CachedBatch,
        side: SideInputs,
        entered: str,
    ) -> list[tuple[Tensor, list[Tensor]]]:
        """Backpropagate through one layer; return output and output gradients of every group of modules."""
        names = {site.name for group in groups for site in group.sites}
        num_passes = self._num_backward_passes
        outputs: dict[str, Tensor] = {}

        def output_recorder(site: str, x: Tensor) -> Callable[[Tensor], None] | None:
            return partial(outputs.__setitem__, site) if site in names else None

        with torch.enable_grad():
            state = {
                name: value.detach().requires_grad_(value.is_floating_point())
                for name, value in batch.get(entered).items()
            }
            out = layer.call(parameters, state, side, output_recorder if names else None)
            for name in names.difference(outputs):  # an expert without tokens
                weight = parameters[f"{name}.weight"]
                outputs[name] = weight.new_zeros(0, len(weight)).requires_grad_()
            if layer.role == "head":
                # Normalised features: scores of CLIP and embeddings are cosines.
                f = torch.nn.functional.normalize(layer.pool_state(out, batch.side, self.pooling), dim=-1)
                heads = [[(f * v.to(f)).sum()] for v in self._random_directions(batch.digests, f.shape[-1])]
                arriving: list[list[Tensor | None]] = [[None]] * num_passes
            else:
                # Both passes share one forward computation of the layer.
                heads = [list(out.values())] * num_passes
                backs = [batch.get(f"back-{number}") for number in range(num_passes)]
                arriving = [[back[name] for name in out] for back in backs]
        leaves = [value for value in state.values() if value.requires_grad]
        sites = [outputs[site.name] for group in groups for site in group.sites]
        gradients: list[list[Tensor]] = []
        for number in range(num_passes):
            is_kept = number + 1 < num_passes
            pairs = [pair for pair in zip(heads[number], arriving[number], strict=True) if pair[0].requires_grad]
            slopes = torch.autograd.grad(
                [value for value, _ in pairs],
                [*leaves, *sites],
                [gradient for _, gradient in pairs],
                retain_graph=is_kept,
                allow_unused=True,
            )
            full = [
                torch.zeros_like(value) if g is None else g for value, g in zip([*leaves, *sites], slopes, strict=True)
            ]
            batch.put(f"back-{number}", dict(zip(state, full, strict=False)))
            gradients.append(full[len(leaves) :])
        of_groups, start = [], 0
        for group in groups:
            places = slice(start, start + len(group.sites))
            of_groups.append((sites[start].detach(), [torch.cat(g[places], dim=-1) for g in gradients]))
            start = places.stop
        return of_groups

    @property
    def _num_backward_passes(self) -> int:
        """The number of backward passes per sample: 1 if there are altered copies, which add their own."""
        return 1 if self.context.has_views else _NUM_PASSES

    def _random_directions(self, digests: Sequence[str], width: int) -> Tensor:
        """Sample random directions for a batch, seeded by each sample's content."""
        rows = []
        for digest in digests:
            # Seeded by content, so that order and batch size don't change token weights.
            generator = torch.Generator().manual_seed((int(digest[:15], 16) + self.calibrator.seed) % 2**63)
            rows.append(torch.randn(self._num_backward_passes, width, generator=generator, dtype=torch.float64))
        return to_device(torch.stack(rows, dim=1).to(self.pool.dtype), self.pool.device)

    def _run_experts_through_layer(
        self, layer: Layer, student: Parameters, *, needs_output: bool
    ) -> Mapping[str, str]:
        """Run this process's experts through a layer; return the residual stream of each module."""
        groups, streams, first_task = self.groups[layer.index], None, ""
        self.chosen = {}
        names = [site.name for group in groups for site in group.sites]
        for task in self.parts:
            expert = self._expert_parameters(layer, task)
            counts: list[list[Tensor]] = [[] for _ in groups]
            for batch in self.stream.batches(layer, task):
                if not layer.has_inputs_in(batch.side):
                    self.stream.take(layer, batch, EXPERT, LayerMap(layer, expert), named="the expert")
                    continue
                first_task = first_task or task
                if streams is None:
                    repairs = self.calibrator.residual > 0
                    state = batch.get(MERGED)
                    streams = find_residual_streams(layer, student, state, batch.side, names) if repairs else {}
                left = self._run_expert_on_batch(layer, expert, batch, streams, counts, names, stops=not needs_output)
                if needs_output:
                    self.stream.store_output(layer, batch, EXPERT, left, named="the expert")
            if self.calibrator.weights == "uniform" and counts[0]:
                self.weighted[task] = {
                    (layer.index, number): _GradientSums(rows).weighted() for number, rows in enumerate(counts)
                }
        self.stream.check()
        if self.calibrator.weights == "uniform":
            self._gather_gradient_energies()
        answers = [entry for entry in self.team.gather((first_task, streams)) if entry[0]]
        return min(answers, key=lambda entry: entry[0])[1] or {}

    def _run_expert_on_batch(
        self,
        layer: Layer,
        expert: Parameters,
        batch: CachedBatch,
        streams: Mapping[str, str],
        counts: Sequence[list[Tensor]],
        names: Sequence[str],
        *,
        stops: bool,
    ) -> State:
        """Run the expert's layer on a batch; cache its modules' outputs and append their row weights."""
        state = batch.get(EXPERT)
        tapped = {*streams.values()} - {ENTERED}
        seen, left = self.context.expert_features.record_activations(
            batch, layer, expert, state, tapped, names, stops=stops
        )
        for group, rows in zip(self.groups[layer.index], counts, strict=True):
            y = seen.outputs[group.names[0]]
            rows.append(_row_weights_or_ones(self.pool.chain, layer, group.sites[0], y, state, seen.side))
        targets = dict(seen.outputs)
        if (routes := seen.side.routes) is not None and routes.chosen is not None and routes.gates is not None:
            batch.put(_ROUTES, {_CHOSEN: routes.chosen, _GATES: routes.gates})
            self.chosen[batch] = ExpertRoutes(routes.chosen.cpu())
        for name, stream in streams.items():
            targets[name] = targets[name] + residual_stream(layer, stream, state, seen.inputs)
        for group in self.groups[layer.index]:
            batch.put(_targets_name(group), {name: targets[name] for name in group.names})
        return left

    def _group_moment_sums(
        self,
        layer: Layer,
        student: Parameters,
        merged: Parameters,
        number: int,
        group: _SiteGroup,
        streams: Mapping[str, str],
    ) -> _GroupSums:
        """Return the moments of one group of modules, summed over all tasks in the main process."""
        merged_map = _weight_with_bias_column(merged, group)
        outputs, inputs = merged_map.shape
        # Few products of float32 rows are summed, so float64 sums would be no more accurate.
        dtype = torch.promote_types(merged_map.dtype, torch.float32)
        new_gram = partial(GramSum, inputs, dtype, self.pool.device)
        num_folds = self.calibrator.num_folds
        # The sums of one task use the memory of the last one's, as the first touch of new memory is slow.
        folds, folds_of_task = ([ResidualSums(new_gram(), outputs) for _ in range(num_folds)] for _ in range(2))
        sums, task_gram = _GroupSums(folds, {}, {}, {}, [0] * num_folds), new_gram()
        for task, owner in self.owners.items():
            summed = partial(
                self._task_moment_sums,
                layer,
                student,
                merged_map,
                number,
                group,
                streams,
                task,
                folds_of_task,
                task_gram,
            )
            task_sums = self.team.run_on_rank(owner, summed)
            if task_sums is not None:
                sums.add(task_sums)
        return sums

    def _task_moment_sums(
        self,
        layer: Layer,
        student: Parameters,
        merged_map: Tensor,
        number: int,
        group: _SiteGroup,
        streams: Mapping[str, str],
        task: str,
        folds: list[ResidualSums],
        task_gram: GramSum,
    ) -> _GroupSums | None:
        """Return the moments of one group of modules on one task; None if the layer reads no row of it.

        They are summed in `folds` and `task_gram`, which are cleared first.
        """
        key = layer.index, number
        weighted = self.weighted.get(task, {}).get(key)
        if weighted is None:
            return None
        outputs, inputs = merged_map.shape
        task_gram.clear()
        for fold in folds:
            fold.clear()
        energies = [by_key[key] for by_key in map(self.energies.get, self.tasks) if by_key and key in by_key]
        energy = sum(energies) / max(1, len(energies))
        # Tasks whose final features react strongly to this site weigh more.
        factor = max(weighted.energy / energy, _LEAST) if energy > 0 else 1.0
        names = [name for name in layer.parameters if name.rpartition(".")[0] in group.names]
        expert_map = _weight_with_bias_column(self.pool.parameters(expert_name(task), layer, names), group)
        # One product with both maps instead of two.
        maps = torch.cat([expert_map - merged_map, expert_map])
        sums = _GroupSums(folds, {}, {}, {task: factor}, [0] * len(folds))
        for x, outputs_y1, root, sizes in self._rows_sorted_by_fold(layer, student, group, streams, task, weighted):
            root = root * factor**0.5
            x, outputs_y1 = x * root, outputs_y1 * root
            # Local and upstream targets side by side, [T, 2 o]: (W - W_m) x, and the wanted output less W x.
            targets = x @ maps.mT
            upstream = targets[:, outputs_y1.shape[1] :]
            torch.sub(outputs_y1, upstream, out=upstream)
            sums.num_rows = [before + count for before, count in zip(sums.num_rows, sizes, strict=True)]
            parts = (part.split_with_sizes(sizes) for part in (x, targets))
            for fold, rows, rows_targets in zip(folds, *parts, strict=True):
                fold.add(rows, rows_targets)
        for fold in folds:
            task_gram.add(fold.gram, 1.0)
        if self.calibrator.mu:
            metric = self._output_metric(task, key, merged_map.to(task_gram.device, task_gram.dtype))
            of_task = ResidualSums(GramSum(inputs, task_gram.dtype, task_gram.device), outputs)
            for fold in folds:
                of_task.join(fold)
            sums.tasks[task] = metric, of_task
        # The constant input of the bias would dominate the norm.
        width = inputs - group.has_bias
        sums.norms[task] = torch.linalg.matrix_norm(task_gram.full_matrix()[:width, :width]) / factor
        return sums

    def _rows_sorted_by_fold(
        self,
        layer: Layer,
        student: Parameters,
        group: _SiteGroup,
        streams: Mapping[str, str],
        task: str,
        weighted: _TokenWeights,
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, list[int]]]:
        """Yield inputs [T, k], targets [T, o] and roots of weights [T, 1], sorted by fold, with fold sizes."""
        chunk: list[tuple[Tensor, ...]] = []
        fold_of, num_batches = self.folds[task], len(weighted.rows)
        batches = zip(self.stream.batches(layer, task), weighted.rows, strict=True)
        for number, (batch, count) in enumerate(batches, start=1):
            of_samples = [fold_of[digest] for digest in batch.originals]
            x, targets, tokens = self._site_inputs_and_targets(layer, student, group, streams, batch)
            # On the CPU, so that counting rows per fold doesn't synchronize with the device.
            fold = torch.tensor(of_samples)
            if tokens is None:
                fold = fold.repeat_interleave(len(x) // len(of_samples))
            else:
                fold = fold.repeat_interleave(tokens[0] // len(of_samples))[tokens[1]]
            chunk.append((x, targets, count.sqrt()[:, None], fold))
            if number == num_batches or sum(len(x) for x, *_ in chunk) >= _AT_ONCE:
                *rows, fold = (torch.cat(parts) for parts in zip(*chunk, strict=True))
                # Stable, so that rows of a fold stay in the order of samples.
                order = to_device(fold.argsort(stable=True), x.device)
                x, targets, root = (part[order] for part in rows)
                yield x, targets, root, fold.bincount(minlength=self.calibrator.num_folds).tolist()
                chunk = []

    def _site_inputs_and_targets(
        self,
        layer: Layer,
        student: Parameters,
        group: _SiteGroup,
        streams: Mapping[str, str],
        batch: CachedBatch,
    ) -> tuple[Tensor, Tensor, tuple[int, Tensor] | None]:
        """Return a batch's module inputs [T, k] and targets [T, o], and the token indices of a mixture expert."""
        state, goals = batch.get(MERGED), batch.get(_targets_name(group))
        side, tokens = batch.side, None
        if (expert := group.sites[0].expert) is not None:
            routes = batch.get(_ROUTES)
            side = side.with_routes(ExpertRoutes(routes[_CHOSEN], routes[_GATES], is_given=True))
        added = {name: streams[name] for name in group.names if name in streams}
        tapped = {group.names[0], *added.values()} - {ENTERED}
        known = self._known_outputs(batch)
        new = self.solved.difference(known)
        seen, _ = record_activations(layer, student, state, side, tapped, new, stops=True, known=known)
        if new:
            self.outputs[batch].append(f"outputs before {group.names[0]}")
            batch.put(self.outputs[batch][-1], seen.outputs)
        x = seen.inputs[group.names[0]]
        x = x.reshape(-1, x.shape[-1])
        if expert is not None:
            tokens = len(routes[_CHOSEN]), self.chosen[batch].expert_tokens(expert, len(x))
        targets = [
            goals[name] - residual_stream(layer, added[name], state, seen.inputs) if name in added else goals[name]
            for name in group.names
        ]
        if group.has_bias:
            x = torch.cat([x, x.new_full((len(x), 1), BIAS_INPUT)], dim=1)
        return x, torch.cat([y.reshape(len(x), y.shape[-1]) for y in targets], dim=1), tokens

    def _output_metric(self, task: str, key: _Key, like: Tensor) -> Tensor:
        # Read once, then dropped: the moments of all layers may be larger than the model.
        first_batch, name = self.stream.cached[task][0], _gradient_moment_name(key)
        moment, mu = first_batch.get(name)["moment"].to(like), self.calibrator.mu
        first_batch.drop(name)
        eye = torch.eye(len(moment), dtype=like.dtype, device=like.device)
        trace = self.weighted[task][key].trace
        return (1 - mu) * eye + mu * (len(moment) * moment / trace if trace > 0 else eye)


def _weight_with_bias_column(parameters: Parameters, group: _SiteGroup) -> Tensor:
    weight = stack_site_weights(parameters, group.sites)
    if not group.has_bias:
        return weight
    # Divided by the constant input, so that the product adds the bias itself.
    bias = torch.cat([parameters[f"{name}.bias"] for name in group.names])
    return torch.cat([weight, bias[:, None] / BIAS_INPUT], dim=1)


@dataclass(frozen=True)
class _SiteGroup:
    """Linear modules that read the same inputs, and either all have a bias or none has one."""

    sites: tuple[Site, ...]
    has_bias: bool

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(site.name for site in self.sites)


def linear_site_groups(layer: Layer, names: Collection[str]) -> list[_SiteGroup]:
    """Group the named linear modules of a layer by the inputs that they read, in forward order."""
    groups: dict[tuple[str, str, bool], list[Site]] = {}
    for site in layer.sites:
        if site.name in names and site.kind == "linear":
            key = site.input, site.token_weights, f"{site.name}.bias" in layer.parameters
            groups.setdefault(key, []).append(site)
    return [_SiteGroup(tuple(sites), has_bias) for (_, _, has_bias), sites in groups.items()]


@dataclass
class _TokenWeights:
    """Token weights of one task by batch, with sum 1, and the trace and energy of the output gradients."""

    rows: list[Tensor]
    trace: float
    energy: float


@dataclass
class _GradientSums:
    """Row weights by rule and mask, squared gradient norms of rows (None for uniform weights), and traces."""

    counts: list[Tensor]
    energies: list[Tensor] | None = None
    traces: list[Tensor] = field(default_factory=list)

    def weighted(self) -> _TokenWeights:
        """Return token weights: the row weights times a root of the gradient energy relative to its mean."""
        counted = _sum_as_float([count.sum() for count in self.counts])
        energies = self.energies or []
        energy = _sum_as_float([count @ e for count, e in zip(self.counts, energies, strict=bool(energies))])
        energy /= max(counted, 1e-300)
        rows = list(self.counts)
        if energies and energy > 0:
            rows = [
                count * ((e / energy).clamp_min(_LEAST_ENERGY).sqrt() + _FLOOR)
                for count, e in zip(self.counts, energies, strict=True)
            ]
        size = max(_sum_as_float([to_float64_device(row).sum(dtype=torch.float64) for row in rows]), 1e-300)
        return _TokenWeights([row / size for row in rows], _sum_as_float(self.traces), energy)


def _sum_as_float(numbers: Sequence[Tensor]) -> float:
    return float(sum(torch.stack([*numbers]).tolist())) if numbers else 0.0


# Index of a layer, and number of the group in it.
_Key = tuple[int, int]


def _row_weights_or_ones(
    chain: LayerChain, layer: Layer, site: Site, y: Tensor, state: State, side: SideInputs
) -> Tensor:
    """Return the weight of each row of a module's output, [T]; 1 without a rule or mask."""
    weights = row_weights(chain, layer, site, y, state, side)
    return y.new_ones(y.shape[:-1].numel()) if weights is None else weights


def _targets_name(group: _SiteGroup) -> str:
    return f"targets of {group.names[0]}"


def _gradient_moment_name(key: _Key) -> str:
    return f"moment-{key[0]}-{key[1]}"


def _copy_to_one_buffer(parts: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors into one buffer, so that small tensors per batch don't fragment memory."""
    return [*torch.cat([*parts]).split_with_sizes([len(part) for part in parts])] if parts else []


def _expert_features_name(boundary: int) -> str:
    return f"passed-{boundary}"
