"""Save a calibration as LoRA adapters, and measure how much of the repair they keep. Entry: `save_measured_adapter`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from driftlens.checkpoints.lora import LoraSource
from driftlens.experiment.study import Study
from driftlens.experiment.study_loading import OpenModels
from driftlens.models.adapters import write_adapter
from driftlens.pipelines.analyze import run_phase
from driftlens.pipelines.evaluation import final_drift_columns, final_features, score_variants
from driftlens.results.measures import RELATIVE, bootstrap_change, main_metrics, value_on_task
from driftlens.runs.run import DriftRun, open_run
from driftlens.runs.tables import json_value
from driftlens.runs.writer import RunWriter
from driftlens.utils.distributed import ALONE, ProgressReporter
from driftlens.utils.files import atomic_folder
from driftlens.utils.intervals import mcnemar_test
from driftlens.utils.variants import calibrated_variant, expert_name

# The name of base and adapters in the pool; the run has no rows of it.
_ADAPTED = "adapter"


def save_measured_adapter(
    writer: RunWriter, study: Study, models: OpenModels, name: str, target: Path, rank: int, reporter: ProgressReporter
) -> None:
    """Save the change from the base to a calibrated model as LoRA adapters; record their scores and drift in the run.

    The saved files are measured on the samples on which the calibration was measured. If that fails, none is left.

    Args:
        writer: the run's writer.
        study: the models, the calibrated one included, and the samples.
        models: the opened checkpoints.
        name: of the calibration.
        target: the folder of the adapters.
        rank: the largest rank of a module.
        reporter: receives progress.
    """
    alone, base = dataclasses.replace(study, team=ALONE), models.sources["base"]

    def _save_and_measure() -> None:
        run = open_run(writer.folder)
        model = study.pool.source(calibrated_variant(name))
        with atomic_folder(target) as folder:
            record = write_adapter(models.architecture, base, model, folder, rank, models.origins.get("base", ""))
            study.pool.add(_ADAPTED, LoraSource(base, folder))
            tasks = [_measured_columns(alone, run, name, task, reporter) for task in study.tasks]
        info = dataclasses.replace(writer.manifest.calibrations[name], adapter={**record, "tasks": tasks})
        writer.update_manifest(calibrations={name: info})

    run_phase(writer, f"calibrate:{name}:adapter", _save_and_measure, alone, again=True)


@torch.no_grad()
def _measured_columns(study: Study, run: DriftRun, name: str, task: str, reporter: ProgressReporter) -> dict[str, Any]:
    """Return score and relative drift of the adapters on one task, and their changes against the repair."""
    variant, samples = calibrated_variant(name), study.tasks[task].diagnosis
    features, expert = (
        final_features(study.pool, model, task, samples, study.settings.pool)
        for model in (_ADAPTED, expert_name(task))
    )
    columns: dict[str, Any] = {
        "task": task,
        "drift": final_drift_columns(features, expert)["drift_rel"],
        "drift_repaired": value_on_task(run, RELATIVE, task, variant).value,
    }
    if (metric := main_metrics(run).get(task)) is not None:
        tables = score_variants(study, task, [_ADAPTED], reporter).tables
        score = next(row for row in tables["accuracy"] if row["metric"] == metric.name)
        after, before = (
            rows[rows["metric"] == metric.name].set_index("sample_id")
            for rows in (pd.DataFrame(tables["scores"]), run.scores(task, variant))
        )
        values = before["value"].reindex(after.index).to_numpy(dtype=float), after["value"].to_numpy(dtype=float)
        if metric.kind == "share":
            answers = mcnemar_test(*(side == 1 for side in values))
            ends = (answers.difference, answers.ci_low, answers.ci_high)
        else:
            ends = bootstrap_change(metric, *values, after["reference"].to_numpy(dtype=float)).ends
        columns |= {"metric": metric.name, "score": score["value"], "low": score["ci_low"], "high": score["ci_high"]}
        columns |= {"n": len(after), **dict(zip(("change", "change_low", "change_high"), ends, strict=True))}
    return {column: json_value(value) for column, value in columns.items()}
