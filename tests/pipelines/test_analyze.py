"""An analysis end to end: what stands in the tables, against open_clip's own modules on the same samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor, nn

import driftlens as dl
from driftlens.config.requests import AnalysisRequest
from driftlens.diagnostics.drift_columns import bootstrap_ratio_ci
from driftlens.pipelines.analyze import analyze
from driftlens.results.listing import find_runs
from driftlens.runs.run import DriftRun, resume_command
from driftlens.utils.distributed import JobContext
from driftlens.utils.errors import Cancelled
from driftlens.utils.progress import CancelToken, ProgressEvent
from tests.quick import few
from tests.reference.drift import Row, drift_rows, open_clip_steps
from tests.zoo.world import (
    CLASSES,
    DEPTH,
    LOGIT_SCALE,
    NUM_TEST,
    TASKS,
    World,
    clip,
    labels,
    merged_weights,
    pixels,
)

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Library:
    """The world's models as open_clip builds them, asked about the samples of one run."""

    world: World
    run: DriftRun
    modules: Mapping[str, nn.Module]

    @classmethod
    def of(cls, world: World, run: DriftRun) -> Library:
        states = {name: world.state(name) for name in world.names} | {"merged": merged_weights(world)}
        return cls(world, run, {name: clip(state).double() for name, state in states.items()})

    def pixels(self, task: str, split: str = "diagnosis") -> Tensor:
        return pixels(self.world.data(task), self.run.sample_ids(task, split))

    def labels(self, task: str, split: str = "diagnosis") -> list[str]:
        return labels(self.world.data(task), self.run.sample_ids(task, split))

    def rows(self, task: str, variant: str) -> list[list[Row]]:
        """[layer - 1][sample], layer by layer and sample by sample."""
        steps = [open_clip_steps(self.modules[name].visual) for name in (variant, task)]
        samples = drift_rows(*steps, self.pixels(task))
        return [list(layer) for layer in zip(*samples, strict=True)]

    def states(self, task: str, model: str) -> list[Tensor]:
        """States at boundaries 1..L of an ordinary forward pass, read off by hooks."""
        visual = self.modules[model].visual
        found: list[Tensor] = []
        watched = [visual.ln_pre, *visual.transformer.resblocks]
        handles = [module.register_forward_hook(lambda *call: found.append(call[-1])) for module in watched]
        with torch.no_grad():
            final = visual(self.pixels(task))
        for handle in handles:
            handle.remove()
        return [*found, final]

    def scores(self, task: str, model: str, split: str = "diagnosis") -> Tensor:
        """Class scores [n, classes]."""
        embeddings = load_file(self.world.folder / "heads.safetensors")[task].double()
        with torch.no_grad():
            features = self.modules[model].encode_image(self.pixels(task, split))
        return LOGIT_SCALE * F.normalize(features, dim=1) @ embeddings.T


def stacked(rows: list[Row], name: str) -> Values:
    """One field of all samples' rows, [n, ...]."""
    return np.stack([np.asarray(getattr(row, name)) for row in rows])


def norms(vectors: Values) -> Values:
    return np.linalg.norm(vectors, axis=1)


LAYERS = DEPTH + 2
QUICK = {"heads": None, "metrics": {"jacobian": False}}
FLOAT32 = 2e-5
"""Relative distance of a walk in float32 from modules in float64; 2e-6 measured."""

each_task = pytest.mark.parametrize("task", TASKS)
each_variant = pytest.mark.parametrize("variant", ["base", "merged"])


@pytest.fixture(scope="module")
def library(world: World, finished: DriftRun) -> Library:
    return Library.of(world, finished)


def column(run: DriftRun, name: str, task: str, variant: str = "merged") -> np.ndarray[Any, Any]:
    return run.layers(task, variant)[name].to_numpy(dtype=float)


@each_task
@each_variant
def test_drift_and_its_parts_are_those_of_the_librarys_modules(
    library: Library, finished: DriftRun, task: str, variant: str
) -> None:
    layers, base = library.rows(task, variant), library.rows(task, "base")
    expected: dict[str, list[float]] = {name: [] for name in COLUMNS}
    for rows, of_base in zip(layers, base, strict=True):
        for name, value in _layer_columns(rows, of_base).items():
            expected[name].append(value)
    assert len(layers) == LAYERS
    for name, values in expected.items():
        found = column(finished, name, task, variant)
        np.testing.assert_allclose(found, values, rtol=FLOAT32, atol=1e-6, err_msg=name)


COLUMNS = (
    *("drift_l2_mean", "drift_l2_std", "drift_l2_median", "drift_l2_q10", "drift_rel", "drift_vs_base"),
    *("cos_mean", "mismatch_l2_mean", "propagation_l2_mean", "cross_term", "amplification"),
)


def _layer_columns(rows: list[Any], of_base: list[Any]) -> dict[str, float]:
    drift, expert = stacked(rows, "drift"), stacked(rows, "expert")
    mismatch, propagation = stacked(rows, "mismatch"), stacked(rows, "propagation")
    size, variant = norms(drift), expert + drift
    incoming = stacked(rows, "state_in").sum()
    values = (
        size.mean(),
        size.std(),
        np.median(size),
        np.quantile(size, 0.1),
        size.sum() / norms(expert).sum(),
        size.sum() / norms(stacked(of_base, "drift")).sum(),
        ((variant * expert).sum(axis=1) / norms(variant) / norms(expert)).mean(),
        norms(mismatch).mean(),
        norms(propagation).mean(),
        2 * (mismatch * propagation).sum() / (size**2).sum(),
        stacked(rows, "state_propagation").sum() / incoming if incoming > 0 else np.nan,
    )
    return dict(zip(COLUMNS, values, strict=True))


@each_task
def test_accuracy_is_that_of_the_librarys_scores(library: Library, finished: DriftRun, task: str) -> None:
    rows = finished.accuracy(task).set_index("variant")
    assert set(rows.index) == {"base", "merged", "expert"}
    wanted = [CLASSES[task].index(label) for label in library.labels(task, "test")]
    for variant, row in rows.iterrows():
        model = task if variant == "expert" else str(variant)
        hits = library.scores(task, model, "test").argmax(dim=1).tolist()
        share = np.mean([hit == want for hit, want in zip(hits, wanted, strict=True)])
        assert row["value"] == pytest.approx(share) and row["n"] == NUM_TEST
        low, high = _wilson(share, NUM_TEST)
        assert (row["ci_low"], row["ci_high"]) == (pytest.approx(low), pytest.approx(high))


def _wilson(share: float, n: int) -> tuple[float, float]:
    z = 1.959963984540054
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * np.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return middle - half, middle + half


@each_task
@each_variant
def test_output_drift_is_that_of_the_librarys_scores(
    library: Library, finished: DriftRun, task: str, variant: str
) -> None:
    outputs = finished.outputs(task, variant)
    assert outputs["sample_id"].tolist() == list(finished.sample_ids(task))
    assert outputs["label"].tolist() == library.labels(task)
    names, (scores, expert) = CLASSES[task], (library.scores(task, name) for name in (variant, task))
    assert outputs["pred"].tolist() == [names[row] for row in scores.argmax(dim=1)]
    assert outputs["expert_pred"].tolist() == [names[row] for row in expert.argmax(dim=1)]
    best = expert.sort(dim=1, descending=True).values
    true = torch.tensor([names.index(label) for label in library.labels(task)])
    expected = {
        "score_drift_l2": (scores - expert).norm(dim=1),
        "score_drift_inf": (scores - expert).abs().amax(dim=1),
        "margin": best[:, 0] - best[:, 1],
        "ce": torch.nn.functional.cross_entropy(scores, true, reduction="none"),
        "ce_expert": torch.nn.functional.cross_entropy(expert, true, reduction="none"),
    }
    for name, values in expected.items():
        np.testing.assert_allclose(outputs[name], values, rtol=1e-4, atol=1e-5, err_msg=name)
    assert (outputs["score_drift_l2"] <= outputs["score_bound"] * (1 + 1e-9)).all()


@each_task
def test_shares_of_the_final_drift_sum_to_one(finished: DriftRun, task: str) -> None:
    rows = finished.layers(task, "merged")
    assert rows["jacobian_samples"].tolist() == [2] * LAYERS
    assert rows["remainder_share"].isna().tolist() == [True] * (LAYERS - 1) + [False]
    assert rows["final_share"].sum() + rows["remainder_share"].iloc[-1] == pytest.approx(1, abs=1e-12)
    # The remainder closes that sum by definition; that it is small is what a wrong Jacobian would break.
    assert abs(rows["remainder_share"].iloc[-1]) < 1e-3
    assert rows["prefix_share"].sum() == pytest.approx(1, abs=1e-6)
    assert rows["jacobian_error"].iloc[1:].max() < 1e-4
    samples = finished.samples(task, "merged")
    assert samples.groupby("sample_id")["final_share"].count().isin([0, LAYERS]).all()
    known = samples.dropna(subset="final_share")
    per_sample = known.groupby("sample_id")["final_share"].sum()
    assert len(per_sample) == 2
    np.testing.assert_allclose(per_sample, 1, atol=1e-3)
    by_layer = known.pivot(index="layer", columns="sample_id", values="final_share")
    energy = known[known["layer"] == LAYERS].set_index("sample_id")["drift_l2"].loc[by_layer.columns] ** 2
    ends = bootstrap_ratio_ci(by_layer.to_numpy() * energy.to_numpy(), energy.to_numpy())
    np.testing.assert_allclose(rows[["final_share_low", "final_share_high"]].to_numpy().T, ends, atol=1e-6)
    for share in ("final_share", "prefix_share"):
        assert rows[share].between(rows[f"{share}_low"], rows[f"{share}_high"]).all()


def test_the_walk_closes_with_the_librarys_forward_passes(finished: DriftRun) -> None:
    errors = finished.layers()["closure_error"]
    assert errors.notna().all() and errors.max() < 1e-5


def test_rows_are_those_of_every_boundary_and_variant_but_the_experts(finished: DriftRun) -> None:
    rows = finished.layers()
    keys = [
        (task, variant, layer) for task in TASKS for variant in ("base", "merged") for layer in range(1, LAYERS + 1)
    ]
    assert list(zip(rows["task"], rows["variant"], rows["layer"], strict=True)) == keys
    assert rows["role"].tolist()[:LAYERS] == ["stem", *["block"] * DEPTH, "head"]
    assert (rows["n"] == 5).all() and (rows["reference"] == "expert").all()
    assert rows.loc[rows["variant"] == "base", "final_share"].isna().all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("select", "kept"),
    [([3], [1, 3, 5]), ("*.resblocks.2", [1, 4, 5]), ("final", [1, 5])],
    ids=["one layer by number", "a pattern", "the head alone"],
)
def test_selecting_layers_narrows_the_rows_and_not_the_numbers(
    world: World, finished: DriftRun, tmp_path: Path, select: Any, kept: list[int]
) -> None:
    spec = world.one_task(layers={"select": select}, metrics={"jacobian": False, "cka": True}, heads=None)
    run = dl.analyze(spec, out=tmp_path / "run", progress="none")
    rows, whole = run.layers(variant="base"), finished.layers(TASKS[0], "base")
    assert rows["layer"].tolist() == kept
    pd.testing.assert_frame_equal(rows, whole[whole["layer"].isin(kept)].reset_index(drop=True))
    assert sorted(path.stem for path in (run.path / "features").rglob("*.npy")) == sorted(
        f"{layer:03d}" for layer in kept for _ in ("base", "expert", "merged")
    )


@pytest.mark.slow
def test_contributions_of_unselected_layers_still_count(world: World, finished: DriftRun, tmp_path: Path) -> None:
    spec = world.one_task(layers={"select": "final"}, metrics={"jacobian": {"samples": 2}}, heads=None)
    whole = dl.analyze({**spec, "layers": {"select": "blocks"}}, out=tmp_path / "whole", progress="none")
    narrow = dl.analyze(spec, out=tmp_path / "narrow", progress="none")
    expected = whole.layers(variant="merged").iloc[[0, -1]].reset_index(drop=True)
    pd.testing.assert_frame_equal(narrow.layers(variant="merged"), expected)


@pytest.mark.parametrize("pool", few(["mean", "last", "all"], ["mean"]))
def test_pools_take_the_vector_they_name(world: World, library: Library, tmp_path: Path, pool: str) -> None:
    take = {
        "mean": lambda state: state.mean(dim=1),
        "last": lambda state: state[:, -1],
        "all": lambda state: state.flatten(1),
    }[pool]
    run = dl.analyze(world.spec(layers={"pool": pool}, **QUICK), out=tmp_path / "run", progress="none")
    for task in TASKS:
        pairs = zip(library.states(task, "merged"), library.states(task, task), strict=True)
        pooled = [[state if state.dim() == 2 else take(state) for state in pair] for pair in pairs]
        drift = [float((merged - expert).norm(dim=1).mean()) for merged, expert in pooled]
        cosine = [float(torch.cosine_similarity(merged, expert, dim=1).mean()) for merged, expert in pooled]
        np.testing.assert_allclose(column(run, "drift_l2_mean", task), drift, rtol=FLOAT32)
        np.testing.assert_allclose(column(run, "cos_mean", task), cosine, rtol=FLOAT32)


@each_task
def test_cka_is_the_debiased_one_of_the_pooled_features(library: Library, finished: DriftRun, task: str) -> None:
    pairs = zip(library.states(task, "merged"), library.states(task, task), strict=True)
    features = [[state if state.dim() == 2 else state[:, 0] for state in pair] for pair in pairs]
    expected = [_debiased_cka(*pair) for pair in features[1:]]
    np.testing.assert_allclose(column(finished, "cka", task)[1:], expected, rtol=1e-3, atol=1e-4)
    # The class token is the same for all samples behind the stem: there is nothing to correlate.
    assert np.isnan(column(finished, "cka", task)[0])


def _debiased_cka(x: torch.Tensor, y: torch.Tensor) -> float:
    """From sample Gram matrices without their diagonals (Song et al., 2012)."""
    gram, other = (features @ features.T - torch.diag((features**2).sum(dim=1)) for features in (x, y))
    n = len(gram)

    def hsic(a: torch.Tensor, b: torch.Tensor) -> float:
        cross = float((a @ b).trace()) + float(a.sum() * b.sum()) / (n - 1) / (n - 2)
        return cross - 2 / (n - 2) * float((a @ b).sum())

    return hsic(gram, other) / np.sqrt(hsic(gram, gram) * hsic(other, other))


def test_a_merged_model_that_is_the_expert_has_no_drift_and_no_ratios(world: World, tmp_path: Path) -> None:
    expert = str(world.weights(TASKS[0]))
    run = dl.analyze(world.one_task(merge=None, merged={"weights": expert}), out=tmp_path / "run", progress="none")
    rows = run.layers(variant="merged")
    for name in (
        "drift_l2_mean",
        "drift_l2_q90",
        "drift_rel",
        "drift_vs_base",
        "mismatch_l2_mean",
        "propagation_l2_mean",
    ):
        assert (rows[name] == 0).all(), name
    np.testing.assert_allclose(rows["cos_mean"], 1, atol=1e-6)
    for name in (
        *("cross_term", "amplification", "gain_excess_mean", "mismatch_ratio_mean", "growth_holds"),
        *("final_share", "prefix_share", "remainder_share", "closure_error", "jacobian_error"),
    ):
        assert rows[name].isna().all(), name
    outputs = run.outputs(variant="merged")
    assert (outputs["score_drift_l2"] == 0).all() and not outputs["flipped"].any()
    backbone = run.params(variant="merged").query("scope == 'backbone'")
    assert backbone["cos"].tolist() == pytest.approx([1]) and backbone["norm_ratio"].tolist() == pytest.approx([1])


def test_stored_features_are_the_expert_plus_the_drift(library: Library, finished: DriftRun) -> None:
    for model, variant in ((TASKS[0], "expert"), ("merged", "merged"), ("base", "base")):
        stored = finished.features(TASKS[0], variant, "final")
        assert stored.dtype == np.float16
        np.testing.assert_allclose(stored, library.states(TASKS[0], model)[-1], rtol=1e-3, atol=1e-3)


def test_the_manifest_says_what_was_computed_and_how(world: World, finished: DriftRun) -> None:
    manifest = finished.manifest
    assert manifest.deterministic and manifest.dtype == "float32" and manifest.device == "cpu"
    assert set(manifest.models) == {"base", "merged", *(f"expert:{task}" for task in TASKS)}
    digests = [model.digest for model in manifest.models.values()]
    assert len(set(digests)) == len(digests)
    tower = sum(tensor.numel() for name, tensor in world.state("base").items() if name.startswith("visual."))
    assert {model.parameters for model in manifest.models.values()} == {tower}
    phases = [
        "merge",
        "digests",
        *(f"analyze:{t}" for t in TASKS),
        *(f"evaluate:{t}" for t in TASKS),
        "params",
        *(f"explain:{t}" for t in TASKS),
    ]
    assert list(manifest.phases) == phases
    assert sorted(finished.resources()["phase"]) == sorted(phases)
    assert manifest.classes == {task: list(CLASSES[task]) for task in TASKS}


@pytest.mark.slow
def test_a_merge_that_was_cancelled_on_its_way_goes_on(world: World, light: DriftRun, tmp_path: Path) -> None:
    spec, out, token = world.spec(metrics={"jacobian": False}), tmp_path / "run", CancelToken()

    def stop(event: ProgressEvent) -> None:
        if event.phase == "merge" and event.done == 3:
            token.cancel()

    with pytest.raises(Cancelled) as caught:
        analyze(spec, AnalysisRequest(out=out, attribution=False), JobContext(on_progress=stop, cancel=token))
    assert caught.value.hint.endswith(f"`{resume_command(out)} --no-attribution` resumes.")
    assert find_runs(out)[0].state == "cancelled" and not list(out.rglob("*.safetensors"))
    run = analyze(spec, AnalysisRequest(out=out, resume=True))
    pd.testing.assert_frame_equal(run.layers(), light.layers())
