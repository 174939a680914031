"""The walk that calibrates: layer by layer, on features that the layers calibrated before really give.

Per layer (Algorithm 1 of FeatCal, arXiv:2605.13030): the features of every task go through the expert's layer and the
merged model's, and the inputs of the sites are summed up; all sites of the layer are solved from this one snapshot; the
layer with its new parameters is run once more, and what leaves it waits at the next boundary. The expert's features
never meet the merged model's. A calibrator that solves step by step walks alone, see `StepWalk`.

Many calibrations walk side by side, each in a lane of its own; one alone is the plain case. Every layer's weights are
read once, and the expert's features belong to all lanes. Until the first calibrated layer there is one merged model, so
its features and, for calibrations that want the same of the same samples, the moments of that layer are shared too;
from there on every lane carries features of its own.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Required, TypedDict, Unpack

import torch
from torch import Tensor

from driftlens.base.errors import DataError, SpecError
from driftlens.base.team import Team
from driftlens.base.variants import expert_of
from driftlens.data.samples import Batch
from driftlens.engine.carried import EXPERT, CalibrationWalk, Parts, Solved, in_words, solved_by_all
from driftlens.engine.exactness import exact_products
from driftlens.engine.layer_sums import LayerSums, solve_layer
from driftlens.engine.pool import ModelPool
from driftlens.engine.problems import (
    CalibratedLayer,
    ClosedForm,
    InputSums,
    Layerwise,
    Problem,
    Stepwise,
    WeightProblem,
    Weightwise,
)
from driftlens.engine.site_rows import SiteRows, rows_and_output
from driftlens.engine.site_selection import site_path
from driftlens.engine.steps import StepWalk
from driftlens.engine.waiting import FeatureStore, WaitingBatch
from driftlens.engine.walk import FiniteWatch
from driftlens.models.chain import Layer, Parameters, Pool, Site, State

_MANY = 1 << 40
"""Batches of a task: so many that their number makes no difference."""
FEATURE_BUDGET = 2 * 2**30
"""Bytes of waiting features that stay in memory where nobody says otherwise."""

Samples = Mapping[str, Callable[[], Iterable[Batch]]]
"""Task -> a function that gives its calibration samples, each time anew; it is called once."""


@dataclass(frozen=True)
class Lane:
    """One calibration among many.

    Attributes:
        calibrator: its settings and closed forms.
        parts: numbers of the parts of the samples that it may read.
    """

    calibrator: Layerwise
    parts: frozenset[int] = frozenset({0})

    @property
    def moments_key(self) -> Hashable:
        """Lanes with equal keys have equal moments, as long as they have equal features."""
        return self.calibrator.moments_key, self.calibrator.inputs, self.parts


@dataclass(frozen=True)
class _WholeTask:
    batches: Callable[[], Iterable[Batch]]
    ids: Sequence[str]


@dataclass(frozen=True)
class _SomeBatches:
    """Those from `first` up to `last` of a task; what comes before is read, too."""

    whole: _WholeTask
    first: int
    last: int
    batch_size: int

    @property
    def ids(self) -> Sequence[str]:
        return self.whole.ids[self.first * self.batch_size : self.last * self.batch_size]

    def batches(self) -> Iterator[Batch]:
        return itertools.islice(self.whole.batches(), self.first, self.last)


class Options(TypedDict, total=False):
    """Keyword arguments of both calibrations.

    Attributes:
        sites: layer index -> names of its sites, see `select_sites`; the same for all lanes.
        feature_budget: bytes of waiting features, over all tasks and lanes, that may stay in memory.
        spill: folder for features beyond the budget, emptied again whatever happens; None keeps all in memory.
        done: layers calibrated before an interruption -> their updates, which are applied and not recomputed; for a
            single lane.
        on_step: called with layer index and task before every batch; it may raise, `Cancelled` for instance.
        pooling: how one vector per sample is taken for `drift_l2_mean`, which a single lane tells.
        team: processes that do the same at the same time, each with tasks of its own; all get all layers.
        batch_sizes: samples in a batch, by task; where they are given, and ids too, processes may share the batches of
            a task.
    """

    sites: Required[Mapping[int, Collection[str]]]
    feature_budget: int
    spill: Path | None
    done: Mapping[int, Mapping[str, Tensor]] | None
    on_step: Callable[[int, str], None] | None
    pooling: Pool | None
    team: Team
    batch_sizes: Mapping[str, int]


def calibrate(
    pool: ModelPool,
    samples: Samples,
    calibrator: ClosedForm,
    *,
    base: str | None = "base",
    ids: Mapping[str, Sequence[str]] | None = None,
    objectives: bool = True,
    **options: Unpack[Options],
) -> Iterator[CalibratedLayer]:
    """Calibrated layers in forward order, one for each layer with chosen sites that is not done yet.

    Nothing of the pool is modified. Tasks are taken in the order of their names, whatever the order of `samples`. The
    walk ends after the last layer with chosen sites.

    Args:
        pool: base, merged model and one expert per task.
        samples: calibration samples by task.
        calibrator: settings and closed forms.
        base: the pool's name of the base, or None without one.
        ids: sample ids by task, for messages.
        objectives: whether reports hold the objectives of linear sites; on CPUs they cost about a tenth of the time.
        **options: sites and other `Options`.

    Raises:
        SpecError: a setting makes no sense, or a task has no expert in the pool.
        DataError: a task has no samples.
        NumericsError: weights or features are NaN or infinite; names layer, task and sample.
        SingularGramError: a site can't be solved for as asked; names it.
    """
    calibrator.check(has_base=base is not None)
    named = ids or {}
    parts = {task: [_WholeTask(read, named.get(task, ()))] for task, read in samples.items()}
    if isinstance(calibrator, Weightwise):
        assert base is not None, "its check refuses that"
        return _from_weights(pool, sorted(samples), calibrator, base, options)
    carried = _carried(pool, parts, [frozenset({0})], base, options) | _divided(parts, options)
    walk: CalibrationWalk
    if isinstance(calibrator, Stepwise):
        walk = StepWalk(**carried, calibrator=calibrator)
    else:
        assert isinstance(calibrator, Layerwise)
        walk = SnapshotWalk(**carried, calibrations=[Lane(calibrator)], objectives=objectives)
    return (layer for [layer] in walk.layers(options["sites"], options.get("done") or {}))


@torch.no_grad()
@exact_products()
def _from_weights(
    pool: ModelPool, tasks: Sequence[str], calibrator: Weightwise, base: str, options: Options
) -> Iterator[CalibratedLayer]:
    """Calibrated layers of a calibrator that looks at no sample; one weight of every model is alive at a time."""
    _require_tasks(pool, tasks)
    team, tell = options.get("team") or Team(), options.get("on_step") or (lambda layer, task: None)

    def problem(layer: Layer, site: Site) -> WeightProblem:
        name = f"{site.name}.weight"

        def experts() -> Iterator[Tensor]:
            for task in tasks:
                tell(layer.index, task)
                yield pool.parameters(expert_of(task), layer)[name]

        merged, start = (pool.parameters(model, layer)[name] for model in ("merged", base))
        return WeightProblem((site,), merged, start, experts)

    for layer in pool.chain.layers:
        names = options["sites"].get(layer.index, ())
        if names and layer.index not in (options.get("done") or {}):
            started = time.perf_counter()
            sites = [site for site in layer.sites if site.name in names and site.kind == "linear"]
            owners = team.balanced([1.0] * len(sites))
            mine = [site for site, owner in zip(sites, owners, strict=True) if owner == team.rank]
            problems = (problem(layer, site) for site in mine)
            solve = partial(solve_layer, pool, layer, problems, calibrator.solve, stored_as=base)
            like = pool.parameters("merged", layer) if team.size > 1 else {}
            [(found, reports)] = solved_by_all(team, like, lambda solve=solve: [solve()])  # type: ignore[misc]
            order = [site_path(layer, site) for site in sites]
            reports.sort(key=lambda report, order=order: order.index(report.site))  # type: ignore[misc]
            yield CalibratedLayer(layer.index, found, reports, seconds=time.perf_counter() - started)


def calibrate_side_by_side(
    pool: ModelPool,
    parts: Parts,
    lanes: Sequence[Lane],
    *,
    base: str | None = "base",
    objectives: bool = False,
    **options: Unpack[Options],
) -> Iterator[list[CalibratedLayer]]:
    """The same layer calibrated in every lane, in the order of the lanes, layer after layer. The rest as `calibrate`.

    Args:
        pool: base, merged model and one expert per task.
        parts: calibration samples; an empty part is allowed, a lane without any sample of a task is not.
        lanes: the calibrations; they update the same kinds of parameters.
        base: the pool's name of the base, or None without one.
        objectives: whether reports hold the objectives of linear sites.
        **options: sites and other `Options`.

    Raises:
        DriftLensError: as for `calibrate`.
    """
    carried = _carried(pool, parts, [lane.parts for lane in lanes], base, options)
    walk = SnapshotWalk(**carried, calibrations=lanes, objectives=objectives)
    return walk.layers(options["sites"], options.get("done") or {})


def _carried(
    pool: ModelPool, parts: Parts, lanes: Sequence[frozenset[int]], base: str | None, options: Options
) -> dict[str, Any]:
    """Arguments of a `CalibrationWalk`."""
    _require_tasks(pool, parts)
    team, tasks = options.get("team") or Team(), sorted(parts)
    sizes = {task: float(sum(len(part.ids) for part in parts[task])) for task in tasks}
    owners = team.owners(tasks, sizes if all(sizes.values()) else None)
    return {
        "pool": pool,
        "team": team,
        "divided": {},
        "tasks": tasks,
        "parts": {task: parts[task] for task in tasks if owners[task] == team.rank},
        "lanes": lanes,
        "store": FeatureStore(options.get("feature_budget", FEATURE_BUDGET), options.get("spill")),
        "base": base,
        "on_step": options.get("on_step") or (lambda layer, task: None),
        "pooling": options.get("pooling") or pool.chain.modality.pool,
    }


def _divided(parts: Mapping[str, Sequence[_WholeTask]], options: Options) -> dict[str, Any]:
    """The same where processes share the batches of tasks, if these can be told apart."""
    team, sizes, tasks = options.get("team") or Team(), options.get("batch_sizes") or {}, sorted(parts)
    counts = {task: -(-len(parts[task][0].ids) // sizes[task]) for task in tasks if task in sizes}
    if team.size == 1 or len(counts) < len(tasks) or not all(counts.values()):
        return {}
    mine: dict[str, list[_SomeBatches]] = {}
    divided: dict[str, list[int]] = {}
    for task, runs in team.shares(counts).items():
        for rank, first, last in runs:
            if rank == team.rank:
                mine[task] = [_SomeBatches(parts[task][0], first, last, sizes[task])]
        if len(runs) > 1:
            divided[task] = [rank for rank, *_ in runs]
    return {"parts": mine, "divided": divided}


@dataclass
class SnapshotWalk(CalibrationWalk):
    """Solves all sites of a layer from one snapshot of its features, in many lanes side by side.

    `calibrations` are those of the lanes, in their order; `sums` holds, by branch, the moments of the layer at hand,
    once for all lanes that want the same ones; `kept` what is summed up of features that later layers read, too.
    """

    calibrations: Sequence[Lane]
    objectives: bool
    sums: dict[str, dict[Hashable, LayerSums]] = field(default_factory=dict, init=False)
    kept: dict[Hashable, dict[Hashable, InputSums]] = field(default_factory=dict, init=False)

    @torch.no_grad()
    @exact_products()
    def calibrate(self, layer: Layer, names: Collection[str], *, is_last: bool) -> list[CalibratedLayer]:
        """Solve the sites of one layer; unless it is the last one, take all features to the next boundary."""
        self.seconds = [0.0] * len(self.lanes)
        merged = self.pool.parameters("merged", layer)
        chain, memory, objectives = self.pool.chain, self.grams, self.objectives
        sums = partial(LayerSums, chain, layer, names, objectives=objectives, grams=memory)
        # Features of other streams stay as they are until one of their own layers runs.
        others = sum(earlier.stream != layer.stream for earlier in chain.layers[: layer.index])
        for branch in self.branches:
            wanted = {self.calibrations[at].moments_key: self.calibrations[at] for at in branch.lanes}
            self.sums[branch.name] = {
                key: sums(lane.calibrator, kept=self.kept.setdefault((branch.name, key, others), {}))
                for key, lane in wanted.items()
            }
        summed = partial(self._sum_up_all, layer, merged, needs_output=not is_last)
        self.team.together(partial(self.team.final, summed) if self.divided else summed)
        found = self._solve(layer, merged)
        self.grams.take_back()
        drift = {} if is_last else self._advance(layer, merged, found)
        return [
            CalibratedLayer(layer.index, updates, reports, drift, seconds)
            for (updates, reports), seconds in zip(found, self.seconds, strict=True)
        ]

    def _sum_up_all(self, layer: Layer, merged: Parameters, *, needs_output: bool) -> None:
        for task in self.parts:
            self._sum_up(layer, merged, task, needs_output=needs_output)

    def _advance(self, layer: Layer, merged: Parameters, found: Sequence[Solved]) -> dict[str, float]:
        """As `advance`, but lanes that are fed another model's features walk on through the merged model."""
        is_deployed = [lane.calibrator.inputs == "deployed" for lane in self.calibrations]
        walked = [of if goes_on else ({}, of[1]) for of, goes_on in zip(found, is_deployed, strict=True)]
        drift = self.advance(layer, merged, walked)
        return drift if all(is_deployed) else {}

    def pass_through(self, layer: Layer, done: Mapping[str, Tensor]) -> None:
        """See above; what is done changes no features that come from elsewhere."""
        is_deployed = all(lane.calibrator.inputs == "deployed" for lane in self.calibrations)
        super().pass_through(layer, done if is_deployed else {})

    def _sum_up(self, layer: Layer, merged: Parameters, task: str, *, needs_output: bool) -> None:
        """Take the task's expert through the layer, and add what its sites see to the sums of every branch."""
        expert = self.expert(layer, task)
        every = [sums for of in self.sums.values() for sums in of.values()]
        inputs = {site for sums in every for site in sums.expert_inputs}
        outputs = {site for sums in every for site in sums.expert_outputs}
        for part, of in enumerate(self.parts[task]):
            watch = FiniteWatch(layer, task, of.ids)
            for batch in self.batches(layer, task, part):
                with self.shared(range(len(self.lanes))):
                    theirs = batch.get(EXPERT)
                    seen, out = rows_and_output(
                        layer, expert, theirs, batch.side, inputs, outputs, stops=not needs_output
                    )
                    if needs_output:
                        watch.see(in_words(EXPERT), out[layer.stream])
                        batch.put(EXPERT, out)
                self._add(layer, batch, part, merged, expert, theirs, seen, task)
            watch.check()
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
        theirs: State,
        seen: SiteRows,
        task: str,
    ) -> None:
        # What depends on it, processes that share a task must decide alike.
        num_batches = _MANY if task in self.divided else len(self.waiting.get((task, part), ()))
        for branch in self.branches:
            lanes = [self.calibrations[at] for at, parts in branch.lanes.items() if part in parts]
            readers: dict[bool, list[LayerSums]] = {}
            for key, inputs in {lane.moments_key: lane.calibrator.inputs for lane in lanes}.items():
                readers.setdefault(inputs == "expert", []).append(self.sums[branch.name][key])
            for reads_expert, own in readers.items():
                with self.shared(branch.lanes):
                    state = theirs if reads_expert else batch.get(branch.name)
                    read = {site for sums in own for site in sums.merged_inputs}
                    rows, _ = rows_and_output(layer, merged, state, batch.side, read, stops=True)
                    for sums in own:
                        sums.add(rows, seen, state, batch.side, expert, num_batches, task)

    def _solve(self, layer: Layer, merged: Parameters) -> list[Solved]:
        """New parameters and reports of the layer, lane by lane; every problem is solved by one process."""
        base = None if self.base is None else self.pool.parameters(self.base, layer)
        jobs = [
            (branch, key, part)
            for branch in self.branches
            for key, sums in self.sums.pop(branch.name).items()
            for part in sums.parts
        ]
        owners = self.team.balanced([part.cost(merged) for *_, part in jobs])
        rank = self.team.rank
        held = [task for task in self.parts if self.divided.get(task, [rank])[0] == rank]
        places = [list(self.tasks).index(task) for task in held]
        problems: dict[tuple[str, Hashable], list[Problem]] = {}
        order: dict[tuple[str, Hashable], list[str]] = {}
        for (branch, key, part), owner in zip(jobs, owners, strict=True):
            order.setdefault((branch.name, key), []).extend(site_path(layer, site) for site in part.sites)
            with self.shared(branch.lanes):
                part.join(self.team, owner, merged, places, len(self.tasks))
                mine = problems.setdefault((branch.name, key), [])
                if owner == self.team.rank:
                    mine.append(part.problem(merged, base))
        found = solved_by_all(self.team, merged, partial(self._solved, layer, problems))
        lanes = {
            index: order[branch.name, self.calibrations[index].moments_key]
            for branch in self.branches
            for index in branch.lanes
        }
        for index, (_, reports) in enumerate(found):
            reports.sort(key=lambda report, paths=lanes[index]: paths.index(report.site))  # type: ignore[misc]
        return found

    def _solved(self, layer: Layer, problems: dict[tuple[str, Hashable], list[Problem]]) -> list[Solved]:
        """The same of the problems that this process has."""
        found: dict[int, Solved] = {}
        for branch in self.branches:
            keys = [self.calibrations[index].moments_key for index in branch.lanes]
            for at, index in enumerate(branch.lanes):
                lane, mine = self.calibrations[index], problems[branch.name, keys[at]]
                wanted_again = keys[at] in keys[at + 1 :]
                with self.shared([index]):
                    found[index] = solve_layer(
                        self.pool,
                        layer,
                        mine if wanted_again else _taken_out(mine),
                        lane.calibrator.solve,
                        stored_as=self.base or "merged",
                    )
        return [found[index] for index in range(len(self.lanes))]


def _taken_out(items: list[Problem]) -> Iterator[Problem]:
    """One after the other, none of which is kept: what a solved problem holds makes room for the next one."""
    while items:
        yield items.pop(0)


def _require_tasks(pool: ModelPool, parts: Collection[str]) -> None:
    if not parts:
        raise DataError("there is no task to calibrate on", hint="Give the calibration samples of a task.")
    missing = [task for task in parts if expert_of(task) not in pool]
    if missing:
        raise SpecError(
            f"there is no expert of {', '.join(sorted(missing))}",
            hint=f"The models are {', '.join(pool.names)}.",
        )
