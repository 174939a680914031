"""What a bug report needs to know about the machine."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import tempfile

import platformdirs

_PACKAGES = (
    "torch",
    "torchvision",
    "open_clip_torch",
    "transformers",
    "safetensors",
    "pandas",
    "pyarrow",
    "streamlit",
)


def examine() -> dict[str, str]:
    """Versions, devices, memory, cache folder and anything that will not work, one line each."""
    import psutil

    import driftlens
    from driftlens.records.manifest import version_of

    memory = psutil.virtual_memory()
    found = {
        "driftlens": driftlens.__version__,
        "python": f"{platform.python_version()} on {platform.platform()}",
        **{name: version_of(name) or "not installed" for name in _PACKAGES},
        "cpu": f"{os.cpu_count()} cores",
        "memory": f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB free",
        "gpu": _gpu(),
        "cache": _cache(),
        "offline": "yes (HF_HUB_OFFLINE)" if os.environ.get("HF_HUB_OFFLINE") else "no",
    }
    return found | {"transformers with torchvision": _imports("transformers.models.clip.modeling_clip")}


def _gpu() -> str:
    import torch

    if not torch.cuda.is_available():
        return "none (CPU only)"
    return f"{torch.cuda.get_device_name()}, {torch.cuda.mem_get_info()[1] / 2**30:.0f} GiB"


def _cache() -> str:
    folder = platformdirs.user_cache_path("driftlens")
    place = folder if folder.exists() else tempfile.gettempdir()
    return f"{folder}, {shutil.disk_usage(place).free / 2**30:.1f} GiB free"


def _imports(module: str) -> str:
    try:
        importlib.import_module(module)
    except Exception as error:
        # The usual cause is a torchvision that was built for another torch.
        return f"broken: {type(error).__name__}: {error}; install torch and torchvision together"
    return "imports"
