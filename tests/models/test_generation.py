"""Greedy answers are those of a plain loop over the model, whatever its settings say and however they are batched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from driftlens.models.language.generation import generate
from driftlens.models.language.texts import TextReader
from tests.zoo.decoders import NEW, QUESTIONS, llama, plain, t5
from tests.zoo.tokenizers import word_tokenizer


@pytest.mark.parametrize(("make", "form"), [(llama, "decoder"), (t5, "encoder-decoder")])
def test_answers_are_the_likeliest_tokens_whatever_the_models_settings_say(make: Any, form: Any) -> None:
    tokenizer = word_tokenizer(form)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = make(len(tokenizer)).double().train()
    start = 0 if form == "encoder-decoder" else None
    free = TextReader(tokenizer, form, 32, start=start)
    said = [plain(model.eval(), free, question) for question in QUESTIONS]
    # A token that the model says somewhere in the middle ends its answers here, so that they differ in length.
    reader = TextReader(tokenizer, form, 32, start=start, ends=(tokenizer.eos_token_id, said[0][2]))
    model.train().generation_config = own = transformers.GenerationConfig(
        do_sample=True, num_beams=3, repetition_penalty=9.0, max_length=3, eos_token_id=7, temperature=9.0
    )
    wanted = [
        tokenizer.decode(
            [token for token in plain(model.eval(), reader, question) if token not in reader.ends],
            skip_special_tokens=True,
        ).strip()
        for question in QUESTIONS
    ]
    model.train()
    assert len(set(wanted)) > 1
    for batch_size in (1, 3):
        assert generate(model, reader, QUESTIONS, NEW, batch_size=batch_size) == wanted
    assert model.training and model.generation_config is own


def test_questions_leave_room_for_answers() -> None:
    tokenizer = word_tokenizer()
    model = llama(len(tokenizer)).eval()
    long = "is " * 40 + "it red"
    reader = TextReader(tokenizer, "decoder", 32, ends=())
    [row] = reader.questions([long], spare=NEW)
    assert len(row) == 32 - NEW
    short = tokenizer.decode(row[1:])
    assert generate(model, reader, [long], NEW) == generate(model, reader, [short], NEW)
