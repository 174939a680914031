"""Cost of residual calibration relative to FeatCal: CPU time and peak memory."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.calibration import BLOCKS, _models
from benchmarks.calibration_floor import Rates, elementwise_seconds, product_rates, residual_floor_seconds
from benchmarks.figures import record
from driftlens.calibration.calibrator import Calibrator
from driftlens.calibration.featcal import FeatCal
from driftlens.calibration.residual import ResidualCal
from driftlens.checkpoints.tensor_sources import module_source
from driftlens.data.samples import Batch
from driftlens.engine.calibrating import CalibrationContext
from driftlens.engine.pool import ModelPool
from driftlens.engine.sites import select_sites
from driftlens.engine.walk import InMemoryBatches
from driftlens.models.chain import adapters

BATCH = 32
ROUNDS = 2


def run(device: str) -> None:
    """Record CPU time and memory of residual calibration relative to FeatCal, by shape of the models."""
    for shape in SHAPES:
        _cost(shape, device)


def _cost(shape: str, device: str) -> None:
    """Record both methods in turns in one process, the least of their times; each in one of its own for its peak."""
    models, adapter, pixels = SHAPES[shape](torch.device(device))
    times: dict[str, list[float]] = {name: [] for name in METHODS}
    before = product_rates(torch.device(device))
    for _ in range(ROUNDS):
        for name, method in METHODS.items():
            times[name].append(_calibration_seconds(models, adapter, pixels, method()))
    rates = Rates.mean_of((before, product_rates(torch.device(device))))
    peaks = {}
    for name in METHODS:
        command = [sys.executable, "-m", "benchmarks.residual", shape, name, device]
        peaks[name] = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    (least, mine), (low, high) = ([min(of) for of in times.values()], list(peaks.values()))
    slower = f"{mine / least:.2f} times slower; {high / low:.2f} times the peak memory"
    record("residual", f"residual calibration against FeatCal, {shape}", slower, device=device)
    if shape == WIDE:
        floor = residual_floor_seconds(len(pixels), len(pixels["0"]), BLOCKS, rates)
        # Three passes of the expert and one of the calibrated model; backward passes are left out.
        passes = 4 * len(pixels) * len(pixels["0"]) / 16 * BLOCKS
        with_steps = floor + passes * elementwise_seconds(torch.device(device)).block
        mine /= torch.get_num_threads() if device == "cpu" else 1  # as rates of products are measured
        value = f"{mine / floor:.2f} times ({mine:.1f} s against {floor:.1f} s, of all threads); "
        value += f"{mine / with_steps:.2f} times with elementwise steps"
        figure = f"residual calibration against its arithmetic floor, {shape}"
        record("residual", figure, value, "at most 1.3 times", device=device)


def _small(device: torch.device) -> _Shape:
    """Return 6 blocks of width 192 on 32 x 32 pixels, 4 tasks of 64 samples, random weights."""
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
WIDE = f"{BLOCKS} blocks of ViT-B/32, 8 tasks of 16 images"
SHAPES: dict[str, Callable[[torch.device], _Shape]] = {
    "6 blocks of width 192, 4 tasks of 64 images": _small,
    WIDE: _wide,
}
METHODS: dict[str, Callable[[], Calibrator]] = {"featcal": FeatCal, "residual": ResidualCal}


def _calibration_seconds(
    models: dict[str, nn.Module], adapter: str, pixels: dict[str, Tensor], method: Calibrator
) -> float:
    """Return the CPU seconds of one calibration."""
    merged = models["merged"]
    chain, device = adapters[adapter].chain(merged), next(merged.parameters()).device
    sources = {name: module_source(module, name) for name, module in models.items()}
    pool = ModelPool(chain, merged, sources, device=device, dtype=torch.float32)
    samples = {task: InMemoryBatches(lambda x=x: _batches(x)) for task, x in pixels.items()}
    started = time.process_time()
    for _ in method.calibrate(CalibrationContext(pool, samples, select_sites(chain, update=method.update))):
        pass
    return time.process_time() - started


def _batches(x: Tensor) -> list[Batch]:
    return [Batch(at, min(at + BATCH, len(x)), x[at : at + BATCH]) for at in range(0, len(x), BATCH)]


if __name__ == "__main__":  # the peak of one calibration
    shape, method, device = sys.argv[1:]
    models, adapter, pixels = SHAPES[shape](torch.device(device))
    _calibration_seconds(models, adapter, pixels, METHODS[method]())
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
