"""Texts are sorted by length, so that batches hold little padding; other samples keep their order."""

from __future__ import annotations

import torch

from driftlens.data.samples import sort_by_length
from tests.data.test_views import samples, texts


def test_texts_are_sorted_by_length_with_their_ids_and_answers() -> None:
    questions = ["aaaa", "a", "aaa", "aa"]
    found = sort_by_length(texts(questions))
    assert found.ids == ("1", "3", "2", "0")
    assert [found.text(position).input for position in range(4)] == sorted(questions)
    assert found.load(range(4)) == [1, 3, 2, 0] and found.text(0).target == " answer 1"


def test_other_samples_keep_their_order() -> None:
    given = samples(torch.eye(3))
    assert sort_by_length(given) is given
