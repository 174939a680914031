"""Blocks of decoders from their equations: one sample without padding, heads in a loop, all in the dtype of weights.

Sources: Llama (arXiv:2302.13971), Section 2.2; rotary positions (arXiv:2104.09864), Eq. 34, in halves; heads that share
keys and values (arXiv:2305.13245); Qwen3 (arXiv:2505.09388) also norms what every head asks and is asked by.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

NAMES = {
    "input_layernorm": "before_attention",
    **{f"self_attn.{part}_proj": part for part in "qkvo"},
    **{f"self_attn.{part}_norm": f"{part}_scale" for part in "qk"},
    "post_attention_layernorm": "before_feed_forward",
    **{f"mlp.{part}_proj": part for part in ("gate", "up", "down")},
}
"""The library's path of a module inside its block -> this file's."""


class Block(nn.Module):
    """A block, from the library's weights of it."""

    def __init__(self, weights: Mapping[str, Tensor], heads: int, shared: int, theta: float, eps: float) -> None:
        super().__init__()
        self.heads, self.shared, self.theta = heads, shared, theta
        for path, name in NAMES.items():
            weight = weights.get(f"{path}.weight")
            if weight is None:
                continue
            part: nn.Module
            if weight.dim() == 1:
                part = nn.RMSNorm(len(weight), eps=eps, dtype=weight.dtype)
            else:
                part = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
            part.load_state_dict({"weight": weight})
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.o(self._mixed(self.before_attention(x)))
        normed = self.before_feed_forward(x)
        gate = self.gate(normed)
        return x + self.down(gate / (1 + torch.exp(-gate)) * self.up(normed))

    def _mixed(self, x: Tensor) -> Tensor:
        length = len(x)
        q = self.q(x).reshape(length, self.heads, -1)
        k, v = (part(x).reshape(length, self.shared, -1) for part in (self.k, self.v))
        if hasattr(self, "q_scale"):
            q, k = self.q_scale(q), self.k_scale(k)
        found = []
        for token in range(length):
            for head in range(self.heads):
                read = head * self.shared // self.heads
                asked = self._turned(q[token, head], token)
                scores = [asked @ self._turned(k[at, read], at) for at in range(token + 1)]
                share = torch.softmax(torch.stack(scores) / math.sqrt(len(asked)), dim=0)
                found.append(share @ v[: token + 1, read])
        return torch.cat(found).reshape(length, -1)

    def _turned(self, vector: Tensor, token: int) -> Tensor:
        """Entries i and i + half are a plane, turned by the angle token / theta^(i / half)."""
        half = len(vector) // 2
        turned = vector.clone()
        for at in range(half):
            angle = token / self.theta ** (at / half)
            x, y = vector[at], vector[at + half]
            turned[at] = x * math.cos(angle) - y * math.sin(angle)
            turned[at + half] = y * math.cos(angle) + x * math.sin(angle)
        return turned


def blocks(model: nn.Module) -> list[nn.Module]:
    """All blocks of a model of transformers."""
    weights, config = model.state_dict(), model.config
    theta, eps = config.rope_parameters["rope_theta"], config.rms_norm_eps
    found: list[nn.Module] = []
    for at in range(config.num_hidden_layers):
        path = f"model.layers.{at}."
        own = {key.removeprefix(path): value for key, value in weights.items() if key.startswith(path)}
        found.append(Block(own, config.num_attention_heads, config.num_key_value_heads, theta, eps))
    return found
