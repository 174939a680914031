"""Calibrations that solve all sites of a layer from one snapshot of its features.

Per layer (Algorithm 1 of FeatCal, arXiv:2605.13030): the features of every task go through the expert's layer and the
merged model's, and the inputs of the sites are summed up; all sites of the layer are solved from this one snapshot; the
layer with its new parameters is run once more, and what leaves it waits at the next boundary. The expert's features
never meet the merged model's. Sums of all experts of a mixture may be too much for memory: then they are taken in runs,
each summed up from the same snapshot and solved before the next.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from driftlens.engine.calibrating import (
    EXPERT,
    MERGED,
    CalibratedLayer,
    CalibrationContext,
    CalibrationWalk,
    ClosedForm,
    LinearProblem,
    NormProblem,
    Problem,
    SiteReport,
    SiteUpdate,
    Wanted,
)
from driftlens.engine.pool import LayerMap
from driftlens.engine.sites import SiteRows, require_rule, row_weights, rows_and_output, stacked
from driftlens.engine.walk import CachedBatch
from driftlens.linalg.gram import GramSum, OutputCross, OutputSums, add_scaled, single, solve_bytes
from driftlens.linalg.ridge import Moments, NormMoments
from driftlens.models.chain import Layer, Parameters, Site
from driftlens.utils.devices import exact_products, place_of_sums, room_for_sums, summing


class Layerwise(ClosedForm):
    """Solves all sites of a layer from one snapshot: it says which moments it wants, folds those of the tasks, solves.

    What is here wants the experts' own outputs and counts every task alike; a subclass adds `solve`.
    """

    def calibrated(self, context: CalibrationContext) -> Iterator[CalibratedLayer]:
        """All sites of a layer are solved from one snapshot of its features."""
        return SnapshotWalk(context, self).walked()

    def wants(self, site: Site, *, in_last_block: bool) -> Wanted:
        """Which moments of a site are wanted; tokens count as the adapter says."""
        return Wanted(1.0, site.token_weights)

    def task_weight(self, gram_norm: Tensor) -> Tensor:
        """How much a task counts whose Gram matrix has this Frobenius norm."""
        return torch.ones_like(gram_norm)

    @abstractmethod
    def solve(self, problem: Problem) -> Sequence[SiteUpdate]:
        """New parameters of the problem's sites; nothing that is handed in is modified.

        The Gram matrix of a linear problem is lent for this call: its memory serves the next layer too.

        Raises:
            NumericsError: the moments hold NaN or infinite entries.
            SingularGramError: a system can't be solved as asked.
        """


class _InputSums(NamedTuple):
    """Sums over the rows of one task that belong to inputs alone: Gram matrix [k, k], inputs [k], weights [].

    `num_rows` [] are those that count anything.
    """

    gram: GramSum
    rows: Tensor
    weight_sum: Tensor
    num_rows: Tensor

    def add(self, rows: Tensor, weights: Tensor | None) -> None:
        """Add rows [T, k] that each count as `weights` say, [T]; None counts each 1."""
        rows, weights = single(rows), None if weights is None else single(weights)
        if weights is None:
            self.weight_sum.add_(len(rows))
            self.num_rows.add_(len(rows))
            self.rows.add_(rows.sum(dim=0).to(self.rows.device))
        else:
            parts = weights.sum(), weights.count_nonzero(), weights @ rows
            for total, part in zip((self.weight_sum, self.num_rows, self.rows), parts, strict=True):
                total += part.to(total.device)
            # With both factors of the product scaled by the root, each row counts its weight.
            rows = rows * weights.sqrt()[:, None]
        self.gram.add_rows(rows)


@dataclass(frozen=True)
class _TaskSums:
    """Sums over the rows of one task: the unit that calibrators fold, and that processes send.

    `outputs` are of the wanted outputs with the inputs, `biases` the expert's, by site.
    """

    inputs: _InputSums
    outputs: OutputSums
    biases: Mapping[str, Tensor]


@dataclass(eq=False)
class _LinearSums:
    """Sums over rows of sites that read the same rows: one Gram matrix, and the wanted outputs of all sites, stacked.

    Sums are in `dtype`, products in that of the rows. Those over tasks are of each task's mean, times what
    `task_weight` makes of the Frobenius norm of its Gram matrix.
    """

    sites: Sequence[Site]
    wanted: Wanted
    task_weight: Callable[[Tensor], Tensor]
    dtype: torch.dtype
    objectives: bool
    _inputs: _InputSums = field(init=False)
    _cross: OutputCross | None = field(default=None, init=False)
    _gram: GramSum | None = field(default=None, init=False)  # its memory serves task after task
    _total: GramSum | None = field(default=None, init=False)
    _energy: Tensor | None = field(default=None, init=False)
    _bias: dict[str, Tensor] = field(default_factory=dict, init=False)

    @property
    def rule(self) -> str:
        """The rule by which tokens count."""
        return self.wanted.token_weights

    def add(
        self, rows: Tensor, seen: SiteRows, weights: Tensor | None, expert: Parameters, num_batches: int
    ) -> None:
        """Add one batch of a task.

        Args:
            rows: what the merged model feeds the sites, [T, k].
            seen: what the expert feeds its own sites, and what they make of it.
            weights: how much each row counts, [T]; None counts each 1.
            expert: the expert's parameters of the layer.
            num_batches: about how many batches the task has.
        """
        if self._cross is None:
            self._cross = OutputCross(
                stacked(expert, self.sites),
                _stacked_bias(expert, self.sites),
                alpha=self.wanted.expert_share,
                num_rows=max(1, len(rows)) * max(1, num_batches),
                dtype=self.dtype,
                energies=self.objectives,
            )
            k, device = rows.shape[1], place_of_sums(self.dtype, rows.device)
            self._gram = self._gram or GramSum(k, self.dtype, device)
            self._gram.clear()
            zeros = torch.zeros(k, dtype=self.dtype, device=device)
            self._inputs = _InputSums(self._gram, zeros, zeros.new_zeros(()), zeros.new_zeros(()))
        expert_rows = seen.inputs[self.sites[0].name].flatten(0, -2)
        expert_outputs = [seen.outputs[site.name].flatten(0, -2) for site in self.sites]
        self._cross.add(rows, expert_rows, expert_outputs, weights)
        self._inputs.add(rows, weights)

    @summing()
    def end_task(self, expert: Parameters) -> _TaskSums | None:
        """Return the sums of the task at hand, and begin with the next; None if the layer saw nothing of it."""
        cross, self._cross = self._cross, None
        if cross is None:
            return None
        biases = {site.name: expert.get(f"{site.name}.bias") for site in self.sites}
        known = {name: bias for name, bias in biases.items() if bias is not None}
        return _TaskSums(self._inputs, cross.sums(self._inputs.gram), known)

    @summing()
    def fold_task(self, task: _TaskSums) -> None:
        """Add a task to the sums over tasks, unless no row of it counts; its memory serves the next task."""
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
        """Return what is to be solved; `merged` and `base` are the whole layer's parameters."""
        assert self._total is not None
        place = self._total.device
        return LinearProblem(
            sites=tuple(self.sites),
            moments=Moments(
                gram=self._total.full().div_(self._weight),
                output_cross=self._output_cross.div_(self._weight),
                mean_in=self._rows / self._weight,
                mean_target=self._targets / self._weight,
                target_energy=None if self._energy is None else self._energy / self._weight,
                weight_sum=self._weight,
            ),
            expert_bias={name: bias / self._weight for name, bias in self._bias.items()},
            merged=_of_sites(merged, self.sites, place),
            base=None if base is None else _of_sites(base, self.sites, place),
            num_rows=() if self.sites[0].expert is None else (int(self._count),),
        )


def _stacked_bias(parameters: Parameters, sites: Sequence[Site]) -> Tensor:
    weights = (parameters[f"{site.name}.weight"] for site in sites)
    biases = (parameters.get(f"{site.name}.bias") for site in sites)
    return torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)])


@dataclass(eq=False)
class _NormSums:
    """Sums over normalised rows of the merged model; the wanted output is the expert's affine map of the same rows.

    Tokens count by `rule`, tasks all alike.
    """

    site: Site
    rule: str
    dtype: torch.dtype
    _task: tuple[Tensor, Tensor, Tensor] | None = field(default=None, init=False)
    _total: NormMoments | None = field(default=None, init=False)

    @property
    def sites(self) -> Sequence[Site]:
        """The norm alone."""
        return (self.site,)

    def add(self, rows: Tensor, weights: Tensor | None) -> None:
        """Add one batch of the task at hand: what the merged model feeds the norm [T, k], and how much rows count."""
        unit = normalised(self.site, rows)
        if weights is None:
            count = torch.full((), len(rows), dtype=self.dtype, device=place_of_sums(self.dtype, rows.device))
            sums = unit.sum(dim=0), unit.square().sum(dim=0), count
        else:
            weighted = unit * weights[:, None]
            sums = weighted.sum(dim=0), (weighted * unit).sum(dim=0), weights.sum()
        # Converted copies of whole batches would take longer than the sums; those of batches are kept in `dtype`.
        first, second, count = (part.to(place_of_sums(self.dtype, part.device), self.dtype) for part in sums)
        if self._task is not None:
            first, second, count = first + self._task[0], second + self._task[1], count + self._task[2]
        self._task = first, second, count

    def end_task(self, expert: Parameters) -> NormMoments | None:
        """Return the moments of the task at hand, means of weight 1; None if the layer saw nothing of it."""
        task, self._task = self._task, None
        if task is None:
            return None
        first, second, count = task
        shift = expert.get(f"{self.site.name}.bias")
        return NormMoments.of_affine(
            mean=first / count,
            second=second / count,
            scale=expert[f"{self.site.name}.weight"].to(first),
            shift=None if shift is None else shift.to(first),
            weight_sum=torch.ones((), dtype=self.dtype, device=first.device),
        )

    def fold_task(self, task: NormMoments) -> None:
        """Fold a task into the moments over tasks."""
        self._total = task if self._total is None else self._total + task

    def problem(self, merged: Parameters, base: Parameters | None) -> NormProblem:
        """What is to be solved; `merged` and `base` are the whole layer's parameters."""
        total = self._total
        assert total is not None
        place = total.mean.device
        pulls = None if base is None else _of_sites(base, self.sites, place)
        return NormProblem((self.site,), total, _of_sites(merged, self.sites, place), pulls)


def _of_sites(parameters: Parameters, sites: Sequence[Site], place: torch.device) -> dict[str, Tensor]:
    """Those of some sites alone, where what is solved from lies."""
    names = (f"{site.name}.{part}" for site in sites for part in ("weight", "bias"))
    return {name: parameters[name].to(place) for name in names if name in parameters}


def normalised(site: Site, rows: Tensor) -> Tensor:
    """Rows as the norm sees them before its scale and shift, [T, k]."""
    eps = torch.finfo(rows.dtype).eps if site.eps is None else site.eps
    if site.kind == "layer_norm":
        return F.layer_norm(rows, rows.shape[-1:], eps=eps)
    return rows * torch.rsqrt(rows.square().mean(dim=-1, keepdim=True) + eps)


_Sums = _LinearSums | _NormSums


class SnapshotWalk(CalibrationWalk):
    """Solves all sites of a layer from one snapshot of its features."""

    calibrator: Layerwise

    def __init__(self, context: CalibrationContext, calibrator: Layerwise) -> None:
        super().__init__(context, calibrator)
        # Before features are cached there, half of what is free; processes sum up the same sites at the same time.
        self.room = min(self.team.gather(room_for_sums(self.pool.device, self.context.feature_budget)))

    @torch.no_grad()
    @exact_products()
    def calibrate(self, layer: Layer, names: Collection[str], *, is_last: bool) -> CalibratedLayer:
        """Solve the sites of one layer; unless it is the last one, take all features to the next boundary."""
        merged = self.pool.parameters("merged", layer)
        updates: dict[str, Tensor] = {}
        reports: list[SiteReport] = []
        runs = self._runs(layer, merged, names)
        for number, run in enumerate(runs, start=1):
            parts = self._empty_sums(layer, run)
            is_final = number == len(runs)
            self._sum_up(layer, merged, parts, is_final=is_final, moves=is_final and not is_last)
            problems = (part.problem(merged, self._base(layer, part.sites)) for part in parts)
            of_run, reports_of_run = self.solved(layer, problems)
            updates |= of_run
            reports += reports_of_run
            del parts, problems  # their memory serves the features
        drift: dict[str, float] = {}
        if not is_last and self.calibrator.inputs == "deployed":
            drift = self.advance(layer, merged, updates)
        elif not is_last:
            self.advance(layer, merged, {})
        return CalibratedLayer(layer.index, updates, reports, drift)

    def _runs(self, layer: Layer, merged: Parameters, names: Collection[str]) -> list[list[str]]:
        """Return sites in the order in which they are solved, those together that are summed up in one pass."""
        sites = sorted((site for site in layer.sites if site.name in names), key=lambda x: x.kind != "linear")
        runs: list[list[str]] = [[]]
        total = 0
        for site in sites:
            size = 0 if site.expert is None else solve_bytes(*merged[f"{site.name}.weight"].shape)
            if size and total and total + size > self.room:
                runs.append([])
                total = 0
            runs[-1].append(site.name)
            total += size
        return runs

    def _empty_sums(self, layer: Layer, names: Collection[str]) -> list[_Sums]:
        """Return empty sums of some sites; linear ones with the same input and token weights share a Gram matrix."""
        dtype: torch.dtype = getattr(torch, self.calibrator.solve_dtype)
        groups: dict[tuple[str, Wanted], list[Site]] = {}
        norms: list[_NormSums] = []
        for site in layer.sites:
            if site.name not in names:
                continue
            wanted = self.calibrator.wants(site, in_last_block=layer is self.pool.chain.blocks[-1])
            require_rule(self.pool.chain, wanted.token_weights)
            if site.kind == "linear":
                groups.setdefault((site.input, wanted), []).append(site)
            else:
                norms.append(_NormSums(site, wanted.token_weights, dtype))
        weight, objectives = self.calibrator.task_weight, self.context.objectives
        linear = [
            _LinearSums(sites, wanted, weight, dtype, objectives) for (_, wanted), sites in groups.items()
        ]
        return [*linear, *norms]

    def _sum_up(
        self,
        layer: Layer,
        merged: Parameters,
        parts: Sequence[_Sums],
        *,
        is_final: bool,
        moves: bool,
    ) -> None:
        """Add what sites see to the sums, and if it `moves`, take the experts through the layer."""
        for task, owner in self.owners.items():
            expert: Parameters = {}
            if owner == self.team.rank:
                expert = self.expert(layer, task)
                for batch in self.stream.batches(layer, task):
                    if layer.sees(batch.side):
                        self._add(layer, merged, expert, batch, parts, moves=moves)
                    elif is_final:
                        self.stream.take(layer, batch, EXPERT, LayerMap(layer, expert), named="the expert")
            part: Any
            for part in parts:
                of_task = self.team.at(owner, partial(part.end_task, expert))
                if of_task is not None:
                    part.fold_task(of_task)
        self.stream.check()

    def _add(
        self,
        layer: Layer,
        merged: Parameters,
        expert: Parameters,
        batch: CachedBatch,
        parts: Sequence[_Sums],
        *,
        moves: bool,
    ) -> None:
        """Add one batch to the sums."""
        linear = [part for part in parts if isinstance(part, _LinearSums)]
        # Linear sites of one group read the same rows; the first one's stand for all.
        inputs = {part.sites[0].name for part in linear}
        outputs = {site.name for part in linear for site in part.sites}
        state = batch.get(EXPERT)
        seen, left = self.context.expert_features.rows_and_output(
            batch, layer, expert, state, inputs, outputs, stops=not moves
        )
        if moves:
            self.stream.keep(layer, batch, EXPERT, left, named="the expert")
        # Rows of an expert of a mixture are pairs where both models send tokens where the expert does.
        routes = seen.side.routes
        side = batch.side if routes is None else batch.side.along(routes.given())
        if self.calibrator.inputs != "expert":
            state = batch.get(MERGED)
        taps = {part.sites[0].name for part in parts}
        rows_of = rows_and_output(layer, merged, state, side, taps, stops=True)[0].inputs
        num_batches = len(self.stream.cached.get(batch.task, ()))
        for part in parts:
            site = part.sites[0]
            weights = row_weights(self.pool.chain, layer, site, rows_of[site.name], state, side, part.rule)
            rows = rows_of[site.name].flatten(0, -2)
            if isinstance(part, _NormSums):
                part.add(rows, weights)
            else:
                part.add(rows, seen, weights, expert, num_batches)

    def _base(self, layer: Layer, sites: Collection[Site]) -> Parameters | None:
        """The base's parameters of some sites, where there is a base."""
        names = [f"{site.name}.{part}" for site in sites for part in ("weight", "bias")]
        held = [name for name in names if name in layer.parameters]
        return None if self.context.base is None else self.pool.parameters(self.context.base, layer, held)
