"""Low-rank corrections of linear modules for every task, in closed form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from driftlens.base.settings import Bounds, Label
from driftlens.calibration.calibrator import Trained, calibrators
from driftlens.engine.training import SiteSums, SiteTrainer
from driftlens.linalg.cholesky import factorize, inverse_norm
from driftlens.linalg.joint_ridge import BIAS_INPUT


@dataclass(frozen=True)
class LowRankUpdate:
    """y + U (D x + s) of what a linear site makes of x: an update U D of its weight, with U [o, r] and D [r, k].

    `shift` is s, [r]; zero where the site has no bias.
    """

    site: str
    up: Tensor
    down: Tensor
    shift: Tensor
    reads_inputs: ClassVar[bool] = True
    code: ClassVar[str] = 'f = f + (x @ t["down"].T + t["shift"]) @ t["up"].T'

    def __call__(self, stream: Tensor, inputs: Tensor | None = None) -> Tensor:
        """The site's output with the update, of the same shape."""
        assert inputs is not None
        return stream + F.linear(
            F.linear(inputs, self.down.to(stream), self.shift.to(stream)), self.up.to(stream)
        )

    def tensors(self) -> Mapping[str, Tensor]:
        """What is saved."""
        return {"up": self.up, "down": self.down, "shift": self.shift}


@calibrators.register("low_rank")
class LowRankCorrections(Trained, SiteTrainer):
    """For every task and linear module of a block, the C of some rank that minimises |R - C X|^2 + lam |X X'|_F |C|^2.

    X is what the module reads in the merged model, corrections before it included, and R what its output lacks: ridge
    regression of reduced rank, in forward order. With X X' + lam |X X'|_F I = L L', C = U S V' L^-1 of the first
    singular values and vectors of R X' L^-T. Modules that the library does not run by themselves, as those inside
    torch's attention, and experts of mixtures stay as they are.
    """

    title = "Low-rank corrections"
    source = "reduced-rank ridge regression"
    effort = 1.5

    def __init__(
        self,
        rank: Annotated[int, Bounds(low=1), Label("Rank"), "of each correction"] = 8,
        lam: Annotated[
            float, Bounds(low=0, low_open=True), Label("Ridge λ"), "the pull towards no correction"
        ] = 0.01,
    ) -> None:
        self.rank = rank
        self.lam = lam

    def solve(self, sums: SiteSums) -> tuple[LowRankUpdate, dict[str, Tensor]]:
        """The correction of one site, and the update of its weight and bias that it is."""
        width = len(sums.gram) - sums.has_bias
        scale = inverse_norm(sums.gram[:width, :width])
        factor = factorize(scale * sums.gram, what="gram + lam I", shift=self.lam)
        half = torch.linalg.solve_triangular(factor.lower, scale * sums.cross.mT, upper=False).mT
        left, values, right = torch.linalg.svd(half, full_matrices=False)
        up = left[:, : self.rank] * values[: self.rank]
        down = torch.linalg.solve_triangular(factor.lower, right[: self.rank], upper=False, left=False)
        shift = BIAS_INPUT * down[:, -1] if sums.has_bias else down.new_zeros(len(down))
        down = down[:, :width].contiguous()
        changes = {"weight": up @ down} | ({"bias": up @ shift} if sums.has_bias else {})
        return LowRankUpdate(sums.site.name, up, down, shift), changes

    @classmethod
    def attachment(cls, tensors: Mapping[str, Tensor], site: str = "") -> LowRankUpdate:
        """The correction that was saved."""
        return LowRankUpdate(site, tensors["up"], tensors["down"], tensors["shift"])
