"""Texts to the token ids a language model reads, as its own tokenizer makes them.

A question is the text that a model is asked, an answer what it should say; no two texts share a row (no packing).
Encoders read the question alone. A decoder's answer, with the token that ends it, follows the question in one row. An
encoder-decoder's answer follows the start token in a row of the decoder's own, which without an answer holds that token
alone. Rows are padded on the right, whatever the tokenizer says of sides, so that padding moves no token.

Too long a row loses the middle of what is read, never where the answer stands: of a decoder's question the beginning
is cut (special tokens stay), of all others the end; then, where the answer alone is longer, its end.

A task's samples all have images, mostly one, or none. The row of a sample with images is what the processor makes of
question and images, an answer follows as in rows of texts alone. The processor sees one sample at a time, so that no
result depends on what else is in a batch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from driftlens.checkpoints.sentences import Prompts
from driftlens.utils.errors import DataError, SpecError

Form = Literal["encoder", "decoder", "encoder-decoder"]
"""What a language model is made of, which decides where an answer stands."""
UNLIMITED = 1 << 30
"""Tokens of a row where nothing bounds them."""
MEANING = ("model", "normalizer", "pre_tokenizer", "post_processor", "added_tokens")
"""Parts of a tokenizer.json that decide on token ids; the others are settings of calls, and the format's version."""
_BEFORE = ":"
"""Stands for the question where an answer is tokenised: some tokenizers begin a text otherwise than they go on."""


class Text(NamedTuple):
    """A sample of text: what a model is asked, and what it should answer, or nothing."""

    input: str
    target: str = ""


class Pictured(NamedTuple):
    """A sample of images and a text: what is asked, what is answered, or nothing, and what reads each image."""

    input: str
    target: str = ""
    images: tuple[Callable[[], Any], ...] = ()


@dataclass(frozen=True)
class TextReader:
    """Samples of text -> a batch of token ids, as the library takes it.

    Attributes:
        max_length: tokens of a row at most, special ones and a decoder's answer included.
        limit: the most that `max_length` may be.
        start: the token a decoder of its own begins with; None elsewhere.
        opening: tokens that stand before every answer of such a decoder (BART's begin of a text, NLLB's language).
        ends: tokens with which the model ends an answer, as its files say; that of the tokenizer is the first.
        prompts: what the model's folder says that stands before texts; None where it says nothing.
        lead: what does stand before every text.
        pools_lead: whether the tokens of that count where one vector is made of a text's.
        lowers: whether texts are read in lower case.
    """

    tokenizer: Any
    form: Form = "encoder"
    max_length: int = UNLIMITED
    limit: int = UNLIMITED
    start: int | None = None
    opening: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    prompts: Prompts | None = None
    lead: str = ""
    pools_lead: bool = True
    lowers: bool = False

    def __call__(self, samples: Sequence[Sequence[Any]]) -> dict[str, Tensor]:
        """Ids and masks of a batch, [n, t], padded on the right; for an encoder-decoder those of both streams."""
        encoded = self._encoded([sample[0] for sample in samples], self._room(samples))
        rows = encoded["input_ids"]
        if self.form == "decoder":
            rows = [row + self._answer(sample[1]) for row, sample in zip(rows, samples, strict=True)]
        columns = {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}
        if self.form == "encoder" and "token_type_ids" in encoded:
            columns["token_type_ids"] = encoded["token_type_ids"]
        if self.lead and not self.pools_lead:
            (begin,) = replace(self, lead="").questions([self.lead])
            led = len(begin) - (begin[-1] in self.tokenizer.all_special_ids)
            columns["pooling_mask"] = [[0] * min(led, len(row)) + [1] * (len(row) - led) for row in rows]
        if self.form == "encoder-decoder":
            columns |= self.answered(samples)
        return self.padded(columns)

    def answered(self, samples: Sequence[Sequence[Any]]) -> dict[str, list[list[int]]]:
        """What a decoder of its own reads of samples: its start, and their answers."""
        before = self.before_answers
        answers = [[*before, *self.answer_tokens(sample[1])][: self.max_length] for sample in samples]
        return {"decoder_input_ids": answers, "decoder_attention_mask": [[1] * len(row) for row in answers]}

    def padded(self, columns: Mapping[str, list[list[int]]]) -> dict[str, Tensor]:
        """Rows of each entry as one tensor [n, t], padded on the right."""
        batch = {}
        for name, lists in columns.items():
            longest = max(map(len, lists))
            filler = self.tokenizer.pad_token_id if name.endswith("input_ids") else 0
            batch[name] = torch.tensor([row + [filler] * (longest - len(row)) for row in lists])
        return batch

    def questions(self, texts: Sequence[str], *, spare: int = 0) -> list[list[int]]:
        """Token ids of questions alone, as the model reads them, cut where they leave fewer than `spare` tokens."""
        room = max(1, self.max_length - spare)
        rows: list[list[int]] = self._encoded(texts, [room] * len(texts))["input_ids"]
        return rows

    def asked(self, sample: Any) -> Any:
        """What is asked of a sample, as `continued` takes it."""
        return sample.input

    def continued(
        self, questions: Sequence[Any], tails: Sequence[Sequence[int]], *, spare: int = 0
    ) -> dict[str, Tensor]:
        """Questions, each with token ids behind it, as a decoder takes them, padded on the left: all end together.

        Questions are cut where they leave fewer than `spare` tokens.
        """
        prefixes = self.questions(questions, spare=spare)
        rows = [[*question, *tail] for question, tail in zip(prefixes, tails, strict=True)]
        return self.left_padded([{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows])

    def left_padded(self, rows: Sequence[Mapping[str, list[int]]]) -> dict[str, Tensor]:
        """Entries by tokens of some rows as one batch, with zeros, or pad tokens, before the shorter ones."""
        longest = max(len(row["input_ids"]) for row in rows)
        fill = {name: self.tokenizer.pad_token_id if name == "input_ids" else 0 for name in rows[0]}
        return {
            name: torch.tensor([[fill[name]] * (longest - len(row[name])) + row[name] for row in rows])
            for name in rows[0]
        }

    def answer_tokens(self, answer: str) -> tuple[int, ...]:
        """Token ids of an answer as it follows a question, without the token that ends it."""

        def ids(text: str) -> list[int]:
            tokens: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            return tokens

        if not answer:
            return ()
        before = ids(_BEFORE) if self.form == "decoder" else []
        whole = ids(_BEFORE + answer) if before else []
        return tuple(whole[len(before) :] if before and whole[: len(before)] == before else ids(answer))

    @property
    def before_answers(self) -> tuple[int, ...]:
        """What a decoder of its own has read before the first token of an answer."""
        return (self.start or 0, *self.opening)

    @property
    def end(self) -> int | None:
        """The token that ends an answer that is given; None where the tokenizer has none."""
        token: int | None = self.tokenizer.eos_token_id
        return token

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some token ids, without special tokens."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def limited(self, max_length: int, key: str) -> TextReader:
        """The same with rows of another length, which the spec calls `key`."""
        if max_length > self.limit:
            raise SpecError(
                f"{key} is {max_length}, but the model has positions for {self.limit} tokens only",
                hint=f"Set it to {self.limit} or less.",
            )
        return replace(self, max_length=max_length)

    def lengths(self, samples: Sequence[Sequence[Any]]) -> list[int]:
        """Tokens of each sample's row, the longer one of an encoder-decoder's, before anything is cut."""
        free = replace(self, max_length=UNLIMITED)
        lengths: list[int] = []
        for first in range(0, len(samples), 256):
            part = samples[first : first + 256]
            for row, sample in zip(free.questions([sample[0] for sample in part]), part, strict=True):
                answer = free._answer(sample[1])
                lengths.append(
                    len(row) + len(answer) if self.form == "decoder" else max(len(row), len(answer))
                )
        return lengths

    def chats(self, messages: Sequence[Any]) -> list[str]:
        """What the model reads where a user says each of `messages` and it is its turn to answer."""
        conversations = [[{"role": "user", "content": message}] for message in messages]
        texts: list[str] = self.tokenizer.apply_chat_template(
            conversations, chat_template=self.template, tokenize=False, add_generation_prompt=True
        )
        return texts

    def message(self, sample: Text) -> Any:
        """What a user says who asks this, as `chats` takes it."""
        return sample.input

    @property
    def template(self) -> Any:
        """The chat template that questions go through; None without one."""
        return self.tokenizer.get_chat_template() if self.tokenizer.chat_template else None

    @property
    def marks(self) -> tuple[str, ...]:
        """What stands for something else than text in a question, the longest first."""
        return tuple(sorted(filter(None, self.tokenizer.all_special_tokens), key=len, reverse=True))

    @property
    def rule(self) -> str:
        """What becomes of questions that are too long, in a few words."""
        return f"of a longer question the {'beginning' if self.form == 'decoder' else 'end'} is cut"

    @property
    def parts(self) -> dict[str, Any]:
        """What a reader of more, or less, than this one's samples has of it."""
        return {part.name: getattr(self, part.name) for part in fields(self)}

    @cached_property
    def digest(self) -> str:
        """Digest of all that decides which ids a text has: vocabulary, merges, normalisation, special tokens."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        stated = {} if backend is None else json.loads(backend.to_str())
        parts: list[Any] = [plain_part(stated[part]) for part in MEANING if part in stated]
        parts = parts or sorted(self.tokenizer.get_vocab().items())
        special = sorted(
            (name, str(token))
            for name, token in self.tokenizer.special_tokens_map.items()
            if name != "pad_token"  # which the mask hides
        )
        return hashlib.sha256(json.dumps([parts, special], sort_keys=True).encode()).hexdigest()

    def _answer(self, target: str) -> list[int]:
        """An answer with its end; nothing where a sample has none."""
        if not target:
            return []
        ids = [*self.answer_tokens(target), *(() if self.end is None else (self.end,))]
        return ids[: self.max_length - 1]

    def _room(self, samples: Sequence[Sequence[Any]]) -> list[int]:
        """Tokens left for every question."""
        if self.form != "decoder":
            return [self.max_length] * len(samples)
        return [self.max_length - len(self._answer(sample[1])) for sample in samples]

    def _encoded(self, questions: Sequence[str], room: Sequence[int]) -> dict[str, list[list[int]]]:
        """What the tokenizer gives for questions, each cut to its room."""
        texts = [self.lead + (text.lower() if self.lowers else text) for text in questions]
        columns: dict[str, list[list[int]]] = dict(self.tokenizer(texts, verbose=False))
        if (
            self.form == "decoder"
        ):  # some end every text, and the answer would follow the end; a template may begin it
            columns = {"input_ids": [self._open_ended(row) for row in columns["input_ids"]]}
        for position, limit in enumerate(room):
            if len(columns["input_ids"][position]) <= limit:
                continue
            if self.form == "decoder":
                row = columns["input_ids"][position]
                first = row[:1] if row[0] == self.tokenizer.bos_token_id else []
                columns["input_ids"][position] = [*first, *row[len(row) - limit + len(first) :]][:limit]
            else:
                cut = self.tokenizer(
                    texts[position], truncation=True, max_length=limit, truncation_side="right"
                )
                for name in columns:
                    columns[name][position] = cut[name]
        return columns

    def _open_ended(self, row: list[int]) -> list[int]:
        begin = self.tokenizer.bos_token_id
        row = row[1:] if begin is not None and row[:2] == [begin, begin] else row
        return row[:-1] if len(row) > 1 and row[-1] == self.end else row


def plain_part(part: Any) -> Any:
    """A part of a tokenizer.json, with merges as older versions wrote them."""
    if isinstance(part, Mapping) and isinstance(part.get("merges"), list):
        merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in part["merges"]]
        return {**part, "merges": merges}
    return part


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
    entries = {name: value for name, value in batch.items() if not name.endswith(ROWS)}
    for name, value in entries.items():
        if (rows := batch.get(f"{name}{ROWS}")) is not None:
            entries[name] = torch.cat([row[:count] for row, count in zip(value, rows.tolist(), strict=True)])
    return entries
