"""Texts to ids: what a model is given is what its library gives it, question and answer where each form has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from driftlens.models.texts import Text, TextReader
from tests.models.tokenizers import word_tokenizer


def ids(tokenizer: Any, *words: str) -> list[int]:
    found = tokenizer.convert_tokens_to_ids(list(words))
    assert tokenizer.unk_token_id not in found
    return list(found)


ASKED = Text("is it red", " yes")


@pytest.mark.parametrize(
    "settings", [{}, {"ends_texts": True}, {"padding_side": "left"}, {"pad_token": None}]
)
def test_a_decoders_answer_follows_the_question_and_rows_are_padded_on_the_right(
    settings: dict[str, Any],
) -> None:
    tokenizer = word_tokenizer(**settings)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    reader = TextReader(tokenizer, "decoder")
    question = ids(tokenizer, "<s>", "is", "▁it", "▁red")
    answer = ids(tokenizer, "▁yes", "</s>")
    found = reader([ASKED, Text("is it red")])
    assert found["input_ids"].tolist() == [
        question + answer,
        question + [tokenizer.pad_token_id] * 2,
    ]
    assert found["attention_mask"].tolist() == [[1] * 6, [1] * 4 + [0] * 2]
    assert reader.questions(["is it red"]) == [question]
    assert (reader.answer_tokens(" yes"), reader.end) == (tuple(answer[:1]), answer[1])
    assert reader.decode(answer) == " yes"


def test_a_text_that_begins_with_its_first_token_gets_no_second_one() -> None:
    tokenizer = word_tokenizer()
    reader = TextReader(tokenizer, "decoder")
    assert reader.questions(["<s>is it"]) == reader.questions(["is it"])


def test_an_encoder_decoders_answer_follows_the_start_token_and_is_shifted() -> None:
    tokenizer = word_tokenizer("encoder-decoder")
    reader = TextReader(tokenizer, "encoder-decoder", start=tokenizer.pad_token_id)
    found = reader([Text("is it red", "yes no"), Text("is", "")])
    pad = tokenizer.pad_token_id
    asked = ids(tokenizer, "is", "▁it", "▁red", "</s>")
    assert found["input_ids"].tolist() == [asked, [*ids(tokenizer, "is", "</s>"), pad, pad]]
    # The library's own teacher forcing: labels are answer and end, and the decoder reads them one place later.
    labels = torch.tensor([[*ids(tokenizer, "yes", "▁no"), tokenizer.eos_token_id]])
    assert found["decoder_input_ids"][0].tolist() == [pad, *labels[0, :-1].tolist()]
    assert found["decoder_attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]


def test_an_encoder_reads_the_question_as_its_tokenizer_gives_it() -> None:
    tokenizer = word_tokenizer("encoder", padding_side="left")
    texts = ["is it red", "no"]
    wanted = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    found = TextReader(tokenizer)([Text(text, "yes") for text in texts])
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def test_what_is_too_long_is_cut_where_no_answer_stands() -> None:
    decoder = word_tokenizer()
    reader = TextReader(decoder, "decoder", max_length=5)
    assert reader([ASKED])["input_ids"].tolist() == [ids(decoder, "<s>", "▁it", "▁red", "▁yes", "</s>")]
    assert reader.questions(["is it red blue no"]) == [ids(decoder, "<s>", "▁it", "▁red", "▁blue", "▁no")]
    both = word_tokenizer("encoder-decoder")
    reader = TextReader(both, "encoder-decoder", max_length=3, start=0)
    found = reader([Text("is it red blue no", "yes no yes no")])
    assert found["input_ids"].tolist() == [ids(both, "is", "▁it", "</s>")]
    assert found["decoder_input_ids"].tolist() == [[0, *ids(both, "yes", "▁no")]]
    encoder = word_tokenizer("encoder")
    assert TextReader(encoder, max_length=4)([ASKED])["input_ids"].tolist() == [
        ids(encoder, "[CLS]", "is", "▁it", "[SEP]")
    ]


def test_a_digest_tells_tokenizers_apart_by_what_decides_on_ids() -> None:
    plain = TextReader(word_tokenizer()).digest
    same = word_tokenizer(padding_side="left", model_max_length=7)
    same.chat_template = "{{ messages }}"
    assert TextReader(same).digest == plain
    assert TextReader(word_tokenizer(words=("is", "it"))).digest != plain
    assert TextReader(word_tokenizer(eos_token="<s>")).digest != plain
