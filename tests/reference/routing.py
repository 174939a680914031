"""The curvature of routers the slow way: automatic second derivatives of what a token's scores lose."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.functional import hessian

LOSSES = {
    "softmax": lambda logits: logits.logsumexp(dim=0),
    "sigmoid": lambda logits: torch.nn.functional.softplus(logits).sum(),
}
"""Whose second derivative by the logits of one token is the curvature that counts."""


def curvature(scoring: str, x: Tensor, wanted: Tensor) -> Tensor:
    """Mean over tokens of H (x) x x', shrunk, [E k, E k], by automatic second derivatives."""
    parts = [torch.kron(hessian(LOSSES[scoring], wanted @ row), torch.outer(row, row)) for row in x]
    whole = torch.stack(parts).mean(dim=0)
    return 0.9 * whole + 0.1 * torch.diag(whole.diagonal())
