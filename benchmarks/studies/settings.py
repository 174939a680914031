"""Compare settings of calibrations with the default ones: `python -m benchmarks.studies.settings NAME KEPT`.

KEPT is the folder of a study whose first draw is measured, and whose calibrations have the defaults. The settings are
fitted to the same texts; those that `--auto` chose are not fitted again. A setting that is clearly better here becomes
a default or a preset only if it is not worse on another study. `--only` takes the numbers of settings, which are
counted from 1 for each method. Finished ones are kept, and written to `settings.json`, from which
`benchmarks.studies.pages` writes a table.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pathlib
import shutil
from typing import Any

import driftlens as dl
from benchmarks.repairs import paired_change
from benchmarks.studies.study import COMPARED, measure_model
from driftlens.results.formatting import format_estimate
from driftlens.utils.files import write_json_atomic
from driftlens.utils.variants import calibrated_variant

VIEWS = "views"
SETTINGS: dict[str, tuple[dict[str, Any], ...]] = {
    "featcal": (
        {"lam": 1e-5},
        {"lam": 1.0},
        {"alpha": 0.6},
        {"rho": 1.0},
        {"rho": 3.0, "alpha": 0.5},
        {"lam": 1e-5, "rho": 2.0, "alpha": 0.6},
        {"lam": 1e-5, "rho": 0.5, "alpha": 0.15, "update": ["linear"]},
    ),
    "residual": ({"mu": 0.9}, {"weights": "uniform"}, {"mu": 0.9, VIEWS: "auto:3"}),
}


def main() -> None:
    """Calibrate with each setting, and write its gain over the method's default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of the study's module")
    parser.add_argument("kept", type=pathlib.Path)
    parser.add_argument("--only", nargs="+", default=(), metavar="METHOD:NUMBER")
    arguments = parser.parse_args()
    study = importlib.import_module(f"benchmarks.studies.{arguments.name}").STUDY
    place = arguments.kept / "runs" / "settings"
    if not place.exists():
        shutil.copytree(arguments.kept / "runs" / "average-0", place)
    run, file = dl.open_run(place), arguments.kept / COMPARED
    compared = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    for method, each in SETTINGS.items():
        default = {task: measure_model(study, run, calibrated_variant(method), task) for task in study.tasks}
        for number, settings in enumerate(each, start=1):
            if arguments.only and f"{method}:{number}" not in arguments.only:
                continue
            name = f"{method}-setting-{number}"
            parameters = {key: value for key, value in settings.items() if key != VIEWS}
            views = {key: value for key, value in settings.items() if key == VIEWS}
            if is_choice(run, method, parameters, settings.get(VIEWS, "none")):
                name = "auto"
            else:
                run = dl.calibrate(
                    run,
                    name=name,
                    method=method,
                    parameters=parameters,
                    **views,
                    resume=True,
                    attribution=False,
                    progress="none",
                )
            found = {task: measure_model(study, run, calibrated_variant(name), task) for task in study.tasks}
            gain = paired_change([{"from": default, "to": found}], "from", "to", "score")
            written = ", ".join(f"`{key}={value}`" for key, value in settings.items()).replace("'", "")
            compared[f"`{method}`: {written}"] = gain.ends
            write_json_atomic(file, compared)
            print(f"{method}, {written}: {format_estimate(gain, 'points')}", flush=True)


def is_choice(run: Any, method: str, parameters: dict[str, Any], views: str) -> bool:
    """Return True if `--auto` chose these settings of a method, with these views of the texts."""
    auto = run.manifest.calibrations["auto"]
    settings = {**run.manifest.calibrations[method].settings, **parameters}
    return auto.method == method and auto.settings == settings and {*auto.views.values()} == {views}


if __name__ == "__main__":
    main()
