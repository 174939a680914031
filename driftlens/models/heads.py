"""Where score maps come from: files of class embeddings, or class names read by the base's text tower."""

from __future__ import annotations

import os
import pathlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from driftlens.base.errors import CheckpointError, DataError, ShapeError, SpecError
from driftlens.base.files import from_json, plain_file
from driftlens.checkpoints.loading import library_folder, open_checkpoint, read_json
from driftlens.checkpoints.sources import StateSource, check_finite
from driftlens.checkpoints.weight_files import WEIGHT_FILES
from driftlens.models.score_maps import Head, LinearHead

ClassNames = Sequence[str] | str | os.PathLike[str]
"""Class names in the order of the rows, or the path of a JSON file that holds such a list."""

_NORM_TOLERANCE = 1e-2
"""How far from 1 a row's norm may be; rounding to float16 moves it by less than 1e-3."""


@dataclass(frozen=True)
class TextTower:
    """The text side of a base.

    Attributes:
        embed: prompts -> their embeddings [prompts, d], not normalised.
        logit_scale: factor on cosines, exp(`logit_scale`) of the checkpoint.
    """

    embed: Callable[[Sequence[str]], Tensor]
    logit_scale: float


def class_names(given: ClassNames) -> tuple[str, ...]:
    """Class names from a list, or from a JSON file that holds a list."""
    if isinstance(given, str | os.PathLike):
        given = _names_in(pathlib.Path(given))
    names = tuple(given)
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DataError(
            f"class names occur more than once: {', '.join(map(repr, twice))}",
            hint="Images meet the rows of the head by class name, so each row needs a name of its own.",
        )
    if not names:
        raise DataError("the list of class names is empty", hint="Name the rows of the head, in their order.")
    return names


def file_head(file: str | os.PathLike[str], tensor: str, logit_scale: float, classes: ClassNames) -> Head:
    """A head from precomputed class embeddings.

    Args:
        file: safetensors file.
        tensor: its key there, [classes, d], rows of unit norm.
        logit_scale: factor on the cosines.
        classes: names of the rows, in their order.

    Raises:
        CheckpointError: the file can't be read, or has no such tensor.
        DataError: rows and names differ in number, names repeat, or rows are not of unit norm.
        ShapeError: the tensor is not a matrix.
    """
    source = open_checkpoint(file)
    if tensor not in source.headers:
        raise CheckpointError(
            f"{source.name} has no tensor {tensor!r}; there are {', '.join(map(repr, source.headers))}",
            hint="Set `heads.<task>.tensor` to the key of this task's class embeddings.",
        )
    embeddings, names = source.read(tensor).float(), class_names(classes)
    where = f"{tensor!r} in {source.name}"
    if embeddings.dim() != 2:
        raise ShapeError(f"{where} has shape {list(embeddings.shape)}; expected [classes, d]")
    if len(embeddings) != len(names):
        raise DataError(
            f"{where} has {len(embeddings)} rows, but {len(names)} class names are given",
            hint="Give one name per row, in the order of the rows.",
        )
    _require_unit_norm(embeddings, names, where)
    return Head(names, embeddings, logit_scale)


def linear_head(
    source: StateSource,
    classes: ClassNames | None,
    *,
    weight: str | None = None,
    bias: str | None = None,
    normalize: bool = False,
) -> LinearHead:
    """A classifier's weight and bias.

    Args:
        source: holds them.
        classes: names of the rows, in their order; None counts them from 0.
        weight: key of the weight, [classes, d]; None takes the only matrix there is.
        bias: key of the bias; None takes the one beside the weight, if there is one.
        normalize: whether features are brought to unit norm first.

    Raises:
        CheckpointError: there is no such tensor, or no single matrix.
        DataError: rows and names differ in number, or names repeat.
        ShapeError: the weight is no matrix, or the bias does not fit it.
        NumericsError: it is NaN or infinite somewhere.
    """
    matrices = [key for key, header in source.headers.items() if len(header.shape) == 2]
    if weight is None and len(matrices) != 1:
        raise CheckpointError(
            f"{source.name} holds {len(matrices)} matrices; a classifier has one weight",
            hint=f"Name it: heads.<task>.weight, one of {', '.join(matrices[:5]) or 'those in another file'}.",
        )
    key = weight or matrices[0]
    beside = bias or f"{key.removesuffix('weight')}bias"
    rows = source.read(key).float()
    shift = source.read(beside).float() if bias is not None or beside in source.headers else None
    check_finite(source.name, key, rows)
    if shift is not None:
        check_finite(source.name, beside, shift)
    names = class_names([str(row) for row in range(len(rows))] if classes is None else classes)
    if rows.dim() != 2 or (shift is not None and shift.shape != rows.shape[:1]):
        rest = "" if shift is None else f", its bias {list(shift.shape)}"
        raise ShapeError(
            f"{key!r} in {source.name} has shape {list(rows.shape)}{rest}; expected [classes, d] and [classes]"
        )
    if len(rows) != len(names):
        raise DataError(
            f"{key!r} in {source.name} has {len(rows)} rows, but there are {len(names)} class names",
            hint="Give one name per row, in the order of the rows: heads.<task>.classes.",
        )
    return LinearHead(names, rows, shift, normalize)


def stated_classes(place: str) -> tuple[str, ...] | None:
    """Class names in the order of a classifier's rows, as the config.json of its folder has them; None without.

    `place` is a folder, a file of weights that is named as in such a folder, or a Hub id in the local cache.
    """
    is_other_file = pathlib.Path(place).suffix and pathlib.Path(place).name not in WEIGHT_FILES
    folder = None if is_other_file and pathlib.Path(place).is_file() else library_folder(place)
    if folder is None or not (folder / "config.json").is_file():
        return None
    stated = read_json(folder / "config.json")
    of_timm = stated.get("label_names") or (stated.get("pretrained_cfg") or {}).get("label_names")
    if isinstance(of_timm, list):
        return tuple(map(str, of_timm))
    labels = stated.get("id2label")
    if not isinstance(labels, dict) or not all(str(row) in labels for row in range(len(labels))):
        return None
    names = tuple(str(labels[str(row)]) for row in range(len(labels)))
    # What transformers writes where nobody gave names.
    return None if names == tuple(f"LABEL_{row}" for row in range(len(names))) else names


def text_head(
    tower: TextTower, classes: ClassNames, templates: Sequence[str], words: Sequence[str] | None = None
) -> Head:
    """The zero-shot head of the base: every class named in every template, read by the base's text tower.

    A class embedding is the mean over templates of unit-norm prompt embeddings, normalised again; the logit
    scale is exp(`logit_scale`) of the base.

    Args:
        tower: the base's (`Architecture.text_tower`).
        classes: names of the rows.
        templates: prompts in which `{}` stands for the class name.
        words: what stands there instead of the names, row by row.

    Raises:
        SpecError: a template has no `{}`, or there are no templates.
        DataError: class names repeat or can't be read.
    """
    names = class_names(classes)
    unusable = [template for template in templates if "{}" not in template]
    if unusable or not templates:
        raise SpecError(
            f"the template {unusable[0]!r} has no place for the class name"
            if unusable
            else "no templates given",
            hint='Write {} where the class name goes, for example "a photo of a {}."',
        )
    rows = []
    for name in names if words is None else words:
        # Not str.format: other braces in a template are text.
        prompts = [template.replace("{}", name) for template in templates]
        rows.append(F.normalize(F.normalize(tower.embed(prompts), dim=-1).mean(dim=0), dim=-1))
    return Head(names, torch.stack(rows), tower.logit_scale)


def _names_in(path: pathlib.Path) -> list[str]:
    try:
        names = from_json(plain_file(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path}: class names can't be read: {getattr(error, 'strerror', None) or error}",
            hint='Give a JSON file that holds a list: ["cat", "dog"].',
        ) from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(f"{path} holds no list of class names", hint='Expected JSON such as ["cat", "dog"].')
    return names


def _require_unit_norm(embeddings: Tensor, names: Sequence[str], where: str) -> None:
    norms = torch.linalg.vector_norm(embeddings, dim=1)
    off = (norms - 1).abs()
    # Written so that NaN is refused too.
    if not bool((off <= _NORM_TOLERANCE).all()):
        worst = int(off.nan_to_num(nan=torch.inf).argmax())
        raise DataError(
            f"{where}: the row of {names[worst]!r} has norm {norms[worst].item():.4g}; expected 1",
            hint="Divide every row by its norm, and give the scale as `logit_scale`.",
        )
