"""How torch computes: with how many threads, settled by measurement where a phase begins, and to how many bits.

After every operation threads wait for the slowest of them. Beside another busy process one of them is made to wait by
the scheduler, and with small layers, which have many short operations, all others wait with it most of the time.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F

from driftlens.base.devices import kinds
from driftlens.base.errors import SpecError

GAIN = 1.3
"""More threads have to be faster by this factor: too few cost no more than that, too many may cost tenfold."""
VARIABLE = "DRIFTLENS_THREADS"

_ROUNDS = 4
_TURN_SECONDS = 0.004
"""As long as the turns that a scheduler gives to two processes on one core, or longer."""
_HOLDS_SECONDS = 10.0
"""For which a measurement is believed; phases of small models take less than a second, a tenth of which it was."""
_LARGEST_PRODUCT = 2e8
"""Multiplications per timed operation; rows beyond that tell nothing new."""

log = logging.getLogger("driftlens")
_wanted: ContextVar[int | None] = ContextVar("wanted_threads", default=None)


@contextmanager
def using_threads(wanted: int | None) -> Iterator[None]:
    """A block that computes with `wanted` threads, at most OMP_NUM_THREADS of them; None lets each phase settle it."""
    if wanted is None:
        yield
        return
    with computing_with(_allowed(wanted, "threads")) as number:
        token = _wanted.set(number)
        try:
            yield
        finally:
            _wanted.reset(token)


@contextmanager
def settled_threads(rows: int, width: int, *, phase: str) -> Iterator[int]:
    """A block that computes with the number of threads that suits layers of this size now, and that number.

    `using_threads` decides, else the variable DRIFTLENS_THREADS; else a layer is timed for a few hundredths of a second
    with one thread, with two, four and so on up to as many as torch has been given, and the fewest are taken that need
    at most `GAIN` times as long as the fastest; for some seconds that holds for all layers of this size. What torch was
    given comes back at the end.
    """
    available = torch.get_num_threads()
    number = _wanted.get()
    if number is None and os.environ.get(VARIABLE):
        number = _allowed(os.environ[VARIABLE], VARIABLE)
    if number is None:
        number = 1
        if available > 1:
            number = _measured(rows, width, available)
            _tell(phase.partition(":")[0], number, available)
    with computing_with(number):
        yield number


_believed: dict[tuple[int, int, int], tuple[int, float]] = {}
"""By rows, width and available threads: the number that was measured last, and when."""


def _measured(rows: int, width: int, available: int) -> int:
    key = rows, width, available
    if key not in _believed or time.monotonic() - _believed[key][1] > _HOLDS_SECONDS:
        powers = {1 << power for power in range(available.bit_length())}
        number = fewest_threads(some_layer(rows, width), sorted({*powers, available}))
        _believed[key] = number, time.monotonic()
    return _believed[key][0]


def fewest_threads(
    work: Callable[[], object], candidates: Sequence[int], clock: Callable[[], float] = time.perf_counter
) -> int:
    """The smallest of some numbers of threads with which `work` takes at most `GAIN` times as long as with the best.

    They take turns, and all the time of each counts: a shortest or a median time would leave out just those calls in
    which threads waited for one that was not running.
    """
    spent, calls = dict.fromkeys(candidates, 0.0), dict.fromkeys(candidates, 0)
    for _ in range(_ROUNDS):
        for number in candidates:
            with computing_with(number):
                work()  # threads that had to be started, and caches that had to be filled, are nobody's merit
                started, passed = clock(), 0.0
                while passed < _TURN_SECONDS:
                    work()
                    calls[number] += 1
                    passed = clock() - started
            spent[number] += passed
    seconds = {number: spent[number] / calls[number] for number in candidates}
    return min(number for number in candidates if seconds[number] <= GAIN * min(seconds.values()))


def some_layer(rows: int, width: int, device: torch.device | None = None) -> Callable[[], object]:
    """A linear map and the operations around it, as a transformer has them, at the size given or a little below."""
    rows = max(1, min(rows, int(_LARGEST_PRODUCT / width**2)))
    inputs = torch.ones(rows, width, device=device)
    weight = torch.full((width, width), 1 / width, device=device)

    @torch.no_grad()
    def call() -> object:
        return F.gelu(F.linear(F.layer_norm(inputs, (width,)), weight)).add_(inputs)

    return call


@contextmanager
def computing_with(number: int) -> Iterator[int]:
    """A block in which torch computes with just so many threads; what it was given comes back at the end."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield number
    finally:
        torch.set_num_threads(before)


def _allowed(wanted: int | str, what: str) -> int:
    """`wanted`, or what the user allows OpenMP, if that is less; more may be listed there, for nested regions."""
    if not str(wanted).isdecimal() or not int(wanted):
        raise SpecError(f"{what} is {wanted}, expected a whole number from 1 upwards")
    limit = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return min(int(wanted), int(limit)) if limit.isdecimal() and int(limit) else int(wanted)


@functools.cache
def _tell(kind: str, number: int, available: int) -> None:
    log.debug("%s: computes with %d of %d threads; --threads N decides instead", kind, number, available)


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
