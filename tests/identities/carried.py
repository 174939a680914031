"""The reference for attribution: every local mismatch carried forward to the final feature, and one way back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from driftlens.diagnostics.attribution import BackwardSweep, JacobianSettings, PrefixSwaps
from driftlens.engine.walk import CachedBatch, FeatureStore, LayerView, differentiable_split
from driftlens.linalg.state import (
    PathJacobian,
    State,
    inner_products,
    stack_states,
    state_norms,
    subtract_states,
)
from tests.zoo.cases import Family


def carried_forward(views: Sequence[LayerView], nodes: int) -> list[State]:
    """P_{l->L} m_l for every layer l of one batch: products with the Jacobian of each later layer."""
    vectors: list[State] = []
    for view in views:
        if vectors:
            layer = view.crossed_layer
            if view.variant_along is not None:
                layer = partial(view.variant_along, routes=view.routes["crossed"].fixed_copy())
            operator = PathJacobian(layer, view.expert_in, view.merged_in, nodes)
            pushed, _ = operator.products(stack_states(vectors), {})
            vectors = [{name: leaf[i] for name, leaf in pushed.items()} for i in range(len(vectors))]
        vectors.append(differentiable_split(view).local_mismatch)
    return vectors


def shares_carried(views: Sequence[LayerView], nodes: int) -> Tensor:
    """<P m_l, e_L> per layer and sample, [L, n]."""
    drift = differentiable_split(views[-1]).drift
    return torch.stack([inner_products(vector, drift) for vector in carried_forward(views, nodes)])


def remainder(views: Sequence[LayerView], nodes: int) -> State:
    """e_L minus the sum of all vectors carried to it."""
    rest = differentiable_split(views[-1]).drift
    for vector in carried_forward(views, nodes):
        rest = subtract_states(rest, vector)
    return rest


@dataclass(frozen=True)
class WayBack:
    """What one pull-back of some covectors finds: parts [L, k, n] and |e_L|^2 [n]."""

    parts: Tensor
    energy: Tensor
    pull_back: BackwardSweep

    @property
    def shares(self) -> Tensor:
        """<m_l, A' ... A' e_L> per layer and sample, [L, n]."""
        return self.parts[:, 0]

    def error(self, layer: int, variant: str = "merged") -> float:
        """|p - A e| / |p| of a layer."""
        found = self.pull_back.sensitivities[variant, layer]
        return float(found.error.sum() / found.size.sum())


@torch.no_grad()
def way_back(
    models: Family,
    views: Sequence[LayerView],
    settings: JacobianSettings,
    covectors: Sequence[State] = (),
    store: FeatureStore | None = None,
) -> WayBack:
    """Pull the final drift, and then other covectors, back through all layers of one batch and variant."""
    variant = views[0].variant
    pull_back = BackwardSweep(models.pool, "a", [variant], settings, store or FeatureStore())
    for view in views:
        pull_back.add(view)
    ((start, batch),) = pull_back.batches.items()
    drift = pull_back.final_drift(batch, variant)
    parts = [step.parts() for step in pull_back.steps({(start, variant): stack_states([drift, *covectors])})]
    return WayBack(torch.stack(parts[::-1]), state_norms(drift).square(), pull_back)


def swapped(views: Sequence[LayerView]) -> PrefixSwaps:
    """Prefix swaps of one batch and variant."""
    swaps = PrefixSwaps(
        CachedBatch(FeatureStore(), "", "", views[0].side, views[0].start, views[0].stop), views[0].variant
    )
    with torch.no_grad():
        for view in views:
            swaps.add(view)
    return swaps
