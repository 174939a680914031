"""Four LoRA experts of a small pretrained language model, merged and repaired.

`python -m benchmarks.language_experts TEXTS --model FOLDER --folder KEPT`: TEXTS contains a folder per task with
`train.jsonl` and `test.jsonl` of `input` and `target`. FOLDER is a decoder saved by transformers, or a `.gguf` file,
which transformers dequantizes. Adapters and the run are stored in KEPT and reused.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
import resource
import time

import driftlens as dl
from benchmarks.embeddings import record_variants
from benchmarks.figures import record
from benchmarks.studies.decoder import unpack_gguf
from benchmarks.studies.packages import read_rows
from benchmarks.studies.study import make_once
from benchmarks.studies.training import train_adapter

TASKS = ("equation", "pos", "subj", "trec")
PROMPT = "{input}\nanswer:"
STEPS = 80
REPAIRS = ("featcal", "residual")


def main() -> None:
    """Train what is not there yet, merge, repair and print a line each variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=pathlib.Path)
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--merge", default="average")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--tests", type=int, default=200)
    arguments = parser.parse_args()
    base = arguments.model
    if base.suffix == ".gguf":
        content = base.read_bytes()
        base = make_once(arguments.folder / "base", lambda out: unpack_gguf(content, out))
    for seed, task in enumerate(TASKS):
        rows = read_rows(arguments.texts / task / "train.jsonl")
        rows = [{"text": row["input"], "target": row["target"]} for row in rows]
        make_once(
            arguments.folder / task,
            lambda out, rows=rows, seed=seed: train_adapter(base, out, rows, arguments.steps, seed),
        )
    _measure(base, arguments)


def _measure(base: pathlib.Path, arguments: argparse.Namespace) -> None:
    """Record exact match and drift of every variant on every task, and the cost."""
    files = {task: arguments.texts / task for task in TASKS}
    data = {
        task: {
            "kind": "jsonl",
            "prompt": PROMPT,
            "metric": "exact_match",
            "calibration": str(file / "train.jsonl"),
            "test": str(file / "test.jsonl"),
        }
        for task, file in files.items()
    }
    counts = {"n": arguments.samples, "n_diagnosis": 64, "n_test": arguments.tests}
    spec = {
        "version": 1,
        "architecture": {"loader": "hf-decoder", "source": str(base)},
        "base": {"weights": str(base)},
        "merge": {"method": arguments.merge},
        "experts": {task: {"weights": str(arguments.folder / task)} for task in TASKS},
        "data": {"defaults": {**counts, "batch_size": 32}, **data},
        "metrics": {"jacobian": False, "contributions": False, "prefix": False},
    }
    clocks = [time.process_time()]
    run = dl.analyze(spec, out=arguments.folder / "run", progress="none", resume=True)
    clocks.append(time.process_time())
    for name in REPAIRS:
        run = dl.calibrate(run, name=name, method=name, resume=True, progress="none")
        clocks.append(time.process_time())
    spent = [f"{(end - begin) / 60:.1f} min" for begin, end in itertools.pairwise(clocks)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    variants = ("base", "expert", "merged", *(f"calibrated:{name}" for name in REPAIRS))
    case = f"{base.name}, four LoRA experts"
    record_variants("language_experts", case, run, TASKS, variants, "exact_match")
    record("language_experts", f"{case}: CPU time of analysis; FeatCal; residual calibration", "; ".join(spent))
    record("language_experts", f"{case}: peak memory", f"{peak:.0f} MiB")


if __name__ == "__main__":
    main()
