"""Memory, disk and time that an analysis will take on this machine, roughly."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from driftlens.data.samples import SampleSet
from driftlens.pipeline.costs import Workload, disk_bytes, memory_bytes, operations, samples_read

PROBE_SECONDS = 0.1
PROBE_WIDTH = 1024
EFFICIENCY = 0.4
"""Share of a bare product's rate that layers reach beside norms, activations and derivatives (0.37 at width 192)."""


@dataclass(frozen=True)
class Cost:
    """What an analysis will take, roughly.

    Attributes:
        memory_bytes: peak resident memory.
        disk_bytes: size of the run directory.
        seconds: wall-clock time on this machine; None where no samples could be read to time it.
    """

    memory_bytes: int
    disk_bytes: int
    seconds: float | None

    def text(self) -> str:
        """The same in words."""
        parts = [f"{_size(self.memory_bytes)} of memory", f"{_size(self.disk_bytes)} on disk"]
        parts += [_duration(self.seconds)] if self.seconds is not None else []
        return f"about {', '.join(parts)}"


def estimate(
    work: Workload,
    sample: SampleSet,
    device: torch.device,
    dtype: torch.dtype,
    *,
    more_operations: int = 0,
    more_samples: int = 0,
) -> Cost:
    """What the workload will take on this machine: a matrix product and a few samples are timed.

    Args:
        work: what will be done.
        sample: samples of which a few are read once more to time it.
        device: where it will be computed.
        dtype: in which type.
        more_operations: floating-point operations beside those of the workload.
        more_samples: samples that are read beside those of the workload.
    """
    seconds = (operations(work) + more_operations) / (
        EFFICIENCY * _operations_per_second(work, device, dtype)
    )
    seconds += (samples_read(work) + more_samples) * _seconds_per_sample(sample)
    return Cost(_resident_bytes() + memory_bytes(work), disk_bytes(work), seconds)


def _operations_per_second(work: Workload, device: torch.device, dtype: torch.dtype) -> float:
    """Rate of a product of the size that a layer does on a batch."""
    # Wider products run no faster, and pooled vectors of `layers.pool: all` are wide beyond reason.
    width = min(PROBE_WIDTH, max(layer.width for layer in work.layers))
    rows = torch.ones(min(2048, 16 * work.batch_size), width, device=device, dtype=dtype)
    weight = torch.ones(width, 4 * width, device=device, dtype=dtype)
    float((rows @ weight)[0, 0])  # the first product also loads the library
    products, started = 0, time.perf_counter()
    while (passed := time.perf_counter() - started) < PROBE_SECONDS:
        float((rows @ weight)[0, 0])  # reading a number waits for a GPU
        products += 1
    return products * 2 * rows.numel() * weight.shape[1] / passed


def _seconds_per_sample(samples: SampleSet) -> float:
    count = min(8, len(samples))
    samples.load([0])  # the first one also imports and opens what reads it
    started = time.perf_counter()
    samples.load(range(count))
    return (time.perf_counter() - started) / count


def _resident_bytes() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


def _size(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.2g} {unit}" if size < 10 else f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.2g} TB" if size < 10 else f"{size:.0f} TB"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
