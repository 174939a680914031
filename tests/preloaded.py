"""What commands need of libraries: imported once, by the process from which they are forked."""

from __future__ import annotations

import gc
import importlib
import os
from pathlib import Path

import driftlens

os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # as `main` has it in a job of several processes, which torch reads once

LIBRARIES = ("torch", "open_clip", "pandas", "pyarrow.parquet", "matplotlib.pyplot", "plotly.graph_objects")

OPTIONAL = ("fusion_bench",)


def import_all() -> None:
    """These libraries, and all modules of the program and its reports but those for a harness that isn't here.

    Raises:
        RuntimeError: a module can't be imported. From an `ImportError` the server would go on with what it has, and
            every command would import the rest for itself.
    """
    package = Path(driftlens.__file__).parent
    for name in (*LIBRARIES, *_modules(package), *_modules(package.parent / "reports/driftlens_reports")):
        try:
            importlib.import_module(name)
        except ImportError as missing:
            if missing.name not in OPTIONAL:
                raise RuntimeError(f"{name} can't be imported before commands are forked") from missing
    gc.freeze()  # or the first collection of every child would copy it all


def _modules(package: Path) -> list[str]:
    names = [
        file.relative_to(package.parent).with_suffix("").parts
        for file in sorted(package.rglob("*.py"))
        if file.stem != "__main__"
    ]
    return [".".join(parts[:-1] if parts[-1] == "__init__" else parts) for parts in names]


import_all()
