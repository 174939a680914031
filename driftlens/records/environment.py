"""What a run's numbers may depend on besides its inputs: versions, machine, environment variables."""

from __future__ import annotations

import importlib.metadata
import os
import platform

_PACKAGES = (
    *(
        "driftlens",
        "torch",
        "torchvision",
        "numpy",
        "scipy",
        "pandas",
        "pyarrow",
        "safetensors",
        "scikit-learn",
    ),
    *("transformers", "open_clip_torch", "peft", "datasets", "pillow", "plotly", "matplotlib", "umap-learn"),
)
_VARIABLES = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "CUDA_VISIBLE_DEVICES"),
    *("CUBLAS_WORKSPACE_CONFIG", "PYTHONHASHSEED", "HF_HUB_OFFLINE"),
)


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that compute or write; nothing is imported."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, str | int]:
    """Operating system, processor family and number of processors."""
    return {
        "system": platform.system(),
        "release": platform.release(),
        "machine": platform.machine(),
        "processors": os.cpu_count() or 0,
    }


def variables() -> dict[str, str]:
    """The environment variables that change numbers or thread counts, where they are set."""
    return {name: os.environ[name] for name in _VARIABLES if name in os.environ}


def peak_rss_bytes() -> int | None:
    """Largest resident memory that this process has had, in bytes; None where the system does not tell."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024
