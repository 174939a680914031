"""Everything that is summed up while the tasks' features go through one layer."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from driftlens.engine.linear_sums import LinearSums
from driftlens.engine.norm_sums import NormSums
from driftlens.engine.problems import ClosedForm, Problem, Wanted
from driftlens.engine.row_weights import row_weights
from driftlens.engine.site_rows import SiteRows
from driftlens.errors import SpecError
from driftlens.linalg.gram import GramPool
from driftlens.models.chain import Layer, LayerChain, Parameters, SideInputs, Site, State

UNIFORM = "uniform"


class LayerSums:
    """Moments of the chosen sites of one layer.

    Linear sites that read the same tensor with the same token weights share a Gram matrix.

    Args:
        chain: the model taken apart.
        layer: the layer at hand.
        names: its sites to calibrate.
        calibrator: says what it wants of each site, and folds the tasks.
        objectives: whether what objectives need is summed up too.
        grams: where Gram sums come from; problems live in them until they are taken back.

    Raises:
        SpecError: a site's token-weight rule is unknown to this architecture.
    """

    def __init__(
        self,
        chain: LayerChain,
        layer: Layer,
        names: Collection[str],
        calibrator: ClosedForm,
        *,
        objectives: bool = True,
        grams: GramPool | None = None,
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
                norm = NormSums(site, rule=wanted.token_weights, fold=calibrator.fold_norm, dtype=dtype)
                self._norms.append(norm)
        self._groups = [
            LinearSums(
                sites,
                wanted=wanted,
                fold=calibrator.fold(memory),
                dtype=dtype,
                objectives=objectives,
                grams=memory,
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
    ) -> None:
        """Add one batch of the task at hand.

        Args:
            merged_rows: what the merged model feeds its sites.
            expert_rows: what the expert feeds its sites, and what they make of it.
            state: the merged model's features before the layer, for the token weights.
            side: side inputs of the batch.
            expert: the expert's parameters.
            num_batches: about how many batches the task has.
        """
        for group in self._groups:
            rows = _flat(merged_rows.inputs[group.sites[0].name])
            theirs = _flat(expert_rows.inputs[group.sites[0].name])
            outputs = [_flat(expert_rows.outputs[site.name]) for site in group.sites]
            weights = self._weights(group.wanted.token_weights, group.sites[0], merged_rows, state, side)
            group.add(rows, theirs, outputs, weights, expert, len(rows) * max(1, num_batches))
        for norm in self._norms:
            rows = _flat(merged_rows.inputs[norm.site.name])
            norm.add(rows, self._weights(norm.rule, norm.site, merged_rows, state, side))

    def end_task(self, expert: Parameters) -> None:
        """Fold the task at hand into the sums over tasks."""
        for group in self._groups:
            group.end_task(expert)
        for norm in self._norms:
            norm.end_task(expert)

    def problems(self, merged: Parameters, base: Parameters | None) -> list[Problem]:
        """What is to be solved for this layer, all from the same snapshot of its features."""
        linear: list[Problem] = [group.problem(merged, base) for group in self._groups]
        return linear + [norm.problem(merged, base) for norm in self._norms]

    def _weights(
        self, rule: str, site: Site, rows: SiteRows, state: State, side: SideInputs
    ) -> Tensor | None:
        weights = None if rule == UNIFORM else self._chain.token_weights[rule](state, side)
        return row_weights(site.name, rows.inputs[site.name], weights, side.mask(self._layer.stream))


def require_rule(chain: LayerChain, rule: str) -> None:
    """Refuse a rule of token weights that the architecture doesn't have.

    Raises:
        SpecError: it has no such rule.
    """
    if rule != UNIFORM and rule not in chain.token_weights:
        raise SpecError(
            f"{chain.architecture} has no token weights called {rule!r}",
            hint=f"It has {', '.join([UNIFORM, *chain.token_weights.keys() - {UNIFORM}])}.",
        )


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
