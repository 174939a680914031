"""Sounds to the features that a speech model reads, as the feature extractor in its own folder makes them, and words.

Every sample is one sound, of which the extractor sees one at a time; what is said in it is the answer of the decoder.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from driftlens.base.errors import DataError
from driftlens.models.language.texts import Heard, TextReader

if TYPE_CHECKING:
    from torch import Tensor


class Sound(NamedTuple):
    """Samples of a waveform [t], or features of one as the model reads them [bands, frames]; `rate` per second."""

    values: np.ndarray[Any, np.dtype[np.float32]]
    rate: int | None = None


@dataclass(frozen=True)
class SoundReader(TextReader):
    """Samples of a sound and what is said in it -> a batch of its features and of the decoder's token ids.

    Attributes:
        extractor: the folder's own.
        suppressed: tokens that are never generated, as the folder's settings of generation say.
        suppressed_first: tokens with which no answer begins.
    """

    extractor: Any = None
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()

    def __call__(self, samples: Sequence[Any]) -> dict[str, Tensor]:
        """Features of sounds [n, bands, frames], and ids and masks of the decoder, [n, u]."""
        import torch

        name = self.extractor.model_input_names[0]
        features = [torch.as_tensor(self._features(sample)) for sample in samples]
        return {name: torch.stack(features), **self.padded(self.answered(samples))}

    def asked(self, sample: Any) -> Any:
        """See `TextReader`: what is asked is the sound."""
        return sample._replace(target="")

    def _features(self, sample: Heard) -> Any:
        """What a sound becomes, refused where it is none that this extractor hears whole."""
        (values, rate), extractor = sample.sound(), self.extractor
        bands, frames, seconds = (
            extractor.feature_size,
            extractor.nb_max_frames,
            extractor.n_samples / extractor.sampling_rate,
        )
        if values.ndim == 2:
            if values.shape != (bands, frames):
                raise DataError(
                    f"{sample.input}: features of shape {list(values.shape)}; the model reads [{bands}, {frames}]",
                    hint="Give what its feature extractor makes of a sound, or the waveform itself, [t].",
                )
            return values
        if rate not in (None, extractor.sampling_rate):
            raise DataError(
                f"{sample.input}: {rate} samples a second; the model hears {extractor.sampling_rate}",
                hint=f"Resample it: ffmpeg -i IN.wav -ar {extractor.sampling_rate} OUT.wav",
            )
        if len(values) > extractor.n_samples:
            raise DataError(
                f"{sample.input}: {len(values) / extractor.sampling_rate:.1f} seconds; the model hears {seconds:g}, "
                "and sounds are not cut",
                hint="Cut it, and what is said in it, into pieces.",
            )
        return extractor(values, sampling_rate=extractor.sampling_rate)[extractor.model_input_names[0]][0]


def words_of(text: str) -> list[str]:
    """The words of a transcript without case and punctuation."""
    return re.findall(r"\w+(?:['’]\w+)*", text.casefold())


def word_errors(answer: Sequence[str], reference: Sequence[str]) -> int:
    """The fewest words that are to be replaced, added or left out to make one transcript the other (Levenshtein)."""
    row = list(range(len(answer) + 1))
    for count, word in enumerate(reference, 1):
        before, row = row, [count]
        for place, answered in enumerate(answer):
            row.append(min(before[place] + (word != answered), before[place + 1] + 1, row[place] + 1))
    return row[-1]
