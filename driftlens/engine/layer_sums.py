"""Everything that is summed up while the tasks' features go through one layer."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from driftlens.engine.linear_sums import LinearSums
from driftlens.engine.norm_sums import NormSums
from driftlens.engine.problems import Calibrator, Problem
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
        calibrator: for the target, the task weights and the dtype of the sums.
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
        calibrator: Calibrator,
        *,
        objectives: bool = True,
        grams: GramPool | None = None,
    ) -> None:
        self._chain = chain
        dtype: torch.dtype = getattr(torch, calibrator.solve_dtype)
        grouped: dict[tuple[str, str], list[Site]] = {}
        self._norms: list[tuple[str, NormSums]] = []
        for site in layer.sites:
            if site.name not in names:
                continue
            rule = token_rule(chain, layer, site, calibrator.last_block_tokens)
            if site.kind == "linear":
                grouped.setdefault((site.input, rule), []).append(site)
            else:
                self._norms.append((rule, NormSums(site, dtype=dtype)))
        self._groups = [
            (
                rule,
                LinearSums(
                    sites,
                    alpha=calibrator.alpha,
                    task_weight=calibrator.task_weight,
                    dtype=dtype,
                    objectives=objectives,
                    grams=grams,
                ),
            )
            for (_, rule), sites in grouped.items()
        ]

    @property
    def expert_inputs(self) -> frozenset[str]:
        """Sites whose input is wanted from the expert; of those that read the same rows, one."""
        return frozenset(group.sites[0].name for _, group in self._groups)

    @property
    def expert_outputs(self) -> frozenset[str]:
        """Sites whose output is wanted from the expert."""
        return frozenset(site.name for _, group in self._groups for site in group.sites)

    @property
    def merged_inputs(self) -> frozenset[str]:
        """Sites whose input is wanted from the merged model."""
        return self.expert_inputs | {norm.site.name for _, norm in self._norms}

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
        for rule, group in self._groups:
            rows = _flat(merged_rows.inputs[group.sites[0].name])
            theirs = _flat(expert_rows.inputs[group.sites[0].name])
            outputs = [_flat(expert_rows.outputs[site.name]) for site in group.sites]
            weights = self._weights(rule, rows, state, side)
            group.add(rows, theirs, outputs, weights, expert, len(rows) * max(1, num_batches))
        for rule, norm in self._norms:
            rows = _flat(merged_rows.inputs[norm.site.name])
            norm.add(rows, self._weights(rule, rows, state, side))

    def end_task(self, expert: Parameters) -> None:
        """Fold the task at hand into the sums over tasks."""
        for _, group in self._groups:
            group.end_task(expert)
        for _, norm in self._norms:
            norm.end_task(expert)

    def problems(self, merged: Parameters, base: Parameters | None) -> list[Problem]:
        """What is to be solved for this layer, all from the same snapshot of its features."""
        linear: list[Problem] = [group.problem(merged, base) for _, group in self._groups]
        return linear + [norm.problem(merged, base) for _, norm in self._norms]

    def _weights(self, rule: str, rows: Tensor, state: State, side: SideInputs) -> Tensor | None:
        if rule == UNIFORM:
            return None
        return self._chain.token_weights[rule](state, side).flatten().to(rows)


def token_rule(chain: LayerChain, layer: Layer, site: Site, last_block_tokens: str | None) -> str:
    """Name of the rule by which tokens of a site's input count.

    Raises:
        SpecError: the architecture has no such rule.
    """
    is_last_block = layer is chain.blocks[-1]
    emphasised = last_block_tokens is not None and is_last_block and not site.mixes_tokens
    rule = last_block_tokens if emphasised and last_block_tokens is not None else site.token_weights
    if rule != UNIFORM and rule not in chain.token_weights:
        raise SpecError(
            f"{chain.architecture} has no token weights called {rule!r}",
            hint=f"It has {', '.join([UNIFORM, *chain.token_weights.keys() - {UNIFORM}])}.",
        )
    return rule


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
