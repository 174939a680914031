"""The operator's laws in float64: mean-value identity, adjointness, linearity, dense average, quadrature order."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from driftlens.linalg.state import (
    PathJacobian,
    State,
    gauss_legendre,
    inner_products,
    state_norms,
    subtract_states,
)

Call = Callable[[State], State]


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


WEIGHT, KEYS = drawn(3, 4, seed=1), drawn(4, 4, seed=2)


def smooth(state: State) -> State:
    """Attention over tokens, then a smooth map to another width; tokens of a sample mix, samples do not."""
    h = state["hidden"]
    mixed = F.scaled_dot_product_attention(h @ KEYS, h, h)
    return {"hidden": F.gelu(mixed @ WEIGHT.T)}


def two_streams(state: State) -> State:
    """Like a decoder layer: reads two entries, writes both, and carries an integer leaf along."""
    return {
        "encoded": state["encoded"].tanh(),
        "hidden": state["hidden"] * state["encoded"].sum(dim=1, keepdim=True) + state["position"][:, None, None],
        "position": state["position"],
    }


def pair(call: Call, scale: float = 0.7) -> tuple[State, State]:
    start: State = {"hidden": drawn(2, 3, 4, seed=3)}
    end: State = {"hidden": start["hidden"] + scale * drawn(2, 3, 4, seed=4)}
    if call is two_streams:
        for state, seed in ((start, 5), (end, 6)):
            state["encoded"] = drawn(2, 3, 4, seed=seed)
            state["position"] = torch.tensor([1, 2])
    return start, end


@pytest.fixture(params=[smooth, two_streams], ids=lambda call: call.__name__)
def operator(request: pytest.FixtureRequest) -> PathJacobian:
    return PathJacobian(request.param, *pair(request.param), nodes=16)


def test_it_carries_the_segment_to_the_difference_of_outputs(operator: PathJacobian) -> None:
    exact = subtract_states(operator.layer_call(operator.end), operator.layer_call(operator.start))
    found = operator.jvp(subtract_states(operator.end, operator.start))
    assert float(state_norms(subtract_states(found, exact)).sum()) <= 1e-12 * float(state_norms(exact).sum())
    assert float(operator.closure()) <= 1e-12


def vectors(operator: PathJacobian, count: int) -> State:
    return {
        name: drawn(count, *leaf.shape, seed=7) for name, leaf in operator.start.items() if leaf.is_floating_point()
    }


def test_products_from_both_sides_agree(operator: PathJacobian) -> None:
    v = {name: leaf[0] for name, leaf in vectors(operator, 1).items()}
    out = operator.jvp(v)
    u = {name: drawn(*leaf.shape, seed=8) for name, leaf in out.items()}
    torch.testing.assert_close(inner_products(u, out), inner_products(operator.vjp(u), v), rtol=1e-10, atol=1e-12)


def test_it_is_linear_and_stacked_products_equal_single_ones(operator: PathJacobian) -> None:
    both = vectors(operator, 2)
    stacked = operator.products(both, {})[0]
    first, second = ({name: leaf[i] for name, leaf in both.items()} for i in range(2))
    mixed = operator.jvp({name: 2 * first[name] - 3 * second[name] for name in first})
    for name, leaf in stacked.items():
        torch.testing.assert_close(leaf[0], operator.jvp(first)[name], rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(mixed[name], 2 * leaf[0] - 3 * leaf[1], rtol=1e-11, atol=1e-12)


def test_it_equals_the_average_of_dense_jacobians() -> None:
    """One sample, reverse-mode Jacobians at the same nodes, formed in full."""
    start, end = ({"hidden": state["hidden"][:1]} for state in pair(smooth))
    operator = PathJacobian(smooth, start, end, nodes=5)

    def flat(x: Tensor) -> Tensor:
        return smooth({"hidden": x.view(1, 3, 4)})["hidden"].flatten()

    dense = torch.zeros(9, 12, dtype=torch.float64)
    for t, weight in gauss_legendre(5):
        point = start["hidden"] + t * (end["hidden"] - start["hidden"])
        dense += weight * torch.autograd.functional.jacobian(flat, point.flatten())
    v = drawn(1, 3, 4, seed=9)
    torch.testing.assert_close(
        operator.jvp({"hidden": v})["hidden"].flatten(), dense @ v.flatten(), rtol=1e-12, atol=1e-13
    )


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_polynomials_are_exact_up_to_the_degree_and_not_beyond(nodes: int) -> None:
    """The Jacobian of x^p has degree p - 1 along the path; q nodes are exact up to degree 2q - 1."""

    def error(power: int) -> float:
        start, end = (
            {"hidden": torch.zeros(1, 1, dtype=torch.float64)},
            {"hidden": torch.full((1, 1), 1.3, dtype=torch.float64)},
        )
        return float(PathJacobian(lambda s: {"hidden": s["hidden"] ** power}, start, end, nodes).closure())

    assert error(2 * nodes) <= 1e-14
    assert error(2 * nodes + 1) > 1e-4


def test_error_falls_geometrically_with_the_nodes_of_a_smooth_layer() -> None:
    errors = [float(PathJacobian(smooth, *pair(smooth, scale=1.5), nodes).closure()) for nodes in (2, 4, 8, 16)]
    assert all(later < earlier**1.4 for earlier, later in pairwise(errors)), errors


def test_a_kink_converges_slowly_and_says_so() -> None:
    def kinked(state: State) -> State:
        return {"hidden": F.relu(state["hidden"] @ WEIGHT.T)}

    errors = [float(PathJacobian(kinked, *pair(kinked), nodes).closure()) for nodes in (4, 32)]
    assert 1e-6 < errors[1] < errors[0]


def test_equal_ends_have_no_relative_error() -> None:
    start, _ = pair(smooth)
    assert PathJacobian(smooth, start, start, 2).closure().isnan()


def test_attention_backend_is_restored_afterwards() -> None:
    before = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()
    with pytest.raises(RuntimeError, match="planned"):
        PathJacobian(failing, *pair(smooth), 2).jvp({"hidden": drawn(2, 3, 4, seed=1)})
    assert (
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
    ) == before


def failing(state: State) -> State:
    raise RuntimeError("planned")
