"""Small tokenizers, made by the `tokenizers` library and wrapped as transformers wraps those of real models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

WORDS = ("is", "it", "red", "green", "blue", "yes", "no", "question", ":", "?", "answer")


def word_tokenizer(
    form: str = "decoder", *, words: Sequence[str] = WORDS, ends_texts: bool = False, **settings: Any
) -> PreTrainedTokenizerFast:
    """One token per word, each with the space before it; special tokens as models of this form have them.

    Args:
        form: `encoder` ([CLS] text [SEP]), `decoder` (<s> text) or `encoder-decoder` (text </s>).
        words: the vocabulary.
        ends_texts: whether a decoder's ends every text too, as some do.
        settings: of the tokenizer of transformers; `pad_token` and others may be set to None.
    """
    marked = [word for plain in words for word in (plain, f"\u2581{plain}")]
    if form == "encoder":
        special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    else:
        special = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    vocabulary = {token: at for at, token in enumerate((*special.values(), *marked))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=special["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(prepend_scheme="never"), pre_tokenizers.Split(":", "isolated")]
    )
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    single = {
        "encoder": "[CLS] $A [SEP]",
        "decoder": "<s> $A </s>" if ends_texts else "<s> $A",
        "encoder-decoder": "$A </s>",
    }[form]
    used = [token for token in single.split() if token != "$A"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single,
        pair="[CLS] $A [SEP] $B:1 [SEP]:1" if form == "encoder" else f"{single} $B",
        special_tokens=[(token, vocabulary[token]) for token in used],
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **{**special, **settings})
