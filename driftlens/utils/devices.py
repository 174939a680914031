"""Devices: availability, capabilities, memory, streams, threads and precision.

Only this module asks torch about accelerators. A quantity that a device does not report is None (for example Apple's
peak memory).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from driftlens.utils.errors import RunError, SpecError

HOST = torch.device("cpu")
_LESS_MEMORY = (
    "Lower data.defaults.batch_size, or use `--device cpu`. Finished phases are kept; continue with --resume."
)


def accelerator() -> torch.device | None:
    """Return the accelerator that torch uses on this machine; None without one."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def available_devices() -> list[str]:
    """List the names of the available devices, `cpu` first; several GPUs are numbered, as in `cuda:1`."""
    kind, number = accelerator(), torch.accelerator.device_count()
    if kind is None:
        return ["cpu"]
    return ["cpu", *(kind.type if number == 1 else f"{kind.type}:{index}" for index in range(number))]


def resolve_device(device: str | torch.device) -> torch.device:
    """Parse a device name (`auto` picks the accelerator) and check the device with a trial computation."""
    try:
        resolved = (accelerator() or HOST) if device == "auto" else torch.device(device)
        # Torch accepts names of devices that are missing, such as a second GPU or another build's kind.
        torch.zeros(1, device=resolved).cpu()
    except (RuntimeError, AssertionError, ValueError, TypeError, ImportError) as error:
        there = ", ".join(f"`{name}`" for name in available_devices())
        raise SpecError(
            f"device {str(device)!r} is not available: {_first_error_line(error)}",
            hint=f"Use `auto` or {there}.",
        ) from None
    return resolved


def device_name(device: torch.device) -> str:
    """Return the hardware name of a device, for example "NVIDIA H200", or torch's name for it."""
    vendor_name = None if device.type == "cpu" else _call_device_module("get_device_name", device)
    return str(vendor_name or device)


@functools.cache
def has_float64(device: torch.device) -> bool:
    """Return True if the device supports float64, found by a trial computation."""
    try:
        torch.ones(1, dtype=torch.float64, device=device).sum()
    # It is a RuntimeError, too, and would be cached as a lack of float64.
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError):
        return False
    return True


def device_for_dtype(dtype: torch.dtype, device: torch.device) -> torch.device:
    """Return the device for arithmetic in this dtype: the CPU for float64 if the device does not support it."""
    return device if dtype != torch.float64 or has_float64(device) else HOST


_FACTORS: Mapping[str, Callable[[Tensor], object]] = {
    "cholesky": torch.linalg.cholesky_ex,
    "eigh": torch.ops.aten._linalg_eigh,
    "svd": torch.ops.aten._linalg_svd,
    "triangular solve": lambda one: torch.linalg.solve_triangular(one, one, upper=False),
}


@functools.cache
def missing_factorizations(device: torch.device) -> tuple[str, ...]:
    """List the matrix factorizations that the device does not support, each tried on a 1 x 1 matrix."""
    one, lacks = torch.ones(1, 1, device=device), []
    for name, factor in _FACTORS.items():
        try:
            factor(one)
        except NotImplementedError:
            lacks.append(name)
    return tuple(lacks)


def to_factorizing_device(tensor: Tensor) -> Tensor:
    """Move a tensor to the CPU if its device lacks a matrix factorization; else return it unchanged."""
    return tensor.to(HOST) if missing_factorizations(tensor.device) else tensor


class MomentsOutOfMemory(torch.OutOfMemoryError):
    """Raised if moments, or the solution of a linear system, do not fit into the memory of their device."""


_crowded: ContextVar[bool] = ContextVar("crowded", default=False)


def moments_device(dtype: torch.dtype, device: torch.device) -> torch.device:
    """Return the device for moments of this dtype and their solves: the CPU if the device cannot hold or solve them."""
    return HOST if _crowded.get() or missing_factorizations(device) else device_for_dtype(dtype, device)


def moments_budget(device: torch.device, budget: int) -> int:
    """Return the bytes available for float64 moments: the budget or, if larger, a quarter of the free GPU memory."""
    free = device_memory(moments_device(torch.float64, device))
    return budget if free is None else max(budget, free[0] // 4)


@contextmanager
def convert_moments_oom() -> Iterator[None]:
    """Convert an out-of-memory error inside the block into `MomentsOutOfMemory`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MomentsOutOfMemory(str(error)) from error


@contextmanager
def offload_moments() -> Iterator[Callable[[], bool]]:
    """Yield a function that moves moments to the CPU until the block ends; it returns False on later calls."""
    # Set to its own value, only for a token that restores it later.
    token = _crowded.set(_crowded.get())

    def _move_sums_to_host() -> bool:
        moves = not _crowded.get()
        _crowded.set(True)
        return moves

    try:
        yield _move_sums_to_host
    finally:
        _crowded.reset(token)


def host_fallbacks(device: torch.device) -> list[str]:
    """Describe the computations that run on the CPU because the device does not support them, one sentence each."""
    name, lacks, sentences = device_name(device), missing_factorizations(device), []
    if not has_float64(device):
        sentences.append(f"{name} has no float64: such sums and solves run on the host")
    if lacks:
        sentences.append(f"{name} has no {', '.join(lacks)}: moments and solves run on the host")
    return sentences


def require_dtype(device: torch.device, dtype: torch.dtype) -> None:
    """Raise a `SpecError` if the device does not support the dtype."""
    if device_for_dtype(dtype, device) != device:
        raise SpecError(
            f"compute.dtype is float64, which {device_name(device)} does not support",
            hint="Set compute.dtype: float32 (sums and solves run in float64 on the host), or use `cpu`.",
        )


def to_float64_device(tensor: Tensor) -> Tensor:
    """Move a tensor to the CPU if its device lacks float64; else return it unchanged."""
    return tensor.to(device_for_dtype(torch.float64, tensor.device))


def to_float64(tensor: Tensor) -> Tensor:
    """Convert a tensor to float64, on the CPU if its device lacks float64."""
    return to_float64_device(tensor).double()


def device_memory(device: torch.device) -> tuple[int, int] | None:
    """Return the free memory (including torch's cache) and the total memory of a device, in bytes."""
    free_and_total: tuple[int, int] | None = _query_memory("get_memory_info", "mem_get_info", device)
    if free_and_total is None:
        return None
    reserved, used = (_query_memory(name, name, device) or 0 for name in ("memory_reserved", "memory_allocated"))
    # Torch keeps freed blocks in a cache, which the driver counts as used.
    return free_and_total[0] + max(0, reserved - used), free_and_total[1]


def peak_memory(device: torch.device) -> int | None:
    """Return the peak memory of all tensors on the device since `reset_peak_memory`, in bytes."""
    return _query_memory("max_memory_allocated", "max_memory_allocated", device)


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak memory that `peak_memory` returns."""
    _query_memory("reset_peak_memory_stats", "reset_peak_memory_stats", device)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@functools.cache
def _has_streams(device: torch.device) -> bool:
    """Return True if the device has streams and copies asynchronously from pinned memory."""
    if device.type == "cpu":
        return False
    try:
        torch.Stream(device=device)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def set_process_device(number: int) -> None:
    """Select the accelerator of this process by its local rank, modulo the number of accelerators."""
    if accelerator() is not None:
        # Older torch has it under the name `set_device_idx` only.
        choose = getattr(torch.accelerator, "set_device_index", None) or torch.accelerator.set_device_idx
        choose(number % torch.accelerator.device_count())


def to_device(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Move a tensor to a device and optionally to `dtype`; copies to a GPU use pinned memory, asynchronously.

    Args:
        tensor: the tensor to move.
        device: its new device.
        dtype: its new dtype; None keeps it.
    """
    if device.type != "cpu" and tensor.device.type == "cpu":
        # The dtype is converted after the copy, which is then as narrow as the stored tensor; but a device without
        # float64 can't receive such a tensor.
        if dtype is not None and tensor.dtype == torch.float64 and not has_float64(device):
            tensor = tensor.to(dtype)
        # The owner of a pinned tensor may overwrite it as soon as this returns, so such a tensor is copied at once.
        if _has_streams(device) and not tensor.is_pinned():
            tensor = tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device, dtype)


def match_device_dtype(features: Tensor, tensor: Tensor) -> Tensor:
    """Move a tensor to the device and dtype of the features."""
    return to_device(tensor, features.device, features.dtype)


def copy_to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors of one device and dtype to the CPU with a single synchronization."""
    if not tensors or tensors[0].device == HOST:
        return [*tensors]
    # One copy instead of one per tensor: each would synchronize with the device.
    flat = torch.cat([tensor.flatten() for tensor in tensors]).cpu()
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def empty_cache() -> None:
    """Release torch's cache of device memory; do nothing before torch 2.9."""
    empty: Callable[[], None] | None = getattr(torch.accelerator, "empty_cache", None)
    if empty is not None and accelerator() is not None:
        empty()


@contextmanager
def convert_device_errors(device: torch.device, action: str) -> Iterator[None]:
    """Convert an out-of-memory error or the loss of the device inside the block into a `RunError`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        message = f"{device} has too little memory to {action}: {_first_error_line(error)}"
        raise RunError(message, hint=_LESS_MEMORY) from error
    except RuntimeError as error:
        # A lost device has no error type of its own; a trial computation distinguishes it from a defect of the
        # code.
        if isinstance(error, RunError) or _is_device_responding(device):
            raise
        raise RunError(
            f"{device} no longer responds: to {action} failed ({_first_error_line(error)})",
            hint="Check it with `driftlens doctor`. Finished phases are kept; continue with --resume.",
        ) from error


def _is_device_responding(device: torch.device) -> bool:
    try:
        return bool(torch.zeros(1, device=device).cpu() == 0)
    except RuntimeError:
        return False


def _first_error_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _query_memory(general: str, of_module: str, device: torch.device) -> Any:
    """Call a memory function of `torch.accelerator`, or of `torch.cuda` and the like in older versions of torch."""
    if device.type == "cpu":
        return None
    try:
        function: Callable[..., Any] | None = getattr(torch.accelerator, general, None)
        return function(device) if function is not None else _call_device_module(of_module, device)
    except (RuntimeError, NotImplementedError):
        return None


def _call_device_module(name: str, device: torch.device) -> Any:
    function: Callable[..., Any] | None = getattr(torch.get_device_module(device), name, None)
    return None if function is None else function(device)


@contextmanager
def use_num_threads(number: int | None) -> Iterator[None]:
    """Limit torch to `number` CPU threads inside the block, at most OMP_NUM_THREADS; None changes nothing."""
    if number is None:
        yield
        return
    # OpenMP allows a list of numbers, one per level of nested regions; the first one counts here.
    limit = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    most = int(limit) if limit.isdecimal() and int(limit) else number
    with override_num_threads(min(number, most)):
        yield


@contextmanager
def override_num_threads(number: int) -> Iterator[int]:
    """Set torch's number of CPU threads inside the block and restore it afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield number
    finally:
        torch.set_num_threads(before)


@contextmanager
def full_precision_matmul() -> Iterator[None]:
    """Compute float32 matrix products in full precision inside the block: no TF32, no bfloat16, no autocast.

    This overrides `set_float32_matmul_precision`, the flags of cuDNN and, since torch 2.9, `fp32_precision` of all
    backends and operations. Previous settings are restored.
    """
    with ExitStack() as stack:
        for device in {"cpu", (accelerator() or HOST).type}:
            # Autocast lowers the precision of operations whatever the switches below are set to.
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(_disable_tf32() if hasattr(torch.backends, "fp32_precision") else _disable_tf32_legacy())
        yield


@contextmanager
def _disable_tf32() -> Iterator[None]:
    """Disable TF32 and bfloat16 through the `fp32_precision` settings of torch 2.9 and later."""
    backends: Any = torch.backends
    cuda, cudnn, mkldnn = backends.cuda, backends.cudnn, backends.mkldnn
    finer = [cudnn, mkldnn, cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn]
    general = backends.fp32_precision
    matmuls = [(switch, switch.fp32_precision) for switch in (cuda.matmul, mkldnn.matmul)]
    held: list[tuple[Any, str]] = []
    try:
        backends.fp32_precision = "ieee"
        for switch in finer:
            # A switch that does not follow the general one was set explicitly, so its value is restored later.
            if switch.fp32_precision != "ieee":
                held.append((switch, switch.fp32_precision))
                switch.fp32_precision = "ieee"
        # Read only now: torch raises an error while old and new settings contradict each other.
        old = torch.get_float32_matmul_precision()
        if old != "highest":
            torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            if old != "highest":
                torch.set_float32_matmul_precision(old)
                # The old setting overwrites both.
                held += matmuls
    finally:
        for switch, chosen in held:
            switch.fp32_precision = chosen
        backends.fp32_precision = general


@contextmanager
def _disable_tf32_legacy() -> Iterator[None]:
    """Disable TF32 and bfloat16 through the flags of torch before 2.9."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        # `flags` resets every flag that is not passed: without `enabled`, cuDNN would be switched off.
        with torch.backends.cudnn.flags(
            enabled=torch.backends.cudnn.enabled,
            benchmark=torch.backends.cudnn.benchmark,
            deterministic=torch.backends.cudnn.deterministic,
            allow_tf32=False,
        ):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
