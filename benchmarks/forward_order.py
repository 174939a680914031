"""What forward order is worth on a finished run: `python -m benchmarks.forward_order RUN [preset ...]`.

Beside the schedule of Algorithm 1 stands the one without it: every layer is calibrated on features of the merged model
as it was (Sec. 4.3). Drift is on the run's diagnosis samples, accuracy on its test samples; calibration sees neither.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from driftlens.calibration.featcal import PRESETS, FeatCal
from driftlens.engine.calibrating import CalibrationContext
from driftlens.engine.sites import select_sites
from driftlens.experiment.study import Study
from driftlens.pipelines.analyze import reopen_study
from driftlens.pipelines.calibration_plan import replace_parameters
from driftlens.pipelines.evaluation import correct_predictions, final_drift_columns, final_features
from driftlens.utils.distributed import ProgressReporter
from driftlens.utils.variants import expert_name

Updates = dict[tuple[int, str], Tensor]


def main() -> None:
    """Print relative final drift and mean test accuracy of the merged model and of both schedules."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", help="a finished run")
    parser.add_argument("presets", nargs="*", default=["paper-clip"])
    arguments = parser.parse_args()
    study, _ = reopen_study(arguments.run, with_calibrations=False)
    print(f"merged: {_measured(study, 'merged')}")
    for preset in arguments.presets:
        calibrator = FeatCal(**PRESETS[preset])
        chosen = select_sites(study.pool.chain, update=calibrator.update)
        schedules: dict[str, list[Mapping[int, Collection[str]]]] = {
            "forward order": [chosen],
            "stale features": [{index: names} for index, names in chosen.items()],
        }
        for schedule, walks in schedules.items():
            found: Updates = {}
            for sites in walks:
                found |= _calibrated(study, calibrator, sites)
            print(f"{preset}, {schedule}: {_measured(study, _added(study, f'{preset} {schedule}', found))}")


def _calibrated(study: Study, calibrator: FeatCal, sites: Mapping[int, Collection[str]]) -> Updates:
    samples = {task: [at.calibration] for task, at in study.tasks.items() if at.calibration}
    with torch.no_grad():
        layers = calibrator.calibrate(CalibrationContext(study.pool, samples, sites))
        return {(found.layer, name): value for found in layers for name, value in found.updates.items()}


def _added(study: Study, name: str, found: Updates) -> str:
    pool = study.pool
    study.pool.add(name, replace_parameters(pool.chain, pool.source("merged"), pool.source("base"), found))
    return name


def _measured(study: Study, model: str) -> str:
    drifts, found = [], []
    for task, at in study.tasks.items():
        features = (
            final_features(study.pool, name, task, at.diagnosis, study.settings.pool)
            for name in (model, expert_name(task))
        )
        drifts.append(final_drift_columns(*features)["drift_rel"])
        hits = correct_predictions(study, task, [model], ProgressReporter())
        found += [sum(hit for (hit,) in of) / len(of) for of in hits.values()]
    mean = [sum(values) / len(values) for values in (drifts, found)]
    return f"relative final drift {mean[0]:.3f}, accuracy {mean[1]:.1%}"


if __name__ == "__main__":
    main()
