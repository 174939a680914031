"""Train both suites anew and put models, samples and run specs into `driftlens/demo`; about 20 minutes."""

from __future__ import annotations

import json
import shutil
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from tools.build_demo import image, text

DEMO = Path(__file__).parents[2] / "driftlens" / "demo"
RECORD = Path(__file__).with_name("record.json")
"""Recipes, and test accuracies of base and expert by task, of what is in the package."""
SUITES: dict[str, Any] = {"image": image, "text": text}
# Task Arithmetic as in the published benchmarks; of the eight image experts it makes a merge that is not better than
# their base, and TSV-M makes the one that `merge --compare` ranks first.
MERGES: dict[str, dict[str, Any]] = {
    "image": {"method": "tsv_m"},
    "text": {"method": "task_arithmetic", "scaling": 0.3},
}
COMMON = {
    # Jacobians cost most; a demo shows the way there, not the third digit.
    "metrics": {"jacobian": {"samples": 8}},
}
COUNTS = {"n": image.SHIPPED, "n_diagnosis": 128, "n_test": "all"}


def write_spec(folder: Path, name: str) -> None:
    """Write the run spec of a suite."""
    spec = SUITES[name].spec()
    filled = {"version": 1, **spec, "merge": MERGES[name], **COMMON, "data": {"defaults": COUNTS, **spec["data"]}}
    content = yaml.safe_dump(filled, sort_keys=False, width=110)
    (folder / "run.yaml").write_text(content, encoding="utf-8")


def main() -> None:
    """Build everything and print accuracies."""
    torch.set_num_threads(1)  # these models gain little from a second thread, and sums depend on their number
    warnings.filterwarnings("ignore", category=FutureWarning)  # what peft still asks of transformers
    record = {}
    for name, suite in SUITES.items():
        folder = DEMO / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        measured = suite.build(folder)
        write_spec(folder, name)
        record[name] = {"recipe": asdict(suite.RECIPE), "test_accuracy": measured}
        print(f"{name}: {measured}", flush=True)
    np.savez_compressed(DEMO / "probe.npz", x=image.probe())
    RECORD.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
