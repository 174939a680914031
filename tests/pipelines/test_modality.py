"""What a model reads is asked of its family: a toy family of texts, opened from a spec and live."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from driftlens.config.requests import AnalysisRequest, LiveSettings, Modules
from driftlens.config.spec import load_spec
from driftlens.engine.walk import capture
from driftlens.experiment.study_loading import open_study
from driftlens.models.architecture import Architecture, ArchitectureRequest, loaders
from driftlens.models.chain import (
    Layer,
    LayerCall,
    LayerChain,
    Modality,
    Parameters,
    Role,
    SideInputs,
    State,
    Tap,
    WeightSlot,
    adapters,
)
from driftlens.models.heads import ScoreMap
from driftlens.models.preprocessing import Preprocess
from driftlens.pipelines.analyze import analyze
from driftlens.pipelines.evaluation import score_variants
from driftlens.pipelines.in_memory import study_of_modules
from driftlens.runs.run import DriftRun
from driftlens.utils.distributed import JobContext, Permissions, ProgressReporter
from tests.quick import temporary_entries
from tests.zoo.hand_made import TinyStack

LENGTH = 6
LOADER = "python:toy.letters:load"
TASKS = ("names", "words")


class Letters(nn.Module):
    """Ids of letters [n, t] -> features [n, 4]."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.letters = nn.Embedding(26, 4)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(2))
            self.norm = nn.LayerNorm(4)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.letters(ids)
        for block in self.blocks:
            hidden = block(hidden)
        features: Tensor = self.norm(hidden).mean(dim=1)
        return features


def spelled(samples: Sequence[tuple[str, str]]) -> Tensor:
    return torch.tensor([[ord(letter) - ord("a") for letter in text[:LENGTH]] for text, _ in samples])


def never_wrong(head: ScoreMap, features: Tensor, labels: Sequence[str]) -> Tensor:
    return torch.tensor([label == "right" for label in labels])


TEXT = Modality("text", pool="mean", metric="share_of_rights", is_right=never_wrong)


def _stem(parameters: Parameters, state: State, side: SideInputs, tap: Tap | None = None) -> State:
    return {"hidden": F.embedding(state["ids"], parameters["letters.weight"])}


def _block(at: int, parameters: Parameters, state: State, side: SideInputs, tap: Tap | None = None) -> State:
    weight, bias = parameters[f"blocks.{at}.0.weight"], parameters[f"blocks.{at}.0.bias"]
    return {"hidden": F.gelu(F.linear(state["hidden"], weight, bias))}


def _head(parameters: Parameters, state: State, side: SideInputs, tap: Tap | None = None) -> State:
    normed = F.layer_norm(state["hidden"], (4,), parameters["norm.weight"], parameters["norm.bias"])
    return {"hidden": normed.mean(dim=1)}


def _library_states(module: Any, ids: Tensor) -> list[State]:
    hidden = [module.letters(ids)]
    for block in module.blocks:
        hidden.append(block(hidden[-1]))
    return [{"hidden": one} for one in (*hidden, module(ids))]


class LettersAdapter:
    name = "toy_letters"

    def matches(self, module: nn.Module) -> bool:
        return isinstance(module, Letters)

    def chain(self, module: Any) -> LayerChain:
        weights = tuple(module.state_dict())

        def layer(index: int, role: Role, part: str, call: LayerCall) -> Layer:
            slots = {name: WeightSlot(name) for name in weights if name.startswith(f"{part}.")}
            return Layer(index, role, part, slots, call)

        blocks = [layer(at + 2, "block", f"blocks.{at}", partial(_block, at)) for at in range(len(module.blocks))]
        return LayerChain(
            architecture=self.name,
            layers=(
                layer(1, "stem", "letters", _stem),
                *blocks,
                layer(len(blocks) + 2, "head", "norm", _head),
            ),
            start=lambda ids: ({"ids": ids}, SideInputs()),
            library_states=_library_states,
            modality=TEXT,
        )


def load_letters(request: ArchitectureRequest) -> Architecture:
    module = Letters().eval()
    return Architecture(
        LOADER,
        request.source,
        module,
        LettersAdapter().chain(module),
        preprocess=Preprocess("toy spelling", spelled),
    )


@pytest.fixture(autouse=True)
def family() -> Iterator[None]:
    with temporary_entries(adapters), temporary_entries(loaders):
        adapters.register("toy_letters")(LettersAdapter())
        loaders.register(LOADER)(load_letters)
        yield


@pytest.fixture
def spec(tmp_path: Path) -> dict[str, Any]:
    """Two tasks of texts; the weights of base and experts lie on disk."""
    for seed, name in enumerate(("base", *TASKS)):
        save_file(Letters(seed).state_dict(), tmp_path / f"{name}.safetensors")
    data: dict[str, Any] = {"defaults": {"n": 3, "n_diagnosis": 4, "batch_size": 2}}
    for shift, task in enumerate(TASKS):
        for split, count in (("calibration", 3), ("test", 5)):
            texts = [
                "".join(chr(ord("a") + (7 * row + shift + at) % 26) for at in range(LENGTH)) for row in range(count)
            ]
            rows = [json.dumps({"input": text, "target": text[::-1]}) for text in texts]
            (tmp_path / f"{task}.{split}").write_text("\n".join(rows))
        data[task] = {
            "kind": "jsonl",
            "calibration": str(tmp_path / f"{task}.calibration"),
            "test": str(tmp_path / f"{task}.test"),
        }
    save_file({"rows": torch.eye(4)}, tmp_path / "heads.safetensors")
    head = {
        "file": str(tmp_path / "heads.safetensors"),
        "tensor": "rows",
        "logit_scale": 2.0,
        "classes": ["right", "wrong", "other", "none"],
    }
    return {
        "version": 1,
        "name": "letters",
        "architecture": {"loader": LOADER},
        "base": {"weights": str(tmp_path / "base.safetensors")},
        "experts": {task: {"weights": str(tmp_path / f"{task}.safetensors")} for task in TASKS},
        "merge": {"method": "task_arithmetic", "scaling": 0.3},
        "data": data,
        "heads": dict.fromkeys(TASKS, head),
        "metrics": {"jacobian": {"samples": 2, "nodes": 4, "max_nodes": 4}},
        "compute": {"device": "cpu"},
    }


CPU = Permissions(device="cpu")


def drift_of(run: DriftRun, layer: int) -> float:
    rows = run.layers(task="names", variant="base")
    return float(rows[rows["layer"] == layer]["drift_l2_mean"].iloc[0])


@pytest.mark.slow
def test_texts_are_analysed_and_pooled_as_their_family_says(spec: dict[str, Any], tmp_path: Path) -> None:
    run = analyze(spec, AnalysisRequest(out=tmp_path / "run"), JobContext(access=CPU))
    study, _ = open_study(load_spec(spec), access=CPU)
    samples = study.tasks["names"].diagnosis
    ids = samples.load(range(len(samples)))
    with torch.no_grad():
        base, expert = (Letters(seed).blocks[0](Letters(seed).letters(ids)).mean(dim=1) for seed in (0, 1))
    assert drift_of(run, 2) == pytest.approx(float((base - expert).norm(dim=1).mean()), rel=1e-5)
    assert load_spec(run.path / "spec.yaml").layers.pool == "mean"
    spec["layers"] = {"pool": "cls"}
    assert drift_of(
        analyze(spec, AnalysisRequest(out=tmp_path / "first"), JobContext(access=CPU)), 2
    ) != pytest.approx(drift_of(run, 2), rel=1e-2)


def test_answers_are_judged_as_the_family_says(spec: dict[str, Any]) -> None:
    study, _ = open_study(load_spec(spec), access=CPU)
    at_hand = study.tasks["names"]
    assert at_hand.test is None, "texts without labels have no accuracy"
    labels = ("right", "wrong", "right", "right")
    labelled = dataclasses.replace(at_hand, test=dataclasses.replace(at_hand.diagnosis, labels=labels))
    study = dataclasses.replace(study, tasks={**study.tasks, "names": labelled})
    (row,) = score_variants(study, "names", ["expert"], ProgressReporter()).tables["accuracy"]
    assert (row["metric"], row["value"], row["n"]) == ("share_of_rights", 0.75, 4)


def test_live_models_pool_as_their_family_says() -> None:
    ids = torch.arange(24).reshape(4, 6)
    live = study_of_modules(Modules(Letters(0), {"t": Letters(1)}, {"t": ids}), LiveSettings())
    assert live.settings.pool == "mean"
    pixels = torch.zeros(2, 3, 16, 16)
    assert (
        study_of_modules(Modules(TinyStack(), {"t": TinyStack()}, {"t": pixels}), LiveSettings()).settings.pool
        == "cls"
    )
    block = next(vectors for layer, vectors in capture(Letters(0), [ids]) if layer.role == "block")
    with torch.no_grad():
        wanted = Letters(0).blocks[0](Letters(0).letters(ids)).mean(dim=1)
    torch.testing.assert_close(block, wanted)
