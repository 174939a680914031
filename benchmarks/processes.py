"""Speed-up of FeatCal by two processes of one core each: 8 x 16 samples, ViT-B/32 shape."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.calibration import BLOCKS, _batches, _models
from benchmarks.figures import record
from driftlens.calibration.featcal import FeatCal
from driftlens.checkpoints.tensor_sources import module_source
from driftlens.engine.calibrating import CalibrationContext
from driftlens.engine.pool import ModelPool
from driftlens.engine.sites import select_sites
from driftlens.engine.walk import InMemoryBatches
from driftlens.models.chain import adapters
from driftlens.utils.distributed import join_process_group

TASKS, SAMPLES = 8, 16
WANTED = 1.7


def run(device: str) -> None:
    """Record ratios by the clock, and by the processor time of the process that used most."""
    del device
    seconds = {size: _in_processes(size) for size in (1, 2)}
    wall, processor = ([max(of[name] for of in seconds[size]) for size in (1, 2)] for name in ("wall", "processor"))
    case = f"{TASKS} tasks of {SAMPLES} images, {BLOCKS} blocks of ViT-B/32, two processes of one core against one"
    record("processes", case, f"{wall[0] / wall[1]:.2f} times faster", f"at least {WANTED} times")
    record("processes", f"{case}: CPU time of the busier process", f"{processor[0] / processor[1]:.2f} times less")


def _in_processes(size: int) -> list[dict[str, float]]:
    """What each of so many processes needs, with one thread."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(size), "-m", __name__]
        command = [sys.executable, *launcher, folder]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return [json.loads(file.read_text()) for file in Path(folder).iterdir()]


def main() -> None:
    """One process's part; it writes what it needed into the folder that it is given."""
    torch.set_num_threads(1)
    models = _models(TASKS, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    pixels = {str(task): torch.randn(SAMPLES, 3, 224, 224, generator=generator) for task in range(TASKS)}
    chain = adapters["open_clip_vit"].chain(models["merged"])
    sources = {name: module_source(module, name) for name, module in models.items()}
    pool = ModelPool(chain, models["merged"], sources, device=torch.device("cpu"), dtype=torch.float32)
    samples = {task: InMemoryBatches(lambda x=x: _batches(x)) for task, x in pixels.items()}
    with join_process_group() as team:
        team.barrier()
        wall, processor = time.perf_counter(), time.process_time()
        for _ in FeatCal().calibrate(CalibrationContext(pool, samples, select_sites(chain), team=team)):
            pass
        found = {"wall": time.perf_counter() - wall, "processor": time.process_time() - processor}
        (Path(sys.argv[1]) / f"{team.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
