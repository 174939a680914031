"""Peak memory of a walk: one layer of each model and the waiting features, however many experts there are."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

COUNTS = (2, 8)

_CHILD = """
import resource, sys, torch
from benchmarks.models import images
from driftlens.engine.pool import ModelPool
from driftlens.engine.walk import walk
from driftlens.checkpoints.loading import open_checkpoint
from driftlens.models.chain import adapters
from driftlens.models.architecture import weightless
from benchmarks.models import vit_b32

folder, count, device = sys.argv[1], int(sys.argv[2]), sys.argv[3]
skeleton = weightless(lambda: vit_b32(0), "ViT-B/32")
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


def run(device: str) -> str:
    """Peak resident memory of one process per number of experts, and the size of one model for comparison."""
    from safetensors.torch import save_file

    from benchmarks.models import vit_b32

    with tempfile.TemporaryDirectory() as folder:
        model = vit_b32(0)
        for number in range(max(COUNTS) + 1):
            save_file(model.state_dict(), f"{folder}/{number}.safetensors")
        size = Path(f"{folder}/0.safetensors").stat().st_size / 2**20
        peaks = [float(_peak(folder, count, device)) for count in COUNTS]
    shown = ", ".join(f"{count} experts {peak:.0f} MiB" for count, peak in zip(COUNTS, peaks, strict=True))
    return (
        f"peak memory of a walk, ViT-B/32 shape ({size:.0f} MiB a model), 32 images: {shown}, "
        f"ratio {peaks[1] / peaks[0]:.2f} (wanted: independent of the number of experts)"
    )


def _peak(folder: str, count: int, device: str) -> str:
    command = [sys.executable, "-c", _CHILD, folder, str(count), device]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
