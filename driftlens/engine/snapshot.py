"""Calibrations that solve all sites of a layer from one snapshot of its features.

Per layer (Algorithm 1 of FeatCal, arXiv:2605.13030): the features of every task go through the expert's layer and the
merged model's, and the inputs of the sites are summed up; all sites of the layer are solved from this one snapshot; the
layer with its new parameters is run once more, and what leaves it waits at the next boundary. The expert's features
never meet the merged model's. Sums of all experts of a mixture may be too much for memory: then they are taken in runs,
each summed up from the same snapshot and solved before the next.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from driftlens.base.devices import exact_products, room_for_sums
from driftlens.engine.calibrating import (
    EXPERT,
    MERGED,
    CalibrationWalk,
    ClosedForm,
    Ground,
    Solved,
    in_words,
)
from driftlens.engine.layer_sums import InputSums, LayerSums
from driftlens.engine.pool import LayerMap
from driftlens.engine.problems import (
    CalibratedLayer,
    Problem,
    SiteReport,
    SiteUpdate,
    Wanted,
)
from driftlens.engine.sites import SiteRows, rows_and_output
from driftlens.engine.walk import WaitingBatch
from driftlens.linalg.gram import solve_bytes
from driftlens.models.chain import Layer, Parameters, Site, State


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


class SnapshotWalk(CalibrationWalk):
    """Solves all sites of a layer from one snapshot of its features.

    Attributes:
        sums: moments of the layer at hand.
        kept: by number of earlier layers of other streams, sums of features that later layers read, too.
    """

    def __init__(self, ground: Ground, calibrator: Layerwise) -> None:
        super().__init__(ground, calibrator)
        self.calibrator = calibrator
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
        """Add what sites see to the sums, and if it `moves`, take the experts through the layer.

        Of several passes through a layer the final one alone lets anything wait. Sums of every task are folded in the
        main process, task after task, whichever process they are from.
        """
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
        expert = self.expert(layer, task, stays=not is_final)
        inputs, outputs = self.sums.expert_inputs, self.sums.expert_outputs
        crossing = self.passage.crossing(layer, task, waits=True)
        for batch in crossing:
            if not layer.sees(batch.side):
                if is_final:
                    crossing.take(batch, EXPERT, LayerMap(layer, expert), named=in_words(EXPERT))
                continue
            entered = batch.get(EXPERT)
            seen, left = self.ground.expert_features.rows_and_output(
                task, batch, layer, expert, entered, inputs, outputs, stops=not moves
            )
            if moves:
                crossing.keep(batch, EXPERT, left, named=in_words(EXPERT))
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
        num_batches = len(self.passage.waiting.get((task, 0), ()))
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
