"""Score maps: how final features become class scores, by class embeddings, a classifier or a language-model head."""

from __future__ import annotations

import os
import pathlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from driftlens.checkpoints.loading import WEIGHT_FILES, find_config_folder, open_checkpoint
from driftlens.checkpoints.tensor_sources import StateSource, check_finite, require_key
from driftlens.utils.devices import match_device_dtype, to_device
from driftlens.utils.errors import CheckpointError, DataError, SpecError
from driftlens.utils.files import parse_json, read_json_object, regular_file

# Class names in the order of the rows, or the path of a JSON file with such a list.
ClassNames = Sequence[str] | str | os.PathLike[str]

# Tolerance of a row's unit norm. Rounding to float16 changes a norm by less than 1e-3, so ten times as much is an error
# of the file.
_NORM_TOLERANCE = 1e-2


@dataclass(frozen=True)
class TextTower:
    """The text tower of a base: prompts -> embeddings [prompts, d], not normalized, and the factor on cosines."""

    embed: Callable[[Sequence[str]], Tensor]
    logit_scale: float


def class_names(classes: ClassNames) -> tuple[str, ...]:
    """Return class names from a list, or from a JSON file with a list."""
    if isinstance(classes, str | os.PathLike):
        classes = _read_class_names(pathlib.Path(classes))
    names = tuple(classes)
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DataError(
            f"class names occur more than once: {', '.join(map(repr, twice))}",
            hint="Give each row a different name: images are matched to rows by it.",
        )
    return names


def head_from_file(file: str | os.PathLike[str], tensor: str, logit_scale: float, classes: ClassNames) -> Head:
    """Return a head of precomputed class embeddings.

    Args:
        file: the file of the embeddings.
        tensor: their key in it; rows of unit norm, [classes, d].
        logit_scale: factor on the cosines.
        classes: class names in the order of the rows.
    """
    source = open_checkpoint(file)
    require_key(source, tensor)
    embeddings, where = source.read(tensor).float(), f"{tensor!r} in {source.name}"
    names = _class_names_for_rows(embeddings, classes, where)
    norms = torch.linalg.vector_norm(embeddings, dim=1)
    deviation = (norms - 1).abs()
    # All comparisons with NaN are false, so `not all` raises for NaN where `any(deviation > ...)` would not.
    if not bool((deviation <= _NORM_TOLERANCE).all()):
        worst = int(deviation.nan_to_num(nan=torch.inf).argmax())
        raise DataError(
            f"{where}: the row of {names[worst]!r} has norm {norms[worst].item():.4g}; expected 1",
            hint="Divide each row by its norm. Set the scale in `logit_scale`.",
        )
    return Head(names, embeddings, logit_scale)


def linear_head(
    source: StateSource,
    classes: ClassNames | None,
    *,
    weight: str | None = None,
    bias: str | None = None,
    normalize: bool = False,
) -> LinearHead:
    """Return the head of a linear classifier.

    Args:
        source: the classifier's weights.
        classes: class names; None counts from 0.
        weight: key of the weight; None takes the only matrix of `source`.
        bias: key of the bias; None takes that next to the weight, if any.
        normalize: True to normalize features.
    """
    matrices = [key for key, header in source.headers.items() if len(header.shape) == 2]
    if weight is None and len(matrices) != 1:
        raise CheckpointError(
            f"{source.name} has {len(matrices)} matrices; expected one, the classifier's weight",
            hint=f"Set heads.<task>.weight to one of {', '.join(matrices[:5]) or 'the keys of another file'}.",
        )
    key = weight or matrices[0]
    bias_key = bias or f"{key.removesuffix('weight')}bias"
    rows = source.read(key).float()
    shift = source.read(bias_key).float() if bias is not None or bias_key in source.headers else None
    check_finite(source.name, key, rows)
    if shift is not None:
        check_finite(source.name, bias_key, shift)
    return LinearHead(_class_names_for_rows(rows, classes, f"{key!r} in {source.name}"), rows, shift, normalize)


def _class_names_for_rows(rows: Tensor, classes: ClassNames | None, where: str) -> tuple[str, ...]:
    names = class_names(list(map(str, range(len(rows)))) if classes is None else classes)
    if len(rows) != len(names):
        raise DataError(
            f"{where} has {len(rows)} rows, but {len(names)} class names",
            hint="Set heads.<task>.classes to one name per row, in their order.",
        )
    return names


def config_class_names(place: str) -> tuple[str, ...] | None:
    """Return the class names in a model's config.json, in the order of the classifier's rows, or None.

    The file is that of a folder, of a weights file in one, or of a Hub id in the local cache.
    """
    file = pathlib.Path(place)
    is_other = file.suffix and file.name not in WEIGHT_FILES and file.is_file()
    stated = read_json_object(None if is_other else find_config_folder(place), "config.json")
    of_timm = stated.get("label_names") or (stated.get("pretrained_cfg") or {}).get("label_names")
    if isinstance(of_timm, list):
        return tuple(map(str, of_timm))
    labels = stated.get("id2label")
    if not isinstance(labels, dict) or not all(str(row) in labels for row in range(len(labels))):
        return None
    names = tuple(str(labels[str(row)]) for row in range(len(labels)))
    # transformers writes these default names if none were set, so they name no classes.
    return None if names == tuple(f"LABEL_{row}" for row in range(len(names))) else names


def zero_shot_head(
    tower: TextTower, classes: ClassNames, templates: Sequence[str], words: Sequence[str] | None = None
) -> Head:
    """Return the zero-shot head of the base, from class names and prompt templates.

    A class embedding is the mean over templates of unit-norm prompt embeddings, normalized again.

    Args:
        tower: the base's text tower.
        classes: class names.
        templates: prompts with `{}` in the place of the class name.
        words: names to use in prompts instead, one per class.
    """
    names = class_names(classes)
    if not templates or not all("{}" in template for template in templates):
        raise SpecError(
            f"templates are {list(templates)}; expected at least one, each with {{}} for the class name",
            hint='For example "a photo of a {}."',
        )
    rows = []
    for name in names if words is None else words:
        # Not `str.format`, which would raise on other braces in a template.
        prompts = [template.replace("{}", name) for template in templates]
        rows.append(F.normalize(F.normalize(tower.embed(prompts), dim=-1).mean(dim=0), dim=-1))
    return Head(names, torch.stack(rows), tower.logit_scale)


def _read_class_names(path: pathlib.Path) -> list[str]:
    try:
        names = parse_json(regular_file(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path}: class names can't be read: {getattr(error, 'strerror', None) or error}",
            hint='Use a JSON file with a list: ["cat", "dog"].',
        ) from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(f"{path} has no list of class names", hint='Expected JSON: ["cat", "dog"].')
    return names


# Rows of a vocabulary that are read at a time: 8,192 rows of width 8,192 take 256 MiB in float32.
_ROWS = 8192
# Rows that are converted and multiplied at a time: 512 rows of width 1,024 in float64 stay in a processor's cache.
_PIECE = 512


class ScoreMap(Protocol):
    """A map from final features to class scores."""

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the scores, in order."""

    def scores(self, features: Tensor) -> Tensor:
        """Compute class scores [n, classes] of final features [n, d]; differentiable."""

    def gain_bound(self, start: Tensor, end: Tensor) -> Tensor | None:
        """Return a bound [n] on the gain along the segment between two features [n, d], or None.

        It bounds the score drift (FeatCal, arXiv:2605.13030, Prop. 3, Eq. 7).
        """


@dataclass(frozen=True)
class Head:
    """A `ScoreMap` of CLIP: `logit_scale` * <feature / |feature|, row of `embeddings`> [classes, d] of unit norm."""

    classes: tuple[str, ...]
    embeddings: Tensor
    logit_scale: float

    def scores(self, features: Tensor) -> Tensor:
        """Compute class scores [n, classes] of final features [n, d], on their device and in their dtype."""
        return self.logit_scale * F.normalize(features, dim=-1) @ match_device_dtype(features, self.embeddings).mT

    def derivative(self, features: Tensor) -> ScoreJacobian:
        """Return the Jacobian of scores at features [n, d]."""
        return _score_jacobian(
            self.logit_scale * match_device_dtype(features, self.embeddings), features, normalize=True
        )

    def gain_bound(self, start: Tensor, end: Tensor) -> Tensor:
        """Return scale * |class embeddings|_2 / shortest feature on the segment, infinite if that is 0."""
        norm = self.logit_scale * torch.linalg.matrix_norm(self.embeddings, ord=2)
        bound: Tensor = norm / _shortest_norm_on_segment(start, end)
        return bound


@dataclass(frozen=True)
class ScoreJacobian:
    """The Jacobian J [classes, d] of a score map at n features: `push` takes v [n, d] to J v, `pull` w to J' w."""

    push: Callable[[Tensor], Tensor]
    pull: Callable[[Tensor], Tensor]


def _score_jacobian(rows: Tensor, features: Tensor, *, normalize: bool) -> ScoreJacobian:
    """Return the Jacobian of rows [classes, d] @ x, or of rows @ x / |x|: rows (1 - u u') / |x| with u = x / |x|."""
    if not normalize:
        return ScoreJacobian(lambda v: v @ rows.mT, lambda w: w @ rows)
    # The lower bound of `F.normalize`, so that scores and derivatives agree for zeros too.
    size = torch.linalg.vector_norm(features, dim=-1, keepdim=True).clamp_min(1e-12)
    unit = features / size

    def normalization_derivative(v: Tensor) -> Tensor:
        return (v - unit * (unit * v).sum(dim=-1, keepdim=True)) / size

    return ScoreJacobian(lambda v: normalization_derivative(v) @ rows.mT, lambda w: normalization_derivative(w @ rows))


def _shortest_norm_on_segment(start: Tensor, end: Tensor) -> Tensor:
    """Return the norm of the shortest feature on each segment, [n]."""
    drift = end - start
    # The lower bound avoids 0 / 0 for a segment of length 0, whose t does not matter.
    t = (-(start * drift).sum(dim=1) / drift.square().sum(dim=1).clamp_min(1e-300)).clamp(0, 1)
    shortest: Tensor = torch.linalg.vector_norm(start + t[:, None] * drift, dim=1)
    return shortest


@dataclass(frozen=True)
class LinearHead:
    """A `ScoreMap` of classifiers: weight [classes, d] @ feature + bias [classes]; of unit features if `normalize`."""

    classes: tuple[str, ...]
    weight: Tensor
    bias: Tensor | None = None
    normalize: bool = False

    def scores(self, features: Tensor) -> Tensor:
        """Compute class scores [n, classes] of final features [n, d], on their device and in their dtype."""
        bias = None if self.bias is None else match_device_dtype(features, self.bias)
        features = F.normalize(features, dim=-1) if self.normalize else features
        return F.linear(features, match_device_dtype(features, self.weight), bias)

    def derivative(self, features: Tensor) -> ScoreJacobian:
        """Return the Jacobian of scores at features [n, d]."""
        return _score_jacobian(match_device_dtype(features, self.weight), features, normalize=self.normalize)

    def gain_bound(self, start: Tensor, end: Tensor) -> Tensor:
        """Return |weight|_2, divided by the shortest feature on the segment if features are normalized."""
        norm: Tensor = torch.linalg.matrix_norm(self.weight.to(start), ord=2)
        return norm / _shortest_norm_on_segment(start, end) if self.normalize else norm.expand(len(start))


def class_indices(head: ScoreMap, labels: Sequence[str]) -> Tensor:
    """Return the class index of each label in the head, [n]."""
    row = {name: position for position, name in enumerate(head.classes)}
    return torch.tensor([row[label] for label in labels])


def is_top1_correct(head: ScoreMap, features: Tensor, labels: Sequence[str]) -> Tensor:
    """Return a mask [n] of the samples whose highest-scoring class is their label."""
    return head.scores(features).argmax(dim=1) == to_device(class_indices(head, labels), features.device)


@dataclass(frozen=True)
class LmHeadSpec:
    """The checkpoint keys of a language-model head, and the library's steps from its output to scores.

    Attributes:
        key: key of the weight [vocabulary, d], that of the embeddings if they are tied.
        head: key of the head if it is apart from the embeddings.
        bias: key of its bias [vocabulary]; "" without one.
        scale: factor on the features before the head.
        after_head: elementwise map from the head's output [n, classes] to scores; None for the identity.
        slope: a bound on the slope of that map; NaN if unknown.
    """

    key: str
    head: str = "lm_head.weight"
    bias: str = ""
    scale: float = 1.0
    after_head: Callable[[Tensor], Tensor] | None = None
    slope: float = 1.0

    @property
    def is_untied(self) -> bool:
        """True if the head is not tied to the embeddings."""
        return self.key == self.head

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the head's weights."""
        return (self.key, self.bias) if self.bias else (self.key,)


@dataclass(frozen=True)
class LmHead:
    """A `ScoreMap` of language models: rows of a model's own language-model head.

    `source` has the model's weights under the skeleton's key names; `tokens` are one per class, or None for all.
    """

    classes: tuple[str, ...]
    source: StateSource
    lm: LmHeadSpec
    tokens: tuple[int, ...] | None = None

    # The gain is the norm of a matrix, so it needs no sampling.
    is_bounded_exactly = True

    @property
    def vocabulary_size(self) -> int:
        """The number of tokens in the vocabulary."""
        return self.source.headers[self.lm.key].shape[0]

    def of_model(self, source: StateSource) -> LmHead:
        """Return the head of another model, for the same tokens."""
        return self if source is self.source else replace(self, source=source)

    def scores(self, features: Tensor) -> Tensor:
        """Compute scores of the next token [n, classes] for final features [n, d]."""
        parts = []
        scaled = features * self.lm.scale
        for weight, bias in self._head_weight_chunks():
            pieces = (match_device_dtype(features, rows) for rows in torch.split(weight, _PIECE))
            scores = torch.cat([F.linear(scaled, rows) for rows in pieces], dim=-1)
            parts.append(scores if bias is None else scores + match_device_dtype(features, bias))
        scores = torch.cat(parts, dim=-1)
        return scores if self.lm.after_head is None else self.lm.after_head(scores)

    def gain_bound(self, start: Tensor, end: Tensor) -> Tensor:
        """Return scale * |rows|_2 times the slope of the library's steps after the head."""
        return start.new_full((len(start),), self._score_gain_bound)

    def _head_weight_chunks(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield rows and biases in chunks, as a vocabulary is large."""
        if self.tokens is not None:
            yield self._class_token_rows
            return
        count = self.vocabulary_size
        for start in range(0, count, _ROWS):
            yield self._read_vocabulary_rows(start, min(start + _ROWS, count))

    def _read_vocabulary_rows(self, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        weight, bias = self.source.read(self.lm.key, (start, stop)), self.lm.bias
        # BART's final_logits_bias is [1, vocabulary], whose rows are not those of the vocabulary.
        if bias and len(self.source.headers[bias].shape) == 2:
            return weight, self.source.read(bias)[0, start:stop]
        return weight, self.source.read(bias, (start, stop)) if bias else None

    @cached_property
    def _class_token_rows(self) -> tuple[Tensor, Tensor | None]:
        assert self.tokens is not None
        weights, biases = zip(*(self._read_vocabulary_rows(token, token + 1) for token in self.tokens), strict=True)
        return torch.cat(weights), torch.cat(biases) if self.lm.bias else None

    @cached_property
    def _score_gain_bound(self) -> float:
        # From the Gram matrix [d, d], because the rows of a vocabulary in float64 may not fit into memory. In float64,
        # because the square root halves the number of correct digits.
        wide = (weight.double() for weight, _ in self._head_weight_chunks())
        gram = sum((rows.mT @ rows for rows in wide), torch.zeros(()))
        norm = float(torch.linalg.eigvalsh(gram)[-1].clamp_min(0).sqrt())
        return abs(self.lm.scale) * norm * self.lm.slope


def is_vocabulary_head(head: ScoreMap | None) -> bool:
    """Return True if a head scores the whole vocabulary, not the classes of a task."""
    return isinstance(head, LmHead) and head.tokens is None


def has_one_score(head: ScoreMap | None) -> bool:
    """Return True if a head returns one number, as in a reward model or a regression."""
    return head is not None and len(head.classes) == 1
