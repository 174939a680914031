"""FeatCal the slow way: float64, one sample and one token at a time, no helper of the product.

Blocks are plain modules here; what their linear and norm modules are fed is caught by hooks. A calibration returns new
values of those modules' parameters by block and name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Blocks = list[nn.Module]
Run = Callable[[nn.Module, Any, int], Any]
"""(block, one sample's features, which sample) -> the features that leave the block."""
TokenWeights = Callable[[int, str, int], Tensor | None]
"""(block, module, sample) -> how much each token counts; None counts each 1."""


class PlainBlock(nn.Module):
    """A pre-norm transformer block of separate modules, heads in a loop; for one sample [t, d]."""

    def __init__(self, width: int, inner: int, heads: int, eps: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=eps), nn.LayerNorm(width, eps=eps)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)
        self.heads = heads

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm1(hidden)
        size = hidden.shape[-1] // self.heads
        q, k, v = self.q(normed), self.k(normed), self.v(normed)
        mixed = []
        for head in range(self.heads):
            part = slice(head * size, (head + 1) * size)
            attention = torch.softmax(q[:, part] @ k[:, part].T / size**0.5, dim=-1)
            mixed.append(attention @ v[:, part])
        hidden = hidden + self.out(torch.cat(mixed, dim=-1))
        inner = self.fc1(self.norm2(hidden))
        return hidden + self.fc2(inner * torch.sigmoid(1.702 * inner))


@dataclass(frozen=True)
class Settings:
    lam: float = 0.05
    rho: float = 2.0
    alpha: float = 0.3
    eps: float = 1e-8
    inputs: str = "deployed"


@torch.no_grad()
def calibrate(
    merged: Blocks,
    base: Blocks | None,
    experts: Mapping[str, Blocks],
    features: Mapping[str, Mapping[str, list[Any]]],
    run: Run,
    settings: Settings,
    token_weights: TokenWeights = lambda block, name, sample: None,
) -> list[dict[str, Tensor]]:
    """New parameters of every block, by name inside the block.

    Args:
        merged: the merged model's blocks.
        base: the base's.
        experts: each expert's.
        features: `features[task]["merged" | "expert"]`: what enters the first block, per sample.
        run: a block on one sample.
        settings: hyperparameters.
        token_weights: (block, module, sample) -> how much each token counts; None counts each 1.
    """
    found = []
    states = {task: {model: list(rows) for model, rows in both.items()} for task, both in features.items()}
    for index, mine in enumerate(merged):
        seen: dict[str, list[tuple[dict[str, Tensor], dict[str, Tensor]]]] = {}
        for task in features:
            seen[task] = []
            for sample in range(len(states[task]["merged"])):
                fed = states[task]["expert" if settings.inputs == "expert" else "merged"][sample]
                ours, _ = _watched(mine, fed, sample, run)
                theirs, out = _watched(experts[task][index], states[task]["expert"][sample], sample, run)
                states[task]["expert"][sample] = out
                seen[task].append((ours, theirs))
        start = None if base is None else base[index]
        new: dict[str, Tensor] = {}
        for name, module in mine.named_modules():
            if isinstance(module, nn.Linear | nn.LayerNorm | nn.RMSNorm):
                rows = {task: _rows(name, index, seen[task], token_weights) for task in features}
                theirs_at = {task: experts[task][index].get_submodule(name) for task in features}
                anchors = None if start is None else start.get_submodule(name)
                solve = solved_linear if isinstance(module, nn.Linear) else _norm
                for part, value in solve(module, anchors, theirs_at, rows, settings).items():
                    new[f"{name}.{part}"] = value
        updated = copy.deepcopy(mine)
        if settings.inputs == "deployed":
            updated.load_state_dict({**updated.state_dict(), **new})
        for task in features:
            states[task]["merged"] = [
                run(updated, hidden, sample) for sample, hidden in enumerate(states[task]["merged"])
            ]
        found.append(new)
    return found


Row = tuple[float, Tensor, Tensor]
"""How much a token counts, what the merged model feeds the module there, and what the expert feeds it."""


def _watched(block: nn.Module, hidden: Any, sample: int, run: Run) -> tuple[dict[str, Tensor], Any]:
    seen: dict[str, Tensor] = {}
    hooks = [
        module.register_forward_pre_hook(lambda _m, args, name=name: seen.__setitem__(name, args[0]))
        for name, module in block.named_modules()
    ]
    out = run(block, hidden, sample)
    for hook in hooks:
        hook.remove()
    return seen, out


def _rows(
    name: str,
    index: int,
    seen: list[tuple[dict[str, Tensor], dict[str, Tensor]]],
    token_weights: TokenWeights,
) -> list[Row]:
    rows: list[Row] = []
    for sample, (ours, theirs) in enumerate(seen):
        x, e = ours[name].reshape(-1, ours[name].shape[-1]), theirs[name].reshape(-1, ours[name].shape[-1])
        weights = token_weights(index, name, sample)
        for token in range(len(x)):
            rows.append((1.0 if weights is None else float(weights[token]), x[token], e[token]))
    return rows


def _anchor(module: nn.Module, base: nn.Module | None, part: str, rho: float) -> Tensor:
    own = getattr(module, part)
    return own if base is None else rho * own + (1 - rho) * getattr(base, part)


def solved_linear(
    module: nn.Module,
    base: nn.Module | None,
    experts: Mapping[str, nn.Module],
    rows: Mapping[str, list[Row]],
    s: Settings,
) -> dict[str, Tensor]:
    """Eq. 10-17, then Eq. 55."""
    k = module.weight.shape[1]
    left = s.lam * torch.eye(k, dtype=torch.float64)
    right = s.lam * _anchor(module, base, "weight", s.rho)
    means = {}
    for task, of_task in rows.items():
        total = sum(weight for weight, _, _ in of_task)
        gram, cross = torch.zeros(k, k, dtype=torch.float64), torch.zeros(k, k, dtype=torch.float64)
        mean, mean_target = torch.zeros(k, dtype=torch.float64), torch.zeros(k, dtype=torch.float64)
        for weight, x, e in of_task:
            target = s.alpha * e + (1 - s.alpha) * x
            gram += weight / total * torch.outer(x, x)
            cross += weight / total * torch.outer(target, x)
            mean += weight / total * x
            mean_target += weight / total * target
        omega = 1 / max(float(gram.square().sum().sqrt()), s.eps)
        left += omega * gram
        right = right + omega * experts[task].weight @ cross
        means[task] = (omega, mean, mean_target)
    new = {"weight": right @ torch.linalg.inv(left)}
    if module.bias is not None:
        numerator, denominator = s.lam * _anchor(module, base, "bias", s.rho), s.lam
        for task, (omega, mean, mean_target) in means.items():
            wanted = experts[task].bias + experts[task].weight @ mean_target
            numerator = numerator + omega * (wanted - new["weight"] @ mean)
            denominator += omega
        new["bias"] = numerator / denominator
    return new


def _norm(
    module: nn.Module,
    base: nn.Module | None,
    experts: Mapping[str, nn.Module],
    rows: Mapping[str, list[Row]],
    s: Settings,
) -> dict[str, Tensor]:
    """The minimiser of Eq. 57, coordinate by coordinate, from its normal equations."""
    parts = ["weight"] if getattr(module, "bias", None) is None else ["weight", "bias"]
    anchors = [_anchor(module, base, part, s.rho) for part in parts]
    new = {part: torch.zeros_like(anchor) for part, anchor in zip(parts, anchors, strict=True)}
    for coordinate in range(len(anchors[0])):
        left = s.lam * torch.eye(len(parts), dtype=torch.float64)
        right = s.lam * torch.stack([anchor[coordinate] for anchor in anchors])
        for task, of_task in rows.items():
            total = sum(weight for weight, _, _ in of_task)
            wanted = torch.stack([getattr(experts[task], part)[coordinate] for part in parts])
            for weight, x, _ in of_task:
                design = torch.stack([_unit(module, x)[coordinate], torch.ones((), dtype=torch.float64)])
                design = design[: len(parts)]
                left += weight / total * torch.outer(design, design)
                right = right + weight / total * design * (design @ wanted)
        solution = torch.linalg.solve(left, right)
        for part, value in zip(parts, solution, strict=True):
            new[part][coordinate] = value
    return new


def _unit(module: nn.Module, x: Tensor) -> Tensor:
    if isinstance(module, nn.LayerNorm):
        return (x - x.mean()) / ((x - x.mean()).square().mean() + module.eps).sqrt()
    eps = torch.finfo(x.dtype).eps if module.eps is None else module.eps
    return x / (x.square().mean() + eps).sqrt()
