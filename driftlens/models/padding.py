"""Which tokens of a batch are padding, as its attention mask says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from driftlens.errors import SpecError
from driftlens.models.frames import Inputs

Mask = str | Callable[[Any], Tensor] | Literal[False] | None
"""A batch's entry, or what makes one of a batch: [n, t], true (or 1) where a token counts.

None takes `attention_mask` where the batch has one; False says that nothing is padded.
"""

_REMEDY = (
    "Pass mask= the name of an entry [n, t] of ones and zeros, a function that makes one of a batch, or False where "
    "no sample is padded."
)


def padding_mask(inputs: Inputs, chosen: Mask) -> Tensor | None:
    """Where tokens count, [n, t] of booleans; None where all of them do.

    Raises:
        SpecError: there is no such entry, it is not [n, t] of ones and zeros, or two streams could be meant.
    """
    if chosen is False:
        return None
    if isinstance(chosen, str) or chosen is None:
        name = chosen or "attention_mask"
        mask: Any = inputs.values.get(name)
    else:
        name, mask = "what mask= returns", chosen(inputs.batch())
    if mask is None and chosen is None:
        return None
    is_mask = isinstance(mask, Tensor) and mask.dim() == 2 and bool(((mask == 0) | (mask == 1)).all())
    if not is_mask:
        found = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise SpecError(
            f"{name} is {found}; expected ones and zeros [n, t], one where a token counts",
            hint=f"{_REMEDY} The batch holds {', '.join(inputs.values)}.",
        )
    if bool(mask.all()):
        return None
    if chosen is None and any(entry.startswith("decoder_") for entry in inputs.values):
        raise SpecError(
            "the batch has tokens for an encoder and for a decoder; its attention_mask may be of either's",
            hint=_REMEDY,
        )
    return mask.bool()


def without_padding(path: str, hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Features with zeros in the rows of padding.

    Raises:
        SpecError: the mask is of other tokens than the features.
    """
    if mask is None or hidden.dim() == 2:
        return hidden
    if hidden.shape[:2] != mask.shape:
        raise SpecError(
            f"the mask is {list(mask.shape)}, the features at {path!r} are {list(hidden.shape)}; "
            "expected one mask entry per token",
            hint=_REMEDY,
        )
    return hidden.masked_fill(~mask.reshape(*mask.shape, *[1] * (hidden.dim() - 2)), 0)


def unmasked_padding(inputs: Inputs, pad_token: int | None) -> str | None:
    """What to tell the user of a batch without mask whose samples end or start like padded ones; None if they don't.

    Args:
        inputs: the batch.
        pad_token: what the model pads with; None takes runs of three equal tokens for padding.
    """
    for name, tokens in inputs.values.items():
        if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.is_floating_point():
            continue
        if tokens.dtype == torch.bool or tokens.shape[1] < 4 or bool((tokens == tokens[:1, :1]).all()):
            continue
        if pad_token is None:
            ends = (tokens[:, :3], tokens[:, -3:])
            padded = torch.stack([(end == end[:, :1]).all(dim=1) for end in ends])
        else:
            padded = torch.stack([tokens[:, 0] == pad_token, tokens[:, -1] == pad_token])
        count = int(padded.any(dim=0).sum())
        if count and (pad_token is not None or 1 < count < len(tokens)):
            return (
                f"{count} of {len(tokens)} samples of a batch look padded in {name!r}, and there is no attention_mask, "
                f"so padding counts like any token. {_REMEDY}"
            )
    return None
