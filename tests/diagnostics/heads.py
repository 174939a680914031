"""Heads with hand-made weights."""

from __future__ import annotations

import torch

from driftlens.models.heads import Head


def head(classes: int = 5, width: int = 7, scale: float = 100.0, seed: int = 0) -> Head:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(classes, width, generator=generator, dtype=torch.float64)
    return Head(tuple(f"c{i}" for i in range(classes)), rows / rows.norm(dim=1, keepdim=True), scale)
