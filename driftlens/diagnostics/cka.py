"""How alike a variant's features are to the expert's, behind every layer, whatever the rotation and scale."""

from __future__ import annotations

import torch

from driftlens.base.diagnostic import Seen, diagnostic
from driftlens.linalg.cka import linear_cka
from driftlens.runs.schema import LAYERS


@diagnostic("cka", columns=LAYERS.only("cka"))
def cka(seen: Seen) -> dict[str, float]:
    """Debiased linear CKA between all samples' features of the variant and of the expert, in float64."""
    return {
        "cka": float(linear_cka(*(torch.from_numpy(rows).double() for rows in (seen.variant, seen.expert))))
    }
