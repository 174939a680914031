"""A pretended accelerator, so that what is written for GPUs is tried where there is none.

`sim` and `sim:1` are devices of torch with memory of their own, whose operations run on the CPU's kernels and so give
the CPU's bits. See `device.cpp` for what they punish, and `Switches` for what can be turned. Compiled once in some ten
seconds for each version of it and of torch, and kept where torch keeps extensions (TORCH_EXTENSIONS_DIR).
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from driftlens.utils.devices import has_float64, missing_factorizations

NAME = "sim"


@dataclass
class Switches:
    """How the devices behave.

    Attributes:
        no_double: float64 is refused, as Apple's GPUs do.
        is_lazy: nothing is there before somebody has waited for it: copies to and from pinned memory that don't block
            happen as late as waits allow, other streams see NaN where a kernel's output will be, and memory of one
            stream is refused to another that `record_stream` hasn't told it of.
        is_gone: whatever is asked of the devices fails, as after a driver's crash.
        limit: bytes of memory of each, -1 without a limit.
        lacks: operations that are not implemented, by their names in ATen, with blanks between.
    """

    no_double: bool = False
    is_lazy: bool = False
    is_gone: bool = False
    limit: int = -1
    lacks: str = ""


# What torch's pages and its error messages say of Apple's GPUs, now or before.
LACKED = "_linalg_eigh _linalg_svd linalg_qr linalg_lstsq linalg_cholesky_ex linalg_solve_triangular histc bincount"
"""Operations that a backend may not know."""


def missing() -> str:
    """Why there can't be such devices here; empty where there can."""
    if not hasattr(torch.accelerator, "get_memory_info"):
        return "torch can't be extended by a device with a memory of its own before 2.9"
    if not (shutil.which("c++") or shutil.which("g++")) or not shutil.which("ninja"):
        return "a pretended accelerator is compiled here, by c++ and ninja"
    return ""


@functools.cache
def _module() -> Any:
    """Compile what isn't compiled yet, and tell torch of the devices; none is available before `plugged`."""
    from torch.utils.cpp_extension import load

    source = Path(__file__).with_name("device.cpp")
    made_of = source.read_bytes(), torch.__version__.encode(), str(sys.implementation.cache_tag).encode()
    name = f"driftlens_sim_{hashlib.sha256(b' '.join(made_of)).hexdigest()[:12]}"
    kept = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache/torch_extensions") / name
    kept.mkdir(parents=True, exist_ok=True)
    # Torch would compile anew where its own headers lie elsewhere, as in CI every time.
    is_done = kept / "done"
    if is_done.exists():
        torch.ops.load_library(kept / f"{name}.so")
    else:
        load(name, [str(source)], extra_cflags=["-O1"], build_directory=str(kept), is_python_module=False)
        is_done.touch()
    torch.utils.rename_privateuse1_backend(NAME)
    module: Any = types.ModuleType(f"torch.{NAME}")
    module.plugged = False
    module.is_available = lambda: module.plugged
    module.is_initialized = lambda: module.plugged
    module.device_count = lambda: 2 * module.plugged
    module.current_device = torch.accelerator.current_device_index
    module.get_device_name = lambda device=None: "pretended accelerator"
    module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda device=0: torch.get_rng_state()
    module.set_rng_state = lambda state, device=0: torch.set_rng_state(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module._is_in_bad_fork = lambda: False
    module._lazy_init = lambda: None
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend()
    return module


@contextmanager
def plugged(**switches: Any) -> Iterator[torch.device]:
    """While this is open, there are such devices, and they are what `auto` means."""
    module = _module()
    module.plugged = True
    turn(**switches)
    try:
        yield torch.device(NAME)
    finally:
        turn()
        module.plugged = False


def turn(**switches: Any) -> None:
    """Set all switches; those not named go to how they were at first."""
    torch.ops.driftlens_sim.turn(*vars(Switches(**switches)).values())
    has_float64.cache_clear()
    missing_factorizations.cache_clear()
