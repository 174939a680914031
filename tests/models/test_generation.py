"""Greedy answers and likelihoods are those of a plain loop over the model, however questions are batched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from driftlens.models import texts
from driftlens.models.texts import TextProcessor, generate, generate_with_likelihoods, log_likelihoods
from tests.zoo.decoders import NEW, QUESTIONS, llama, plain, t5
from tests.zoo.tokenizers import word_tokenizer


@pytest.mark.parametrize(("make", "form"), [(llama, "decoder"), (t5, "encoder-decoder")])
def test_answers_are_the_likeliest_tokens_whatever_the_models_settings_say(make: Any, form: Any) -> None:
    tokenizer = word_tokenizer(form)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = make(len(tokenizer)).double().train()
    start = 0 if form == "encoder-decoder" else None
    free = TextProcessor(tokenizer, form, 32, start=start)
    said = [plain(model.eval(), free, question) for question in QUESTIONS]
    # A token that the model says somewhere in the middle ends its answers here, so that they differ in length.
    reader = TextProcessor(tokenizer, form, 32, start=start, ends=(tokenizer.eos_token_id, said[0][2]))
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
    reader = TextProcessor(tokenizer, "decoder", 32, ends=())
    [row] = reader.question_tokens([long], spare=NEW)
    assert len(row) == 32 - NEW
    short = tokenizer.decode(row[1:])
    assert generate(model, reader, [long], NEW) == generate(model, reader, [short], NEW)


ANSWERS = (" yes", " no it is", " red")


def made(form: str) -> tuple[Any, TextProcessor]:
    tokenizer = word_tokenizer(form)
    torch.manual_seed(3)
    model = (llama if form == "decoder" else t5)(len(tokenizer)).double()
    return model, TextProcessor(tokenizer, form, 32, start=0 if form == "encoder-decoder" else None)  # type: ignore[arg-type]


@torch.no_grad()
def by_hand(model: Any, reader: TextProcessor, question: str, answer: str) -> tuple[float, int]:
    """One token after the other, the whole row anew for each."""
    asked, total = torch.tensor(reader.question_tokens([question])), 0.0
    tokens = [
        *reader.answer_tokens(answer),
        *([reader.end_token] if reader.form == "encoder-decoder" else []),
    ]
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
    assert torch.allclose(own, sums.diagonal(), rtol=0, atol=1e-9)  # answers of different lengths in one batch


def test_answers_that_differ_in_their_last_token_share_one_pass() -> None:
    model, reader = made("decoder")
    passes: list[int] = []
    model.register_forward_hook(lambda *_: passes.append(1))
    words = [" red", " blue", " no red", " no blue"]
    sums, _ = log_likelihoods(model, reader, QUESTIONS, [words] * len(QUESTIONS))
    assert len(passes) == 2
    for place, word in enumerate(words):
        alone, _ = log_likelihoods(model, reader, QUESTIONS, [[word]] * len(QUESTIONS))
        assert torch.allclose(sums[:, place], alone[:, 0], rtol=0, atol=1e-9)


@pytest.mark.parametrize("form", ["decoder", "encoder-decoder"])
def test_generation_tells_the_likelihood_of_what_it_writes(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, reader = made(form)
    # Questions and targets; the last target is not written, the others up to their last token.
    pairs = [(QUESTIONS[1], target) for target in (" is", " is is", " is red", " no it is")]
    if form == "encoder-decoder":
        pairs = [(QUESTIONS[2], target) for target in ("blue", "red")]
        # Its targets have an end token: here the one that the model writes after "blue".
        reader.tokenizer.eos_token = reader.tokenizer.convert_ids_to_tokens(1)
    questions, targets = [question for question, _ in pairs], [target for _, target in pairs]
    wanted, numbers = log_likelihoods(model, reader, questions, [[target] for target in targets])
    computed: list[str] = []

    def counted(model: Any, reader: TextProcessor, questions: Any, answers: Any) -> Any:
        computed.extend(answer for [answer] in answers)
        return log_likelihoods(model, reader, questions, answers)

    monkeypatch.setattr(texts, "log_likelihoods", counted)
    again, sums, counts = generate_with_likelihoods(model, reader, questions, NEW, targets)
    assert again == generate(model, reader, questions, NEW)
    torch.testing.assert_close(sums, wanted[:, 0], rtol=1e-6, atol=0)  # `generate` rounds scores to float32
    assert counts.equal(numbers[:, 0])
    assert computed == targets[-1:]


def test_a_question_that_is_cut_for_generation_keeps_its_likelihood() -> None:
    model, reader = made("decoder")
    long = ["is " * 40 + "it red"]
    [answer] = generate(model, reader, long, NEW)
    wanted, _ = log_likelihoods(model, reader, long, [[answer.split()[0]]])
    _, sums, _ = generate_with_likelihoods(model, reader, long, NEW, [answer.split()[0]])
    torch.testing.assert_close(sums, wanted[:, 0], rtol=0, atol=1e-9)
