"""Texts to ids: what a model is given is what its library gives it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from driftlens.checkpoints.loading import load_tokenizer
from driftlens.models.preprocessing import hf_text_preprocess
from driftlens.models.texts import TextProcessor, TextSample
from driftlens.utils.errors import DriftLensError, SpecError
from tests.zoo.tokenizers import word_tokenizer


def ids(tokenizer: Any, *words: str) -> list[int]:
    found = tokenizer.convert_tokens_to_ids(list(words))
    assert tokenizer.unk_token_id not in found
    return list(found)


ASKED = TextSample("is it red", " yes")


@pytest.mark.parametrize("settings", [{}, {"ends_texts": True}, {"padding_side": "left"}, {"pad_token": None}])
def test_a_decoders_answer_follows_the_question_and_rows_are_padded_on_the_right(
    settings: dict[str, Any],
) -> None:
    tokenizer = word_tokenizer(**settings)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    reader = TextProcessor(tokenizer, "decoder")
    question = ids(tokenizer, "<s>", "is", "▁it", "▁red")
    answer = ids(tokenizer, "▁yes", "</s>")
    found = reader([ASKED, TextSample("is it red")])
    assert found["input_ids"].tolist() == [
        question + answer,
        question + [tokenizer.pad_token_id] * 2,
    ]
    assert found["attention_mask"].tolist() == [[1] * 6, [1] * 4 + [0] * 2]
    assert reader.question_tokens(["is it red"]) == [question]
    assert (reader.answer_tokens(" yes"), reader.end_token) == (tuple(answer[:1]), answer[1])
    assert reader.decode(answer) == " yes"


def test_a_text_that_begins_with_its_first_token_gets_no_second_one() -> None:
    tokenizer = word_tokenizer()
    reader = TextProcessor(tokenizer, "decoder")
    assert reader.question_tokens(["<s>is it"]) == reader.question_tokens(["is it"])


def test_an_encoder_decoders_answer_follows_the_start_token_and_is_shifted() -> None:
    tokenizer = word_tokenizer("encoder-decoder")
    reader = TextProcessor(tokenizer, "encoder-decoder", start=tokenizer.pad_token_id)
    found = reader([TextSample("is it red", "yes no"), TextSample("is", "")])
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
    found = TextProcessor(tokenizer)([TextSample(text, "yes") for text in texts])
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def test_what_is_too_long_is_cut_where_no_answer_stands() -> None:
    decoder = word_tokenizer()
    reader = TextProcessor(decoder, "decoder", max_length=5)
    assert reader([ASKED])["input_ids"].tolist() == [ids(decoder, "<s>", "▁it", "▁red", "▁yes", "</s>")]
    assert reader.question_tokens(["is it red blue no"]) == [ids(decoder, "<s>", "▁it", "▁red", "▁blue", "▁no")]
    both = word_tokenizer("encoder-decoder")
    reader = TextProcessor(both, "encoder-decoder", max_length=3, start=0)
    found = reader([TextSample("is it red blue no", "yes no yes no")])
    assert found["input_ids"].tolist() == [ids(both, "is", "▁it", "</s>")]
    assert found["decoder_input_ids"].tolist() == [[0, *ids(both, "yes", "▁no")]]
    encoder = word_tokenizer("encoder")
    assert TextProcessor(encoder, max_length=4)([ASKED])["input_ids"].tolist() == [
        ids(encoder, "[CLS]", "is", "▁it", "[SEP]")
    ]


def test_a_digest_tells_tokenizers_apart_by_what_decides_on_ids() -> None:
    plain = TextProcessor(word_tokenizer()).digest
    same = word_tokenizer(padding_side="left", model_max_length=7)
    same.chat_template = "{{ messages }}"
    assert TextProcessor(same).digest == plain
    assert TextProcessor(word_tokenizer(words=("is", "it"))).digest != plain
    assert TextProcessor(word_tokenizer(eos_token="<s>")).digest != plain


def test_files_beside_the_model_say_how_its_texts_are_read(tmp_path: Path) -> None:
    tokenizer = word_tokenizer("encoder-decoder", model_max_length=9, padding_side="left")
    config = transformers.T5Config(vocab_size=len(tokenizer), decoder_start_token_id=None)
    config.save_pretrained(tmp_path)
    # From nothing the library makes tokenizers of special tokens and spaces.
    for found in (
        config,
        transformers.BertConfig(),
        transformers.RobertaConfig(),
        transformers.DebertaV2Config(),
    ):
        found.save_pretrained(tmp_path)
        with pytest.raises(SpecError, match="no tokenizer with a pad or end token"):
            hf_text_preprocess(str(tmp_path), found, True, "encoder-decoder")
    config.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    config.decoder_start_token_id = None
    with pytest.raises(SpecError, match="has no decoder start token"):
        hf_text_preprocess(str(tmp_path), config, True, "encoder-decoder")
    transformers.GenerationConfig(decoder_start_token_id=0, eos_token_id=[3, 7]).save_pretrained(tmp_path)
    found = hf_text_preprocess(str(tmp_path), config, True, "encoder-decoder")
    reader = found.texts
    assert reader is not None
    assert (reader.start, reader.ends, reader.max_length) == (0, (3, 7), 9)
    assert found.settings["tokenizer"] == reader.digest == TextProcessor(tokenizer).digest
    assert found.settings["packing"] == "none"
    with pytest.raises(SpecError, match="fits its 5 tokens"):
        hf_text_preprocess(str(tmp_path), transformers.T5Config(vocab_size=5), True, "encoder-decoder")
    # Of encoders too, any token may stand for padding.
    word_tokenizer("encoder", pad_token=None).save_pretrained(tmp_path)
    reader = hf_text_preprocess(str(tmp_path), transformers.BertConfig(), True, "encoder").texts
    assert reader is not None and reader([TextSample("is it"), TextSample("no")])["attention_mask"].tolist()[1] == [
        1,
        1,
        1,
        0,
    ]
    # Positions of RoBERTa begin behind the number of its padding token.
    roberta = transformers.RobertaConfig(vocab_size=len(tokenizer), max_position_embeddings=8, pad_token_id=1)
    reader = hf_text_preprocess(str(tmp_path), roberta, True, "encoder").texts
    assert reader is not None and (reader.max_length, reader.limit) == (6, 6)


def test_where_there_are_no_files_there_is_no_tokenizer(tmp_path: Path) -> None:
    assert load_tokenizer(str(tmp_path), offline=True) is None
    assert load_tokenizer(str(tmp_path / "nothing"), offline=True) is None


@pytest.mark.parametrize(("stated", "length"), [(7.0, 7), (0.25, None)])
def test_a_tokenizers_own_limit_is_a_number_of_tokens(stated: object, length: int | None, tmp_path: Path) -> None:
    word_tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": stated}))
    config = transformers.GPT2Config(vocab_size=100)
    if length is None:
        with pytest.raises(DriftLensError, match=r"model_max_length|tokenizer"):
            hf_text_preprocess(str(tmp_path), config, True, "decoder")
    else:
        read = hf_text_preprocess(str(tmp_path), config, True, "decoder")
        assert read.settings["max_length"] == length
