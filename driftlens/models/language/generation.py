"""Greedy answers of language models, by their library's own `generate`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from driftlens.models.language.texts import TextReader


def generate(
    module: nn.Module, reader: TextReader, inputs: Sequence[str], max_new_tokens: int, *, batch_size: int = 32
) -> list[str]:
    """What a model answers to each question: always the likeliest next token, up to a token that ends answers.

    What the model's own generation settings say of sampling, beams and penalties is left aside, for experts and merged
    models are compared; the tokens that end an answer are kept. The module is given back as it came.

    Args:
        module: the library's own whole model, with weights.
        reader: of its texts. Questions that leave no room for the answer are cut as it says.
        inputs: the questions, templates filled in.
        max_new_tokens: of an answer at most.
        batch_size: questions at a time; no answer depends on it, up to rounding.

    Returns:
        The answers without special tokens and without spaces around them.
    """
    answers: list[str] = []
    with _greedy(module, reader, max_new_tokens) as settings:
        for first in range(0, len(inputs), batch_size):
            batch = _batch(reader, inputs[first : first + batch_size], max_new_tokens)
            device = next(module.parameters()).device
            whole: Tensor = module.generate(  # type: ignore[operator]
                **{name: value.to(device) for name, value in batch.items()}, generation_config=settings
            )
            skipped = batch["input_ids"].shape[1] if reader.form == "decoder" else 1
            answers += [_answer(reader, row) for row in whole[:, skipped:].tolist()]
    return answers


def _batch(reader: TextReader, inputs: Sequence[str], max_new_tokens: int) -> dict[str, Tensor]:
    """Questions as `generate` wants them: those of decoders padded on the left, so that all go on at one place."""
    if reader.form != "decoder":
        batch = reader([(text, "") for text in inputs])
        return {name: batch[name] for name in ("input_ids", "attention_mask")}
    rows = reader.questions(inputs, spare=max_new_tokens)
    longest = max(map(len, rows))
    pad = reader.tokenizer.pad_token_id
    return {
        "input_ids": torch.tensor([[pad] * (longest - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows]),
    }


def _answer(reader: TextReader, ids: Sequence[int]) -> str:
    end = next((place for place, token in enumerate(ids) if token in reader.ends), len(ids))
    return reader.decode(ids[:end]).strip()


@contextmanager
def _greedy(module: Any, reader: TextReader, max_new_tokens: int) -> Iterator[Any]:
    """Settings of a greedy search; meanwhile the module has none of its own, which would fill what these leave open."""
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
    own_settings, was_training = module.generation_config, module.training
    module.generation_config = GenerationConfig()
    module.eval()
    try:
        with torch.no_grad():
            yield settings
    finally:
        module.generation_config = own_settings
        module.train(was_training)
