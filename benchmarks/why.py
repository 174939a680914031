"""Wall time of `driftlens why` with data on pretrained bases: the checklist of files and the small analysis.

`DRIFTLENS_PACKAGES` names a folder with the packages of the studies of MPNet and Gemma. Two experts are the base plus
noise, and the merge is their average, because only the time counts. Texts are those of the studies.
"""

from __future__ import annotations

import importlib
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import torch

from benchmarks.figures import record
from benchmarks.studies.packages import write_texts

PACKAGES = "DRIFTLENS_PACKAGES"
ROUNDS = 3
NOISE = 0.05
TASKS = ("film", "tweets")
TARGETS = {"mpnet": "at most 30 s", "gemma": "at most 60 s"}


def run(device: str) -> None:
    """Record the median wall time per base."""
    if PACKAGES not in os.environ:
        print(f"why: not measured, since {PACKAGES} is not set; see benchmarks/why.py")
        return
    packages = pathlib.Path(os.environ[PACKAGES])
    for name, target in TARGETS.items():
        study = importlib.import_module(f"benchmarks.studies.{name}").STUDY
        with tempfile.TemporaryDirectory() as place:
            folder = pathlib.Path(place)
            study.unpack(packages, folder / "base")
            write_texts(packages, folder / "texts")
            _write_models(folder)
            words = [str(folder / model) for model in ("base", *TASKS, "merged")]
            words += [f"--data={task}={folder / 'texts' / task / 'test.jsonl'}" for task in TASKS]
            words += ["--out", str(folder / "run"), "--force", "--device", device]
            seconds = [_seconds(words) for _ in range(ROUNDS)]
        title = study.title.partition(":")[0]
        value = f"{statistics.median(seconds):.0f} s ({min(seconds):.0f} to {max(seconds):.0f} s)"
        record("why", f"wall time of `why` with 200 texts per task: {title}, two experts, merge", value, target)


def _write_models(folder: pathlib.Path) -> None:
    """Write two experts near the base, and their average."""
    from safetensors.torch import load_file, save_file

    (file,) = (folder / "base").rglob("*.safetensors")
    base = load_file(file)
    models = {task: {key: _with_noise(value, seed) for key, value in base.items()} for seed, task in enumerate(TASKS)}
    one, two = models.values()
    models["merged"] = {key: ((one[key].float() + two[key].float()) / 2).to(base[key]) for key in base}
    for name, tensors in models.items():
        shutil.copytree(folder / "base", folder / name)
        save_file(tensors, folder / name / file.relative_to(folder / "base"), {"format": "pt"})


def _with_noise(value: torch.Tensor, seed: int) -> torch.Tensor:
    """Add noise to a matrix, relative to its standard deviation."""
    if not value.is_floating_point() or value.ndim < 2:
        return value
    drawn = torch.Generator().manual_seed(seed)
    wide = value.float()
    return (wide + NOISE * wide.std() * torch.randn(wide.shape, generator=drawn)).to(value.dtype)


def _seconds(words: list[str]) -> float:
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "driftlens", "why", *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"why ended with {done.returncode}: {done.stderr[-2000:]}")
    return time.perf_counter() - started
