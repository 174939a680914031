"""The integral identities against their closed forms, at CLIP's logit scale and beyond."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from driftlens.linalg.state import cross_entropy_change, softmax_change

ranges = st.sampled_from([0.0, 1.0, 30.0, 131.0])


def scores(seed: int, spread: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    z, change = spread * (torch.rand(2, 6, 9, generator=generator, dtype=torch.float64) - 0.5)
    return z, change, torch.randint(9, (6,), generator=generator)


@given(seed=st.integers(0, 99), spread=ranges)
def test_softmax_change_is_the_integral_of_its_jacobian(seed: int, spread: float) -> None:
    z, change, _ = scores(seed, spread)
    exact = (z + change).softmax(dim=1) - z.softmax(dim=1)
    torch.testing.assert_close(softmax_change(z, change), exact, rtol=0, atol=1e-9)


@given(seed=st.integers(0, 99), spread=ranges)
def test_loss_change_is_the_integral_of_its_gradient(seed: int, spread: float) -> None:
    z, change, labels = scores(seed, spread)
    exact = F.cross_entropy(z + change, labels, reduction="none") - F.cross_entropy(
        z, labels, reduction="none"
    )
    torch.testing.assert_close(
        cross_entropy_change(z, change, labels), exact, rtol=0, atol=1e-9 * max(1, spread)
    )


def test_adding_a_constant_to_all_scores_changes_nothing() -> None:
    z, change, labels = scores(0, 10.0)
    torch.testing.assert_close(softmax_change(z, change + 5), softmax_change(z, change), rtol=0, atol=1e-12)
    torch.testing.assert_close(
        cross_entropy_change(z, change + 5, labels),
        cross_entropy_change(z, change, labels),
        rtol=0,
        atol=1e-11,
    )


def test_a_single_panel_would_not_do() -> None:
    """What the composite rule is for: at a range of 131 one eight-node panel is off by percents."""
    from driftlens.linalg import state

    z, change, _ = scores(1, 131.0)
    exact = (z + change).softmax(dim=1) - z.softmax(dim=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "PANEL", 1e9)
        assert (softmax_change(z, change) - exact).abs().max() > 1e-2
