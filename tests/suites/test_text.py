"""The written tasks have definite answers and splits of their own; the text suite opens in its own libraries."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from driftlens.suites.drawing import PURPOSES
from driftlens.suites.text import TextSuite, text_suite, word_tokenizer
from driftlens.suites.writing import WrittenTask, texts
from tests.suites.conftest import TINY_TEXT

NUMBERS = {word: at for at, word in enumerate(texts["sums"].classes)}
TAKEN = {"sells", "loses", "frees", "sees", "gives", "took"}


@pytest.mark.parametrize("task", texts.values(), ids=texts)
def test_texts_are_the_same_again_and_have_one_answer_and_one_split_each(task: WrittenTask):
    drawn = {purpose: list(task.rows(purpose, 600, 0)) for purpose in PURPOSES}
    assert drawn["test"] == list(task.rows("test", 600, 0)) != list(task.rows("test", 600, 1))
    for rows in drawn.values():
        counts = Counter(answer for _, answer in rows)
        assert set(counts) == set(task.classes) and max(counts.values()) - min(counts.values()) <= 1
        assert len({text for text, _ in rows}) == 600
    asked = {purpose: {text for text, _ in rows} for purpose, rows in drawn.items()}
    assert not asked["test"] & (asked["base"] | asked["train"])
    answers: dict[str, set[str]] = {}
    for text, answer in itertools.chain(*drawn.values()):
        answers.setdefault(text, set()).add(answer)
    assert all(len(each) == 1 for each in answers.values())


def test_sums_add_up():
    for text, answer in texts["sums"].rows("train", 600, 0):
        words = re.findall(r"[a-z]+", text)
        found = [NUMBERS[word] for word in words if word in NUMBERS]
        # Of what is given away, either number may come first; it is the smaller one.
        result = max(found) - min(found) if TAKEN & set(words) else sum(found)
        assert result == NUMBERS[answer] and len(found) == 2


def test_a_text_is_its_words_behind_a_start_and_comes_back_from_them():
    tokenizer = word_tokenizer(["the", "soup", "was", "good", "."])
    ids = tokenizer(["The soup was good.", "soup"], padding=True)
    assert ids["input_ids"] == [[1, 4, 5, 6, 7, 8], [1, 5, 0, 0, 0, 0]]
    assert tokenizer.decode([7], skip_special_tokens=True) == "good"


@pytest.fixture(scope="module")
def text(cache: Path) -> TextSuite:
    return text_suite(cache=cache, recipe=TINY_TEXT)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:.*is_gradient_checkpointing:FutureWarning"
)  # peft asks transformers for it
def test_the_libraries_open_base_and_experts_and_give_the_measured_accuracies(text: TextSuite):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from driftlens.spec import load_spec

    spec = load_spec(text.spec())
    assert spec.tasks == text.tasks == tuple(sorted(texts))
    measured, entry = text.record()["test_accuracy"], text.spec()["experts"]
    for name, task in texts.items():
        tokenizer = AutoTokenizer.from_pretrained(text.folder / "base")
        base = AutoModelForCausalLM.from_pretrained(text.folder / "base")
        before = {key: value.clone() for key, value in base.state_dict().items()}
        assert _accuracy(base, tokenizer, task) == measured[name]["base"]
        folder = entry[name]["weights"]
        is_adapted = name == TINY_TEXT.adapted
        expert = (PeftModel if is_adapted else AutoModelForCausalLM).from_pretrained(
            *([base] if is_adapted else []), folder
        )
        expert = expert.merge_and_unload() if is_adapted else expert
        assert _accuracy(expert, tokenizer, task) == measured[name]["expert"]
        moved = [key for key, value in expert.state_dict().items() if not torch.equal(value, before[key])]
        assert any("_proj" in key for key in moved)
        assert not is_adapted or all("_proj" in key for key in moved)


@torch.no_grad()
def _accuracy(model, tokenizer, task: WrittenTask) -> float:
    """One question at a time, answered by the class whose word scores best."""
    rows = list(task.rows("test", TINY_TEXT.num_test, 0))
    words = tokenizer.convert_tokens_to_ids(list(task.classes))
    right = 0
    for text, answer in rows:
        ids = tokenizer(task.prompt.replace("{input}", text), return_tensors="pt")["input_ids"]
        right += task.classes[model.eval()(ids).logits[0, -1, words].argmax()] == answer
    return right / len(rows)
