"""The operator on the layers of every kind of model: masks, token ids and several streams ride along."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from driftlens.engine.walk import LayerView, walk
from driftlens.linalg import state as states
from driftlens.linalg.state import PathJacobian, State, subtract
from tests.zoo.cases import CASES, family

NODES = 4


@pytest.fixture(params=CASES)
def inner_views(request: pytest.FixtureRequest, device: torch.device) -> list[LayerView]:
    """Every layer behind the stem, where drift comes in."""
    models = family(CASES[request.param], n=3, batch_size=3, device=device)
    with torch.no_grad():
        return [view for view in walk(models.pool, "a", ["merged"], models.batches) if view.layer.index > 1]


def operator_of(view: LayerView, nodes: int = NODES) -> PathJacobian:
    return PathJacobian(view.crossed_layer, view.expert_in, view.merged_in, nodes)


def stacked(view: LayerView, count: int = 2) -> State:
    """The incoming drift and random vectors behind it."""
    generator = torch.Generator().manual_seed(view.layer.index)
    drift = subtract(view.merged_in, view.expert_in)
    return {
        name: torch.cat(
            [leaf[None], torch.randn(count, *leaf.shape, generator=generator, dtype=leaf.dtype).to(leaf)]
        )
        for name, leaf in drift.items()
    }


@torch.no_grad()
def test_all_nodes_in_one_pass_and_one_by_one_give_the_same(
    inner_views: list[LayerView], monkeypatch: pytest.MonkeyPatch
) -> None:
    for view in inner_views:
        found = []
        for limit in (1 << 40, 0):
            monkeypatch.setattr(states, "TOGETHER", limit)
            found.append(operator_of(view).jvps(stacked(view)))
        together, apart = found
        assert together.keys() == apart.keys() == view.merged_out.keys()
        for name in apart:
            torch.testing.assert_close(together[name], apart[name], rtol=1e-10, atol=1e-12)


@torch.no_grad()
def test_twice_the_nodes_give_more_than_a_third_more_digits(
    inner_views: list[LayerView], rounding: float
) -> None:
    """Every layer here is smooth, so the error falls geometrically until rounding is all there is."""
    for view in inner_views:
        errors = [float(operator_of(view, nodes).closure()) for nodes in (1, 2, 4, 8, 16)]
        assert all(later <= max(rounding, earlier ** (4 / 3)) for earlier, later in pairwise(errors)), errors
        assert errors[-1] <= rounding
