"""What drift does to a language model's next token: over its whole vocabulary, whatever words a task asks for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from driftlens.diagnostic import Seen, diagnostic
from driftlens.diagnostics.output import decisions
from driftlens.models.heads import LmHead
from driftlens.records.schema import OUTPUTS

_SCORES = 1 << 23
"""Scores of one model that are held at a time."""


@diagnostic(
    "next_token",
    table="outputs",
    columns=OUTPUTS.only("token_kl", "token_flipped", "token_certified"),
    option="",
)
def next_token(seen: Seen) -> dict[str, Any]:
    """Divergence, flips and certificates as in `output_columns`, of all tokens; nothing without a head of them."""
    if not isinstance(seen.head, LmHead) or not isinstance(seen.expert_head, LmHead):
        return {}
    heads = [replace(head, classes=(), tokens=None) for head in (seen.expert_head, seen.head)]
    parts = list(_in_parts(heads, torch.from_numpy(seen.expert), torch.from_numpy(seen.variant)))
    return {f"token_{name}": torch.cat([part[name] for part in parts]).numpy() for name in parts[0]}


def _in_parts(heads: list[LmHead], expert: Tensor, variant: Tensor) -> Iterator[dict[str, Tensor]]:
    rows = max(1, _SCORES // max(head.num_tokens for head in heads))
    for features in zip(torch.split(expert, rows), torch.split(variant, rows), strict=True):
        yield decisions(*(head.scores(part.double()) for head, part in zip(heads, features, strict=True)))
