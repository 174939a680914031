"""Score drift against loops over samples; bounds in order; certificates never violated; ties and single classes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from driftlens.diagnostics.drift_columns import output_drift_columns, score_gains
from driftlens.models.heads import Head, LinearHead
from tests.diagnostics.heads import head


def features(seed: int, drift: float, n: int = 12, width: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    expert = 10 * torch.randn(n, width, generator=generator, dtype=torch.float64)
    return expert, expert + drift * torch.randn(n, width, generator=generator, dtype=torch.float64)


def test_columns_agree_with_a_loop_over_samples() -> None:
    score_map, (expert, variant) = head(), features(1, 3.0)
    labels = torch.arange(12) % 5
    found = output_drift_columns(score_map, expert, variant, labels)
    for i in range(12):
        z_exp, z_var = ([100 * float(f @ e / f.norm()) for e in score_map.embeddings] for f in (expert[i], variant[i]))
        p_exp, p_var = ([math.exp(z - max(zs)) for z in zs] for zs in (z_exp, z_var))
        p_exp, p_var = ([x / sum(p) for x in p] for p in (p_exp, p_var))
        change = [b - a for a, b in zip(z_exp, z_var, strict=True)]
        ordered = sorted(z_exp)
        wanted = {
            "expert_pred": z_exp.index(max(z_exp)),
            "pred": z_var.index(max(z_var)),
            "flipped": float(z_exp.index(max(z_exp)) != z_var.index(max(z_var))),
            "score_drift_l2": math.hypot(*change),
            "score_drift_inf": max(map(abs, change)),
            "margin": ordered[-1] - ordered[-2],
            "kl": sum(
                a * (math.log(a) - math.log(b)) for a, b in zip(p_exp, p_var, strict=True) if a > 1e-300 and b > 1e-300
            ),
            "ce": -math.log(max(p_var[labels[i]], 1e-300)),
            "ce_expert": -math.log(max(p_exp[labels[i]], 1e-300)),
        }
        for name, value in wanted.items():
            assert float(found[name][i]) == pytest.approx(value, rel=1e-6, abs=1e-9), name


@pytest.mark.slow
@given(seed=st.integers(0, 500), drift=st.floats(0.0, 20.0), scale=st.sampled_from([1.0, 100.0]))
def test_a_certified_decision_never_flips_and_no_bound_is_exceeded(seed: int, drift: float, scale: float) -> None:
    found = output_drift_columns(head(scale=scale, seed=seed), *features(seed, drift), None)
    assert not (found["certified"] & found["flipped"]).any()
    # Scores reach `scale` and round at that size, however small the drift.
    within = found["score_drift_l2"] <= found["score_bound"] * (1 + 1e-9) + 1e-13 * scale
    assert (within | found["score_bound"].isnan()).all()


@pytest.mark.slow
@given(seed=st.integers(0, 500), drift=st.floats(0.0, 20.0))
def test_models_with_score_maps_of_their_own_keep_bound_and_certificate(seed: int, drift: float) -> None:
    mine, theirs = head(seed=seed, scale=10.0), head(seed=seed + 1, scale=10.0)
    expert, variant = features(seed, drift)
    found = output_drift_columns(mine, expert, variant, None, expert_head=theirs)
    mismatch = (mine.scores(expert) - theirs.scores(expert)).norm(dim=1)
    torch.testing.assert_close(found["score_map_mismatch"], mismatch)
    torch.testing.assert_close(found["score_drift_l2"], (mine.scores(variant) - theirs.scores(expert)).norm(dim=1))
    assert (found["expert_pred"] == theirs.scores(expert).argmax(dim=1)).all()
    assert not (found["certified"] & found["flipped"]).any()
    within = found["score_drift_l2"] <= found["score_bound"] * (1 + 1e-9) + 1e-12
    assert (within | found["score_bound"].isnan()).all()


@pytest.mark.slow
@given(seed=st.integers(0, 500), drift=st.floats(0.01, 30.0))
def test_gains_stand_in_order(seed: int, drift: float) -> None:
    gains = score_gains(head(seed=seed), *features(seed, drift))
    for lower, upper in (
        (gains.secant, gains.directional),
        (gains.directional, gains.spectral),
        (gains.spectral, gains.certified),
    ):
        assert (lower <= upper * (1 + 1e-9)).all()


@pytest.mark.parametrize("normalize", [True, False])
def test_a_maps_own_derivative_is_that_of_its_scores(normalize: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    point, v = torch.randn(2, 6, 7, generator=generator, dtype=torch.float64)
    w, rows = (torch.randn(n, k, generator=generator, dtype=torch.float64) for n, k in ((6, 5), (5, 7)))
    for score_map in (head(), LinearHead(tuple("abcde"), rows, normalize=normalize)):
        own = score_map.derivative(point)
        dense = torch.stack([torch.autograd.functional.jacobian(score_map.scores, x) for x in point])
        torch.testing.assert_close(own.push(v), torch.einsum("ncd,nd->nc", dense, v))
        torch.testing.assert_close(own.pull(w), torch.einsum("ncd,nc->nd", dense, w))


def test_spectral_gain_is_the_largest_singular_value_of_the_jacobian() -> None:
    """At vanishing drift all sampled points coincide, and the Jacobian can be formed."""
    score_map, (expert, _) = head(), features(3, 0.0, n=4)
    direction = torch.ones_like(expert)
    gains = score_gains(score_map, expert, expert + 1e-7 * direction)
    for i in range(4):
        jacobian = torch.autograd.functional.jacobian(lambda f: score_map.scores(f[None])[0], expert[i])
        assert gains.spectral[i] == pytest.approx(float(torch.linalg.matrix_norm(jacobian, ord=2)), rel=1e-3)


def test_integral_self_checks_hold_at_logit_scale_100() -> None:
    found = output_drift_columns(head(), *features(4, 8.0), torch.zeros(12, dtype=torch.long))
    assert found["softmax_integral_error"].max() < 1e-9
    assert found["ce_integral_error"].max() < 1e-7


@pytest.mark.parametrize("scale", [1.0, 10.0], ids=["scores as cosines", "scores ten times as sharp"])
def test_confidence_is_the_share_of_the_best_class_among_all(scale: float) -> None:
    """One over the sum of exp(score - best score): at another temperature, or of another model, it differs."""
    score_map, (expert, variant) = head(scale=scale), features(8, 4.0)
    found = output_drift_columns(score_map, expert, variant, None)
    for name, feature in (("confidence", variant), ("confidence_expert", expert)):
        for i, row in enumerate(feature):
            scores = [scale * float(row @ e) / math.hypot(*row.tolist()) for e in score_map.embeddings]
            share = 1 / sum(math.exp(score - max(scores)) for score in scores)
            assert float(found[name][i]) == pytest.approx(share, rel=1e-12), name


def test_no_drift_gives_no_gain_and_no_flip() -> None:
    expert, _ = features(5, 0.0)
    found = output_drift_columns(head(), expert, expert, None)
    assert found["score_drift_l2"].abs().max() == 0
    assert found["score_gain"].isnan().all() and found["score_bound"].isnan().all()
    assert not found["flipped"].any() and found["certified"].all()


def test_ties_have_no_certificate() -> None:
    tied = Head(("a", "b"), torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=torch.float64), 1.0)
    expert = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    assert not output_drift_columns(tied, expert, expert, None)["certified"].any()


def test_a_single_class_has_no_margin() -> None:
    found = output_drift_columns(head(classes=1), *features(6, 1.0), None)
    assert found["margin"].isnan().all() and not found["certified"].any() and not found["flipped"].any()
    assert (found["confidence"] == 1).all()


def test_a_segment_through_the_origin_has_no_finite_bound() -> None:
    expert = torch.tensor([[1.0, 0.0, 0, 0, 0, 0, 0]], dtype=torch.float64)
    assert score_gains(head(), expert, -expert).certified.isinf().all()
