"""Questions about pictures, as the processor in a model's own folder makes inputs of both.

A task's samples all have images, mostly one, or none. The row of such a sample is what the processor makes of question
and images, an answer follows as in rows of texts alone. The processor sees one sample at a time, so that no result
depends on what else is in a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from driftlens.base.errors import DataError
from driftlens.models.language.texts import Pictured, TextReader

if TYPE_CHECKING:
    from torch import Tensor

ROWS = ".rows"
"""Ends the name of how many of an entry's rows are a sample's own, [n]; the others only fill it up."""


@dataclass(frozen=True)
class WordReader(TextReader):
    """Texts alone, of a model that reads images too: its chat template takes messages in parts.

    Attributes:
        processor: the folder's own, where it was read.
    """

    processor: Any = None

    def message(self, sample: Any) -> Any:
        """See `TextReader`; every message has its images before its text."""
        images = getattr(sample, "images", ())
        return [*[{"type": "image"} for _ in images], {"type": "text", "text": sample.input}]

    @property
    def template(self) -> Any:
        """The processor's chat template, or else its tokenizer's."""
        stated = None if self.processor is None else self.processor.chat_template
        return (stated.get("default") if isinstance(stated, Mapping) else stated) or super().template


@dataclass(frozen=True)
class PictureReader(WordReader):
    """Samples of an image and a text -> a batch of token ids and of what belongs to images."""

    @property
    def of_words(self) -> WordReader:
        """What reads the samples of tasks without images."""
        return WordReader(**self.parts)

    def __call__(self, samples: Sequence[Any]) -> dict[str, Tensor]:
        """Entries by tokens, [n, t], padded on the right, and those of images as `together` has them."""
        import torch

        rows, images = zip(
            *(self._entries(sample, self._answer(sample.target)) for sample in samples), strict=True
        )
        cut = [
            {name: value[: self.max_length] for name, value in row.items()} for row in rows
        ]  # at most answers
        longest = max(len(row["input_ids"]) for row in cut)
        batch = {}
        for name in cut[0]:
            filler = self.tokenizer.pad_token_id if name == "input_ids" else 0
            batch[name] = torch.tensor([row[name] + [filler] * (longest - len(row[name])) for row in cut])
        return batch | together(images)

    def asked(self, sample: Any) -> Any:
        """See `TextReader`: without its image a question would be another one."""
        return sample

    def continued(
        self, questions: Sequence[Any], tails: Sequence[Sequence[int]], *, spare: int = 0
    ) -> dict[str, Tensor]:
        """See `TextReader`; with what belongs to images as the library takes it. No question is cut."""
        pairs = zip(questions, tails, strict=True)
        rows, images = zip(*(self._entries(question, list(tail)) for question, tail in pairs), strict=True)
        return self.left_padded(rows) | as_the_library(together(images))

    @property
    def mark(self) -> str:
        """What stands for an image in a question."""
        is_gemma_3 = hasattr(
            self.processor, "full_image_sequence"
        )  # which puts it in the place of another token
        mark: str = self.processor.boi_token if is_gemma_3 else self.processor.image_token
        return mark

    @property
    def marks(self) -> tuple[str, ...]:
        """See `TextReader`."""
        return (self.mark, *super().marks)

    def _entries(self, sample: Pictured, answer: list[int]) -> tuple[dict[str, list[int]], dict[str, Tensor]]:
        """A question's entries by tokens, those of an answer behind it, and the entries of its images."""
        text, num_marks, count = sample.input, sample.input.count(self.mark), len(sample.images)
        if num_marks not in (0, count):
            raise DataError(
                f"a question says {self.mark} {num_marks} times and has {count} image{'s' * (count > 1)}; expected it "
                "once for each",
                hint="Leave these out, and they are put before the question, or name as many images.",
            )
        text = text if num_marks else " ".join([*[self.mark] * count, text])
        images = [image().convert("RGB") for image in sample.images]
        data = self.processor(text=[text], images=[images], return_tensors="pt")
        whole = data["input_ids"][0].tolist()
        question = self._open_ended(whole)
        first = int(whole[:2] == [self.tokenizer.bos_token_id] * 2)  # of which one is kept
        if len(question) >= self.max_length:
            raise DataError(
                f"a question and its images have {len(question)} tokens; with an answer at most {self.max_length} are "
                "read, and image tokens can't be cut",
                hint="Raise max_length, or give smaller images and shorter questions.",
            )
        by_token = {
            name: data[name][0].tolist()[first : first + len(question)]
            + [int(name == "attention_mask")] * len(answer)
            for name in data
            if name.endswith(("token_type_ids", "attention_mask")) and data[name].shape[:2] == (1, len(whole))
        }
        of_images = {
            name: value for name, value in data.items() if name not in by_token and name != "input_ids"
        }
        return {"input_ids": question + answer, **by_token}, of_images


def together(samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """What a processor makes of samples one by one, as one batch: rows of a sample each, filled up with zeros."""
    import torch

    batch: dict[str, Tensor] = {}
    for name in samples[0]:
        values = [torch.as_tensor(sample[name]) for sample in samples]
        shape = [max(sizes) for sizes in zip(*(value.shape for value in values), strict=True)]
        batch[name] = torch.stack([_filled(value, shape) for value in values])
        batch[f"{name}{ROWS}"] = torch.tensor([len(value) for value in values])
    return batch


def _filled(value: Tensor, shape: Sequence[int]) -> Tensor:
    whole = value.new_zeros(*shape)
    whole[tuple(slice(size) for size in value.shape)] = value
    return whole


def as_the_library(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A batch as the library takes it: what belongs to images without the rows that fill it up, one after the other."""
    import torch

    entries = {name: value for name, value in batch.items() if not name.endswith(ROWS)}
    for name, value in entries.items():
        if (rows := batch.get(f"{name}{ROWS}")) is not None:
            entries[name] = torch.cat([row[:count] for row, count in zip(value, rows.tolist(), strict=True)])
    return entries
