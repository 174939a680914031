"""Distillation: all weights trained by gradients until the merged model's final features are those of the experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import torch
from torch import Tensor

from driftlens.base.settings import Bounds, Label
from driftlens.calibration.calibrator import Calibrator, calibrators
from driftlens.calibration.descent import Descent, StepLength, Steps
from driftlens.engine.training import Course, FrozenWalk, WeightTrainer
from driftlens.models.chain import Slot


@calibrators.register("distill")
class Distill(Calibrator, Descent, WeightTrainer):
    """One model for all tasks, by the mean |difference| of its final features to those of the task's own expert.

    The reference for what gradients reach on the samples that closed forms are given: every parameter is trained, on
    calibration samples alone, for a fixed number of steps. A step's batch holds samples of all tasks, mixed; every task
    counts alike, whatever the size of its features: its loss is divided by the mean |feature| of its expert in that
    batch. Of texts, features are compared token by token. Nobody has published settings; these are not searched for.
    """

    title = "Distillation"
    source = "a reference"
    effort = 100.0  # by 30 of its 1000 steps 150 on four tasks of real images; unlike FeatCal's, it grows with no tasks
    update: Sequence[str] = ("linear", "bias", "norm")

    def __init__(
        self,
        steps: Steps = 1000,
        batch: Annotated[int, Bounds(low=1), Label("Batch"), "samples a step, of all tasks together"] = 64,
        lr: StepLength = 1e-4,
    ) -> None:
        super().__init__(steps, batch, lr)

    def boundaries(self, num_layers: int) -> Sequence[int]:
        """All layers."""
        return range(1, num_layers + 1)

    def targets(self, num_layers: int) -> Sequence[int]:
        """The final feature."""
        return (num_layers,)

    def train_weights(self, walks: Sequence[FrozenWalk], course: Course) -> Mapping[Slot, Tensor]:
        """The parameters of the one model."""
        weights = walks[0].leaves()
        starts = [sum(walk.count for walk in walks[:at]) for at in range(len(walks))]

        def loss(chosen: Tensor) -> Tensor:
            losses = []
            for start, walk in zip(starts, walks, strict=True):
                of_task = chosen[(chosen >= start) & (chosen < start + walk.count)] - start
                if len(of_task):
                    [(merged, expert)] = walk.pairs(of_task, weights=weights).values()
                    losses.append((merged - expert).abs().mean() / expert.abs().mean())
            return torch.stack(losses).mean()

        self.descend(list(weights.values()), loss, sum(walk.count for walk in walks), course)
        return {slot: value.detach() for slot, value in weights.items()}
