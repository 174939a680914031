"""All merge methods with and without FeatCal on real images and texts: accuracy, drift, seconds, memory.

`python -m benchmarks.mergers [--file FILE] [--minutes M] [METHOD ...]` stores each row in the file when it is measured,
so a stopped run can be resumed. Settings are the published ones; nothing is chosen.
"""

from __future__ import annotations

import argparse
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

from benchmarks.figures import record

SHARED = pathlib.Path(__file__).resolve().parents[2] / "shared"
SAMPLES, SEED = 128, 0
SUITES = {"real": ("paper-clip", "accuracy", 300), "real_text/llama": ("llama-3b", "exact_match", 200)}
"""Folder -> preset of FeatCal, what is scored, and test samples of a task."""
SETTINGS: dict[tuple[str, str], dict[str, Any]] = {
    ("real_text/llama", "fisher"): {"estimator": "batch_sqrt"},
}
"""Exact Fisher information of a whole vocabulary would take a pass for each of its words."""
HEAD = (
    "| method | merged | anchor alone | FeatCal | change | drift, merged | drift, FeatCal | merge | FeatCal |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def run(device: str, methods: Sequence[str] = (), file: str = "mergers.json", minutes: float = math.inf) -> None:
    """Record what can be measured in time, and print a table per folder of real models of all rows in the file."""
    from driftlens.merging.method import merge_methods

    place, started = pathlib.Path(file), time.monotonic()
    known = json.loads(place.read_text()) if place.is_file() else {}
    here = [suite for suite in SUITES if (SHARED / suite).is_dir()]
    for name in methods or merge_methods:
        for suite in here:
            key = f"{suite}, {name}"
            if key in known or time.monotonic() - started > 60 * minutes:
                continue
            # A process of its own, whose peak is the method's.
            with multiprocessing.get_context("spawn").Pool(1) as process:
                known[key] = process.apply(measured, (suite, name, device))
            place.write_text(json.dumps(known, indent=1))
            if "error" not in known[key]:
                merged, change, error = (100 * number for number in (known[key]["merged"][0], *known[key]["change"]))
                kind = "images" if suite == "real" else "texts"
                value = f"{change:+.1f} ± {error:.1f} points (merged {merged:.1f} %)"
                record("mergers", f"{kind}: `{name}`, change by FeatCal", value, device=device)
    for suite in here:
        rows = [row(name, known[key]) for name in merge_methods if (key := f"{suite}, {name}") in known]
        print("\n".join([f"{suite}, then FeatCal with {SUITES[suite][0]}", HEAD, *rows]))


def measured(suite: str, name: str, device: str) -> dict[str, Any]:
    """All that is known of one method; what failed says how."""
    import torch

    import driftlens as dl
    from driftlens.calibration.featcal import PRESETS
    from driftlens.utils.errors import DriftLensError
    from driftlens.utils.variants import control_variant

    preset, metric, _ = SUITES[suite]
    settings = SETTINGS.get((suite, name), {})
    found: dict[str, Any] = {
        "settings": settings,
        "samples": SAMPLES,
        "seed": SEED,
        "torch": torch.__version__,
    }
    with tempfile.TemporaryDirectory() as place:
        folder, spec = pathlib.Path(place), spec_of(suite, device, 2 if name == "slerp" else None)
        try:
            started = time.perf_counter()
            merged = dl.merge(spec, out=folder / "merged", method=name, parameters=settings)
            found |= {"merge_seconds": time.perf_counter() - started, "merge_peak": _peak()}
            analysis = {key: value for key, value in spec.items() if key != "merge"}
            file = folder / "spec.json"
            file.write_text(json.dumps({**analysis, "merged": {"weights": str(merged)}}))
            done = dl.analyze(file, out=folder / "run", progress="none")
            started = time.perf_counter()
            done = done.calibrate(dl.FeatCal(**PRESETS[preset]), name="featcal", progress="none")
            found |= {"featcal_seconds": time.perf_counter() - started, "featcal_peak": _peak()}
        except DriftLensError as error:
            return found | {"error": f"{type(error).__name__}: {error.message}"}
        shown = {"merged": "merged", "anchor": control_variant("featcal"), "featcal": "calibrated:featcal"}
        right = {short: _right(done, variant, metric) for short, variant in shown.items()}
        right |= {end: _right(done, end, metric) for end in ("base", "expert")}
        found |= {short: _mean(values) for short, values in right.items()} | {"n": len(right["merged"])}
        found["change"] = _mean(right["featcal"] - right["merged"])
        for short, variant in shown.items():
            drift = [done.layers(task, variant).iloc[-1]["drift_rel"] for task in spec["experts"]]
            found[f"{short}_drift"] = sum(drift) / len(drift)
    return found


def spec_of(suite: str, device: str, count: int | None = None) -> dict[str, Any]:
    """The tasks of a folder of real models, or the first few of them, as a run."""
    is_images = suite == "real"
    models, root = SHARED / suite / ("hf" if is_images else "."), SHARED / suite.partition("/")[0]
    tasks = sorted(path.name for path in models.iterdir() if path.name != "base")[:count]
    count_of_test = SUITES[suite][2]
    sizes = {"n": SAMPLES, "n_diagnosis": count_of_test, "n_test": count_of_test, "seed": SEED}
    data: dict[str, Any] = {"defaults": sizes}
    spec = {
        "version": 1,
        "name": models.name,
        "architecture": {"loader": "hf-clip" if is_images else "hf-decoder", "source": str(models / "base")},
        "base": {"weights": str(models / "base")},
        "experts": {task: {"weights": str(models / task)} for task in tasks},
        "merge": {"method": "average"},
        "metrics": {"jacobian": False},
        "compute": {"device": device},
    }
    for task in tasks:
        if is_images:
            data[task] = {"kind": "npz", "file": str(root / "data" / f"{task}.npz")}
            continue
        files = {"calibration": "train.jsonl", "test": "test.jsonl"}
        places = {split: str(root / "data" / task / file) for split, file in files.items()}
        labels = json.loads((root / "data" / task / "info.json").read_text())["labels"]
        asked = {"prompt": "{input}\nanswer:", "metric": "exact_match", "classes": labels is not None}
        data[task] = {"kind": "jsonl", **places, **asked}
    if is_images:
        scale = json.loads((root / "suite.json").read_text())["logit_scale"]
        head = {"file": str(root / "heads.safetensors"), "logit_scale": scale}
        spec["heads"] = {task: {**head, "tensor": task} for task in tasks}
    return {**spec, "data": data}


def row(name: str, known: dict[str, Any]) -> str:
    """One line of the table."""
    if "error" in known:
        return f"| {name} | {known['error']} | | | | | | | |"
    means = [f"{100 * known[short][0]:.1f} ± {100 * known[short][1]:.1f}" for short in ("merged", "anchor", "featcal")]
    change = f"{100 * known['change'][0]:+.1f} ± {100 * known['change'][1]:.1f}"
    drift = [f"{known[f'{short}_drift']:.3f}" for short in ("merged", "featcal")]
    cost = [f"{known[f'{step}_seconds']:.1f} s, {known[f'{step}_peak']:.2f} GB" for step in ("merge", "featcal")]
    return f"| {' | '.join([name, *means, change, *drift, *cost])} |"


def _right(run: Any, variant: str, metric: str) -> Any:
    """Whether the variant is right, by task and test sample."""
    if metric != "accuracy":
        rows = run.scores(variant=variant)
        return rows[rows["metric"] == metric].set_index(["task", "sample_id"])["value"]
    rows = run.outputs(variant="merged" if variant == "expert" else variant).set_index(["task", "sample_id"])
    return (rows["expert_pred" if variant == "expert" else "pred"] == rows["label"]).astype(float)


def _mean(values: Any) -> tuple[float, float]:
    """Mean over tasks of a value per (task, sample), and half its 95 % interval; tasks' samples are independent."""
    tasks = values.groupby(level="task")
    return float(tasks.mean().mean()), 1.96 * math.sqrt((tasks.var() / tasks.count()).sum()) / len(tasks)


def _peak() -> float:
    """Most memory the process has held so far, in GB."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="*")
    parser.add_argument("--file", default="mergers.json", help="where rows are kept")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which no row is begun")
    run("cpu", **vars(parser.parse_args()))
