"""The walk that calibrates: layer by layer, on features that the layers calibrated before really give.

Per layer (Algorithm 1 of FeatCal, arXiv:2605.13030): the features of every task go through the expert's layer and the
merged model's, and the inputs of the sites are summed up; all sites of the layer are solved from this one snapshot; the
layer with its new parameters is run once more, and what leaves it waits at the next boundary. The expert's features
never meet the merged model's. Alive at a time: one layer of the expert at hand, the merged model and the base, the sums
of one layer, and the features that wait, those beyond a budget on disk.

Many calibrations walk side by side, each in a lane of its own; one alone is the plain case. Every layer's weights are
read once, and the expert's features belong to all lanes. Until the first calibrated layer there is one merged model, so
its features and, for calibrations that want the same of the same samples, the moments of that layer are shared too;
from there on every lane carries features of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, Required, TypedDict, Unpack

import torch
from torch import Tensor

from driftlens.data.samples import Batch
from driftlens.engine.exactness import exact_products
from driftlens.engine.layer_sums import LayerSums, solve_layer
from driftlens.engine.pool import ModelPool
from driftlens.engine.problems import CalibratedLayer, ClosedForm, SiteReport, Stepwise
from driftlens.engine.site_rows import SiteRows, rows_and_output
from driftlens.engine.steps import StepWalk
from driftlens.engine.waiting import FeatureStore, WaitingBatch, read_batches
from driftlens.engine.walk import FiniteWatch
from driftlens.errors import DataError, SpecError
from driftlens.linalg.gram import GramPool
from driftlens.models.chain import Layer, Parameters, Pool, State
from driftlens.variants import expert_of

FEATURE_BUDGET = 2 * 2**30
"""Bytes of waiting features that stay in memory where nobody says otherwise."""

Samples = Mapping[str, Callable[[], Iterable[Batch]]]
"""Task -> a function that gives its calibration samples, each time anew; it is called once."""


class Part(Protocol):
    """Some of a task's calibration samples: a `SampleSet`, for instance."""

    @property
    def ids(self) -> Sequence[str]:
        """Names of the samples, for messages; none where they are not known."""
        ...

    def batches(self) -> Iterable[Batch]:
        """The samples, each time anew."""
        ...


Parts = Mapping[str, Sequence[Part]]
"""Task -> its calibration samples in parts that don't overlap; every task has as many parts."""


@dataclass(frozen=True)
class Lane:
    """One calibration among many.

    Attributes:
        calibrator: its settings and closed forms.
        parts: numbers of the parts of the samples that it may read.
    """

    calibrator: ClosedForm
    parts: frozenset[int] = frozenset({0})

    @property
    def moments_key(self) -> Hashable:
        """Lanes with equal keys have equal moments, as long as they have equal features."""
        return self.calibrator.moments_key, self.parts


@dataclass(frozen=True)
class _WholeTask:
    batches: Callable[[], Iterable[Batch]]
    ids: Sequence[str]


class Options(TypedDict, total=False):
    """Keyword arguments of `calibrate_side_by_side` that `calibrate` hands on."""

    sites: Required[Mapping[int, Collection[str]]]
    merged: str
    feature_budget: int
    spill: Path | None
    done: Mapping[int, Mapping[str, Tensor]] | None
    on_step: Callable[[int, str], None] | None
    pooling: Pool


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
        **options: sites and the others of `calibrate_side_by_side`.

    Raises:
        SpecError: a setting makes no sense, or a task has no expert in the pool.
        DataError: a task has no samples.
        NumericsError: weights or features are NaN or infinite; names layer, task and sample.
        SingularGramError: a site can't be solved for as asked; names it.
    """
    calibrator.check(has_base=base is not None)
    named = ids or {}
    if isinstance(calibrator, Stepwise):
        _require_tasks(pool, samples)
        done = options.get("done") or {}
        walk = StepWalk(
            pool,
            samples,
            calibrator,
            options["sites"],
            FeatureStore(options.get("feature_budget", FEATURE_BUDGET), options.get("spill")),
            options.get("merged", "merged"),
            base,
            options.get("on_step") or (lambda layer, task: None),
            options.get("pooling") or pool.chain.modality.pool,
            named,
        )
        return walk.layers(done)
    parts = {task: [_WholeTask(read, named.get(task, ()))] for task, read in samples.items()}
    together = calibrate_side_by_side(
        pool, parts, [Lane(calibrator)], base=base, objectives=objectives, **options
    )
    return (layer for [layer] in together)


def calibrate_side_by_side(
    pool: ModelPool,
    parts: Parts,
    lanes: Sequence[Lane],
    *,
    sites: Mapping[int, Collection[str]],
    merged: str = "merged",
    base: str | None = "base",
    feature_budget: int = FEATURE_BUDGET,
    spill: Path | None = None,
    done: Mapping[int, Mapping[str, Tensor]] | None = None,
    on_step: Callable[[int, str], None] | None = None,
    pooling: Pool | None = None,
    objectives: bool = False,
) -> Iterator[list[CalibratedLayer]]:
    """The same layer calibrated in every lane, in the order of the lanes, layer after layer. The rest as `calibrate`.

    Args:
        pool: base, merged model and one expert per task.
        parts: calibration samples; an empty part is allowed, a lane without any sample of a task is not.
        lanes: the calibrations; they update the same kinds of parameters.
        sites: layer index -> names of its sites, see `select_sites`; the same for all lanes.
        merged: the pool's name of the model to calibrate.
        base: the pool's name of the base, or None without one.
        feature_budget: bytes of waiting features, over all tasks and lanes, that may stay in memory.
        spill: folder for features beyond the budget, emptied again whatever happens; None keeps all in memory.
        done: layers calibrated before an interruption -> their updates, which are applied and not recomputed; for a
            single lane.
        on_step: called with layer index and task before every batch; it may raise, `Cancelled` for instance.
        pooling: how one vector per sample is taken for `drift_l2_mean`, which a single lane tells.
        objectives: whether reports hold the objectives of linear sites.

    Raises:
        DriftLensError: as for `calibrate`.
    """
    _require_tasks(pool, parts)
    finished = done or {}
    remaining = {index: names for index, names in sites.items() if names and index not in finished}
    walk = _Walk(
        pool,
        {task: parts[task] for task in sorted(parts)},
        lanes,
        store=FeatureStore(feature_budget, spill),
        merged=merged,
        base=base,
        on_step=on_step or (lambda layer, task: None),
        pooling=pooling or pool.chain.modality.pool,
        objectives=objectives,
    )
    return _layers(walk, remaining, finished)


def _layers(
    walk: _Walk, sites: Mapping[int, Collection[str]], done: Mapping[int, Mapping[str, Tensor]]
) -> Iterator[list[CalibratedLayer]]:
    last = max(sites, default=0)
    with walk.store:
        for layer in walk.pool.chain.layers[:last]:
            names = sites.get(layer.index, ())
            if names:
                yield walk.calibrate(layer, names, is_last=layer.index == last)
            else:
                walk.pass_through(layer, done.get(layer.index, {}))


_EXPERT, _TRUNK = "expert", "merged"


class _Branch:
    """Lanes that still have the merged model's features in common.

    `sums` holds the moments of the layer at hand, once for all lanes that want the same ones.
    """

    def __init__(self, name: str, lanes: Mapping[int, Lane]) -> None:
        self.name = name
        self.lanes = lanes
        self.parts = frozenset[int]().union(*(lane.parts for lane in lanes.values()))
        self.sums: dict[Hashable, LayerSums] = {}

    def readers(self, part: int) -> list[LayerSums]:
        """The sums that a part of the samples belongs in."""
        keys = {lane.moments_key: None for lane in self.lanes.values() if part in lane.parts}
        return [self.sums[key] for key in keys]


@dataclass
class _Walk:
    """What stays the same from layer to layer, and the features that wait at the boundary reached."""

    pool: ModelPool
    parts: Parts
    lanes: Sequence[Lane]
    store: FeatureStore
    merged: str
    base: str | None
    on_step: Callable[[int, str], None]
    pooling: Pool
    objectives: bool
    waiting: dict[tuple[str, int], list[WaitingBatch]] = field(default_factory=dict)
    grams: GramPool = field(default_factory=GramPool)

    def __post_init__(self) -> None:
        self.branches = [_Branch(_TRUNK, dict(enumerate(self.lanes)))]
        self.seconds = [0.0] * len(self.lanes)
        self.tells_drift = len(self.lanes) == 1

    @torch.no_grad()
    @exact_products()
    def calibrate(self, layer: Layer, names: Collection[str], *, is_last: bool) -> list[CalibratedLayer]:
        """Solve the sites of one layer; unless it is the last one, take all features to the next boundary."""
        self.seconds = [0.0] * len(self.lanes)
        merged = self.pool.parameters(self.merged, layer)
        for branch in self.branches:
            branch.sums = {
                lane.moments_key: LayerSums(
                    self.pool.chain,
                    layer,
                    names,
                    lane.calibrator,
                    objectives=self.objectives,
                    grams=self.grams,
                )
                for lane in branch.lanes.values()
            }
        for task in self.parts:
            self._sum_up(layer, merged, task, needs_output=not is_last)
        found = self._solve(layer, merged)
        self.grams.take_back()
        drift = {} if is_last else self._advance(layer, merged, found)
        return [
            CalibratedLayer(layer.index, updates, reports, drift, seconds)
            for (updates, reports), seconds in zip(found, self.seconds, strict=True)
        ]

    @torch.no_grad()
    @exact_products()
    def pass_through(self, layer: Layer, done: Mapping[str, Tensor]) -> None:
        """Take all features to the next boundary, the merged model's through the parameters in `done`."""
        merged = self.pool.parameters(self.merged, layer)
        merged |= {name: value.to(merged[name]) for name, value in done.items()}
        for task in self.parts:
            expert = self.pool.parameters(expert_of(task), layer)
            for part, ids in self._parts_of(task):
                watch = FiniteWatch(layer, task, ids)
                for batch in self._batches(layer, task, part, waits=False):
                    models = [(_EXPERT, expert)]
                    models += [(branch.name, merged) for branch in self.branches if part in branch.parts]
                    for model, parameters in models:
                        out = layer.call(parameters, batch.get(model), batch.side)
                        watch.see(_in_words(model), out[layer.stream])
                        batch.put(model, out)
                watch.check()

    def _sum_up(self, layer: Layer, merged: Parameters, task: str, *, needs_output: bool) -> None:
        """Take the task's expert through the layer, and add what its sites see to the sums of every branch."""
        expert = self.pool.parameters(expert_of(task), layer)
        every = [sums for branch in self.branches for sums in branch.sums.values()]
        inputs = {site for sums in every for site in sums.expert_inputs}
        outputs = {site for sums in every for site in sums.expert_outputs}
        for part, ids in self._parts_of(task):
            watch = FiniteWatch(layer, task, ids)
            for batch in self._batches(layer, task, part):
                with self._shared(range(len(self.lanes))):
                    theirs = batch.get(_EXPERT)
                    seen, out = rows_and_output(
                        layer, expert, theirs, batch.side, inputs, outputs, stops=not needs_output
                    )
                    if needs_output:
                        watch.see(_in_words(_EXPERT), out[layer.stream])
                        batch.put(_EXPERT, out)
                self._add(layer, batch, part, merged, expert, seen, task)
            watch.check()
        for sums in every:
            sums.end_task(expert)

    def _add(
        self,
        layer: Layer,
        batch: WaitingBatch,
        part: int,
        merged: Parameters,
        expert: Parameters,
        seen: SiteRows,
        task: str,
    ) -> None:
        num_batches = len(self.waiting.get((task, part), ()))
        for branch in self.branches:
            readers = branch.readers(part)
            if not readers:
                continue
            with self._shared(branch.lanes):
                state = batch.get(branch.name)
                inputs = {site for sums in readers for site in sums.merged_inputs}
                rows, _ = rows_and_output(layer, merged, state, batch.side, inputs, stops=True)
                for sums in readers:
                    sums.add(rows, seen, state, batch.side, expert, num_batches)

    def _solve(self, layer: Layer, merged: Parameters) -> list[Solved]:
        """New parameters and reports of the layer, lane by lane."""
        base = None if self.base is None else self.pool.parameters(self.base, layer)
        stored_as = self.merged if self.base is None else self.base
        found: dict[int, Solved] = {}
        for branch in self.branches:
            with self._shared(branch.lanes):
                problems = {key: sums.problems(merged, base) for key, sums in branch.sums.items()}
            branch.sums = {}
            for index, lane in branch.lanes.items():
                with self._shared([index]):
                    found[index] = solve_layer(
                        self.pool, layer, problems[lane.moments_key], lane.calibrator, stored_as=stored_as
                    )
        return [found[index] for index in range(len(self.lanes))]

    def _advance(self, layer: Layer, merged: Parameters, found: Sequence[Solved]) -> dict[str, float]:
        """Take every lane's features through its calibrated layer; the mean drift behind it, by task."""
        splits = len(self.branches) < len(self.lanes)
        if splits:  # from here on every lane is on its own
            self.branches = [_Branch(f"{index}", {index: lane}) for index, lane in enumerate(self.lanes)]
        parameters = [{**merged, **updates} for updates, _ in found]
        drift: dict[str, list[Tensor]] = {task: [] for task in self.parts}
        for (task, part), batches in self.waiting.items():
            watch = FiniteWatch(layer, task, self.parts[task][part].ids)
            for batch in batches:
                for branch in self.branches:
                    if part not in branch.parts:
                        continue
                    self.on_step(layer.index, task)
                    with self._shared(branch.lanes):
                        [lane] = branch.lanes
                        state = batch.get(_TRUNK if splits else branch.name)
                        out = layer.call(parameters[lane], state, batch.side)
                        watch.see(_in_words(branch.name, calibrated=True), out[layer.stream])
                        if self.tells_drift:
                            drift[task].append(self._drift(layer, out, batch))
                        batch.put(branch.name, out)
                if splits:
                    batch.put(_TRUNK, {})  # nobody asks for it again
            watch.check()
        return {task: float(torch.cat(sizes).mean()) for task, sizes in drift.items() if sizes}

    def _drift(self, layer: Layer, out: State, batch: WaitingBatch) -> Tensor:
        merged, expert = (layer.vectors(s, batch.side, self.pooling) for s in (out, batch.get(_EXPERT)))
        difference = merged - expert
        return torch.linalg.vector_norm(difference.double(), dim=1)

    def _parts_of(self, task: str) -> Iterator[tuple[int, Sequence[str]]]:
        return ((number, part.ids) for number, part in enumerate(self.parts[task]))

    def _batches(self, layer: Layer, task: str, part: int, *, waits: bool = True) -> Iterator[WaitingBatch]:
        """The batches of a part at the boundary before the layer, a word to the caller before each.

        Whether they will be asked for again at this boundary, `waits` says; it matters for the raw inputs alone.
        """
        known = self.waiting.get((task, part))
        for batch in self._read(task, part, waits=waits) if known is None else known:
            self.on_step(layer.index, task)
            yield batch

    def _read(self, task: str, part: int, *, waits: bool) -> Iterator[WaitingBatch]:
        """The batches of a part at boundary 0, kept for the layers behind; a task without any is refused."""
        batches: list[WaitingBatch] = []
        name = f"{list(self.parts).index(task)}-{part}"
        samples = self.parts[task][part].batches()
        for batch in read_batches(self.pool, samples, self.store, name, (_EXPERT, _TRUNK), waits=waits):
            batches.append(batch)
            yield batch
        self.waiting[task, part] = batches
        if not any(self.waiting.get((task, number), [None]) for number in range(len(self.parts[task]))):
            raise DataError(
                f"task {task!r} has no calibration samples",
                hint="Give every task at least one, or leave the task out.",
                task=task,
            )

    @contextmanager
    def _shared(self, lanes: Collection[int]) -> Iterator[None]:
        """Work whose time these lanes have in common."""
        started = time.perf_counter()
        yield
        share = (time.perf_counter() - started) / len(lanes)
        for index in lanes:
            self.seconds[index] += share


Solved = tuple[dict[str, Tensor], list[SiteReport]]
"""A layer's new parameters by its own names, and a report per site."""


def _in_words(model: str, *, calibrated: bool = False) -> str:
    if model == _EXPERT:
        return "the expert"
    if calibrated or model != _TRUNK:
        return "the calibrated model" if model == _TRUNK else f"calibrated model {model}"
    return "the merged model"


def _require_tasks(pool: ModelPool, parts: Collection[str]) -> None:
    if not parts:
        raise DataError("there is no task to calibrate on", hint="Give the calibration samples of a task.")
    missing = [task for task in parts if expert_of(task) not in pool]
    if missing:
        raise SpecError(
            f"there is no expert of {', '.join(sorted(missing))}",
            hint=f"The models are {', '.join(pool.names)}.",
        )
