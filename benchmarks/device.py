"""Tests and benchmarks on an accelerator: `python -m benchmarks.device --device cuda`, at most 8 minutes.

Runs tests on the device, then measures time and peak memory of calibrations and an analysis. Jobs that cannot begin in
time are left out and named; `--small` runs the same on tiny models as a test.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import driftlens as dl
from benchmarks.calibration_floor import floor_seconds, product_rates
from benchmarks.figures import record
from benchmarks.reference_calibration import Clock
from driftlens.calibration.calibrator import Calibrator
from driftlens.calibration.featcal import FeatCal
from driftlens.calibration.residual import ResidualCal
from driftlens.checkpoints.tensor_sources import module_source
from driftlens.data.samples import Batch
from driftlens.engine.calibrating import CalibrationContext
from driftlens.engine.pool import ModelPool
from driftlens.engine.sites import select_sites
from driftlens.engine.walk import InMemoryBatches
from driftlens.models.architectures.language import causal_chain
from driftlens.models.chain import LayerChain, adapters
from driftlens.utils.devices import device_name, peak_memory, reset_peak_memory, resolve_device

TESTS = ("tests/calibration/test_forward_order.py", "tests/calibration/test_residual.py", "tests/linalg")
"""Quick ones, which compute on the device that is asked for."""
BATCH = 32
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 16,
    "projection_dim": 16,
}
_DECODER: dict[str, Any] = {  # the shape of Llama 3.2 1B
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "tie_word_embeddings": True,
}
_SMALL_DECODER: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"num_key_value_heads": 1, "vocab_size": 64, "tie_word_embeddings": True},
}


@dataclass(frozen=True)
class Size:
    """How large everything is."""

    small: bool

    @property
    def images(self) -> tuple[int, int]:
        """Tasks, and images of each."""
        return (2, 8) if self.small else (8, 256)

    @property
    def texts(self) -> tuple[int, int, int]:
        """Tasks, texts of each, and tokens of a text."""
        return (2, 4, 8) if self.small else (3, 64, 128)


Work = Callable[[], object]
Job = Callable[[Size, torch.device], tuple[str, Work]]
"""Makes what is needed; what it is in words, and the work to be timed."""


@torch.no_grad()
def _towers(size: Size, device: torch.device) -> tuple[dict[str, nn.Module], LayerChain, dict[str, Tensor]]:
    """ViT-B/32, a merged one and experts near it, and decoded images of every task."""
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    config = CLIPVisionConfig(**_TOWER) if size.small else CLIPVisionConfig()
    tasks, count = size.images
    names = ["base", "merged", *(f"expert:{task}" for task in range(tasks))]
    models = _near(names, lambda: CLIPVisionModelWithProjection(config), device)
    pixels = {
        str(task): torch.randn(count, 3, config.image_size, config.image_size).to(device) for task in range(tasks)
    }
    return models, adapters["hf_clip_vit"].chain(models["merged"]), pixels


def _near(names: list[str], build: Callable[[], nn.Module], device: torch.device) -> dict[str, nn.Module]:
    """Models that differ little, as fine-tuning and merging leave them."""
    torch.manual_seed(0)
    start, models = build().eval(), dict[str, nn.Module]()
    state = start.state_dict()
    for name in names:
        models[name] = build().eval().to(next(start.parameters()).dtype)
        models[name].load_state_dict(state)
        for parameter in models[name].parameters():
            parameter.add_(1e-3 * torch.randn_like(parameter))
        models[name].to(device)
    return models


def _calibration(method: Calibrator) -> Job:
    def job(size: Size, device: torch.device) -> tuple[str, Work]:
        models, chain, pixels = _towers(size, device)
        tasks, count = size.images
        work = _calibrating(method, models, chain, {task: _batches(x) for task, x in pixels.items()}, device)
        return f"{type(method).__name__}, ViT-B/32, {tasks} x {count}, decoded images", work

    return job


def _decoder(size: Size, device: torch.device) -> tuple[str, Work]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**(_SMALL_DECODER if size.small else _DECODER))
    tasks, count, length = size.texts
    names = ["base", "merged", *(f"expert:{task}" for task in range(tasks))]
    with torch.no_grad():
        # Weights wait on the host, layers go to the device.
        models = _near(names, lambda: LlamaForCausalLM(config).to(torch.bfloat16), torch.device("cpu"))
    tokens = torch.randint(config.vocab_size, (count, length))
    batches = [
        Batch(at, min(at + BATCH, count), {"input_ids": tokens[at : at + BATCH]}) for at in range(0, count, BATCH)
    ]
    chain = causal_chain(models["merged"], batches[0].inputs)[0]
    given = {str(task): batches for task in range(tasks)}
    words = f"FeatCal, decoder of 1B, {tasks} experts, {tasks} x {count} x {length} tokens"
    return words, _calibrating(FeatCal(), models, chain, given, device)


def _calibrating(
    method: Calibrator,
    models: dict[str, nn.Module],
    chain: LayerChain,
    batches: dict[str, list[Batch]],
    device: torch.device,
) -> Work:
    def work() -> None:
        sources = {name: module_source(module, name) for name, module in models.items()}
        pool = ModelPool(chain, models["merged"], sources, device=device, dtype=torch.float32)
        parts = {task: InMemoryBatches(lambda of=of: of) for task, of in batches.items()}
        for _ in method.calibrate(CalibrationContext(pool, parts, select_sites(chain, update=method.update))):
            pass

    return work


def _batches(x: Tensor) -> list[Batch]:
    return [Batch(at, min(at + BATCH, len(x)), x[at : at + BATCH]) for at in range(0, len(x), BATCH)]


def _analysis(size: Size, device: torch.device) -> tuple[str, Work]:
    models, _, pixels = _towers(size, device)
    tasks, count = size.images

    def work() -> None:
        with tempfile.TemporaryDirectory() as folder:
            dl.analyze(
                base=models["base"],
                merged=models["merged"],
                experts={task: models[f"expert:{task}"] for task in pixels},
                data={task: DataLoader(TensorDataset(x.cpu()), batch_size=BATCH) for task, x in pixels.items()},
                out=Path(folder) / "run",
                device=device,
                progress="none",
            )

    return f"analyze, ViT-B/32, {tasks} x {count}, causes included", work


JOBS: dict[str, Job] = {
    "featcal": _calibration(FeatCal()),
    "residual": _calibration(ResidualCal()),
    "analyze": _analysis,
    "decoder": _decoder,
}


def measured(name: str, size: Size, device: torch.device) -> str:
    """A row of the table: what, seconds of the second run, peak memory there, share of the arithmetic floor."""
    words, work = JOBS[name](size, device)
    work()
    reset_peak_memory(device)
    clock = Clock(device)
    clock(work)
    peak, share = peak_memory(device), "-"
    if name == "featcal" and not size.small:
        share = f"{floor_seconds(*size.images, 12, product_rates(device)) / clock.seconds:.0%}"
    if not size.small:
        more = "" if peak is None else f"; peak memory {peak / 2**30:.2f} GiB"
        record("device", words, f"{clock.seconds:.2f} s{more}", device=str(device))
    memory = "-" if peak is None else f"{peak / 2**30:.2f}"
    words = f"tiny models in the place of: {words}" if size.small else words
    return f"| {words} | {clock.seconds:.2f} | {memory} | {share} |"


def tested(device: str, seconds: float) -> str:
    """What the quick tests say on the device."""
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "--device", device, *TESTS]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(1.0, seconds))
    except subprocess.TimeoutExpired:
        return f"tests: not done after {seconds:.0f} s"
    return f"tests: {next(reversed(done.stdout.strip().splitlines()), done.stderr[-200:])}"


def main(arguments: list[str] | None = None) -> None:
    """Print device and versions, the outcome of the tests, and a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=["tests", *JOBS], help=f"tests, {', '.join(JOBS)}")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--small", action="store_true", help="tiny models, to see that it runs")
    parser.add_argument("--minutes", type=float, default=8.0, help="no job begins behind them")
    given = parser.parse_args(arguments)
    until, device = time.monotonic() + 60 * given.minutes, resolve_device(given.device)
    print(f"{device_name(device)}, torch {torch.__version__}, float32, of two runs the second", flush=True)
    if "tests" in given.names:
        print(tested(str(device), (until - time.monotonic()) / 4), flush=True)
    print("| job | seconds | peak memory, GiB | share of the floor |\n|---|---|---|---|", flush=True)
    for name in given.names:
        if name != "tests" and time.monotonic() < until:
            print(measured(name, Size(given.small), device), flush=True)
        elif name != "tests":
            print(f"| {name} | not begun in {given.minutes:g} minutes | | |", flush=True)


if __name__ == "__main__":
    main()
