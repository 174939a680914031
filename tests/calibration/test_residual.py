"""Residual calibration: its identities, and what it must not depend on."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import load_file
from torch import Tensor

from driftlens.calibration.residual import ResidualCal
from driftlens.checkpoints.tensor_sources import InMemorySource
from driftlens.config.data import Views
from driftlens.data.altered import append_views
from driftlens.data.samples import Batch, SampleSet
from driftlens.engine import sequential as steps
from driftlens.engine.calibrating import CalibrationProgress
from driftlens.engine.sites import select_sites
from driftlens.engine.walk import InMemoryBatches
from driftlens.linalg.gram import ResidualMoments
from driftlens.linalg.ridge import WIDEST, RidgeChoice, choose_ridges, solve_residual, sum_moments
from driftlens.utils.errors import DataError
from tests.calibration.helpers import TASKS, calibrated, layers_of, part, subject, updates_of
from tests.quick import few
from tests.reference import residual as reference
from tests.reference.drift import STEPS

SMALL = ResidualCal(folds=2)


def moments(
    generator: torch.Generator, *, folds: int, k: int = 5, o: int = 3, rows: int = 7, decay: int = 0
) -> list[ResidualMoments]:
    found, sizes = [], torch.linspace(1, 0, k, dtype=torch.float64) ** decay
    for _ in range(folds):
        x = sizes * torch.randn(rows, k, generator=generator, dtype=torch.float64)
        local, upstream = torch.randn(2, rows, o, generator=generator, dtype=torch.float64)
        local = local + x[:, :o]  # something to learn
        found.append(ResidualMoments(x.mT @ x, local.mT @ x, upstream.mT @ x, (local + upstream).square().sum()))
    return found


def misfit(change: Tensor, fold: ResidualMoments) -> Tensor:
    cross = fold.local + fold.upstream
    return (change @ fold.gram * change).sum() - 2 * (change * cross).sum() + fold.energy


def refitted(folds: list[ResidualMoments], ridges: RidgeChoice) -> float:
    """What maps miss of a fold, each fitted without it."""
    found = 0.0
    for fold in folds:
        rest = sum_moments([other for other in folds if other is not fold])
        found += float(misfit(solve_residual(rest, ridges).change, fold))
    return found


@pytest.mark.parametrize(
    ("k", "rows", "decay", "steps", "tolerance"),
    [(5, 7, 0, 50, 1e-10), (WIDEST + 44, 7, 0, 2, 1e-10), (WIDEST + 24, 140, 4, 2, 1e-6)],
    ids=["all of space", "a span of all rows", "a span of the largest directions"],
)
def test_ridges_are_those_of_refits_without_each_fold(
    generator: torch.Generator, k: int, rows: int, decay: int, steps: int, tolerance: float
) -> None:
    """Folds of many inputs are compared in a span, which holds all rows, or nearly all that they weigh."""
    folds, grid = moments(generator, folds=3, k=k, rows=rows, decay=decay), (0.1, 1.0, 30.0)
    found = choose_ridges(folds, grid=grid)
    assert found.held_out == pytest.approx(refitted(folds, found), rel=tolerance)
    shares = [step / steps for step in range(steps + 1)]
    others = [refitted(folds, RidgeChoice(one, other, t)) for one in grid for other in grid for t in shares]
    assert found.held_out <= min(others) * (1 + tolerance)
    assert choose_ridges(folds, grid=grid, most=0.0).share == 0


SIZES = st.fixed_dictionaries(
    {"folds": st.integers(2, 4), "k": st.integers(1, 6), "o": st.integers(1, 3), "rows": st.integers(1, 8)}
)


@given(SIZES, st.integers(0, 99), st.sampled_from([1e-3, 1.0, 1e3]), st.sets(st.integers(0, 5)))
def test_any_folds_are_scored_as_by_refits_and_what_can_not_be_learned_is_left(
    sizes: dict[str, int], seed: int, scale: float, silent: set[int]
) -> None:
    """Fewer rows than inputs, inputs that never vary from 0, any unit of inputs, any order of folds."""
    generator = torch.Generator().manual_seed(seed)
    folds = moments(generator, **sizes | {"o": min(sizes["o"], sizes["k"])})
    dead = [at for at in silent if at < sizes["k"]]
    for fold in folds:
        fold.gram[dead], fold.gram[:, dead] = 0, 0
        fold.local[:, dead], fold.upstream[:, dead] = 0, 0
        for sums, power in ((fold.gram, 2), (fold.local, 1), (fold.upstream, 1)):
            sums *= scale**power
    grid = tuple(scale**2 * ridge for ridge in (0.1, 1.0, 30.0))
    found = choose_ridges(folds, grid=grid)
    assert found.held_out == pytest.approx(refitted(folds, found), rel=1e-7)
    assert choose_ridges(folds[::-1], grid=grid).held_out == pytest.approx(found.held_out, rel=1e-9)
    change, error = solve_residual(sum_moments(folds), found)
    assert bool(torch.isfinite(change).all()) and not bool(change[:, dead].any())
    assert error is not None and error < 1e-9


@pytest.mark.parametrize("with_metric", [False, True])
def test_the_joint_solve_is_stationary(generator: torch.Generator, with_metric: bool) -> None:
    tasks = moments(generator, folds=2, k=2, o=2)
    whole, ridges = sum_moments(tasks), RidgeChoice(0.3, 0.3, 1.0)
    metrics = [torch.eye(2, dtype=torch.float64)] * 2
    if with_metric:
        roots = torch.randn(2, 2, 2, generator=generator, dtype=torch.float64)
        metrics = [torch.eye(2, dtype=torch.float64) + 0.3 * root @ root.mT for root in roots]
    change, error = solve_residual(whole, ridges, tasks=list(zip(metrics, tasks, strict=True)) if with_metric else ())
    assert error is None if with_metric else error is not None and error < 1e-12
    gradient = 0.3 * change + sum(
        m @ (change @ t.gram - t.local - t.upstream) for m, t in zip(metrics, tasks, strict=True)
    )
    assert float(gradient.norm()) < 1e-9 * float(whole.local.norm())  # 4 unknowns, 5 steps: to the end


def test_every_solve_of_a_model_says_how_far_it_is_from_stationary() -> None:
    reports = [report for layer in layers_of(subject(), SMALL) for report in layer.reports]
    assert all(report.stationarity_error < 1e-12 for report in reports) and len(reports) > 4
    iterated = [r for layer in layers_of(subject(), ResidualCal(folds=2, mu=0.5)) for r in layer.reports]
    assert all(report.stationarity_error is None for report in iterated)


def test_large_ridges_leave_the_merged_model_and_equal_models_are_a_fixed_point() -> None:
    models = subject(n=4)
    kept = calibrated(models, ResidualCal(cv="off", ridge=1e13))
    same = {name: models.pool.source("merged") for name in ("merged", "expert:a", "expert:b")}
    for name, source in same.items():
        models.pool.add(name, source)
    fixed = calibrated(models, SMALL)
    for found in (kept, fixed):
        for (layer, name), value in found.items():
            want = models.pool.parameters("merged", models.pool.chain.layers[layer - 1])[name]
            torch.testing.assert_close(value, want, rtol=0, atol=1e-8)


@pytest.mark.slow
def test_order_of_tasks_and_samples_and_size_of_batches_change_nothing() -> None:
    models = subject(n=5)
    turned = part(models.inputs, torch.tensor([3, 0, 4, 1, 2]))

    shuffled = [Batch(0, 2, part(turned, slice(0, 2))), Batch(2, 5, part(turned, slice(2, 5)))]
    other = {task: InMemoryBatches(lambda: shuffled) for task in reversed(TASKS)}
    for settings in (SMALL, ResidualCal(folds=2, mu=0.5)):
        one, two = calibrated(models, settings), calibrated(models, settings, parts=other)
        for key, value in one.items():
            torch.testing.assert_close(two[key], value, rtol=1e-7, atol=1e-9)


def test_rows_that_are_taken_in_bit_by_bit_all_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the output metric, too, where a task has more rows than are multiplied at once."""
    models, settings = subject(n=4), ResidualCal(folds=2, mu=0.5)
    whole = calibrated(models, settings, parts=models.samples(1))
    monkeypatch.setattr(steps, "_AT_ONCE", 2)
    for key, value in calibrated(models, settings, parts=models.samples(1)).items():
        torch.testing.assert_close(value, whole[key], rtol=1e-7, atol=1e-9)


def test_output_metrics_beyond_the_budget_wait_on_disk_and_change_no_weight(tmp_path: Path) -> None:
    """They are as many as the calibrator says beforehand, and gone behind the walk."""
    models, settings, spill = subject(n=4), ResidualCal(folds=2, mu=0.5), tmp_path / "spill"
    held, entries = calibrated(models, settings), dict[str, int]()
    solved, left = list[int](), list[str]()

    def look(step: CalibrationProgress) -> None:
        for file in spill.glob("*moment*"):
            entries[file.name] = load_file(file)["moment"].numel()
        if step.layer > 0 and not step.task:  # a layer that is solved has no use for its own
            solved.extend(range(step.layer + 1))
            left.extend(file.name for layer in solved for file in spill.glob(f"*moment-{layer}-*"))

    written = calibrated(models, settings, feature_budget=0, spill=spill, on_step=look)
    assert all(torch.equal(value, held[key]) for key, value in written.items()) and not spill.exists()
    sites = select_sites(models.pool.chain, update=settings.update)
    told = len(TASKS) * settings.extra_cache_bytes(models.pool, sites)
    assert entries and 4 * sum(entries.values()) == told and solved and not left
    assert SMALL.extra_cache_bytes(models.pool, sites) == 0


def test_resuming_gives_the_same_weights() -> None:
    models = subject(n=4)
    first, *rest = layers_of(models, SMALL)
    again = layers_of(models, SMALL, done={first.layer: first.updates})
    assert [layer.layer for layer in again] == [layer.layer for layer in rest]
    want = updates_of(rest)
    for key, value in updates_of(again).items():
        assert torch.equal(value, want[key])


@pytest.mark.parametrize(
    ("settings", "n", "says"), [(ResidualCal(folds=4), 3, "folds"), (ResidualCal(cv="off"), 1, "")]
)
def test_fewer_samples_than_folds_are_refused_before_any_pass(
    settings: ResidualCal, n: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = subject(n=n)
    if not says:
        assert calibrated(models, settings)
        return
    passes: list[str] = []
    monkeypatch.setattr(steps._StepwiseLoop, "_accumulate_gradient_sums", lambda _, task: passes.append(task))
    with pytest.raises(DataError, match=says):
        calibrated(models, settings)
    assert not passes


SETTINGS: dict[str, dict[str, Any]] = {
    "local alone": {"weights": "uniform", "cv": "off", "ridge": 0.05, "residual": 0.0},
    "uniform": {"weights": "uniform", "cv": "off", "ridge": 0.05, "residual": 0.7},
    "gradients": {"cv": "off", "ridge": 0.03},
    "default": {"folds": 3},
    "metric": {"folds": 2, "mu": 0.9, "seed": 7},
}


QUICK = {("open_clip_vit", "default")}
PAIRS = [(name, settings) for name in ("open_clip_vit", "hf_clip_vit") for settings in SETTINGS]
VIEWED = [("hf_clip_vit", "metric", 2), ("open_clip_vit", "default", 1)]


@pytest.mark.parametrize(
    ("name", "of", "copies"),
    [pytest.param(*pair, 0, marks=() if pair in QUICK else pytest.mark.slow) for pair in PAIRS]
    + [pytest.param(*pair, marks=pytest.mark.slow) for pair in VIEWED],
)
def test_solves_agree_with_the_slow_reference(name: str, of: str, copies: int) -> None:
    """Of a fused in-projection and of separate ones; alone, every module is solved for its own target.

    The reference is given views as further samples, each in its original's fold; of them one direction is drawn.
    """
    n = 3 if copies else 5
    models, product = subject(name, n=n), ResidualCal(**SETTINGS[of])
    views = Views(kind="crop", copies=copies) if copies else None
    load: Any = lambda positions: models.inputs[list(positions)]  # noqa: E731
    given_samples = SampleSet("a", "calibration", tuple(map(str, range(n))), None, load, views=views)
    world, modules, samples = models.world, models.modules, range(n * (1 + copies))
    inputs = append_views(given_samples).load(samples)
    features = {
        task: {
            role: [world.enter(modules[model], inputs, sample) for sample in samples]
            for role, model in (("merged", "merged"), ("expert", f"expert:{task}"))
        }
        for task in TASKS
    }
    # Folds and random directions follow the content of samples, whatever their order.
    digests = Batch(0, len(inputs), inputs).digests
    width = STEPS[name](modules["base"])[-1](features["a"]["expert"][0][None]).shape[-1]
    seeds = [(int(digest[:15], 16) + product.seed) % 2**63 for digest in digests]
    draws = [
        torch.randn(1 if copies else 2, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        for seed in seeds
    ]
    heads = {task: STEPS[name](modules[f"expert:{task}"])[-1] for task in TASKS}
    want = reference.calibrate(
        world.blocks(modules["merged"]),
        {task: world.blocks(modules[f"expert:{task}"]) for task in TASKS},
        features,
        reference.Settings(
            folds=[sorted(digests[:n]).index(digests[at % n]) % product.folds for at in samples]
            if product.cv == "on"
            else None,
            ridge=product.ridge,
            share=product.residual,
            mu=product.mu,
            is_two_sided=copies > 0,
            draws=draws if product.weights == "gradient" else None,
            leave={task: lambda hidden, head=head: head(hidden[None])[0] for task, head in heads.items()},
        ),
    )
    found = calibrated(models, product, parts=dict.fromkeys(TASKS, append_views(given_samples)))
    assert len(found) == sum(map(len, want))
    for (layer, parameter), value in found.items():
        site, _, part = parameter.rpartition(".")
        expected = want[layer - 2][f"{world.names[site]}.{part}"]
        assert float((value.cpu() - expected).norm()) <= 1e-9 * float(expected.norm()), (layer, parameter)


@pytest.mark.slow
def test_a_view_in_another_fold_than_its_original_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: every copy counts as a sample of its own, so that folds are shared out among all."""
    batches = SampleSet.batches

    def apart(self: SampleSet) -> Any:
        return (dataclasses.replace(batch, copied=()) for batch in batches(self))

    monkeypatch.setattr(SampleSet, "batches", apart)
    with pytest.raises(AssertionError):
        test_solves_agree_with_the_slow_reference("hf_clip_vit", "metric", 2)


def test_sites_that_never_vary_and_gradients_that_never_arrive_leave_finite_weights() -> None:
    models = subject(n=3)
    silent = {key: torch.zeros_like(value) for key, value in models.modules["merged"].state_dict().items()}
    for name in ("merged", "expert:a", "expert:b"):
        source = models.pool.source(name)
        weights = {key: silent[key] if "ln_" in key else source.read(key) for key in source.headers}
        models.pool.add(name, InMemorySource(name, weights))
    found = calibrated(models, SMALL)
    assert found and all(bool(torch.isfinite(value).all()) for value in found.values())


@pytest.mark.parametrize("name", few(["hf_clip_vit", "t5", "llama", "sequential", "rms_stack"], ["t5"]))
def test_families_calibrate(name: str) -> None:
    """To which streams their outputs are added, `tests/engine/test_residual_streams.py` says."""
    found = updates_of(layers_of(subject(name, n=4), SMALL))
    assert found and all(bool(torch.isfinite(value).all()) for value in found.values())


@pytest.mark.parametrize("name", few(["open_clip_vit", "hf_clip_vit", "t5", "llama"], ["open_clip_vit", "t5"]))
def test_steps_that_continue_from_known_outputs_give_the_weights_of_whole_passes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, record, counts = subject(name, n=4), steps.record_activations, list[int]()
    found = calibrated(models, SMALL)

    def whole_pass(*given: Any, known: dict[str, Tensor], **options: Any) -> Any:
        counts.append(len(known))
        return record(*given, **options)

    monkeypatch.setattr(steps, "record_activations", whole_pass)
    whole = calibrated(models, SMALL)
    assert max(counts) > 1
    assert found.keys() == whole.keys() and all(torch.equal(value, whole[key]) for key, value in found.items())


def test_embedding_models_and_lora_experts_of_decoders_are_repaired_with_views() -> None:
    kinds = (("embeddings", "hf-auto"), ("hf-decoder, LoRA adapters", "hf-decoder"), ("hf-decoder",), ("open-clip",))
    assert [*map(ResidualCal.preset_for, kinds)] == ["views", "views", None, None]
    assert ResidualCal.presets["views"] == ResidualCal.with_views and set(ResidualCal.preset_views) == {"views"}
