"""Residual calibration the slow way, without cross-validation: float64, one sample and one token at a time.

Token weights are uniform and both ridges one number; no helper of the product is used. Blocks are plain modules with
parts q, k, v, out, fc1 and fc2 between norm1 and norm2, one sample [t, d] at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

STEPS = (("q", "k", "v"), ("out",), ("fc1",), ("fc2",))
ADDED_TO = {"out": "norm1", "fc2": "norm2"}


def run(block: Any, hidden: Tensor) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """What leaves the block, and what its modules were fed and made of it."""
    fed: dict[str, Tensor] = {}
    made: dict[str, Tensor] = {}
    hooks = []
    for name, module in block.named_children():

        def keep(_: nn.Module, args: tuple[Tensor], out: Tensor, name: str = name) -> None:
            fed[name], made[name] = args[0], out

        hooks.append(module.register_forward_hook(keep))
    out = block(hidden)
    for hook in hooks:
        hook.remove()
    return out, fed, made


@torch.no_grad()
def calibrate(
    merged: list[nn.Module],
    experts: Mapping[str, list[nn.Module]],
    features: Mapping[str, Mapping[str, list[Tensor]]],
    *,
    ridge: float,
    share: float,
) -> list[dict[str, Tensor]]:
    """New weights and biases of every block, by name; `features` are those before the first block."""
    found = []
    students = copy.deepcopy(merged)
    mine = {task: list(of["merged"]) for task, of in features.items()}
    theirs = {task: list(of["expert"]) for task, of in features.items()}
    for at, student in enumerate(students):
        new: dict[str, Tensor] = {}
        for step in STEPS:
            solved = {
                name: solve(merged, student, experts, mine, theirs, at, name, ridge, share) for name in step
            }
            for name, (weight, bias) in solved.items():
                module: Any = student.get_submodule(name)
                module.weight.copy_(weight)
                module.bias.copy_(bias)
                new |= {f"{name}.weight": weight, f"{name}.bias": bias}
        for task, blocks in experts.items():
            mine[task] = [student(hidden) for hidden in mine[task]]
            theirs[task] = [blocks[at](hidden) for hidden in theirs[task]]
        found.append(new)
    return found


def solve(
    merged: list[nn.Module],
    student: nn.Module,
    experts: Mapping[str, list[nn.Module]],
    mine: Mapping[str, list[Tensor]],
    theirs: Mapping[str, list[Tensor]],
    at: int,
    name: str,
    ridge: float,
    share: float,
) -> tuple[Tensor, Tensor]:
    """Weight and bias of one module from normal equations summed token by token."""
    start: Any = merged[at].get_submodule(name)
    outputs, inputs = start.weight.shape
    c = 1000**0.5
    norms = []
    gram = torch.zeros(inputs + 1, inputs + 1, dtype=torch.float64)
    local, upstream = torch.zeros(2, outputs, inputs + 1, dtype=torch.float64)
    for task, blocks in experts.items():
        expert: Any = blocks[at].get_submodule(name)
        tokens = sum(len(hidden) for hidden in mine[task])
        own = torch.zeros(inputs, inputs, dtype=torch.float64)
        for sample, hidden in enumerate(mine[task]):
            _, fed, _ = run(student, hidden)
            _, fed_expert, made_expert = run(blocks[at], theirs[task][sample])
            for token in range(len(hidden)):
                x = fed[name][token]
                wide = torch.cat([x, torch.tensor([c], dtype=torch.float64)])
                y0 = expert.weight @ x + expert.bias
                y1 = made_expert[name][token]
                if name in ADDED_TO:
                    y1 = y1 + fed_expert[ADDED_TO[name]][token] - fed[ADDED_TO[name]][token]
                gram += torch.outer(wide, wide) / tokens
                local += torch.outer(y0 - start.weight @ x - start.bias, wide) / tokens
                upstream += torch.outer(y1 - y0, wide) / tokens
                own += torch.outer(x, x) / tokens
        norms.append(own.norm())
    omega = 1 / (sum(norms) / len(norms))
    inverse = torch.linalg.inv(omega * gram + ridge * torch.eye(inputs + 1, dtype=torch.float64))
    change = omega * (local + share * upstream) @ inverse
    return start.weight + change[:, :-1], start.bias + c * change[:, -1]
