"""Every way in which the tests spoil a tiny spec, each with the words that the refusal must hold."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from tests.zoo.world import CLASSES, TASKS, World, write_images

Spec = dict[str, Any]
TASK = TASKS[0]
KEY = "visual.transformer.resblocks.1.mlp.c_fc.weight"


@dataclass
class Bench:
    """A tiny spec that a case spoils, in a folder of its own."""

    world: World
    folder: pathlib.Path
    spec: Spec = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.spec = self.world.one_task(metrics={"jacobian": False})

    def expert(self, path: pathlib.Path) -> str:
        """Make `path` the expert; returns its name."""
        self.spec["experts"] = {TASK: {"weights": str(path)}}
        return path.name

    def changed_expert(self, **tensors: torch.Tensor | None) -> str:
        """The expert with some tensors replaced, added or (None) taken out."""
        state = self.world.state(TASK) | {name: value for name, value in tensors.items() if value is not None}
        path = self.folder / "changed.safetensors"
        save_file(
            {name: value for name, value in state.items() if tensors.get(name, value) is not None}, path
        )
        return self.expert(path)

    def images(self) -> pathlib.Path:
        """Image folders in the place of the arrays, two images per class; returns the test split's folder."""
        for split in ("train", "test"):
            for name in CLASSES[TASK]:
                place = self.folder / split / name
                place.mkdir(parents=True)
                for row in range(2):
                    pixels = np.full((16, 16, 3), 40 * row, np.uint8)
                    Image.fromarray(pixels).save(place / f"{row}.png")
        entry = {
            "kind": "imagefolder",
            "calibration": str(self.folder / "train"),
            "test": str(self.folder / "test"),
        }
        self.spec["data"] = {"defaults": {"n": 4, "n_diagnosis": 4, "batch_size": 3}, TASK: entry}
        return self.folder / "test"

    def arrays(self, classes: tuple[str, ...] = CLASSES[TASK], **counts: int) -> pathlib.Path:
        """An `.npz` file of one's own in the place of the world's."""
        file = self.folder / "images.npz"
        write_images(file, classes, **counts)
        self.spec["data"][TASK] = {"kind": "npz", "file": str(file)}
        return file


def missing_file(bench: Bench) -> list[str]:
    return [bench.expert(bench.folder / "nowhere.safetensors"), "relative paths"]


def truncated(bench: Bench) -> list[str]:
    path = bench.folder / "cut.safetensors"
    path.write_bytes(bench.world.weights(TASK).read_bytes()[:-1000])
    return [bench.expert(path), "Copy or download it again"]


def wider(bench: Bench) -> list[str]:
    name = bench.changed_expert(**{KEY: torch.zeros(80, 16)})
    return [name, KEY.removeprefix("visual."), "[80, 16]", "[64, 16]", "another model size"]


def deeper(bench: Bench) -> list[str]:
    extra = {
        name.replace(".1.", ".3."): value
        for name, value in bench.world.state(TASK).items()
        if "blocks.1." in name
    }
    return [bench.changed_expert(**extra), "resblocks.3.", "one architecture"]


def missing_key(bench: Bench) -> list[str]:
    return [bench.changed_expert(**{KEY: None}), "lacks", KEY.removeprefix("visual.")]


def nan_weight(bench: Bench) -> list[str]:
    weight = bench.world.state(TASK)[KEY]
    weight[0, 0] = torch.nan
    return [bench.changed_expert(**{KEY: weight}), "1 NaN", KEY.removeprefix("visual."), "save it again"]


def infinite_features(bench: Bench) -> list[str]:
    huge = {KEY: torch.full((64, 16), 1e30), KEY.replace("c_fc", "c_proj"): torch.full((16, 64), 1e30)}
    bench.changed_expert(**huge)
    return [f"expert:{TASK}", "layer 3 (transformer.resblocks.1)", TASK, "sample 'test/"]


def unreadable_image(bench: Bench) -> list[str]:
    path = bench.images() / "rose" / "1.png"
    path.write_bytes(b"\x89PNG not really")
    return [str(path), "can't be read", "Replace the file"]


def other_classes(bench: Bench) -> list[str]:
    bench.spec["heads"] = {TASK: {**bench.world.head(TASK), "classes": ["Lily", "rose", "tulip"]}}
    return [f"task {TASK}", "only in data: 'lily'", "only in head: 'Lily'", "'lily' looks like 'Lily'"]


def no_such_layer(bench: Bench) -> list[str]:
    bench.spec["layers"] = {"select": "visual.transformer.resblocks.9"}
    return ["resblocks.9", "the nearest are transformer.resblocks."]


def unknown_key(bench: Bench) -> list[str]:
    bench.spec["experst"] = bench.spec.pop("experts")
    return ["experst", "unknown key", "Did you mean 'experts'?"]


def no_data(bench: Bench) -> list[str]:
    del bench.spec["data"][TASK]
    return [f"no data for {TASK}", f"Add data.{TASK}"]


def no_such_method(bench: Bench) -> list[str]:
    bench.spec["merge"] = {"method": "task_aritmetic"}
    return ["task_aritmetic", "Did you mean 'task_arithmetic'?"]


def no_gpu(bench: Bench) -> list[str]:
    bench.spec["compute"] = {"device": "cuda"}
    return ["no device 'cuda'", "Use `auto` or `cpu`"]


CASES: dict[Callable[[Bench], list[str]], int] = {
    **dict.fromkeys((missing_file, truncated, wider, deeper, missing_key, nan_weight), 4),
    **dict.fromkeys((infinite_features, unreadable_image, other_classes), 4),
    **dict.fromkeys((no_such_layer, unknown_key, no_data, no_such_method, no_gpu), 2),
}
"""What only opening or walking shows; every kind of file's own faults are those of tests/models and tests/data."""
