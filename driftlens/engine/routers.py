"""Routers of mixtures of experts, solved for so that tokens go where each task's own model sends them.

A router is solved by itself, before the matrices of its layer's experts or after them: on the features that the model
which is calibrated feeds it then, towards the scores that the experts' routers give these. What the experts' matrices
are solved from is the same either way, for their tokens are those that each task's own model sends there; of Llama 4,
whose gates scale what experts read, step by step it is not.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from driftlens.base.devices import moved, place_of_sums, wide
from driftlens.base.errors import SpecError
from driftlens.base.variants import expert_of
from driftlens.engine.calibrating import (
    TRUNK,
    CalibrationWalk,
    ClosedForm,
    Solved,
    router_of,
    solve_layer,
)
from driftlens.engine.pool import ModelPool
from driftlens.engine.problems import RouterProblem, SiteReport, SiteUpdate
from driftlens.engine.walk import WaitingBatch
from driftlens.linalg.routing import Routing, scored, solve_router
from driftlens.models.chain import Layer, Parameters, Routes, RoutesKnown, SideInputs, Site, Slot, State

_ROUTES, _ROUTER = "routes", "router"


def require_trained(
    pool: ModelPool,
    sites: Mapping[int, Collection[str]],
    tasks: Collection[str],
    calibrators: Sequence[ClosedForm],
) -> None:
    """Refuse routers that no expert has changed: there is nothing to solve for."""
    routers = [
        (layer, router_of(layer, sites.get(layer.index, ()), calibrators)) for layer in pool.chain.layers
    ]
    slots = [slot for layer, site in routers if site is not None for slot in _slots(layer, site).values()]
    for slot in slots:
        merged = pool.stored("merged", slot)
        rounding = 4 * torch.finfo(merged.dtype).eps
        for task in tasks:
            expert = pool.stored(expert_of(task), slot)
            if not torch.allclose(wide(expert), wide(merged), rtol=rounding, atol=0):
                return
    if slots:
        raise SpecError(
            "routers are to be repaired, and those of all experts are the merged model's: they were frozen in training",
            hint="Set routers to off.",
        )


def keep_routes(
    layer: Layer, expert: Parameters, batch: WaitingBatch, state: State, routes: Routes | None
) -> None:
    """Let wait where the task's own model sends tokens, as a pass of it has shown, or else as one more shows."""
    if routes is None or routes.chosen is None:
        routes = _routed(layer, expert, state, batch.side)
    assert routes.chosen is not None
    batch.put(_ROUTES, {"chosen": routes.chosen})


def _routed(layer: Layer, parameters: Parameters, state: State, side: SideInputs) -> Routes:
    """Where tokens go, by a pass that ends there."""
    routes = Routes(ends=True)
    with contextlib.suppress(RoutesKnown):
        layer.call(parameters, state, side.along(routes))
    return routes


def _slots(layer: Layer, site: Site) -> dict[str, Slot]:
    """By name in the layer where a router's weight lies, and its bias where it has one."""
    names = (f"{site.name}.{part}" for part in ("weight", "bias"))
    return {name: layer.parameters[name] for name in names if name in layer.parameters}


@dataclass
class RouterRepair:
    """One router, solved for in a lane of a walk, whose features wait under the name `branch`, in these parts."""

    walk: CalibrationWalk
    layer: Layer
    site: Site
    calibrator: ClosedForm
    branch: str = TRUNK
    parts: frozenset[int] = frozenset({0})

    def solved(self, student: Parameters) -> Solved:
        """New weights and a report; `student` are the layer's parameters, with what is solved by now.

        A router stays as merged whose scores are no softmax or sigmoid of which the largest are taken.
        """
        walk = self.walk
        heard = walk.team.together(partial(self._hear, student))
        counts = sum((counts for counts, *_ in heard), Counter[str]())
        scorings = {scoring for *_, of_rank in heard for scoring in of_rank}
        routing = Routing(
            {task: partial(self._rows, task) for task in walk.parts},
            counts,
            scorings.pop() if len(scorings) == 1 else "",
            self._total,
        )
        work = partial(
            solve_layer,
            walk.pool,
            self.layer,
            [RouterProblem((self.site,), {name: student[name] for name in _slots(self.layer, self.site)})],
            partial(self._solve, routing),
            self.calibrator.least_rows,
            stored_in=walk.ground.stored_in,
        )
        # Processes add up what they push in the middle of it.
        updates, [report] = walk.team.final(work)
        after = sum(walk.team.together(partial(self._count_same, {**student, **updates})))
        before, total = sum(same for _, same, _ in heard), counts.total() or 1
        for batch in walk.passage.all_waiting:
            batch.drop(_ROUTER)
        return updates, [replace(report, routes_before=before / total, routes_after=after / total)]

    def _solve(self, routing: Routing, problem: RouterProblem) -> list[SiteUpdate]:
        if not routing.scoring:
            return [SiteUpdate.kept(self.site, None)]
        merged = self._affine(problem.parameters)
        ways = {task: self._wanted(task) - merged for task in self.walk.tasks}
        solution = solve_router(routing, ways)
        solved = merged + solution.change
        values = [solved[:, :-1], solved[:, -1]] if self._has_bias else [solved]
        size = float(torch.linalg.vector_norm(merged))
        report = SiteReport(
            site=self.site.name,
            kind="router",
            lam=0.0,
            objective_before=solution.before,
            objective_after=solution.after,
            weight_change=float(torch.linalg.vector_norm(solution.change)) / size if size else None,
            stationarity_error=solution.error,
        )
        return [SiteUpdate(dict(zip(problem.parameters, values, strict=True)), report)]

    @property
    def _has_bias(self) -> bool:
        return f"{self.site.name}.bias" in self.layer.parameters

    def _affine(self, parameters: Parameters) -> Tensor:
        """Weight and, where there is one, bias in a column, [E, k]."""
        dtype: torch.dtype = getattr(torch, self.calibrator.solve_dtype)
        place = place_of_sums(dtype, self.walk.pool.device)
        parts = [parameters[name].to(place, dtype) for name in _slots(self.layer, self.site)]
        return torch.cat([part.reshape(len(part), -1) for part in parts], dim=1)

    def _wanted(self, task: str) -> Tensor:
        pool = self.walk.pool
        slots = _slots(self.layer, self.site).items()
        expert = {name: pool.stored(expert_of(task), slot) for name, slot in slots}
        return self._affine({name: moved(value, pool.device, pool.dtype) for name, value in expert.items()})

    def _batches(self, task: str) -> Iterator[WaitingBatch]:
        for part in sorted(self.parts):
            yield from self.walk.passage.batches(self.layer, task, part)

    def _rows(self, task: str) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in self._batches(task):
            held = batch.get(_ROUTER)
            x = self._with_constant(held["x"])
            yield x, held["scores"].to(x)

    def _with_constant(self, x: Tensor) -> Tensor:
        dtype: torch.dtype = getattr(torch, self.calibrator.solve_dtype)
        rows = torch.cat([x, x.new_ones(len(x), 1)], dim=1) if self._has_bias else x
        return rows.to(place_of_sums(dtype, x.device), dtype)

    def _hear(self, student: Parameters) -> tuple[Counter[str], int, set[str]]:
        """Let wait what the router reads and the scores that are wanted of it.

        Its value: tokens by task, how many go where the task's own model sends them, and how scores are made.
        """
        sizes, same, scorings = list[Tensor](), list[Tensor](), set[str]()
        tasks: list[str] = []
        for task in self.walk.parts:
            wanted = self._wanted(task)
            for batch in self._batches(task):
                routes, real, right = self._gone(batch, student)
                scorings.add(routes.scoring)
                tasks.append(task)
                sizes.append(real.sum())
                same.append(right)
                if routes.fed is not None and routes.scoring:
                    has_padding = batch.side.mask(self.layer.stream) is not None
                    x = routes.fed[real] if has_padding else routes.fed
                    scores = scored(self._with_constant(x) @ wanted.mT, routes.scoring)
                    # As exact as the features are.
                    precise = torch.promote_types(x.dtype, torch.float32)
                    batch.put(_ROUTER, {"x": x, "scores": scores.to(precise)})
        # The host waits once for the numbers of all batches.
        numbers = torch.stack([*sizes, *same]).tolist() if tasks else []
        counts = Counter[str]()
        for task, number in zip(tasks, numbers, strict=False):
            counts[task] += number
        return counts, sum(numbers[len(tasks) :]), scorings

    def _gone(self, batch: WaitingBatch, student: Parameters) -> tuple[Routes, Tensor, Tensor]:
        """Where tokens go, which of them are no padding, and how many of those go where the expert sends them."""
        routes = _routed(self.layer, student, batch.get(self.branch), batch.side)
        changed = routes.changed(Routes(batch.get(_ROUTES)["chosen"]))
        mask = batch.side.mask(self.layer.stream)
        real = torch.ones_like(changed) if mask is None else mask.reshape(-1).bool()
        return routes, real, (real & ~changed).sum()

    def _count_same(self, student: Parameters) -> int:
        same = [self._gone(batch, student)[2] for task in self.walk.parts for batch in self._batches(task)]
        return int(torch.stack(same).sum()) if same else 0

    def _total(self, tensor: Tensor) -> Tensor:
        self.walk.team.sum([tensor], to=0)
        self.walk.team.share([tensor], of=0)
        return tensor
