"""Every merge method, with FeatCal behind it and without, on real images and texts: accuracy, drift, seconds, memory.

`python -m benchmarks.mergers average tsv_m` takes some methods only. Settings are those published, nothing is chosen.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import pathlib
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

SHARED = pathlib.Path(__file__).resolve().parents[2] / "shared"
SAMPLES, SEED = 128, 0
PRESETS = {"real": "paper-clip", "real_text": "flan-t5"}


def run(device: str, methods: Sequence[str] = ()) -> str:
    """A table per folder of real models that is there: a row per method, and one with FeatCal behind it."""
    from driftlens.merging.method import merge_methods

    chosen = list(methods) or list(merge_methods)
    tables = []
    for suite, preset in PRESETS.items():
        if not (SHARED / suite).is_dir():
            tables.append(f"{suite}: not on this machine")
            continue
        lines = [
            f"{suite}, {SAMPLES} samples per task, seed {SEED}; then FeatCal with {preset}, a process each",
            "| method | accuracy | relative drift | seconds | peak memory |",
            "|---|---|---|---|---|",
        ]
        for name in chosen:
            # A process of its own, whose peak is the method's.
            with multiprocessing.get_context("spawn").Pool(1) as process:
                lines += process.apply(rows, (suite, name, device))
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def rows(suite: str, name: str, device: str) -> list[str]:
    """The table's two rows of one method; what failed says how."""
    import driftlens as dl
    from driftlens.calibration.featcal import PRESETS as published
    from driftlens.errors import DriftLensError

    found = []
    with tempfile.TemporaryDirectory() as place:
        folder, spec = pathlib.Path(place), spec_of(suite, device)
        try:
            started = time.perf_counter()
            merged = dl.merge(spec, out=folder / "merged", method=name)
            seconds, peak = time.perf_counter() - started, _peak()
            analysis = {key: value for key, value in spec.items() if key != "merge"}
            file = folder / "spec.json"
            file.write_text(json.dumps({**analysis, "merged": {"weights": str(merged)}}))
            done = dl.analyze(file, out=folder / "run", progress="none")
            found.append(_row(name, done, "merged", seconds, peak))
            started = time.perf_counter()
            done = done.calibrate(dl.FeatCal(**published[PRESETS[suite]]), name="featcal", progress="none")
            seconds += time.perf_counter() - started
            found.append(_row(f"{name}, FeatCal", done, "calibrated:featcal", seconds, _peak()))
        except DriftLensError as error:
            found.append(f"| {name} | {type(error).__name__}: {error.message} | | | |")
    return found


def spec_of(suite: str, device: str) -> dict[str, Any]:
    """All tasks of a folder of real models, as a run."""
    root = SHARED / suite
    models = root / ("hf" if suite == "real" else "t5")
    tasks = sorted(path.name for path in models.iterdir() if path.name != "base")
    data: dict[str, Any] = {"defaults": {"n": SAMPLES, "n_diagnosis": SAMPLES, "n_test": "all", "seed": SEED}}
    spec = {
        "version": 1,
        "name": suite,
        "architecture": {"loader": "hf-clip" if suite == "real" else "hf-t5", "source": str(models / "base")},
        "base": {"weights": str(models / "base")},
        "experts": {task: {"weights": str(models / task)} for task in tasks},
        "merge": {"method": "average"},
        "metrics": {"jacobian": False},
        "compute": {"device": device},
    }
    for task in tasks:
        if suite == "real":
            data[task] = {"kind": "npz", "file": str(root / "data" / f"{task}.npz")}
        else:
            files = {"calibration": "train.jsonl", "test": "test.jsonl"}
            places = {split: str(root / "data" / task / file) for split, file in files.items()}
            data[task] = {"kind": "jsonl", **places, "classes": True}
    if suite == "real":
        scale = json.loads((root / "suite.json").read_text())["logit_scale"]
        head = {"file": str(root / "heads.safetensors"), "logit_scale": scale}
        spec["heads"] = {task: {**head, "tensor": task} for task in tasks}
    return {**spec, "data": data}


def _row(title: str, run: Any, variant: str, seconds: float, peak: float) -> str:
    """Means over tasks; the interval is that of 95 % of the mean, tests of tasks being independent."""
    scores = run.accuracy()
    mine = scores[(scores["variant"] == variant) & (scores["metric"] == "accuracy")]
    spread = sum(p * (1 - p) / n for p, n in zip(mine["value"], mine["n"], strict=True))
    half = 1.96 * math.sqrt(spread) / len(mine)
    drift = [run.layers(task, variant).iloc[-1]["drift_rel"] for task in mine["task"]]
    accuracy = f"{mine['value'].mean():.1%} ± {half:.1%}"
    return f"| {title} | {accuracy} | {sum(drift) / len(drift):.3f} | {seconds:.0f} | {peak:.2f} GB |"


def _peak() -> float:
    """Most memory the process has held so far, in GB."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


if __name__ == "__main__":
    print(run("cpu", sys.argv[1:]))
