"""Residual calibration the slow way: float64, one sample and one token at a time, no helper of the product.

Blocks are plain modules with parts q, k, v, out, fc1 and fc2 between norm1 and norm2, one sample [t, d] at a time.
Gradients are those of the whole expert at once, folds are left out by fitting without them.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

STEPS = (("q", "k", "v"), ("out",), ("fc1",), ("fc2",))
ADDED_TO = {"out": "norm1", "fc2": "norm2"}
GRID = [10**power for power in (-4, -3.5, -3, -2.5, -2, -1.5, -1, -0.5, 0)] + [3]
C = 1000**0.5


@dataclass(frozen=True)
class Settings:
    """What the page leaves to choose.

    Attributes:
        folds: the fold of every sample; None where ridges and share are given.
        ridge: both ridges without folds.
        share: t without folds, the largest one with them.
        mu: of the output metric.
        is_two_sided: whether conjugate gradients are preconditioned by the mean metric, too.
        draws: of every sample the random directions [draws, width]; None for uniform weights.
        leave: task -> (what leaves the expert's last block of one sample, [t, d]) -> final feature.
    """

    folds: Sequence[int] | None = None
    ridge: float = 0.0
    share: float = 1.0
    mu: float = 0.0
    is_two_sided: bool = False
    draws: Sequence[Tensor] | None = None
    leave: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)


@dataclass
class Sums:
    """A [k, k], C0 and Cd [o, k] of one task and fold."""

    gram: Tensor
    local: Tensor
    upstream: Tensor

    @classmethod
    def zero(cls, outputs: int, inputs: int) -> Sums:
        shapes = ((inputs, inputs), (outputs, inputs), (outputs, inputs))
        return cls(*(torch.zeros(shape, dtype=torch.float64) for shape in shapes))


def plus(parts: Sequence[Sums]) -> Sums:
    return Sums(*(sum(getattr(part, of) for part in parts) for of in ("gram", "local", "upstream")))  # type: ignore[arg-type]


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


def gradients(
    blocks: list[nn.Module], leave: Callable[[Tensor], Tensor], hidden: Tensor, draws: Tensor
) -> list[dict[str, Tensor]]:
    """By block and module, d<v, f / |f|> / dy for every v, [draws, t, o]: of one sample, through all of the expert."""
    with torch.enable_grad():
        outputs, hidden = [], hidden.detach().requires_grad_()
        for block in blocks:
            hidden, _, made = run(block, hidden)
            outputs.append(made)
        feature = leave(hidden)
        direction = feature / feature.norm()
        named = [(at, name) for at, made in enumerate(outputs) for step in STEPS for name in step]
        wanted = [outputs[at][name] for at, name in named]
        found = [torch.autograd.grad(direction @ v, wanted, retain_graph=True) for v in draws]
    per_block: list[dict[str, Tensor]] = [{} for _ in blocks]
    for (at, name), *each in zip(named, *found, strict=True):
        per_block[at][name] = torch.stack(each)
    return per_block


@torch.no_grad()
def calibrate(
    merged: list[nn.Module],
    experts: Mapping[str, list[nn.Module]],
    features: Mapping[str, Mapping[str, list[Tensor]]],
    settings: Settings,
) -> list[dict[str, Tensor]]:
    """New weights and biases of every block, by name; `features` are those before the first block."""
    found = []
    students = copy.deepcopy(merged)
    mine = {task: list(of["merged"]) for task, of in features.items()}
    theirs = {task: list(of["expert"]) for task, of in features.items()}
    slopes: dict[str, list[list[dict[str, Tensor]]]] = {}
    for task in experts if settings.draws is not None else ():
        assert settings.draws is not None
        pairs = zip(theirs[task], settings.draws, strict=True)
        slopes[task] = [gradients(experts[task], settings.leave[task], h, v) for h, v in pairs]
    for at, student in enumerate(students):
        new: dict[str, Tensor] = {}
        for step in STEPS:
            own = {
                task: [torch.cat([sample[at][name] for name in step], dim=-1) for sample in of]
                for task, of in slopes.items()
            }
            here = {task: blocks[at] for task, blocks in experts.items()}
            change = solve(merged[at], student, here, mine, theirs, step, own, settings)
            for name, rows in zip(step, change.split(len(change) // len(step)), strict=True):
                module, start = student.get_submodule(name), merged[at].get_submodule(name)
                assert isinstance(module, nn.Linear) and isinstance(start, nn.Linear)
                module.weight.copy_(start.weight + rows[:, :-1])
                module.bias.copy_(start.bias + C * rows[:, -1])
                new |= {f"{name}.weight": module.weight.clone(), f"{name}.bias": module.bias.clone()}
        for task, blocks in experts.items():
            mine[task] = [student(hidden) for hidden in mine[task]]
            theirs[task] = [blocks[at](hidden) for hidden in theirs[task]]
        found.append(new)
    return found


def solve(
    merged: Any,
    student: nn.Module,
    experts: Mapping[str, Any],
    mine: Mapping[str, list[Tensor]],
    theirs: Mapping[str, list[Tensor]],
    step: tuple[str, ...],
    slopes: Mapping[str, list[Tensor]],
    settings: Settings,
) -> Tensor:
    """D [o, k + 1] of the modules of one step, stacked, from sums token by token."""
    starts = [merged.get_submodule(name) for name in step]
    outputs, inputs = sum(len(start.weight) for start in starts), starts[0].weight.shape[1]
    folds = settings.folds or [0] * len(next(iter(mine.values())))
    sums: dict[str, list[Sums]] = {}
    energies, norms = {}, []
    for task, expert in experts.items():
        weights, energies[task] = token_weights(mine[task], slopes.get(task))
        sums[task] = [Sums.zero(outputs, inputs + 1) for _ in set(folds)]
        gram = torch.zeros(inputs, inputs, dtype=torch.float64)
        for sample, hidden in enumerate(mine[task]):
            _, fed, _ = run(student, hidden)
            _, fed_expert, made_expert = run(expert, theirs[task][sample])
            into = sums[task][folds[sample]]
            for token, weight in enumerate(weights[sample]):
                x = fed[step[0]][token]
                wide = torch.cat([x, torch.tensor([C], dtype=torch.float64)])
                own, y0, y1 = [], [], []
                for name, start in zip(step, starts, strict=True):
                    module, stream = expert.get_submodule(name), ADDED_TO.get(name)
                    own.append(start.weight @ x + start.bias)
                    y0.append(module.weight @ x + module.bias)
                    lack = fed_expert[stream][token] - fed[stream][token] if stream else 0
                    y1.append(made_expert[name][token] + lack)
                made, local, wanted = torch.cat(own), torch.cat(y0), torch.cat(y1)
                into.gram += weight * torch.outer(wide, wide)
                into.local += weight * torch.outer(local - made, wide)
                into.upstream += weight * torch.outer(wanted - local, wide)
                gram += weight * torch.outer(x, x)
        norms.append(float(gram.norm()))
    for task, of in sums.items():
        omega = energies[task] / (sum(energies.values()) / len(energies)) / (sum(norms) / len(norms))
        sums[task] = [Sums(omega * s.gram, omega * s.local, omega * s.upstream) for s in of]
    by_task = {task: plus(of) for task, of in sums.items()}
    l0, l1, t = settings.ridge, settings.ridge, settings.share
    if settings.folds is not None:
        l0, l1, t = chosen([plus(parts) for parts in zip(*sums.values(), strict=True)], settings.share)
    metrics = {task: metric(slopes.get(task), outputs, settings.mu) for task in by_task}
    return with_metric(by_task, metrics, l0, (l1, t), settings)


def token_weights(samples: Sequence[Tensor], slopes: Sequence[Tensor] | None) -> tuple[list[list[float]], float]:
    """By sample and token, all adding up to 1, and the mean energy of gradients; all alike without any."""
    if slopes is None:
        tokens = sum(map(len, samples))
        return [[1 / tokens] * len(sample) for sample in samples], 1.0
    energies = [[float(g[:, at].square().sum() / len(g)) for at in range(g.shape[1])] for g in slopes]
    flat = list(itertools.chain(*energies))
    mean = sum(flat) / len(flat)
    raw = [[max(e / mean, 1e-4) ** 0.5 + 0.02 for e in sample] for sample in energies]
    whole = sum(map(sum, raw))
    return [[weight / whole for weight in sample] for sample in raw], mean


def chosen(folds: Sequence[Sums], most: float) -> tuple[float, float, float]:
    """l0, l1 and t whose maps, fitted without a fold, miss that fold least."""
    rest = [plus([other for other in folds if other is not fold]) for fold in folds]
    fitted = {
        of: {ridge: [ridged(getattr(r, of), r.gram, ridge) for r in rest] for ridge in GRID}
        for of in ("local", "upstream")
    }
    best: tuple[float, float, float, float] | None = None
    for l0, l1 in itertools.product(GRID, GRID):
        plain = linear = square = 0.0
        for fold, d0, d1 in zip(folds, fitted["local"][l0], fitted["upstream"][l1], strict=True):
            target = fold.local + fold.upstream
            plain += float((d0 @ fold.gram @ d0.mT).trace() - 2 * (d0 @ target.mT).trace())
            linear += float((d0 @ fold.gram @ d1.mT).trace() - (d1 @ target.mT).trace())
            square += float((d1 @ fold.gram @ d1.mT).trace())
        t = min(max(-linear / square, 0.0), most)
        score = plain + 2 * t * linear + t * t * square
        if best is None or score < best[0]:
            best = score, l0, l1, t
    assert best is not None
    return best[1:]


def ridged(right: Tensor, gram: Tensor, ridge: float) -> Tensor:
    return right @ torch.linalg.inv(gram + ridge * torch.eye(len(gram), dtype=torch.float64))


def metric(slopes: Sequence[Tensor] | None, outputs: int, mu: float) -> Tensor:
    """S = (1 - mu) I + mu m Gamma / tr Gamma, Gamma the sum of g g' over draws and tokens."""
    eye = torch.eye(outputs, dtype=torch.float64)
    if not mu:
        return eye
    assert slopes is not None
    gamma = sum(torch.outer(g, g) for sample in slopes for draw in sample for g in draw)
    assert isinstance(gamma, Tensor)
    return (1 - mu) * eye + mu * outputs * gamma / gamma.trace()


def with_metric(
    tasks: Mapping[str, Sums],
    metrics: Mapping[str, Tensor],
    l0: float,
    upstream: tuple[float, float],
    settings: Settings,
) -> Tensor:
    """D0 + D1 = C0 (A + l0 I)^-1 + t Cd (A + l1 I)^-1, and E by five preconditioned conjugate gradients from 0.

    Towards sum_i S_i (D0 + D1 + E) A_i + l0 D0 + l1 D1 + l E = sum_i S_i C_i, l = l1, or l0 where t is 0.
    """
    whole, (l1, t) = plus(list(tasks.values())), upstream
    gram = whole.gram
    parts = ridged(whole.local, gram, l0), t * ridged(whole.upstream, gram, l1)
    found = sum(parts[1:], parts[0])
    if not settings.mu:
        return found
    ridge = l1 if t else l0
    mean = torch.stack([*metrics.values()]).mean(dim=0)

    def eased(rest: Tensor) -> Tensor:
        by_inputs = ridged(rest, gram, ridge)
        return torch.linalg.inv(mean) @ by_inputs if settings.is_two_sided else by_inputs

    def image(change: Tensor) -> Tensor:
        return ridge * change + sum(metrics[task] @ change @ sums.gram for task, sums in tasks.items())

    left = -l0 * parts[0] - l1 * parts[1]
    for task, sums in tasks.items():
        left = left + metrics[task] @ (sums.local + t * sums.upstream - found @ sums.gram)
    better = eased(left)
    direction = better
    for _ in range(5):
        size, along = (left * better).sum(), image(direction)
        step = size / (direction * along).sum()
        found, left = found + step * direction, left - step * along
        better = eased(left)
        direction = better + (left * better).sum() / size * direction
    return found
