"""Embeddings of which only the rows looked up are converted."""

from __future__ import annotations

from typing import cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from driftlens.checkpoints.tensor_sources import EmbeddingTable


class _Largest(TorchDispatchMode):
    """Notes how many entries the largest new tensor has."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not any(out is value for value in args):
            self.entries = max(self.entries, out.numel() if out.dtype == torch.float32 else 0)
        return out


class _Scaled(nn.Module):
    """As Gemma scales: by a number in the dtype of the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(500, 8, padding_idx=0)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.table(ids) * torch.tensor(1.7).to(self.table.weight.dtype)
        return out


def test_a_look_up_converts_its_rows_alone() -> None:
    stored = torch.randn(500, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    module, ids = _Scaled(), torch.tensor([[3, 0, 499], [3, 7, 7]])
    table = EmbeddingTable.wrap(stored, torch.float32)
    with _Largest() as largest:
        out = functional_call(module, {"table.weight": table}, (ids,))
        module.table._parameters["weight"] = cast("nn.Parameter", table)
        kept = module.state_dict()["table.weight"]  # as libraries ask for a module's dtype and device
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, F.embedding(ids, stored.float()) * torch.tensor(1.7), rtol=0, atol=0)
    assert (kept.dtype, kept.shape) == (torch.float32, (500, 8))
    assert 0 < largest.entries <= out.numel()


@pytest.mark.parametrize("use", [lambda t: t + 1, lambda t: t[3:5], lambda t: torch.cat([t, t]), lambda t: t.T @ t])
def test_whatever_else_is_done_is_done_with_all_of_it(use) -> None:  # type: ignore[no-untyped-def]
    stored = torch.randn(40, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = use(EmbeddingTable.wrap(stored, torch.float64))
    assert type(found) is Tensor
    torch.testing.assert_close(found, use(stored.double()), rtol=0, atol=0)
