"""A direct implementation of FeatCal for comparison: Algorithm 1 line by line, on open_clip's own blocks.

Hidden states are computed in batches of 16. Per site and task, two k x k products (G and C) are computed from rows in
the models' own dtype; every site's system is solved by LU in float64. Nothing is shared between sites, and every pass
runs the whole block. Only what affects the result is as in the product: biases, LayerNorm updates, token weights of 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from driftlens.utils.devices import synchronize

BATCH = 16
Weights = dict[str, Tensor]


class Clock:
    """Adds up the seconds spent in forward passes, apart from everything else."""

    def __init__(self, device: torch.device) -> None:
        self.seconds = 0.0
        self._device = device

    def now(self) -> float:
        """Seconds of processor time, which a busy machine disturbs less than those on the wall.

        On a device, seconds on the wall, once it is done with what it was asked.
        """
        if self._device.type == "cpu":
            return time.process_time() / torch.get_num_threads()
        synchronize(self._device)
        return time.perf_counter()

    def __call__(self, run: Callable[[], Any]) -> Any:
        """What `run` returns, or throws: a pass that is cut short counts too."""
        started = self.now()
        try:
            return run()
        finally:
            self.seconds += self.now() - started


def block_forward(w: Weights, hidden: Tensor, heads: int, inputs: dict[str, Tensor] | None = None) -> Tensor:
    """One pre-norm block; `inputs`, if given, receives what each site is fed."""

    def at(site: str, x: Tensor) -> Tensor:
        if inputs is not None:
            inputs[site] = x
        return x

    d = hidden.shape[-1]
    normed = F.layer_norm(at("ln_1", hidden), (d,), w["ln_1.weight"], w["ln_1.bias"], 1e-5)
    q, k, v = (
        F.linear(at(f"attn.{s}_proj", normed), w[f"attn.{s}_proj.weight"], w[f"attn.{s}_proj.bias"])
        .unflatten(-1, (heads, -1))
        .transpose(1, 2)
        for s in "qkv"
    )
    mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    hidden = hidden + F.linear(at("attn.out_proj", mixed), w["attn.out_proj.weight"], w["attn.out_proj.bias"])
    normed = F.layer_norm(at("ln_2", hidden), (d,), w["ln_2.weight"], w["ln_2.bias"], 1e-5)
    inner = F.gelu(F.linear(at("mlp.c_fc", normed), w["mlp.c_fc.weight"], w["mlp.c_fc.bias"]))
    return hidden + F.linear(at("mlp.c_proj", inner), w["mlp.c_proj.weight"], w["mlp.c_proj.bias"])


LINEAR = (*(f"attn.{s}_proj" for s in "qkv"), "attn.out_proj", "mlp.c_fc", "mlp.c_proj")
NORMS = ("ln_1", "ln_2")


def block_weights(block: nn.Module) -> Weights:
    """The weights of open_clip's block, its fused attention taken apart."""
    weights = {name: value.detach() for name, value in block.state_dict().items() if "in_proj" not in name}
    for part in ("weight", "bias"):
        fused = block.state_dict()[f"attn.in_proj_{part}"].detach()
        weights |= {f"attn.{s}_proj.{part}": rows for s, rows in zip("qkv", fused.chunk(3), strict=True)}
    return weights


@torch.no_grad()
def calibrate(
    models: Mapping[str, nn.Module],
    samples: Mapping[str, Tensor],
    clock: Clock,
    *,
    lam: float = 0.05,
    rho: float = 2.0,
    alpha: float = 0.3,
    eps: float = 1e-8,
) -> list[Weights]:
    """Calibrated weights of every block.

    Args:
        models: open_clip towers `base`, `merged` and `expert:TASK`.
        samples: pixels of each task.
        clock: around every forward pass.
        lam: ridge.
        rho: anchor blend.
        alpha: share of the expert in the target.
        eps: least Gram norm and determinant.
    """
    merged, base = models["merged"], models["base"]
    heads = merged.transformer.resblocks[0].attn.num_heads
    expert_states = {t: _stem(models[f"expert:{t}"], samples[t], clock) for t in samples}
    states = {t: _stem(merged, samples[t], clock) for t in samples}
    calibrated = []
    depth = len(merged.transformer.resblocks)
    for index in range(depth):
        mine, start = (block_weights(m.transformer.resblocks[index]) for m in (merged, base))
        anchor = {name: rho * mine[name] + (1 - rho) * start[name] for name in mine}
        problem = _Problem(mine, lam, alpha, eps)
        for task in samples:
            expert = block_weights(models[f"expert:{task}"].transformer.resblocks[index])
            problem.new_task()
            for number, (theirs, ours) in enumerate(zip(expert_states[task], states[task], strict=True)):
                seen: dict[str, Tensor] = {}
                wanted: dict[str, Tensor] = {}
                clock(lambda: block_forward(mine, ours, heads, seen))  # noqa: B023 - called at once
                expert_states[task][number] = clock(
                    lambda: block_forward(expert, theirs, heads, wanted)  # noqa: B023 - called at once
                )
                problem.add(seen, wanted)
            problem.end_task(expert)
        updated = mine | problem.solved(anchor)
        if index + 1 < depth:
            for task in samples:
                states[task] = [
                    clock(lambda: block_forward(updated, ours, heads))  # noqa: B023 - called at once
                    for ours in states[task]
                ]
        calibrated.append(updated)
    return calibrated


def _stem(tower: nn.Module, pixels: Tensor, clock: Clock) -> list[Tensor]:
    def tokens(part: Tensor) -> Tensor:
        patches = tower.conv1(part).flatten(2).mT
        cls = tower.class_embedding.expand(len(part), 1, -1)
        return tower.ln_pre(torch.cat([cls, patches], dim=1) + tower.positional_embedding)

    return [clock(lambda: tokens(part)) for part in pixels.split(BATCH)]  # noqa: B023 - called at once


class _Problem:
    """Sums of one block, site by site."""

    def __init__(self, merged: Weights, lam: float, alpha: float, eps: float) -> None:
        self.lam, self.alpha, self.eps = lam, alpha, eps
        self.left: Weights = {}
        self.right: Weights = {}
        self.bias: Weights = {}
        self.norms: dict[str, list[Tensor]] = {}
        self.means: dict[str, list[tuple[Tensor, Tensor]]] = {site: [] for site in LINEAR}
        self.merged = merged
        self.omega: dict[str, Tensor] = {}

    def new_task(self) -> None:
        self.sums: dict[str, list[Tensor]] = {}
        self.rows = 0

    def add(self, seen: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
        self.rows += seen["ln_1"].shape[:-1].numel()
        for site in LINEAR:
            x, theirs = seen[site].flatten(0, 1), wanted[site].flatten(0, 1)
            target = self.alpha * theirs + (1 - self.alpha) * x
            self._add(site, [x.T @ x, target.T @ x, x.sum(0), target.sum(0)])
        for site in NORMS:
            z = F.layer_norm(seen[site].flatten(0, 1), seen[site].shape[-1:], eps=1e-5)
            self._add(site, [z.sum(0), (z * z).sum(0)])

    def _add(self, site: str, parts: list[Tensor]) -> None:
        if site in self.sums:
            for total, part in zip(self.sums[site], parts, strict=True):
                total += part
        else:
            self.sums[site] = parts

    def end_task(self, expert: Weights) -> None:
        for site in LINEAR:
            gram, cross, mean, target = (part / self.rows for part in self.sums[site])
            weight = expert[f"{site}.weight"]
            omega = 1 / gram.norm().clamp_min(self.eps)
            self._grow(self.left, site, omega * gram)
            self._grow(self.right, site, omega * (weight @ cross))
            self._grow(self.omega, site, omega)
            self._grow(self.bias, site, omega * (expert[f"{site}.bias"] + weight @ target))
            self.means[site].append((omega, mean))
        for site in NORMS:
            z, q = (part / self.rows for part in self.sums[site])
            scale, shift = expert[f"{site}.weight"], expert[f"{site}.bias"]
            parts = [q, z, q * scale + z * shift, z * scale + shift, torch.ones(())]
            self.norms[site] = [a + b for a, b in zip(self.norms.get(site, [torch.zeros(())] * 5), parts, strict=True)]

    def _grow(self, sums: Weights, site: str, part: Tensor) -> None:
        sums[site] = sums[site] + part.double() if site in sums else part.double()

    def solved(self, anchor: Weights) -> Weights:
        lam, new = self.lam, {}
        for site in LINEAR:
            left = self.left[site] + lam * torch.eye(len(self.left[site])).to(self.left[site])
            right = self.right[site] + lam * anchor[f"{site}.weight"].double()
            weight = torch.linalg.solve(left, right.T).T
            missing = self.bias[site] - sum(omega * (weight @ mean.double()) for omega, mean in self.means[site])
            bias = (missing + lam * anchor[f"{site}.bias"].double()) / (self.omega[site] + lam)
            stored = self.merged[f"{site}.weight"]
            new[f"{site}.weight"], new[f"{site}.bias"] = weight.to(stored), bias.to(stored)
        for site in NORMS:
            q, z, scale_side, shift_side, count = self.norms[site]
            a11, a22 = q + lam, count + lam
            scale_side = scale_side + lam * anchor[f"{site}.weight"]
            shift_side = shift_side + lam * anchor[f"{site}.bias"]
            determinant = (a22 * a11 - z * z).clamp_min(self.eps)
            new[f"{site}.weight"] = (a22 * scale_side - z * shift_side) / determinant
            new[f"{site}.bias"] = (a11 * shift_side - z * scale_side) / determinant
        return new
