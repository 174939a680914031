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

from driftlens.calibration.calibrator import FinalFeatures, TrainedCalibrator, TrainingContext, calibrators
from driftlens.utils.devices import match_device_dtype, to_device
from driftlens.utils.registry import Bounds, Label

Steps = Annotated[int, Bounds(low=1), Label("Steps"), "of Adam, one batch each"]
Batch = Annotated[int, Bounds(low=1), Label("Batch"), "samples a step"]
StepLength = Annotated[float, Bounds(low=0, low_open=True), Label("Step length"), "of Adam"]

_REPORTED_EVERY = 10


@dataclass(frozen=True)
class _LowRankCorrection:
    """The correction f - U relu(D f) of features f, token by token; `normalize` scales f to |f| = 1 first."""

    down: Tensor
    up: Tensor
    normalize: bool = False

    @property
    def code(self) -> str:
        """Python code of the correction, for model cards."""
        unit = "f = f / f.norm(dim=-1, keepdim=True)\n" if self.normalize else ""
        return f'{unit}f = f - (f @ t["down"].T).relu() @ t["up"].T'

    def __call__(self, stream: Tensor) -> Tensor:
        f = F.normalize(stream, dim=-1) if self.normalize else stream
        return f - (f @ self.down.to(f).mT).relu() @ self.up.to(f).mT

    def tensors(self) -> Mapping[str, Tensor]:
        flag = {"normalize": torch.ones(())} if self.normalize else {}
        return {"down": self.down, "up": self.up, **flag}


def linear_init(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Sample a matrix as `nn.Linear` initializes its weight: uniform within 1 / sqrt(columns)."""
    bound = 1 / math.sqrt(columns)
    return (2 * torch.rand(rows, columns, generator=generator) - 1) * bound


class _LowRankCalibrator(TrainedCalibrator):
    """A calibrator that trains a low-rank correction of the final feature by Adam, for a fixed number of steps.

    A subclass adds `_initial_parameters`, which draws the leaves with D and U first, and `_feature_loss`.
    """

    normalize = False

    def __init__(self, rank: int, steps: int, batch: int, lr: float) -> None:
        self.rank = rank
        self.steps = steps
        self.batch = batch
        self.lr = lr

    @classmethod
    def attachment(cls, tensors: Mapping[str, Tensor]) -> _LowRankCorrection:
        """Build the correction from its saved tensors."""
        return _LowRankCorrection(tensors["down"], tensors["up"], "normalize" in tensors)

    @abstractmethod
    def _initial_parameters(self, merged: Tensor, generator: torch.Generator) -> list[Tensor]:
        """Return the initial parameters of the correction, for features like `merged`."""

    @abstractmethod
    def _feature_loss(
        self, merged: Tensor, expert: Tensor, parameters: Sequence[Tensor], generator: torch.Generator
    ) -> Tensor:
        """Return the training loss on the merged model's and the expert's feature vectors, [T, d] each."""

    def train(self, features: FinalFeatures, course: TrainingContext) -> _LowRankCorrection:
        """Train the correction of one task, without validation or early stopping."""
        parameters = [leaf.requires_grad_() for leaf in self._initial_parameters(features.merged, course.generator)]
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
        return _LowRankCorrection(parameters[0].detach(), parameters[1].detach(), self.normalize)


@calibrators.register("surgery")
class Surgery(_LowRankCalibrator):
    """Representation surgery: a low-rank correction f - U relu(D f) per task, trained on |f' - f_expert|.

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
        """Return the initial parameters: D random as in `nn.Linear`, U zero."""
        width, device = merged.shape[-1], merged.device
        down = to_device(linear_init(self.rank, width, generator), device)
        # U is zero at the start, so training begins at the merged model's features.
        return [down, torch.zeros(width, self.rank, device=device)]

    def _feature_loss(
        self, merged: Tensor, expert: Tensor, parameters: Sequence[Tensor], generator: torch.Generator
    ) -> Tensor:
        """Return the mean absolute difference of corrected and expert features."""
        down, up = parameters
        target = F.normalize(expert, dim=-1) if self.normalize else expert
        return (_LowRankCorrection(down, up, self.normalize)(merged) - target).abs().mean()


@calibrators.register("prob_surgery")
class ProbSurgery(_LowRankCalibrator):
    """A random correction f - z per task, z ~ N(mu, sigma^2), mu = M relu(D f), log sigma^2 = V relu(D f).

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
        """Return the initial parameters: D random as in `nn.Linear`, M and V zero."""
        width = merged.shape[-1]
        down = match_device_dtype(merged, linear_init(self.rank, width, generator))
        return [down, merged.new_zeros(width, self.rank), merged.new_zeros(width, self.rank)]

    def _feature_loss(
        self, merged: Tensor, expert: Tensor, parameters: Sequence[Tensor], generator: torch.Generator
    ) -> Tensor:
        """Return the training loss with one random sample of z per feature vector."""
        noise = match_device_dtype(merged, torch.randn(merged.shape, generator=generator))
        return _prob_surgery_loss(merged, expert, noise, parameters, self.weight)


def _prob_surgery_loss(
    merged: Tensor, expert: Tensor, noise: Tensor, parameters: Sequence[Tensor], weight: float
) -> Tensor:
    """Return the ProbSurgery loss of feature vectors [T, d], given standard normal noise of their shape."""
    down, mean, spread = parameters
    hidden = (merged @ down.mT).relu()
    mu, log_variance = hidden @ mean.mT, hidden @ spread.mT
    # The reparameterisation keeps the sample differentiable.
    corrected = merged - (mu + (log_variance / 2).exp() * noise)
    divergence = (mu.square() + log_variance.exp() - 1 - log_variance).sum(dim=-1).mean() / 2
    return (corrected - expert).abs().mean() + weight * divergence
