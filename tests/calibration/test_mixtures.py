"""Experts of a mixture, each solved on the tokens that the task's expert sends it, against sums over single tokens."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from driftlens.calibration.calibrator import Calibrator
from driftlens.calibration.featcal import FeatCal
from driftlens.calibration.residual import ResidualCal
from driftlens.engine.calibrating import CalibratedLayer, CalibrationContext
from driftlens.engine.sites import select_sites
from driftlens.linalg.gram import GramSum
from tests.calibration.helpers import TASKS, batched, given, updates_of
from tests.reference import calibration as reference
from tests.zoo.cases import Family, family
from tests.zoo.mixtures import case

N = 4
SETTINGS = {"lam": 0.03, "rho": 1.7, "alpha": 0.4}


def layers_of(models: Family, calibrator: Calibrator, size: int = N, layers: Any = (2,)) -> list[CalibratedLayer]:
    """Some blocks, calibrated."""
    batches = batched(models.batches[0].inputs, size)
    sites = select_sites(models.pool.chain, layers=layers, update=calibrator.update)
    return list(calibrator.calibrate(CalibrationContext(models.pool, {task: given(batches) for task in TASKS}, sites)))


def experts_calibrated(models: Family, calibrator: Calibrator, **options: Any) -> dict[tuple[int, str], Tensor]:
    """New parameters by layer and name."""
    return updates_of(layers_of(models, calibrator, **options))


def enters(model: nn.Module, inputs: Any) -> Tensor:
    """What the first block's mixture is fed, one row a token."""
    seen: list[Tensor] = []
    mlp = model.model.layers[0].mlp  # type: ignore[union-attr]
    hook = mlp.register_forward_pre_hook(lambda _, args: seen.append(args[0]))  # type: ignore[union-attr]
    with torch.no_grad():
        model(**inputs)
    hook.remove()
    return seen[0].flatten(0, 1)


def gates(model: Any, x: Tensor) -> Tensor:
    """How much each expert counts for one token; 0 for those that it is not sent to."""
    mlp = model.model.layers[0].mlp
    router = getattr(mlp, "gate", None) or mlp.router
    scores = router.weight @ x + (0 if getattr(router, "bias", None) is None else router.bias)
    best = scores.argsort(descending=True)[:2]
    return torch.zeros(4, dtype=x.dtype).scatter(0, best, scores[best].softmax(dim=0))


def matrices(model: Any, expert: int) -> tuple[nn.Linear, nn.Linear]:
    """An expert's two maps as plain modules."""
    experts, made = model.model.layers[0].mlp.experts, []
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(experts, name)[expert].detach()
        bias = getattr(experts, f"{name}_bias", None)
        weight = weight if bias is None else weight.T  # gpt-oss keeps them the other way round
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
        linear.weight.data.copy_(weight)
        if bias is not None:
            linear.bias.data.copy_(bias[expert].detach())
        made.append(linear)
    return made[0], made[1]


def between(name: str, rows: Tensor) -> Tensor:
    """What an expert makes of what its first map returns."""
    if name == "gpt-oss":
        gate, up = rows[::2].clamp(max=7), rows[1::2].clamp(-7, 7)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)
    gate, up = rows.chunk(2)
    return nn.functional.silu(gate) * up


@pytest.mark.parametrize("name", ["Mixtral", "gpt-oss"])
@torch.no_grad()
def test_every_expert_agrees_with_sums_over_the_tokens_it_is_sent(name: str) -> None:
    models = family(case(name), n=N, batch_size=N)
    found, modules = experts_calibrated(models, FeatCal(**SETTINGS)), models.modules
    inputs = models.batches[0].inputs
    real = inputs["attention_mask"].flatten().bool()
    features = {role: enters(module, inputs)[real] for role, module in modules.items()}
    for expert in range(4):
        maps = {role: matrices(module, expert) for role, module in modules.items()}
        rows: dict[int, dict[str, list[Any]]] = {0: {}, 1: {}}
        for task in TASKS:
            theirs = f"expert:{task}"
            for place in rows:
                rows[place][task] = []
            for x, e in zip(features["merged"], features[theirs], strict=True):
                gate = float(gates(modules[theirs], e)[expert])
                if gate:
                    rows[0][task].append((gate**2, x, e))
                    inner = (between(name, maps[role][0](u)) for role, u in (("merged", x), (theirs, e)))
                    rows[1][task].append((gate**2, *inner))
        for place, matrix in enumerate(("gate_up_proj", "down_proj")):
            want = reference.solved_linear(
                maps["merged"][place],
                maps["base"][place],
                {task: maps[f"expert:{task}"][place] for task in TASKS},
                {task: of_task for task, of_task in rows[place].items() if of_task},
                reference.Settings(**SETTINGS),
            )
            assert len(want) == (2 if name == "gpt-oss" else 1)
            for part, value in want.items():
                ours = found[2, f"mlp.experts.{expert}.{matrix}.{part}"]
                # Mixtral's router takes its softmax in float32.
                assert float((ours - value).norm()) <= 1e-6 * float(value.norm()), (expert, matrix, part)


@torch.no_grad()
def test_residual_calibration_of_an_expert_is_a_ridge_over_its_tokens() -> None:
    """Without upstream repair, gradients and folds it is (sum of w (W_task - W) x x') (sum of w x x' + ridge I)^-1."""
    models, ridge = family(case("Mixtral"), n=N, batch_size=N), 0.1
    calibrator = ResidualCal(order="block", residual=0, weights="uniform", cv="off", ridge=ridge)
    found, modules = experts_calibrated(models, calibrator), models.modules
    real = models.batches[0].inputs["attention_mask"].flatten().bool()
    features = {role: enters(module, models.batches[0].inputs)[real] for role, module in modules.items()}
    for expert in range(4):
        merged = matrices(modules["merged"], expert)[0].weight
        grams, crosses = [], []
        for task in TASKS:
            theirs = modules[f"expert:{task}"]
            weights = torch.stack([gates(theirs, e)[expert] ** 2 for e in features[f"expert:{task}"]])
            x = features["merged"] * (weights / weights.sum()).sqrt()[:, None]
            grams.append(x.T @ x)
            crosses.append((matrices(theirs, expert)[0].weight - merged) @ grams[-1])
        scale = 1 / torch.stack([gram.norm() for gram in grams]).mean()
        change = scale * sum(crosses) @ torch.linalg.inv(scale * sum(grams) + ridge * torch.eye(16))
        ours = found[2, f"mlp.experts.{expert}.gate_up_proj.weight"] - merged
        assert float((ours - change).norm()) <= 1e-5 * float(change.norm())


CALIBRATORS = {"featcal": FeatCal(**SETTINGS), "residual": ResidualCal(folds=2)}


@pytest.mark.slow
@pytest.mark.parametrize("method", CALIBRATORS)
@pytest.mark.parametrize("name", ["Mixtral", "gpt-oss", "Llama 4"])
def test_how_samples_are_batched_changes_nothing(name: str, method: str) -> None:
    models = family(case(name), n=N, batch_size=N)
    whole, one_by_one = (experts_calibrated(models, CALIBRATORS[method], size=size, layers=None) for size in (N, 1))
    assert whole.keys() == one_by_one.keys()
    for key, value in whole.items():
        assert float((one_by_one[key] - value).norm()) <= 1e-5 * float(value.norm()), key


@pytest.mark.parametrize("method", CALIBRATORS)
def test_an_expert_that_no_token_is_sent_to_stays_as_merged_and_is_named(method: str) -> None:
    models = family(case("gpt-oss"), n=N, batch_size=N)
    with torch.no_grad():
        for module in models.modules.values():
            module.model.layers[0].mlp.router.bias[2] = -1000  # type: ignore[union-attr]
    [layer] = layers_of(models, CALIBRATORS[method])
    experts = [report for report in layer.reports if ".experts." in report.site]
    kept = {report.site for report in experts if report.kind == "kept"}
    assert kept == {f"model.layers.0.mlp.experts.2.{matrix}" for matrix in ("gate_up_proj", "down_proj")}
    assert not any(".experts.2." in name for name in layer.updates)
    assert all(report.num_rows for report in experts if report.kind != "kept")


IN_RUNS: dict[str, Any] = {
    "featcal": FeatCal(**SETTINGS),
    "fed by the expert": FeatCal(**SETTINGS, inputs="expert"),
}


@pytest.mark.slow
@pytest.mark.parametrize("method", IN_RUNS)
def test_experts_summed_up_in_runs_come_out_as_those_summed_up_at_once(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, with as many sums held as one expert's matrix and the sites beside the mixture need."""
    models, calibrator, most = family(case("Mixtral"), n=N, batch_size=2), IN_RUNS[method], 0
    alive, begin = weakref.WeakSet[GramSum](), GramSum.__init__

    def counted(self: GramSum, *given: Any, **named: Any) -> None:
        nonlocal most
        begin(self, *given, **named)
        alive.add(self)
        most = max(most, len(alive))

    def walked(budget: int) -> tuple[list[CalibratedLayer], int]:
        nonlocal most
        most = 0
        sites = select_sites(models.pool.chain, update=calibrator.update)
        parts = {task: given(models.batches) for task in TASKS}
        context = CalibrationContext(models.pool, parts, sites, feature_budget=budget)
        return list(calibrator.calibrate(context)), most

    monkeypatch.setattr(GramSum, "__init__", counted)
    (whole, many), (parted, few) = walked(1 << 31), walked(1)
    # Of ten groups of sites eight are experts', which have two matrices each: one for the total, one for a task's sums.
    assert few * 10 == many * 3
    for layer, other in zip(whole, parted, strict=True):
        assert layer.updates.keys() == other.updates.keys() and layer.drift_l2_mean == other.drift_l2_mean
        assert all(torch.equal(value, other.updates[name]) for name, value in layer.updates.items())
        reports = ([replace(report, seconds=0.0) for report in of.reports] for of in (layer, other))
        assert next(reports) == next(reports)
