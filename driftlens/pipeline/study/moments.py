"""Input moments of linear sites on the experts' own features, task by task and layer by layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from driftlens.engine.finite import FiniteWatch
from driftlens.engine.layer_sums import UNIFORM
from driftlens.engine.row_weights import row_weights
from driftlens.engine.site_rows import rows_and_output
from driftlens.engine.walk import on_device
from driftlens.linalg.gram import GramSum
from driftlens.models.chain import Layer, SideInputs, State
from driftlens.pipeline.study.study import Study
from driftlens.variants import expert_of


@torch.no_grad()
def site_moments(study: Study) -> Iterator[tuple[Layer, dict[str, dict[str, Tensor]]]]:
    """Layers in forward order, each with {site: {task: E[x x'] [k, k]}} of what the task's expert feeds its sites.

    The mean, in float64 on the CPU, is over the tokens of the calibration samples by the sites' token weights, masked
    ones left out. Sites that run twice are left out too. One boundary's features of all tasks wait at a time.

    Raises:
        NumericsError: weights or features are NaN or infinite; names layer, task and sample.
    """
    pool = study.pool
    sets = {task: at.calibration for task, at in study.tasks.items() if at.calibration is not None}
    waiting: dict[str, Iterable[tuple[State, SideInputs]]] = {
        task: (
            pool.chain.start(on_device(batch.inputs, pool.device, pool.dtype)) for batch in samples.batches()
        )
        for task, samples in sets.items()
    }
    for layer in pool.chain.layers:
        sites = [site for site in layer.sites if site.kind == "linear" and site.runs == 1]
        readers = {(site.input, site.token_weights): site.name for site in sites}
        found: dict[str, dict[str, Tensor]] = {site.name: {} for site in sites}
        for task in waiting:
            parameters = pool.parameters(expert_of(task), layer)
            sums: dict[str, tuple[GramSum, list[float]]] = {}
            carried, watch = [], FiniteWatch(layer, task, sets[task].ids)
            for state, side in waiting[task]:
                rows, out = rows_and_output(layer, parameters, state, side, readers.values())
                for (_, rule), name in readers.items():
                    x, rules = rows.inputs[name], pool.chain.token_weights
                    by_rule = rules[rule](state, side) if rule in rules and rule != UNIFORM else None
                    weights = row_weights(name, x, by_rule, side.mask(layer.stream))
                    x = x.flatten(0, -2)
                    total, counts = sums.setdefault(name, (GramSum(x.shape[-1], torch.float64, x.device), []))
                    total.add_rows(x if weights is None else x * weights.sqrt()[:, None])
                    counts.append(float(len(x) if weights is None else weights.sum(dtype=torch.float64)))
                watch.see(expert_of(task), out[layer.stream])
                carried.append((out, side))
            watch.check()
            waiting[task] = carried
            means = {name: (total.full() / sum(counts)).cpu() for name, (total, counts) in sums.items()}
            for site in sites:
                found[site.name][task] = means[readers[site.input, site.token_weights]]
        yield layer, found
