"""How much each row that a site reads counts in its moments."""

from __future__ import annotations

from torch import Tensor

from driftlens.errors import IncompatibleModelsError


def row_weights(site: str, x: Tensor, weights: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """Weights of the rows of `x`, [T]; None counts each 1. Padding weighs nothing, whatever a rule says.

    Args:
        site: for the message.
        x: what the site reads: [n, t, k]; also per head [n, t, h, k] or [n, h, t, k], flattened [n * t, k], or one
            row per sample [n, k], of which none is padding.
        weights: of tokens by the rule of the site, [n, t]; None counts each 1.
        mask: [n, t], true where a token counts; None means everywhere.

    Raises:
        IncompatibleModelsError: the rows of `x` can't be told to be tokens of the mask.
    """
    if mask is not None and (x.dim() > 2 or len(x) == mask.numel()):
        weights = mask.to(x) if weights is None else weights.to(x) * mask
    if weights is None:
        return None
    weights = weights.to(x)
    rows = x.shape[:-1]
    if len(rows) == 3 and rows[:2] == weights.shape:
        weights = weights[:, :, None].expand(rows)
    elif len(rows) == 3 and (rows[0], rows[2]) == weights.shape:
        weights = weights[:, None, :].expand(rows)
    if weights.numel() != rows.numel():
        raise IncompatibleModelsError(
            f"site {site!r} reads {list(x.shape)}, which is not one row per token of {list(weights.shape)}, so its "
            "padding can't be told",
            hint="Leave it out with a pattern of sites, or pass mask=False where nothing is padded.",
        )
    return weights.reshape(-1)
