"""Questions about pictures, as the processor in a model's own folder makes inputs of both.

Every sample has one image. Its row is what the processor makes of question and image, an answer follows as in rows of
texts alone. The processor sees one sample at a time, so that no result depends on what else is in a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from driftlens.base.errors import DataError, SpecError
from driftlens.models.language.texts import Pictured, TextReader

if TYPE_CHECKING:
    from torch import Tensor

ROWS = ".rows"
"""Ends the name of how many of an entry's rows are a sample's own, [n]; the others only fill it up."""


@dataclass(frozen=True)
class PictureReader(TextReader):
    """Samples of an image and a text -> a batch of token ids and of what belongs to images.

    Attributes:
        processor: the folder's own.
        opened: the `image` of a sample -> the picture, of PIL.
    """

    processor: Any = None
    opened: Callable[[Any], Any] = lambda image: image

    def __call__(self, samples: Sequence[Any]) -> dict[str, Tensor]:
        """Entries by tokens, [n, t], padded on the right, and those of images as `together` has them."""
        import torch

        rows, images = zip(*(self._made(sample) for sample in samples), strict=True)
        longest = max(len(row["input_ids"]) for row in rows)
        batch = {}
        for name in rows[0]:
            filler = self.tokenizer.pad_token_id if name == "input_ids" else 0
            batch[name] = torch.tensor([row[name] + [filler] * (longest - len(row[name])) for row in rows])
        return batch | together(images)

    def questions(self, texts: Sequence[str], *, spare: int = 0) -> list[list[int]]:
        """Refused: without its image a question is another one."""
        raise SpecError(
            "answers to questions about images are scored by the token that they begin with alone",
            hint="Set `classes: true` (or their names, or `words`) in the task's entry, and take `metric` out.",
        )

    def lengths(self, samples: Sequence[Sequence[Any]]) -> list[int]:
        """None is known before its picture is read, and none is cut."""
        return [0] * len(samples)

    def chats(self, messages: Sequence[Any]) -> list[str]:
        """See `TextReader`; every message has its image before its text."""
        said: list[Any] = [[{"type": "image"}, {"type": "text", "text": text}] for text in messages]
        return super().chats(said)

    @property
    def template(self) -> Any:
        """The processor's chat template, or else its tokenizer's."""
        stated = self.processor.chat_template
        return (stated.get("default") if isinstance(stated, Mapping) else stated) or super().template

    @property
    def mark(self) -> str:
        """What stands for an image in a question."""
        mark: str = getattr(self.processor, "boi_token", None) or self.processor.image_token
        return mark

    def _made(self, sample: Pictured) -> tuple[dict[str, list[int]], dict[str, Tensor]]:
        """A sample's entries by tokens, and those of its image."""
        text = sample.input if self.mark in sample.input else f"{self.mark} {sample.input}"
        made = self.processor(text=[text], images=[[self.opened(sample.image)]], return_tensors="pt")
        whole = made["input_ids"][0].tolist()
        kept = self._open_ended(whole)
        first = int(whole[:2] == [self.tokenizer.bos_token_id] * 2)  # of which one is kept
        answer = self._answer(sample.target)
        if len(kept) + len(answer) > self.max_length:
            raise DataError(
                f"a question with its image and answer has {len(kept) + len(answer)} tokens; at most {self.max_length} "
                "are read, and image tokens can't be cut",
                hint="Raise max_length, or give smaller images and shorter questions.",
            )
        by_token = {
            name: made[name][0].tolist()[first : first + len(kept)]
            + [int(name == "attention_mask")] * len(answer)
            for name in made
            if name.endswith(("token_type_ids", "attention_mask")) and made[name].shape[:2] == (1, len(whole))
        }
        images = {name: value for name, value in made.items() if name not in by_token and name != "input_ids"}
        return {"input_ids": kept + answer, **by_token}, images


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

    given = {name: value for name, value in batch.items() if not name.endswith(ROWS)}
    for name, value in given.items():
        if (rows := batch.get(f"{name}{ROWS}")) is not None:
            given[name] = torch.cat([one[:count] for one, count in zip(value, rows.tolist(), strict=True)])
    return given
