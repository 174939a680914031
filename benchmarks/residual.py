"""Residual calibration beside FeatCal on real images: test accuracy, KL to the experts, time and memory."""

from __future__ import annotations

import copy
import pathlib
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.calibration import _models
from driftlens.calibration.calibrator import Calibrator
from driftlens.calibration.featcal import FeatCal
from driftlens.calibration.residual import ResidualCal
from driftlens.checkpoints.tensor_sources import module_source
from driftlens.data.samples import Batch
from driftlens.engine.calibrating import CalibrationContext
from driftlens.engine.pool import ModelPool
from driftlens.engine.sites import select_sites
from driftlens.engine.walk import InMemoryBatches
from driftlens.models.chain import adapters, updated_tensors

REAL = pathlib.Path(__file__).resolve().parents[2] / "shared" / "real"
TASKS = ("clothing10", "fashion_mnist", "omniglot_alphabets", "sign_digits")
SAMPLES, DRAWS, SCALE, BATCH = 64, 5, 0.3, 32
ROUNDS = 2
LOGIT_SCALE = 16.834815979003906
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class Data:
    """One task: pixels to draw calibration samples from, pixels and labels to test on, class embeddings."""

    train: Tensor
    test: Tensor
    labels: Tensor
    head: Tensor


def run(device: str, draws: int = DRAWS, methods: Sequence[Calibrator] = (FeatCal(), ResidualCal())) -> str:
    """A line per method on real images, and one per shape: time and memory over FeatCal's."""
    where = torch.device(device)
    lines = _real(where, draws, methods) if REAL.is_dir() else [f"residual: {REAL} is not there"]
    return "\n".join([*lines, *(_cost(name, device) for name in SHAPES if draws == DRAWS)])


def _cost(shape: str, device: str) -> str:
    """Both methods in turns in one process, the least of their times; each in one of its own for its peak."""
    models, adapter, pixels = SHAPES[shape](torch.device(device))
    times: dict[str, list[float]] = {name: [] for name in METHODS}
    for _ in range(ROUNDS):
        for name, method in METHODS.items():
            times[name].append(_calibrated(models, adapter, pixels, method())[1])
    peaks = {}
    for name in METHODS:
        command = [sys.executable, "-m", "benchmarks.residual", shape, name, device]
        peaks[name] = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    (least, mine), (low, high) = ([min(of) for of in times.values()], list(peaks.values()))
    return (
        f"  {shape}: {mine:.1f} s of the processors, {mine / least:.2f} times FeatCal's {least:.1f}; "
        f"peak {high:.2f} GiB, {high / low:.2f} times its {low:.2f}"
    )


def _small(device: torch.device) -> _Shape:
    """The shape of shared/real: 6 blocks of width 192 on 32 x 32 pixels, 4 tasks of 64 samples, random weights."""
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    config = CLIPVisionConfig(
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=3,
        image_size=32,
        patch_size=8,
        projection_dim=128,
    )
    names = ["base", "merged", *(f"expert:{task}" for task in range(4))]
    models = {name: CLIPVisionModelWithProjection(config).to(device).eval() for name in names}
    return models, "hf_clip_vit", {str(task): torch.randn(64, 3, 32, 32, device=device) for task in range(4)}


def _wide(device: torch.device) -> _Shape:
    pixels = {str(task): torch.randn(16, 3, 224, 224, device=device) for task in range(8)}
    return _models(8, device), "open_clip_vit", pixels


_Shape = tuple[dict[str, nn.Module], str, dict[str, Tensor]]
SHAPES: dict[str, Callable[[torch.device], _Shape]] = {
    "shape of shared/real, 4 x 64": _small,
    "ViT-B/32, 8 x 16": _wide,
}
METHODS: dict[str, Callable[[], Calibrator]] = {"featcal": FeatCal, "residual": ResidualCal}


def _real(device: torch.device, draws: int, methods: Sequence[Calibrator]) -> list[str]:
    from transformers import CLIPVisionModelWithProjection

    names = {"base": "base"} | {f"expert:{task}": task for task in TASKS}
    models: dict[str, nn.Module] = {
        name: CLIPVisionModelWithProjection.from_pretrained(REAL / "hf" / folder).to(device).eval()
        for name, folder in names.items()
    }
    models["merged"] = _task_arithmetic(models)
    data = {task: _data(task, device) for task in TASKS}
    lines = [f"residual, {SAMPLES} samples a task: merged {_shown([_judged(models['merged'], models, data)])}"]
    for method in methods:
        found, spent = [], 0.0
        for draw in range(draws):
            generator = torch.Generator().manual_seed(draw)
            pixels = {
                task: of.train[torch.randperm(len(of.train), generator=generator)[:SAMPLES]]
                for task, of in data.items()
            }
            model, seconds = _calibrated(models, "hf_clip_vit", pixels, method)
            found.append(_judged(model, models, data))
            spent += seconds / draws
        lines.append(f"  {method}: {_shown(found)}, {spent:.2f} s of the processors a draw")
    return lines


def _calibrated(
    models: dict[str, nn.Module], adapter: str, pixels: dict[str, Tensor], method: Calibrator
) -> tuple[nn.Module, float]:
    merged = models["merged"]
    chain, device = adapters[adapter].chain(merged), next(merged.parameters()).device
    sources = {name: module_source(module, name) for name, module in models.items()}
    pool = ModelPool(chain, merged, sources, device=device, dtype=torch.float32)
    samples = {task: InMemoryBatches(lambda x=x: _batches(x)) for task, x in pixels.items()}
    started = time.process_time()
    layers = list(method.calibrate(CalibrationContext(pool, samples, select_sites(chain, update=method.update))))
    seconds = time.process_time() - started
    updates = {(layer.layer, name): value for layer in layers for name, value in layer.updates.items()}
    model = copy.deepcopy(merged)
    state: Any = model.state_dict()
    for key, value in updated_tensors(chain, updates, sources["merged"]).items():
        state[key].copy_(value)
    return model, seconds


def _batches(x: Tensor) -> list[Batch]:
    return [Batch(at, min(at + BATCH, len(x)), x[at : at + BATCH]) for at in range(0, len(x), BATCH)]


@torch.no_grad()
def _task_arithmetic(models: dict[str, nn.Module]) -> nn.Module:
    merged = copy.deepcopy(models["base"])
    experts = [dict(module.named_parameters()) for name, module in models.items() if name != "base"]
    for (key, value), start in zip(merged.named_parameters(), models["base"].parameters(), strict=True):
        for expert in experts:
            value += SCALE * (expert[key] - start)
    return merged


def _data(task: str, device: torch.device) -> Data:
    from safetensors.torch import load_file

    stored = np.load(REAL / "data" / f"{task}.npz")

    def pixels(name: str) -> Tensor:
        x = torch.from_numpy(stored[name]).permute(0, 3, 1, 2).float() / 255
        return ((x - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]).to(device)

    labels = torch.from_numpy(stored["y_test"]).long().to(device)
    return Data(pixels("x_train"), pixels("x_test"), labels, load_file(REAL / "heads.safetensors")[task].to(device))


@torch.no_grad()
def _judged(model: Any, models: dict[str, Any], data: dict[str, Data]) -> tuple[float, float]:
    """Mean over tasks of the test accuracy and of the KL divergence from the experts' answers."""
    found = []
    for task, of in data.items():
        own, theirs = (
            torch.cat([_scores(m, x, of.head) for x in of.test.split(256)]) for m in (model, models[f"expert:{task}"])
        )
        right = (own.argmax(1) == of.labels).double().mean()
        found.append((float(right), float((theirs.exp() * (theirs - own)).sum(1).mean())))
    return float(np.mean([a for a, _ in found])), float(np.mean([k for _, k in found]))


def _scores(model: Any, x: Tensor, head: Tensor) -> Tensor:
    features = nn.functional.normalize(model(pixel_values=x).image_embeds, dim=-1)
    return (LOGIT_SCALE * features @ head.mT).log_softmax(1)


def _shown(found: list[tuple[float, float]]) -> str:
    parts = [np.array(values) for values in zip(*found, strict=True)]
    error = [part.std(ddof=1) / len(part) ** 0.5 if len(part) > 1 else 0.0 for part in parts]
    return f"accuracy {parts[0].mean():.4f} +- {error[0]:.4f}, KL {parts[1].mean():.3f} +- {error[1]:.3f}"


if __name__ == "__main__":  # the peak of one calibration
    shape, method, device = sys.argv[1:]
    models, adapter, pixels = SHAPES[shape](torch.device(device))
    _calibrated(models, adapter, pixels, METHODS[method]())
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
