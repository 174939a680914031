"""The solves of one layer, named in errors and reports, their results as a checkpoint can hold them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from driftlens.engine.pool import ModelPool
from driftlens.engine.problems import ClosedForm, NormProblem, Problem, SiteReport, SiteUpdate
from driftlens.engine.site_selection import site_path
from driftlens.errors import NumericsError
from driftlens.models.chain import Layer, Site


def solve_layer(
    pool: ModelPool, layer: Layer, problems: Sequence[Problem], calibrator: ClosedForm, *, stored_as: str
) -> tuple[dict[str, Tensor], list[SiteReport]]:
    """New parameters of a layer by its own names, and a report per site.

    Parameters hold only what the dtype of the model `stored_as` can hold, so that whatever is computed with them is
    what the saved model will compute; they are on the pool's device in its dtype.

    Args:
        pool: for `stored_as`, device and dtype.
        layer: the layer at hand.
        problems: all from one snapshot of its features.
        calibrator: solves them.
        stored_as: the pool's name of the model in whose form the calibrated one will be saved.

    Raises:
        NumericsError: the moments hold NaN or infinite entries; names layer and sites.
        SingularGramError: a system can't be solved as asked; names layer and sites.
    """
    headers = pool.source(stored_as).headers
    updates: dict[str, Tensor] = {}
    reports: list[SiteReport] = []
    for problem in problems:
        started = time.perf_counter()
        found = _solved(layer, problem, calibrator)
        seconds = (time.perf_counter() - started) / len(found)
        paths = {site.name: site_path(layer, site) for site in _sites(problem)}
        for update in found:
            reports.append(replace(update.report, site=paths[update.report.site], seconds=seconds))
            for name, value in update.parameters.items():
                stored = headers[layer.parameters[name].key].dtype
                updates[name] = value.to(stored).to(pool.device, pool.dtype)
    return updates, reports


def _solved(layer: Layer, problem: Problem, calibrator: ClosedForm) -> Sequence[SiteUpdate]:
    try:
        return calibrator.solve(problem)
    except NumericsError as error:
        named = ", ".join(site_path(layer, site) for site in _sites(problem))
        raise type(error)(
            f"layer {layer.index}, {named}: {error.message}",
            hint=error.hint,
            **{**error.context, "layer": layer.index, "sites": named},
        ) from error


def _sites(problem: Problem) -> Sequence[Site]:
    return [problem.site] if isinstance(problem, NormProblem) else problem.sites
