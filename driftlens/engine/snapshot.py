"""Calibrations that solve all sites of a layer from one snapshot of its features, many side by side.

Per layer (Algorithm 1 of FeatCal, arXiv:2605.13030): the features of every task go through the expert's layer and the
merged model's, and the inputs of the sites are summed up; all sites of the layer are solved from this one snapshot; the
layer with its new parameters is run once more, and what leaves it waits at the next boundary. The expert's features
never meet the merged model's. Sums of all experts of a mixture may be too much for memory: then they are taken in runs,
each summed up from the same snapshot and solved before the next.

Many calibrations walk side by side, each in a lane of its own; one alone is the plain case. Every layer's weights are
read once, and the expert's features belong to all lanes. Until the first calibrated layer there is one merged model, so
its features and, for calibrations that want the same of the same samples, the moments of that layer are shared too;
from there on every lane carries features of its own.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from driftlens.base.devices import room_for_sums
from driftlens.base.division import in_runs
from driftlens.base.threads import exact_products
from driftlens.engine.calibrating import (
    EXPERT,
    Branch,
    CalibrationWalk,
    ClosedForm,
    Ground,
    Solved,
    in_words,
    solve_layer,
    solved_by_all,
)
from driftlens.engine.layer_sums import LayerSums
from driftlens.engine.pool import LayerMap
from driftlens.engine.problems import (
    CalibratedLayer,
    InputSums,
    Problem,
    SiteUpdate,
    Wanted,
    WeightedFold,
)
from driftlens.engine.sites import SiteRows, rows_and_output, site_path
from driftlens.engine.walk import WaitingBatch
from driftlens.linalg.gram import GramPool, solve_bytes
from driftlens.linalg.ridge import NormMoments
from driftlens.models.chain import Layer, Parameters, SideInputs, Site, State

_MANY = 1 << 40
"""Batches of a task: so many that their number makes no difference."""


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
        return (layer for [layer] in calibrate_side_by_side(ground, [Lane(self)]))

    def lane(self, parts: frozenset[int] = frozenset({0})) -> Lane:
        """The same moments serve many of them."""
        return Lane(self, parts)

    @property
    def moments_key(self) -> Hashable:
        """Equal for calibrators that want the same moments and fold them alike: those with equal settings."""
        return type(self), repr(self)

    def wants(self, site: Site, *, in_last_block: bool) -> Wanted:
        """Which moments of a site are wanted; tokens count as the adapter says."""
        return Wanted(1.0, site.token_weights)

    def task_weight(self, gram_norm: Tensor) -> Tensor:
        """How much a task counts whose Gram matrix has this Frobenius norm."""
        return torch.ones_like(gram_norm)

    def fold(self, grams: GramPool) -> WeightedFold:
        """An empty fold of tasks for one group of linear sites; Gram matrices come from `grams`."""
        return WeightedFold(grams, self.task_weight)

    def fold_norm(self, total: NormMoments | None, task: NormMoments) -> NormMoments:
        """A norm's moments of one more task folded into those of the tasks before, each counting 1."""
        return task if total is None else total + task

    @abstractmethod
    def solve(self, problem: Problem) -> Sequence[SiteUpdate]:
        """New parameters of the problem's sites; nothing that is handed in is modified.

        The Gram matrix of a linear problem is lent for this call: its memory serves the next layer too.

        Raises:
            NumericsError: the moments hold NaN or infinite entries.
            SingularGramError: a system can't be solved as asked.
        """


@dataclass(frozen=True)
class Lane:
    """One calibration among many, which may read these parts of the samples."""

    calibrator: Layerwise
    parts: frozenset[int] = frozenset({0})

    @property
    def moments_key(self) -> Hashable:
        """Lanes with equal keys have equal moments, as long as they have equal features."""
        return self.calibrator.moments_key, self.calibrator.inputs, self.parts


def calibrate_side_by_side(ground: Ground, lanes: Sequence[Lane]) -> Iterator[list[CalibratedLayer]]:
    """The same layer calibrated in every lane, in the order of the lanes, layer after layer.

    An empty part is allowed, a lane without any sample of a task is not. Lanes update the same kinds of parameters.
    Only a lane alone can have layers that are done, and tells the drift behind every layer.
    """
    return SnapshotWalk(ground, [lane.parts for lane in lanes], lanes).walked()


@dataclass
class SnapshotWalk(CalibrationWalk):
    """Solves all sites of a layer from one snapshot of its features, in many lanes side by side.

    `calibrations` are those of the lanes, in their order; `sums` holds, by branch, the moments of the layer at hand,
    once for all lanes that want the same ones; `kept` what is summed up of features that later layers read, too.
    """

    calibrations: Sequence[Lane] = ()
    sums: dict[str, dict[Hashable, LayerSums]] = field(default_factory=dict, init=False)
    kept: dict[Hashable, dict[Hashable, InputSums]] = field(default_factory=dict, init=False)
    seen: list[str] = field(default_factory=list, init=False)
    """Tasks of this process of which the layer at hand sees anything."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # Before features wait there, of half of what is free; processes sum up the same sites at the same time.
        self.room = min(self.team.gather(room_for_sums(self.pool.device, self.ground.feature_budget)))

    @torch.no_grad()
    @exact_products()
    def calibrate(self, layer: Layer, names: Collection[str], *, is_last: bool) -> list[CalibratedLayer]:
        """Solve the sites of one layer; unless it is the last one, take all features to the next boundary."""
        self.seconds = [0.0] * len(self.lanes)
        merged = self.pool.parameters("merged", layer)
        solved: list[Solved] = [({}, []) for _ in self.lanes]
        runs = self._runs(layer, merged, names)
        for number, run in enumerate(runs, start=1):
            self._begin(layer, run)
            is_final = number == len(runs)
            summed = partial(self._sum_up, layer, merged, is_final=is_final, moves=is_final and not is_last)
            self.team.together(partial(self.team.final, summed) if self.divided else summed)
            for (updates, reports), more in zip(solved, self._solve(layer, merged), strict=True):
                updates |= more[0]
                reports += more[1]
            self.grams.take_back()
        drift = {} if is_last else self._advance(layer, merged, solved)
        return [
            CalibratedLayer(layer.index, updates, reports, drift, seconds)
            for (updates, reports), seconds in zip(solved, self.seconds, strict=True)
        ]

    def _runs(self, layer: Layer, merged: Parameters, names: Collection[str]) -> list[list[str]]:
        """Names of sites in the order in which they are solved, those together that are summed up in one pass."""
        sites = sorted((site for site in layer.sites if site.name in names), key=lambda x: x.kind != "linear")
        sums = sum(len(self._wanted(branch)) for branch in self.branches)
        sizes = (
            0 if site.expert is None else sums * solve_bytes(*merged[f"{site.name}.weight"].shape)
            for site in sites
        )
        return in_runs([site.name for site in sites], sizes, self.room)

    def _wanted(self, branch: Branch) -> dict[Hashable, Lane]:
        """A branch's lanes by what they want: of those that want the same, the last."""
        return {self.calibrations[index].moments_key: self.calibrations[index] for index in branch.lanes}

    def _begin(self, layer: Layer, names: Collection[str]) -> None:
        """Empty sums of some sites for every branch."""
        chain = self.pool.chain
        sums = partial(LayerSums, chain, layer, names, objectives=self.ground.objectives, grams=self.grams)
        # Features of other streams stay as they are until one of their own layers runs.
        others = sum(earlier.stream != layer.stream for earlier in chain.layers[: layer.index])
        for branch in self.branches:
            self.sums[branch.name] = {
                key: sums(lane.calibrator, kept=self.kept.setdefault((branch.name, key, others), {}))
                for key, lane in self._wanted(branch).items()
            }

    def _advance(self, layer: Layer, merged: Parameters, solved: Sequence[Solved]) -> dict[str, float]:
        """As `advance`, but lanes that are fed another model's features walk on through the merged model."""
        is_deployed = [lane.calibrator.inputs == "deployed" for lane in self.calibrations]
        walked = [
            (updates if goes_on else {}, reports)
            for (updates, reports), goes_on in zip(solved, is_deployed, strict=True)
        ]
        drift = self.advance(layer, merged, walked)
        return drift if all(is_deployed) else {}

    def pass_through(self, layer: Layer, done: Mapping[str, Tensor]) -> None:
        """See above; what is done changes no features that come from elsewhere."""
        is_deployed = all(lane.calibrator.inputs == "deployed" for lane in self.calibrations)
        super().pass_through(layer, done if is_deployed else {})

    def _sum_up(self, layer: Layer, merged: Parameters, *, is_final: bool, moves: bool) -> None:
        """Add what sites see to the sums of every branch, and if it `moves`, take the experts through the layer.

        Of several passes through a layer the final one alone lets anything wait.
        """
        self.seen = []
        for task in self.parts:
            self._sum_up_task(layer, merged, task, is_final=is_final, moves=moves)
        self.passage.check()

    def _sum_up_task(
        self, layer: Layer, merged: Parameters, task: str, *, is_final: bool, moves: bool
    ) -> None:
        expert = self.expert(layer, task, stays=not is_final)
        every = [sums for by_key in self.sums.values() for sums in by_key.values()]
        inputs = {site for sums in every for site in sums.expert_inputs}
        outputs = {site for sums in every for site in sums.expert_outputs}
        entered, seen, sees = State(), SiteRows(SideInputs()), False

        def heard(state: State, side: SideInputs) -> State:
            nonlocal entered, seen
            entered = state
            seen, left = rows_and_output(layer, expert, state, side, inputs, outputs, stops=not moves)
            return left

        for part in range(len(self.parts[task])):
            crossing = self.passage.crossing(layer, task, part, waits=True)
            for batch in crossing:
                if not layer.sees(batch.side):
                    if is_final:
                        crossing.take(batch, EXPERT, LayerMap(layer, expert), named=in_words(EXPERT))
                    continue
                sees = True
                with self.shared(range(len(self.lanes))):
                    if moves:
                        crossing.take(batch, EXPERT, heard, named=in_words(EXPERT))
                    else:
                        heard(batch.get(EXPERT), batch.side)
                self._add(layer, batch, part, merged, expert, entered, seen, task)
        if not sees:
            return
        self.seen.append(task)
        ranks = self.divided.get(task, [self.team.rank])
        for sums in every:
            sums.bring(self.team, ranks)
            if self.team.rank == ranks[0]:
                sums.end_task(expert)

    def _add(
        self,
        layer: Layer,
        batch: WaitingBatch,
        part: int,
        merged: Parameters,
        expert: Parameters,
        expert_state: State,
        seen: SiteRows,
        task: str,
    ) -> None:
        # What depends on it, processes that share a task must decide alike.
        num_batches = _MANY if task in self.divided else len(self.passage.waiting.get((task, part), ()))
        routes = seen.side.routes
        side = batch.side if routes is None else batch.side.along(routes.given())
        for branch in self.branches:
            lanes = [self.calibrations[index] for index, parts in branch.lanes.items() if part in parts]
            readers: dict[bool, list[LayerSums]] = {}
            for key, inputs in {lane.moments_key: lane.calibrator.inputs for lane in lanes}.items():
                readers.setdefault(inputs == "expert", []).append(self.sums[branch.name][key])
            for reads_expert, all_sums in readers.items():
                with self.shared(branch.lanes):
                    state = expert_state if reads_expert else batch.get(branch.name)
                    read = {site for sums in all_sums for site in sums.merged_inputs}
                    # Rows of an expert of a mixture are pairs where both models send tokens where the expert does.
                    rows, _ = rows_and_output(layer, merged, state, side, read, stops=True)
                    for sums in all_sums:
                        sums.add(rows, seen, state, side, expert, num_batches, task)

    def _solve(self, layer: Layer, merged: Parameters) -> list[Solved]:
        """New parameters and reports of the layer, lane by lane; every problem is solved by one process."""
        jobs = [
            (branch, key, part)
            for branch in self.branches
            for key, sums in self.sums.pop(branch.name).items()
            for part in sums.parts
        ]
        owners = self.team.balanced([part.cost(merged) for *_, part in jobs])
        rank = self.team.rank
        held = [task for task in self.seen if self.divided.get(task, [rank])[0] == rank]
        places = [list(self.tasks).index(task) for task in held]
        problems: dict[tuple[str, Hashable], list[Problem]] = {}
        order: dict[tuple[str, Hashable], list[str]] = {}
        for (branch, key, part), owner in zip(jobs, owners, strict=True):
            order.setdefault((branch.name, key), []).extend(site_path(layer, site) for site in part.sites)
            with self.shared(branch.lanes):
                part.join(self.team, owner, merged, places, len(self.tasks))
                left = problems.setdefault((branch.name, key), [])
                if owner == self.team.rank:
                    left.append(part.problem(merged, self._base(layer, part.sites)))
        solved = solved_by_all(self.team, merged, partial(self._solved, layer, problems))
        lanes = {
            index: order.get((branch.name, self.calibrations[index].moments_key), [])
            for branch in self.branches
            for index in branch.lanes
        }
        for index, (_, reports) in enumerate(solved):
            reports.sort(key=lambda report, paths=lanes[index]: paths.index(report.site))  # type: ignore[misc]
        return solved

    def _base(self, layer: Layer, sites: Collection[Site]) -> Parameters | None:
        """The base's parameters of some sites, where there is a base."""
        names = [f"{site.name}.{part}" for site in sites for part in ("weight", "bias")]
        held = [name for name in names if name in layer.parameters]
        return None if self.ground.base is None else self.pool.parameters(self.ground.base, layer, held)

    def _solved(self, layer: Layer, problems: dict[tuple[str, Hashable], list[Problem]]) -> list[Solved]:
        """The same of the problems that this process has."""
        solved: dict[int, Solved] = {}
        for branch in self.branches:
            keys = [self.calibrations[index].moments_key for index in branch.lanes]
            for place, index in enumerate(branch.lanes):
                lane, left = self.calibrations[index], problems.get((branch.name, keys[place]), [])
                wanted_again = keys[place] in keys[place + 1 :]
                with self.shared([index]):
                    solved[index] = solve_layer(
                        self.pool,
                        layer,
                        # What a solved problem holds makes room for the next one.
                        left if wanted_again else (left.pop(0) for _ in range(len(left))),
                        lane.calibrator.solve,
                        lane.calibrator.least_rows,
                        stored_in=self.ground.stored_in,
                    )
        return [solved[index] for index in range(len(self.lanes))]
