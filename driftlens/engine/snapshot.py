"""Calibrations that solve all sites of a layer from one snapshot of its features.

Per layer (Algorithm 1 of FeatCal, arXiv:2605.13030): the features of every task go through the expert's layer and the
merged model's, and the inputs of the sites are summed up; all sites of the layer are solved from this one snapshot; the
layer with its new parameters is run once more, and what leaves it waits at the next boundary. The expert's features
never meet the merged model's. Sums of all experts of a mixture may be too much for memory: then they are taken in runs,
each summed up from the same snapshot and solved before the next.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from driftlens.engine.calibrating import (
    EXPERT,
    MERGED,
    CalibrationWalk,
    ClosedForm,
    Ground,
    Solved,
)
from driftlens.engine.pool import LayerMap
from driftlens.engine.sites import SiteRows, require_rule, row_weights, rows_and_output, stacked
from driftlens.engine.solver_types import (
    CalibratedLayer,
    LinearProblem,
    NormProblem,
    Problem,
    SiteReport,
    SiteUpdate,
    Wanted,
)
from driftlens.engine.walk import WaitingBatch
from driftlens.linalg.gram import GramPool, GramSum, OutputCross, OutputSums, add_scaled, single, solve_bytes
from driftlens.linalg.ridge import Moments, NormMoments
from driftlens.models.chain import Layer, LayerChain, Parameters, SideInputs, Site, State
from driftlens.utils.devices import exact_products, place_of_sums, room_for_sums, summing


class Layerwise(ClosedForm):
    """Solves all sites of a layer from one snapshot: it says which moments it wants, folds those of the tasks, solves.

    What is here wants the experts' own outputs and counts every task alike; a subclass adds `solve`.

    Attributes:
        inputs: what the layer is fed while its moments are summed up: `deployed`, what the layers calibrated before it
            really give; `merged`, what the merged model's give, calibrated or not; `expert`, what the expert's give.
    """

    inputs: str = "deployed"

    def calibrated(self, ground: Ground) -> Iterator[CalibratedLayer]:
        """All sites of a layer are solved from one snapshot of its features."""
        return SnapshotWalk(ground, self).walked()

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


class LayerSums:
    """Moments of the sites of one layer that have these names.

    Linear sites that read the same tensor with the same token weights share a Gram matrix. The calibrator says what it
    wants of each site, and folds the tasks; `objectives` asks for what these need, too. Problems live in the Gram sums
    that `grams` lends until they are taken back. Sites of another stream (keys and values of cross-attention) read the
    same rows in every layer: `kept` holds what one of them has summed up, for those behind it.
    """

    def __init__(
        self,
        chain: LayerChain,
        layer: Layer,
        names: Collection[str],
        calibrator: Layerwise,
        *,
        objectives: bool = True,
        grams: GramPool | None = None,
        kept: dict[Hashable, InputSums] | None = None,
    ) -> None:
        self._chain = chain
        self._layer = layer
        dtype: torch.dtype = getattr(torch, calibrator.solve_dtype)
        memory = grams or GramPool()
        grouped: dict[tuple[str, Wanted], list[Site]] = {}
        self._norms: list[NormSums] = []
        for site in layer.sites:
            if site.name not in names:
                continue
            wanted = calibrator.wants(site, in_last_block=layer is chain.blocks[-1])
            require_rule(chain, wanted.token_weights)
            if site.kind == "linear":
                grouped.setdefault((site.input, wanted), []).append(site)
            else:
                self._norms.append(NormSums(site, rule=wanted.token_weights, dtype=dtype))
        self._groups = [
            LinearSums(
                sites,
                wanted=wanted,
                task_weight=calibrator.task_weight,
                dtype=dtype,
                objectives=objectives,
                grams=memory,
                kept=kept if sites[0].stream and sites[0].stream != layer.stream else None,
            )
            for (_, wanted), sites in grouped.items()
        ]

    @property
    def expert_inputs(self) -> frozenset[str]:
        """Sites whose input is wanted from the expert; of those that read the same rows, one."""
        return frozenset(group.sites[0].name for group in self._groups)

    @property
    def expert_outputs(self) -> frozenset[str]:
        """Sites whose output is wanted from the expert."""
        return frozenset(site.name for group in self._groups for site in group.sites)

    @property
    def merged_inputs(self) -> frozenset[str]:
        """Sites whose input is wanted from the merged model."""
        return self.expert_inputs | {norm.site.name for norm in self._norms}

    def add(
        self,
        merged_rows: SiteRows,
        expert_rows: SiteRows,
        state: State,
        side: SideInputs,
        expert: Parameters,
        num_batches: int,
        task: str,
    ) -> None:
        """Add one batch of the task at hand, which has about `num_batches`.

        `merged_rows` are what the merged model feeds its sites, `expert_rows` what the expert feeds its own and what
        they make of it; `state` are the merged model's features before the layer, for the token weights.
        """

        def weights_of(site: Site, rule: str) -> Tensor | None:
            x = merged_rows.inputs[site.name]
            return row_weights(self._chain, self._layer, site, x, state, side, rule)

        for group in self._groups:
            rows = _flat(merged_rows.inputs[group.sites[0].name])
            wanted_rows = _flat(expert_rows.inputs[group.sites[0].name])
            outputs = [_flat(expert_rows.outputs[site.name]) for site in group.sites]
            weights = weights_of(group.sites[0], group.wanted.token_weights)
            group.add(
                rows, wanted_rows, outputs, weights, expert, max(1, len(rows)) * max(1, num_batches), task
            )
        for norm in self._norms:
            rows = _flat(merged_rows.inputs[norm.site.name])
            norm.add(rows, weights_of(norm.site, norm.rule))

    @property
    def parts(self) -> list[LinearSums | NormSums]:
        """What is solved for one by one, all from the same snapshot of the layer's features."""
        return [*self._groups, *self._norms]


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


class InputSums(NamedTuple):
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
class TaskSums:
    """Sums over the rows of one task: the unit that calibrators fold, and that processes send.

    `outputs` are of the wanted outputs with the inputs, `biases` the expert's, by site.
    """

    inputs: InputSums
    outputs: OutputSums
    biases: Mapping[str, Tensor]


@dataclass(eq=False)
class LinearSums:
    """Sums over rows of one group of sites: one Gram matrix, and the outputs wanted from every site, stacked.

    All sites read the same rows, and the same is wanted of them. Sums are in `dtype`, products in that of the rows.
    Those over tasks are of each task's mean, times what `task_weight` makes of the Frobenius norm of its Gram matrix.
    `kept` holds sums of inputs that sites of other layers read, too, by task; None for a layer's own.
    """

    sites: Sequence[Site]
    wanted: Wanted
    task_weight: Callable[[Tensor], Tensor]
    dtype: torch.dtype
    objectives: bool
    grams: GramPool
    kept: dict[Hashable, InputSums] | None = None
    _inputs: InputSums = field(init=False)
    _has_inputs: bool = field(default=False, init=False)
    _cross: OutputCross | None = field(default=None, init=False)
    _gram: GramSum | None = field(default=None, init=False)  # its memory serves task after task
    _total: GramSum | None = field(default=None, init=False)
    _energy: Tensor | None = field(default=None, init=False)
    _bias: dict[str, Tensor] = field(default_factory=dict, init=False)

    def add(
        self,
        rows: Tensor,
        expert_rows: Tensor,
        expert_outputs: Sequence[Tensor],
        weights: Tensor | None,
        expert: Parameters,
        num_rows: int,
        task: str,
    ) -> None:
        """Add one batch of the task at hand, which has about `num_rows` in all.

        `rows` are what the merged model feeds the sites, [T, k], `expert_rows` what the expert feeds them,
        `expert_outputs` what each site of the expert makes of that, [T, o]; each row counts as `weights` say, [T], None
        counts each 1.
        """
        if self._cross is None:
            self._cross = OutputCross(
                stacked(expert, self.sites),
                _stacked_bias(expert, self.sites),
                alpha=self.wanted.expert_share,
                num_rows=num_rows,
                dtype=self.dtype,
                energies=self.objectives,
            )
            key = task, self.sites[0].stream, self.wanted
            self._has_inputs = self.kept is not None and key in self.kept
            self._inputs = self.kept[key] if self.kept and self._has_inputs else self._empty(rows)
            if self.kept is not None:
                self.kept[key] = self._inputs
        self._cross.add(rows, expert_rows, expert_outputs, weights)
        if not self._has_inputs:
            self._inputs.add(rows, weights)

    def _empty(self, rows: Tensor) -> InputSums:
        """Sums at zero: in memory of their own where they are kept, else in what serves task after task."""
        k, device = rows.shape[1], place_of_sums(self.dtype, rows.device)
        if self.kept is not None:
            gram = GramSum(k, self.dtype, device)
        else:
            gram = self._gram = self._gram or self.grams.lend(k, self.dtype, device)
            gram.clear()
        zeros = torch.zeros(k, dtype=self.dtype, device=device)
        return InputSums(gram, zeros, zeros.new_zeros(()), zeros.new_zeros(()))

    @summing()
    def end_task(self, expert: Parameters) -> TaskSums | None:
        """Return the sums of the task at hand, and begin with the next; None if the layer saw nothing of it."""
        cross, self._cross = self._cross, None
        if cross is None:
            return None
        biases = {site.name: expert.get(f"{site.name}.bias") for site in self.sites}
        known = {name: bias for name, bias in biases.items() if bias is not None}
        return TaskSums(self._inputs, cross.sums(self._inputs.gram), known)

    @summing()
    def fold_task(self, task: TaskSums) -> None:
        """Add a task to the sums over tasks, unless no row of it counts; its memory serves the next task."""
        inputs, sums = task.inputs, task.outputs
        total = self._begun(len(sums.target), inputs.rows)
        self._count += inputs.num_rows
        weight = self.task_weight(inputs.gram.norm() / inputs.weight_sum)
        # A branch in Python would synchronize with the device for every task and group.
        omega = torch.where(inputs.num_rows > 0, weight, 0.0)
        scale = torch.where(inputs.num_rows > 0, weight / inputs.weight_sum, 0.0)
        total.add(inputs.gram, scale)
        add_scaled(self._output_cross, sums.cross, scale)
        if sums.energy is not None:
            energy = scale * sums.energy.to(self._rows)
            self._energy = energy if self._energy is None else self._energy + energy
        self._rows += scale * inputs.rows
        self._targets += (scale * sums.target).to(self._rows.device)
        self._weight += omega
        for name, bias in task.biases.items():
            self._bias[name] = self._bias.get(name, 0.0) + omega * bias.to(self._rows)

    def _begun(self, num_outputs: int, like: Tensor) -> GramSum:
        if self._total is None:
            self._total = self.grams.lend(len(like), like.dtype, like.device)
            self._output_cross = like.new_zeros(num_outputs, len(like))
            self._rows, self._targets = torch.zeros_like(like), like.new_zeros(num_outputs)
            self._weight, self._count = like.new_zeros(()), like.new_zeros(())
        return self._total

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
class NormSums:
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
        return NormProblem(self.site, total, _of_sites(merged, self.sites, place), pulls)


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


class SnapshotWalk(CalibrationWalk):
    """Solves all sites of a layer from one snapshot of its features.

    Attributes:
        sums: moments of the layer at hand.
        kept: by number of earlier layers of other streams, sums of features that later layers read, too.
    """

    calibrator: Layerwise

    def __init__(self, ground: Ground, calibrator: Layerwise) -> None:
        super().__init__(ground, calibrator)
        self.sums: LayerSums
        self.kept: dict[int, dict[Hashable, InputSums]] = {}
        # Before features are cached there, half of what is free; processes sum up the same sites at the same time.
        self.room = min(self.team.gather(room_for_sums(self.pool.device, self.ground.feature_budget)))

    @torch.no_grad()
    @exact_products()
    def calibrate(self, layer: Layer, names: Collection[str], *, is_last: bool) -> CalibratedLayer:
        """Solve the sites of one layer; unless it is the last one, take all features to the next boundary."""
        merged = self.pool.parameters("merged", layer)
        updates: dict[str, Tensor] = {}
        reports: list[SiteReport] = []
        runs = self._runs(layer, merged, names)
        for number, run in enumerate(runs, start=1):
            self._begin(layer, run)
            is_final = number == len(runs)
            self._sum_up(layer, merged, is_final=is_final, moves=is_final and not is_last)
            of_run, reports_of_run = self._solve(layer, merged)
            updates |= of_run
            reports += reports_of_run
            self.grams.take_back()
        del self.sums  # its memory serves the features
        drift = {} if is_last else self._advance(layer, merged, updates)
        return CalibratedLayer(layer.index, updates, reports, drift)

    def _runs(self, layer: Layer, merged: Parameters, names: Collection[str]) -> list[list[str]]:
        """Names of sites in the order in which they are solved, those together that are summed up in one pass."""
        sites = sorted((site for site in layer.sites if site.name in names), key=lambda x: x.kind != "linear")
        sizes = (
            0 if site.expert is None else solve_bytes(*merged[f"{site.name}.weight"].shape) for site in sites
        )
        runs: list[list[str]] = [[]]
        total = 0
        for site, size in zip(sites, sizes, strict=True):
            if size and total and total + size > self.room:
                runs.append([])
                total = 0
            runs[-1].append(site.name)
            total += size
        return runs

    def _begin(self, layer: Layer, names: Collection[str]) -> None:
        """Empty sums of some sites."""
        chain = self.pool.chain
        # Features of other streams stay as they are until one of their own layers runs.
        others = sum(earlier.stream != layer.stream for earlier in chain.layers[: layer.index])
        self.sums = LayerSums(
            chain,
            layer,
            names,
            self.calibrator,
            objectives=self.ground.objectives,
            grams=self.grams,
            kept=self.kept.setdefault(others, {}),
        )

    def _advance(self, layer: Layer, merged: Parameters, updates: dict[str, Tensor]) -> dict[str, float]:
        """As `advance`, but a calibration that is fed another model's features goes on through the merged model."""
        if self.calibrator.inputs == "deployed":
            return self.advance(layer, merged, updates)
        self.advance(layer, merged, {})
        return {}

    def pass_through(self, layer: Layer, done: Mapping[str, Tensor]) -> None:
        """See above; what is done changes no features that come from elsewhere."""
        super().pass_through(layer, done if self.calibrator.inputs == "deployed" else {})

    def _sum_up(self, layer: Layer, merged: Parameters, *, is_final: bool, moves: bool) -> None:
        """Add what sites see to the sums, and if it `moves`, take the experts through the layer."""
        parts: list[Any] = self.sums.parts
        for task, owner in self.owners.items():
            expert: Parameters = {}
            if owner == self.team.rank:
                expert = self._sum_up_task(layer, merged, task, is_final=is_final, moves=moves)
            for part in parts:
                of_task = self.team.at(owner, partial(part.end_task, expert))
                if of_task is not None:
                    part.fold_task(of_task)
        self.passage.check()

    def _sum_up_task(
        self, layer: Layer, merged: Parameters, task: str, *, is_final: bool, moves: bool
    ) -> Parameters:
        """Sum up one task; return the parameters of its expert."""
        expert = self.expert(layer, task)
        inputs, outputs = self.sums.expert_inputs, self.sums.expert_outputs
        crossing = self.passage.crossing(layer, task, waits=True)
        for batch in crossing:
            if not layer.sees(batch.side):
                if is_final:
                    crossing.take(batch, EXPERT, LayerMap(layer, expert), named="the expert")
                continue
            entered = batch.get(EXPERT)
            seen, left = self.ground.expert_features.rows_and_output(
                task, batch, layer, expert, entered, inputs, outputs, stops=not moves
            )
            if moves:
                crossing.keep(batch, EXPERT, left, named="the expert")
            self._add(layer, batch, merged, expert, entered, seen, task)
        return expert

    def _add(
        self,
        layer: Layer,
        batch: WaitingBatch,
        merged: Parameters,
        expert: Parameters,
        expert_state: State,
        seen: SiteRows,
        task: str,
    ) -> None:
        num_batches = len(self.passage.waiting.get(task, ()))
        routes = seen.side.routes
        side = batch.side if routes is None else batch.side.along(routes.given())
        state = expert_state if self.calibrator.inputs == "expert" else batch.get(MERGED)
        # Rows of an expert of a mixture are pairs where both models send tokens where the expert does.
        rows, _ = rows_and_output(layer, merged, state, side, self.sums.merged_inputs, stops=True)
        self.sums.add(rows, seen, state, side, expert, num_batches, task)

    def _solve(self, layer: Layer, merged: Parameters) -> Solved:
        """New parameters and reports of the layer."""
        # What a solved problem holds makes room for the next one.
        problems = (part.problem(merged, self._base(layer, part.sites)) for part in self.sums.parts)
        return self.solved(layer, problems)

    def _base(self, layer: Layer, sites: Collection[Site]) -> Parameters | None:
        """The base's parameters of some sites, where there is a base."""
        names = [f"{site.name}.{part}" for site in sites for part in ("weight", "bias")]
        held = [name for name in names if name in layer.parameters]
        return None if self.ground.base is None else self.pool.parameters(self.ground.base, layer, held)
