"""The Python front door: specs, live modules, and what it costs to import."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import driftlens as dl
from driftlens.runs.run import DriftRun
from driftlens.utils.errors import (
    DataError,
    DriftLensError,
    IncompatibleModelsError,
    NumericsError,
    SpecError,
)
from tests.families import OPEN_CLIP, STACK
from tests.pipelines.processes import python
from tests.quick import few
from tests.reference.drift import drift_rows, stack_steps
from tests.zoo.cases import Stack, perturbed, with_seed
from tests.zoo.world import LOGIT_SCALE, TASKS, World, clip, merged_weights, pixels

JACOBIAN = dl.JacobianSettings(samples=2)


def samples(width: int = 5, n: int = 6) -> Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(0))


def stacks() -> dict[str, nn.Module]:
    base = with_seed(Stack)().eval()
    return {"base": base, "merged": perturbed(base, 1), "expert": perturbed(base, 2)}


def analyzed(modules: dict[str, nn.Module], out: Path, **options: Any) -> DriftRun:
    given = {"data": {"task": samples()}, "blocks": "blocks", "progress": "none"} | options
    base, merged, expert = modules["base"], modules["merged"], modules["expert"]
    return dl.analyze(base=base, merged=merged, experts={"task": expert}, out=out, **given)


@pytest.mark.slow
def test_runs_of_other_data_under_the_same_ids_are_not_called_paired(tmp_path: Path) -> None:
    modules = stacks()
    first = analyzed(modules, tmp_path / "first")
    again = analyzed(modules | {"merged": perturbed(modules["base"], 3)}, tmp_path / "again")
    other = analyzed(modules, tmp_path / "other", data={"task": samples() + 1})
    assert first.sample_ids("task") == other.sample_ids("task")
    assert dl.compare(first, again).tasks["drift_paired"].all()
    with pytest.raises(DataError, match="diagnosis samples of task"):
        dl.compare(first, other)
    assert not dl.compare(first, other, allow_mismatch=True).tasks["drift_paired"].any()


@pytest.mark.parametrize("scale", few([1e-30, 1e30], [1e-30]))
def test_numbers_scale_with_features_of_any_size(tmp_path: Path, scale: float) -> None:
    """Squares of such numbers leave float32, whose sums would be 0 or infinite; a power of two changes no bit."""
    exact = 2.0 ** round(math.log2(scale))

    def scaled(module: nn.Module, by: float) -> nn.Module:
        with torch.no_grad():
            for parameter in module.out.parameters():  # type: ignore[union-attr]
                parameter.mul_(by)
        return module

    runs = (
        analyzed({name: scaled(module, by) for name, module in stacks().items()}, tmp_path / f"{by:g}")
        for by in (1.0, exact)
    )
    usual, last = (run.layers(variant="merged").iloc[-1] for run in runs)
    lengths = ("drift_l2_mean", "drift_l2_std", "drift_l2_q90", "mismatch_l2_mean", "propagation_l2_mean")
    for column in (*lengths, "amplification"):  # what comes in is not scaled
        assert last[column] == usual[column] * exact, column
    for column in ("drift_rel", "drift_vs_base", "cos_mean", "cross_term", "closure_error"):
        assert last[column] == pytest.approx(usual[column], rel=1e-12), column


def test_samples_that_are_one_to_the_model_are_told(tmp_path: Path) -> None:
    (told,) = analyzed(stacks(), tmp_path / "run", data={"task": torch.ones(6, 5)}).manifest.notices
    assert told.startswith("task: all samples have the same final feature")
    assert not analyzed(stacks(), tmp_path / "other").manifest.notices


@OPEN_CLIP
@pytest.mark.shows("live", "drift")
def test_live_open_clip_modules_give_the_rows_of_their_checkpoints(
    world: World, finished: DriftRun, tmp_path: Path
) -> None:
    modules = {name: clip(world.state(name)).visual for name in world.names}
    merged = clip(merged_weights(world)).visual
    data = {task: pixels(world.data(task), finished.sample_ids(task)).float() for task in TASKS}
    run = dl.analyze(
        base=modules["base"],
        merged=merged,
        experts={task: modules[task] for task in TASKS},
        data=data,
        out=tmp_path / "run",
        jacobian=JACOBIAN,
        cka=True,
        progress="none",
    )
    columns = [
        "task",
        "variant",
        "layer",
        "role",
        "n",
        "drift_l2_mean",
        "cos_mean",
        "mismatch_l2_mean",
        "drift_vs_base",
    ]
    pd.testing.assert_frame_equal(run.layers()[columns], finished.layers()[columns], rtol=1e-4, atol=1e-6)


@STACK
@pytest.mark.shows("live", "drift", "attribution")
def test_a_plain_module_and_a_loader_give_the_rows_of_the_module_itself(tmp_path: Path) -> None:
    modules, inputs = stacks(), samples()
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    loader = DataLoader(TensorDataset(inputs, labels), batch_size=4)
    run = analyzed(modules, tmp_path / "run", data={"task": loader}, jacobian=JACOBIAN)
    steps = [stack_steps(modules[name]) for name in ("merged", "expert")]
    rows = drift_rows(*steps, inputs)
    drift = [np.mean([sample[layer].drift.norm().item() for sample in rows]) for layer in range(len(rows[0]))]
    found = run.layers(variant="merged")
    np.testing.assert_allclose(found["drift_l2_mean"], drift, rtol=1e-4)
    assert found["path"].tolist()[1:-1] == ["blocks.0", "blocks.1", "blocks.2"]
    assert found["final_share"].sum() + found["remainder_share"].iloc[-1] == pytest.approx(1, abs=1e-9)
    assert run.samples(layer="final", variant="merged")["label"].tolist() == ["0", "1", "2", "0", "1", "2"]


def test_labels_and_a_head_give_accuracy(world: World, tmp_path: Path) -> None:
    task = TASKS[0]
    with np.load(world.data(task)) as arrays:
        rows = torch.from_numpy(arrays["y_test"])
    inputs = pixels(world.data(task), [f"test/{row}" for row in range(len(rows))]).float()
    embeddings = torch.nn.functional.normalize(samples(8, 3), dim=1)
    head = dl.Head(("0", "1", "2"), embeddings, LOGIT_SCALE)
    expert = clip(world.state(task)).visual
    run = dl.analyze(
        merged=clip(merged_weights(world)).visual,
        experts={task: expert},
        data={task: [(inputs, rows)]},
        heads={task: head},
        out=tmp_path / "run",
        progress="none",
    )
    with torch.no_grad():
        hits = (torch.nn.functional.normalize(expert(inputs), dim=1) @ embeddings.T).argmax(dim=1) == rows
    assert run.accuracy(variant="expert")["value"].tolist() == pytest.approx([hits.double().mean().item()])
    assert list(run.manifest.notices) == ["accuracy is measured on the diagnosis samples"]


@pytest.mark.parametrize("training", few([True, False], [True]))
def test_modules_are_left_as_they_were(tmp_path: Path, training: bool) -> None:
    modules = stacks()
    calls: list[str] = []
    for name, module in modules.items():
        module.train(training)
        module.blocks[1].eval()
        module.out.register_forward_hook(lambda *_, name=name: calls.append(name))
    before = {name: _fingerprint(module) for name, module in modules.items()}
    analyzed(modules, tmp_path / "run", jacobian=JACOBIAN)
    assert {name: _fingerprint(module) for name, module in modules.items()} == before
    assert all(parameter.grad is None for module in modules.values() for parameter in module.parameters())
    calls.clear()
    modules["merged"](samples())
    assert calls == ["merged"]


def _fingerprint(module: nn.Module) -> list[Any]:
    hooks = [(len(part._forward_hooks), len(part._forward_pre_hooks), part.training) for part in module.modules()]
    return [
        hooks,
        [(name, tensor.data_ptr(), tensor.sum().item()) for name, tensor in module.state_dict().items()],
    ]


class Noisy(Stack):
    """Dropout that forgets to ask whether the module is training."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(super().forward(x), p=0.5)


def test_a_module_that_answers_at_random_is_refused(tmp_path: Path) -> None:
    noisy = with_seed(Noisy)()
    modules = {name: perturbed(noisy, seed) for seed, name in enumerate(("base", "merged", "expert"))}
    with pytest.raises(NumericsError, match="Noisy is not deterministic: outputs for one batch"):
        analyzed(modules, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"experts": {"other": with_seed(Stack)()}}, SpecError, "Name each task in both"),
        ({"experts": {"task": nn.Linear(5, 4)}}, IncompatibleModelsError, "different classes"),
        ({"spec": "run.yaml"}, SpecError, "either a spec, or"),
        ({"experts": {"task": Stack(width=7)}}, IncompatibleModelsError, "has shape"),
        ({"experts": {"task": Stack(depth=1)}}, IncompatibleModelsError, "expert:task lacks 'blocks."),
        ({"experts": {"task": torch.compile(Stack())}}, IncompatibleModelsError, "compiled._orig_mod"),
        ({"experts": {1: Stack()}, "data": {1: samples()}}, SpecError, "the name 1 is not text"),
        ({"heads": {"tusk": nn.Linear(5, 4)}}, SpecError, "heads for .'tusk'. too"),
        ({"pool": "cl"}, SpecError, "^analyze: pool: .*cls"),
    ],
    ids=[
        "tasks differ",
        "classes differ",
        "spec and modules",
        "widths differ",
        "depths differ",
        "compiled",
        "number",
        "head",
        "pool",
    ],
)
def test_modules_that_do_not_belong_together_are_refused(
    tmp_path: Path, changes: dict[str, Any], error: type[DriftLensError], words: str
) -> None:
    modules = stacks()
    given: dict[str, Any] = {
        "merged": modules["merged"],
        "experts": {"task": modules["expert"]},
        "data": {"task": samples()},
    }
    with pytest.raises(error, match=words):
        dl.analyze(**{**given, "blocks": "blocks", "progress": "none", **changes}, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_importing_driftlens_imports_no_large_library() -> None:
    heavy = ["torch", "pandas", "numpy", "pydantic", "transformers", "typer"]
    script = f"import sys, driftlens; print([name for name in {heavy} if name in sys.modules])"
    assert python(script) == "[]\n"
