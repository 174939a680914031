"""Peak memory of a calibration: one layer of each model and a stated budget of features, however many experts."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

COUNTS = (2, 8)
BUDGET = 8 * 2**20

_CHILD = """
import pathlib, resource, sys, torch
from benchmarks.calibration import _tower
from benchmarks.models import images
from driftlens.calibration.featcal import FeatCal
from driftlens.engine.calibrating import CalibrationContext
from driftlens.engine.walk import InMemoryBatches
from driftlens.engine.pool import ModelPool
from driftlens.engine.sites import select_sites
from driftlens.checkpoints.loading import open_checkpoint
from driftlens.models.chain import adapters
from driftlens.models.architecture import weightless

folder, count, device, budget = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
skeleton = weightless(lambda: _tower(0), "ViT-B/32")
names = ["base", "merged", *(f"expert:{i}" for i in range(count))]
sources = {name: open_checkpoint(f"{folder}/{i}.safetensors") for i, name in enumerate(names)}
chain = adapters["open_clip_vit"].chain(skeleton)
pool = ModelPool(chain, skeleton, sources, device=torch.device(device), dtype=torch.float32)
samples = {str(task): InMemoryBatches(lambda: images(16, batch_size=8)) for task in range(count)}
spill = pathlib.Path(folder, f"spill-{count}")
sites = select_sites(chain, layers=[2, 3])
for _ in FeatCal().calibrate(CalibrationContext(pool, samples, sites, feature_budget=budget, spill=spill)):
    pass
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


def run(device: str) -> str:
    """Peak resident memory of one process per number of experts, two blocks calibrated."""
    from safetensors.torch import save_file

    from benchmarks.calibration import _tower

    with tempfile.TemporaryDirectory() as folder:
        for number in range(max(COUNTS) + 2):
            save_file(_tower(number).state_dict(), f"{folder}/{number}.safetensors")
        size = Path(f"{folder}/0.safetensors").stat().st_size / 2**20
        peaks = [float(_peak(folder, count, device)) for count in COUNTS]
    shown = ", ".join(f"{count} experts {peak:.0f} MiB" for count, peak in zip(COUNTS, peaks, strict=True))
    return (
        f"peak memory of a calibration, ViT-B/32 width ({size:.0f} MiB a model), 16 images a task, "
        f"{BUDGET >> 20} MiB of features in memory: {shown}, ratio {peaks[1] / peaks[0]:.2f} "
        "(wanted: independent of the number of experts)"
    )


def _peak(folder: str, count: int, device: str) -> str:
    command = [sys.executable, "-c", _CHILD, folder, str(count), device, str(BUDGET)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
