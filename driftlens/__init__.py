"""DriftLens: measure, explain and repair the feature drift of merged neural networks.

    import driftlens as dl

    run = dl.analyze("run.yaml", out="runs/ta8")
    run.layers(task="cars", variant="merged")

Importing this package is cheap: every name below is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "analyze": "driftlens.front.api",
    "calibrate": "driftlens.front.api",
    "capture": "driftlens.engine.walk",
    "CancelToken": "driftlens.utils.progress",
    "check": "driftlens.results.checks",
    "compare": "driftlens.results.compare",
    "compare_merges": "driftlens.front.api",
    "DriftRun": "driftlens.runs.run",
    "FeatCal": "driftlens.front.estimators",
    "ResidualCal": "driftlens.front.estimators",
    "Head": "driftlens.models.heads",
    "JacobianSettings": "driftlens.diagnostics.attribution",
    "merge": "driftlens.front.api",
    "ModelPool": "driftlens.engine.pool",
    "PathJacobian": "driftlens.linalg.state",
    "ProgressEvent": "driftlens.utils.progress",
    "project": "driftlens.front.api",
    "Report": "driftlens_reports.build",
    "RunSpec": "driftlens.config.spec",
    "decompose": "driftlens.engine.walk",
    "expert_cosine": "driftlens.linalg.state",
    "linear_cka": "driftlens.linalg.state",
    "load_spec": "driftlens.config.spec",
    "open_checkpoint": "driftlens.checkpoints.loading",
    "open_run": "driftlens.front.api",
    "sweep": "driftlens.front.api",
    "task_vector_cosine": "driftlens.diagnostics.drift_columns",
    "validate": "driftlens.front.api",
    "walk": "driftlens.engine.walk",
}

_MODULES = {"errors": "driftlens.utils.errors", "paper": "driftlens.front.paper"}

__all__ = sorted([*_HOMES, *_MODULES, "__version__"])


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name not in _HOMES:
        raise AttributeError(f"module 'driftlens' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def _version() -> str:
    """Return the installed version, or the next one in a clone that is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("driftlens-merge")
    except PackageNotFoundError:
        return "0.1.0"


def __dir__() -> list[str]:
    return __all__
