"""Time and memory per layer of a large decoder: plain forward pass, analysis and FeatCal, with weights on disk.

`DRIFTLENS_WIDTH` sets the hidden size (4096, as in models of 8 billion parameters). Two layers are measured; figures of
whole models are these times the number of layers, and for other widths scaled by counted multiplications and bytes.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.figures import record
from driftlens.linalg.gram import solve_bytes

WIDTH = int(os.environ.get("DRIFTLENS_WIDTH", "4096"))
LAYERS, TASKS, TEXTS, TOKENS, BATCH, WORDS = 2, 4, 16, 128, 4, 512
BUDGET = 2 << 30
JOBS = ("forward", "analyze", "featcal")
# Hidden size and number of layers of whole models.
MODELS = {"8B": (4096, 32), "70B": (8192, 80)}


def run(device: str) -> None:
    """Record seconds and peak memory per layer of every job, and the estimates for whole models."""
    with tempfile.TemporaryDirectory() as folder:
        _child("write", folder, device)
        measured = {job: _child(job, folder, device) for job in JOBS}
    case = f"layer of width {WIDTH}, {TASKS} experts, {TEXTS} texts of {TOKENS} tokens"
    limit = (4 * _layer_bytes(WIDTH) + BUDGET) / 1e9
    for job, (seconds, peak) in measured.items():
        value = f"{seconds / LAYERS:.1f} s; {peak / 1e9:.1f} GB"
        record("layers", f"{case}: {job}", value, f"at most {limit:.1f} GB", device=device)
    for model, (width, depth) in MODELS.items():
        for job in JOBS[1:]:
            seconds = measured[job][0] / LAYERS * depth * _multiplications(job, width) / _multiplications(job, WIDTH)
            memory = measured[job][1] * _memory(job, width) / _memory(job, WIDTH)
            traffic = depth * _layer_bytes(width) * _models_read(job)
            value = f"{seconds / 3600:.1f} h; {memory / 1e9:.0f} GB; {traffic / 1e9:.0f} GB"
            record("layers", f"estimate for {model}, {job}: time; memory; read from disk", value, device=device)


def _sizes(width: int) -> dict[str, tuple[int, int]]:
    """Return outputs and inputs of the modules with one input: queries, keys and values; out; gate and up; down."""
    inner = 7 * width // 2
    grouped = {"qkv": (width + width // 2, width), "out": (width, width)}
    return grouped | {"gate, up": (2 * inner, width), "down": (width, inner)}


def _layer_bytes(width: int) -> int:
    return 2 * sum(outputs * inputs for outputs, inputs in _sizes(width).values())


def _models_read(job: str) -> int:
    """Return how often a layer is read: for an analysis, expert and merged model of each task."""
    return 2 * TASKS if job == "analyze" else TASKS + 2


def _multiplications(job: str, width: int) -> float:
    """Count the multiply-adds of one layer."""
    rows, sizes = TEXTS * TOKENS, _sizes(width).values()
    forward = rows * sum(outputs * inputs for outputs, inputs in sizes)
    if job != "featcal":
        return 3 * TASKS * forward
    sums = sum(rows * k**2 / 2 + min(2 * rows * o * k, rows * k**2 + o * k**2) for o, k in sizes)
    # float64 products take twice as long.
    return TASKS * (3 * forward + sums) + 2 * sum(k**3 / 6 + o * k**2 for o, k in sizes)


def _memory(job: str, width: int) -> int:
    """Return the bytes of two layers in bfloat16 and one in float32, of features, and of the largest solve."""
    solve = max(solve_bytes(*size) for size in _sizes(width).values()) if job == "featcal" else 0
    return 4 * _layer_bytes(width) + BUDGET + solve


def _child(job: str, folder: str, device: str) -> list[float]:
    """Run a job in a process of its own; return processor seconds and peak resident bytes."""
    command = [sys.executable, "-m", "benchmarks.layers", job, folder, device]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def _config() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=_sizes(WIDTH)["down"][1],
        num_hidden_layers=LAYERS,
        num_attention_heads=WIDTH // 128,
        num_key_value_heads=WIDTH // 512,
        tie_word_embeddings=False,
    )


def _write(folder: Path) -> None:
    """Write random weights in bfloat16; experts and the merged model lie near the base."""
    from safetensors.torch import save_file
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    with _default_dtype(torch.bfloat16):
        state = LlamaForCausalLM(_config()).state_dict()
    for number in range(TASKS + 2):
        # Shifted copies of a tensor are as good as noise, and drawn faster.
        near = {name: value + 0.03 * number * value.roll(number, 0) for name, value in state.items()}
        save_file({name: value.contiguous() for name, value in near.items()}, folder / f"{number}.safetensors")


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@torch.no_grad()
def _job(job: str, folder: Path, device: str) -> float:
    """Return the processor seconds of one job in all layers, without the opening of files."""
    from transformers import LlamaForCausalLM

    from driftlens.calibration.featcal import FeatCal
    from driftlens.checkpoints.loading import open_checkpoint
    from driftlens.data.samples import Batch
    from driftlens.engine.calibrating import CalibrationContext
    from driftlens.engine.pool import ModelPool
    from driftlens.engine.sites import select_sites
    from driftlens.engine.walk import InMemoryBatches, drift_columns, iter_final_features, walk
    from driftlens.models.architecture import build_on_meta
    from driftlens.models.architectures.language import causal_chain

    skeleton: Any = build_on_meta(lambda: LlamaForCausalLM(_config()).eval(), "decoder")
    names = ["base", "merged", *(f"expert:{task}" for task in range(TASKS))]
    sources = {name: open_checkpoint(folder / f"{number}.safetensors") for number, name in enumerate(names)}
    tokens = torch.randint(WORDS, (TEXTS, TOKENS), generator=torch.Generator().manual_seed(0))
    batches = [Batch(at, at + BATCH, {"input_ids": tokens[at : at + BATCH]}) for at in range(0, TEXTS, BATCH)]
    chain = causal_chain(skeleton, batches[0].inputs)[0]
    pool = ModelPool(chain, skeleton, sources, device=torch.device(device), dtype=torch.float32)

    def forward() -> None:
        for _ in iter_final_features(pool, "merged", batches):
            pass

    def analyze() -> None:
        for task in range(TASKS):
            for view in walk(pool, str(task), ["merged"], batches):
                drift_columns(view, "last")

    def featcal() -> None:
        samples = {str(task): InMemoryBatches(lambda: batches) for task in range(TASKS)}
        context = CalibrationContext(pool, samples, select_sites(chain), feature_budget=BUDGET, spill=folder / "spill")
        for _ in FeatCal().calibrate(context):
            pass

    work: dict[str, Callable[[], None]] = {"forward": forward, "analyze": analyze, "featcal": featcal}
    started = time.process_time()
    work[job]()
    return time.process_time() - started


if __name__ == "__main__":
    job, folder, device = sys.argv[1:]
    spent = 0.0
    if job == "write":
        _write(Path(folder))
    else:
        spent = _job(job, Path(folder), device)
    print(json.dumps([spent, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]))
