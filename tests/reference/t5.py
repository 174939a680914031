"""T5's blocks from its equations: one sample without padding, heads in a loop, all in the dtype of the weights.

Sources: Raffel et al. (arXiv:1910.10683), Section 2.1; gated GELU of v1.1: Shazeer (arXiv:2002.05202). Module names are
this file's own; linear modules are plain ones, so that a calibration finds them, and norms are none that it solves for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

State = tuple[Tensor, Tensor]
"""The encoder's tokens [t, d] and the decoder's [u, d]."""

ATTENTION = ("q", "k", "v", "o")
FEED_FORWARD = {"wi_0": "gate", "wi_1": "up", "wo": "down"}


class Scale(nn.Module):
    """x / root mean square of x, times a scale."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(weight.clone()), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / ((x * x).mean(dim=-1, keepdim=True) + self.eps).sqrt()


class Block(nn.Module):
    """A block of one stack, from the library's weights of the block and its model's table of positions."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        table: Tensor,
        heads: int,
        furthest: int,
        eps: float,
        decodes: bool,
    ) -> None:
        super().__init__()
        self.heads, self.furthest, self.decodes = heads, furthest, decodes
        self.table = nn.Parameter(table.clone())
        last = 2 if decodes else 1
        self.norms = nn.ModuleList(Scale(weights[f"layer.{at}.layer_norm.weight"], eps) for at in range(last + 1))
        kinds = {"own": "layer.0.SelfAttention"} | ({"cross": "layer.1.EncDecAttention"} if decodes else {})
        parts = {f"{kind}_{part}": f"{path}.{part}" for kind, path in kinds.items() for part in ATTENTION}
        parts |= {f"{mine}_{last}": f"layer.{last}.DenseReluDense.{theirs}" for theirs, mine in FEED_FORWARD.items()}
        for name, path in parts.items():
            weight = weights[f"{path}.weight"]
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
            linear.weight.data.copy_(weight)
            setattr(self, name, linear)

    def forward(self, state: State) -> State:
        encoded, decoded = state
        x = decoded if self.decodes else encoded
        normed = self.norms[0](x)
        x = x + self._attention("own", normed, normed)
        if self.decodes:
            x = x + self._attention("cross", self.norms[1](x), encoded)
        normed = self.norms[-1](x)
        gate, up, down = (getattr(self, f"{part}_{len(self.norms) - 1}") for part in ("gate", "up", "down"))
        gate = gate(normed)
        gelu = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
        x = x + down(gelu * up(normed))
        return (encoded, x) if self.decodes else (x, decoded)

    def _attention(self, kind: str, asking: Tensor, read: Tensor) -> Tensor:
        q, k, v = (getattr(self, f"{kind}_{part}") for part in "qkv")
        queries, keys, values = q(asking), k(read), v(read)
        size = queries.shape[1] // self.heads
        mixed = []
        for head in range(self.heads):
            part = slice(head * size, (head + 1) * size)
            scores = queries[:, part] @ keys[:, part].T  # never divided by the root of the size
            if kind == "own":
                scores = scores + self._bias(len(asking), head)
            mixed.append(torch.softmax(scores, dim=-1) @ values[:, part])
        return getattr(self, f"{kind}_o")(torch.cat(mixed, dim=-1))

    def _bias(self, length: int, head: int) -> Tensor:
        bias = self.table.new_zeros(length, length)
        for query in range(length):
            for key in range(length):
                is_ahead = self.decodes and key > query
                bias[query, key] = -torch.inf if is_ahead else self.table[self._bucket(key - query), head]
        return bias

    def _bucket(self, offset: int) -> int:
        """Half of the buckets hold single offsets, the others grow with the logarithm, the last one holds the rest."""
        buckets, first = len(self.table), 0
        if not self.decodes:
            buckets //= 2
            first = buckets if offset > 0 else 0
        distance = abs(offset) if not self.decodes else max(-offset, 0)
        exact = buckets // 2
        if distance < exact:
            return first + distance
        grown = math.log(distance / exact) / math.log(self.furthest / exact) * (buckets - exact)
        return first + min(exact + int(grown), buckets - 1)


class EncoderNorm(nn.Module):
    """What the decoder reads: the encoder's tokens, normalised."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.scale = Scale(weight, eps)

    def forward(self, state: State) -> State:
        return self.scale(state[0]), state[1]


def blocks(model: nn.Module) -> list[nn.Module]:
    """All blocks of a model of transformers, the encoder's final norm between the two stacks."""
    weights, config = model.state_dict(), model.config
    found: list[nn.Module] = []
    for stack, count in (("encoder", config.num_layers), ("decoder", config.num_decoder_layers)):
        table = weights[f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
        for at in range(count):
            path = f"{stack}.block.{at}."
            own = {key.removeprefix(path): value for key, value in weights.items() if key.startswith(path)}
            furthest, eps = config.relative_attention_max_distance, config.layer_norm_epsilon
            found.append(Block(own, table, config.num_heads, furthest, eps, stack == "decoder"))
        if stack == "encoder":
            found.append(EncoderNorm(weights["encoder.final_layer_norm.weight"], config.layer_norm_epsilon))
    return found


def names() -> dict[str, str]:
    """The library's path of a linear module inside its block -> this file's."""
    found = {f"layer.0.SelfAttention.{part}": f"own_{part}" for part in ATTENTION}
    found |= {f"layer.1.EncDecAttention.{part}": f"cross_{part}" for part in ATTENTION}
    return found | {
        f"layer.{at}.DenseReluDense.{theirs}": f"{mine}_{at}" for at in (1, 2) for theirs, mine in FEED_FORWARD.items()
    }
