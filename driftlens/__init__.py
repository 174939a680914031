"""DriftLens: measure, explain and repair the feature drift of merged neural networks.

    import driftlens as dl

    run = dl.analyze("run.yaml", out="runs/ta8")
    run.layers(task="cars", variant="merged")

Importing this package is cheap: every name below is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "analyze": "driftlens.api",
    "arena": "driftlens.api",
    "calibrate": "driftlens.api",
    "capture": "driftlens.engine.walk",
    "CancelToken": "driftlens.progress",
    "check": "driftlens.records.checks",
    "compare": "driftlens.records.compare",
    "compare_merges": "driftlens.api",
    "Contributions": "driftlens.diagnostics.attribution",
    "DriftRun": "driftlens.records.run",
    "FeatCal": "driftlens.estimators",
    "ResidualCal": "driftlens.estimators",
    "Head": "driftlens.models.heads",
    "JacobianSettings": "driftlens.diagnostics.attribution",
    "merge": "driftlens.api",
    "ModelPool": "driftlens.engine.pool",
    "PathJacobian": "driftlens.linalg.state",
    "PrefixSwaps": "driftlens.diagnostics.attribution",
    "ProgressEvent": "driftlens.progress",
    "project": "driftlens.projection",
    "Report": "driftlens_reports.build",
    "RunSpec": "driftlens.spec",
    "decompose": "driftlens.engine.walk",
    "expert_cosine": "driftlens.linalg.state",
    "linear_cka": "driftlens.linalg.cka",
    "load_spec": "driftlens.spec",
    "open_checkpoint": "driftlens.models.loading",
    "open_run": "driftlens.api",
    "sweep": "driftlens.api",
    "task_vector_cosine": "driftlens.diagnostics.task_vectors",
    "validate": "driftlens.api",
    "walk": "driftlens.engine.walk",
}

_MODULES = ("errors", "paper")

__all__ = sorted([*_HOMES, *_MODULES, "__version__"])


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"driftlens.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'driftlens' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
