"""Ways to repair a merge beside each other: accuracy, KL to the experts and seconds, over draws of 64 samples a task.

`python -m benchmarks.repairs real llama` takes some suites only. A row is printed as soon as its last draw is there;
draws are kept in `repairs.json` in the working directory, and those that are there are not run again. Settings are
those published or declared as defaults; nothing is chosen but by `--auto`, which reads calibration samples alone.
"""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from driftlens.records.intervals import student

SHARED = pathlib.Path(__file__).resolve().parents[2] / "shared"
SAMPLES, DRAWS, FILE = 64, 5, pathlib.Path("repairs.json")
PRESETS = {"real": "paper-clip", "embedded": "paper-clip", "t5": "flan-t5", "llama": "llama-3b"}
LEVELS = ("merged", "base", "expert")
Found = dict[str, dict[str, Any]]


def run(device: str, suites: Sequence[str] = ()) -> str:
    """A table per suite that is there, which stands on stdout row by row before."""
    kept: dict[str, list[Found]] = json.loads(FILE.read_text()) if FILE.exists() else {}
    tables = []
    for suite in suites or PRESETS:
        if suite != "embedded" and not SHARED.is_dir():
            tables.append(f"{suite}: not on this machine")
            continue
        for draw in range(len(kept.setdefault(suite, [])), DRAWS):
            kept[suite].append(drawn(suite, draw, device))
            FILE.write_text(json.dumps(kept, indent=1))
            print(f"{suite}, draw {draw}: {json.dumps(kept[suite][-1])}", flush=True)
        tables.append(table(suite, kept[suite]))
    return "\n\n".join(tables)


def drawn(suite: str, draw: int, device: str) -> Found:
    """Means over tasks of every model with the samples of one draw, and what its calibration took."""
    import driftlens as dl

    found: Found = {}
    with tempfile.TemporaryDirectory() as place:
        made = dl.analyze(spec_of(suite, draw, device), out=pathlib.Path(place) / "run", progress="none")
        asked: dict[str, dict[str, Any]] = {
            "featcal": {"method": "featcal", "preset": PRESETS[suite]},
            "residual": {"method": "residual"},
            "residual mu=0.9": {"method": "residual", "parameters": {"mu": 0.9}},
            "auto": {"preset": PRESETS[suite], "auto": True},
        }
        for title, options in asked.items():
            name, started = title.replace(" ", "-").replace("=", "-"), time.process_time()
            made = dl.calibrate(made, name=name, attribution=False, progress="none", **options)
            seconds = time.process_time() - started
            found[title] = _measured(made, f"calibrated:{name}") | {"seconds": seconds}
        found["auto"]["chose"] = made.manifest.calibrations["auto"].selection["choice"]
        return {name: _measured(made, name) for name in LEVELS} | found


def _measured(made: Any, variant: str) -> dict[str, Any]:
    scores = made.accuracy()
    mine = scores[scores["variant"] == variant].drop_duplicates("task")
    drift = (
        [made.layers(task, variant).iloc[-1]["drift_rel"] for task in made.tasks]
        if variant != "expert"
        else [0]
    )
    rows = made.outputs()
    kl = rows[rows["variant"] == variant].groupby("task")["kl"].mean() if variant != "expert" else np.zeros(1)
    return {
        "accuracy": float(mine["value"].mean()),
        "kl": float(np.mean(kl)) if len(kl) else None,
        "drift": float(np.mean(drift)),
        "metric": sorted(set(mine["metric"])),
    }


def table(suite: str, draws: Sequence[Found]) -> str:
    """Means over draws; in brackets the 95 % interval of the difference to FeatCal, draw by draw (Student's t)."""
    lines = [
        f"{suite}: {SAMPLES} samples a task, {len(draws)} draws, score {', '.join(draws[0]['merged']['metric'])}",
        "| | score | against FeatCal's preset | KL, nat | against FeatCal's preset | relative drift | processor s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in (*LEVELS, *(name for name in draws[0] if name not in LEVELS)):
        cells = [name]
        for column, scale, digits in (("accuracy", 100, 1), ("kl", 1, 3)):
            own, start = ([at[of][column] for at in draws] for of in (name, "featcal"))
            if None in own or None in start:
                cells += ["", ""]
                continue
            cells.append(f"{scale * np.mean(own):.{digits}f}")
            gaps = scale * (np.array(own) - np.array(start))
            reach = (
                student(len(gaps) - 1, 0.95) * gaps.std(ddof=1) / len(gaps) ** 0.5
                if len(gaps) > 1
                else np.nan
            )
            middle = gaps.mean()
            ends = f"{middle - reach:+.{digits}f} to {middle + reach:+.{digits}f}"
            cells.append("" if name == "featcal" else f"{middle:+.{digits}f} ({ends})")
        seconds = [at[name].get("seconds", np.nan) for at in draws]
        cells += [f"{np.mean([at[name]['drift'] for at in draws]):.3f}"]
        cells += ["" if np.isnan(seconds).any() else f"{np.mean(seconds):.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    chosen = [at["auto"]["chose"] for at in draws]
    return "\n".join([*lines, f"auto chose {', '.join(chosen)}"])


def spec_of(suite: str, seed: int, device: str) -> dict[str, Any]:
    """All tasks of a suite as a run: Task Arithmetic at 0.3."""
    rest = {
        "merge": {"method": "task_arithmetic", "scaling": 0.3},
        "metrics": {"jacobian": False, "contributions": False, "prefix": False},
        "compute": {"device": device},
    }
    defaults = {"n": SAMPLES, "n_diagnosis": 128, "n_test": "all", "seed": seed}
    if suite == "embedded":
        from driftlens.progress import Reporter
        from driftlens.suites.embedded import embedded_suite

        given: Any = embedded_suite(seed=0, reporter=Reporter()).spec()
        spec = given if isinstance(given, Mapping) else given.model_dump(exclude_unset=True, mode="json")
        return {
            **spec,
            **rest,
            "data": {**spec["data"], "defaults": {**spec["data"]["defaults"], **defaults}},
        }
    root = SHARED / ("real" if suite == "real" else "real_text")
    models = root / ("hf" if suite == "real" else suite)
    loader = {"real": "hf-clip", "t5": "hf-t5", "llama": "hf-decoder"}[suite]
    tasks = sorted(path.name for path in models.iterdir() if path.is_dir() and path.name != "base")
    data: dict[str, Any] = {"defaults": {**defaults, "batch_size": 32}}
    for task in tasks:
        if suite == "real":
            data[task] = {"kind": "npz", "file": str(root / "data" / f"{task}.npz")}
            continue
        at = root / "data" / task
        data[task] = {"kind": "jsonl", "calibration": str(at / "train.jsonl"), "test": str(at / "test.jsonl")}
        data[task]["metric"] = "exact_match"
        if suite == "llama":
            data[task]["prompt"] = "{input}\nanswer:"
    spec = {
        "version": 1,
        "name": suite,
        "architecture": {"loader": loader, "source": str(models / "base")},
        "base": {"weights": str(models / "base")},
        "experts": {task: {"weights": str(models / task)} for task in tasks},
        **rest,
        "data": data,
    }
    if suite == "real":
        scale = json.loads((root / "suite.json").read_text())["logit_scale"]
        head = {"file": str(root / "heads.safetensors"), "logit_scale": scale}
        spec["heads"] = {task: {**head, "tensor": task} for task in tasks}
    return spec


if __name__ == "__main__":
    print(run("cpu", sys.argv[1:]))
