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
    "capture": "driftlens.engine.capture",
    "CancelToken": "driftlens.progress",
    "Contributions": "driftlens.diagnostics.attribution",
    "DriftRun": "driftlens.records.run",
    "Head": "driftlens.models.heads",
    "JacobianSettings": "driftlens.diagnostics.attribution",
    "ModelPool": "driftlens.engine.pool",
    "PathJacobian": "driftlens.linalg.path_jacobian",
    "PrefixSwaps": "driftlens.diagnostics.attribution",
    "ProgressEvent": "driftlens.progress",
    "RunSpec": "driftlens.spec",
    "decompose": "driftlens.engine.walk",
    "expert_cosine": "driftlens.linalg.cosine",
    "linear_cka": "driftlens.linalg.cka",
    "load_spec": "driftlens.spec",
    "open_checkpoint": "driftlens.models.loading",
    "open_run": "driftlens.records.run",
    "task_vector_cosine": "driftlens.diagnostics.task_vectors",
    "walk": "driftlens.engine.walk",
}

__all__ = sorted([*_HOMES, "__version__", "errors"])


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("driftlens.errors")
    if name not in _HOMES:
        raise AttributeError(f"module 'driftlens' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
