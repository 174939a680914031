"""Probabilistic surgery: the correction of Surgery drawn from a normal distribution while it is trained."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from driftlens.base.settings import Bounds, Label
from driftlens.calibration.calibrator import calibrators
from driftlens.calibration.descent import Batch, StepLength, Steps, uniform
from driftlens.calibration.surgery import LowRank, LowRankTrained
from driftlens.engine.compared import BoundaryFeatures
from driftlens.engine.training import Course, LayerTrainer


@calibrators.register("prob_surgery")
class ProbSurgery(LowRankTrained, LayerTrainer):
    """f' = f - z with z ~ N(mu, sigma^2), h = relu(D f), mu = M h, log sigma^2 = V h; by |f' - f_expert| + w KL.

    KL is from N(0, I), summed over entries, as a mean over rows. Where it is used, z is mu. Trained on calibration
    samples alone for a fixed number of steps; the authors report the best of 50 rounds by test accuracy.

    Args:
        rank: of h.
        weight: w, of the KL divergence.
        steps: of Adam, a batch each.
        batch: samples a step.
        lr: length of a step.
    """

    title = "ProbSurgery"
    source = "ICML 2025"

    def __init__(
        self,
        rank: Annotated[int, Bounds(low=1), Label("Rank"), "of the correction"] = 128,
        weight: Annotated[float, Bounds(low=0), Label("Weight of the KL"), "from a standard normal"] = 1e-4,
        steps: Steps = 1000,
        batch: Batch = 16,
        lr: StepLength = 1e-3,
    ) -> None:
        super().__init__(rank, steps, batch, lr)
        self.weight = weight

    def train(self, features: BoundaryFeatures, course: Course) -> LowRank:
        """The correction of one task, its mean alone."""
        width, like = features.merged.shape[-1], features.merged
        down = uniform(self.rank, width, course.generator).to(like).requires_grad_()
        mean, spread = (like.new_zeros(width, self.rank).requires_grad_() for _ in range(2))

        def loss(chosen: Tensor) -> Tensor:
            merged, expert = features.rows(chosen)
            noise = torch.randn(merged.shape, generator=course.generator).to(merged)
            return prob_surgery_loss(merged, expert, noise, down, mean, spread, weight=self.weight)

        self.descend([down, mean, spread], loss, len(features.merged), course)
        return LowRank(down.detach(), mean.detach())


def prob_surgery_loss(
    merged: Tensor,
    expert: Tensor,
    noise: Tensor,
    down: Tensor,
    mean: Tensor,
    spread: Tensor,
    *,
    weight: float,
) -> Tensor:
    """The loss of rows [T, d] with standard normal noise of their shape; at the start its second part is 0."""
    hidden = (merged @ down.mT).relu()
    mu, log_variance = hidden @ mean.mT, hidden @ spread.mT
    corrected = merged - (mu + (log_variance / 2).exp() * noise)
    divergence = (mu.square() + log_variance.exp() - 1 - log_variance).sum(dim=-1).mean() / 2
    return (corrected - expert).abs().mean() + weight * divergence
