"""Trained calibrators run on small models, and samples for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from driftlens.data.samples import Batch
from driftlens.engine.training import (
    JointTrainer,
    LayerTrainer,
    WeightTrainer,
    train_attachments,
    train_weights,
)
from tests.calibration.helpers import TASKS, Subject


@dataclasses.dataclass(frozen=True)
class Samples:
    """All samples of a task, in batches of two."""

    models: Subject

    @property
    def ids(self) -> list[str]:
        return [str(at) for at in range(self.models.n)]

    def batches(self) -> list[Batch]:
        return self.models.batches(2)


def quiet(epoch: int, total: int, loss: float) -> None:
    assert epoch <= total and torch.tensor(loss).isfinite()


def parts(models: Subject) -> dict[str, list[Samples]]:
    return {task: [Samples(models)] for task in TASKS}


def trained(
    models: Subject, method: LayerTrainer | JointTrainer, **options: Any
) -> dict[tuple[str, int], Any]:
    """What is attached, by task and boundary."""
    given = {"on_step": lambda *_: None, "on_epoch": quiet} | options
    found = train_attachments(models.pool, parts(models), method, **given)
    return {(task, boundary): each for task, boundary, each in found}


def learnt(models: Subject, method: WeightTrainer, **options: Any) -> dict[int, dict[str, Tensor]]:
    """New parameters, by layer and name."""
    given = {"on_step": lambda *_: None, "on_epoch": quiet} | options
    return train_weights(models.pool, parts(models), method, **given)


class Memory:
    """Keeps tensors for as long as it lives, and says stop after so many times that something was kept."""

    def __init__(self, stops_after: int = -1) -> None:
        self.kept: dict[str, dict[str, Tensor]] = {}
        self.left = stops_after

    def read(self, name: str) -> dict[str, Tensor]:
        return {key: value.clone() for key, value in self.kept.get(name, {}).items()}

    def write(self, name: str, tensors: Any) -> None:
        self.kept[name] = {key: value.detach().clone() for key, value in tensors.items()}
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


def final_features(module: nn.Module, inputs: Any) -> Tensor:
    """What the library's own forward pass gives, rows of tokens that count where there are tokens."""
    if isinstance(inputs, Tensor):
        found = module(inputs)
        return getattr(found, "image_embeds", found)
    hidden = module.model(**inputs).last_hidden_state
    return hidden[inputs["attention_mask"].bool()]


def attention_edited(edit: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """A forward hook of an attention: its output, which comes with others, changed."""
    return lambda _module, _args, output: (edit(output[0]), *output[1:])
