"""A tiny complete world on disk: base, experts, images, heads and specs, in the forms of both libraries.

The same float32 weights lie there twice: as open_clip state dicts of whole CLIPs, and as folders that transformers'
`CLIPVisionModelWithProjection` loads. An analysis of it takes about a second.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.zoo.small import scrambled
from tests.zoo.towers import under_transformers_names

Form = Literal["open_clip", "hf"]
Weights = dict[str, Tensor]

LOADERS: dict[Form, str] = {"open_clip": "open-clip", "hf": "hf-clip"}
TASKS = ("flowers", "shapes")
CLASSES = {"flowers": ("lily", "rose", "tulip"), "shapes": ("circle", "square", "star")}
SIZE, WIDTH, DEPTH = 16, 8, 3
NUM_TRAIN, NUM_TEST = 6, 9
SCALING = 0.3
LOGIT_SCALE = 10.0
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)

MODEL: dict[str, Any] = {
    "embed_dim": WIDTH,
    "quick_gelu": True,
    "vision_cfg": {"image_size": SIZE, "patch_size": 4, "width": 16, "layers": DEPTH, "head_width": 8},
    "text_cfg": {"context_length": 8, "vocab_size": 32, "width": 8, "heads": 1, "layers": 1},
}
TRANSFORMERS: dict[str, Any] = {
    "image_size": SIZE,
    "patch_size": 4,
    "hidden_size": 16,
    "intermediate_size": 64,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 2,
    "projection_dim": WIDTH,
    "hidden_act": "quick_gelu",
}
METRICS = {"jacobian": {"samples": 2, "nodes": 4, "max_nodes": 8}}


@dataclass(frozen=True)
class World:
    """A folder that `build` filled; nothing in it is ever changed, tests write elsewhere."""

    folder: Path
    tasks: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """`base` and the tasks: what there are checkpoints of."""
        return ("base", *self.tasks)

    @property
    def models(self) -> dict[Form, str]:
        """`architecture.source` of each form."""
        return {"open_clip": str(self.folder / "model_config.json"), "hf": str(self.weights("base", "hf"))}

    def weights(self, name: str, form: Form = "open_clip") -> Path:
        """Where the base's or a task's expert's checkpoint lies."""
        place = self.folder / form / name
        return place.with_name(f"{name}.safetensors") if form == "open_clip" else place

    def state(self, name: str) -> Weights:
        """The open_clip state dict of the base or of a task's expert."""
        return load_file(self.weights(name))

    def data(self, task: str) -> Path:
        """A task's `.npz` file."""
        return self.folder / f"{task}.npz"

    def spec(self, form: Form = "open_clip", **changes: Any) -> dict[str, Any]:
        """A whole spec; a change to None takes a section out."""
        spec: dict[str, Any] = {
            "version": 1,
            "name": f"tiny {form}",
            "architecture": {
                "loader": LOADERS[form],
                "source": self.models[form],
            },
            "base": {"weights": str(self.weights("base", form))},
            "merge": {"method": "task_arithmetic", "scaling": SCALING},
            "experts": {task: {"weights": str(self.weights(task, form))} for task in self.tasks},
            "heads": {task: self.head(task) for task in self.tasks},
            "data": {
                "defaults": {"n": 4, "n_diagnosis": 5, "batch_size": 3},
                **{task: {"kind": "npz", "file": str(self.data(task))} for task in self.tasks},
            },
            "metrics": METRICS,
            "compute": {"device": "cpu"},
        }
        spec.update(changes)
        return {key: value for key, value in spec.items() if value is not None}

    def head(self, task: str) -> dict[str, Any]:
        """A task's entry under `heads`."""
        return {"file": str(self.folder / "heads.safetensors"), "tensor": task, "logit_scale": LOGIT_SCALE}

    def one_task(self, form: Form = "open_clip", **changes: Any) -> dict[str, Any]:
        """A spec of the first task alone."""
        return World(self.folder, self.tasks[:1]).spec(form, **changes)


def build(folder: Path, tasks: Sequence[str] = TASKS, noise: float = 0.03) -> World:
    """Write a world into `folder`: every expert is the base moved by its own noise."""
    import open_clip

    world = World(folder, tuple(tasks))
    base = scrambled(lambda: open_clip.CLIP(**MODEL)).state_dict()
    preprocessing = {"mean": MEAN, "std": STD, "interpolation": "bicubic"}
    for place in (folder / "open_clip", folder / "hf"):
        place.mkdir(parents=True)
    (folder / "model_config.json").write_text(json.dumps({"model_cfg": MODEL, "preprocess_cfg": preprocessing}))
    for seed, name in enumerate(world.names):
        weights = moved(base, noise if seed else 0.0, seed)
        save_file(weights, world.weights(name))
        save_transformers(weights, world.weights(name, "hf"))
    for seed, task in enumerate(world.tasks):
        write_images(world.data(task), CLASSES.get(task, CLASSES["flowers"]), seed)
    save_file({task: _embeddings(seed) for seed, task in enumerate(world.tasks)}, folder / "heads.safetensors")
    return world


def moved(weights: Mapping[str, Tensor], noise: float, seed: int) -> Weights:
    """The image tower's parameters shifted by noise, the rest as it is."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (tensor + noise * torch.randn(tensor.shape, generator=generator)).contiguous()
        if name.startswith("visual.")
        else tensor.contiguous()
        for name, tensor in weights.items()
    }


def merged_weights(world: World, scaling: float = SCALING) -> Weights:
    """base + scaling * sum of task vectors, tensor by tensor in float64 and rounded once."""
    base, experts = world.state("base"), [world.state(task) for task in world.tasks]
    return {
        name: (start.double() + scaling * sum(expert[name].double() - start.double() for expert in experts)).to(
            start.dtype
        )
        for name, start in base.items()
    }


def tower(weights: Mapping[str, Tensor]) -> Weights:
    """The image tower of an open_clip state dict, by its own names."""
    return {name.removeprefix("visual."): value for name, value in weights.items() if name.startswith("visual.")}


def clip(weights: Mapping[str, Tensor]) -> nn.Module:
    """open_clip's own module with these weights."""
    import open_clip

    module = open_clip.CLIP(**MODEL)
    module.load_state_dict(weights, strict=True)
    return module.eval()


def save_transformers(weights: Mapping[str, Tensor], folder: Path) -> None:
    """The image tower of an open_clip state dict as a folder of transformers, written by that library."""
    import transformers

    module = transformers.CLIPVisionModelWithProjection(transformers.CLIPVisionConfig(**TRANSFORMERS))
    module.load_state_dict(under_transformers_names(tower(weights)), strict=True)
    module.save_pretrained(folder)
    settings = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": SIZE},
        "crop_size": {"height": SIZE, "width": SIZE},
        "image_mean": MEAN,
        "image_std": STD,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))


def write_images(
    file: Path,
    classes: Sequence[str],
    seed: int = 0,
    *,
    train: int = NUM_TRAIN,
    test: int = NUM_TEST,
    size: int = SIZE,
) -> None:
    """An `.npz` of random images of which every class has some."""
    rng = np.random.default_rng(seed)

    def images(count: int) -> np.ndarray[Any, Any]:
        return rng.integers(0, 256, (count, size, size, 3), dtype=np.uint8)

    np.savez(
        file,
        x_train=images(train),
        y_train=np.arange(train) % len(classes),
        x_test=images(test),
        y_test=np.arange(test) % len(classes),
        class_names=np.array(classes),
    )


def pixels(file: Path, ids: Sequence[str]) -> Tensor:
    """Normalised pixels [n, 3, h, w] of samples by id; the images have the tower's size, so nothing is resized."""
    with np.load(file) as arrays:
        images = np.stack([arrays[f"x_{part}"][int(row)] for part, row in (name.split("/") for name in ids)])
    scaled = torch.from_numpy(images).double().permute(0, 3, 1, 2) / 255
    return (scaled - torch.tensor(MEAN).double().view(3, 1, 1)) / torch.tensor(STD).double().view(3, 1, 1)


def labels(file: Path, ids: Sequence[str]) -> list[str]:
    """Class names of samples by id."""
    with np.load(file) as arrays:
        return [
            str(arrays["class_names"][arrays[f"y_{part}"][int(row)]])
            for part, row in (name.split("/") for name in ids)
        ]


def write_spec(path: Path, spec: Mapping[str, Any]) -> Path:
    """The spec as a YAML file."""
    path.write_text(yaml.safe_dump(dict(spec), sort_keys=False, allow_unicode=True), encoding="utf-8")
    return path


def _embeddings(seed: int) -> Tensor:
    return F.normalize(torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 + seed)), dim=1)
