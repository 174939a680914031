"""Trained calibrators run on small models, and samples for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.calibration.helpers import Subject, ground


def quiet(epoch: int, total: int, loss: float) -> None:
    assert epoch <= total and torch.tensor(loss).isfinite()


def trained(models: Subject, method: Any, **options: Any) -> dict[tuple[str, int], Any]:
    """What is attached, by task and boundary, by training on batches of two."""
    on = ground(models, **{"parts": models.samples(2), "sites": {}, **options})
    return {(task, at.layer): each for at in method.calibrate(on) for task, each in at.attachments.items()}


def learnt(models: Subject, method: Any, **options: Any) -> dict[int, dict[str, Tensor]]:
    """New parameters, by layer and name."""
    on = ground(models, **{"parts": models.samples(2), "sites": {}, **options})
    return {at.layer: dict(at.updates) for at in method.calibrate(on)}


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
