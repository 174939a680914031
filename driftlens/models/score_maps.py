"""Score maps: how final features become class scores, by class embeddings, a classifier or a language-model head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from driftlens.base.errors import DataError
from driftlens.checkpoints.sources import StateSource
from driftlens.models.language.vocabularies import HEAD

_ROWS = 8192
"""Rows of a vocabulary that are read at a time."""


class ScoreMap(Protocol):
    """How final features become class scores.

    Attributes:
        classes: names of the scores.
    """

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the scores, in their order."""
        ...

    def scores(self, features: Tensor) -> Tensor:
        """Class scores [n, classes] of final features [n, d]; differentiable."""
        ...

    def gain_bound(self, start: Tensor, end: Tensor) -> Tensor | None:
        """A number per sample, [n], that the gain nowhere exceeds on the segment between two features [n, d].

        It bounds the score drift (FeatCal, arXiv:2605.13030, Prop. 3, Eq. 7); None where no bound is known.
        """
        ...


@dataclass(frozen=True)
class Head:
    """A `ScoreMap` of CLIP: scale * <feature / |feature|, class embedding>.

    Attributes:
        classes: names of the rows.
        embeddings: [classes, d], unit norm.
        logit_scale: factor on the cosines (100 for OpenAI's CLIP).
    """

    classes: tuple[str, ...]
    embeddings: Tensor
    logit_scale: float

    def scores(self, features: Tensor) -> Tensor:
        """Class scores [n, classes] of final features [n, d], on their device and in their dtype."""
        if features.shape[-1] != self.embeddings.shape[-1]:
            raise DataError(
                f"the class embeddings have {self.embeddings.shape[-1]} entries, the features {features.shape[-1]}",
                hint="The head was made with another CLIP; make it with this base's text tower.",
            )
        return self.logit_scale * F.normalize(features, dim=-1) @ self.embeddings.to(features).mT

    def gain_bound(self, start: Tensor, end: Tensor) -> Tensor:
        """scale * |class embeddings|_2 / shortest feature on the segment; infinite where that meets the origin."""
        norm = self.logit_scale * torch.linalg.matrix_norm(self.embeddings, ord=2)
        bound: Tensor = norm / _shortest(start, end)
        return bound


def _shortest(start: Tensor, end: Tensor) -> Tensor:
    """Norm of the shortest feature on each segment, [n]."""
    drift = end - start
    t = (-(start * drift).sum(dim=1) / drift.square().sum(dim=1).clamp_min(1e-300)).clamp(0, 1)
    shortest: Tensor = torch.linalg.vector_norm(start + t[:, None] * drift, dim=1)
    return shortest


@dataclass(frozen=True)
class LinearHead:
    """A `ScoreMap` of classifiers: weight @ feature + bias.

    Attributes:
        classes: names of the rows.
        weight: [classes, d].
        bias: [classes], or None.
        normalize: whether features are brought to unit norm first.
    """

    classes: tuple[str, ...]
    weight: Tensor
    bias: Tensor | None = None
    normalize: bool = False

    def scores(self, features: Tensor) -> Tensor:
        """Class scores [n, classes] of final features [n, d], on their device and in their dtype."""
        if features.shape[-1] != self.weight.shape[-1]:
            raise DataError(
                f"the classifier reads {self.weight.shape[-1]} features, the model gives {features.shape[-1]}",
                hint="Give the classifier that was trained on this model's final features.",
            )
        bias = None if self.bias is None else self.bias.to(features)
        features = F.normalize(features, dim=-1) if self.normalize else features
        return F.linear(features, self.weight.to(features), bias)

    def gain_bound(self, start: Tensor, end: Tensor) -> Tensor:
        """|weight|_2, over the shortest feature on the segment where features are normalised."""
        norm: Tensor = torch.linalg.matrix_norm(self.weight.to(start), ord=2)
        return norm / _shortest(start, end) if self.normalize else norm.expand(len(start))


def class_rows(head: ScoreMap, labels: Sequence[str]) -> Tensor:
    """Row of each label in the head, [n]; labels meet rows by name."""
    row = {name: position for position, name in enumerate(head.classes)}
    return torch.tensor([row[label] for label in labels])


def scores_own_class(head: ScoreMap, features: Tensor, labels: Sequence[str]) -> Tensor:
    """Whether each sample's best score is that of its own label, [n]."""
    return head.scores(features).argmax(dim=1) == class_rows(head, labels).to(features.device)


@dataclass(frozen=True)
class LmScores:
    """Where the language-model head of a family lies, and what its library does to the scores.

    Attributes:
        key: of the weight [vocabulary, d], the embeddings where they are tied.
        cap: scores are cap * tanh(score / cap); None leaves them.
        scale: factor on the features before the head.
    """

    key: str
    cap: float | None = None
    scale: float = 1.0

    @classmethod
    def of(cls, config: Any, tied: Mapping[str, Sequence[str]]) -> LmScores:
        """Of a decoder or T5, which scales features in its first version; tied heads lie under their first name."""
        scale = config.d_model**-0.5 if getattr(config, "scale_decoder_outputs", False) else 1.0
        return cls(tied.get(HEAD, (HEAD,))[0], getattr(config, "final_logit_softcapping", None), scale)


@dataclass(frozen=True)
class LmHead:
    """A `ScoreMap` of language models: rows of a model's own language-model head.

    Attributes:
        classes: names of the rows.
        source: the model's weights, under the skeleton's key names.
        lm: where the head lies there.
        tokens: token id per class; None takes the whole vocabulary.
    """

    classes: tuple[str, ...]
    source: StateSource
    lm: LmScores
    tokens: tuple[int, ...] | None = None

    is_bounded_exactly = True
    """Its gain is not sampled: it is that of a matrix, and a vocabulary has too many rows for that."""

    @property
    def num_tokens(self) -> int:
        """Rows of the whole vocabulary."""
        return self.source.headers[self.lm.key].shape[0]

    def of(self, source: StateSource) -> LmHead:
        """The same rows of another model."""
        return self if source is self.source else replace(self, source=source)

    def scores(self, features: Tensor) -> Tensor:
        """Scores of the next token [n, classes] for final features [n, d], on their device and in their dtype."""
        parts = []
        for weight in self._weights():
            if features.shape[-1] != weight.shape[-1]:
                raise DataError(
                    f"the language-model head reads {weight.shape[-1]} features, the model gives {features.shape[-1]}",
                    hint="Pool one vector per sample: layers.pool: last.",
                )
            parts.append(F.linear(features * self.lm.scale, weight.to(features)))
        scores = torch.cat(parts, dim=-1)
        return scores if self.lm.cap is None else self.lm.cap * torch.tanh(scores / self.lm.cap)

    def gain_bound(self, start: Tensor, end: Tensor) -> Tensor:
        """scale * |rows|_2; capping only makes it smaller."""
        return start.new_full((len(start),), self._norm)

    def _weights(self) -> Iterator[Tensor]:
        """The rows, a piece at a time: a vocabulary is not held."""
        if self.tokens is not None:
            yield self._rows
            return
        count = self.num_tokens
        for first in range(0, count, _ROWS):
            yield self.source.read(self.lm.key, (first, min(first + _ROWS, count)))

    @cached_property
    def _rows(self) -> Tensor:
        assert self.tokens is not None
        return torch.cat([self.source.read(self.lm.key, (token, token + 1)) for token in self.tokens])

    @cached_property
    def _norm(self) -> float:
        gram = sum((weight.double().mT @ weight.double() for weight in self._weights()), torch.zeros(()))
        return abs(self.lm.scale) * float(torch.linalg.eigvalsh(gram)[-1].clamp_min(0).sqrt())


def is_of_vocabulary(head: ScoreMap | None) -> bool:
    """Whether a head scores every token there is: its rows are no classes of a task."""
    return isinstance(head, LmHead) and head.tokens is None
