"""Timing for ratios: candidates run interleaved, so that other load affects all, and the best run counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from driftlens.utils.devices import HOST, accelerator, synchronize


def best_of(candidates: Mapping[str, Callable[[], object]], rounds: int = 5, warm_up: bool = True) -> dict[str, float]:
    """Shortest seconds of each candidate over `rounds` interleaved runs, after one run to warm up."""
    best = dict.fromkeys(candidates, float("inf"))
    for turn in range(0 if warm_up else 1, rounds + 1):
        for name, run in candidates.items():
            started = time.perf_counter()
            run()
            synchronize(accelerator() or HOST)
            if turn:
                best[name] = min(best[name], time.perf_counter() - started)
    return best


def seconds_of(run: Callable[[], object], times: int = 1) -> float:
    """Mean seconds of `times` runs: for what is too long to be repeated until it had a quiet moment."""
    started = time.perf_counter()
    for _ in range(times):
        run()
    synchronize(accelerator() or HOST)
    return (time.perf_counter() - started) / times
