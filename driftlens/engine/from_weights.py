"""Calibrations that look at weights alone: no sample is read, and one weight of every model is alive at a time."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from driftlens.base.threads import exact_products
from driftlens.base.variants import expert_of
from driftlens.engine.calibrating import CalibrationWalk, Ground, solve_layer, solved_by_all
from driftlens.engine.problems import CalibratedLayer, WeightProblem, Weightwise
from driftlens.engine.site_selection import site_path
from driftlens.models.chain import Layer, Site


def from_weights(ground: Ground, calibrator: Weightwise) -> Iterator[CalibratedLayer]:
    """Calibrated layers in forward order."""
    return (layer for [layer] in _WeightWalk(ground, calibrator).walked())


class _WeightWalk(CalibrationWalk):
    """Solves every linear site from the weights of base, merged model and experts."""

    def __init__(self, ground: Ground, calibrator: Weightwise) -> None:
        super().__init__(ground)
        self.calibrator = calibrator

    def pass_through(self, layer: Layer, done: Mapping[str, Tensor]) -> None:
        """Nothing waits."""

    @torch.no_grad()
    @exact_products()
    def calibrate(self, layer: Layer, names: Collection[str], *, is_last: bool) -> list[CalibratedLayer]:
        """Solve the linear sites of one layer, each in one of the processes."""
        started, base = time.perf_counter(), self.ground.base
        assert base is not None, "the calibrator's check refuses that"
        sites = [site for site in layer.sites if site.name in names and site.kind == "linear"]
        owners = self.team.balanced([1.0] * len(sites))
        problems = (
            self._problem(layer, site, base)
            for site, owner in zip(sites, owners, strict=True)
            if owner == self.team.rank
        )
        solve = partial(solve_layer, self.pool, layer, problems, self.calibrator.solve, stored_as=base)
        like = self.pool.parameters("merged", layer) if self.team.size > 1 else {}
        [(updates, reports)] = solved_by_all(self.team, like, lambda: [solve()])
        order = [site_path(layer, site) for site in sites]
        reports.sort(key=lambda report: order.index(report.site))
        seconds = time.perf_counter() - started
        return [CalibratedLayer(layer.index, updates, reports, seconds=seconds)]

    def _problem(self, layer: Layer, site: Site, base: str) -> WeightProblem:
        name = f"{site.name}.weight"

        def experts() -> Iterator[Tensor]:
            for task in self.tasks:
                self.tell(layer.index, task)
                yield self.pool.parameters(expert_of(task), layer)[name]

        merged, start = (self.pool.parameters(model, layer)[name] for model in ("merged", base))
        return WeightProblem((site,), merged, start, experts)
