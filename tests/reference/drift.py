"""Drift, mismatch and propagation the slow way: native modules, one sample at a time, no helper of the product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Step = Callable[[Tensor], Tensor]


@dataclass
class Row:
    """What one layer does to one sample; vectors are of the class token (or the whole vector after the head)."""

    drift: Tensor
    mismatch: Tensor
    propagation: Tensor
    expert: Tensor
    state_in: float
    state_propagation: float
    state_mismatch: float


def open_clip_steps(tower: nn.Module) -> list[Step]:
    def stem(x: Tensor) -> Tensor:
        tokens = tower.conv1(x).flatten(2).transpose(1, 2)
        cls = tower.class_embedding[None, None, :].expand(len(x), -1, -1)
        return tower.ln_pre(torch.cat([cls, tokens], 1) + tower.positional_embedding)

    return [stem, *tower.transformer.resblocks, lambda h: tower.ln_post(h[:, 0]) @ tower.proj]


def hf_steps(model: nn.Module) -> list[Step]:
    tower = getattr(model, "vision_model", model)
    layers = [lambda h, layer=layer: layer(h, None) for layer in tower.encoder.layers]
    return [
        lambda x: tower.pre_layrnorm(tower.embeddings(x)),
        *layers,
        lambda h: model.visual_projection(tower.post_layernorm(h[:, 0])),
    ]


def stack_steps(model: nn.Module) -> list[Step]:
    return [model.embed, *model.blocks, model.out]


STEPS = {"open_clip_vit": open_clip_steps, "hf_clip_vit": hf_steps, "sequential": stack_steps}


def drift_rows(merged: list[Step], expert: list[Step], x: Tensor) -> list[list[Row]]:
    """rows[sample][layer - 1]."""
    return [[*_sample_rows(merged, expert, x[i : i + 1])] for i in range(len(x))]


@torch.no_grad()
def _sample_rows(merged: list[Step], expert: list[Step], x: Tensor) -> list[Row]:
    rows = []
    h_mer, h_exp = x, x
    for f_mer, f_exp in zip(merged, expert, strict=True):
        e_in = (h_mer - h_exp).flatten()
        m = f_mer(h_exp) - f_exp(h_exp)
        p = f_mer(h_mer) - f_mer(h_exp)
        h_mer, h_exp = f_mer(h_mer), f_exp(h_exp)
        first = (lambda t: t[0, 0]) if h_exp.dim() == 3 else (lambda t: t[0])
        rows.append(
            Row(
                drift=first(h_mer - h_exp),
                mismatch=first(m),
                propagation=first(p),
                expert=first(h_exp),
                state_in=float(e_in.norm()),
                state_propagation=float(p.flatten().norm()),
                state_mismatch=float(m.flatten().norm()),
            )
        )
    return rows
