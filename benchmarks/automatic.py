"""`--auto` on real images: what it chose in each draw of 64 samples a task, and how the others would have done.

`python -m benchmarks.automatic 0 1` runs these draws only. Every candidate is calibrated on all samples of the draw as
the choice would be, and told apart on the test samples, which no choice reads.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.residual import DRAWS, REAL, SAMPLES, SCALE, TASKS, _calibrated, _data, _judged
from driftlens.base.intervals import student

Found = dict[str, Any]


def run(device: str, draws: Sequence[int] = range(DRAWS)) -> str:
    """A line per draw as soon as it is there, and the accuracies of all candidates at the end."""
    if not REAL.is_dir():
        return f"automatic: {REAL} is not there"
    found = []
    for draw in draws:
        found.append(drawn(draw, torch.device(device)))
        print(json.dumps({"draw": draw, **found[-1]}), flush=True)
    return summary(found)


def drawn(seed: int, device: torch.device) -> Found:
    """What was chosen with the samples of one draw; held-out score, accuracy and KL on test samples by candidate."""
    from transformers import CLIPVisionModelWithProjection

    import driftlens as dl
    from driftlens.base.progress import Reporter
    from driftlens.calibration.calibrator import calibrators
    from driftlens.engine.sites import select_sites
    from driftlens.jobs.contest.automatic import BEST
    from driftlens.jobs.study.reopening import Kept, reopened

    with tempfile.TemporaryDirectory() as place:
        study = reopened(dl.analyze(_spec(seed, device), out=f"{place}/run", progress="none").path)[0]
        start = calibrators["featcal"](**calibrators["featcal"].presets["paper-clip"])
        tried = Kept(Path(place) / "tried")
        _, record = BEST.choose(study, start, select_sites(study.pool.chain), Reporter(), tried)
    folders = {"base": "base"} | {f"expert:{task}": task for task in TASKS}
    models: Any = {
        name: CLIPVisionModelWithProjection.from_pretrained(REAL / "hf" / folder).to(device).eval()
        for name, folder in folders.items()
    }
    models["merged"] = _merged(models)
    data = {task: _data(task, device) for task in TASKS}
    pixels = {task: _drawn(study, task).to(device) for task in TASKS}
    candidates = {}
    for entry in record["compared"]:
        if "settings" in entry:
            settings = {key: _kept(value) for key, value in entry["settings"].items()}
            made: Any = calibrators[entry["method"]](**settings)
            model, _ = _calibrated(models, "hf_clip_vit", pixels, made)
        elif entry["name"] in models:
            model = models[entry["name"]]
        else:  # what a search found, another per fold
            continue
        accuracy, kl = _judged(model, models, data)
        told = {key: entry.get(key) for key in ("title", "score", "advantage", "low", "high")}
        candidates[entry["name"]] = {**told, "accuracy": accuracy, "kl": kl}
    return {"choice": record["choice"], "best": record["best"], "candidates": candidates}


def summary(draws: Sequence[Found]) -> str:
    """Means over draws, and chosen minus the candidate with the best mean accuracy, draw by draw (Student's t)."""
    names = [name for name in draws[0]["candidates"] if all(name in at["candidates"] for at in draws)]
    values = {name: [at["candidates"][name]["accuracy"] for at in draws] for name in names}
    chosen = [at["candidates"][at["choice"]]["accuracy"] for at in draws]
    best = max(names, key=lambda name: float(np.mean(values[name])))
    lines = [
        f"automatic: {SAMPLES} samples a task, {len(draws)} draws, chose {[at['choice'] for at in draws]}",
        *(f"  {name}: accuracy {_mean(values[name])}" for name in names),
        f"  --auto: accuracy {_mean(chosen)}",
    ]
    gaps = np.array(chosen) - np.array(values[best])
    if len(gaps) > 1:
        reach = student(len(gaps) - 1, 0.95) * gaps.std(ddof=1) / len(gaps) ** 0.5
        lines.append(f"  chosen minus {best}: {gaps.mean():+.4f} +- {reach:.4f}")
    return "\n".join(lines)


def _mean(values: Sequence[float]) -> str:
    error = np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{np.mean(values):.4f} +- {error:.4f}"


def _merged(models: Mapping[str, Any]) -> Any:
    from benchmarks.residual import _task_arithmetic

    return _task_arithmetic(dict(models))


def _drawn(study: Any, task: str) -> torch.Tensor:
    samples = study.tasks[task].calibration
    return torch.as_tensor(samples.load(range(len(samples))))


def _kept(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _spec(seed: int, device: torch.device) -> dict[str, Any]:
    models, scale = REAL / "hf", json.loads((REAL / "suite.json").read_text())["logit_scale"]
    head = {"file": str(REAL / "heads.safetensors"), "logit_scale": scale}
    defaults = {"n": SAMPLES, "n_diagnosis": 8, "n_test": 8, "seed": seed, "batch_size": 32}
    return {
        "version": 1,
        "name": "real",
        "architecture": {"loader": "hf-clip", "source": str(models / "base")},
        "base": {"weights": str(models / "base")},
        "experts": {task: {"weights": str(models / task)} for task in TASKS},
        "merge": {"method": "task_arithmetic", "scaling": SCALE},
        "metrics": {"jacobian": False, "contributions": False, "prefix": False},
        "compute": {"device": str(device)},
        "heads": {task: {**head, "tensor": task} for task in TASKS},
        "data": {
            "defaults": defaults,
            **{task: {"kind": "npz", "file": str(REAL / "data" / f"{task}.npz")} for task in TASKS},
        },
    }


if __name__ == "__main__":
    print(run("cpu", [int(draw) for draw in sys.argv[1:]] or range(DRAWS)))
