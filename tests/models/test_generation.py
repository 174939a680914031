"""Greedy answers are those of a plain loop over the model, whatever its settings say and however they are batched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from driftlens.models.language.generation import generate
from driftlens.models.language.texts import TextReader
from tests.models.tokenizers import word_tokenizer

QUESTIONS = ("is it red", "no", "is green it blue yes no red")
NEW = 6


def llama(vocabulary: int) -> Any:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=32,
            initializer_range=0.6,
        )
    )


def t5(vocabulary: int) -> Any:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=vocabulary,
            d_model=16,
            d_kv=8,
            d_ff=24,
            num_layers=2,
            num_heads=2,
            decoder_start_token_id=0,
            initializer_factor=3.0,
        )
    )


def plain(model: Any, reader: TextReader, question: str) -> list[int]:
    """One question at a time, the whole row anew for every token."""
    row = torch.tensor(reader.questions([question]))
    answer: list[int] = []
    while len(answer) < NEW and (not answer or answer[-1] not in reader.ends):
        if reader.form == "decoder":
            given = {"input_ids": torch.cat((row, torch.tensor([answer], dtype=torch.long)), dim=1)}
        else:
            given = {"input_ids": row, "decoder_input_ids": torch.tensor([[reader.start, *answer]])}
        with torch.no_grad():
            answer.append(int(model(**given).logits[0, -1].argmax()))
    return answer


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
