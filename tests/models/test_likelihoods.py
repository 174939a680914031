"""Log-likelihoods of answers against sums taken token by token, and against other batches of the same questions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from driftlens.models.language.generation import log_likelihoods
from driftlens.models.language.texts import TextReader
from tests.zoo.decoders import QUESTIONS, llama, t5
from tests.zoo.tokenizers import word_tokenizer

ANSWERS = (" yes", " no it is", " red")


def made(form: str) -> tuple[Any, TextReader]:
    tokenizer = word_tokenizer(form)
    torch.manual_seed(3)
    model = (llama if form == "decoder" else t5)(len(tokenizer)).double()
    return model, TextReader(tokenizer, form, 32, start=0 if form == "encoder-decoder" else None)  # type: ignore[arg-type]


@torch.no_grad()
def by_hand(model: Any, reader: TextReader, question: str, answer: str) -> tuple[float, int]:
    """One token after the other, the whole row anew for each."""
    asked, total = torch.tensor(reader.questions([question])), 0.0
    tokens = [*reader.answer_tokens(answer), *([reader.end] if reader.form == "encoder-decoder" else [])]
    for at, token in enumerate(tokens):
        before = torch.tensor([tokens[:at]], dtype=torch.long)
        if reader.form == "decoder":
            given = {"input_ids": torch.cat((asked, before), dim=1)}
        else:
            given = {
                "input_ids": asked,
                "decoder_input_ids": torch.cat((torch.zeros_like(asked[:, :1]), before), 1),
            }
        total += float(model(**given).logits[0, -1].log_softmax(dim=0)[token])
    return total, len(tokens)


@pytest.mark.parametrize("form", ["decoder", "encoder-decoder"])
def test_sums_are_those_taken_token_by_token_in_any_batch(form: str) -> None:
    model, reader = made(form)
    model.train()
    sums, counts = log_likelihoods(model, reader, QUESTIONS, [ANSWERS] * len(QUESTIONS))
    assert model.training and sums.shape == counts.shape == (len(QUESTIONS), len(ANSWERS))
    model.eval()
    for at, question in enumerate(QUESTIONS):
        alone, _ = log_likelihoods(model, reader, [question], [ANSWERS])
        assert torch.allclose(alone[0], sums[at], rtol=0, atol=1e-9)
        for place, answer in enumerate(ANSWERS):
            total, count = by_hand(model, reader, question, answer)
            assert sums[at, place].item() == pytest.approx(total, abs=1e-9) and counts[at, place] == count
    own = log_likelihoods(model, reader, QUESTIONS, [[answer] for answer in ANSWERS])[0][:, 0]
    assert torch.allclose(
        own, sums.diagonal(), rtol=0, atol=1e-9
    )  # answers of different lengths in one batch
