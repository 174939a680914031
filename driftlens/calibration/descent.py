"""Training by Adam for a fixed number of steps, which goes on where it was stopped."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from driftlens.base.settings import Bounds, Label
from driftlens.engine.training import Course

Steps = Annotated[int, Bounds(low=1), Label("Steps"), "of Adam, a batch each"]
Batch = Annotated[int, Bounds(low=1), Label("Batch"), "samples a step"]
StepLength = Annotated[float, Bounds(low=0, low_open=True), Label("Step length"), "of Adam"]

_TOLD_EVERY = 10
KEPT_EVERY_S = 5.0
"""Seconds after which a training keeps how far it is."""


def uniform(rows: int, columns: int, generator: torch.Generator, inputs: int | None = None) -> Tensor:
    """A matrix as `nn.Linear` starts with: uniform within 1 / sqrt(columns), which is Kaiming's with a = sqrt 5.

    Its bias lies within the same bounds, which `inputs` says where that isn't `columns`.
    """
    bound = 1 / math.sqrt(columns if inputs is None else inputs)
    return (2 * torch.rand(rows, columns, generator=generator) - 1) * bound


class Descent:
    """What is trained by Adam for a fixed number of steps."""

    repeats: ClassVar[str] = "steps"

    def __init__(self, steps: int, batch: int, lr: float) -> None:
        self.steps = steps
        self.batch = batch
        self.lr = lr

    def descend(
        self, parameters: Sequence[Tensor], loss_of: Callable[[Tensor], Tensor], count: int, course: Course
    ) -> None:
        """Adam over batches of samples, which are drawn without replacement until all were had.

        There is no validation and no choice among steps: where it stops is fixed beforehand. One that was stopped
        itself goes on with what it has kept last, to equal numbers. `parameters` are leaves, changed in place;
        `loss_of` makes the loss of positions among the `count` samples.
        """
        descent, order = torch.optim.Adam(parameters, lr=self.lr), torch.empty(0, dtype=torch.long)
        begun, kept_at = 0, time.monotonic()
        if kept := course.kept():
            begun, order = _taken_up(kept, parameters, descent, course.generator)
        for step in range(begun + 1, self.steps + 1):
            if not len(order):
                order = torch.randperm(count, generator=course.generator)
            chosen, order = order[: self.batch], order[self.batch :]
            loss = loss_of(chosen)
            descent.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            descent.step()
            if time.monotonic() - kept_at >= KEPT_EVERY_S or step == self.steps:
                course.keep(_state(step, order, parameters, descent, course.generator))
                kept_at = time.monotonic()
            if step % _TOLD_EVERY == 0 or step == self.steps:
                course.told(step, self.steps, float(loss.detach()))


_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""What Adam remembers of a parameter."""


def _state(
    step: int,
    order: Tensor,
    parameters: Sequence[Tensor],
    descent: torch.optim.Adam,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """All that a descent goes on from; of parameters that no gradient has reached, Adam remembers nothing."""
    state = {"at": torch.tensor(step), "order": order, "generator": generator.get_state()}
    for at, parameter in enumerate(parameters):
        state[f"parameter.{at}"] = parameter.detach()
        state |= {f"{name}.{at}": value for name, value in descent.state[parameter].items()}
    return state


@torch.no_grad()
def _taken_up(
    kept: Mapping[str, Tensor],
    parameters: Sequence[Tensor],
    descent: torch.optim.Adam,
    generator: torch.Generator,
) -> tuple[int, Tensor]:
    """The step after which it goes on, and what is left of the samples' order; the rest is put in its place."""
    for at, parameter in enumerate(parameters):
        parameter.copy_(kept[f"parameter.{at}"])
        if f"step.{at}" in kept:
            moments = {name: kept[f"{name}.{at}"] for name in _MOMENTS}
            descent.state[parameter] = moments | {name: moments[name].to(parameter) for name in _MOMENTS[1:]}
    generator.set_state(kept["generator"])
    return int(kept["at"]), kept["order"]
