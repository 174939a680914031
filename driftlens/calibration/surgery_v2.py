"""Representation surgery behind every block, all maps of a task trained together through the frozen layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import torch
from torch import Tensor

from driftlens.calibration.calibrator import calibrators
from driftlens.calibration.surgery import Descent, LowRank, uniform
from driftlens.engine.training import FrozenWalk, JointTrainer, OnEpoch
from driftlens.settings import Bounds, Label


@calibrators.register("surgery_v2")
class SurgeryV2(Descent, JointTrainer):
    """A low-rank correction behind every block and the last layer, seen by all that follow; by the sum over boundaries
    of the mean |difference| to the expert's token means.

    Trained on calibration samples alone, for a fixed number of steps, by back-propagation through the merged model;
    the authors train on test images, and use rank 4 for ViT-L/14.

    Args:
        rank: of each correction.
        steps: of Adam, a batch each.
        batch: samples a step.
        lr: length of a step.
    """

    title = "SurgeryV2"
    source = "arXiv:2410.14389"
    effort = 3.0

    def __init__(
        self,
        rank: Annotated[int, Bounds(low=1), Label("Rank"), "of each correction"] = 16,
        steps: Annotated[int, Bounds(low=1), Label("Steps"), "of Adam, a batch each"] = 1000,
        batch: Annotated[int, Bounds(low=1), Label("Batch"), "samples a step"] = 16,
        lr: Annotated[float, Bounds(low=0, low_open=True), Label("Step length"), "of Adam"] = 1e-3,
    ) -> None:
        self.rank = rank
        self.steps = steps
        self.batch = batch
        self.lr = lr

    def boundaries(self, num_layers: int) -> Sequence[int]:
        """Behind every layer but the stem."""
        return range(2, num_layers + 1)

    def train_jointly(
        self, walk: FrozenWalk, generator: torch.Generator, on_epoch: OnEpoch
    ) -> Mapping[int, LowRank]:
        """The corrections of one task."""
        found: dict[int, LowRank] = {}
        for boundary, wanted in walk.expert.items():
            width = wanted.shape[-1]
            down = uniform(self.rank, width, generator).to(wanted).requires_grad_()
            found[boundary] = LowRank(down, wanted.new_zeros(width, self.rank).requires_grad_())

        def loss(chosen: Tensor) -> Tensor:
            pairs = walk.means(chosen, found).values()
            return torch.stack([(merged - expert).abs().mean() for merged, expert in pairs]).sum()

        leaves = [leaf for each in found.values() for leaf in (each.down, each.up)]
        self.descend(leaves, loss, len(next(iter(walk.expert.values()))), generator, on_epoch)
        return {at: LowRank(each.down.detach(), each.up.detach()) for at, each in found.items()}
