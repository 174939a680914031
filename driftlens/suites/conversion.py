"""A task-vector suite as it is passed around (`zeroshot.pt`, `TASK/finetuned.pt`, `head_TASK.pt`) as safetensors.

The files are pickled `ImageEncoder` and `ClassificationHead` objects of code that need not be there: they are read by
`driftlens.checkpoints.pickles`, which runs nothing. Written are the image towers under open_clip's names, the heads as
class embeddings of unit norm, the architecture as the weights tell it, and a spec to start from.
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from driftlens.base.errors import CheckpointError, IncompatibleModelsError, RunError, SpecError
from driftlens.base.files import atomic_folder, write_json_atomic, write_text_atomic
from driftlens.checkpoints.pickles import Inert
from driftlens.checkpoints.sources import StateSource, renamed
from driftlens.checkpoints.weight_files import Pickled, open_pickled
from driftlens.models.families.open_clip_vit import CONFIG_FILE, LAYOUT
from driftlens.models.saving import Patched, save_state_dict
from driftlens.runs.layout import escape
from driftlens.spec.published import find_published, published_task
from driftlens.spec.yaml_text import to_yaml

_BASES = ("zeroshot.pt", "nonlinear_zeroshot.pt")
_EXPERTS = ("finetuned.pt", "nonlinear_finetuned.pt")
_TAKEN = ("base", "heads")
_ONE_NORM = 1e-3
"""How far apart the norms of a zero-shot head's rows may be, relative; float16 rounds by less."""
_FORM = "Expected zeroshot.pt, one folder per task with finetuned.pt, and head_TASK.pt."


def convert(
    source: pathlib.Path, out: pathlib.Path | None = None, *, tell: Callable[[str], None] = lambda line: None
) -> pathlib.Path:
    """Write the tensors of pickled checkpoints as safetensors, without running anything in them."""
    if source.is_dir():
        source = source.resolve() if source.name == ".." else source
        target = out or source.absolute().with_name(f"{source.absolute().name}-safetensors")
        _convert_suite(_Suite.found(source), target, tell)
        return target
    if not source.exists():
        raise CheckpointError(f"there is no file or folder {source}", hint="Check the path.")
    target = out or source.with_suffix(".safetensors")
    if target.exists():
        raise RunError(f"{target} exists already", hint="Choose another --out, or remove it first.")
    if target.suffix.lower() != ".safetensors":
        raise SpecError(
            f"--out {target} has to end in .safetensors, as {source} is one file",
            hint=f"Give --out {target}.safetensors, or the folder of a suite instead of {source}.",
        )
    weights = open_pickled(source)
    save_state_dict(target, Patched(weights, {}))
    tell(f"{target.name}: {len(weights.headers)} tensors")
    return target


@dataclass(frozen=True)
class _Suite:
    folder: pathlib.Path
    base: pathlib.Path
    experts: Mapping[str, pathlib.Path]
    heads: Mapping[str, pathlib.Path]

    @classmethod
    def found(cls, folder: pathlib.Path) -> _Suite:
        """The files of a suite, by task; the tasks of suites with validation splits (`CarsVal`) lose their ending."""
        experts = _experts(folder)
        places = [folder, *(path.parent for path in experts.values())]
        base = _first_file(place / name for place in places for name in _BASES)
        if base is None or not experts:
            within = [str(path.parent) for name in _BASES for path in sorted(folder.glob(f"*/{name}"))]
            raise CheckpointError(
                f"{folder} holds no task-vector suite: no {'fine-tuned model' if base else 'zeroshot.pt'}",
                hint=f"Give one of {', '.join(within[:6])}." if within else _FORM,
            )
        # Where there are both, the one of the validation split counts.
        heads = {
            task: file
            for task in experts
            if (file := _first_file(folder / f"head_{task}{end}.pt" for end in ("Val", "")))
        }
        return cls(folder, base, experts, heads)


def _experts(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    found: dict[str, pathlib.Path] = {}
    for place in sorted(entry for entry in folder.iterdir() if entry.is_dir()):
        path, task = (
            _first_file(place / name for name in _EXPERTS),
            place.name.removesuffix("Val") or place.name,
        )
        if path is None:
            continue
        taken = {*_TAKEN, *(escape(known).casefold() for known in found)}
        if not task.isprintable() or escape(task).casefold() in taken:
            raise CheckpointError(
                f"{str(place)!r}: the name {task!r} is taken by another file, or is no name of a task",
                hint="Rename the folder.",
            )
        found[task] = path
    return found


def _first_file(paths: Iterable[pathlib.Path]) -> pathlib.Path | None:
    return next((path for path in paths if path.is_file()), None)


def _convert_suite(suite: _Suite, out: pathlib.Path, tell: Callable[[str], None]) -> None:
    notices: list[str] = []
    base = open_pickled(suite.base)
    names = _names(base, whole=None)
    is_whole = any(not name.startswith(LAYOUT.tower) for name in names)
    if not is_whole and len(names) < len(base.headers):
        notices.append(f"{suite.base.name} has no whole text tower, so only image towers are written")
    with atomic_folder(out) as folder:
        save_state_dict(folder / "base.safetensors", Patched(renamed(base, names), {}))
        tell(f"base.safetensors: {len(names)} tensors, from {suite.base.relative_to(suite.folder)}")
        for task, path in suite.experts.items():
            expert = open_pickled(path)
            mapping = _names(expert, whole=is_whole)
            save_state_dict(folder / f"{escape(task)}.safetensors", Patched(renamed(expert, mapping), {}))
            tell(f"{escape(task)}.safetensors: {len(mapping)} tensors, from {path.relative_to(suite.folder)}")
        write_json_atomic(folder / CONFIG_FILE, _configuration(base, names, notices))
        heads = {task: _Head.read(task, path, notices) for task, path in suite.heads.items()}
        tensors = {key: value for head in heads.values() for key, value in head.tensors.items()}
        if tensors:
            save_state_dict(folder / "heads.safetensors", tensors)
            tell(f"heads.safetensors: {', '.join(heads)}")
        write_text_atomic(folder / "run.yaml", _spec(suite, heads))
    bare = sorted(suite.experts.keys() - heads.keys())
    notices += [f"{task} has no head_{task}.pt, so its accuracy isn't measured" for task in bare]
    for text in notices:
        tell(f"notice: {text}")


def _names(source: StateSource, *, whole: bool | None) -> dict[str, str]:
    """open_clip's key of each tensor kept -> key in the file; `whole`: with text towers, None: where complete."""
    prefix = LAYOUT.prefix(source.headers, source.name)
    wrapper = prefix.removesuffix(LAYOUT.tower)
    names = {key.removeprefix(wrapper): key for key in source.headers if key.startswith(wrapper)}
    if wrapper == prefix:  # a tower alone
        return {f"{LAYOUT.tower}{name}": key for name, key in names.items()}
    if whole if whole is not None else any(".resblocks." in name for name in names if "visual." not in name):
        return names
    return {name: key for name, key in names.items() if name.startswith(LAYOUT.tower)}


# --- the architecture, as weights and modules tell it


def _configuration(base: Pickled, names: Mapping[str, str], notices: list[str]) -> dict[str, Any]:
    shapes = {name: base.headers[key].shape for name, key in names.items()}
    blocks = "visual.transformer.resblocks"
    width, _, patch, _ = _shape(base, shapes, "visual.conv1.weight", 4)
    _, embedding = _shape(base, shapes, "visual.proj", 2)
    hidden, _ = _shape(base, shapes, f"{blocks}.0.mlp.c_fc.weight", 2)
    positions, _ = _shape(base, shapes, "visual.positional_embedding", 2)
    prefix = names[f"visual.{LAYOUT.anchor}"].removesuffix(LAYOUT.anchor)
    wrapper = prefix.removesuffix(LAYOUT.tower)
    # What is left of a text tower that was deleted still tells its size.
    beside = {key.removeprefix(wrapper): base.headers[key].shape for key in base.headers if wrapper != prefix}
    beside = {"positional_embedding": (77, 512), "token_embedding.weight": (49408, 512), **beside}
    context, text_width = _shape(base, beside, "positional_embedding", 2)
    vocabulary, _ = _shape(base, beside, "token_embedding.weight", 2)
    gelu = base.modules.get(f"{prefix}transformer.resblocks.0.mlp.gelu")
    if gelu is None:
        notices.append(
            f"{base.name} doesn't tell the activation; OpenAI's QuickGELU is assumed (quick_gelu in {CONFIG_FILE})"
        )
    text = {
        "context_length": context,
        "vocab_size": vocabulary,
        "width": text_width,
        "heads": _heads(base, f"{wrapper}transformer.resblocks.0.attn", text_width),
        "layers": _depth(shapes, "transformer.resblocks") or 12,
    }
    model = {
        "embed_dim": embedding,
        "quick_gelu": gelu is None or gelu.kind.endswith("QuickGELU"),
        "vision_cfg": {
            "image_size": math.isqrt(positions - 1) * patch,
            "patch_size": patch,
            "width": width,
            "layers": _depth(shapes, blocks),
            "head_width": width // _heads(base, f"{prefix}transformer.resblocks.0.attn", width),
            "mlp_ratio": hidden / width,
        },
        "text_cfg": text,
    }
    normalised = _normalisation(base, notices)
    return {"model_cfg": model, **({"preprocess_cfg": normalised} if normalised else {})}


def _shape(base: Pickled, shapes: Mapping[str, tuple[int, ...]], key: str, axes: int) -> tuple[int, ...]:
    """The shape of a tensor that tells something of the architecture, with so many axes, none of them empty."""
    shape = shapes.get(key, ())
    if len(shape) != axes or 0 in shape:
        found = f"{key!r} of shape {list(shape)}" if key in shapes else f"no {key!r}"
        raise IncompatibleModelsError(
            f"{base.name} has {found}: it is no vision transformer of open_clip's own",
            hint="Convert its files one by one, and write the spec by hand.",
        )
    return shape


def _depth(shapes: Mapping[str, tuple[int, ...]], blocks: str) -> int:
    return len(
        {name.removeprefix(f"{blocks}.").split(".")[0] for name in shapes if name.startswith(f"{blocks}.")}
    )


def _heads(base: Pickled, path: str, width: int) -> int:
    attention = base.modules.get(path)
    told = attention.attribute("num_heads") if attention is not None else None
    return told if type(told) is int and told > 0 and width % told == 0 else max(1, width // 64)


def _normalisation(base: Pickled, notices: list[str]) -> dict[str, Any]:
    """Mean and standard deviation of pixels, where the pickled encoder still has its preprocessing."""
    top = base.top
    steps = top.attribute("val_preprocess") if isinstance(top, Inert) else None
    steps = steps.attribute("transforms") if isinstance(steps, Inert) else None
    for step in steps if isinstance(steps, list) else ():
        if isinstance(step, Inert) and step.kind.endswith(".Normalize"):
            found = {name: step.attribute(name) for name in ("mean", "std")}
            if all(_are_numbers(value) for value in found.values()):
                return {name: [float(number) for number in value] for name, value in found.items()}
            notices.append(
                f"{base.name} has a Normalize whose mean and std aren't three plain numbers each; "
                f"OpenAI's are assumed (preprocess_cfg in {CONFIG_FILE})"
            )
    return {}


def _are_numbers(value: Any) -> bool:
    """Whether it is three numbers, as far as pixels go; NumPy's stay inert, and NaN is none."""
    return (
        isinstance(value, list | tuple)
        and len(value) == 3
        and all(type(number) in (int, float) and abs(number) < 1e6 for number in value)
    )


# --- heads


@dataclass(frozen=True)
class _Head:
    """A task's head: the tensors to write, and its entry in the spec."""

    tensors: Mapping[str, Tensor]
    entry: Mapping[str, Any]

    @classmethod
    def read(cls, task: str, path: pathlib.Path, notices: list[str]) -> _Head:
        """A `ClassificationHead`: unit rows and a scale where that is what it is, else as it is, with a notice."""
        source = open_pickled(path)
        if "weight" not in source.headers or len(source.headers["weight"].shape) != 2:
            raise CheckpointError(
                f"{path} holds no matrix called weight", hint="Expected a pickled ClassificationHead."
            )
        weight = source.read("weight").double()
        bias = source.read("bias").double() if "bias" in source.headers else torch.zeros(len(weight))
        normalises = source.top.attribute("normalize") if isinstance(source.top, Inert) else None
        norms = torch.linalg.vector_norm(weight, dim=1)
        scale = float(f"{norms.mean().item():.6g}")
        if not 0 < scale < math.inf or bias.shape != norms.shape or not bias.isfinite().all():
            raise CheckpointError(
                f"{path} is no head: its weight {list(weight.shape)} is empty, zero or not finite, "
                f"or its bias {list(bias.shape)} isn't a finite number per row",
                hint="Expected a pickled ClassificationHead; save it again.",
            )
        one_norm = bool((norms - scale).abs().max() <= _ONE_NORM * scale)
        rows = _suite_of(task, len(weight), notices)
        if one_norm and not bias.any() and normalises is not False:
            entry = {"file": "heads.safetensors", "tensor": task, "logit_scale": scale, **rows}
            return cls({task: (weight / scale).float()}, entry)
        why = "rows of several norms, or a bias" if normalises is not False else "features as they are"
        notices.append(f"the head of {task} is no zero-shot head ({why}); it is kept as a linear classifier")
        linear = {"linear": "heads.safetensors", "weight": f"{task}.weight", "bias": f"{task}.bias"}
        tensors = {linear["weight"]: weight.float(), linear["bias"]: bias.float()}
        return cls(tensors, {**linear, "normalize": bool(normalises), **rows})


def _suite_of(task: str, rows: int, notices: list[str]) -> dict[str, str]:
    """The published task that names the rows, if there is one with as many classes."""
    name = find_published(task)
    if name is not None and len(published_task(name).classes) == rows:
        return {"suite": name}
    notices.append(
        f"nothing names the {rows} rows of the head of {task}: add heads.{task}.classes to run.yaml"
    )
    return {}


# --- the spec


def _spec(suite: _Suite, heads: Mapping[str, _Head]) -> str:
    entries = {task: dict(head.entry) for task, head in heads.items()}
    spec = {
        "version": 1,
        "name": suite.folder.absolute().name,
        "architecture": {"loader": "open-clip", "source": CONFIG_FILE},
        "base": {"weights": "base.safetensors"},
        "merge": {"method": "task_arithmetic", "scaling": 0.3},
        "experts": {task: {"weights": f"{escape(task)}.safetensors"} for task in suite.experts},
        **({"heads": entries} if entries else {}),
        "data": {
            task: {
                "kind": "imagefolder",
                "calibration": f"data/{escape(task)}/train",
                "test": f"data/{escape(task)}/test",
            }
            for task in suite.experts
        },
        "calibration": {"preset": "paper-clip"},
    }
    return f"{_HEADER}{to_yaml(spec)}{_on_the_hub(suite)}"


_HEADER = """# Made by `driftlens convert`. Put the paths of the images under `data`, then:
#   driftlens validate run.yaml
#   driftlens analyze run.yaml --out runs/converted
"""


def _on_the_hub(suite: _Suite) -> str:
    known = {task: name for task in suite.experts if (name := find_published(task)) is not None}
    entries = {task: {"kind": "hf", **published_task(name).data} for task, name in known.items()}
    lines = [f"#   {json.dumps(task)}: {json.dumps(entry)}\n" for task, entry in entries.items()]
    return "".join(["\n# Copies on the Hugging Face Hub, for `data`:\n", *lines]) if lines else ""
