"""Pooled features of one model, streamed layer by layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from driftlens.data.samples import Batch
from driftlens.engine.pool import ModelPool
from driftlens.engine.walk import layer_states
from driftlens.models.architecture import architecture_of
from driftlens.models.chain import Layer, Pool, pooled
from driftlens.models.sources import module_source


@torch.no_grad()
def capture(
    module: nn.Module, inputs: Iterable[Any], *, pool: Pool = "cls"
) -> Iterator[tuple[Layer, Tensor]]:
    """Each layer with its pooled features [n, d], in forward order; one boundary of features is alive at a time.

    Args:
        module: any module an adapter understands; run in eval mode, not modified.
        inputs: batches of raw inputs, each read once.
        pool: how one vector per sample is taken from a layer's state.

    Raises:
        IncompatibleModelsError: no adapter understands the module.
        NumericsError: weights or features are NaN or infinite.
    """
    first = next(module.parameters())
    sources = {"model": module_source(module, "model")}
    chain = architecture_of(module).chain
    models = ModelPool(
        chain, module, sources, device=first.device, dtype=first.dtype, modules={"model": module}
    )
    for layer, states in layer_states(models, "model", _numbered(inputs)):
        vectors = [pooled(state[layer.stream], pool, side.mask(layer.stream)) for _, state, side in states]
        yield layer, torch.cat(vectors)


def _numbered(inputs: Iterable[Any]) -> Iterator[Batch]:
    start = 0
    for batch in inputs:
        first = next(iter(batch.values())) if isinstance(batch, dict) else batch
        yield Batch(start, start + len(first), batch)
        start += len(first)
