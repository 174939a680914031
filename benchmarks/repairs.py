"""Repairs compared: score, KL to the experts, drift and cost, over draws of samples.

`python -m benchmarks.repairs --suites llama --draws 0 1 --methods surgery norms` adds missing draws to a folder, one
file per suite, draw and number of samples (`--samples`, by default 64 per task), and prints a table per suite. Settings
are published ones or defaults; only `--auto` chooses, from the calibration samples. All draws are scored on the same
test samples, which no calibration reads, so changes are paired by test sample. Seconds are CPU time of calibrating.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.figures import record
from driftlens.utils.intervals import Interval, mean_change, mean_over_tasks

SHARED = pathlib.Path(__file__).resolve().parents[2] / "shared"
SAMPLES, DRAWS, TEXTS = 64, 5, 200
PRESETS = {"real": "paper-clip", "embedded": "paper-clip", "t5": "flan-t5", "llama": "llama-3b"}
NAMES = {"real": "images", "embedded": "embedded images", "t5": "texts of T5", "llama": "texts"}
METRICS = {"real": "accuracy", "embedded": "accuracy", "t5": "exact_match", "llama": "exact_match"}
FEATCAL, AUTO = "FeatCal's preset", "--auto"
FEW = 16
"""Where a task has at most so many samples, views make 7 copies of each, else 3."""
VIEWS = {"views": "auto"}
METHODS: dict[str, dict[str, Any]] = {
    "residual": {"method": "residual"},
    "residual, mu=0.9": {"method": "residual", "parameters": {"mu": 0.9}},
    "residual, views": {"method": "residual"} | VIEWS,
    "norms only": {"method": "featcal", "parameters": {"update": ["norm"]}},
    "Surgery, a map per task": {"method": "surgery"},
    "Surgery, a map per task, views": {"method": "surgery"} | VIEWS,
    "ProbSurgery, a map per task": {"method": "prob_surgery"},
    "ProbSurgery, a map per task, views": {"method": "prob_surgery"} | VIEWS,
}
MERGES: dict[str, dict[str, Any]] = {
    "merge: RegMean": {"merge": {"method": "regmean"}},
    "merge: RegMean, views": {"merge": {"method": "regmean"}} | VIEWS,
}
Found = dict[str, dict[str, dict[str, list[float]]]]
"""Model -> task -> score, KL, final relative drift and cosine: one value per test sample, of the last two one alone."""


def run(
    device: str,
    suites: Sequence[str] = tuple(PRESETS),
    draws: Sequence[int] = range(DRAWS),
    methods: Sequence[str] = (),
    folder: str = "repairs",
    samples: int = SAMPLES,
) -> None:
    """Print and record the draws that the folder has, after adding the missing ones; methods by title or name."""
    place = pathlib.Path(folder)
    place.mkdir(exist_ok=True)
    for suite in suites:
        kept = suite if samples == SAMPLES else f"{suite}-of-{samples}"
        asked: dict[str, dict[str, Any]] = {
            FEATCAL: {"method": "featcal", "preset": PRESETS[suite]},
            f"{FEATCAL}, views": {"method": "featcal", "preset": PRESETS[suite]} | VIEWS,
            **METHODS,
        }
        copies = {"views": f"auto:{7 if samples <= FEW else 3}"}
        asked = {title: of | (copies if "views" in of else {}) for title, of in (asked | MERGES).items()}
        asked[AUTO] = {"preset": PRESETS[suite], "auto": True}
        wanted = {title: of for title, of in asked.items() if not methods or {title, of.get("method")} & {*methods}}
        for draw in draws:
            if suite == "embedded" or SHARED.is_dir():
                complete(place / f"{kept}-{draw}.json", suite, draw, device, wanted, samples)
        found = [json.loads(file.read_text()) for file in sorted(place.glob(f"{kept}-[0-9]*.json"))]
        if not found:
            print(f"{suite}: not on this machine")
            continue
        titles = ("base", "expert", "merged", *asked)
        print(table(suite, found, titles, samples))
        chosen = [draw["chosen"] for draw in found if "chosen" in draw]
        print(f"{AUTO} chose, by draw: {'; '.join(chosen) or 'not run'}")
        for title in titles:
            draws = [draw["models"] for draw in found if title in draw["models"]]
            if draws:
                costs = [draw["costs"][title] for draw in found if title in draw["costs"]]
                _, score, _, _, gain, *_ = _row(title, draws, list(draws[0]["merged"]), costs)
                value = f"{score} %" + (f" (against merged {gain})" if gain else "")
                record("repairs", f"{NAMES[suite]}, {samples} samples: {title}", value, device=device)


def complete(
    file: pathlib.Path,
    suite: str,
    draw: int,
    device: str,
    wanted: Mapping[str, Mapping[str, Any]],
    samples: int,
) -> None:
    """Add to the file what it lacks of the methods wanted, with the calibration samples of one draw."""
    import driftlens as dl

    known: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"models": {}, "costs": {}}
    # The choice comes first, because calibrations that a run already has are candidates of it.
    order = sorted(wanted.items(), key=lambda item: "auto" not in item[1])
    lacking = {title: options for title, options in order if title not in known["models"]}
    if not lacking:
        return
    with tempfile.TemporaryDirectory() as place:
        spec = spec_of(suite, draw, device, pathlib.Path(place), samples)
        made, tasks = dl.analyze(spec, out=f"{place}/run", progress="none"), spec["experts"]
        metric = METRICS[suite]
        for title in ("base", "expert", "merged"):
            known["models"][title] = {task: measured_values(made, title, task, metric) for task in tasks}
        for title, options in lacking.items():
            name, clock = f"m{len(known['models'])}", CpuClock(*["merge"] * ("merge" in options))
            if "merge" in options:
                defaults = spec["data"]["defaults"] | {key: options[key] for key in ("views",) if key in options}
                given = {**spec, "merge": options["merge"], "data": {**spec["data"], "defaults": defaults}}
                other = dl.analyze(given, out=f"{place}/{name}", progress="none", on_progress=clock)
                known["models"][title] = {task: measured_values(other, "merged", task, metric) for task in tasks}
                known["costs"][title] = {"seconds": clock.seconds, "added": 0}
                file.write_text(json.dumps(known))
                continue
            made = dl.calibrate(made, name=name, attribution=False, progress="none", on_progress=clock, **options)
            shown, info = f"calibrated:{name}", made.manifest.calibrations[name]
            known["models"][title] = {task: measured_values(made, shown, task, metric) for task in tasks}
            known["costs"][title] = {"seconds": clock.seconds, "added": info.attached}
            if options.get("auto"):
                titles = {entry["name"]: entry["title"] for entry in info.selection["compared"]}
                known |= {"chosen": titles[info.selection["choice"]], "selection": dict(info.selection)}
            file.write_text(json.dumps(known))
            print(suite, draw, title, f"{clock.seconds:.1f} s", flush=True)


class CpuClock:
    """Processor time between the first and the last event of calibrating, or of these phases."""

    def __init__(self, *phases: str) -> None:
        self._phases = phases or ("calibrate", "choose")
        self.begun: float | None = None
        self.seconds = 0.0

    def __call__(self, event: Any) -> None:
        if event.phase in self._phases:
            self.begun = time.process_time() if self.begun is None else self.begun
            self.seconds = time.process_time() - self.begun


def measured_values(made: Any, variant: str, task: str, metric: str) -> dict[str, list[float]]:
    """Return score and KL of every sample of a task, and the model's relative final drift and cosine."""
    is_expert = variant == "expert"
    rows = made.outputs(task=task, variant="merged" if is_expert else variant).sort_values("sample_id")
    if metric == "accuracy":
        score = rows["expert_pred" if is_expert else "pred"] == rows["label"]
    else:
        scores = made.scores(task=task, variant=variant).sort_values("sample_id")
        score = scores[scores["metric"] == metric]["value"]
    kl = 0 * rows["kl"] if is_expert else rows["kl"]
    last = None if is_expert else made.layers(task, variant).iloc[-1]
    drift, cosine = (0.0, 1.0) if last is None else (last["drift_rel"], last["cos_mean"])
    values = {"score": score, "kl": kl, "drift": [drift], "cosine": [cosine]}
    return {key: [float(x) for x in of] for key, of in values.items()}


def table(suite: str, found: Sequence[Mapping[str, Any]], titles: Sequence[str], samples: int = SAMPLES) -> str:
    """Means over tasks and draws; changes with 95 % intervals, paired by test sample (each one's mean over draws).

    Behind ± stands a standard error over draws. Every model is of the draws that have it, and so is what it is compared
    with.
    """
    every: Sequence[Found] = [draw["models"] for draw in found]
    tasks = list(every[0]["merged"])
    n = sum(len(every[0]["merged"][task]["score"]) for task in tasks)
    columns = ("score, %", "KL, nat")
    changes = [f"{column} against {of}" for column in columns for of in (FEATCAL, "merged")]
    head = ["", columns[0], "by draw", *changes[:2], columns[1], *changes[2:], "relative drift", "cosine"]
    head += ["processor seconds", "added numbers", "knows the task"]
    lines = [
        f"{suite}: {len(tasks)} tasks, {samples} samples a task, {len(every)} draws, n = {n} test samples, "
        f"score {METRICS[suite]}",
        f"| {' | '.join(head)} |",
        "|---" * len(head) + "|",
    ]
    for name in titles:
        draws = [draw for draw in every if name in draw]
        if draws:
            costs = [draw["costs"][name] for draw in found if name in draw["costs"]]
            lines.append(f"| {' | '.join(_row(name, draws, tasks, costs))} |")
    return "\n".join(lines)


def _row(name: str, draws: Sequence[Found], tasks: Sequence[str], costs: Sequence[Mapping[str, float]]) -> list[str]:
    by_draw = [np.mean([np.mean(draw[name][task]["score"]) for task in tasks]) for draw in draws]
    error = np.std(by_draw, ddof=1) / len(by_draw) ** 0.5 if costs and len(by_draw) > 1 else None
    cells = [name, f"{100 * np.mean(by_draw):.1f}" + ("" if error is None else f" ± {100 * error:.1f}")]
    cells.append(", ".join(f"{100 * mean:.1f}" for mean in by_draw) if costs else "")
    for column, scale, digits in (("score", 100, 1), ("kl", 1, 3)):
        if column == "kl":
            cells.append(f"{np.mean([np.mean(draw[name][task]['kl']) for draw in draws for task in tasks]):.3f}")
        for start in (FEATCAL, "merged"):
            if start == name or any(start not in draw for draw in draws):
                cells.append("")
                continue
            gap = paired_change(draws, start, name, column).scaled(scale)
            ends = f"{gap.low:+.{digits}f} to {gap.high:+.{digits}f}"
            cells.append(f"{gap.value:+.{digits}f} ({ends})")
    for column in ("drift", "cosine"):
        cells.append(f"{np.mean([draw[name][task][column] for draw in draws for task in tasks]):.3f}")
    seconds = [cost["seconds"] for cost in costs]
    cells.append(f"{np.mean(seconds):.0f}" if costs else "")
    cells += [f"{costs[0]['added']:,}", "yes" if costs[0]["added"] else "no"] if costs else ["", ""]
    return cells


def paired_change(draws: Sequence[Found], start: str, end: str, column: str) -> Interval:
    """Return the change of the mean over tasks between two models; a sample's value is its mean over draws."""
    found = []
    for task in draws[0][start]:
        before, after = (np.mean([draw[of][task][column] for draw in draws], axis=0) for of in (start, end))
        found.append(mean_change(before, after, is_paired=True).difference)
    return mean_over_tasks(found)


def spec_of(suite: str, seed: int, device: str, place: pathlib.Path, samples: int = SAMPLES) -> dict[str, Any]:
    """All tasks of a suite as a run: Task Arithmetic at 0.3, features compared on the test samples."""
    rest = {
        "merge": {"method": "task_arithmetic", "scaling": 0.3},
        "metrics": {"jacobian": False, "contributions": False, "prefix": False},
        "compute": {"device": device},
    }
    defaults = {"n": samples, "n_test": "all", "seed": seed}
    if suite == "embedded":
        from driftlens.config.spec import load_spec
        from driftlens.demo import spec_file

        spec: Any = load_spec(spec_file("image")).model_dump(exclude_unset=True, mode="json")
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
    parser.add_argument("--methods", nargs="*", default=(), help="titles or names; all where none is given")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="for calibration, a task")
    parser.add_argument("--folder", default="repairs", help="where what was measured is kept")
    run("cpu", **vars(parser.parse_args()))
