"""Contributions sum to the drift, prefix swaps telescope, Jacobians reproduce propagation, on every kind of model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from driftlens.diagnostics.attribution import JacobianSettings
from driftlens.engine.walk import FeatureStore, LayerView, decompose, walk
from driftlens.linalg.state import PathJacobian, inner_products, relative_error, state_norms, subtract_states
from tests.identities.carried import carried_forward, remainder, shares_carried, swapped, way_back
from tests.quick import few
from tests.zoo.cases import CASES, Family, family

EXACT = JacobianSettings(nodes=4, max_nodes=32, tolerance=1e-7)
# transformers computes nothing here: every case runs the adapter's own chain, in float64.
TOLERANCE = 1e-6
NODES = 16


@pytest.fixture(params=few(CASES, ["hf_clip_vit", "masked_decoder", "encoder_decoder"]))
def models(request: pytest.FixtureRequest, device: torch.device) -> Family:
    return family(CASES[request.param], n=3, batch_size=3, device=device)


def views(models: Family, variant: str = "merged") -> list[LayerView]:
    with torch.no_grad():
        return list(walk(models.pool, "a", [variant], models.batches))


def test_shares_of_one_way_back_are_those_carried_forward(models: Family) -> None:
    seen = views(models)
    found = way_back(models, seen, JacobianSettings(nodes=NODES, max_nodes=NODES))
    with torch.no_grad():
        wanted = shares_carried(seen, NODES)
    # Relative to the final drift: the same sums in another order, in float64.
    torch.testing.assert_close(found.shares / found.energy, wanted / found.energy, rtol=1e-9, atol=1e-11)
    assert len(found.shares) == len(models.chain.layers)


def test_contributions_sum_to_the_final_drift_within_the_remainder(models: Family) -> None:
    seen = views(models)
    found = way_back(models, seen, EXACT)
    torch.testing.assert_close(found.shares.sum(dim=0), found.energy, rtol=TOLERANCE, atol=0)
    drift = decompose(seen[-1]).drift
    with torch.no_grad():
        assert state_norms(remainder(seen, NODES)).sum() <= TOLERANCE * state_norms(drift).sum()


def test_the_last_contribution_is_the_heads_own_mismatch_and_not_carried(models: Family) -> None:
    seen = views(models)
    with torch.no_grad():
        last = carried_forward(seen, NODES)[-1]
    split = decompose(seen[-1])
    for name, leaf in split.local_mismatch.items():
        assert torch.equal(last[name], leaf)
    found = way_back(models, seen, EXACT).shares[-1]
    torch.testing.assert_close(found, inner_products(split.local_mismatch, split.drift), rtol=1e-12, atol=1e-20)


def test_prefix_swaps_telescope_exactly(models: Family) -> None:
    seen = views(models)
    shares, drift = swapped(seen).shares(), decompose(seen[-1]).drift
    torch.testing.assert_close(shares.sum(dim=0), inner_products(drift, drift), rtol=1e-12, atol=1e-20)
    assert len(shares) == len(models.chain.layers)


def test_each_prefix_is_what_a_model_of_two_halves_gives(models: Family) -> None:
    """Independent of the bookkeeping: the expert's first l layers, then the merged ones, run one by one."""
    state, side = models.chain.start(models.batches[0].inputs)
    for prefix, found in enumerate(swapped(views(models)).swapped_features()):
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
        seen = views(models)
        found = way_back(models, seen, EXACT)
        gap = (found.shares - swapped(seen).shares()).sum(dim=1).abs().max()
        gaps.append(float(gap / found.energy.sum()))
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
    assert state_norms(subtract_states(parts, split.drift)).sum() <= 1e-12 * state_norms(split.drift).sum()
    operator = PathJacobian(wrong.crossed_layer, wrong.expert_in, wrong.merged_in, 16)
    with torch.no_grad():
        along = operator.jvp(subtract_states(wrong.merged_in, wrong.expert_in))
    assert relative_error(along, split.propagation) > 1e-2


def test_sensitivities_are_recorded_per_layer(models: Family) -> None:
    seen = views(models)
    found = way_back(models, seen, EXACT)
    sensitivities = found.pull_back.sensitivities
    assert sorted(layer for _, layer in sensitivities) == list(range(2, len(models.chain.layers) + 1))
    for view in seen[1:]:
        of_layer = sensitivities["merged", view.layer.index]
        torch.testing.assert_close(of_layer.size, state_norms(decompose(view).propagation))
        assert found.error(view.layer.index) <= EXACT.tolerance or of_layer.nodes == EXACT.max_nodes


def test_nodes_rise_until_the_tolerance_is_met_or_the_limit_reached() -> None:
    models = family(CASES["open_clip_vit"], n=3, batch_size=3)

    def nodes(settings: JacobianSettings) -> list[int]:
        found = way_back(models, views(models), settings).pull_back.sensitivities
        return [found["merged", layer].nodes for layer in (2, 3, 4)]

    loose = nodes(JacobianSettings(nodes=1, max_nodes=32, tolerance=0.5))
    strict = nodes(JacobianSettings(nodes=1, max_nodes=32, tolerance=1e-10))
    assert all(few <= many for few, many in zip(loose, strict, strict=True)) and max(strict) > 2
    assert nodes(JacobianSettings(nodes=1, max_nodes=2, tolerance=1e-30)) == [2, 2, 2]


@pytest.mark.slow
def test_spectral_norm_bounds_every_gain() -> None:
    models = family(CASES["open_clip_vit"], n=3, batch_size=3)
    seen = views(models)
    sensitivities = way_back(models, seen, JacobianSettings(spectral=True)).pull_back.sensitivities
    for view in seen[1:]:
        found = sensitivities["merged", view.layer.index]
        along = state_norms(decompose(view).propagation) / state_norms(subtract_states(view.merged_in, view.expert_in))
        assert (found.spectral_norm >= along * (1 - 1e-3)).all()
        assert (found.spectral_norm >= found.random_gain * (1 - 1e-6)).all()
        assert (found.spectral_residual < 0.3).all()


def test_without_drift_every_share_is_zero(models: Family) -> None:
    seen = views(models, variant="expert:a")
    found = way_back(models, seen, EXACT)
    assert found.energy.sum() == 0
    assert found.shares.abs().sum() == 0
    assert swapped(seen).shares().abs().sum() == 0


def test_what_goes_to_disk_gives_the_same_shares(tmp_path: Path) -> None:
    models = family(CASES["encoder_decoder"], n=3, batch_size=3)
    seen = views(models)
    kept = way_back(models, seen, EXACT)
    with FeatureStore(0, tmp_path / "spilled") as store:
        stored = way_back(models, seen, EXACT, store=store)
        assert len(list((tmp_path / "spilled").iterdir())) > len(models.chain.layers)
        assert torch.equal(stored.parts, kept.parts)
    assert not (tmp_path / "spilled").exists()
