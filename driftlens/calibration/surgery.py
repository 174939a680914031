"""Representation surgery: a small map of the final feature per task, trained on features that stay as they are."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from driftlens.calibration.calibrator import Course, FinalFeatures, Trained, calibrators
from driftlens.utils.devices import to_device, to_match
from driftlens.utils.registry import Bounds, Label

Steps = Annotated[int, Bounds(low=1), Label("Steps"), "of Adam, one batch each"]
Batch = Annotated[int, Bounds(low=1), Label("Batch"), "samples a step"]
StepLength = Annotated[float, Bounds(low=0, low_open=True), Label("Step length"), "of Adam"]

_REPORTED_EVERY = 10


@dataclass(frozen=True)
class _LowRank:
    """The map f - U relu(D f) with D [r, d] and U [d, r], token by token; `normalize` first scales f to |f| = 1."""

    down: Tensor
    up: Tensor
    normalize: bool = False

    @property
    def code(self) -> str:
        """The map in Python, for model cards."""
        unit = "f = f / f.norm(dim=-1, keepdim=True)\n" if self.normalize else ""
        return f'{unit}f = f - (f @ t["down"].T).relu() @ t["up"].T'

    def __call__(self, stream: Tensor) -> Tensor:
        f = F.normalize(stream, dim=-1) if self.normalize else stream
        return f - (f @ self.down.to(f).mT).relu() @ self.up.to(f).mT

    def tensors(self) -> Mapping[str, Tensor]:
        flag = {"normalize": torch.ones(())} if self.normalize else {}
        return {"down": self.down, "up": self.up, **flag}


def uniform(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Sample a matrix as `nn.Linear` initializes it: uniform within 1 / sqrt(columns)."""
    bound = 1 / math.sqrt(columns)
    return (2 * torch.rand(rows, columns, generator=generator) - 1) * bound


class _LowRankTrained(Trained):
    """Trains a low-rank correction by Adam, for a fixed number of steps on calibration samples alone.

    A subclass adds `_start`, which draws the leaves with D and U first, and `_loss`.
    """

    normalize = False

    def __init__(self, rank: int, steps: int, batch: int, lr: float) -> None:
        self.rank = rank
        self.steps = steps
        self.batch = batch
        self.lr = lr

    @classmethod
    def attachment(cls, tensors: Mapping[str, Tensor]) -> _LowRank:
        """Build the correction that was saved."""
        return _LowRank(tensors["down"], tensors["up"], "normalize" in tensors)

    @abstractmethod
    def _initial_parameters(self, merged: Tensor, generator: torch.Generator) -> list[Tensor]:
        """Return the parameters at the start, for features like `merged`."""

    @abstractmethod
    def _feature_loss(
        self, merged: Tensor, expert: Tensor, parameters: Sequence[Tensor], generator: torch.Generator
    ) -> Tensor:
        """Return the loss of the merged model's and the expert's vectors, [T, d] each."""

    def train(self, features: FinalFeatures, course: Course) -> _LowRank:
        """Fit the correction of one task; there is no validation and no choice among steps."""
        parameters = [
            leaf.requires_grad_() for leaf in self._initial_parameters(features.merged, course.generator)
        ]
        # Samples are taken without replacement, so that each is seen equally often.
        descent, order = torch.optim.Adam(parameters, lr=self.lr), torch.empty(0, dtype=torch.long)
        for step in range(1, self.steps + 1):
            if not len(order):
                order = torch.randperm(len(features.merged), generator=course.generator)
            chosen, order = order[: self.batch], order[self.batch :]
            loss = self._feature_loss(*features.rows(chosen), parameters, course.generator)
            descent.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            descent.step()
            if step % _REPORTED_EVERY == 0 or step == self.steps:
                course.told(step, self.steps, float(loss.detach()))
        return _LowRank(parameters[0].detach(), parameters[1].detach(), self.normalize)


@calibrators.register("surgery")
class Surgery(_LowRankTrained):
    """A low-rank correction of the final feature per task, f' = f - U relu(D f), trained on the mean |f' - f_expert|.

    The authors train on test images. For texts, f is what the score map reads, token by token.
    """

    title = "Surgery"
    source = "arXiv:2402.02705"

    def __init__(
        self,
        rank: Annotated[int, Bounds(low=1), Label("Rank"), "of the correction"] = 16,
        steps: Steps = 1000,
        batch: Batch = 16,
        lr: StepLength = 1e-3,
        normalize: Annotated[bool, Label("Unit features"), "normalise features first"] = False,
    ) -> None:
        super().__init__(rank, steps, batch, lr)
        self.normalize = normalize

    def _initial_parameters(self, merged: Tensor, generator: torch.Generator) -> list[Tensor]:
        """Return D, sampled, and U, zero."""
        width, device = merged.shape[-1], merged.device
        down = to_device(uniform(self.rank, width, generator), device)
        # U is zero at the start, so training begins at the merged model's features.
        return [down, torch.zeros(width, self.rank, device=device)]

    def _feature_loss(
        self, merged: Tensor, expert: Tensor, parameters: Sequence[Tensor], generator: torch.Generator
    ) -> Tensor:
        """Return the mean absolute difference of corrected and expert features."""
        down, up = parameters
        target = F.normalize(expert, dim=-1) if self.normalize else expert
        return (_LowRank(down, up, self.normalize)(merged) - target).abs().mean()


@calibrators.register("prob_surgery")
class ProbSurgery(_LowRankTrained):
    """f' = f - z with z ~ N(mu, sigma^2), h = relu(D f), mu = M h, log sigma^2 = V h; by |f' - f_expert| + w KL.

    KL is from N(0, I), summed over entries, as a mean over rows. Where it is used, z is mu. The authors report the best
    of 50 rounds by test accuracy.
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

    def _initial_parameters(self, merged: Tensor, generator: torch.Generator) -> list[Tensor]:
        """Return D, sampled, and M and V, zero."""
        width = merged.shape[-1]
        down = to_match(merged, uniform(self.rank, width, generator))
        return [down, merged.new_zeros(width, self.rank), merged.new_zeros(width, self.rank)]

    def _feature_loss(
        self, merged: Tensor, expert: Tensor, parameters: Sequence[Tensor], generator: torch.Generator
    ) -> Tensor:
        """Return the loss with one sample of z per vector; parameters are D, M and V."""
        noise = to_match(merged, torch.randn(merged.shape, generator=generator))
        return _prob_surgery_loss(merged, expert, noise, parameters, self.weight)


def _prob_surgery_loss(
    merged: Tensor, expert: Tensor, noise: Tensor, parameters: Sequence[Tensor], weight: float
) -> Tensor:
    """Return the loss of rows [T, d] with standard normal noise of their shape; at the start its second part is 0."""
    down, mean, spread = parameters
    hidden = (merged @ down.mT).relu()
    mu, log_variance = hidden @ mean.mT, hidden @ spread.mT
    # The reparameterisation keeps the sample differentiable.
    corrected = merged - (mu + (log_variance / 2).exp() * noise)
    divergence = (mu.square() + log_variance.exp() - 1 - log_variance).sum(dim=-1).mean() / 2
    return (corrected - expert).abs().mean() + weight * divergence
