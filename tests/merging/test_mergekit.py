"""mergekit's methods against their formulas in float64; against mergekit itself, bit for bit, in tests/cli."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from driftlens.base.errors import NumericsError
from driftlens.merging.mergekit import KERNELS, Group, _order, by_entry
from driftlens.spec.mergekit import METHODS, REQUIRED

SHAPE = (12, 10)
WEIGHTS = [0.7, 0.4, 0.9]


def tensors(count: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, list[Tensor]]:
    """A base, and experts close to it."""
    drawn = torch.Generator().manual_seed(0)
    base = torch.randn(SHAPE, generator=drawn, dtype=torch.float64)
    experts = [base + 0.1 * torch.randn(SHAPE, generator=drawn, dtype=torch.float64) for _ in range(count)]
    return base.to(dtype), [expert.to(dtype) for expert in experts]


def settings(method: str, count: int, **given: Any) -> dict[str, Any]:
    """All parameters of a method: those given, weights of one's own, and defaults."""
    values = {"weight": WEIGHTS[:count], "t": 0.3} | given
    known = METHODS[method].parameters
    for name, parameter in known.items():
        value = values.setdefault(name, parameter.default)
        assert value is not REQUIRED
        if parameter.scope != "recipe" and not isinstance(value, list):
            values[name] = [value] * count
    return {name: values[name] for name in known}


def slerped(a: Tensor, b: Tensor, t: float) -> Tensor:
    """Rows on the great circle between two stacks of rows."""
    angle = torch.acos((a * b).sum(dim=-1, keepdim=True) / (a.norm(dim=-1) * b.norm(dim=-1))[..., None])
    return (torch.sin((1 - t) * angle) * a + torch.sin(t * angle) * b) / torch.sin(angle)


def on_a_sphere(base: Tensor, experts: list[Tensor]) -> Tensor:
    rows = torch.stack([(expert - base).flatten() for expert in experts])
    share = torch.tensor(WEIGHTS, dtype=rows.dtype) / sum(WEIGHTS)
    units = rows / rows.norm(dim=1, keepdim=True)
    mean = share @ units
    mean = mean / mean.norm()
    tangent = share @ (units - (units @ mean)[:, None] * mean)
    angle = tangent.norm()
    point = angle.cos() * mean + angle.sin() * tangent / angle
    return base + (share @ rows.norm(dim=1) * point).view(SHAPE)


def fused(base: Tensor, experts: list[Tensor]) -> Tensor:
    p, q = experts[0].softmax(-1), base.softmax(-1)
    importance = (experts[0] - base).abs() * (p * (p / q).log()).sum(-1, keepdim=True)
    low, median, high = (
        importance.flatten()
        .sort()
        .values[[int(share * (importance.numel() - 1)) for share in (0.25, 0.5, 0.75)]]
    )
    return torch.where(importance >= median + 1.5 * (high - low), experts[0], base)


def selected(base: Tensor, experts: list[Tensor]) -> Tensor:
    steps = torch.stack([expert - base for expert in experts])
    variance = steps.var(dim=0, unbiased=False)
    steps = steps * (variance >= variance.flatten().sort().values[-int(0.4 * variance.numel())])
    same = steps.sign() == torch.where(steps.sum(dim=0) >= 0, 1.0, -1.0)
    shares = (steps.square().mean(dim=(1, 2)) / steps.square().mean(dim=(1, 2)).sum())[:, None, None] * same
    return base + (steps * shares).sum(dim=0) / shares.sum(dim=0).clamp(min=1e-6)


def reinforced(base: Tensor, experts: list[Tensor]) -> Tensor:
    steps = torch.stack([expert - base for expert in experts])
    moved = steps.abs() > 0.1
    alone, together = moved.sum(dim=0) == 1, moved.sum(dim=0) > 1
    longer = [1 + 0.1 * min(0.2, (at & together).sum() / max(float((at & alone).sum()), 0.1)) for at in moved]
    single = sum(factor * step * at * alone for factor, step, at in zip(longer, steps, moved, strict=True))
    return base + single + (steps * moved * together).sum(dim=0) / moved.sum(dim=0).clamp(min=1)


Formula = Callable[[Tensor, list[Tensor]], Tensor]
FORMULAS: dict[str, tuple[str, int, dict[str, Any], Formula]] = {
    "nuslerp as a whole": (
        "nuslerp",
        2,
        {},
        lambda b, e: b + slerped((e[0] - b).flatten(), (e[1] - b).flatten(), 4 / 11).view(SHAPE),
    ),
    "nuslerp by rows": (
        "nuslerp",
        2,
        {"nuslerp_flatten": False},
        lambda b, e: b + slerped(e[0] - b, e[1] - b, 4 / 11),
    ),
    "nuslerp by columns": (
        "nuslerp",
        2,
        {"nuslerp_flatten": False, "nuslerp_row_wise": True},
        lambda b, e: b + slerped((e[0] - b).T, (e[1] - b).T, 4 / 11).T,
    ),
    "multislerp": ("multislerp", 3, {}, on_a_sphere),
    "nearswap": (
        "nearswap",
        1,
        {"t": 0.05},
        lambda b, e: b + (0.05 / (b - e[0]).abs()).clamp(max=1) * (e[0] - b),
    ),
    "arcee_fusion": ("arcee_fusion", 1, {}, fused),
    "sce": ("sce", 3, {"select_topk": 0.4}, selected),
    "ramplus_tl": ("ramplus_tl", 3, {"epsilon": 0.1}, reinforced),
    "ram": (
        "ram",
        3,
        {"epsilon": 0.0},
        lambda b, e: sum(e, torch.zeros_like(b)) / 3,
    ),
    "passthrough": ("passthrough", 0, {"scale": [0.5]}, lambda b, e: 0.5 * b),
}


@pytest.mark.parametrize("case", FORMULAS)
def test_a_method_is_its_formula(case: str) -> None:
    method, count, given, formula = FORMULAS[case]
    base, experts = tensors(count)
    wanted = formula(base.double(), [expert.double() for expert in experts])
    group = Group(base, experts, [base, *experts])
    merged = KERNELS[method](group, **settings(method, count, **given))
    torch.testing.assert_close(merged.double(), wanted, rtol=1e-4, atol=2e-5)
    assert method == "passthrough" or not torch.equal(merged, base)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_method_computes_in_the_dtype_of_its_tensors(method: str, dtype: torch.dtype) -> None:
    known = METHODS[method]
    count = min(3, known.models[1]) - (known.base == "required")
    base, experts = tensors(count, dtype)
    models = experts if known.base == "ignored" else [base, *experts]
    group = Group(None if known.base == "ignored" else base, experts, models, "key")
    given = settings(method, len(experts), density=0.5)
    merged, again = (KERNELS[method](group, **given) for _ in range(2))
    assert torch.equal(merged, again) and merged.isfinite().all()
    # Masks and factors of these two are in float32, and with them what comes out, as in mergekit.
    assert merged.dtype == (torch.float32 if method in ("arcee_fusion", "ramplus_tl") else dtype)
    assert all(torch.equal(a, b) for a, b in zip(tensors(count, dtype)[1], experts, strict=True))


def test_where_no_step_is_left_half_precision_divides_by_nothing() -> None:
    """Entries that no expert moves in the elected direction have weights of zero, which 1e-8 is in float16, too."""
    base, experts = tensors(2, torch.float16)
    given = settings("ties", 2, density=0.1)
    assert KERNELS["ties"](Group(base, experts, [base, *experts]), **given).isfinite().all()


def test_directions_that_cancel_are_refused() -> None:
    base, _ = tensors(0)
    around = [base + math.cos(angle) * base for angle in (0.0, math.pi)] + [base]
    opposed = Group(base, [around[0], around[1], 2 * base], around)
    with pytest.raises(NumericsError, match="cancel"):
        KERNELS["multislerp"](opposed, **settings("multislerp", 3, weight=[1.0, 2.0, 1.0]))


def test_rows_merged_apart_make_the_same_bits() -> None:
    apart = set()
    for method, density in itertools.product(METHODS, (1.0, 0.5)):
        count = 1 if METHODS[method].models in ((1, 1), (2, 2)) else 3
        values = settings(method, count, density=density)
        if not by_entry(method, values):
            continue
        apart.add((method, density))
        base, experts = tensors(count, torch.bfloat16)
        whole = KERNELS[method](Group(base, experts, experts), **values)
        for rows in (slice(0, 5), slice(5, 6), slice(6, None)):
            part = [expert[rows] for expert in experts]
            assert torch.equal(KERNELS[method](Group(base[rows], part, part), **values), whole[rows]), method
    assert apart >= {("linear", 0.5), ("task_arithmetic", 0.5), ("nearswap", 0.5), ("ties", 1.0)}
    assert ("ties", 0.5) not in apart


def test_magnitudes_are_ordered_as_argsort_orders_them() -> None:
    """Where many are equal, too: which of them stay is mergekit's choice, and its sort's."""
    step = torch.randint(-9, 9, (100, 70), generator=torch.Generator().manual_seed(0)).bfloat16()
    for descending in (True, False):
        wanted = step.float().abs().flatten().argsort(descending=descending)
        assert torch.equal(_order(step, descending=descending), wanted)
