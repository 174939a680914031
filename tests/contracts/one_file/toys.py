"""Toy plug-ins of one file each."""

from __future__ import annotations

CLOSED = '''
"""Weights that reproduce the experts' outputs as well as a diagonal change can."""

from collections.abc import Sequence
from typing import Annotated

import torch

from driftlens.calibration.calibrator import ClosedFormBase, calibrators
from driftlens.calibration.featcal import relative_change
from driftlens.engine.calibrating import LinearProblem, Problem, SiteReport, SiteUpdate
from driftlens.utils.registry import Bounds


@calibrators.register("toy-scale")
class ToyScale(ClosedFormBase):
    """Every output of a linear site scaled by one number: <y, W x> / |W x|^2, pulled towards 1."""

    title = "Toy scale"
    update = ("linear",)

    def __init__(self, pull: Annotated[float, Bounds(low=0), "how strongly towards 1"] = 0.5) -> None:
        self.pull = pull

    def solve(self, problem: Problem) -> Sequence[SiteUpdate]:
        assert isinstance(problem, LinearProblem)
        found, start = [], 0
        for site in problem.sites:
            name = f"{site.name}.weight"
            weight = problem.merged[name].to(problem.moments.gram)
            rows = slice(start, start + len(weight))
            start += len(weight)
            with_wanted = (problem.moments.output_cross[rows] * weight).sum(dim=1)
            energy = ((weight @ problem.moments.gram) * weight).sum(dim=1)
            new = weight * ((with_wanted + self.pull) / (energy + self.pull))[:, None]
            change = relative_change(new, problem.merged[name])
            report = SiteReport(site.name, site.kind, self.pull, None, None, change)
            found.append(SiteUpdate({name: new}, report))
        return found
'''


TRAINED = '''
"""An affine map of the final feature."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from driftlens.calibration.calibrator import TrainedCalibrator, calibrators
from driftlens.utils.registry import Bounds


@dataclass(frozen=True)
class Affine:
    matrix: Tensor
    shift: Tensor

    def __call__(self, stream: Tensor) -> Tensor:
        return stream + torch.tanh(stream @ self.matrix.to(stream)) + self.shift.to(stream)

    def tensors(self) -> Mapping[str, Tensor]:
        return {"matrix": self.matrix, "shift": self.shift}


@calibrators.register("toy-map")
class ToyMap(TrainedCalibrator):
    """Gradient descent on the mean squared distance to the expert's features."""

    title = "Toy map"

    def __init__(self, epochs: Annotated[int, Bounds(low=1), "steps of descent"] = 20) -> None:
        self.epochs = epochs

    def train(self, features, course):
        width = features.merged.shape[-1]
        start = 1e-2 * torch.randn(width, width, generator=course.generator)
        matrix, shift = start.requires_grad_(), torch.zeros(width, requires_grad=True)
        descent = torch.optim.Adam([matrix, shift], lr=3e-3)
        for epoch in range(1, self.epochs + 1):
            descent.zero_grad()
            loss = (Affine(matrix, shift)(features.merged) - features.expert).square().mean()
            loss.backward()
            descent.step()
            course.told(epoch, self.epochs, float(loss.detach()))
        return Affine(matrix.detach(), shift.detach())

    @classmethod
    def attachment(cls, tensors):
        return Affine(tensors["matrix"], tensors["shift"])
'''
