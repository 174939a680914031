"""Cost of FeatCal, compared with a direct implementation and with the arithmetic floor."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import driftlens as dl
from benchmarks.calibration_floor import Rates, elementwise_seconds, floor_seconds, product_rates
from benchmarks.figures import record
from benchmarks.reference_calibration import Clock, Weights, calibrate as reference
from driftlens.calibration.featcal import FeatCal
from driftlens.checkpoints.tensor_sources import module_source
from driftlens.data.samples import Batch
from driftlens.engine.calibrating import CalibratedLayer, CalibrationContext
from driftlens.engine.pool import ModelPool
from driftlens.engine.sites import select_sites
from driftlens.engine.walk import InMemoryBatches, check_closure
from driftlens.front import estimators
from driftlens.models.chain import Layer, adapters

BLOCKS = 12
BATCH = 32  # the default of a spec
ROUNDS = 3
ON_HOST, ON_ACCELERATOR = ((8, 16), (2, 64)), ((8, 256),)  # tasks, samples of each, features already decoded


def run(device: str) -> None:
    """Record ratios to the reference and to the arithmetic floor, and how exact the weights are.

    Times are those of float32, medians of some rounds, each at the rate of products around it: a machine's speed may
    change by a fifth between two runs. Exact weights are the reference's own in float64, so that its rounding isn't
    ours.
    """
    where = torch.device(device)
    cases = ON_HOST if where.type == "cpu" else ON_ACCELERATOR
    for tasks, samples in cases:
        _case(tasks, samples, where)


def _case(tasks: int, samples: int, device: torch.device) -> None:
    models = _models(tasks, device)
    generator = torch.Generator().manual_seed(0)
    pixels = {str(task): torch.randn(samples, 3, 224, 224, generator=generator).to(device) for task in range(tasks)}
    candidates = {
        "ours": _calibrated,
        "bare": functools.partial(_calibrated, objectives=False),
        "fit": _fitted,
        "theirs": reference,
    }
    turns: dict[str, list[tuple[_Seconds, Rates]]] = {name: [] for name in candidates}
    results: dict[str, Any] = {}
    measured = [product_rates(device)]
    for _ in range(ROUNDS):  # in turns, so that both meet memory that the process has touched before
        for name, candidate in candidates.items():
            seconds, results[name] = _timed(device, functools.partial(candidate, models, pixels))
            measured.append(product_rates(device))
            turns[name].append((seconds, Rates.mean_of(measured[-2:])))
    rates = Rates.mean_of(measured)
    ours, bare, fit, theirs = (
        statistics.median_low(seconds.at_rate(rates, of) for seconds, of in turns[name]) for name in candidates
    )
    layers, blocks = results["ours"], results["theirs"]
    floor = floor_seconds(tasks, samples, BLOCKS, rates)
    with_objectives = floor_seconds(tasks, samples, BLOCKS, rates, objectives=True)
    alone = elementwise_seconds(device)
    # The expert and twice the merged model, but for the last block.
    steps = tasks * (alone.block * (3 * BLOCKS - 1) * samples / 16 + alone.sums * BLOCKS)
    exact = _in_float64(models, pixels, device)
    case = f"FeatCal, {tasks} tasks of {samples} images, {BLOCKS} blocks of ViT-B/32"
    gaps = [_largest_gap(weights, exact) for weights in ([layer.updates for layer in layers], blocks)]
    figures = {
        "with objectives, against the reference": ours.ratios(theirs, with_objectives, steps),
        "without objectives, against the reference": bare.ratios(theirs, floor, steps),
        "`FeatCal.fit` with its checks, against the reference": fit.ratios(theirs, with_objectives, steps),
        "closure check within `FeatCal.fit`": f"{1 - fit.outside / fit.total:.1%}",
        "arithmetic floor; with objectives": f"{floor:.1f} s; {with_objectives:.1f} s at {rates.float32:.0f} (float64: "
        f"{rates.float64:.0f}) G products/s; elementwise steps {steps:.1f} s",
        "largest relative error of weights; of the reference's": "{:.1e}; {:.1e}".format(*gaps),
    }
    targets = {"`FeatCal.fit` with its checks, against the reference": "at most 1.1 times the floor"}
    targets["closure check within `FeatCal.fit`"] = "at most 3 %"
    for name, value in figures.items():
        record("calibration", f"{case}: {name}", value, targets.get(name, ""), device=str(device))


@dataclass(frozen=True, order=True)
class _Seconds:
    total: float
    """Of the processors, which a busy machine disturbs less."""
    outside: float
    """Of `total`, outside the forward passes of stem and blocks; of `fit`, outside its closure check."""

    def at_rate(self, rates: Rates, measured: Rates) -> _Seconds:
        """Return the seconds on a machine of these rates of products, from those measured."""
        scale = measured.float32 / rates.float32
        return _Seconds(self.total * scale, self.outside * scale)

    def ratios(self, reference: _Seconds, floor: float, steps: float) -> str:
        """Return the ratios of CPU time to the reference's, in all and outside forward passes, and to the floor.

        Args:
            reference: the reference's seconds.
            floor: seconds of necessary products.
            steps: seconds of necessary elementwise steps.
        """
        outside = reference.outside / self.outside
        faster = f"{reference.total / self.total:.2f} times faster (outside forward passes {outside:.2f})"
        with_steps = f"{self.total / (floor + steps):.2f} with elementwise steps"
        return f"{faster}, {self.total / floor:.2f} times the floor ({with_steps})"


def _timed(device: torch.device, work: Callable[[Clock], Any]) -> tuple[_Seconds, Any]:
    clock = Clock(device)
    started = clock.now()
    found = work(clock)
    total = clock.now() - started
    return _Seconds(total, total - clock.seconds), found


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


def _fitted(models: dict[str, nn.Module], pixels: dict[str, Tensor], clock: Clock) -> Any:
    """The public call, on live modules; the clock measures its closure check."""
    experts = {task: models[f"expert:{task}"] for task in pixels}
    device = str(next(iter(pixels.values())).device)
    with patch.object(estimators, "check_closure", lambda *given: clock(lambda: check_closure(*given))):
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
