"""What processes on one machine take from each other, and what they say to each other costs: by `doctor --measure`.

One process computes a layer alone, then one on every core at once, as processes that share a machine also share its
memory. How fast one process is by itself is found out by every rehearsal anew.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from driftlens.base.errors import RunError
from driftlens.base.files import write_json_atomic
from driftlens.base.threads import computing_with, some_layer
from driftlens.runs.status import as_declared

_ROWS, _WIDTH = 256, 768
_SECONDS = 1.0
_BYTES = 2**26


@dataclass(frozen=True)
class Rates:
    """What a process keeps of its speed beside others, and what sums over processes take.

    `one` is the share of its speed with `threads` that a process has with one, alone on the machine; `crowded` that of
    it which it keeps while every core has one like it. `wire`, in bytes per second, is 0 where nobody measured it;
    `latency` is of the smallest sum, and `start` until a new process has imported what it needs, in seconds.
    """

    device: str
    cores: int
    threads: int
    one: float = 1.0
    crowded: float = 1.0
    wire: float = 0.0
    latency: float = 0.0
    start: float = 0.0

    def pace(self, processes: int) -> float:
        """Share of its speed alone that each of some processes on one machine has; several have one thread each."""
        if processes == 1 or self.device.startswith("cuda"):
            return 1.0
        busy = min(processes, self.cores)
        # Memory is shared little by little: between one process and one on every core the loss is taken as even.
        kept = 1 - (1 - self.crowded) * (busy - 1) / max(1, self.cores - 1)
        return self.one * kept * min(1.0, self.cores / processes)

    def lines(self) -> dict[str, str]:
        """The same for a person, one line each."""
        return {
            "processes": f"one thread does {self.one:.0%} of {self.threads}, "
            f"{self.crowded:.0%} of that with one process per core",
            "wire": f"{self.wire / 1e9:.3g} GB/s, {self.latency * 1e3:.2g} ms at least",
            "start": f"{self.start:.1f} s until a process is there",
        }


def measured_rates(device: torch.device) -> Rates | None:
    """What `doctor --measure` found for this device on this machine, or None; older files say more than is read."""
    try:
        rates = as_declared(Rates, rates_file(device).read_bytes())
    except (OSError, ValueError):
        return None
    return rates if rates.cores == cores() else None


def measure(device: torch.device, tell: Callable[[str], None] = lambda text: None) -> Rates:
    """Rates of this machine, in a minute at most; they are kept for later."""
    tell("processes")
    threads, file = torch.get_num_threads(), rates_file(device)
    rates = Rates(str(device), cores(), threads, **_together(device, threads))
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(file, dataclasses.asdict(rates))
    return rates


def rates_file(device: torch.device) -> pathlib.Path:
    """Where rates are kept."""
    import platformdirs

    return platformdirs.user_cache_path("driftlens") / f"rates-{device.type}.json"


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _rate(device: torch.device, seconds: float) -> float:
    """How often a second a layer is computed that is as wide as usual ones, and larger than the caches of a core."""
    work = some_layer(_ROWS, _WIDTH, device)
    work()  # the first call also loads libraries
    done, started, passed = 0, time.perf_counter(), 0.0
    while passed < seconds:
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        done, passed = done + 1, time.perf_counter() - started
    return done / passed


def _together(device: torch.device, threads: int) -> dict[str, float]:
    """`one`, `crowded`, `wire`, `latency` and `start`, measured by a process for every core (two at least)."""
    from torch.multiprocessing.spawn import spawn

    number = max(2, cores())
    with tempfile.TemporaryDirectory() as folder:
        started = time.time()
        try:
            spawn(_member, (number, folder, str(device), threads), nprocs=number)  # type: ignore[no-untyped-call]
        except Exception as error:
            raise RunError(
                f"{number} processes that measure each other could not be started or ended early: {error}",
                hint="Sums over processes need `gloo` and a loopback interface.",
            ) from error
        found: dict[str, float] = json.loads(pathlib.Path(folder, "found.json").read_text(encoding="utf-8"))
    return found | {"start": found["start"] - started}


def _member(rank: int, number: int, folder: str, name: str, threads: int) -> None:
    """What each of some processes does: rank 0 works alone while the others wait, then all work at once."""
    import torch.distributed as distributed
    import transformers.models.llama.modeling_llama  # noqa: F401  what a process of ours waits for most

    ready, device = time.time(), torch.device(name)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=number)
    try:
        torch.set_num_threads(1)
        distributed.barrier()
        many = alone = 0.0
        if rank == 0:
            with computing_with(threads):
                many = _rate(device, _SECONDS)
            alone = _rate(device, _SECONDS)
        distributed.barrier()
        rate = torch.tensor([_rate(device, 2 * _SECONDS)], dtype=torch.float64)
        distributed.all_reduce(rate)
        tiny, large = torch.zeros(1), torch.zeros(_BYTES // 8, dtype=torch.float64)
        latency, heavy = (
            _seconds_of(functools.partial(distributed.all_reduce, part)) for part in (tiny, large)
        )
        if rank == 0:
            found = {
                "one": alone / many,
                "crowded": min(1.0, float(rate) / number / alone * max(1.0, number / cores())),
                "wire": _BYTES / heavy,
                "latency": latency,
                "start": ready,
            }
            pathlib.Path(folder, "found.json").write_text(json.dumps(found), encoding="utf-8")
    finally:
        distributed.destroy_process_group()


def _seconds_of(work: Callable[[], Any]) -> float:
    work()
    times = []
    for _ in range(5):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)
