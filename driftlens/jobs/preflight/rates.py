"""What this machine does in a second: measured once by `driftlens doctor --measure`, or in a moment where it wasn't.

Rates are of the work itself, not of bare products: a walk through a language model, sums of Gram matrices, Cholesky
solves; a moment is enough for a bare transformer's block alone, which is faster. One process is timed alone, then one
on every core at once, as processes that share a machine also share its memory.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from driftlens.base.errors import RunError
from driftlens.base.files import from_json, write_json_atomic
from driftlens.base.threads import computing_with
from driftlens.checkpoints.sources import TensorsSource
from driftlens.data.samples import Batch
from driftlens.engine.pool import ModelPool
from driftlens.engine.walk import walk
from driftlens.linalg.cholesky import factorize
from driftlens.linalg.gram import GramSum
from driftlens.models.architecture import weightless
from driftlens.models.families.hf_decoder import decoder_chain

WIDTHS = (64, 256, 768, 2048)
"""Widths that are timed; between them rates are interpolated, beyond them those of the nearest hold."""
_TOKENS, _SAMPLES, _HEADS = 64, 16, 4
_LAYERS = _BATCHES = 2
_FEATURES = 8192
_SECONDS = 1.0
_MOMENT = 0.05
_BYTES = 2**26


@dataclass(frozen=True)
class Rates:
    """What one process does in a second, two operations per multiply-add.

    Attributes:
        device: where products were timed, as torch names it.
        cores: of this machine.
        threads: that a process alone computes with.
        work: kind -> width -> operations: "blocks" of a transformer that models walk through in float32, "steps" of one
            token a sample, as answers grow, "sums" of Gram matrices (float32 products, float64 sums), "solves" by
            Cholesky factors in float64.
        reads: bytes of a file that was just written; one that must come from the disk first takes longer.
        one: share of these rates that a process with one thread has, alone on the machine.
        crowded: share of its own rate that a process with one thread keeps while every core has one like it.
        wire: bytes that each of two processes here gives into a sum over both; 0 where that wasn't measured.
        latency: seconds of the smallest sum over both.
        start: seconds until a new process has imported what it needs.
    """

    device: str
    cores: int
    threads: int
    work: Mapping[str, Mapping[int, float]]
    reads: float
    one: float = 1.0
    crowded: float = 1.0
    wire: float = 0.0
    latency: float = 0.0
    start: float = 0.0

    def at(self, kind: str, width: int) -> float:
        """Operations per second of a kind of work at a width; between those measured, on a log scale."""
        known = sorted(self.work[kind].items())
        place = math.log(max(1, width))
        for (low, slow), (high, fast) in pairwise((math.log(at), rate) for at, rate in known):
            if low <= place <= high:
                share = (place - low) / (high - low)
                return float(slow ** (1 - share) * fast**share)
        return float(known[0][1] if place < math.log(known[0][0]) else known[-1][1])

    def pace(self, processes: int) -> float:
        """Share of these rates that each of some processes on one machine has, one thread each if there are several."""
        if processes == 1 or self.device.startswith("cuda"):
            return 1.0
        busy = min(processes, self.cores)
        # Memory is shared little by little: between one process and one on every core the loss is taken as even.
        kept = 1 - (1 - self.crowded) * (busy - 1) / max(1, self.cores - 1)
        return self.one * kept * min(1.0, self.cores / processes)

    def lines(self) -> dict[str, str]:
        """The same for a person, one line each."""

        def told(kind: str) -> str:
            rates = ", ".join(f"{rate / 1e9:.3g} at {width}" for width, rate in self.work[kind].items())
            return f"{rates} (1e9 operations per second, by width)"

        return {
            **{kind: told(kind) for kind in self.work},
            "reads": f"{self.reads / 1e9:.3g} GB/s",
            "processes": f"one thread does {self.one:.0%} of {self.threads}, "
            f"{self.crowded:.0%} of that with one process per core",
            "wire": f"{self.wire / 1e9:.3g} GB/s, {self.latency * 1e3:.2g} ms at least",
            "start": f"{self.start:.1f} s until a process is there",
        }


def measured_rates(device: torch.device) -> Rates | None:
    """What `doctor --measure` found for this device on this machine, or None."""
    try:
        found = from_json(rates_file(device).read_bytes())
        work = {
            kind: {int(width): float(rate) for width, rate in found["work"][kind].items()} for kind in _WORK
        }
        rates = Rates(**found | {"work": work})
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return rates if rates.cores == cores() else None


def rates_here(device: torch.device, width: int) -> Rates:
    """What was measured, else what a few tenths of a second tell of the nearest of `WIDTHS`, the widest left out."""
    nearest = min(WIDTHS[:-1], key=lambda known: abs(math.log(known / width)))
    return measured_rates(device) or quick_rates(device, nearest)


@functools.cache
def quick_rates(device: torch.device, width: int) -> Rates:
    """Rates of one width, of this process alone."""
    found = {kind: {width: work(device, width, _MOMENT)} for kind, work in _WORK.items()}
    return Rates(str(device), cores(), torch.get_num_threads(), found, reads=_reads(_BYTES // 8))


def measure(device: torch.device, tell: Callable[[str], None] = lambda text: None) -> Rates:
    """Rates of every width, alone and crowded, and of sums over processes; about a minute. They are kept for later.

    Raises:
        RunError: the processes that measure each other couldn't be started, or the file can't be written.
    """
    found: dict[str, dict[int, float]] = {}
    for kind, work in (_WORK | _WALKS).items():
        tell(kind)
        found[kind] = {width: work(device, width, _SECONDS) for width in WIDTHS}
    tell("processes")
    threads = torch.get_num_threads()
    rates = Rates(str(device), cores(), threads, found, _reads(_BYTES), **_together(device, threads))
    file = rates_file(device)
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


def _timed(work: Callable[[], float], device: torch.device, seconds: float) -> float:
    """Operations per second of `work`, which tells how many it has done."""
    work()  # the first call also loads libraries
    done, started = 0.0, time.perf_counter()
    while True:
        done += work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if (passed := time.perf_counter() - started) >= seconds:
            return done / passed


@torch.no_grad()
def _blocks(device: torch.device, width: int, seconds: float, *, tokens: int = _TOKENS) -> float:
    """A pre-norm block: attention and an MLP four times as wide, on a batch."""
    state = torch.randn(_SAMPLES, tokens, width, device=device)
    scale = width**-0.5
    weights = {
        name: torch.randn(rows, columns, device=device) * scale
        for name, rows, columns in (
            *(("qkv", 3 * width, width), ("out", width, width)),
            *(("up", 4 * width, width), ("down", width, 4 * width)),
        )
    }

    def block() -> float:
        seen = F.layer_norm(state, (width,))
        parts = F.linear(seen, weights["qkv"]).view(_SAMPLES, tokens, 3, _HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts).transpose(1, 2).reshape(state.shape)
        middle = state + F.linear(mixed, weights["out"])
        middle + F.linear(F.gelu(F.linear(F.layer_norm(middle, (width,)), weights["up"])), weights["down"])
        return 2.0 * _SAMPLES * tokens * (12 * width**2 + 2 * tokens * width)

    return _timed(block, device, seconds)


@torch.no_grad()
def _walked(device: torch.device, width: int, seconds: float, *, tokens: int = _TOKENS) -> float:
    """The engine's own walk of an expert and a variant, through two blocks of a language model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=_LAYERS,
        num_attention_heads=max(1, width // 64),
        vocab_size=_HEADS,
    )
    skeleton = weightless(functools.partial(LlamaForCausalLM, config), "a few blocks")
    shapes = {key: value.shape for key, value in skeleton.state_dict().items()}
    weights = {key: torch.randn(shape, device=device) * width**-0.5 for key, shape in shapes.items()}
    # Fewer samples where blocks are wide: still long products, and soon done.
    ones = torch.ones(min(_SAMPLES, max(1, _FEATURES // width)), tokens, dtype=torch.long)
    chain = decoder_chain(skeleton, {"input_ids": ones[:2, :2], "attention_mask": ones[:2, :2]})
    sources = dict.fromkeys(("expert:a", "merged"), TensorsSource("a few blocks", weights))
    pool = ModelPool(chain, skeleton, sources, device=device, dtype=torch.float32)
    inputs = {"input_ids": ones, "attention_mask": ones}
    batches = [Batch(len(ones) * at, len(ones) * (at + 1), inputs) for at in range(_BATCHES)]
    blocks = (shape for key, shape in shapes.items() if key.startswith("model.layers."))
    matrices = sum(shape.numel() for shape in blocks if len(shape) == 2)

    def work() -> float:
        for _ in walk(pool, "a", ["merged"], batches):
            pass
        # Three passes: each model on its own features, and the merged one on the expert's.
        return 3 * 2.0 * _BATCHES * ones.numel() * (matrices + 2 * tokens * width * _LAYERS)

    return _timed(work, device, seconds)


@torch.no_grad()
def _sums(device: torch.device, width: int, seconds: float) -> float:
    rows = torch.randn(_SAMPLES * _TOKENS, width, device=device)
    total = GramSum(width, torch.float64, device)

    def add() -> float:
        total.add_rows(rows)
        return float(rows.shape[0]) * width**2  # half of the matrix

    return _timed(add, device, seconds)


@torch.no_grad()
def _solves(device: torch.device, width: int, seconds: float) -> float:
    rows = torch.randn(2 * width, width, device=device, dtype=torch.float64)
    gram = rows.mT @ rows

    def solve() -> float:
        factorize(gram, what="a measured sum").solve_rows(gram.clone())
        return width**3 / 3 + 2.0 * width**3

    return _timed(solve, device, seconds)


_WORK: dict[str, Callable[[torch.device, int, float], float]] = {
    "blocks": _blocks,
    "steps": functools.partial(_blocks, tokens=1),
    "sums": _sums,
    "solves": _solves,
}
_WALKS: dict[str, Callable[[torch.device, int, float], float]] = {
    "blocks": _walked,
    "steps": functools.partial(_walked, tokens=1),
}
"""What takes the place of bare blocks where there is a minute."""


def _reads(size: int) -> float:
    with tempfile.TemporaryFile() as file:
        file.write(os.urandom(2**20) * (size // 2**20))
        file.flush()
        started = time.perf_counter()
        file.seek(0)
        torch.frombuffer(bytearray(file.read()), dtype=torch.float16).float()
        return size / (time.perf_counter() - started)


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

    ready, device, width = time.time(), torch.device(name), WIDTHS[2]
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=number)
    try:
        torch.set_num_threads(1)
        distributed.barrier()
        many = alone = 0.0
        if rank == 0:
            with computing_with(threads):
                many = _walked(device, width, _SECONDS)
            alone = _walked(device, width, _SECONDS)
        distributed.barrier()
        rate = torch.tensor([_walked(device, width, 2 * _SECONDS)], dtype=torch.float64)
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
