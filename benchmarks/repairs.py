"""Ways to repair a merge beside each other: score, KL to the experts and drift, over draws of 64 samples a task.

`python -m benchmarks.repairs --suites llama --draws 0 1` runs what a folder lacks yet, a file per suite and draw, and
prints tables of all that it has. Settings are those published or declared as defaults; `--auto` alone chooses, from
the calibration samples. Every draw is judged on the same test samples, which no calibration reads: changes are paired
by test sample.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from driftlens.records.intervals import Interval, mean_change, mean_over_tasks

SHARED = pathlib.Path(__file__).resolve().parents[2] / "shared"
SAMPLES, DRAWS, TEXTS = 64, 5, 200
PRESETS = {"real": "paper-clip", "embedded": "paper-clip", "t5": "flan-t5", "llama": "llama-3b"}
METRICS = {"real": "accuracy", "embedded": "accuracy", "t5": "exact_match", "llama": "exact_match"}
FEATCAL, AUTO = "FeatCal's preset", "--auto"
METHODS: dict[str, dict[str, Any]] = {
    "residual": {"method": "residual"},
    "residual, mu=0.9": {"method": "residual", "parameters": {"mu": 0.9}},
    "norms only": {"method": "featcal", "parameters": {"update": ["norm"]}},
    "SVC": {"method": "svc"},
    "ReACT, a map per task": {"method": "react"},
    "Surgery, a map per task": {"method": "surgery"},
    "ProbSurgery, a map per task": {"method": "prob_surgery"},
}
Found = dict[str, dict[str, dict[str, list[float]]]]
"""Model -> task -> score, KL and final relative drift: one value per test sample, of drift one alone."""


def run(
    device: str,
    suites: Sequence[str] = tuple(PRESETS),
    draws: Sequence[int] = range(DRAWS),
    folder: str = "repairs",
) -> str:
    """A table per suite of the draws that the folder has, those asked for included."""
    place, tables = pathlib.Path(folder), []
    place.mkdir(exist_ok=True)
    for suite in suites:
        for file in (place / f"{suite}-{draw}.json" for draw in draws):
            if not file.exists() and (suite == "embedded" or SHARED.is_dir()):
                file.write_text(json.dumps(drawn(suite, int(file.stem.rpartition("-")[2]), device)))
        found = [json.loads(file.read_text()) for file in sorted(place.glob(f"{suite}-*.json"))]
        if not found:
            tables.append(f"{suite}: not on this machine")
            continue
        tables.append(table(suite, [draw["models"] for draw in found]))
        tables.append(f"{AUTO} chose, by draw: {'; '.join(draw['chosen'] for draw in found)}")
    return "\n\n".join(tables)


def drawn(suite: str, draw: int, device: str) -> dict[str, Any]:
    """All models with the calibration samples of one draw, and what was chosen with them."""
    import driftlens as dl

    with tempfile.TemporaryDirectory() as place:
        spec = spec_of(suite, draw, device, pathlib.Path(place))
        made = dl.analyze(spec, out=f"{place}/run", progress="none")
        shown = {"base": "base", "expert": "expert", "merged": "merged"}
        preset = {"preset": PRESETS[suite]}
        asked: dict[str, dict[str, Any]] = {FEATCAL: preset, **METHODS, AUTO: {**preset, "auto": True}}
        for number, (title, options) in enumerate(asked.items()):
            name = f"m{number}"
            made = dl.calibrate(made, name=name, attribution=False, progress="none", **options)
            shown[title] = f"calibrated:{name}"
        selection = made.manifest.calibrations[shown[AUTO].partition(":")[2]].selection
        titles = {entry["name"]: entry["title"] for entry in selection["compared"]}
        return {
            "chosen": titles[selection["choice"]],
            "selection": dict(selection),
            "models": {
                title: {task: _measured(made, variant, task, METRICS[suite]) for task in spec["experts"]}
                for title, variant in shown.items()
            },
        }


def _measured(made: Any, variant: str, task: str, metric: str) -> dict[str, list[float]]:
    is_expert = variant == "expert"
    rows = made.outputs(task=task, variant="merged" if is_expert else variant).sort_values("sample_id")
    if metric == "accuracy":
        score = rows["expert_pred" if is_expert else "pred"] == rows["label"]
    else:
        scores = made.scores(task=task, variant=variant).sort_values("sample_id")
        score = scores[scores["metric"] == metric]["value"]
    kl = 0 * rows["kl"] if is_expert else rows["kl"]
    drift = 0.0 if is_expert else made.layers(task, variant).iloc[-1]["drift_rel"]
    return {"score": [float(x) for x in score], "kl": [float(x) for x in kl], "drift": [float(drift)]}


def table(suite: str, draws: Sequence[Found]) -> str:
    """Means over tasks and draws; changes with 95 % intervals, paired by test sample (each one's mean over draws)."""
    tasks = list(draws[0]["merged"])
    n = sum(len(draws[0]["merged"][task]["score"]) for task in tasks)
    columns = ("score, %", "KL, nat")
    changes = [f"{column} against {of}" for column in columns for of in (FEATCAL, "merged")]
    head = ["", columns[0], "by draw", *changes[:2], columns[1], *changes[2:], "relative drift"]
    lines = [
        f"{suite}: {len(tasks)} tasks, {SAMPLES} samples a task, {len(draws)} draws, n = {n} test samples, "
        f"score {METRICS[suite]}",
        f"| {' | '.join(head)} |",
        "|---" * len(head) + "|",
    ]
    for name in draws[0]:
        by_draw = [np.mean([np.mean(draw[name][task]["score"]) for task in tasks]) for draw in draws]
        cells = [name, f"{100 * np.mean(by_draw):.1f}"]
        cells.append(
            ", ".join(f"{100 * mean:.1f}" for mean in by_draw) if name in (FEATCAL, *METHODS, AUTO) else ""
        )
        for column, scale, digits in (("score", 100, 1), ("kl", 1, 3)):
            if column == "kl":
                mean = np.mean([np.mean(draw[name][task]["kl"]) for draw in draws for task in tasks])
                cells.append(f"{mean:.3f}")
            for start in (FEATCAL, "merged"):
                gap = _change(draws, start, name, column).scaled(scale)
                ends = f"{gap.low:+.{digits}f} to {gap.high:+.{digits}f}"
                cells.append("" if start == name else f"{gap.value:+.{digits}f} ({ends})")
        cells.append(f"{np.mean([draw[name][task]['drift'] for draw in draws for task in tasks]):.3f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _change(draws: Sequence[Found], start: str, end: str, column: str) -> Interval:
    """Of the mean over tasks; a sample's value is its mean over draws."""
    found = []
    for task in draws[0][start]:
        before, after = (np.mean([draw[of][task][column] for draw in draws], axis=0) for of in (start, end))
        found.append(mean_change(before, after, is_paired=True).difference)
    return mean_over_tasks(found)


def spec_of(suite: str, seed: int, device: str, place: pathlib.Path) -> dict[str, Any]:
    """All tasks of a suite as a run: Task Arithmetic at 0.3, features compared on the test samples."""
    rest = {
        "merge": {"method": "task_arithmetic", "scaling": 0.3},
        "metrics": {"jacobian": False, "contributions": False, "prefix": False},
        "compute": {"device": device},
    }
    defaults = {"n": SAMPLES, "n_test": "all", "seed": seed}
    if suite == "embedded":
        from driftlens.progress import Reporter
        from driftlens.suites.embedded import embedded_suite

        given: Any = embedded_suite(seed=0, reporter=Reporter()).spec()
        spec = given if isinstance(given, Mapping) else given.model_dump(exclude_unset=True, mode="json")
        data: dict[str, Any] = {task: {**of} for task, of in spec["data"].items() if task != "defaults"}
    else:
        root = SHARED / ("real" if suite == "real" else "real_text")
        models = root / ("hf" if suite == "real" else suite)
        loader = {"real": "hf-clip", "t5": "hf-t5", "llama": "hf-decoder"}[suite]
        tasks = sorted(path.name for path in models.iterdir() if path.is_dir() and path.name != "base")
        spec = {
            "version": 1,
            "name": suite,
            "architecture": {"loader": loader, "source": str(models / "base")},
            "base": {"weights": str(models / "base")},
            "experts": {task: {"weights": str(models / task)} for task in tasks},
        }
        if suite == "real":
            scale = json.loads((root / "suite.json").read_text())["logit_scale"]
            head = {"file": str(root / "heads.safetensors"), "logit_scale": scale}
            spec["heads"] = {task: {**head, "tensor": task} for task in tasks}
            data = {task: {"kind": "npz", "file": str(root / "data" / f"{task}.npz")} for task in tasks}
        else:
            data = {task: _texts(root / "data" / task, place / f"{task}.jsonl") for task in tasks}
            for of in data.values() if suite == "llama" else ():
                of["prompt"] = "{input}\nanswer:"
    for of in data.values():
        of["n_diagnosis"] = len(np.load(of["file"])["y_test"]) if of["kind"] == "npz" else TEXTS
    return {**spec, **rest, "data": {"defaults": {**defaults, "batch_size": 32}, **data}}


def _texts(folder: pathlib.Path, test: pathlib.Path) -> dict[str, Any]:
    """The same first lines of the test file in every draw."""
    with (folder / "test.jsonl").open() as lines:
        test.write_text("".join(itertools.islice(lines, TEXTS)))
    files = {"calibration": str(folder / "train.jsonl"), "test": str(test)}
    return {"kind": "jsonl", **files, "metric": "exact_match"}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suites", nargs="*", default=tuple(PRESETS))
    parser.add_argument("--draws", nargs="*", type=int, default=range(DRAWS))
    parser.add_argument("--folder", default="repairs", help="where what was measured is kept")
    print(run("cpu", **vars(parser.parse_args())))
