"""Variants added to a finished run are measured like its own; rows that are there keep their exact values."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

from driftlens.pipeline.diagnosis import TaskDiagnosis, diagnose
from driftlens.pipeline.phases import (
    compare_parameters,
    digest_models,
    measure_accuracy,
    run_phase,
    store_diagnosis,
)
from driftlens.pipeline.study import Study
from driftlens.progress import Reporter
from driftlens.records.writer import RunWriter


def analyze_variants(
    writer: RunWriter, study: Study, variants: Sequence[str], reporter: Reporter, *, prefix: str
) -> None:
    """Measure drift, causes, parameters, scores and accuracy of variants that the study's pool holds.

    Args:
        writer: of the run.
        study: with the variants in its pool.
        variants: the new ones.
        reporter: told of every layer; may cancel.
        prefix: of the phases' names; a phase that is done is not done again.

    Raises:
        DriftLensError: as for `driftlens.pipeline.analyze.analyze`.
    """
    new = _only(study, variants)
    run_phase(writer, f"{prefix}:digests", lambda: digest_models(writer, new, variants))
    for task in new.tasks:
        work = partial(_diagnose, writer, new, variants, task, reporter)
        run_phase(writer, f"{prefix}:analyze:{task}", work)
    if new.has_base:
        run_phase(writer, f"{prefix}:params", lambda: compare_parameters(writer, new, reporter))
    for task in new.tasks:
        work = partial(measure_accuracy, writer, new, task, variants, reporter)
        run_phase(writer, f"{prefix}:evaluate:{task}", work)


def _diagnose(
    writer: RunWriter, study: Study, variants: Sequence[str], task: str, reporter: Reporter
) -> None:
    store_diagnosis(writer, task, _of_variants(diagnose(study, task, reporter), variants))


def _only(study: Study, variants: Sequence[str]) -> Study:
    """The study of these variants; the base walks along, because their drift is related to its own."""
    return dataclasses.replace(study, variants=(*(["base"] if study.has_base else []), *variants))


def _of_variants(found: TaskDiagnosis, variants: Sequence[str]) -> TaskDiagnosis:
    """What was found of these variants alone: the base's and the expert's are in the run already."""
    return dataclasses.replace(
        found,
        layers=[row for row in found.layers if row["variant"] in variants],
        samples=[columns for columns in found.samples if columns["variant"] in variants],
        outputs=[columns for columns in found.outputs if columns["variant"] in variants],
        features={key: array for key, array in found.features.items() if key[0] in variants},
    )
