"""Peak memory of an analysis and of a calibration: independent of the number of experts."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.figures import record

COUNTS = (2, 8)
BUDGET = 8 * 2**20

_WALK = """
import resource, sys, torch
from benchmarks.models import images
from driftlens.engine.pool import ModelPool
from driftlens.engine.walk import walk
from driftlens.checkpoints.loading import open_checkpoint
from driftlens.models.chain import adapters
from driftlens.models.architecture import build_on_meta
from benchmarks.models import vit_b32

folder, count, device = sys.argv[1], int(sys.argv[2]), sys.argv[3]
skeleton = build_on_meta(lambda: vit_b32(0), "ViT-B/32")
names = ["merged", *(f"expert:{i}" for i in range(count))]
sources = {name: open_checkpoint(f"{folder}/{i}.safetensors") for i, name in enumerate(names)}
chain = adapters["open_clip_vit"].chain(skeleton)
pool = ModelPool(chain, skeleton, sources, device=torch.device(device), dtype=torch.float32)
batches = images(32)
with torch.no_grad():
    for task in range(count):
        for _ in walk(pool, str(task), ["merged"], batches):
            pass
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""

_CALIBRATION = """
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
from driftlens.models.architecture import build_on_meta

folder, count, device, budget = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
skeleton = build_on_meta(lambda: _tower(0), "ViT-B/32")
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


def run(device: str) -> None:
    """Record the peak resident memory of one process per number of experts."""
    from safetensors.torch import save_file

    from benchmarks.calibration import _tower
    from benchmarks.models import vit_b32

    budget = f"{BUDGET >> 20} MiB of features"
    jobs = {
        "walk, ViT-B/32 shape, 32 images": (_WALK, vit_b32),
        f"calibration of two blocks, ViT-B/32 width, 16 images per task, {budget}": (_CALIBRATION, _tower),
    }
    for job, (script, build) in jobs.items():
        with tempfile.TemporaryDirectory() as folder:
            for number in range(max(COUNTS) + 2):
                save_file(build(number).state_dict(), f"{folder}/{number}.safetensors")
            size = Path(f"{folder}/0.safetensors").stat().st_size / 2**20
            peaks = [_peak_mib(script, folder, count, device) for count in COUNTS]
        value = f"{peaks[0]:.0f} MiB; {peaks[1]:.0f} MiB (one model: {size:.0f} MiB)"
        record("memory", f"{job}: {'; '.join(map(str, COUNTS))} experts", value, "equal", device=device)


def _peak_mib(script: str, folder: str, count: int, device: str) -> float:
    command = [sys.executable, "-c", script, folder, str(count), device, str(BUDGET)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
