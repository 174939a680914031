"""Contributions sum to the drift, prefix swaps telescope, Jacobians reproduce propagation, on every kind of model."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from driftlens.diagnostics.attribution import Contributions, JacobianSettings, PrefixSwaps
from driftlens.engine.walk import LayerView, decompose, walk
from driftlens.linalg.state import PathJacobian, inner, norm, relative_error, subtract
from driftlens.utils.errors import ShapeError
from tests.quick import few
from tests.zoo.cases import CASES, Family, family

EXACT = JacobianSettings(nodes=4, max_nodes=32, tolerance=1e-7)
# transformers computes nothing here: every case runs the adapter's own chain, in float64.
TOLERANCE = 1e-6


@pytest.fixture(params=few(CASES, ["hf_clip_vit", "masked_decoder", "encoder_decoder"]))
def models(request: pytest.FixtureRequest, device: torch.device) -> Family:
    return family(CASES[request.param], n=3, batch_size=3, device=device)


def views(models: Family, variant: str = "merged") -> list[LayerView]:
    with torch.no_grad():
        return list(walk(models.pool, "a", [variant], models.batches))


def followed(
    models: Family, settings: JacobianSettings = EXACT
) -> tuple[Contributions, PrefixSwaps, list[LayerView]]:
    contributions, swaps = Contributions(settings), PrefixSwaps()
    seen = views(models)
    with torch.no_grad():
        for view in seen:
            contributions.add(view)
            swaps.add(view)
    return contributions, swaps, seen


def test_contributions_sum_to_the_final_drift_within_the_remainder(models: Family) -> None:
    contributions, _, seen = followed(models)
    drift = decompose(seen[-1]).drift
    assert relative_error(subtract(drift, contributions.remainder()), drift) <= TOLERANCE
    shares = contributions.shares().sum(dim=0) + inner(contributions.remainder(), drift)
    torch.testing.assert_close(shares, contributions.energy(), rtol=1e-10, atol=0)
    assert len(contributions.shares()) == len(models.chain.layers)


def test_the_last_contribution_is_the_heads_own_mismatch_and_not_carried(models: Family) -> None:
    contributions, _, seen = followed(models)
    mismatch = decompose(seen[-1]).local_mismatch
    for name, leaf in mismatch.items():
        assert torch.equal(contributions.vectors[name][-1], leaf)


def test_prefix_swaps_telescope_exactly(models: Family) -> None:
    contributions, swaps, _ = followed(models)
    total = swaps.shares().sum(dim=0)
    torch.testing.assert_close(total, contributions.energy(), rtol=1e-12, atol=1e-20)
    assert len(swaps.shares()) == len(models.chain.layers)


def test_each_prefix_is_what_a_model_of_two_halves_gives(models: Family) -> None:
    """Independent of the bookkeeping: the expert's first l layers, then the merged ones, run one by one."""
    _, swaps, _ = followed(models)
    state, side = models.chain.start(models.batches[0].inputs)
    for prefix, found in enumerate(swaps.finals):
        hidden = state
        for layer in models.chain.layers:
            model = "expert:a" if layer.index <= prefix else "merged"
            hidden = layer.call(models.pool.parameters(model, layer), hidden, side)
        for name, leaf in hidden.items():
            torch.testing.assert_close(found[name], leaf, rtol=1e-10, atol=1e-12)


def test_small_drift_makes_both_splits_agree() -> None:
    """To first order the merged suffix is linear: the two attributions differ by O(drift)."""
    gaps = []
    for shrink in (1.0, 0.1):
        models = shrunken(shrink)
        contributions, swaps, _ = followed(models)
        energy = contributions.energy().sum()
        gaps.append(float((contributions.shares() - swaps.shares()).sum(dim=1).abs().max() / energy))
    assert gaps[1] < 0.2 * gaps[0]


def shrunken(shrink: float) -> Family:
    """The expert moved towards the merged model."""
    models = family(CASES["open_clip_vit"], n=3, batch_size=3)
    merged, expert = models.modules["merged"], models.modules["expert:a"]
    with torch.no_grad():
        for target, source in zip(expert.parameters(), merged.parameters(), strict=True):
            target.copy_(source + shrink * (target - source))
    return models


def test_jacobian_error_catches_a_wrong_crossed_output(models: Family) -> None:
    """e = m + p holds whatever the crossed output is; A e = p does not."""
    wrong = dataclasses.replace(views(models)[2], crossed_out=views(models)[2].expert_out)
    split = decompose(wrong)
    parts = {name: split.local_mismatch[name] + split.propagation[name] for name in split.drift}
    assert norm(subtract(parts, split.drift)).sum() <= 1e-12 * norm(split.drift).sum()
    operator = PathJacobian(wrong.crossed_layer, wrong.expert_in, wrong.merged_in, 16)
    with torch.no_grad():
        along = operator.jvp(subtract(wrong.merged_in, wrong.expert_in))
    assert relative_error(along, split.propagation) > 1e-2


def test_sensitivities_are_recorded_per_layer(models: Family) -> None:
    contributions, _, seen = followed(models)
    assert sorted(contributions.sensitivities) == list(range(2, len(models.chain.layers) + 1))
    for view in seen[1:]:
        found = contributions.sensitivities[view.layer.index]
        torch.testing.assert_close(found.size, norm(decompose(view).propagation))
        assert (
            float(found.error.sum() / found.size.sum()) <= EXACT.tolerance or found.nodes == EXACT.max_nodes
        )


def test_nodes_rise_until_the_tolerance_is_met_or_the_limit_reached() -> None:
    models = family(CASES["open_clip_vit"], n=3, batch_size=3)
    loose, _, _ = followed(models, JacobianSettings(nodes=1, max_nodes=32, tolerance=0.5))
    strict, _, _ = followed(models, JacobianSettings(nodes=1, max_nodes=32, tolerance=1e-10))
    capped, _, _ = followed(models, JacobianSettings(nodes=1, max_nodes=2, tolerance=1e-30))
    for layer in (2, 3, 4):
        assert loose.sensitivities[layer].nodes <= strict.sensitivities[layer].nodes
    assert {found.nodes for found in capped.sensitivities.values()} == {2}
    assert max(found.nodes for found in strict.sensitivities.values()) > 2


@pytest.mark.slow
def test_spectral_norm_bounds_every_gain() -> None:
    models = family(CASES["open_clip_vit"], n=3, batch_size=3)
    contributions, _, seen = followed(models, JacobianSettings(spectral=True))
    for view in seen[1:]:
        found = contributions.sensitivities[view.layer.index]
        along = norm(decompose(view).propagation) / norm(subtract(view.merged_in, view.expert_in))
        assert (found.spectral_norm >= along * (1 - 1e-3)).all()
        assert (found.spectral_norm >= found.random_gain * (1 - 1e-6)).all()
        assert (found.spectral_residual < 0.3).all()


def test_without_drift_every_share_is_zero(models: Family) -> None:
    contributions, swaps = Contributions(EXACT), PrefixSwaps()
    with torch.no_grad():
        for view in views(models, variant="expert:a"):
            contributions.add(view)
            swaps.add(view)
    assert contributions.energy().sum() == 0
    assert contributions.shares().abs().sum() == 0
    assert swaps.shares().abs().sum() == 0


def test_views_out_of_order_are_refused() -> None:
    seen = views(family(CASES["open_clip_vit"], n=3, batch_size=3))
    with pytest.raises(ShapeError, match="want layer 1"):
        Contributions().add(seen[1])
    with pytest.raises(ShapeError, match="'merged'"):
        PrefixSwaps().add(dataclasses.replace(seen[0], reference="merged"))
