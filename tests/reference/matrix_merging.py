"""Merge methods on one matrix at a time, slowly, in NumPy, as their papers and published code write them down.

Weights are [out, in]; a module maps x to W x. `deltas` are task vectors. Nothing is shared with the product.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

Array = npt.NDArray[np.float64]


def tsv_m(deltas: Sequence[Array]) -> Array:
    """TSV-Merge (arXiv:2412.00081): truncate, put side by side, orthogonalise by Procrustes."""
    keep = min(deltas[0].shape) // len(deltas)
    lefts, sizes, rights = [], [], []
    for delta in deltas:
        u, s, vt = np.linalg.svd(delta, full_matrices=False)
        for rank in range(keep):
            lefts.append(u[:, rank])
            sizes.append(s[rank])
            rights.append(vt[rank])
    return procrustes(np.array(lefts).T) @ np.diag(sizes) @ procrustes(np.array(rights).T).T


def procrustes(columns: Array) -> Array:
    p, _, q = np.linalg.svd(columns, full_matrices=False)
    return p @ q


def iso_c(deltas: Sequence[Array]) -> Array:
    """Iso-C (arXiv:2502.04959)."""
    u, s, vt = np.linalg.svd(np.sum(deltas, axis=0), full_matrices=False)
    return u @ np.diag([s.mean()] * len(s)) @ vt


def regmean(weights: Sequence[Array], inputs: Sequence[Array], keep: float) -> Array:
    """RegMean (arXiv:2212.09849), token by token; `inputs` are [tokens, in]."""
    width = weights[0].shape[1]
    left, right = np.zeros_like(weights[0]), np.zeros((width, width))
    for weight, rows in zip(weights, inputs, strict=True):
        gram = np.zeros((width, width))
        for x in rows:
            gram += np.outer(x, x) / len(rows)
        for i in range(width):
            for j in range(width):
                gram[i, j] *= 1 if i == j else keep
        left += weight @ gram
        right += gram
    return left @ np.linalg.inv(right)


def interference(step: Tensor, deltas: Sequence[Tensor]) -> Tensor:
    """The loss of WUDI (arXiv:2503.08099)."""
    parts = [((step - delta) @ delta.T).square().sum() / delta.square().sum() for delta in deltas]
    return torch.stack(parts).sum()


def wudi(deltas: Sequence[Tensor], steps: int, rate: float) -> Tensor:
    """WUDI's descent, with Adam written out and the slope by autograd."""
    step = torch.stack(list(deltas)).sum(dim=0)
    first, second = torch.zeros_like(step), torch.zeros_like(step)
    for t in range(1, steps + 1):
        here = step.clone().requires_grad_()
        (slope,) = torch.autograd.grad(interference(here, deltas), here)
        first = 0.9 * first + 0.1 * slope
        second = 0.999 * second + 0.001 * slope**2
        step = step - rate * (first / (1 - 0.9**t)) / ((second / (1 - 0.999**t)).sqrt() + 1e-8)
    return step


def heard(module: nn.Module, x: Tensor) -> dict[str, Array]:
    """What every linear module and norm inside reads, [tokens, in]."""
    found: dict[str, Array] = {}
    hooks = [
        part.register_forward_hook(
            lambda _m, given, _out, name=name: found.update({name: given[0].flatten(0, -2).numpy()})
        )
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear | nn.LayerNorm)
    ]
    with torch.no_grad():
        module(x)
    for hook in hooks:
        hook.remove()
    return found


def regmean_pp(experts: Mapping[str, nn.Module], images: Tensor, keep: float) -> nn.Module:
    """RegMean++ (arXiv:2508.03121) of models with `blocks`: each is merged on what those before make."""
    merged = copy.deepcopy(next(iter(experts.values())))
    with torch.no_grad():
        for name, value in merged.named_parameters():
            value.copy_(torch.stack([expert.get_parameter(name) for expert in experts.values()]).mean(dim=0))
        for place, block in enumerate(merged.blocks):
            entered: list[Tensor] = []
            hook = block.register_forward_pre_hook(lambda _m, given, entered=entered: entered.append(given[0]))
            merged(images)
            hook.remove()
            inputs = {task: heard(expert.blocks[place], entered[0]) for task, expert in experts.items()}
            for name, part in block.named_modules():
                if isinstance(part, nn.Linear):
                    theirs = [e.blocks[place].get_submodule(name).weight.numpy() for e in experts.values()]
                    solved = regmean(theirs, [inputs[task][name] for task in experts], keep)
                    part.weight.copy_(torch.from_numpy(solved))
    return merged


def chances(module: nn.Module, head: nn.Linear, image: Tensor) -> Tensor:
    """Class probabilities of one image."""
    return head(module(image[None]))[0].softmax(dim=0)


def fisher_diagonal(module: nn.Module, head: nn.Linear, images: Tensor) -> dict[str, Tensor]:
    """Sample by sample and class by class (arXiv:2111.09832)."""
    names = dict(module.named_parameters())
    total = {name: torch.zeros_like(value) for name, value in names.items()}
    for image in images:
        for row in range(head.out_features):
            module.zero_grad()
            p = chances(module, head, image)
            p[row].log().backward()
            for name, value in names.items():
                assert value.grad is not None
                total[name] += p[row].detach() * value.grad**2 / len(images)
    return total


def fisher_batches(module: nn.Module, head: nn.Linear, images: Tensor, size: int) -> dict[str, Tensor]:
    """The square of whole batches' gradients, as published code has it."""
    total = {name: torch.zeros_like(value) for name, value in module.named_parameters()}
    for batch in images.split(size):
        module.zero_grad()
        logs = torch.log_softmax(head(module(batch)), dim=1)
        (logs.exp().sqrt().detach() * logs).sum().backward()
        for name, value in module.named_parameters():
            assert value.grad is not None
            total[name] += value.grad**2 / len(images)
    return total


def fisher_merge(values: Sequence[Tensor], fishers: Sequence[Tensor], norms: Sequence[float]) -> Tensor:
    """Entries weighted by information of unit norm."""
    weights = [(fisher + 1e-6) / (norm + 1e-6) for fisher, norm in zip(fishers, norms, strict=True)]
    return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)


def adamerging(
    base: nn.Module,
    experts: Mapping[str, nn.Module],
    heads: Mapping[str, nn.Linear],
    batches: Sequence[Mapping[str, Tensor]],
    *,
    by_layer: bool,
) -> dict[str, Tensor]:
    """AdaMerging (arXiv:2310.02575) by autograd through the whole merged model, all tasks in one graph."""
    start = {name: value.detach() for name, value in base.named_parameters()}
    shape = (len(experts), len(start) if by_layer else 1)
    coefficients = torch.full(shape, 0.3, requires_grad=True)
    adam = torch.optim.Adam([coefficients], lr=1e-3)

    def merged() -> dict[str, Tensor]:
        found = {}
        for place, (name, value) in enumerate(start.items()):
            for row, expert in zip(coefficients, experts.values(), strict=True):
                value = value + row[place if by_layer else 0] * (expert.get_parameter(name).detach() - start[name])
            found[name] = value
        return found

    for batch in batches:
        weights, loss = merged(), torch.zeros(())
        for task, images in batch.items():
            p = heads[task](torch.func.functional_call(base, weights, (images,))).softmax(dim=1)
            loss = loss - (p * p.log()).sum(dim=1).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
    return {name: value.detach() for name, value in merged().items()}
