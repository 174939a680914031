"""Cost of attribution in bare forward passes, for ViT-B/32 and for decoders of growing depth.

Prefix swaps are counted separately: they run every later layer on each prefix, so their cost grows with the square of
the depth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import process_time

import torch

from benchmarks.figures import record
from benchmarks.models import images, vit_b32_pool
from driftlens.checkpoints.tensor_sources import module_source
from driftlens.data.samples import Batch
from driftlens.diagnostics.attribution import BackwardSweep, JacobianSettings, PrefixSwaps
from driftlens.engine.pool import ModelPool
from driftlens.engine.walk import iter_final_features, walk
from driftlens.linalg.state import stack_states
from driftlens.models.architectures.language import causal_chain
from driftlens.pipelines.drift import BATCH

IMAGES = 32
ROUNDS = 3
DEPTHS = (14, 32, 64)
SETTINGS = JacobianSettings(nodes=4, max_nodes=4, random=False)


@torch.no_grad()
def run(device: str) -> None:
    """Record CPU time of one pull-back (4 nodes), of random directions and of prefix swaps, in bare forward passes."""
    costs = _costs(vit_b32_pool(1, device), images(IMAGES, batch_size=BATCH))
    whole = costs["attribution"]
    case = "14 layers of ViT-B/32 shape"
    shown = {"decomposition of the final drift": whole, "random directions": costs["with random"] - whole}
    for name, cost in (shown | {"prefix swaps": costs["prefixes"]}).items():
        target = "at most 15" if cost is whole else ""
        record("attribution", f"{name}, {case}", f"{cost:.1f} bare forward passes", target, device=device)
    seconds = {}
    for depth in DEPTHS:
        pool, batches = _decoder(depth, device)
        costs = _costs(pool, batches)
        seconds[depth] = costs["attribution"] * costs["bare seconds"]
    ratio = f"{seconds[64] / seconds[32]:.2f} times"
    record("attribution", "decoder of 64 blocks against 32 blocks", ratio, "at most 2.2 times", device=device)


def _decoder(depth: int, device: str) -> tuple[ModelPool, list[Batch]]:
    """Return a random Llama of this depth with one expert, and texts."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=depth,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    modules = {}
    for seed, name in enumerate(("expert:a", "merged")):
        torch.manual_seed(seed)
        modules[name] = LlamaForCausalLM(config).eval().to(device)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (IMAGES, 64), generator=generator)
    batches = [
        Batch(at, at + BATCH, {"input_ids": tokens[at : at + BATCH].to(device)}) for at in range(0, IMAGES, BATCH)
    ]
    skeleton = modules["expert:a"]
    pool = ModelPool(
        causal_chain(skeleton, batches[0].inputs)[0],
        skeleton,
        {name: module_source(module, name) for name, module in modules.items()},
        device=torch.device(device),
        dtype=torch.float32,
        modules=modules,
    )
    return pool, batches


def _costs(pool: ModelPool, batches: list[Batch]) -> dict[str, float]:
    """Return the CPU time of each candidate over that of a bare forward pass, in interleaved rounds."""

    def bare() -> None:
        for _ in iter_final_features(pool, "merged", batches):
            pass

    candidates: dict[str, Callable[[], None]] = {
        "attribution": partial(_pull_back, pool, batches, SETTINGS),
        "with random": partial(_pull_back, pool, batches, replace(SETTINGS, random=True)),
        "prefixes": partial(_swap, pool, batches),
        "bare seconds": bare,
    }
    _pull_back(pool, batches[:1], SETTINGS)  # torch.func compiles its rules on first use
    seconds = dict.fromkeys(candidates, 0.0)
    for _ in range(ROUNDS):
        for name, work in candidates.items():
            started = process_time()
            work()
            seconds[name] += process_time() - started
    whole = seconds.pop("bare seconds")
    return {name: value / whole for name, value in seconds.items()} | {"bare seconds": whole / ROUNDS}


def _pull_back(pool: ModelPool, batches: list[Batch], settings: JacobianSettings) -> None:
    pull_back = BackwardSweep(pool, "a", ["merged"], settings)
    for view in walk(pool, "a", ["merged"], batches):
        pull_back.add(view)
    drifts = {
        (start, "merged"): stack_states([pull_back.final_drift(batch, "merged")])
        for start, batch in pull_back.batches.items()
    }
    for step in pull_back.steps(drifts):
        step.parts()


def _swap(pool: ModelPool, batches: list[Batch]) -> None:
    swaps: dict[int, PrefixSwaps] = {}
    pull_back = BackwardSweep(pool, "a", ["merged"])
    for view in walk(pool, "a", ["merged"], batches):
        pull_back.add(view)
        swaps.setdefault(view.start, PrefixSwaps(pull_back.batches[view.start], "merged")).add(view)
    for swap in swaps.values():
        swap.shares()
