"""Devices: which there are, what they are called and can do, their memory, streams and waits; threads and precision.

This file alone asks torch about accelerators, by `torch.accelerator`; what that lacks before torch 2.9 is asked of the
device's own module. Where an answer can't be had (Apple's GPUs count no peak, for instance) it is None.
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
LESS_MEMORY = (
    "Lower data.defaults.batch_size, or take `--device cpu`. Finished phases are kept: --resume goes on."
)


def accelerator() -> torch.device | None:
    """The kind of accelerator that torch computes on here, None on a machine without one."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def names() -> list[str]:
    """What may be asked for here, the host first; of several devices of a kind each has its number."""
    kind, number = accelerator(), torch.accelerator.device_count()
    if kind is None:
        return ["cpu"]
    return ["cpu", *(kind.type if number == 1 else f"{kind.type}:{index}" for index in range(number))]


def resolve_device(device: str | torch.device) -> torch.device:
    """The device of that name, tried out; `auto` is the accelerator if there is one."""
    try:
        resolved = (accelerator() or HOST) if device == "auto" else torch.device(device)
        # A name may be known and its device not there: the second GPU of one, another build's.
        torch.zeros(1, device=resolved).cpu()
    except (RuntimeError, AssertionError, ValueError, TypeError, ImportError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        there = ", ".join(f"`{name}`" for name in names())
        raise SpecError(
            f"there is no device {str(device)!r} here: {reason}", hint=f"Use `auto` or {there}."
        ) from None
    return resolved


def device_name(device: torch.device) -> str:
    """What its maker calls it, or torch, where nobody says more."""
    said = None if device.type == "cpu" else _of_module("get_device_name", device)
    return str(said or device)


def kinds() -> list[str]:
    """Kinds of devices that something may be computed on here."""
    kind = accelerator()
    return ["cpu"] if kind is None else ["cpu", kind.type]


@functools.cache
def has_float64(device: torch.device) -> bool:
    """Whether the device computes with such numbers, tried out."""
    try:
        torch.ones(1, dtype=torch.float64, device=device).sum()
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError):
        return False
    return True


def device_of(dtype: torch.dtype, device: torch.device) -> torch.device:
    """Where numbers of this dtype are summed and solved: there, or on the host where the device has no float64."""
    return device if dtype != torch.float64 or has_float64(device) else HOST


_FACTORS: Mapping[str, Callable[[Tensor], object]] = {
    "cholesky": torch.linalg.cholesky_ex,
    "eigh": torch.ops.aten._linalg_eigh,
    "svd": torch.ops.aten._linalg_svd,
    "triangular solve": lambda one: torch.linalg.solve_triangular(one, one, upper=False),
}


@functools.cache
def lacking(device: torch.device) -> tuple[str, ...]:
    """Factorisations that a device doesn't know, tried out on one number; nobody waits for that."""
    one, lacks = torch.ones(1, 1, device=device), []
    for name, factor in _FACTORS.items():
        try:
            factor(one)
        except NotImplementedError:
            lacks.append(name)
    return tuple(lacks)


def near_factors(tensor: Tensor) -> Tensor:
    """The tensor where it can be factored: on its own device, or on the host."""
    return tensor.to(HOST) if lacking(tensor.device) else tensor


class SumsTooLarge(torch.OutOfMemoryError):
    """Moments, or what is solved from them, have no room on their device."""


_crowded: ContextVar[bool] = ContextVar("crowded", default=False)


def place_of_sums(dtype: torch.dtype, device: torch.device) -> torch.device:
    """Where moments of this dtype are kept and solved from: as `device_of`, or on the host.

    On the host where they had no room, or where the device doesn't know what solves take.
    """
    return HOST if _crowded.get() or lacking(device) else device_of(dtype, device)


def room_for_sums(device: torch.device, budget: int) -> int:
    """Bytes that moments of float64 may take: a budget; on an accelerator at least a quarter of what is free there."""
    free = memory(place_of_sums(torch.float64, device))
    return budget if free is None else max(budget, free[0] // 4)


@contextmanager
def summing() -> Iterator[None]:
    """While this is open, memory that is used up is a `SumsTooLarge`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise SumsTooLarge(str(error)) from error


@contextmanager
def sums_moving() -> Iterator[Callable[[], bool]]:
    """A function that lets sums lie on the host until this is closed; returns whether they lay elsewhere before."""
    token = _crowded.set(_crowded.get())

    def move() -> bool:
        lay_elsewhere = not _crowded.get()
        _crowded.set(True)
        return lay_elsewhere

    try:
        yield move
    finally:
        _crowded.reset(token)


def host_work(device: torch.device) -> list[str]:
    """What is computed on the host for want of the device, in sentences."""
    name, lacks = device_name(device), lacking(device)
    said = (
        [] if has_float64(device) else [f"{name} knows no float64: such sums and solves are made on the host"]
    )
    return said + (
        [f"{name} knows no {', '.join(lacks)}: moments and solves are the host's"] if lacks else []
    )


def require_dtype(device: torch.device, dtype: torch.dtype) -> None:
    """Refuse float64 on a device that doesn't know it."""
    if device_of(dtype, device) != device:
        raise SpecError(
            f"{device_name(device)} knows no float64, in which everything is to be computed",
            hint="Set compute.dtype: float32 (sums and solves are made in float64 on the host), or take `cpu`.",
        )


def near_float64(tensor: Tensor) -> Tensor:
    """The tensor where float64 is known: on its own device, or on the host."""
    return tensor.to(device_of(torch.float64, tensor.device))


def wide(tensor: Tensor) -> Tensor:
    """The tensor in float64; on the host where its device knows no such numbers."""
    return near_float64(tensor).double()


def memory(device: torch.device) -> tuple[int, int] | None:
    """Bytes of the device that are free, or kept by torch for later, and all it has."""
    known: tuple[int, int] | None = _memory("get_memory_info", "mem_get_info", device)
    if known is None:
        return None
    reserved, used = (_memory(name, name, device) or 0 for name in ("memory_reserved", "memory_allocated"))
    return known[0] + max(0, reserved - used), known[1]


def peak_memory(device: torch.device) -> int | None:
    """The most bytes that tensors have taken there since `reset_peak_memory`."""
    return _memory("max_memory_allocated", "max_memory_allocated", device)


def reset_peak_memory(device: torch.device) -> None:
    """Begin to look for the peak anew."""
    _memory("reset_peak_memory_stats", "reset_peak_memory_stats", device)


def synchronize(device: torch.device) -> None:
    """Wait until all that was asked of the device is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@functools.cache
def has_streams(device: torch.device) -> bool:
    """Whether work can be queued beside other work there, and copies come from pinned memory."""
    if device.type == "cpu":
        return False
    try:
        torch.Stream(device=device)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def stream_of(device: torch.device) -> Any:
    """Another queue of work beside the one in which everything is computed."""
    return torch.Stream(device=device)


def current_stream(device: torch.device) -> Any:
    """The queue of this thread."""
    return torch.accelerator.current_stream(device)


def use_stream(stream: Any) -> None:
    """Make a queue this thread's own."""
    torch.accelerator.set_stream(stream)


def use_device(number: int) -> torch.device | None:
    """Make one of the accelerators, by a number that may be larger than there are, this process's own."""
    kind = accelerator()
    if kind is not None:
        place = torch.device(kind.type, number % torch.accelerator.device_count())
        newer: Any = getattr(torch.accelerator, "set_device_index", None)
        (newer or torch.accelerator.set_device_idx)(place.index)
        return place
    return None


def moved(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor on `device`, and in `dtype` where one is given; to a GPU from pinned memory, without waiting.

    It is converted there, so that what travels is as narrow as what is stored; here what the device doesn't know.
    """
    if device.type != "cpu" and tensor.device.type == "cpu":
        if dtype is not None and tensor.dtype == torch.float64 and not has_float64(device):
            tensor = tensor.to(dtype)
        # What is pinned already is its owner's, who may write to it again as soon as this returns.
        if has_streams(device) and not tensor.is_pinned():
            tensor = tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device, dtype)


def beside(features: Tensor, tensor: Tensor) -> Tensor:
    """The tensor on the device of features and in their dtype, as `moved`."""
    return moved(tensor, features.device, features.dtype)


def on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of one device and dtype on the host, which waits once for all of them."""
    if not tensors or tensors[0].device == HOST:
        return [*tensors]
    flat = torch.cat([tensor.flatten() for tensor in tensors]).cpu()
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def free_cached() -> None:
    """Give back what torch keeps for later; before torch 2.9 it does so itself before it fails."""
    empty: Callable[[], None] | None = getattr(torch.accelerator, "empty_cache", None)
    if empty is not None and accelerator() is not None:
        empty()


@contextmanager
def answering(device: torch.device, what: str) -> Iterator[None]:
    """While this is open, memory that is used up and a device that is lost are a `RunError`, told in one paragraph."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RunError(
            f"{device} has too little memory to {what}: {_first_line(error)}",
            hint=LESS_MEMORY,
        ) from error
    except RuntimeError as error:
        if isinstance(error, RunError) or _answers(device):
            raise
        raise RunError(
            f"{device} no longer answers, to {what} failed: {_first_line(error)}",
            hint="See that it is there (`driftlens doctor`). Finished phases are kept: --resume goes on.",
        ) from error


def _answers(device: torch.device) -> bool:
    try:
        return bool(torch.zeros(1, device=device).cpu() == 0)
    except RuntimeError:
        return False


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _memory(general: str, of_module: str, device: torch.device) -> Any:
    """The answer of `torch.accelerator`, or of the device's own module."""
    if device.type == "cpu":
        return None
    try:
        asked: Callable[..., Any] | None = getattr(torch.accelerator, general, None)
        return asked(device) if asked is not None else _of_module(of_module, device)
    except (RuntimeError, NotImplementedError):
        return None


def _of_module(name: str, device: torch.device) -> Any:
    asked: Callable[..., Any] | None = getattr(torch.get_device_module(device), name, None)
    return None if asked is None else asked(device)


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
