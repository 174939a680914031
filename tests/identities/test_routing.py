"""Mixtures of experts: who goes where in both models, what going elsewhere changes, attribution beside the jumps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from driftlens.diagnostics.attribution import JacobianSettings
from driftlens.engine.walk import LayerView, decompose, differentiable_split, drift_columns, walk
from driftlens.linalg.state import inner_products, relative_error, state_norms, subtract_states
from driftlens.utils.errors import NotDifferentiableError
from tests.identities.carried import shares_carried, way_back
from tests.zoo.cases import Family, family
from tests.zoo.decoders import UNDIFFERENTIABLE
from tests.zoo.mixtures import case, mixtures

SETTINGS = JacobianSettings(nodes=4, max_nodes=128, tolerance=1e-7, prefix=False)


def of(name: str) -> Family:
    return family(case(name), n=3, batch_size=3)


@torch.no_grad()
def views(models: Family) -> list[LayerView]:
    return list(walk(models.pool, "a", ["merged"], models.batches))


def mixed(seen: list[LayerView]) -> list[LayerView]:
    found = [view for view in seen if view.layer.num_experts]
    assert found
    return found


@pytest.mark.shows("live", "drift", routes="drift by rerouting, separately")
@pytest.mark.parametrize("name", mixtures("Mixtral", "gpt-oss", "Llama 4"))
@torch.no_grad()
def test_drift_of_mixtures_is_what_the_library_gives_and_parts_sum_to_it(name: str) -> None:
    models = of(name)
    seen, batch = views(models), models.batches[0]
    expert, merged = (
        models.chain.library_states(models.modules[model], batch.inputs) for model in ("expert:a", "merged")
    )
    for view, e, m in zip(seen, expert, merged, strict=True):
        split, want = decompose(view), subtract_states(m, e)
        assert relative_error(split.drift, want) <= 1e-9
        for parts in (split, differentiable_split(view)):
            total = {key: parts.local_mismatch[key] + parts.propagation[key] for key in parts.drift}
            assert relative_error(total, split.drift) <= 1e-12


@pytest.mark.parametrize("name", mixtures("Mixtral", some=["gpt-oss", "DeepSeek-V3", "Qwen3.5-MoE"]))
def test_contributions_sum_to_the_drift_where_tokens_go_elsewhere(name: str) -> None:
    models = of(name)
    seen = views(models)
    if name in UNDIFFERENTIABLE:
        with pytest.raises(NotDifferentiableError, match="can't be differentiated"):
            way_back(models, seen, SETTINGS)
        return
    found = way_back(models, seen, SETTINGS)
    # Phi-3.5's gates jump where a score falls too far behind, which no path of Jacobians follows.
    left = 0.05 if name == "Phi-3.5-MoE" else 1e-5
    assert abs(found.shares.sum() - found.energy.sum()) <= left * found.energy.sum()
    nodes = max(at.nodes for at in found.pull_back.sensitivities.values())
    even = way_back(models, seen, JacobianSettings(nodes=nodes, max_nodes=nodes))
    with torch.no_grad():
        wanted = shares_carried(seen, nodes)
    # Routers compute gates in float32, whose rounding both ways meet in another order.
    torch.testing.assert_close(even.shares / found.energy, wanted / found.energy, rtol=0, atol=1e-7)
    # Without the jumps, Jacobians miss what routers do.
    assert any(float(state_norms(view.rerouting_change("crossed")).sum()) > 0 for view in mixed(seen))


@pytest.mark.parametrize("name", mixtures("Mixtral", "gpt-oss", "Llama 4"))
@torch.no_grad()
def test_the_part_of_rerouting_is_that_of_a_pass_with_the_others_routes(name: str) -> None:
    models = of(name)
    for view in mixed(views(models)):
        for role in ("expert", "crossed"):
            if role not in view.routes:
                continue
            assert view.variant_along is not None
            along = view.variant_along(view.merged_in, routes=view.routes[role].fixed_copy())
            assert relative_error(subtract_states(view.merged_out, view.rerouting_change(role)), along) <= 1e-12


def chosen(view: LayerView, model: str, models: Family) -> tuple[list[list[int]], Tensor]:
    """Experts of every token and the features before the block's mixture, by hooks on the library's own forward."""
    kept: list[Any] = []
    module = models.modules[model]
    experts = next(part for name, part in module.named_modules() if name == f"{view.layer.path}.mlp.experts")
    hook = experts.register_forward_pre_hook(lambda _, args: kept.append(args))
    with torch.no_grad():
        module(**models.batches[0].inputs)
    hook.remove()
    return kept[0][1].tolist(), kept[0][2]


@torch.no_grad()
def test_routes_are_the_librarys_own_and_what_they_change_is_exact() -> None:
    models = of("Mixtral")
    mask = models.batches[0].inputs["attention_mask"]
    real = mask.flatten().bool()  # the library sends padding somewhere, too
    for view in mixed(views(models)):
        by_model = {}
        for role, model in (("merged", "merged"), ("expert", "expert:a")):
            indices, gates = chosen(view, model, models)
            assert view.routes[role].chosen[real].tolist() == torch.tensor(indices)[real].tolist()
            assert torch.allclose(view.routes[role].gates[real], gates[real], rtol=1e-5)
            by_model[role] = [set(row) for row in indices]
        differ = [one != other for one, other in zip(*by_model.values(), strict=True)]
        elsewhere = (torch.tensor(differ).reshape(mask.shape) & mask.bool()).sum(dim=1) / mask.sum(dim=1)
        columns = drift_columns(view, "last")
        assert torch.allclose(columns["rerouted"], elsewhere.to(columns["rerouted"]))
        changed = view.rerouting_change("expert")
        rows = state_norms({"hidden": changed["hidden"].flatten(0, 1)[:, None]})
        is_changed = (rows > 0).reshape(mask.shape)
        assert torch.equal(is_changed, torch.tensor(differ).reshape(mask.shape) & mask.bool())
        # <e - c, e> + <c, e> = |e|^2
        drift = view.layer.pool_state(decompose(view).drift, view.side, "last")
        c = view.layer.pool_state(changed, view.side, "last")
        along = columns["rerouted_along"] * columns["unit"] ** 2
        assert torch.allclose(along, (c * drift).sum(dim=1))
        assert torch.allclose(((drift - c) * drift).sum(dim=1) + along, inner_products({"": drift}, {"": drift}))
