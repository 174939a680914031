"""IntervMerge: a low-rank edit of the class token behind every block's attention, trained by the final feature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from driftlens.base.devices import moved
from driftlens.base.settings import Bounds, Label
from driftlens.calibration.calibrator import Trained, calibrators
from driftlens.calibration.descent import Batch, Descent, StepLength, Steps, uniform
from driftlens.engine.training import Course, FrozenWalk, JointTrainer


@dataclass(frozen=True)
class Edit:
    """h + W2' ((W1 h + b1) - (W2 h + b2)) of the output of one site, before it is added to the stream.

    W1 and W2 are `source` and `project`, [r, d], with their biases [r]. With `first`, h is the first token alone, the
    class token; else it is every token.
    """

    source: Tensor
    source_bias: Tensor
    project: Tensor
    project_bias: Tensor
    first: bool
    site: str

    @property
    def code(self) -> str:
        """What this is, in Python."""
        edit = (
            'h + (h @ (t["source"] - t["project"]).T + t["source_bias"] - t["project_bias"]) @ t["project"]'
        )
        return f"h = f[:, :1]\nf = torch.cat([{edit}, f[:, 1:]], 1)" if self.first else f"h = f\nf = {edit}"

    def __call__(self, stream: Tensor) -> Tensor:
        """The edited output, of the same shape."""
        h = stream[:, :1] if self.first else stream
        source, source_bias, project, project_bias = (
            each.to(h) for each in (self.source, self.source_bias, self.project, self.project_bias)
        )
        h = h + (F.linear(h, source, source_bias) - F.linear(h, project, project_bias)) @ project
        return torch.cat([h, stream[:, 1:]], dim=1) if self.first else h

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], site: str, *, first: bool) -> Edit:
        """The edit of these parts."""
        source, source_bias, project, project_bias = (tensors[name] for name in _PARTS)
        return cls(source, source_bias, project, project_bias, first, site)

    def parts(self) -> tuple[Tensor, ...]:
        """What is trained."""
        return self.source, self.source_bias, self.project, self.project_bias

    def tensors(self) -> Mapping[str, Tensor]:
        """What is saved; one more says that the first token alone is edited."""
        parts = dict(zip(_PARTS, self.parts(), strict=True))
        return {**parts, "first": torch.ones(())} if self.first else parts


_PARTS = ("source", "source_bias", "project", "project_bias")


@calibrators.register("interv_merge")
class IntervMerge(Descent, Trained, JointTrainer):
    """An edit of what attention gives the class token in every block, by the mean |difference| to the expert's final
    feature.

    Maps start as `nn.Linear` does, so that training does not start at the merged model. Trained on calibration samples
    alone, for a fixed number of steps, by back-propagation through the merged model; the authors train on test images.
    Models without a class token have no published way: there every token is edited, and the final features of all
    tokens are compared. Attention's output is that of the first module which is added to what entered the block.
    """

    title = "IntervMerge"
    source = "arXiv:2412.17023"
    effort = 90.0  # 1.1 times SurgeryV2, measured in one run: four tasks of real images, 30 steps each
    of_tokens = True
    in_sites = True

    def __init__(
        self,
        rank: Annotated[int, Bounds(low=1), Label("Rank"), "of each edit"] = 1,
        steps: Steps = 1000,
        batch: Batch = 16,
        lr: StepLength = 1e-3,
    ) -> None:
        super().__init__(steps, batch, lr)
        self.rank = rank

    def boundaries(self, num_layers: int) -> Sequence[int]:
        """In every block."""
        return range(2, num_layers)

    def targets(self, num_layers: int) -> Sequence[int]:
        """The final feature."""
        return (num_layers,)

    def train_jointly(self, walk: FrozenWalk, course: Course) -> Mapping[int, Edit]:
        """The edits of one task, by the block that they are in."""
        device, dtype = walk.pool.device, walk.pool.dtype
        first = walk.pool.chain.modality.pool == "cls"
        edits: dict[int, Edit] = {}
        for boundary, (site, width) in walk.joined().items():
            weight = partial(uniform, self.rank, width, course.generator)
            bias = partial(uniform, 1, self.rank, course.generator, width)
            drawn = (weight(), bias()[0], weight(), bias()[0])
            leaves = (moved(each, device, dtype).requires_grad_() for each in drawn)
            edits[boundary] = Edit.of(dict(zip(_PARTS, leaves, strict=True)), site, first=first)

        def loss(chosen: Tensor) -> Tensor:
            [(merged, expert)] = walk.pairs(chosen, edits).values()
            return (merged - expert).abs().mean()

        self.descend([leaf for each in edits.values() for leaf in each.parts()], loss, walk.count, course)
        return {
            at: Edit.of(
                {name: leaf.detach() for name, leaf in each.tensors().items()}, each.site, first=first
            )
            for at, each in edits.items()
        }

    @classmethod
    def attachment(cls, tensors: Mapping[str, Tensor], site: str = "") -> Edit:
        """The edit that was saved."""
        return Edit.of(tensors, site, first="first" in tensors)
