"""Representation surgery: a small map of the final feature per task, trained on features that stay as they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from driftlens.calibration.calibrator import Course, FinalFeatures, Trained, calibrators
from driftlens.utils.devices import beside, moved
from driftlens.utils.registry import Bounds, Label

Steps = Annotated[int, Bounds(low=1), Label("Steps"), "of Adam, a batch each"]
Batch = Annotated[int, Bounds(low=1), Label("Batch"), "samples a step"]
StepLength = Annotated[float, Bounds(low=0, low_open=True), Label("Step length"), "of Adam"]

_TOLD_EVERY = 10


@dataclass(frozen=True)
class LowRank:
    """f - U relu(D f) with D [r, d] and U [d, r], token by token; with `normalize`, f is brought to |f| = 1 first."""

    down: Tensor
    up: Tensor
    normalize: bool = False

    @property
    def code(self) -> str:
        """The map in Python, for model cards."""
        unit = "f = f / f.norm(dim=-1, keepdim=True)\n" if self.normalize else ""
        return f'{unit}f = f - (f @ t["down"].T).relu() @ t["up"].T'

    def __call__(self, stream: Tensor) -> Tensor:
        """Return corrected features of the same shape."""
        f = F.normalize(stream, dim=-1) if self.normalize else stream
        return f - (f @ self.down.to(f).mT).relu() @ self.up.to(f).mT

    def tensors(self) -> Mapping[str, Tensor]:
        """Return what is saved; a third tensor marks maps that normalize features."""
        flag = {"normalize": torch.ones(())} if self.normalize else {}
        return {"down": self.down, "up": self.up, **flag}


def uniform(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Draw a matrix as `nn.Linear` starts with: uniform within 1 / sqrt(columns), Kaiming's bound with a = sqrt 5."""
    bound = 1 / math.sqrt(columns)
    return (2 * torch.rand(rows, columns, generator=generator) - 1) * bound


class LowRankTrained(Trained):
    """What both repairs have in common: the descent, and what is saved."""

    def __init__(self, rank: int, steps: int, batch: int, lr: float) -> None:
        self.rank = rank
        self.steps = steps
        self.batch = batch
        self.lr = lr

    @classmethod
    def attachment(cls, tensors: Mapping[str, Tensor]) -> LowRank:
        """Build the correction that was saved."""
        return LowRank(tensors["down"], tensors["up"], "normalize" in tensors)

    def descend(
        self, parameters: Sequence[Tensor], loss_of: Callable[[Tensor], Tensor], count: int, course: Course
    ) -> None:
        """Run Adam for a fixed number of steps over batches that are drawn without replacement, epoch after epoch.

        There is no validation and no choice among steps: where it stops is fixed beforehand.

        Args:
            parameters: leaves, changed in place.
            loss_of: returns the loss of positions among the samples.
            count: number of samples.
            course: what is drawn from, and told of the steps.
        """
        descent, order = torch.optim.Adam(parameters, lr=self.lr), torch.empty(0, dtype=torch.long)
        for step in range(1, self.steps + 1):
            if not len(order):
                order = torch.randperm(count, generator=course.generator)
            chosen, order = order[: self.batch], order[self.batch :]
            loss = loss_of(chosen)
            descent.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            descent.step()
            if step % _TOLD_EVERY == 0 or step == self.steps:
                course.told(step, self.steps, float(loss.detach()))


@calibrators.register("surgery")
class Surgery(LowRankTrained):
    """A low-rank correction of the final feature per task, f' = f - U relu(D f), by the mean |f' - f_expert|.

    Trained on calibration samples alone, for a fixed number of steps; the authors train on test images. Of texts, f is
    what the score map reads, token by token, for which nobody has published another way.
    """

    title = "Surgery"
    source = "arXiv:2402.02705"

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

    def train(self, features: FinalFeatures, course: Course) -> LowRank:
        """Train the correction of one task."""
        width, device = features.merged.shape[-1], features.merged.device
        down = moved(uniform(self.rank, width, course.generator), device).requires_grad_()
        up = torch.zeros(width, self.rank, device=device, requires_grad=True)
        correction = LowRank(down, up, self.normalize)

        def loss(chosen: Tensor) -> Tensor:
            merged, expert = features.rows(chosen)
            wanted = F.normalize(expert, dim=-1) if self.normalize else expert
            return (correction(merged) - wanted).abs().mean()

        self.descend([down, up], loss, len(features.merged), course)
        return LowRank(down.detach(), up.detach(), self.normalize)


@calibrators.register("prob_surgery")
class ProbSurgery(LowRankTrained):
    """f' = f - z with z ~ N(mu, sigma^2), h = relu(D f), mu = M h, log sigma^2 = V h; by |f' - f_expert| + w KL.

    KL is from N(0, I), summed over entries, as a mean over rows. Where it is used, z is mu. Trained on calibration
    samples alone for a fixed number of steps; the authors report the best of 50 rounds by test accuracy.
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

    def train(self, features: FinalFeatures, course: Course) -> LowRank:
        """Train the correction of one task; its mean alone is returned."""
        width, like = features.merged.shape[-1], features.merged
        down = beside(like, uniform(self.rank, width, course.generator)).requires_grad_()
        mean, spread = (like.new_zeros(width, self.rank).requires_grad_() for _ in range(2))

        def loss(chosen: Tensor) -> Tensor:
            merged, expert = features.rows(chosen)
            noise = beside(merged, torch.randn(merged.shape, generator=course.generator))
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
    """Return the loss of rows [T, d] with standard normal noise of their shape; at the start its second part is 0."""
    hidden = (merged @ down.mT).relu()
    mu, log_variance = hidden @ mean.mT, hidden @ spread.mT
    corrected = merged - (mu + (log_variance / 2).exp() * noise)
    divergence = (mu.square() + log_variance.exp() - 1 - log_variance).sum(dim=-1).mean() / 2
    return (corrected - expert).abs().mean() + weight * divergence
