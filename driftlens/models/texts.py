"""Read questions and answers of language models by their own tokenizers, generate answers, and compute likelihoods.

Each row has one text (no packing). A decoder's answer, with its end token, follows the question in one row; an
encoder-decoder's follows the start token in a row for the decoder.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from driftlens.checkpoints.loading import Prompts
from driftlens.models.tracing.block_runner import move_to_module
from driftlens.utils.devices import to_device
from driftlens.utils.errors import DataError, SpecError

# An encoder has no answer, a decoder's follows the question, an encoder-decoder's is a row of its own.
Form = Literal["encoder", "decoder", "encoder-decoder"]
# Larger than any model's limit. Tokenizers without one have the limit 1e30, which no tensor index can hold.
UNLIMITED = 1 << 30
# The parts of a tokenizer.json that determine token ids.
MEANING = ("model", "normalizer", "pre_tokenizer", "post_processor", "added_tokens")
# Stands for the question when an answer is tokenized alone. SentencePiece adds a space at the beginning of a text, so
# the answer's tokens would differ from those after a question.
_BEFORE = ":"


class TextSample(NamedTuple):
    """A question and its expected answer, or ""."""

    input: str
    target: str = ""


class ImageTextSample(NamedTuple):
    """A question with images, and its expected answer, or ""."""

    input: str
    target: str = ""
    images: tuple[Callable[[], Any], ...] = ()


@dataclass(frozen=True)
class TextProcessor:
    """Tokenizes questions and answers to a batch of token ids, padded on the right.

    Rows that are too long are cut: a decoder's question at its beginning (special tokens stay), other questions and
    answers at their end.

    Attributes:
        max_length: maximum tokens of a row, special ones and a decoder's answer included.
        limit: maximum of `max_length`.
        start: the first token of an encoder-decoder's answers; None for other forms.
        opening: tokens before every answer of an encoder-decoder (BART's begin of a text, NLLB's language).
        ends: tokens with which the model ends an answer, that of the tokenizer first.
        prompts: the prompts in the model's folder.
        lead: the prompt before every text.
        pools_lead: True if the tokens of the prompt count in the pooled vector.
        lowers: True if texts are read in lower case.
        takes_images: True if the chat template takes messages in parts, as the model reads images too.
        processor: the processor of images and texts.
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
    takes_images: bool = False
    processor: Any = None

    def __call__(self, samples: Sequence[Sequence[Any]]) -> dict[str, Tensor]:
        """Return ids and masks of a batch, [n, t], padded on the right; of both streams for an encoder-decoder."""
        tails = [self._answer_with_end_token(sample[1]) if self.form == "decoder" else [] for sample in samples]
        room = [self.max_length - len(tail) for tail in tails]
        encoded = self._tokenize_questions([sample[0] for sample in samples], room)
        rows = [row + tail for row, tail in zip(encoded["input_ids"], tails, strict=True)]
        columns = {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}
        if self.form == "encoder" and "token_type_ids" in encoded:
            columns["token_type_ids"] = encoded["token_type_ids"]
        if self.lead and not self.pools_lead:
            (begin,) = replace(self, lead="").question_tokens([self.lead])
            led = len(begin) - (begin[-1] in self.tokenizer.all_special_ids)
            columns["pooling_mask"] = [[0] * min(led, len(row)) + [1] * (len(row) - led) for row in rows]
        if self.form == "encoder-decoder":
            before = self._answer_prefix_tokens
            answers = [[*before, *self.answer_tokens(sample[1])][: self.max_length] for sample in samples]
            masks = [[1] * len(row) for row in answers]
            columns |= {"decoder_input_ids": answers, "decoder_attention_mask": masks}
        return self._pad_rows(columns)

    def _pad_rows(self, columns: Mapping[str, list[list[int]]], *, left: bool = False) -> dict[str, Tensor]:
        """Return the rows of each entry as one tensor [n, t], padded on the right, or on the left."""
        batch = {}
        for name, rows in columns.items():
            longest = max(map(len, rows))
            filler = self.tokenizer.pad_token_id if name.endswith("input_ids") else 0
            gaps = [[filler] * (longest - len(row)) for row in rows]
            pairs = zip(gaps, rows, strict=True) if left else zip(rows, gaps, strict=True)
            batch[name] = torch.tensor([before + after for before, after in pairs])
        return batch

    def question_tokens(self, texts: Sequence[str], *, spare: int = 0) -> list[list[int]]:
        """Return the token ids of questions alone, cut to leave room for `spare` more tokens."""
        room = max(1, self.max_length - spare)
        return self._tokenize_questions(texts, [room] * len(texts))["input_ids"]

    def question_of(self, sample: Any) -> Any:
        """Return a sample's question, in the form that `generate` takes."""
        return sample.input

    def _left_padded_batch(
        self, questions: Sequence[Any], tails: Sequence[Sequence[int]], *, spare: int = 0
    ) -> dict[str, Tensor]:
        """Return a batch of questions, cut to leave `spare` tokens free, and token ids, padded on the left."""
        prefixes = self.question_tokens(questions, spare=spare)
        rows = [[*question, *tail] for question, tail in zip(prefixes, tails, strict=True)]
        columns = {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}
        return self._pad_rows(columns, left=True)

    def answer_tokens(self, answer: str) -> tuple[int, ...]:
        """Return the token ids of an answer after a question, without the end token."""

        def token_ids(text: str) -> list[int]:
            tokens: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            return tokens

        if not answer:
            return ()
        before = token_ids(_BEFORE) if self.form == "decoder" else []
        whole = token_ids(_BEFORE + answer) if before else []
        return tuple(whole[len(before) :] if before and whole[: len(before)] == before else token_ids(answer))

    @property
    def _answer_prefix_tokens(self) -> tuple[int, ...]:
        """The tokens of an encoder-decoder before the first token of an answer."""
        return (self.start or 0, *self.opening)

    @property
    def end_token(self) -> int | None:
        """The tokenizer's end token, or None."""
        token: int | None = self.tokenizer.eos_token_id
        return token

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def with_max_length(self, max_length: int, key: str) -> TextProcessor:
        """Return a copy with another `max_length`; `key` is its name in the spec, for messages."""
        if max_length > self.limit:
            raise SpecError(
                f"{key} is {max_length}; the model has {self.limit} positions",
                hint=f"Set it to {self.limit} or less.",
            )
        return replace(self, max_length=max_length)

    def row_lengths(self, samples: Sequence[Sequence[Any]]) -> list[int]:
        """Return the number of tokens of each sample before truncation."""
        free = replace(self, max_length=UNLIMITED)
        rows = free.question_tokens([sample[0] for sample in samples])
        pairs = [
            (len(row), len(free._answer_with_end_token(sample[1]))) for row, sample in zip(rows, samples, strict=True)
        ]
        return [sum(pair) if self.form == "decoder" else max(pair) for pair in pairs]

    def chat_prompts(self, samples: Sequence[TextSample | ImageTextSample]) -> list[str]:
        """Format each question as a user message, by the chat template with the generation prompt."""
        conversations = []
        for sample in samples:
            images = [{"type": "image"}] * len(getattr(sample, "images", ()))
            parts = [*images, {"type": "text", "text": sample.input}]
            content: Any = parts if self.takes_images else sample.input
            conversations.append([{"role": "user", "content": content}])
        texts: list[str] = self.tokenizer.apply_chat_template(
            conversations, chat_template=self._chat_template, tokenize=False, add_generation_prompt=True
        )
        return texts

    @property
    def _chat_template(self) -> Any:
        """The processor's chat template, or else the tokenizer's, or None."""
        templates = None if self.processor is None else self.processor.chat_template
        template = templates.get("default") if isinstance(templates, Mapping) else templates
        if template or not self.tokenizer.chat_template:
            return template or None
        return self.tokenizer.get_chat_template()

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The special tokens that a question may contain, longest first."""
        return tuple(sorted(filter(None, self.tokenizer.all_special_tokens), key=len, reverse=True))

    @property
    def truncation_rule(self) -> str:
        """A description of how long questions are truncated."""
        # A decoder's answer follows the end of the question, so its end is kept.
        return f"of a longer question the {'beginning' if self.form == 'decoder' else 'end'} is cut"

    @cached_property
    def digest(self) -> str:
        """The digest of everything that determines a text's ids: vocabulary, merges, normalization, special tokens."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        stated = {} if backend is None else json.loads(backend.to_str())
        parts: list[Any] = [normalize_merges(stated[part]) for part in MEANING if part in stated]
        parts = parts or sorted(self.tokenizer.get_vocab().items())
        special = sorted(
            (name, str(token))
            for name, token in self.tokenizer.special_tokens_map.items()
            # Tokenizers without a pad token get one here; the mask hides it.
            if name != "pad_token"
        )
        return hashlib.sha256(json.dumps([parts, special], sort_keys=True).encode()).hexdigest()

    def _answer_with_end_token(self, target: str) -> list[int]:
        """Return the tokens of an answer and its end token; none without an answer."""
        if not target:
            return []
        ids = [*self.answer_tokens(target), *(() if self.end_token is None else (self.end_token,))]
        return ids[: self.max_length - 1]

    def _tokenize_questions(self, questions: Sequence[str], room: Sequence[int]) -> dict[str, list[list[int]]]:
        """Return the tokenizer's output for questions, each cut to its maximum number of tokens."""
        texts = [self.lead + (text.lower() if self.lowers else text) for text in questions]
        columns: dict[str, list[list[int]]] = dict(self.tokenizer(texts, verbose=False))
        if self.form == "decoder":
            # An answer must not follow an end token. A chat template may write the begin token a second time.
            columns = {"input_ids": [self._without_extra_special_tokens(row) for row in columns["input_ids"]]}
        for position, limit in enumerate(room):
            if len(columns["input_ids"][position]) <= limit:
                continue
            if self.form == "decoder":
                row = columns["input_ids"][position]
                begin = row[:1] if row[0] == self.tokenizer.bos_token_id else []
                columns["input_ids"][position] = [*begin, *row[len(row) - limit + len(begin) :]][:limit]
            else:
                # The tokenizer itself cuts, because it keeps the special tokens at the end.
                cut = self.tokenizer(texts[position], truncation=True, max_length=limit, truncation_side="right")
                for name in columns:
                    columns[name][position] = cut[name]
        return columns

    def _without_extra_special_tokens(self, row: list[int]) -> list[int]:
        begin = self.tokenizer.bos_token_id
        row = row[1:] if begin is not None and row[:2] == [begin, begin] else row
        return row[:-1] if len(row) > 1 and row[-1] == self.end_token else row


def normalize_merges(part: Any) -> Any:
    """Return a part of a tokenizer.json, with BPE merges in the older string format."""
    if isinstance(part, Mapping) and isinstance(part.get("merges"), list):
        merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in part["merges"]]
        return {**part, "merges": merges}
    return part


# Suffix of the entry with the number of a sample's own rows, [n]. Images differ in their numbers of rows, so batches
# are padded.
ROWS = ".rows"


@dataclass(frozen=True)
class ImageTextProcessor(TextProcessor):
    """Processes samples of images and texts to a batch of token ids and image inputs."""

    @property
    def text_only(self) -> TextProcessor:
        """The text processor for tasks without images."""
        # `vars` has the cached digest too, which is no field. `replace` leaves it out.
        return TextProcessor(**vars(replace(self)))

    def __call__(self, samples: Sequence[Any]) -> dict[str, Tensor]:
        """Return entries by token [n, t], padded on the right, and those of images; see `stack_samples`."""
        rows, images = self._rows_and_images(
            (sample, self._answer_with_end_token(sample.target)) for sample in samples
        )
        # Only answers are cut: longer questions raise.
        cut = {name: [row[: self.max_length] for row in column] for name, column in rows.items()}
        return self._pad_rows(cut) | images

    def question_of(self, sample: Any) -> Any:
        """Return the whole sample, because its images are part of the question."""
        return sample

    def _left_padded_batch(
        self, questions: Sequence[Any], tails: Sequence[Sequence[int]], *, spare: int = 0
    ) -> dict[str, Tensor]:
        """Return a batch of questions with images followed by token ids, padded on the left; nothing is cut."""
        pairs = zip(questions, tails, strict=True)
        rows, images = self._rows_and_images((question, list(tail)) for question, tail in pairs)
        return self._pad_rows(rows, left=True) | unpad_image_rows(images)

    def _rows_and_images(
        self, samples: Iterable[tuple[ImageTextSample, list[int]]]
    ) -> tuple[dict[str, list[list[int]]], dict[str, Tensor]]:
        """Process samples; return token rows by input name, and the image inputs as one batch."""
        rows, images = zip(*(self._process_sample(sample, answer) for sample, answer in samples), strict=True)
        return {name: [row[name] for row in rows] for name in rows[0]}, stack_samples(images)

    @property
    def _image_placeholder(self) -> str:
        """The token for an image in a question."""
        # Gemma 3's processor replaces the token that begins an image, not its `image_token`.
        is_gemma_3 = hasattr(self.processor, "full_image_sequence")
        mark: str = self.processor.boi_token if is_gemma_3 else self.processor.image_token
        return mark

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The special tokens that a question may contain, the image token first."""
        return (self._image_placeholder, *super().special_tokens)

    def _process_sample(
        self, sample: ImageTextSample, answer: list[int]
    ) -> tuple[dict[str, list[int]], dict[str, Tensor]]:
        """Return a sample's per-token inputs, with its answer, and its image inputs."""
        text, num_marks, count = sample.input, sample.input.count(self._image_placeholder), len(sample.images)
        if num_marks not in (0, count):
            raise DataError(
                f"a question has {num_marks} times {self._image_placeholder} and {count} image{'s' * (count > 1)}; "
                "expected one per image",
                hint="Remove them to put images first, or give as many images.",
            )
        text = text if num_marks else " ".join([*[self._image_placeholder] * count, text])
        images = [image().convert("RGB") for image in sample.images]
        data = self.processor(text=[text], images=[images], return_tensors="pt")
        whole = data["input_ids"][0].tolist()
        question = self._without_extra_special_tokens(whole)
        # `_without_extra_special_tokens` drops one of two begin tokens, so entries by token start one later too.
        offset = int(whole[:2] == [self.tokenizer.bos_token_id] * 2)
        if len(question) >= self.max_length:
            raise DataError(
                f"a question with images has {len(question)} tokens; max_length is {self.max_length} with an answer",
                hint="Raise max_length, or use smaller images or shorter questions: image tokens can't be cut.",
            )
        by_token = {
            name: data[name][0].tolist()[offset : offset + len(question)]
            + [int(name == "attention_mask")] * len(answer)
            for name in data
            if name.endswith(("token_type_ids", "attention_mask")) and data[name].shape[:2] == (1, len(whole))
        }
        of_images = {name: value for name, value in data.items() if name not in by_token and name != "input_ids"}
        return {"input_ids": question + answer, **by_token}, of_images


def stack_samples(samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Stack a processor's outputs for single samples to a batch, padded with zeros."""
    batch: dict[str, Tensor] = {}
    for name in samples[0]:
        values = [torch.as_tensor(sample[name]) for sample in samples]
        # Zeros are removed again by `unpad_image_rows`, so the library never reads them.
        shape = [max(sizes) for sizes in zip(*(value.shape for value in values), strict=True)]
        batch[name] = values[0].new_zeros(len(values), *shape)
        for row, value in zip(batch[name], values, strict=True):
            row[tuple(map(slice, value.shape))] = value
        batch[f"{name}{ROWS}"] = torch.tensor([len(value) for value in values])
    return batch


def unpad_image_rows(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Concatenate the image rows of a padded batch without padding, as the library's models take them."""
    entries = {name: value for name, value in batch.items() if not name.endswith(ROWS)}
    for name, value in entries.items():
        if (rows := batch.get(f"{name}{ROWS}")) is not None:
            entries[name] = torch.cat([row[:count] for row, count in zip(value, rows.tolist(), strict=True)])
    return entries


def generate(
    module: Any,
    reader: TextProcessor,
    inputs: Sequence[Any],
    max_new_tokens: int,
    *,
    batch_size: int = 32,
) -> list[str]:
    """Return a model's greedy answer to each question, without special tokens and surrounding spaces.

    Args:
        module: the library's model.
        reader: its reader of texts.
        inputs: questions, as `reader.question_of` returns them; those that leave no room for an answer are cut.
        max_new_tokens: limit of an answer's tokens, its end token included.
        batch_size: questions per forward pass.
    """
    answers: list[str] = []
    with _greedy_search_settings(module, reader, max_new_tokens) as settings:
        for start in range(0, len(inputs), batch_size):
            answers += _generate_batch(module, reader, inputs[start : start + batch_size], settings)
    return answers


def generate_with_likelihoods(
    module: Any, reader: TextProcessor, questions: Sequence[Any], max_new_tokens: int, targets: Sequence[str]
) -> tuple[list[str], Tensor, Tensor]:
    """Return greedy answers, and log-likelihoods [n] in nat of targets with their numbers of tokens [n].

    The results are those of `generate` and `log_likelihoods`, but most questions are read once: while a model writes
    the target itself, generation has the scores of its tokens, in float32. Only other targets are read separately.

    Args:
        module: the library's model.
        reader: its reader of texts.
        questions: one batch.
        max_new_tokens: limit of an answer's tokens, its end token included.
        targets: one for each question.
    """
    ends = () if reader.form == "decoder" or reader.end_token is None else (reader.end_token,)
    written = _WrittenTargets([(*reader.answer_tokens(target), *ends) for target in targets])
    with _greedy_search_settings(module, reader, max_new_tokens) as settings:
        answers = _generate_batch(module, reader, questions, settings, written)
    sums, counts = written.sums.cpu(), written.counts.double()
    if others := (~written.complete).nonzero()[:, 0].tolist():
        computed, _ = log_likelihoods(
            module, reader, [questions[row] for row in others], [[targets[row]] for row in others]
        )
        sums[others] = computed[:, 0]
    return answers, sums, counts


class _WrittenTargets:
    """Sum the log-likelihoods of target tokens during generation, of each row as long as it writes its target.

    Attributes:
        counts: the numbers of tokens of the targets [n].
        sums: log-likelihoods of the target tokens so far [n].
        complete: rows whose sum is that of the whole target [n].
    """

    def __init__(self, targets: Sequence[Sequence[int]]) -> None:
        self._tokens = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in targets], batch_first=True)
        self.counts = torch.tensor([*map(len, targets)])
        self.sums = torch.zeros(len(targets), dtype=torch.float64)
        self.complete = torch.zeros(len(targets), dtype=torch.bool)
        self._is_equal = ~self.complete
        self._step = 0

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """Read the scores [n, vocabulary] of the next tokens after ids [n, t], and return them unchanged."""
        step, self._step = self._step, self._step + 1
        if step >= self._tokens.shape[1]:
            return scores
        if step:
            self._is_equal &= ids[:, -1].cpu() == self._tokens[:, step - 1]
        tokens = to_device(self._tokens[:, step : step + 1], scores.device)
        found = scores.to(torch.promote_types(scores.dtype, torch.float32)).log_softmax(dim=-1).gather(1, tokens)
        is_next = self._is_equal & (step < self.counts)
        self.sums += found[:, 0].cpu().double().where(is_next, 0.0)
        self.complete |= is_next & (step + 1 == self.counts)
        return scores


def _generate_batch(
    module: Any, reader: TextProcessor, questions: Sequence[Any], settings: Any, written: _WrittenTargets | None = None
) -> list[str]:
    """Return greedy answers to one batch of questions; `written` reads the scores of all steps."""
    from transformers import LogitsProcessorList

    if reader.form == "decoder":
        batch = reader._left_padded_batch(questions, [()] * len(questions), spare=settings.max_new_tokens)
        # Likelihoods leave less room free than generation, so a question that may have been cut here is another there.
        if batch["input_ids"].shape[1] + settings.max_new_tokens >= reader.max_length:
            written = None
    else:
        batch = reader(_samples_without_answers(questions))
        del batch["decoder_attention_mask"]
    whole: Tensor = module.generate(
        **move_to_module(module, batch),
        generation_config=settings,
        logits_processor=LogitsProcessorList([written] if written else []),
    )
    skipped = batch["input_ids" if reader.form == "decoder" else "decoder_input_ids"].shape[1]
    answers = []
    for row in whole[:, skipped:].tolist():
        end = next((place for place, token in enumerate(row) if token in reader.ends), len(row))
        answers.append(reader.decode(row[:end]).strip())
    return answers


def _samples_without_answers(questions: Sequence[Any]) -> list[Any]:
    return [(question, "") if isinstance(question, str) else question for question in questions]


@contextmanager
def _greedy_search_settings(module: Any, reader: TextProcessor, max_new_tokens: int) -> Iterator[Any]:
    """Yield settings for greedy decoding; the module's own generation settings are removed meanwhile."""
    from transformers import GenerationConfig

    # Answers of an encoder-decoder have their own positions; a decoder's share those of the question, which is cut.
    if reader.form != "decoder":
        max_new_tokens = max(1, min(max_new_tokens, reader.limit - len(reader._answer_prefix_tokens)))
    settings = GenerationConfig(
        do_sample=False,
        num_beams=1,
        use_cache=True,
        max_new_tokens=max_new_tokens,
        pad_token_id=reader.tokenizer.pad_token_id,
        eos_token_id=list(reader.ends) or None,
        decoder_start_token_id=reader.start,
    )
    # `generate` fills gaps of the given settings from the model's own, such as penalties. An expert and a merged model
    # must be decoded alike.
    own_settings, was_training = module.generation_config, module.training
    module.generation_config = GenerationConfig()
    module.eval()
    try:
        with torch.no_grad():
            yield settings
    finally:
        module.generation_config = own_settings
        module.train(was_training)


@torch.no_grad()
def log_likelihoods(
    module: nn.Module, reader: TextProcessor, questions: Sequence[Any], answers: Sequence[Sequence[str]]
) -> tuple[Tensor, Tensor]:
    """Return log-likelihoods [n, c] in nat of c answers to each of n questions, and their numbers of tokens [n, c].

    The end token counts for an encoder-decoder, and not for a decoder.

    Args:
        module: the library's model.
        reader: its reader of texts.
        questions: one batch; those that leave no room for answers are cut.
        answers: c answers for each question.
    """
    was_training = module.training
    module.eval()
    try:
        run = _encoder_decoder_likelihoods if reader.form == "encoder-decoder" else _decoder_likelihoods
        columns = list(zip(*answers, strict=True))
        results = list(run(module, reader, questions, columns))
    finally:
        module.train(was_training)
    every = [is_own for _, is_own in results]
    # One copy for all answers, as each copy synchronizes with the device.
    values = torch.cat([scores for scores, _ in results], dim=1).cpu().double()
    pairs = zip(torch.split(values, [is_own.shape[1] for is_own in every], dim=1), every, strict=True)
    sums = torch.stack([scores.where(is_own, 0.0).sum(dim=1) for scores, is_own in pairs], dim=1)
    return sums, torch.stack([is_own.sum(dim=1) for is_own in every], dim=1).double()


def _token_log_likelihoods(scores: Tensor, tokens: Sequence[Sequence[int]], *, at_end: bool) -> tuple[Tensor, Tensor]:
    """Return the log-likelihoods [n, t] of tokens, and a mask of the positions that belong to each row."""
    longest = scores.shape[1]
    gaps = [[0] * (longest - len(row)) for row in tokens]
    ids = torch.tensor([[*gap, *row] if at_end else [*row, *gap] for row, gap in zip(tokens, gaps, strict=True)])
    counts, places = torch.tensor([len(row) for row in tokens]), torch.arange(longest)
    is_own = places >= longest - counts[:, None] if at_end else places < counts[:, None]
    # In bfloat16, log-probabilities have three digits, and sums over an answer lose more.
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32)).log_softmax(dim=-1)
    return wide.gather(2, to_device(ids, wide.device).long()[:, :, None])[:, :, 0], is_own


def _decoder_likelihoods(
    module: Any, reader: TextProcessor, questions: Sequence[Any], columns: Sequence[Sequence[str]]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the token log-likelihoods of answers of a decoder, from left-padded rows of question and answer.

    No prediction follows an answer's last token, so it is not read, and answers that differ in it alone, such as
    "yes" and "no", share one pass.
    """
    takes = inspect.signature(module.forward).parameters
    every = [[reader.answer_tokens(answer) for answer in column] for column in columns]
    spare = max(len(tokens) for column in every for tokens in column)
    for read, alike in itertools.groupby(every, key=lambda tokens: [row[:-1] for row in tokens]):
        batch, num_kept = reader._left_padded_batch(questions, read, spare=spare), max(map(len, read)) + 1
        # Scores of all tokens [n, t, vocabulary] may not fit into memory, but not every model can return a part.
        inputs: dict[str, Any] = {"logits_to_keep": num_kept}
        # Models with positions in images compute them from `mm_token_type_ids`; others need those without padding.
        if "mm_token_type_ids" not in batch:
            inputs["position_ids"] = (batch["attention_mask"].cumsum(dim=1) - 1).clamp_min(0)
        inputs = batch | {name: value for name, value in inputs.items() if name in takes}
        scores = module(**move_to_module(module, inputs), use_cache=False).logits[:, -num_kept:]
        for tokens in alike:
            yield _token_log_likelihoods(scores, tokens, at_end=True)


def _encoder_decoder_likelihoods(
    module: Any, reader: TextProcessor, questions: Sequence[Any], columns: Sequence[Sequence[str]]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the token log-likelihoods of answers of an encoder-decoder; questions are encoded once."""
    device = next(module.parameters()).device
    batch = move_to_module(module, reader(_samples_without_answers(questions)))
    inputs = {name: value for name, value in batch.items() if not name.startswith("decoder_")}
    mask = {name: value for name, value in inputs.items() if name == "attention_mask"}
    encoded = module.get_encoder()(**inputs)
    ends = () if reader.end_token is None else (reader.end_token,)
    for column in columns:
        tokens = [(*reader.answer_tokens(answer), *ends) for answer in column]
        longest = max(map(len, tokens))
        rows = [[*reader._answer_prefix_tokens, *row[:-1]] for row in tokens]
        ids = torch.tensor([row + [reader.tokenizer.pad_token_id] * (longest - len(row)) for row in rows])
        scores = module(
            encoder_outputs=encoded, decoder_input_ids=to_device(ids, device), use_cache=False, **mask
        ).logits
        yield _token_log_likelihoods(scores[:, len(reader.opening) :], tokens, at_end=False)
