"""Representation surgery: a small map per task behind the last layer, trained on frozen features."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from driftlens.calibration.calibrator import Trained, calibrators
from driftlens.engine.training import BoundaryFeatures, LayerTrainer, OnEpoch
from driftlens.settings import Bounds, Label

_TOLD_EVERY = 10


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

    def __call__(self, stream: Tensor) -> Tensor:
        """Corrected features, of the same shape."""
        f = F.normalize(stream, dim=-1) if self.normalize else stream
        return f - (f @ self.down.to(f).mT).relu() @ self.up.to(f).mT

    def tensors(self) -> Mapping[str, Tensor]:
        """What is saved; a third one says that features are normalised."""
        flag = {"normalize": torch.ones(())} if self.normalize else {}
        return {"down": self.down, "up": self.up, **flag}


def uniform(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """A matrix as `nn.Linear` starts with: uniform within 1 / sqrt(columns), which is Kaiming's with a = sqrt 5."""
    bound = 1 / math.sqrt(columns)
    return (2 * torch.rand(rows, columns, generator=generator) - 1) * bound


class Descent(Trained):
    """What repairs by a low-rank map that Adam trains have in common: a fixed number of steps, and what is saved."""

    steps: int
    batch: int
    lr: float

    def descend(
        self,
        parameters: Sequence[Tensor],
        loss_of: Callable[[Tensor], Tensor],
        count: int,
        generator: torch.Generator,
        on_epoch: OnEpoch,
    ) -> None:
        """Adam over batches of samples, which are drawn without replacement until all were had.

        There is no validation and no choice among steps: where it stops is fixed beforehand.

        Args:
            parameters: leaf tensors, changed in place.
            loss_of: positions of samples -> the loss.
            count: of samples.
            generator: draws the batches.
            on_epoch: told of the loss every few steps; it may raise.
        """
        descent, order = torch.optim.Adam(parameters, lr=self.lr), torch.empty(0, dtype=torch.long)
        for step in range(1, self.steps + 1):
            if not len(order):
                order = torch.randperm(count, generator=generator)
            chosen, order = order[: self.batch], order[self.batch :]
            loss = loss_of(chosen)
            descent.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            descent.step()
            if step % _TOLD_EVERY == 0 or step == self.steps:
                on_epoch(step, self.steps, float(loss.detach()))

    @classmethod
    def attachment(cls, tensors: Mapping[str, Tensor]) -> LowRank:
        """The correction that was saved."""
        return LowRank(tensors["down"], tensors["up"], "normalize" in tensors)


@calibrators.register("surgery")
class Surgery(Descent, LayerTrainer):
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
        steps: Annotated[int, Bounds(low=1), Label("Steps"), "of Adam, a batch each"] = 1000,
        batch: Annotated[int, Bounds(low=1), Label("Batch"), "samples a step"] = 16,
        lr: Annotated[float, Bounds(low=0, low_open=True), Label("Step length"), "of Adam"] = 1e-3,
        normalize: Annotated[bool, Label("Unit features"), "whether features are normalised first"] = False,
    ) -> None:
        self.rank = rank
        self.steps = steps
        self.batch = batch
        self.lr = lr
        self.normalize = normalize

    def train(self, features: BoundaryFeatures, generator: torch.Generator, on_epoch: OnEpoch) -> LowRank:
        """The correction of one task."""
        width, device = features.merged.shape[-1], features.merged.device
        down = uniform(self.rank, width, generator).to(device).requires_grad_()
        up = torch.zeros(width, self.rank, device=device, requires_grad=True)
        found = LowRank(down, up, self.normalize)

        def loss(chosen: Tensor) -> Tensor:
            merged, expert = features.rows(chosen)
            return (found(merged) - (F.normalize(expert, dim=-1) if self.normalize else expert)).abs().mean()

        self.descend([down, up], loss, len(features.merged), generator, on_epoch)
        return LowRank(down.detach(), up.detach(), self.normalize)
