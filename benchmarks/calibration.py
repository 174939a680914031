"""What FeatCal costs, beside the obvious implementation and beside the arithmetic it can't do without."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import driftlens as dl
from benchmarks.calibration_floor import floor_seconds, product_rates
from benchmarks.reference_calibration import Clock, Weights, calibrate as reference
from driftlens.calibration.featcal import FeatCal
from driftlens.checkpoints.tensor_sources import module_source
from driftlens.data.samples import Batch
from driftlens.engine.calibrating import CalibratedLayer, CalibrationContext
from driftlens.engine.pool import ModelPool
from driftlens.engine.sites import select_sites
from driftlens.engine.walk import InMemoryBatches
from driftlens.models.chain import Layer, adapters

BLOCKS = 12
BATCH = 32  # the default of a spec
ROUNDS = 2
ON_HOST, ON_ACCELERATOR = ((8, 16), (2, 64)), ((8, 256),)  # tasks, samples of each, features already decoded


def run(device: str) -> str:
    """Some lines per case: ratios to the reference and to the floor, and how exact the weights are.

    Times are those of float32, the best of some rounds. Exact weights are the reference's own in float64, so that
    its rounding isn't ours.
    """
    where = torch.device(device)
    cases = ON_HOST if where.type == "cpu" else ON_ACCELERATOR
    return "\n".join(_case(tasks, samples, where) for tasks, samples in cases)


def _case(tasks: int, samples: int, device: torch.device) -> str:
    models = _models(tasks, device)
    generator = torch.Generator().manual_seed(0)
    pixels = {str(task): torch.randn(samples, 3, 224, 224, generator=generator).to(device) for task in range(tasks)}
    candidates = {
        "ours": _calibrated,
        "bare": functools.partial(_calibrated, objectives=False),
        "fit": _fitted,
        "theirs": reference,
    }
    best: dict[str, tuple[_Seconds, Any]] = {}
    before = product_rates(device)
    for _ in range(ROUNDS):  # in turns, so that both meet memory that the process has touched before
        for name, candidate in candidates.items():
            timed = _timed(device, lambda clock: candidate(models, pixels, clock))  # noqa: B023 - called at once
            best[name] = min(best.get(name, timed), timed, key=lambda found: found[0].total)
    rates = before.mean(product_rates(device))
    (ours, layers), (bare, _), (fit, _), (theirs, blocks) = (best[name] for name in candidates)
    floor = floor_seconds(tasks, samples, BLOCKS, rates)
    exact = _in_float64(models, pixels, device)
    return (
        f"FeatCal, {tasks} tasks x {samples} samples, {BLOCKS} ViT-B/32 blocks, reference {theirs}\n"
        f"  with objectives: {ours.beside(theirs, floor)}\n"
        f"  without, as the reference: {bare.beside(theirs, floor)}\n"
        f"  `dl.FeatCal().fit`, with its checks: {fit.total:.1f} s of the processors, "
        f"{theirs.total / fit.total:.2f} times faster than the reference\n"
        f"  arithmetic floor {floor:.1f} s at {rates.float32:.0f} (float64: {rates.float64:.0f}) G products/s; "
        f"largest |dW|/|W| of a site, against float64: "
        f"{_largest_gap([layer.updates for layer in layers], exact):.1e}, "
        f"reference {_largest_gap(blocks, exact):.1e}"
    )


@dataclass(frozen=True)
class _Seconds:
    wall: float
    total: float
    """Of the processors, which a busy machine disturbs less."""
    outside: float
    """Of `total`, outside the forward passes of stem and blocks."""

    def __str__(self) -> str:
        return (
            f"{self.wall:.1f} s on the wall, {self.total:.1f} s of the processors, {self.outside:.1f} s of them "
            "outside forward passes"
        )

    def beside(self, reference: _Seconds, floor: float) -> str:
        """These seconds, and how many times faster than the reference's and slower than the floor they are."""
        times = [getattr(reference, name) / getattr(self, name) for name in ("wall", "total", "outside")]
        faster = "{:.2f}, {:.2f} and {:.2f} times faster".format(*times)
        return f"{self}; {faster}, {self.total / floor:.2f} times the floor"


def _timed(device: torch.device, work: Callable[[Clock], Any]) -> tuple[_Seconds, Any]:
    clock = Clock(device)
    wall, started = time.perf_counter(), clock.now()
    found = work(clock)
    total = clock.now() - started
    return _Seconds(time.perf_counter() - wall, total, total - clock.seconds), found


def _calibrated(
    models: dict[str, nn.Module], pixels: dict[str, Tensor], clock: Clock, *, objectives: bool = True
) -> list[CalibratedLayer]:
    """As `driftlens calibrate` does it, with all inputs in memory; objectives are those of the history table."""
    chain = adapters["open_clip_vit"].chain(models["merged"])
    layers = tuple(_clocked(layer, clock) for layer in chain.layers)
    first = next(iter(pixels.values()))
    pool = ModelPool(
        dataclasses.replace(chain, layers=layers),
        models["merged"],
        {name: module_source(module, name) for name, module in models.items()},
        device=first.device,
        dtype=torch.float32,
    )
    samples = {task: InMemoryBatches(lambda x=x: _batches(x)) for task, x in pixels.items()}
    return list(FeatCal().calibrate(CalibrationContext(pool, samples, select_sites(chain), objectives=objectives)))


def _fitted(models: dict[str, nn.Module], pixels: dict[str, Tensor], _clock: Clock) -> Any:
    """The public call, on live modules."""
    experts = {task: models[f"expert:{task}"] for task in pixels}
    device = str(next(iter(pixels.values())).device)
    return dl.FeatCal().fit(models["merged"], models["base"], experts, pixels, batch_size=BATCH, device=device)


def _batches(pixels: Tensor) -> list[Batch]:
    return [
        Batch(i, i + len(part), part)
        for i, part in zip(range(0, len(pixels), BATCH), pixels.split(BATCH), strict=True)
    ]


def _clocked(layer: Layer, clock: Clock) -> Layer:
    def call(*arguments: Any) -> Any:
        return clock(lambda: layer.call(*arguments))

    return dataclasses.replace(layer, call=call)


def _in_float64(models: dict[str, nn.Module], pixels: dict[str, Tensor], device: torch.device) -> list[Weights]:
    """The reference's weights in float64; the models are converted in place, as nothing needs them any more."""
    doubled = {name: model.double() for name, model in models.items()}
    return reference(doubled, {task: x.double() for task, x in pixels.items()}, Clock(device))


def _largest_gap(found: Sequence[Mapping[str, Tensor]], exact: Sequence[Mapping[str, Tensor]]) -> float:
    return max(
        float((block[name].double() - value).norm() / value.norm())
        for block, wanted in zip(found, exact, strict=True)
        for name, value in wanted.items()
        if name.endswith(".weight")
    )


def _models(tasks: int, device: torch.device) -> dict[str, nn.Module]:
    """A random tower and others near it, as fine-tuning and merging leave them."""
    names = ["base", "merged", *(f"expert:{task}" for task in range(tasks))]
    return {name: _tower(seed).to(device) for seed, name in enumerate(names)}


@torch.no_grad()
def _tower(seed: int, blocks: int = BLOCKS) -> nn.Module:
    from open_clip.transformer import VisionTransformer

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tower = VisionTransformer(224, 32, 768, blocks, 12, 4.0, output_dim=512).eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in tower.parameters():
        parameter.add_(1e-3 * torch.randn(parameter.shape, generator=generator))
    return tower
