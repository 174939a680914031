"""What must hold of any calibration, whatever the numbers."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from driftlens.calibration.featcal import FeatCal
from driftlens.checkpoints.tensor_sources import InMemorySource
from driftlens.engine.calibrating import LinearProblem, NormProblem, Problem, SiteUpdate
from driftlens.engine.sites import select_sites
from driftlens.engine.walk import walk
from driftlens.linalg.ridge import solve_ridge
from driftlens.linalg.state import state_norms, subtract_states
from driftlens.models.chain import updated_tensors
from tests.calibration.helpers import Subject, batched, calibrated, given, layers_of, subject, updates_of
from tests.quick import few
from tests.zoo.cases import perturbed, pool_of
from tests.zoo.solvable import WORLDS

# Qwen's blocks are a Llama's with two norms more, and both CLIPs' compute the same.
QUICK = few(WORLDS, set(WORLDS) - {"qwen3", "hf_clip_vit"})


class Spy(FeatCal):
    """Remembers the problems it was asked to solve, in memory of its own."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.problems: list[Problem] = []

    def solve(self, problem: Problem) -> list[SiteUpdate]:
        self.problems.append(copy.deepcopy(problem))
        return super().solve(problem)


def weight(parameters: Any, problem: LinearProblem) -> Tensor:
    return torch.cat([parameters[f"{site.name}.weight"] for site in problem.sites])


def solved(spy: FeatCal, problem: Problem) -> dict[str, Tensor]:
    return {name: v for update in FeatCal.solve(spy, problem) for name, v in update.parameters.items()}


# --- the solution -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", QUICK)
def test_every_weight_is_stationary_and_no_objective_rises(name: str) -> None:
    spy = Spy()
    layers = layers_of(subject(name), spy)
    assert len(spy.problems) >= len(layers) > 0
    for problem in spy.problems:
        anchor = spy.anchor_parameters(problem.merged, problem.base)
        new = solved(spy, problem)
        if isinstance(problem, LinearProblem):
            moments, pull = problem.moments, weight(anchor, problem)
            found = weight(new, problem).clone().requires_grad_()
            objective = moments.misfit(found).sum() + spy.lam * (found - pull).square().sum()
            (gradient,) = torch.autograd.grad(objective, found)
            # Eq. 16; each of its terms is about as large as the ridge times the anchor.
            assert float(gradient.norm()) < 1e-11 * float(pull.norm())
        else:
            assert isinstance(problem, NormProblem)
            keys = list(new)
            values = [new[key].clone().requires_grad_() for key in keys]
            objective = problem.moments.misfit(values[0], values[1] if len(values) == 2 else None)
            for key, value in zip(keys, values, strict=True):
                objective = objective + spy.lam * (value - anchor[key]).square().sum()
            for gradient in torch.autograd.grad(objective, values):
                assert float(gradient.norm()) < 1e-11
    for layer in layers:
        for report in layer.reports:
            assert report.objective_after <= report.objective_before
            is_linear = report.kind == "linear"
            assert report.stationarity_error < 1e-13 if is_linear else report.stationarity_error is None


def test_keys_and_values_of_every_decoder_block_see_one_gram_of_the_encoders_tokens() -> None:
    """And none of the padding: whatever stands there changes nothing."""
    models, found = subject("t5"), []
    padded = {name: value.clone() for name, value in models.inputs.items()}
    padded["input_ids"][models.inputs["attention_mask"] == 0] = 7
    for inputs in (models.inputs, padded):
        spy = Spy(lam=1e-5, alpha=0.6)
        layers_of(models, spy, parts={task: given(batched(inputs, 3)) for task in ("a", "b")})
        found += [
            problem.moments.gram
            for problem in spy.problems
            if isinstance(problem, LinearProblem) and "EncDecAttention.k" in problem.sites[0].name
        ]
    first, *others = found
    assert len(found) == 2 * 2 and float(first.norm()) > 0
    for gram in others:
        torch.testing.assert_close(gram, first, rtol=1e-12, atol=1e-12)


def test_reported_objectives_are_those_of_the_moments() -> None:
    spy = Spy()
    reports = {r.site: r for layer in layers_of(subject("hf_clip_vit"), spy) for r in layer.reports}
    problem = next(p for p in spy.problems if isinstance(p, LinearProblem) and len(p.sites) == 3)
    anchor, new = spy.anchor_parameters(problem.merged, problem.base), solved(spy, problem)
    for at, site in enumerate(problem.sites):
        report = reports[f"vision_model.encoder.layers.0.{site.name}"]
        rows, stacked = slice(32 * at, 32 * at + 32), problem.moments
        assert stacked.target_energy is not None
        moments = dataclasses.replace(
            stacked,
            output_cross=stacked.output_cross[rows],
            mean_target=stacked.mean_target[rows],
            target_energy=stacked.target_energy[rows],
        )
        key = f"{site.name}.weight"
        for value, shown in (
            (problem.merged[key], report.objective_before),
            (new[key], report.objective_after),
        ):
            direct = moments.misfit(value).sum() + spy.lam * (value - anchor[key]).square().sum()
            assert shown == pytest.approx(float(direct), rel=1e-9)


def test_an_infinite_ridge_gives_the_anchor() -> None:
    models = subject()
    found = calibrated(models, FeatCal(lam=1e13, rho=1.5))
    for (index, name), value in found.items():
        layer = models.pool.chain.layers[index - 1]
        merged, base = (models.pool.parameters(model, layer)[name] for model in ("merged", "base"))
        torch.testing.assert_close(value, 1.5 * merged - 0.5 * base, rtol=1e-9, atol=1e-9)


def test_without_an_anchor_full_rank_data_give_the_only_expert_back() -> None:
    """alpha = 1 and one task: the expert's outputs on its own features, which the calibrated prefix reproduces."""
    models = subject("sequential", n=40)
    settings = FeatCal(anchor="none", alpha=1.0)
    modules = {**models.modules, "merged": perturbed(models.modules["expert:a"], 7)}
    for part in ("embed", "out"):  # outside the blocks the merged model is the expert already
        modules["merged"].get_submodule(part).load_state_dict(modules["expert:a"].get_submodule(part).state_dict())
    found = calibrated(
        models,
        settings,
        pool=pool_of(models.world.case, modules),
        parts={"a": given(models.batches())},
        base=None,
    )
    for (index, name), value in found.items():
        expert = models.pool.parameters("expert:a", models.pool.chain.layers[index - 1])[name]
        torch.testing.assert_close(value, expert, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.parametrize("base", ["base", None], ids=["with a base", "without a base"])
def test_a_merged_model_that_is_the_only_expert_is_a_fixed_point(name: str, base: str | None) -> None:
    models = subject(name)
    pool = pool_of(models.world.case, {**models.modules, "expert:a": models.modules["merged"]})
    layers = layers_of(models, FeatCal(rho=1.0), pool=pool, parts={"a": given(models.batches())}, base=base)
    for layer in layers:
        merged = pool.parameters("merged", pool.chain.layers[layer.layer - 1])
        for key, value in layer.updates.items():
            torch.testing.assert_close(value, merged[key], rtol=1e-10, atol=1e-11)
        assert all(drift < 1e-10 for drift in layer.drift_l2_mean.values())


# --- forward order ------------------------------------------------------------------------------------------------


def with_calibrated(models: Subject, found: dict[tuple[int, str], Tensor], name: str = "calibrated") -> Any:
    """The models in a new pool, beside them the merged one with new parameters."""
    pool = pool_of(models.world.case, models.modules)
    merged = pool.source("merged")
    tensors = {key: merged.read(key) for key in merged.headers}
    pool.add(name, InMemorySource(name, {**tensors, **updated_tensors(pool.chain, found, merged)}))
    return pool


@pytest.mark.parametrize("name", QUICK)
def test_features_met_on_the_way_are_those_of_the_finished_model(name: str) -> None:
    """The deployed-prefix invariant (Eq. 45): what each layer was fitted on is what the deployed model feeds it."""
    models = subject(name)
    layers = layers_of(models, FeatCal(), pooling="all")
    pool = with_calibrated(models, updates_of(layers))
    met = {layer.layer: layer.drift_l2_mean for layer in layers if layer.drift_l2_mean}
    assert list(met) == list(select_sites(pool.chain))[:-1]
    with torch.no_grad():
        for task in ("a", "b"):
            for view in walk(pool, task, ["calibrated"], models.batches()):
                if view.layer.index in met:
                    stream = view.layer.stream
                    drift = state_norms(
                        subtract_states({"x": view.merged_out[stream]}, {"x": view.expert_out[stream]})
                    ).mean()
                    assert met[view.layer.index][task] == pytest.approx(float(drift), rel=1e-12)


def one_by_one(models: Subject, calibrator: FeatCal) -> dict[tuple[int, str], Tensor]:
    """Every layer calibrated as if it were the only one: on stale features of the uncalibrated merged model."""
    chosen = select_sites(models.pool.chain, update=calibrator.update)
    parts = [calibrated(models, calibrator, sites={index: names}) for index, names in chosen.items()]
    return {key: value for part in parts for key, value in part.items()}


def final_drift(models: Subject, found: dict[tuple[int, str], Tensor], inputs: Any) -> float:
    pool = with_calibrated(models, found)
    with torch.no_grad():
        views = [
            view
            for task in ("a", "b")
            for view in walk(pool, task, ["calibrated"], batched(inputs, 64))
            if view.layer.role == "head"
        ]
    return float(torch.stack([state_norms(subtract_states(v.merged_out, v.expert_out)).mean() for v in views]).mean())


def test_a_source_that_is_not_deployed_costs_exactly_the_excess_of_its_minimiser() -> None:
    """J_dep(W_src) - J_dep(W_dep) = tr(D H_dep D'), and at most twice the largest gap of the objectives (Eq. 47)."""
    models = subject()
    deployed, stale = Spy(), Spy()
    layers_of(models, deployed)
    one_by_one(models, stale)

    def last_linear(spy: Spy) -> list[LinearProblem]:
        return [p for p in spy.problems if isinstance(p, LinearProblem)][-4:]

    for dep, src in zip(last_linear(deployed), last_linear(stale), strict=True):
        anchor = weight(deployed.anchor_parameters(dep.merged, dep.base), dep)
        solutions = [solve_ridge(p.moments, anchor, lam=deployed.lam) for p in (dep, src)]
        ours, theirs = (s.weight for s in solutions)

        def objective(problem: LinearProblem, at: Tensor) -> Tensor:
            return problem.moments.misfit(at).sum() + deployed.lam * (at - anchor).square().sum()  # noqa: B023

        excess = objective(dep, theirs) - objective(dep, ours)
        normal = dep.moments.gram * dep.moments.weight_sum
        normal = normal + deployed.lam * torch.eye(len(normal), dtype=normal.dtype)
        difference = theirs - ours
        identity = ((difference @ normal) * difference).sum()
        assert float(excess) == pytest.approx(float(identity), rel=1e-6) and float(excess) > 0
        gap = max(abs(float(objective(dep, at) - objective(src, at))) for at in (ours, theirs))
        assert float(excess) <= 2 * gap
