"""What a run says about a calibration once it is done: history rows, `config.yaml`, its entry in the manifest."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from driftlens.engine.problems import SiteReport
from driftlens.pipeline.calibration_plan import CalibrationPlan
from driftlens.records import layout
from driftlens.records.environment import versions
from driftlens.records.manifest import CalibrationInfo
from driftlens.records.schema import CALIBRATION
from driftlens.records.writer import RunWriter


def history_rows(name: str, reports: Sequence[tuple[int, SiteReport]]) -> list[dict[str, Any]]:
    """Rows of the calibration table: one per site, layer index first."""
    known = CALIBRATION.names
    return [
        {"name": name, "layer": layer}
        | {key: value for key, value in dataclasses.asdict(report).items() if key in known}
        for layer, report in reports
    ]


def record_solution(
    writer: RunWriter,
    plan: CalibrationPlan,
    reports: Sequence[tuple[int, SiteReport]],
    identity: dict[str, Any],
    info: CalibrationInfo,
) -> None:
    """Write the history of every site and `config.yaml`, in which all settings are resolved.

    Args:
        writer: of the run.
        plan: of the calibration.
        reports: one per site, with its layer's index.
        identity: everything that the solution depends on (see `CalibrationPlan.identity`).
        info: what the manifest will say.

    Raises:
        RunError: the folder can't be written to.
    """
    import pandas as pd

    from driftlens.spec.yaml_text import to_yaml

    writer.append("calibration", pd.DataFrame(history_rows(plan.name, reports)), replace=True)
    config = {
        "name": plan.name,
        "variant": plan.variant,
        "control": plan.control or None,
        "selection": dict(plan.selection) or None,
        **identity,
        "num_samples": plan.counts,
        "seconds": round(info.seconds, 3),
        "notices": list(info.notices),
        "versions": versions(),
    }
    with writer.file(f"{layout.calibration_folder(plan.name)}/config.yaml") as path:
        path.write_text(to_yaml(config), encoding="utf-8")


def calibration_info(plan: CalibrationPlan, seconds: float, notices: Sequence[str]) -> CalibrationInfo:
    """The entry of the manifest."""
    return CalibrationInfo(
        method=plan.method,
        settings=plan.hyperparameters,
        control=plan.control,
        seconds=seconds,
        samples=plan.counts,
        sample_digests=plan.sample_digests,
        layers=sorted(plan.sites),
        automatic=plan.automatic,
        notices=tuple(notices),
        preset=plan.preset,
        sites=tuple(plan.patterns),
        seed=plan.seed,
        selection=plan.selection,
    )
