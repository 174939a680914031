"""Whether a model gives the same features twice, which everything that compares features rests on."""

from __future__ import annotations

from typing import Any

from torch import nn

from driftlens.errors import NumericsError
from driftlens.models.dissection import run, same_values
from driftlens.models.frames import raw_inputs, result


def check_deterministic(module: nn.Module, batch: Any) -> None:
    """Refuse a model that answers one batch in two ways, in eval mode, bit for bit.

    Args:
        module: the model; it is not modified.
        batch: raw inputs.

    Raises:
        NumericsError: the two outputs differ; says by how much.
    """
    first, second = (result(run(module, raw_inputs(batch))) for _ in range(2))
    if same_values(first, second):
        return
    difference = float((first - second).abs().max()) if first.shape == second.shape else float("nan")
    raise NumericsError(
        f"{type(module).__name__} gives two outputs for one batch; they differ by up to {difference:.3g}",
        hint="Something random runs in eval mode: dropout as a function without `training=self.training`, "
        "stochastic depth, noise, or a kernel that is not deterministic.",
        difference=difference,
    )
