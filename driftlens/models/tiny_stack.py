"""A small model of no particular library, for trying the `sequential` adapter."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 16
PATCH = 8
HEADS = 2


class TinyStack(nn.Module):
    """Patches and a class token through three pre-norm blocks; the feature is the normed class token.

    Takes images [n, 3, h, w] with h and w multiples of 8; returns [n, 16].
    """

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, stride=PATCH)
        self.class_token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.blocks = nn.ModuleList(_Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, pixels: Tensor) -> Tensor:
        """Features of a batch of images."""
        patches = self.patches(pixels).flatten(2).mT
        hidden = torch.cat([self.class_token.expand(len(pixels), -1, -1), patches], dim=1)
        for block in self.blocks:
            hidden = block(hidden)
        features: Tensor = self.norm(hidden[:, 0])
        return features


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm_1(hidden)
        query, key, value = (
            project(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(query, key, value)
        hidden = hidden + self.out(attended.transpose(1, 2).flatten(2))
        change: Tensor = self.down(F.gelu(self.up(self.norm_2(hidden))))
        return hidden + change
