"""Half products and the two ways to a cross moment, against the plain product."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from driftlens.errors import ShapeError
from driftlens.linalg.gram import GramSum
from driftlens.linalg.output_cross import OutputCross
from driftlens.linalg.sums import add_scaled

CPU = torch.device("cpu")


def random(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("k", [1, 255, 256, 257, 600])
def test_the_half_product_is_the_whole_one(k: int, generator: torch.Generator) -> None:
    first, second = random(generator, 5, k), random(generator, 3, k)
    found = GramSum(k, torch.float64, CPU)
    found.add_rows(first)
    found.add_rows(second)
    want = first.mT @ first + second.mT @ second
    assert float(found.norm()) == pytest.approx(float(torch.linalg.matrix_norm(want)), rel=1e-12)
    vectors = random(generator, 4, k)
    quadratic = ((vectors @ want) * vectors).sum(dim=1)
    torch.testing.assert_close(found.quadratic(vectors), quadratic, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.full(), want, rtol=1e-12, atol=1e-12)


def test_sums_of_tasks_are_scaled_and_memory_is_used_again(generator: torch.Generator) -> None:
    first, second = random(generator, 4, 300), random(generator, 6, 300)
    task, total = GramSum(300, torch.float64, CPU), GramSum(300, torch.float64, CPU)
    for rows, scale in ((first, 0.5), (second, 3.0)):
        task.clear()
        task.add_rows(rows)
        total.add(task, scale)
    want = 0.5 * first.mT @ first + 3 * second.mT @ second
    torch.testing.assert_close(total.full(), want, rtol=1e-12, atol=1e-12)


def test_the_norm_of_a_wide_float32_sum_is_not_too_small(generator: torch.Generator) -> None:
    rows = random(generator, 40, 3000).float()
    found = GramSum(3000, torch.float32, CPU)
    found.add_rows(rows)
    want = torch.linalg.matrix_norm(rows.double().mT @ rows.double())
    assert float(found.norm()) == pytest.approx(float(want), rel=1e-6)


def test_float32_products_are_summed_in_float64() -> None:
    """A thousand small products beside a large one would be lost in a float32 sum."""
    found = GramSum(1, torch.float64, CPU)
    found.add_rows(torch.tensor([[1e4]]))
    for _ in range(1000):
        found.add_rows(torch.tensor([[1.0]]))
    assert float(found.full()) == 1e8 + 1000


@pytest.mark.parametrize("energies", [True, False])
@pytest.mark.parametrize(("count", "way"), [(4, "by rows"), (400, "by inputs")])
def test_both_ways_to_a_cross_moment_agree_with_the_plain_product(
    count: int, way: str, energies: bool, generator: torch.Generator
) -> None:
    weight = random(generator, 90, 20)
    rows, targets = random(generator, count, 20), random(generator, count, 20)
    found = OutputCross(weight, count, torch.float64, energies=energies)
    assert found._is_by_rows == (way == "by rows")
    for start in range(0, count, 3):
        found.add(rows[start : start + 3], targets[start : start + 3])
    cross, energy = found.sums()
    outputs = targets @ weight.mT
    torch.testing.assert_close(cross, outputs.mT @ rows, rtol=1e-11, atol=1e-11)
    if energies:
        torch.testing.assert_close(energy, outputs.square().sum(dim=0), rtol=1e-11, atol=1e-11)
    else:
        assert energy is None


@pytest.mark.parametrize("columns", [1, 700_000])
def test_scaled_sums_of_mixed_dtypes_reach_every_entry(columns: int, generator: torch.Generator) -> None:
    total, part = random(generator, 3, columns), random(generator, 3, columns).float()
    want = total + 0.5 * part.double()
    add_scaled(total, part, 0.5)
    assert torch.equal(total, want)


def test_rows_of_another_width_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"want rows \[T, 3\], got \[2, 4\]"):
        GramSum(3, torch.float64, CPU).add_rows(torch.zeros(2, 4))
    with pytest.raises(ShapeError, match=r"want rows and targets \[T, 3\]"):
        OutputCross(torch.zeros(2, 3), 1, torch.float64, energies=False).add(
            torch.zeros(2, 3), torch.zeros(1, 3)
        )
