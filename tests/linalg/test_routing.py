"""The router nearest to several, against dense matrices and automatic derivatives of what it minimises."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from driftlens.base.errors import NumericsError
from driftlens.linalg.routing import Routing, scored, solve_router
from tests.reference.routing import LOSSES, curvature

EXPERTS, WIDTH = 3, 4
Task = tuple[Tensor, Tensor]


def tasks(counts: tuple[int, ...] = (7, 5), spread: float = 1.0) -> tuple[Tensor, dict[str, Task]]:
    """First weights, and by task rows and the router that is wanted of them."""
    generator = torch.Generator().manual_seed(3)
    first = torch.randn(EXPERTS, WIDTH, generator=generator, dtype=torch.float64)

    def task(count: int) -> Task:
        x = torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)
        return x, first + spread * torch.randn(first.shape, generator=generator, dtype=torch.float64)

    return first, {f"task {at}": task(count) for at, count in enumerate(counts)}


def solved(scoring: str, first: Tensor, given: dict[str, Task], size: int = 2) -> Tensor:
    def rows(x: Tensor, wanted: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [(some, scored(some @ wanted.mT, scoring)) for some in x.split(size)]

    by_task = {name: rows(*task) for name, task in given.items()}
    counts = {name: len(x) for name, (x, _) in given.items()}
    routing = Routing({name: by_task[name].__iter__ for name in given}, counts, scoring)
    solution = solve_router(routing, {name: wanted - first for name, (_, wanted) in given.items()})
    assert solution.after <= solution.before and solution.error <= 1e-8
    return first + solution.change


def objective(scoring: str, weights: Tensor, given: dict[str, Task]) -> Tensor:
    ways = {name: (weights - wanted).flatten() for name, (_, wanted) in given.items()}
    return torch.stack(
        [ways[name] @ curvature(scoring, *task) @ ways[name] for name, task in given.items()]
    ).sum()


def check_against_dense_references(scoring: str) -> None:
    first, given = tasks()
    ours = solved(scoring, first, given)
    matrices = {name: curvature(scoring, *task) for name, task in given.items()}
    wanted = sum(matrices[name] @ wanted.flatten() for name, (_, wanted) in given.items())
    want = torch.linalg.solve(sum(matrices.values()), wanted).reshape(first.shape)
    assert float((ours - want).norm()) <= 1e-8 * float(want.norm())
    gradient, slope = (
        torch.autograd.grad(objective(scoring, weights.requires_grad_(), given), weights)[0]
        for weights in (ours, first)
    )
    assert float(gradient.norm()) <= 1e-8 * float(slope.norm())


@pytest.mark.parametrize("scoring", LOSSES)
def test_the_solution_is_that_of_dense_matrices_and_its_gradient_is_zero(scoring: str) -> None:
    check_against_dense_references(scoring)


@pytest.mark.parametrize("scoring", LOSSES)
def test_routers_that_are_the_first_one_change_nothing_at_all(scoring: str) -> None:
    first, given = tasks(spread=0.0)
    assert torch.equal(solved(scoring, first, given), first)


def test_one_router_alone_is_found_whatever_its_samples() -> None:
    first, given = tasks(counts=(2,))
    ours = solved("softmax", first, given)
    torch.testing.assert_close(ours, given["task 0"][1], rtol=1e-6, atol=1e-6)


def test_order_and_number_of_rows_at_a_time_change_nothing() -> None:
    first, given = tasks()
    turned = {name: (x.flip(0), wanted) for name, (x, wanted) in reversed(given.items())}
    torch.testing.assert_close(
        solved("softmax", first, turned, size=5), solved("softmax", first, given), rtol=1e-8, atol=1e-8
    )


def test_inputs_that_are_never_there_leave_their_weights() -> None:
    first, given = tasks()
    for x, _ in given.values():
        x[:, 2] = 0
    ours = solved("softmax", first, given)
    assert torch.equal(ours[:, 2], first[:, 2]) and not torch.allclose(ours, first)


def test_rows_that_are_no_numbers_are_refused() -> None:
    first, given = tasks()
    given["task 1"][0][0] = torch.nan
    with pytest.raises(NumericsError, match="NaN"):
        solved("softmax", first, given)
