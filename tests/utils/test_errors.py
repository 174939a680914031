"""Words of messages."""

from __future__ import annotations

import pytest

from driftlens.utils.errors import start_sentence


@pytest.mark.parametrize(("text", "started"), [("accuracy", "Accuracy"), ("nDCG@10", "nDCG@10"), ("e", "E"), ("", "")])
def test_a_sentence_starts_with_a_capital_but_names_keep_theirs(text: str, started: str) -> None:
    assert start_sentence(text) == started
