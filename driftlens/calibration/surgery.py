"""Representation surgery: small maps per task behind layers, trained on frozen features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from driftlens.base.devices import beside, moved
from driftlens.base.settings import Bounds, Label
from driftlens.calibration.calibrator import Trained, calibrators
from driftlens.calibration.descent import Batch, Descent, StepLength, Steps, uniform
from driftlens.engine.training import BoundaryFeatures, Course, FrozenWalk, JointTrainer, LayerTrainer


@dataclass(frozen=True)
class LowRank:
    """f - U relu(D f) with D [r, d] and U [d, r], token by token; with `normalize`, f is brought to |f| = 1 first."""

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

    @classmethod
    def attachment(cls, tensors: Mapping[str, Tensor], site: str = "") -> LowRank:
        """The correction that was saved."""
        return LowRank(tensors["down"], tensors["up"], "normalize" in tensors)


@calibrators.register("surgery")
class Surgery(LowRankTrained, LayerTrainer):
    """A low-rank correction of the final feature per task, f' = f - U relu(D f), by the mean |f' - f_expert|.

    Trained on calibration samples alone, for a fixed number of steps; the authors train on test images. Of texts, f is
    what the score map reads, token by token, for which nobody has published another way.
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
        down = moved(uniform(self.rank, width, course.generator), device).requires_grad_()
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


@calibrators.register("prob_surgery")
class ProbSurgery(LowRankTrained, LayerTrainer):
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

    def train(self, features: BoundaryFeatures, course: Course) -> LowRank:
        """The correction of one task, its mean alone."""
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
    """The loss of rows [T, d] with standard normal noise of their shape; at the start its second part is 0."""
    hidden = (merged @ down.mT).relu()
    mu, log_variance = hidden @ mean.mT, hidden @ spread.mT
    corrected = merged - (mu + (log_variance / 2).exp() * noise)
    divergence = (mu.square() + log_variance.exp() - 1 - log_variance).sum(dim=-1).mean() / 2
    return (corrected - expert).abs().mean() + weight * divergence


@calibrators.register("surgery_v2")
class SurgeryV2(LowRankTrained, JointTrainer):
    """A low-rank correction behind every block and the last layer, seen by all that follow; by the sum over boundaries
    of the mean |difference| to the expert's token means.

    Trained on calibration samples alone, for a fixed number of steps, by back-propagation through the merged model;
    the authors train on test images, and use rank 4 for ViT-L/14.
    """

    title = "SurgeryV2"
    source = "arXiv:2410.14389"
    effort = 80.0  # eight tasks of the embedded images: four minutes where FeatCal takes three seconds

    def __init__(
        self,
        rank: Annotated[int, Bounds(low=1), Label("Rank"), "of each correction"] = 16,
        steps: Steps = 1000,
        batch: Batch = 16,
        lr: StepLength = 1e-3,
    ) -> None:
        super().__init__(rank, steps, batch, lr)

    def boundaries(self, num_layers: int) -> Sequence[int]:
        """Behind every layer but the stem."""
        return range(2, num_layers + 1)

    def train_jointly(self, walk: FrozenWalk, course: Course) -> Mapping[int, LowRank]:
        """The corrections of one task."""
        device, dtype = walk.pool.device, walk.pool.dtype
        corrections: dict[int, LowRank] = {}
        for boundary, width in walk.widths.items():
            down = moved(uniform(self.rank, width, course.generator), device, dtype).requires_grad_()
            up = torch.zeros(width, self.rank, device=device, dtype=dtype, requires_grad=True)
            corrections[boundary] = LowRank(down, up)

        def loss(chosen: Tensor) -> Tensor:
            pairs = walk.pairs(chosen, corrections).values()
            return torch.stack([(merged - expert).abs().mean() for merged, expert in pairs]).sum()

        leaves = [leaf for each in corrections.values() for leaf in (each.down, each.up)]
        self.descend(leaves, loss, walk.count, course)
        return {at: LowRank(each.down.detach(), each.up.detach()) for at, each in corrections.items()}
