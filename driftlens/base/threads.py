"""Settings of torch's arithmetic: the number of threads, and float32 products at full precision."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from driftlens.base.devices import kinds


@contextmanager
def using_threads(wanted: int | None) -> Iterator[None]:
    """Compute with `wanted` threads inside the block, at most OMP_NUM_THREADS; None keeps torch's own number.

    Torch's own number is that of the available cores, or OMP_NUM_THREADS where it is set.
    """
    if wanted is None:
        yield
        return
    # More than one number may be listed there, for nested regions.
    limit = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    most = int(limit) if limit.isdecimal() and int(limit) else wanted
    with computing_with(min(wanted, most)):
        yield


@contextmanager
def computing_with(number: int) -> Iterator[int]:
    """A block in which torch computes with just so many threads; what it was given comes back at the end."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield number
    finally:
        torch.set_num_threads(before)


@contextmanager
def exact_products() -> Iterator[None]:
    """While this is open, float32 products keep all their bits: no TF32, no bfloat16, no autocast.

    It overrides every way in which torch lets a process choose less: `set_float32_matmul_precision`, the flags of
    cuDNN, and since torch 2.9 `fp32_precision` of all backends, of one and of one kind of operation. What was chosen
    comes back, and what follows a setting above it goes on following it.
    """
    with ExitStack() as stack:
        for device in kinds():
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(
            _exact_switches() if hasattr(torch.backends, "fp32_precision") else _exact_flags()
        )
        yield


@contextmanager
def _exact_switches() -> Iterator[None]:
    """The switches of torch 2.9: one kind of operation's wins over its backend's, and that over the general one."""
    backends: Any = torch.backends
    cuda, cudnn, mkldnn = backends.cuda, backends.cudnn, backends.mkldnn
    finer = [cudnn, mkldnn, cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn]
    general = backends.fp32_precision
    matmuls = [(switch, switch.fp32_precision) for switch in (cuda.matmul, mkldnn.matmul)]
    held: list[tuple[Any, str]] = []
    try:
        backends.fp32_precision = "ieee"
        for switch in finer:
            # One that doesn't follow what stands above it was set on its own, to what it says.
            if switch.fp32_precision != "ieee":
                held.append((switch, switch.fp32_precision))
                switch.fp32_precision = "ieee"
        # Asked only now: torch refuses to answer while old and new settings contradict each other.
        old = torch.get_float32_matmul_precision()
        if old != "highest":
            torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            if old != "highest":
                torch.set_float32_matmul_precision(old)
                held += matmuls  # the old setting overwrites both
    finally:
        for switch, chosen in held:
            switch.fp32_precision = chosen
        backends.fp32_precision = general


@contextmanager
def _exact_flags() -> Iterator[None]:
    """The settings of torch before 2.9."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.backends.cudnn.flags(
            enabled=torch.backends.cudnn.enabled,
            benchmark=torch.backends.cudnn.benchmark,
            deterministic=torch.backends.cudnn.deterministic,
            allow_tf32=False,
        ):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
