"""Many calibrations of one model in one forward-order walk: what they have in common is read and computed once.

Every layer's weights are read once, and the expert's features belong to all. Until the first calibrated layer there is
one merged model, so its features and, for calibrations of equal target and samples, the moments of that layer are
shared too; from there on every calibration carries features of its own. Each is what `forward_order.calibrate` gives.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from driftlens.data.samples import SampleSet
from driftlens.engine.exactness import exact_products
from driftlens.engine.finite import FiniteWatch
from driftlens.engine.lanes import Branch, Lane, LaneSolution, moments_key
from driftlens.engine.layer_solve import solve_layer
from driftlens.engine.pool import ModelPool
from driftlens.engine.site_rows import SiteRows, rows_and_output, rows_only
from driftlens.engine.waiting import FeatureStore, WaitingBatch
from driftlens.engine.walk import on_device
from driftlens.models.chain import Layer, Parameters
from driftlens.variants import expert_of

Parts = Mapping[str, Sequence[SampleSet]]
"""Task -> its calibration samples in parts that don't overlap; every task has as many parts."""

_EXPERT, _TRUNK = "expert", "merged"


@torch.no_grad()
@exact_products()
def calibrate_side_by_side(
    pool: ModelPool,
    parts: Parts,
    lanes: Sequence[Lane],
    *,
    sites: Mapping[int, Collection[str]],
    merged: str = "merged",
    base: str | None = "base",
    feature_budget: int = 2 * 2**30,
    spill: Path | None = None,
    on_step: Callable[[int, str], None] | None = None,
) -> list[LaneSolution]:
    """The solutions of all lanes, in their order; nothing of the pool is modified.

    Args:
        pool: base, merged model and one expert per task.
        parts: calibration samples; an empty part is allowed, a lane without any sample of a task is not.
        lanes: the calibrations; they update the same kinds of parameters and weigh tasks alike.
        sites: layer index -> names of its sites, see `select_sites`; the same for all lanes.
        merged: the pool's name of the model to calibrate.
        base: the pool's name of the base, or None without one.
        feature_budget: bytes of waiting features, over all tasks and lanes, that may stay in memory.
        spill: folder for features beyond the budget, emptied again whatever happens; None keeps all in memory.
        on_step: called with layer index and task before every batch; it may raise, `Cancelled` for instance.

    Raises:
        NumericsError: weights or features are NaN or infinite; names layer, task and sample.
        SingularGramError: a site can't be solved for as asked; names it.
    """
    with FeatureStore(feature_budget, spill) as store:
        walk = _Walk(pool, parts, lanes, store, merged, base, on_step or (lambda layer, task: None))
        last = max(sites)
        for layer in pool.chain.layers[:last]:
            walk.through(layer, sites.get(layer.index, ()), is_last=layer.index == last)
    return walk.solutions


class _Walk:
    """The layers' weights, and the features of every branch waiting at the boundary reached."""

    def __init__(
        self,
        pool: ModelPool,
        parts: Parts,
        lanes: Sequence[Lane],
        store: FeatureStore,
        merged: str,
        base: str | None,
        on_step: Callable[[int, str], None],
    ) -> None:
        self.pool = pool
        self.parts = {task: list(parts[task]) for task in sorted(parts)}
        self.store = store
        self.merged = merged
        self.base = base
        self.on_step = on_step
        self.solutions = [LaneSolution() for _ in lanes]
        self.branches = [Branch(_TRUNK, dict(enumerate(lanes)))]
        self.waiting: dict[tuple[str, int], list[WaitingBatch]] = {}

    def through(self, layer: Layer, names: Collection[str], *, is_last: bool) -> None:
        """Solve the sites of one layer, if there are any, and take all features to the next boundary."""
        merged = self.pool.parameters(self.merged, layer)
        for branch in self.branches:
            branch.start(layer, names, self.pool)
        for task in self.parts:
            self._listen(layer, task, merged, has_sites=bool(names), is_last=is_last)
        if not names:
            self._advance(layer, {branch.name: merged for branch in self.branches})
            return
        updates = self._solve(layer, merged)
        if is_last:
            return
        before = [branch.name for branch in self.branches]
        self._split()
        self._advance(layer, {f"{lane}": merged | found for lane, found in updates.items()}, before)

    def _listen(self, layer: Layer, task: str, merged: Parameters, *, has_sites: bool, is_last: bool) -> None:
        """Take the task's expert through the layer, and add what its sites see to the sums of every branch."""
        expert = self.pool.parameters(expert_of(task), layer)
        all_sums = [sums for branch in self.branches for sums in branch.sums.values()]
        inputs = {site for sums in all_sums for site in sums.expert_inputs}
        outputs = {site for sums in all_sums for site in sums.expert_outputs}
        for part, samples in enumerate(self.parts[task]):
            watch = FiniteWatch(layer, task, samples.ids)
            for batch in self._batches(layer, task, part):
                with self._shared(range(len(self.solutions))):
                    if is_last:
                        rows = rows_only(layer, expert, batch.get(_EXPERT), batch.side, inputs, outputs)
                    else:
                        rows, out = rows_and_output(
                            layer, expert, batch.get(_EXPERT), batch.side, inputs, outputs
                        )
                        watch.see(f"the expert of {task}", out[layer.stream])
                        batch.put(_EXPERT, out)
                if has_sites:
                    self._sum_up(layer, batch, part, merged, expert, rows, len(self.waiting[task, part]))
            watch.check()
        if has_sites:
            for branch in self.branches:
                for sums in branch.sums.values():
                    sums.end_task(expert)

    def _sum_up(
        self,
        layer: Layer,
        batch: WaitingBatch,
        part: int,
        merged: Parameters,
        expert: Parameters,
        expert_rows: SiteRows,
        num_batches: int,
    ) -> None:
        for branch in self.branches:
            readers = branch.readers(part)
            if not readers:
                continue
            with self._shared(branch.lanes):
                state = batch.get(branch.name)
                inputs = {site for sums in readers for site in sums.merged_inputs}
                rows = rows_only(layer, merged, state, batch.side, inputs)
                for sums in readers:
                    sums.add(rows, expert_rows, state, batch.side, expert, num_batches)

    def _solve(self, layer: Layer, merged: Parameters) -> dict[int, dict[str, Tensor]]:
        """New parameters of the layer, by lane."""
        base = None if self.base is None else self.pool.parameters(self.base, layer)
        stored_as = self.merged if self.base is None else self.base
        found: dict[int, dict[str, Tensor]] = {}
        for branch in self.branches:
            with self._shared(branch.lanes):
                problems = {key: sums.problems(merged, base) for key, sums in branch.sums.items()}
            branch.sums = {}
            for index, lane in branch.lanes.items():
                with self._shared([index]):
                    found[index], _ = solve_layer(
                        self.pool, layer, problems[moments_key(lane)], lane.calibrator, stored_as=stored_as
                    )
        for index, updates in found.items():
            self.solutions[index].updates |= {(layer.index, name): value for name, value in updates.items()}
        return found

    def _split(self) -> None:
        """From here on every lane is on its own."""
        self.branches = [
            Branch(f"{index}", {index: lane})
            for branch in self.branches
            for index, lane in branch.lanes.items()
        ]

    def _advance(
        self, layer: Layer, parameters: Mapping[str, Parameters], origins: Sequence[str] = ()
    ) -> None:
        """Take every branch's features through the layer with its own parameters.

        Args:
            layer: the layer at hand.
            parameters: of the layer, by branch.
            origins: where the branches come from, if they split just now: one trunk, or themselves.
        """
        has_trunk = list(origins) == [_TRUNK]
        for (task, part), batches in self.waiting.items():
            watch = FiniteWatch(layer, task, self.parts[task][part].ids)
            for batch in batches:
                for branch in self.branches:
                    if part not in branch.parts:
                        continue
                    self.on_step(layer.index, task)
                    with self._shared(branch.lanes):
                        state = batch.get(_TRUNK if has_trunk else branch.name)
                        out = layer.call(parameters[branch.name], state, batch.side)
                        watch.see(f"calibrated model {branch.name}", out[layer.stream])
                        batch.put(branch.name, out)
                if has_trunk:
                    batch.put(_TRUNK, {})  # nobody asks for it again
            watch.check()

    def _batches(self, layer: Layer, task: str, part: int) -> Iterator[WaitingBatch]:
        if (task, part) not in self.waiting:
            self.waiting[task, part] = self._read(task, part)
        for batch in self.waiting[task, part]:
            self.on_step(layer.index, task)
            yield batch

    def _read(self, task: str, part: int) -> list[WaitingBatch]:
        """A part's batches at boundary 0, where all models agree."""
        found: list[WaitingBatch] = []
        for batch in self.parts[task][part].batches():
            state, side = self.pool.chain.start(on_device(batch.inputs, self.pool.device, self.pool.dtype))
            name = f"{list(self.parts).index(task)}-{part}-{len(found)}"
            found.append(WaitingBatch(self.store, name, side))
            for model in (_EXPERT, _TRUNK):
                found[-1].put(model, state)
        return found

    @contextmanager
    def _shared(self, lanes: Collection[int]) -> Iterator[None]:
        """Work whose time these lanes have in common."""
        started = time.perf_counter()
        yield
        share = (time.perf_counter() - started) / len(lanes)
        for index in lanes:
            self.solutions[index].seconds += share
