"""What commands need of libraries: imported once, by the process from which they are forked."""

from __future__ import annotations

import gc
import importlib
import os
from pathlib import Path

import driftlens

os.environ["TORCH_CPP_LOG_LEVEL"] = (
    "ERROR"  # as `main` has it in a job of several processes, which torch reads once
)

LIBRARIES = ("torch", "open_clip", "pandas", "pyarrow.parquet", "matplotlib.pyplot", "plotly.graph_objects")


def import_all() -> None:
    """These libraries, and all modules of the program and its reports."""
    package = Path(driftlens.__file__).parent
    for name in (*LIBRARIES, *_modules(package), *_modules(package.parent / "reports/driftlens_reports")):
        importlib.import_module(name)
    gc.freeze()  # or the first collection of every child would copy it all


def _modules(package: Path) -> list[str]:
    names = [
        file.relative_to(package.parent).with_suffix("").parts
        for file in sorted(package.rglob("*.py"))
        if file.stem != "__main__"
    ]
    return [".".join(parts[:-1] if parts[-1] == "__init__" else parts) for parts in names]


import_all()
