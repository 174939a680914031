"""The pictures of the tasks: drawn, saved, and turned into what an image tower takes."""

from __future__ import annotations

import pathlib
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from driftlens.suites.drawing.canvas import Pixels
from driftlens.suites.drawing.task import PURPOSES, DrawnTask, Purpose


@dataclass(frozen=True)
class Pictures:
    """Pictures [n, h, w, 3], uint8, with their labels [n]."""

    images: Pixels
    labels: NDArray[np.int64]

    def pixels(self) -> Tensor:
        """What an image tower takes: [n, 3, h, w], float32, normalised as CLIP's images are."""
        from open_clip import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD

        mean, std = torch.tensor(OPENAI_DATASET_MEAN), torch.tensor(OPENAI_DATASET_STD)
        scaled = (torch.from_numpy(self.images).float() / 255 - mean) / std
        return scaled.permute(0, 3, 1, 2).contiguous()

    def save(self, folder: pathlib.Path, task: str, purpose: Purpose) -> None:
        """Write them where `TaskPictures.load` finds them."""
        np.savez(folder / f"{task}-{purpose}.npz", images=self.images, labels=self.labels)


@dataclass(frozen=True)
class TaskPictures:
    """All pictures of one task. The base has pictures of its own, so that the train ones are new to it."""

    task: DrawnTask
    base: Pictures
    train: Pictures
    test: Pictures

    @classmethod
    def load(cls, task: DrawnTask, folder: pathlib.Path) -> TaskPictures:
        """Those that `Pictures.save` wrote, for every purpose."""
        found = {}
        for purpose in PURPOSES:
            with np.load(folder / f"{task.name}-{purpose}.npz") as file:
                found[purpose] = Pictures(**file)
        return cls(task, **found)

    def save(self, path: pathlib.Path) -> None:
        """Write train and test pictures as the `.npz` file that data sources of kind `npz` read."""
        np.savez_compressed(
            path,
            x_train=self.train.images,
            y_train=self.train.labels,
            x_test=self.test.images,
            y_test=self.test.labels,
            class_names=np.array(self.task.class_names),
        )


def draw(task: DrawnTask, purpose: Purpose, count: int, seed: int) -> Pictures:
    """`count` pictures of one task for one purpose; the same for the same seed."""
    images, labels = zip(*task.pictures(purpose, count, seed), strict=True)
    return Pictures(np.stack(images), np.array(labels))
