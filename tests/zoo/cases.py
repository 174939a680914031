"""Every kind of model the engine walks, as one table: registered adapters' tiny models and the hand-made ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from driftlens.checkpoints.tensor_sources import module_source
from driftlens.data.samples import Batch
from driftlens.engine.pool import ModelPool
from driftlens.models.architectures.module_list import sequential_chain
from driftlens.models.chain import LayerChain, adapters
from tests.zoo.hand_made import (
    Decoder,
    EncoderDecoder,
    decoder_chain,
    encoder_decoder_chain,
    token_batch,
)
from tests.zoo.small import TINY


@dataclass(frozen=True)
class Case:
    """One architecture: how to build a random model, take it apart and feed it."""

    build: Callable[[], nn.Module]
    chain: Callable[[nn.Module], LayerChain]
    inputs: Callable[[torch.Generator, int], Any]


def pixels(size: int) -> Callable[[torch.Generator, int], Tensor]:
    return lambda generator, n: torch.randn(n, 3, size, size, generator=generator, dtype=torch.float64)


def rows(width: int) -> Callable[[torch.Generator, int], Tensor]:
    return lambda generator, n: torch.randn(n, width, generator=generator, dtype=torch.float64)


def linear(width: int) -> list[nn.Module]:
    return [nn.Linear(width, width)]


class Stack(nn.Module):
    """A stem, residual-free blocks in a list, and a head; what `sequential` is for."""

    def __init__(self, width: int = 6, depth: int = 3, parts: Callable[[int], list[nn.Module]] = linear) -> None:
        super().__init__()
        self.embed = nn.Linear(5, width)
        self.blocks = nn.ModuleList(nn.Sequential(*parts(width), nn.Tanh()) for _ in range(depth))
        self.out = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.out(hidden)


def with_seed(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def seeded() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return build()

    return seeded


def stack_chain(module: nn.Module) -> LayerChain:
    return sequential_chain(module, torch.ones(1, 5, dtype=torch.float64))


CASES: dict[str, Case] = {
    "open_clip_vit": Case(TINY["open_clip_vit"], adapters["open_clip_vit"].chain, pixels(16)),
    "hf_clip_vit": Case(TINY["hf_clip_vit"], adapters["hf_clip_vit"].chain, pixels(16)),
    "sequential": Case(with_seed(Stack), stack_chain, rows(5)),
    "masked_decoder": Case(
        with_seed(Decoder), decoder_chain, lambda generator, n: token_batch(generator, n, targets=False)
    ),
    "encoder_decoder": Case(
        with_seed(EncoderDecoder),
        encoder_decoder_chain,
        lambda generator, n: token_batch(generator, n, targets=True),
    ),
}


def perturbed(model: nn.Module, seed: int, scale: float = 0.05) -> nn.Module:
    """A copy with every parameter moved by noise, as an expert is moved by fine-tuning."""
    generator = torch.Generator().manual_seed(seed)
    moved = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return moved


@dataclass(frozen=True)
class Family:
    """A base, two experts and their merge as live modules, in a pool."""

    pool: ModelPool
    modules: dict[str, nn.Module]
    batches: list[Batch]

    @property
    def chain(self) -> LayerChain:
        return self.pool.chain


def family(case: Case, *, n: int = 4, batch_size: int = 3, device: str | torch.device = "cpu") -> Family:
    """Float64 models of one case: base, experts of tasks `a` and `b`, and their average as merged model."""
    base = case.build().double().eval()
    experts = {"a": perturbed(base, 1), "b": perturbed(base, 2)}
    merged = copy.deepcopy(base)
    with torch.no_grad():
        for name, parameter in merged.named_parameters():
            parameter.copy_(sum(dict(e.named_parameters())[name] for e in experts.values()) / len(experts))
    modules = {"base": base, "merged": merged, **{f"expert:{task}": model for task, model in experts.items()}}
    modules = {name: module.to(device) for name, module in modules.items()}
    generator = torch.Generator().manual_seed(3)
    batches = [
        Batch(first, min(first + batch_size, n), case.inputs(generator, min(batch_size, n - first)))
        for first in range(0, n, batch_size)
    ]
    return Family(pool_of(case, modules, device), modules, batches)


def pool_of(case: Case, modules: dict[str, nn.Module], device: str | torch.device = "cpu") -> ModelPool:
    return ModelPool(
        case.chain(modules["base"]),
        modules["base"],
        {name: module_source(module, name) for name, module in modules.items()},
        device=torch.device(device),
        dtype=torch.float64,
        modules=modules,
    )


def samples(inputs: Any, chosen: slice) -> Any:
    if isinstance(inputs, dict):
        return {name: value[chosen] for name, value in inputs.items()}
    return inputs[chosen]
