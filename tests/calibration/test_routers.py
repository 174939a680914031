"""Routers of mixtures, repaired before or after the experts of their layer, on what the library itself runs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from driftlens.base.errors import SpecError
from driftlens.calibration.calibrator import Calibrator
from driftlens.calibration.featcal import FeatCal
from driftlens.calibration.residual import ResidualCal
from driftlens.engine.calibrating import Ground
from driftlens.engine.problems import CalibratedLayer, SiteReport
from driftlens.engine.sites import select_sites
from driftlens.engine.snapshot import Lane, calibrate_side_by_side
from driftlens.jobs.calibrate.variants import Solution, unreached
from tests.calibration.helpers import TASKS, batched, given, updates_of
from tests.reference.routing import curvature
from tests.zoo.cases import CASES, Family, family
from tests.zoo.mixtures import case, mixtures

N = 4
FEATCAL: dict[str, Any] = {"lam": 0.03, "rho": 1.7, "alpha": 0.4}
CALIBRATORS = {
    "featcal, before": FeatCal(**FEATCAL, routers="before"),
    "featcal, after": FeatCal(**FEATCAL, routers="after"),
    "residual": ResidualCal(folds=2, routers="before"),
    "residual, by block": ResidualCal(folds=2, routers="after", order="block"),
}


def of(name: str) -> Family:
    return family(case(name), n=N, batch_size=N)


def ground(models: Family, calibrator: Calibrator, size: int = N, **options: Any) -> Ground:
    batches = batched(models.batches[0].inputs, size)
    chosen = select_sites(models.pool.chain, update=calibrator.kinds, **options)
    return Ground(models.pool, {task: given(batches) for task in TASKS}, chosen)


def layers_of(models: Family, calibrator: Calibrator, **options: Any) -> list[CalibratedLayer]:
    return list(calibrator.calibrate(ground(models, calibrator, **options)))


def routers_in(layers: list[CalibratedLayer]) -> list[SiteReport]:
    return [report for layer in layers for report in layer.reports if report.routes_before is not None]


def first_mixture(models: Family) -> Any:
    return next(layer for layer in models.chain.blocks if layer.router is not None)


def parts(model: nn.Module, layer: Any) -> tuple[Any, Any]:
    """The router of a library's block, and its experts."""
    block = model.get_submodule(layer.path)
    experts = next(module for name, module in block.named_modules() if name.endswith(".experts"))
    return block.get_submodule(layer.router.name), experts


@torch.no_grad()
def passed(model: nn.Module, layer: Any, inputs: Any) -> tuple[Tensor, Tensor]:
    """What the router reads and where tokens go, of those that are no padding, by the library's own forward pass."""
    read: list[Tensor] = []
    gone: list[Tensor] = []
    router, experts = parts(model, layer)
    hooks = [
        router.register_forward_pre_hook(lambda _, args: read.append(args[0])),
        experts.register_forward_pre_hook(lambda _, args: gone.append(args[1])),
    ]
    model(**inputs)
    for hook in hooks:
        hook.remove()
    real = inputs["attention_mask"].flatten().bool()
    return read[0].reshape(len(real), -1)[real], gone[0][real]


def affine(model: nn.Module, layer: Any) -> Tensor:
    router, _ = parts(model, layer)
    bias = getattr(router, "bias", None)
    return router.weight.detach() if bias is None else torch.cat([router.weight, bias[:, None]], 1).detach()


def check_a_router_is_the_dense_solution(name: str, routers: str) -> None:
    models, scoring = of(name), "sigmoid" if name == "DeepSeek-V3" else "softmax"
    layer, inputs = first_mixture(models), models.batches[0].inputs
    layers = layers_of(models, FeatCal(**FEATCAL, routers=routers), layers=[layer.index])
    updates = updates_of(layers)
    fed = copy.deepcopy(models.modules["merged"])
    if routers == "after":  # what runs before the router in its block is calibrated by then
        for (index, parameter), value in updates.items():
            if index == layer.index and "experts" not in parameter:
                fed.get_parameter(f"{layer.path}.{parameter}").data.copy_(value)
    x, _ = passed(fed, layer, inputs)
    first = affine(models.modules["merged"], layer)
    if first.shape[1] > x.shape[1]:
        x = torch.cat([x, x.new_ones(len(x), 1)], dim=1)
    wanted = {task: affine(models.modules[f"expert:{task}"], layer) for task in TASKS}
    matrices = {task: curvature(scoring, x, wanted[task]) for task in TASKS}
    right = sum(matrices[task] @ wanted[task].flatten() for task in TASKS)
    want = torch.linalg.solve(sum(matrices.values()), right).reshape(first.shape)
    ours = updates[layer.index, f"{layer.router.name}.weight"]
    if first.shape[1] > ours.shape[1]:
        ours = torch.cat([ours, updates[layer.index, f"{layer.router.name}.bias"][:, None]], dim=1)
    assert float((ours - want).norm()) <= 1e-6 * float((want - first).norm())


@pytest.mark.parametrize("routers", ["before", "after"])
@pytest.mark.parametrize("name", ["Mixtral", "gpt-oss", "DeepSeek-V3"])
def test_a_router_is_the_dense_solution_on_what_the_library_feeds_it(name: str, routers: str) -> None:
    check_a_router_is_the_dense_solution(name, routers)


@pytest.mark.parametrize("method", CALIBRATORS)
def test_reports_count_tokens_that_go_where_the_experts_own_library_sends_them(method: str) -> None:
    models = of("Mixtral")
    layer, inputs = first_mixture(models), models.batches[0].inputs
    layers = layers_of(models, CALIBRATORS[method], layers=[layer.index])
    [report] = routers_in(layers)
    assert report.kind == "router" and report.site == f"{layer.path}.{layer.router.name}"
    assert report.objective_after < report.objective_before and report.stationarity_error <= 1e-8
    calibrated = copy.deepcopy(models.modules["merged"])
    for (_, parameter), value in updates_of(layers).items():
        if "experts" not in parameter:
            calibrated.get_parameter(f"{layer.path}.{parameter}").data.copy_(value)
    if method == "featcal, before":  # it is told of the features that it was solved on
        calibrated = copy.deepcopy(models.modules["merged"])
        weight = updates_of(layers)[layer.index, f"{layer.router.name}.weight"]
        parts(calibrated, layer)[0].weight.data.copy_(weight)
    right = []
    for task in TASKS:
        _, of_expert = passed(models.modules[f"expert:{task}"], layer, inputs)
        _, ours = passed(calibrated, layer, inputs)
        right.append((ours.sort(dim=1).values == of_expert.sort(dim=1).values).all(dim=1))
    assert report.routes_after == pytest.approx(float(torch.cat(right).double().mean()))


@pytest.mark.parametrize("method", ["featcal, after", "residual"])
def test_without_routers_all_else_of_a_layer_is_bit_for_bit_what_it_is_with_them(method: str) -> None:
    models, calibrator = of("Mixtral"), CALIBRATORS[method]
    index = first_mixture(models).index
    off, on = (
        updates_of(layers_of(models, calibrator.changed(routers=routers), layers=[index]))
        for routers in ("off", calibrator.routers)
    )
    assert on.keys() - off.keys() == {(index, "mlp.gate.weight")}
    assert all(torch.equal(on[key], value) for key, value in off.items())


@pytest.mark.slow
@pytest.mark.parametrize("method", CALIBRATORS)
def test_batches_and_their_order_change_nothing(method: str) -> None:
    models, calibrator = of("Mixtral"), CALIBRATORS[method]
    whole = updates_of(layers_of(models, calibrator, layers=[2]))
    inputs = {name: value.flip(0) for name, value in models.batches[0].inputs.items()}
    on = ground(models, calibrator, layers=[2])
    turned = {task: given(batched(inputs, 1)) for task in reversed(TASKS)}
    one_by_one = updates_of(calibrator.calibrate(Ground(on.pool, turned, on.sites)))
    key = 2, "mlp.gate.weight"
    assert float((one_by_one[key] - whole[key]).norm()) <= 1e-6 * float(whole[key].norm())


def test_step_by_step_a_router_is_the_same_before_its_experts_and_after() -> None:
    models = of("Mixtral")
    before, after = (
        updates_of(layers_of(models, ResidualCal(folds=2, routers=routers), layers=[2]))
        for routers in ("before", "after")
    )
    assert before.keys() == after.keys() and all(
        torch.equal(after[key], value) for key, value in before.items()
    )


@pytest.mark.slow
def test_lanes_side_by_side_are_what_each_is_alone() -> None:
    models = of("Mixtral")
    lanes = [FeatCal(**FEATCAL, routers=routers) for routers in ("before", "after")]
    lanes.append(FeatCal(**FEATCAL, routers="before", inputs="expert"))
    both = [*calibrate_side_by_side(ground(models, lanes[0]), [Lane(calibrator) for calibrator in lanes])]
    for place, calibrator in enumerate(lanes):
        alone = updates_of(layers_of(models, calibrator))
        beside = updates_of(layers[place] for layers in both)
        assert alone.keys() == beside.keys()
        assert all(torch.allclose(beside[key], value, rtol=1e-9, atol=1e-12) for key, value in alone.items())


@pytest.mark.parametrize("method", ["featcal, after", "residual"])
def test_routers_alone_may_be_chosen(method: str) -> None:
    models = of("Mixtral")
    layers = layers_of(models, CALIBRATORS[method], sites=["*.mlp.gate"])
    assert {name for layer in layers for name in layer.updates} == {"mlp.gate.weight"}
    assert len(routers_in(layers)) == 3


SPARSEMIXER = "Phi-3.5-MoE"


@pytest.mark.shows(routers="repaired")
@pytest.mark.parametrize(
    "name", [each for each in mixtures("Mixtral", "Hunyuan") if each.values != (SPARSEMIXER,)]
)
def test_routers_of_every_family_are_repaired(name: str) -> None:
    models = of(name)
    reports = routers_in(layers_of(models, CALIBRATORS["featcal, after"]))
    assert len(reports) == sum(layer.num_experts > 0 for layer in models.chain.blocks) > 0
    for report in reports:
        assert report.kind == "router" and report.objective_after < report.objective_before


@pytest.mark.family(SPARSEMIXER)
@pytest.mark.shows(routers="stay as merged and are named")
def test_routers_that_do_not_take_the_largest_scores_stay_and_are_named() -> None:
    models = of(SPARSEMIXER)
    layers = layers_of(models, CALIBRATORS["featcal, after"], layers=[2])
    [report] = routers_in(layers)
    assert (report.kind, report.routes_after) == ("kept", report.routes_before)
    assert not any("mlp.router" in name for name in layers[0].updates)
    [notice] = unreached(Solution({2: layers[0]}))
    assert "1 router of mixtures" in notice and report.site in notice


def frozen(models: Family) -> Family:
    for layer in models.chain.blocks:
        for name, module in models.modules.items():
            router, _ = parts(module, layer)
            router.weight.data.copy_(parts(models.modules["base"], layer)[0].weight)
            assert name
    return models


@pytest.mark.parametrize(
    ("models", "sites", "words"),
    [
        pytest.param(lambda: family(CASES["masked_decoder"]), None, "no mixture of experts", id="no mixture"),
        pytest.param(lambda: of("Mixtral"), ["*.q_proj"], "leave all of them out", id="left out by patterns"),
        pytest.param(lambda: frozen(of("Mixtral")), None, "frozen in training", id="frozen"),
    ],
)
@pytest.mark.parametrize("method", ["featcal, before", "residual"])
def test_routers_that_can_not_be_repaired_are_refused(
    models: Any, sites: list[str] | None, words: str, method: str
) -> None:
    with pytest.raises(SpecError, match=words) as refused:
        layers_of(models(), CALIBRATORS[method], sites=sites)
    assert "routers to off" in refused.value.hint
