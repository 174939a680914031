"""Representation surgery: a small map per task behind the last layer, trained on frozen features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from driftlens.base.settings import Bounds, Label
from driftlens.calibration.calibrator import Trained, calibrators
from driftlens.calibration.descent import Batch, Descent, StepLength, Steps, uniform
from driftlens.engine.compared import BoundaryFeatures
from driftlens.engine.training import Course, LayerTrainer


@dataclass(frozen=True)
class LowRank:
    """f - U relu(D f), token by token; with `normalize`, of features brought to unit norm.

    Attributes:
        down: D, [r, d].
        up: U, [d, r].
        normalize: whether f is f / |f|, in what is subtracted from, too.
    """

    down: Tensor
    up: Tensor
    normalize: bool = False

    @property
    def code(self) -> str:
        """What this is, in Python."""
        unit = "f = f / f.norm(dim=-1, keepdim=True)\n" if self.normalize else ""
        return f'{unit}f = f - (f @ t["down"].T).relu() @ t["up"].T'

    def __call__(self, stream: Tensor) -> Tensor:
        """Corrected features, of the same shape."""
        f = F.normalize(stream, dim=-1) if self.normalize else stream
        return f - (f @ self.down.to(f).mT).relu() @ self.up.to(f).mT

    def tensors(self) -> Mapping[str, Tensor]:
        """What is saved; a third one says that features are normalised."""
        flag = {"normalize": torch.ones(())} if self.normalize else {}
        return {"down": self.down, "up": self.up, **flag}


class LowRankTrained(Descent, Trained):
    """What repairs by low-rank maps has in common beside the descent: what is added and saved."""

    def __init__(self, rank: int, steps: int, batch: int, lr: float) -> None:
        super().__init__(steps, batch, lr)
        self.rank = rank

    def added(self, widths: Sequence[int]) -> int:
        """Two matrices at every boundary."""
        return sum(2 * self.rank * width for width in widths)

    @classmethod
    def attachment(cls, tensors: Mapping[str, Tensor], site: str = "") -> LowRank:
        """The correction that was saved."""
        return LowRank(tensors["down"], tensors["up"], "normalize" in tensors)


@calibrators.register("surgery")
class Surgery(LowRankTrained, LayerTrainer):
    """A low-rank correction of the final feature per task, f' = f - U relu(D f), by the mean |f' - f_expert|.

    Trained on calibration samples alone, for a fixed number of steps; the authors train on test images. Of texts, f is
    what the score map reads, token by token, for which nobody has published another way.

    Args:
        rank: r, of the correction.
        steps: of Adam, a batch each.
        batch: samples a step.
        lr: length of a step.
        normalize: whether f is brought to unit norm first, as FusionBench does; the authors don't.
    """

    title = "Surgery"
    source = "arXiv:2402.02705"
    effort = 1.0

    def __init__(
        self,
        rank: Annotated[int, Bounds(low=1), Label("Rank"), "of the correction"] = 16,
        steps: Steps = 1000,
        batch: Batch = 16,
        lr: StepLength = 1e-3,
        normalize: Annotated[bool, Label("Unit features"), "whether features are normalised first"] = False,
    ) -> None:
        super().__init__(rank, steps, batch, lr)
        self.normalize = normalize

    def train(self, features: BoundaryFeatures, course: Course) -> LowRank:
        """The correction of one task."""
        width, device = features.merged.shape[-1], features.merged.device
        down = uniform(self.rank, width, course.generator).to(device).requires_grad_()
        up = torch.zeros(width, self.rank, device=device, requires_grad=True)
        correction = LowRank(down, up, self.normalize)

        def loss(chosen: Tensor) -> Tensor:
            merged, expert = features.rows(chosen)
            return (
                (correction(merged) - (F.normalize(expert, dim=-1) if self.normalize else expert))
                .abs()
                .mean()
            )

        self.descend([down, up], loss, len(features.merged), course)
        return LowRank(down.detach(), up.detach(), self.normalize)
