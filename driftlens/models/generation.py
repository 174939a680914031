"""Generate answers of language models greedily, and compute the likelihood of given answers."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from driftlens.models.texts import TextReader
from driftlens.models.tracing.block_runner import fitted
from driftlens.utils.devices import to_device


def generate(
    module: Any, reader: TextReader, inputs: Sequence[Any], max_new_tokens: int, *, batch_size: int = 32
) -> list[str]:
    """Return a model's greedy answer to each question, without special tokens and surrounding spaces.

    Questions, as `reader.asked` returns them, are cut if they leave no room for an answer of `max_new_tokens`, its end
    token included.
    """
    answers: list[str] = []
    is_decoder = reader.form == "decoder"
    # Answers of an encoder-decoder have their own positions; a decoder's share those of the question, which is cut.
    if not is_decoder:
        max_new_tokens = max(1, min(max_new_tokens, reader.limit - len(reader.before_answers)))
    with _greedy(module, reader, max_new_tokens) as settings:
        for start in range(0, len(inputs), batch_size):
            questions = inputs[start : start + batch_size]
            if is_decoder:
                batch = reader.continued(questions, [()] * len(questions), spare=max_new_tokens)
            else:
                batch = reader(_unanswered(questions))
                del batch["decoder_attention_mask"]
            whole: Tensor = module.generate(**fitted(module, batch), generation_config=settings)
            skipped = batch["input_ids" if is_decoder else "decoder_input_ids"].shape[1]
            for row in whole[:, skipped:].tolist():
                end = next((place for place, token in enumerate(row) if token in reader.ends), len(row))
                answers.append(reader.decode(row[:end]).strip())
    return answers


def _unanswered(questions: Sequence[Any]) -> list[Any]:
    """Return questions as samples without answers."""
    return [(question, "") if isinstance(question, str) else question for question in questions]


@contextmanager
def _greedy(module: Any, reader: TextReader, max_new_tokens: int) -> Iterator[Any]:
    """Yield settings of a greedy search, while the module's own settings, which would fill gaps, are removed."""
    from transformers import GenerationConfig

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
    module: nn.Module, reader: TextReader, questions: Sequence[Any], answers: Sequence[Sequence[str]]
) -> tuple[Tensor, Tensor]:
    """Return log-likelihoods [n, c] in nat of c answers to each of n questions, and their numbers of tokens [n, c].

    The end token counts for an encoder-decoder, and not for a decoder. Questions are cut to leave room.
    """
    was_training = module.training
    module.eval()
    try:
        run = _encoded_once if reader.form == "encoder-decoder" else _answer_scores
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


def _of_tokens(scores: Tensor, tokens: Sequence[Sequence[int]], *, at_end: bool) -> tuple[Tensor, Tensor]:
    """Return log-likelihoods [n, t] of tokens by scores [n, t, vocabulary], and which places are a row's own."""
    longest = scores.shape[1]
    gaps = [[0] * (longest - len(row)) for row in tokens]
    ids = torch.tensor(
        [[*gap, *row] if at_end else [*row, *gap] for row, gap in zip(tokens, gaps, strict=True)]
    )
    counts, places = torch.tensor([len(row) for row in tokens]), torch.arange(longest)
    is_own = places >= longest - counts[:, None] if at_end else places < counts[:, None]
    # In bfloat16, log-probabilities have three digits, and sums over an answer lose more.
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32)).log_softmax(dim=-1)
    return wide.gather(2, to_device(ids, wide.device).long()[:, :, None])[:, :, 0], is_own


def _answer_scores(
    module: Any, reader: TextReader, questions: Sequence[Any], columns: Sequence[Sequence[str]]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Run a decoder on rows of question and answer, padded on the left, so that few scores are computed."""
    takes = inspect.signature(module.forward).parameters
    every = [[reader.answer_tokens(answer) for answer in column] for column in columns]
    spare = max(len(tokens) for column in every for tokens in column)
    for tokens in every:
        batch, num_kept = reader.continued(questions, tokens, spare=spare), max(map(len, tokens)) + 1
        # Scores of all tokens [n, t, vocabulary] may not fit into memory, but not every model can return a part.
        inputs: dict[str, Any] = {"logits_to_keep": num_kept}
        # Models with positions in images compute them from `mm_token_type_ids`; others need those without padding.
        if "mm_token_type_ids" not in batch:
            inputs["position_ids"] = (batch["attention_mask"].cumsum(dim=1) - 1).clamp_min(0)
        inputs = batch | {name: value for name, value in inputs.items() if name in takes}
        scores = module(**fitted(module, inputs), use_cache=False).logits
        yield _of_tokens(scores[:, -num_kept:-1], tokens, at_end=True)


def _encoded_once(
    module: Any, reader: TextReader, questions: Sequence[Any], columns: Sequence[Sequence[str]]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Run an encoder-decoder: encode questions once, and decode every answer."""
    device = next(module.parameters()).device
    batch = fitted(module, reader(_unanswered(questions)))
    inputs = {name: value for name, value in batch.items() if not name.startswith("decoder_")}
    mask = {name: value for name, value in inputs.items() if name == "attention_mask"}
    encoded = module.get_encoder()(**inputs)
    ends = () if reader.end is None else (reader.end,)
    for column in columns:
        tokens = [(*reader.answer_tokens(answer), *ends) for answer in column]
        longest = max(map(len, tokens))
        rows = [[*reader.before_answers, *row[:-1]] for row in tokens]
        ids = torch.tensor([row + [reader.tokenizer.pad_token_id] * (longest - len(row)) for row in rows])
        scores = module(
            encoder_outputs=encoded, decoder_input_ids=to_device(ids, device), use_cache=False, **mask
        ).logits
        yield _of_tokens(scores[:, len(reader.opening) :], tokens, at_end=False)
