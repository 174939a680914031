"""Growth of CPU time with layers, width, tasks and samples, for diagnosis and calibrations: exponents, and a figure.

`python -m benchmarks.growth [--figure FILE]` doubles one size of a small image tower at a time.
"""

from __future__ import annotations

import argparse
import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import torch
from torch import nn

from benchmarks.figures import record
from driftlens.calibration.calibrator import Calibrator
from driftlens.calibration.featcal import FeatCal
from driftlens.calibration.residual import ResidualCal
from driftlens.checkpoints.tensor_sources import module_source
from driftlens.data.samples import Batch
from driftlens.engine.calibrating import CalibrationContext
from driftlens.engine.pool import ModelPool
from driftlens.engine.sites import select_sites
from driftlens.engine.walk import InMemoryBatches, drift_columns, walk
from driftlens.models.chain import adapters

TIMES = (1, 2, 4)
ROUNDS = 2
SIDE, PATCH = 56, 8  # 49 tokens and the class token, as ViT-B/32 has


@dataclass(frozen=True)
class Size:
    """What is doubled; `samples` of each task."""

    layers: int = 4
    width: int = 192
    tasks: int = 2
    samples: int = 64

    def grown(self, what: str, times: int) -> Size:
        """So many times as much of one of them."""
        return replace(self, **{what: getattr(self, what) * times})


START = Size()


def _tower(size: Size, seed: int) -> nn.Module:
    from open_clip.transformer import VisionTransformer

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tower = VisionTransformer(SIDE, PATCH, size.width, size.layers, size.width // 64, 4.0, output_dim=64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in tower.parameters():
            parameter.add_(1e-3 * torch.randn(parameter.shape, generator=generator))
    return tower.eval()


def _pool(size: Size) -> ModelPool:
    names = ["base", "merged", *(f"expert:{task}" for task in range(size.tasks))]
    models = {name: _tower(size, seed) for seed, name in enumerate(names)}
    chain = adapters["open_clip_vit"].chain(models["merged"])
    sources = {name: module_source(model, name) for name, model in models.items()}
    return ModelPool(chain, models["merged"], sources, device=torch.device("cpu"), dtype=torch.float32)


def _batches(size: Size) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(size.samples, 3, SIDE, SIDE, generator=generator)
    return [
        Batch(at, at + len(part), part) for at, part in zip(range(0, size.samples, 32), pixels.split(32), strict=True)
    ]


@torch.no_grad()
def diagnosis(pool: ModelPool, size: Size) -> None:
    """Drift, mismatch and propagation of the merged model at every boundary, of every task."""
    for task in range(size.tasks):
        for view in walk(pool, str(task), ["merged"], _batches(size)):
            torch.stack(list(drift_columns(view, "cls").values()))


def calibration(method: Callable[[], Calibrator]) -> Callable[[ModelPool, Size], None]:
    """A calibration of all blocks."""

    def calibrate(pool: ModelPool, size: Size) -> None:
        samples = {str(task): InMemoryBatches(lambda: _batches(size)) for task in range(size.tasks)}
        for _ in method().calibrate(CalibrationContext(pool, samples, select_sites(pool.chain), objectives=False)):
            pass

    return calibrate


WORKS: Mapping[str, Callable[[ModelPool, Size], None]] = {
    "diagnosis": diagnosis,
    "FeatCal": calibration(FeatCal),
    "residual calibration": calibration(ResidualCal),
}


def measured() -> dict[tuple[str, str], list[float]]:
    """Processor seconds of each work, by what is grown, at each of `TIMES`: the best of some rounds in turns."""
    sizes = {(what, times): START.grown(what, times) for what in Size.__annotations__ for times in TIMES}
    best: dict[tuple[str, Size], float] = {}
    for _ in range(ROUNDS):
        for size in dict.fromkeys(sizes.values()):
            pool = _pool(size)
            for name, work in WORKS.items():
                gc.collect()
                started = time.process_time()
                work(pool, size)
                seconds = time.process_time() - started
                best[name, size] = min(seconds, best.get((name, size), math.inf))
    return {
        (name, what): [best[name, sizes[what, times]] for times in TIMES]
        for name in WORKS
        for what in Size.__annotations__
    }


def exponent(seconds: Sequence[float]) -> float:
    """Of the last doubling, where what does not grow matters least."""
    return math.log2(seconds[-1] / seconds[-2])


def run(device: str) -> None:
    """Record the exponents of each work on the host, since CPU seconds are compared."""
    del device
    record_exponents(measured())


def record_exponents(found: Mapping[tuple[str, str], Sequence[float]]) -> None:
    """Record the exponents of the last doubling, one figure per work."""
    for name in WORKS:
        values = "; ".join(f"{exponent(found[name, what]):.2f}" for what in Size.__annotations__)
        record("growth", f"{name}: exponents of {'; '.join(Size.__annotations__)}", values)


def draw(found: Mapping[tuple[str, str], Sequence[float]], file: Path) -> None:
    """Seconds against times as much, both logarithmic: a panel for each work."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    panels = figure.subplots(1, len(WORKS), sharex=True)
    for panel, name in zip(panels, WORKS, strict=True):
        for what, start, marker in zip(Size.__annotations__, astuple(START), "osD^", strict=True):
            seconds = found[name, what]
            label = f"{what} from {start}: {exponent(seconds):.2f}"
            panel.plot(TIMES, [each / seconds[0] for each in seconds], marker=marker, label=label)
        panel.set(xscale="log", yscale="log", title=name, xlabel="times as much")
        panel.set_xticks(TIMES, [f"{times}" for times in TIMES])
        panel.set_yticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
        panel.minorticks_off()
        panel.legend(frameon=False, fontsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("times the seconds")
    figure.savefig(file, dpi=160)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--figure", type=Path, help="where a figure is written")
    arguments = parser.parse_args()
    grown = measured()
    record_exponents(grown)
    if arguments.figure:
        draw(grown, arguments.figure)
