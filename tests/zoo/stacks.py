"""Small architectures of many shapes, for the `sequential` adapter, each with the inputs it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 6
TOKENS = 5
WORDS = 9


class Plain(nn.Module):
    """Residual MLP blocks between a linear stem and a normed head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, WIDTH)
        self.layers = nn.ModuleList(Residual() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.stem(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.out(self.norm(hidden))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = (
            nn.Linear(2 * WIDTH, WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
        )  # not in the order they run
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class InPlace(Plain):
    """Blocks that write into their input, and a model that writes into its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adding() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x -= 0.5
        hidden = self.stem(x)
        for layer in self.layers:
            hidden = layer(hidden)
        hidden *= 2
        return self.out(self.norm(hidden))


class Adding(Residual):
    def forward(self, x: Tensor) -> Tensor:
        x += self.down(F.relu(self.up(self.norm(x)), inplace=True))
        return x


class Tuples(Plain):
    """Blocks that return (features, something), which the model unpacks and the head uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Pair() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.stem(x)
        extra: Tensor | None = None
        for layer in self.layers:
            hidden, extra = layer(hidden)
        assert extra is not None
        return self.out(self.norm(hidden)) + extra


class Pair(Residual):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), torch.full((), 3.0, dtype=x.dtype)


class Masked(nn.Module):
    """Tokens, a class token at the root, attention blocks with a mask and, by keyword, rotary tables."""

    def __init__(self) -> None:
        super().__init__()
        self.final = RMSNorm(WIDTH)
        self.class_token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.scale = nn.Parameter(torch.tensor(2.0))  # used by the head alone
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, tokens: Tensor, mask: Tensor) -> dict[str, Tensor | int]:
        hidden = torch.cat([self.class_token.expand(len(tokens), -1, -1), self.embed(tokens)], dim=1)
        seen = F.pad(mask, (1, 0), value=True)
        allowed = torch.zeros(seen.shape, dtype=hidden.dtype).masked_fill(~seen, -1e9)[:, None, :]
        angles = torch.arange(hidden.shape[1], dtype=hidden.dtype)[:, None]
        tables = (angles.cos(), angles.sin())
        for layer in self.layers:
            hidden = layer(hidden, allowed, tables=tables, scale=0.5)
        return {"count": len(tokens), "features": self.scale * self.final(hidden[:, 0])}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.k, self.q, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.norm = RMSNorm(WIDTH)

    def forward(self, x: Tensor, mask: Tensor, *, tables: tuple[Tensor, Tensor], scale: float) -> Tensor:
        normed = self.norm(x)
        cos, sin = tables
        query, key, value = self.q(normed) * cos, self.k(normed) * sin, self.v(normed)
        # Refuses a mask of another dtype than the features.
        scores = torch.baddbmm(mask, query, key.mT, alpha=scale)
        return x + self.o(scores.softmax(dim=-1) @ value)


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-6)


class Images(nn.Module):
    """A convolutional stem, blocks with batch norm that narrow, and a head that looks back at the stem."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, WIDTH, 2, stride=2)
        self.stages = nn.Sequential(Stage(WIDTH, 4), Stage(4, 4))
        self.skip = nn.Linear(WIDTH, 4)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.conv(images)
        return self.stages(hidden).mean(dim=(2, 3)) + self.skip(hidden.mean(dim=(2, 3)))


class Stage(nn.Module):
    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, out, 3, padding=1)
        self.norm = nn.BatchNorm2d(out)
        nn.init.uniform_(self.norm.running_mean)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.norm(self.conv(x)))


class Tied(nn.Module):
    """Word embedding and output share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Residual() for _ in range(2))
        self.out = nn.Linear(WIDTH, WORDS, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.out(hidden)


class Library(nn.Module):
    """PyTorch's own encoder, whose attention hides its projections and has a fused kernel."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.encoder(x, src_key_padding_mask=padding).mean(dim=1)


@dataclass(frozen=True)
class Stack:
    """An architecture and how its inputs are drawn."""

    build: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator, int], Any]

    def module(self, seed: int = 0) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return self.build().double().eval()


def rows(generator: torch.Generator, n: int) -> Tensor:
    return torch.randn(n, 4, generator=generator, dtype=torch.float64)


def images(generator: torch.Generator, n: int) -> Tensor:
    return torch.randn(n, 3, 8, 8, generator=generator, dtype=torch.float64)


def tokens(generator: torch.Generator, n: int) -> Tensor:
    return torch.randint(WORDS, (n, TOKENS), generator=generator)


def mask(n: int) -> Tensor:
    return torch.arange(TOKENS)[None] < torch.arange(n)[:, None] % TOKENS + 1


STACKS = {
    "residual_mlp": Stack(Plain, rows),
    "in_place": Stack(InPlace, rows),
    "tuples": Stack(Tuples, rows),
    "masked_attention": Stack(Masked, lambda g, n: {"tokens": tokens(g, n), "mask": mask(n)}),
    "images": Stack(Images, images),
    "tied": Stack(Tied, tokens),
    "torch_encoder": Stack(
        Library, lambda g, n: (torch.randn(n, TOKENS, WIDTH, generator=g, dtype=torch.float64), ~mask(n))
    ),
    "sequential_model": Stack(
        lambda: nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, 2)), rows
    ),
}
