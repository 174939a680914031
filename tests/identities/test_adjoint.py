"""Pull-backs: the operator on layers of every kind of model, and the parts of drift, loss and margin that it gives."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from driftlens.diagnostics.attribution import (
    JacobianSettings,
    loss_target,
    margin_target,
)
from driftlens.engine.walk import LayerView, walk
from driftlens.linalg import state as states
from driftlens.linalg.state import PathJacobian, State, subtract_states
from driftlens.models.heads import Head
from tests.identities.carried import way_back
from tests.quick import few
from tests.zoo.cases import CASES, Family, family

FEW_NODES = 4


@pytest.fixture(params=few(CASES, ["open_clip_vit", "sequential"]))
def inner_views(request: pytest.FixtureRequest, device: torch.device) -> list[LayerView]:
    """Every layer behind the stem, where drift comes in."""
    models = family(CASES[request.param], n=3, batch_size=3, device=device)
    with torch.no_grad():
        return [view for view in walk(models.pool, "a", ["merged"], models.batches) if view.layer.index > 1]


def operator_of(view: LayerView, nodes: int = FEW_NODES) -> PathJacobian:
    return PathJacobian(view.crossed_layer, view.expert_in, view.merged_in, nodes)


def stacked(view: LayerView, count: int = 2) -> State:
    """The incoming drift and random vectors behind it."""
    generator = torch.Generator().manual_seed(view.layer.index)
    drift = subtract_states(view.merged_in, view.expert_in)
    return {
        name: torch.cat([leaf[None], torch.randn(count, *leaf.shape, generator=generator, dtype=leaf.dtype).to(leaf)])
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
            found.append(operator_of(view).products(stacked(view), {})[0])
        together, apart = found
        assert together.keys() == apart.keys() == view.merged_out.keys()
        for name in apart:
            torch.testing.assert_close(together[name], apart[name], rtol=1e-10, atol=1e-12)


@torch.no_grad()
def test_twice_the_nodes_give_more_than_a_third_more_digits(inner_views: list[LayerView], rounding: float) -> None:
    """Every layer here is smooth, so the error falls geometrically until rounding is all there is."""
    for view in inner_views:
        errors = [float(operator_of(view, nodes).closure()) for nodes in (1, 2, 4, 8, 16)]
        assert all(later <= max(rounding, earlier ** (4 / 3)) for earlier, later in pairwise(errors)), errors
        assert errors[-1] <= rounding


NODES = 16
STEPS = 300


@pytest.fixture(params=few(CASES, ["open_clip_vit", "sequential"]))
def models(request: pytest.FixtureRequest, device: torch.device) -> Family:
    return family(CASES[request.param], n=3, batch_size=3, device=device)


def views_of(models: Family) -> list[LayerView]:
    with torch.no_grad():
        return list(walk(models.pool, "a", ["merged"], models.batches))


def parts_of(models: Family, views: list[LayerView], covector: Tensor) -> Tensor:
    """What each layer adds to a target, [L, n]."""
    settings = JacobianSettings(nodes=NODES, max_nodes=NODES)
    return way_back(models, views, settings, [{"hidden": covector}]).parts[:, 1]


def ends(views: list[LayerView]) -> tuple[Tensor, Tensor]:
    return views[-1].expert_out["hidden"], views[-1].merged_out["hidden"]


def head_for(features: Tensor, scale: float = 20.0) -> Head:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(5, features.shape[1], generator=generator, dtype=torch.float64).to(features.device)
    return Head(tuple("abcde"), F.normalize(rows, dim=1), scale)


def test_parts_of_the_loss_sum_to_the_change_of_cross_entropy(models: Family) -> None:
    views = views_of(models)
    expert, merged = ends(views)
    head, labels = head_for(expert), torch.arange(3, device=expert.device) % 5
    with torch.no_grad():
        target = loss_target(head, expert, merged, labels)
    parts = parts_of(models, views, target.covector)
    change = F.cross_entropy(head.scores(merged), labels, reduction="none") - F.cross_entropy(
        head.scores(expert), labels, reduction="none"
    )
    torch.testing.assert_close(target.change, change, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(parts.sum(dim=0), change, rtol=1e-5, atol=1e-6)


def test_parts_of_the_margin_sum_to_what_decides_the_flip(models: Family) -> None:
    views = views_of(models)
    expert, merged = ends(views)
    head = head_for(expert)
    with torch.no_grad():
        target = margin_target(head, expert, merged)
    parts = parts_of(models, views, target.covector)
    before, after = head.scores(expert), head.scores(merged)
    for i, chosen in enumerate(before.argmax(dim=1).tolist()):
        margins = [_margin(scores[i], chosen) for scores in (before, after)]
        assert float(target.change[i]) == pytest.approx(margins[1] - margins[0], rel=1e-9, abs=1e-12)
        assert float(parts[:, i].sum()) == pytest.approx(margins[1] - margins[0], rel=1e-5, abs=1e-6)
        assert (int(after[i].argmax()) != chosen) == (margins[0] + float(target.change[i]) < 0)


def _margin(scores: Tensor, chosen: int) -> float:
    return float(scores[chosen]) - max(float(value) for k, value in enumerate(scores) if k != chosen)


@pytest.mark.slow
@pytest.mark.parametrize("classes", [2, 3, 9])
def test_the_margin_is_followed_past_every_change_of_rival(classes: int) -> None:
    """Against small steps of the score segment: each moves the margin by its gradient there."""
    generator = torch.Generator().manual_seed(classes)
    expert, merged = torch.randn(2, 12, 6, generator=generator, dtype=torch.float64)
    rows = torch.randn(classes, 6, generator=generator, dtype=torch.float64)
    head = Head(tuple("abcdefghi"[:classes]), F.normalize(rows, dim=1), 10.0)
    target = margin_target(head, expert, merged)
    before, after = head.scores(expert), head.scores(merged)
    changed = 0
    for i, chosen in enumerate(before.argmax(dim=1).tolist()):
        wanted = _margin(after[i], chosen) - _margin(before[i], chosen)
        assert float(target.change[i]) == pytest.approx(wanted, rel=1e-9, abs=1e-9)
        averaged = torch.zeros(classes, dtype=torch.float64)
        for step in range(STEPS):
            scores = torch.lerp(before[i], after[i], (step + 0.5) / STEPS)
            scores[chosen] = -torch.inf
            averaged[scores.argmax()] += 1 / STEPS
        changed += int((averaged > 0).sum()) > 1
        direction = F.one_hot(torch.tensor(chosen), classes).double() - averaged
        assert float(direction @ (after[i] - before[i])) == pytest.approx(wanted, abs=0.05)
        pulled = torch.zeros(6, dtype=torch.float64)
        for step in range(STEPS):
            point = torch.lerp(expert[i], merged[i], (step + 0.5) / STEPS).requires_grad_()
            (head.scores(point[None])[0] @ direction).backward()
            pulled += point.grad / STEPS  # type: ignore[operator]
        torch.testing.assert_close(target.covector[i], pulled, rtol=2e-2, atol=2e-2)
    # A product of u with the drift that holds for the exact rivals only.
    torch.testing.assert_close((target.covector * (merged - expert)).sum(dim=1), target.change, rtol=1e-6, atol=1e-6)
    assert changed > 2 or classes == 2


def test_one_class_has_no_margin() -> None:
    features = torch.ones(2, 3, dtype=torch.float64)
    head = Head(("a",), torch.ones(1, 3, dtype=torch.float64) / 3**0.5, 1.0)
    assert margin_target(head, features, 2 * features).change.isnan().all()
