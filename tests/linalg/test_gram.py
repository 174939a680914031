"""Half products, moments and the two ways to those of wanted outputs, against the plain product."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from driftlens.linalg.gram import CrossMomentSum, GramSum, ResidualSums, add_scaled
from driftlens.linalg.ridge import NormMoments
from tests.linalg.rows import moments_of

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
    quadratic_forms = ((vectors @ want) * vectors).sum(dim=1)
    torch.testing.assert_close(found.quadratic_forms(vectors), quadratic_forms, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.full_matrix(), want, rtol=1e-12, atol=1e-12)


def test_sums_of_tasks_are_scaled_and_memory_is_used_again(generator: torch.Generator) -> None:
    first, second = random(generator, 4, 300), random(generator, 6, 300)
    task, total = GramSum(300, torch.float64, CPU), GramSum(300, torch.float64, CPU)
    for rows, scale in ((first, 0.5), (second, 3.0)):
        task.clear()
        task.add_rows(rows)
        total.add(task, scale)
    want = 0.5 * first.mT @ first + 3 * second.mT @ second
    torch.testing.assert_close(total.full_matrix(), want, rtol=1e-12, atol=1e-12)


def test_the_norm_of_a_wide_float32_sum_is_not_too_small(generator: torch.Generator) -> None:
    rows = random(generator, 40, 3000).float()
    found = GramSum(3000, torch.float32, CPU)
    found.add_rows(rows)
    want = torch.linalg.matrix_norm(rows.double().mT @ rows.double())
    assert float(found.norm()) == pytest.approx(float(want), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_narrow_features_are_summed_up_in_float32(dtype: torch.dtype, generator: torch.Generator) -> None:
    """Against float64 sums of the same numbers: nothing on the way is rounded to the features' own dtype."""
    gram, joint = GramSum(20, torch.float32, CPU), ResidualSums(GramSum(20, torch.float32, CPU), 15)
    weight, bias = random(generator, 30, 20).to(dtype), random(generator, 30).to(dtype)
    options = {"alpha": 0.3, "dtype": torch.float32, "energies": True}
    ways = [CrossMomentSum(weight, bias, num_rows=num, **options) for num in (1, 1 << 20)]
    inputs, targets = (random(generator, 400, width).to(dtype) for width in (20, 30))
    for x, y in zip(inputs.split(100), targets.split(100), strict=True):
        gram.add_rows(x)
        joint.add(x, y)
        for way in ways:
            way.add(x, x, [y], None)
    x, y, w, b = (part.double() for part in (inputs, targets, weight, bias))
    # The expert reads the same inputs: through these its outputs are W u + b, row by row what was told of them.
    by_way = {True: 0.3 * (y - b) + 0.7 * x @ w.mT, False: x @ w.mT}
    expected = {"gram": (gram.full_matrix(), x.mT @ x), "joint": (joint._cross, y.mT @ x)}
    assert [way.row_by_row for way in ways] == [True, False]
    for way in ways:
        cross, target, energy = way.sums(gram)
        assert energy is not None
        wanted = by_way[way.row_by_row]
        expected[f"cross {way.row_by_row}"] = cross, wanted.mT @ x
        expected[f"target {way.row_by_row}"] = target, wanted.sum(dim=0)
    for name, (found, exact) in expected.items():
        assert found.dtype == torch.float32 and (found - exact).norm() <= 1e-6 * exact.norm(), name


def test_float32_products_are_summed_in_float64() -> None:
    """A thousand small products beside a large one would be lost in a float32 sum."""
    found = GramSum(1, torch.float64, CPU)
    found.add_rows(torch.tensor([[1e4]]))
    for _ in range(1000):
        found.add_rows(torch.tensor([[1.0]]))
    assert float(found.full_matrix()) == 1e8 + 1000


def sums_of(weight: Tensor, bias: Tensor, row_by_row: bool, *, alpha: float, energies: bool) -> CrossMomentSum:
    """Sums in the way asked for, whatever would be cheaper."""
    found = CrossMomentSum(
        weight, bias, alpha=alpha, num_rows=1 if row_by_row else 1000, dtype=torch.float64, energies=energies
    )
    assert found.row_by_row == row_by_row
    return found


@pytest.mark.parametrize("row_by_row", [True, False])
@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "uniform"])
@pytest.mark.parametrize("energies", [True, False], ids=["energies", "none"])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_both_ways_give_the_plain_sums_of_wanted_outputs(
    row_by_row: bool,
    weighted: bool,
    energies: bool,
    alpha: float,
    generator: torch.Generator,
) -> None:
    weight, bias = random(generator, 9, 6), random(generator, 9)
    rows, expert_rows = random(generator, 40, 6), random(generator, 40, 6)
    outputs = expert_rows @ weight.mT + bias
    weights = random(generator, 40).square() if weighted else None
    found = sums_of(weight, bias, row_by_row, alpha=alpha, energies=energies)
    gram = GramSum(6, torch.float64, CPU)
    for part in (slice(0, 7), slice(7, 30), slice(30, 40)):
        mine = None if weights is None else weights[part]
        found.add(rows[part], expert_rows[part], [outputs[part, :5], outputs[part, 5:]], mine)
        gram.add_rows(rows[part] if mine is None else rows[part] * mine.sqrt()[:, None])
    sums = found.sums(gram)
    wanted = (alpha * expert_rows + (1 - alpha) * rows) @ weight.mT
    counts = torch.ones(40, dtype=torch.float64) if weights is None else weights
    torch.testing.assert_close(sums.cross, (counts[:, None] * wanted).mT @ rows, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(sums.target, counts @ wanted, rtol=1e-11, atol=1e-11)
    if energies:
        torch.testing.assert_close(sums.energy, counts @ wanted.square(), rtol=1e-11, atol=1e-11)
    else:
        assert sums.energy is None


@pytest.mark.parametrize(("num_rows", "row_by_row"), [(4, True), (400, False)])
def test_few_rows_go_one_by_one_and_many_through_their_inputs(num_rows: int, row_by_row: bool) -> None:
    found = CrossMomentSum(
        torch.ones(90, 20), torch.zeros(90), alpha=0.3, num_rows=num_rows, dtype=torch.float64, energies=True
    )
    assert found.row_by_row == row_by_row


@pytest.mark.parametrize("columns", [1, 700_000])
def test_scaled_sums_of_mixed_dtypes_reach_every_entry(columns: int, generator: torch.Generator) -> None:
    total, part = random(generator, 3, columns), random(generator, 3, columns).float()
    want = total + 0.5 * part.double()
    add_scaled(total, part, 0.5)
    assert torch.equal(total, want)


NORM_FIELDS = ("mean", "second", "scale_target", "shift_target", "target_energy", "weight_sum")


@st.composite
def rows_and_targets(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, outputs and weights of a few rows: sizes from 1, repeated and zero rows, scales from 1e-6 to 1e6."""
    count, k, o = draw(st.integers(2, 12)), draw(st.integers(1, 5)), draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scale = 10.0 ** draw(st.integers(-6, 6))
    rows = scale * torch.randn(count, k, generator=generator, dtype=torch.float64)
    targets = torch.randn(count, o, generator=generator, dtype=torch.float64)
    if draw(st.booleans()):
        rows[1:] = rows[:1]
    if draw(st.booleans()):
        rows[:, 0] = 0
    weights = 0.01 + torch.rand(count, generator=generator, dtype=torch.float64)
    return rows, targets, weights


def assert_equal_moments(left: object, right: object) -> None:
    for name in NORM_FIELDS:
        found, want = getattr(left, name), getattr(right, name)
        torch.testing.assert_close(found, want, rtol=1e-10, atol=1e-12 * float(want.abs().max()), msg=name)


@given(rows_and_targets())
def test_the_misfit_of_a_weight_follows_from_the_moments(rows: tuple[Tensor, Tensor, Tensor]) -> None:
    x, y, w = rows
    weight = torch.ones(y.shape[1], x.shape[1], dtype=torch.float64) / (1 + x.abs().max())
    direct = (w[:, None] * (x @ weight.mT - y).square()).sum(dim=0)
    found = moments_of(x, y, w).misfit(weight)
    torch.testing.assert_close(found, direct, rtol=1e-9, atol=1e-9)


@given(rows_and_targets(), st.data())
def test_moments_of_norms_add_up_and_give_the_misfit(rows: tuple[Tensor, Tensor, Tensor], data: st.DataObject) -> None:
    z, _, w = rows
    scale, shift = torch.linspace(0.5, 2, z.shape[1]).double(), torch.linspace(-1, 1, z.shape[1]).double()

    def of(start: int, stop: int) -> NormMoments:
        part, share = z[start:stop], (w[start:stop] / w[start:stop].sum())[:, None]
        mean, second = (share * part).sum(0), (share * part.square()).sum(0)
        return NormMoments.from_affine(mean, second, scale, shift, w[start:stop].sum())

    at = data.draw(st.integers(1, len(z) - 1))
    whole = of(0, len(z))
    assert_equal_moments(of(0, at) + of(at, len(z)), whole)
    wanted = scale * z + shift
    new_scale, new_shift = scale + 1, shift - 0.5
    direct = (w[:, None] * (new_scale * z + new_shift - wanted).square()).sum()
    torch.testing.assert_close(whole.misfit(new_scale, new_shift), direct, rtol=1e-9, atol=1e-9)
    unshifted = (w[:, None] * (new_scale * z - wanted).square()).sum()
    torch.testing.assert_close(whole.misfit(new_scale, None), unshifted, rtol=1e-9, atol=1e-9)
