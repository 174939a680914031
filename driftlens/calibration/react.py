"""ReACT: a linear correction of the final feature per task, in closed form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from driftlens.base.devices import wide
from driftlens.base.settings import Bounds, Label
from driftlens.calibration.calibrator import Trained, calibrators
from driftlens.engine.training import BoundaryFeatures, Course, LayerTrainer
from driftlens.linalg.cholesky import factorize, inverse_norm


@dataclass(frozen=True)
class Linear:
    """W f, token by token; `matrix` is W, [d, d]."""

    matrix: Tensor
    code: ClassVar[str] = 'f = f @ t["matrix"].T'

    def __call__(self, stream: Tensor) -> Tensor:
        """Corrected features, of the same shape."""
        return stream @ self.matrix.to(stream).mT

    def tensors(self) -> Mapping[str, Tensor]:
        """What is saved."""
        return {"matrix": self.matrix}


@calibrators.register("react")
class ReACT(Trained, LayerTrainer):
    """W of each task that minimises |F_expert - F W'|^2 + lam |F'F|_F |W - I|_F^2 over rows of final features.

    The ridge pulls towards doing nothing, so that few samples do little harm, and is relative to the Gram matrix as
    that of FeatCal. The published method also blends the W of several tasks by a user's preference; here every task
    has its own.
    """

    title = "ReACT"
    source = "arXiv:2511.10943"

    def __init__(
        self,
        lam: Annotated[
            float, Bounds(low=0, low_open=True), Label("Ridge λ"), "the pull towards no correction"
        ] = 0.01,
    ) -> None:
        self.lam = lam

    def train(self, features: BoundaryFeatures, course: Course) -> Linear:
        """The correction of one task, solved in float64."""
        merged, expert = (wide(rows) for rows in features.rows())
        gram = merged.mT @ merged
        scale = inverse_norm(gram)
        factor = factorize(scale * gram, what="gram + lam I", shift=self.lam)
        change = factor.solve_rows(scale * (expert - merged).mT @ merged)
        course.told(1, 1, float((expert - merged - merged @ change.mT).square().mean()))
        return Linear(
            (torch.eye(len(gram), dtype=change.dtype, device=change.device) + change).to(features.merged)
        )

    @classmethod
    def attachment(cls, tensors: Mapping[str, Tensor], site: str = "") -> Linear:
        """The correction that was saved."""
        return Linear(tensors["matrix"])
