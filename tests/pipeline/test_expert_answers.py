"""Unlabelled calibration of language models: the expert's own greedy answers stand where the data has none."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import torch

from driftlens.base.access import Access
from driftlens.base.errors import DataError
from driftlens.jobs.study.opening import open_study
from driftlens.spec import load_spec
from tests.zoo.decoders import NEW, llama, plain, t5
from tests.zoo.tokenizers import word_tokenizer

QUESTIONS = ["is it red", "no", "is green it blue yes no red", "it is blue"]


@pytest.mark.parametrize(
    ("make", "form", "loader", "asked"),
    [(t5, "encoder-decoder", "hf-t5", {}), (llama, "decoder", "hf-decoder", {"decoder_inputs": "expert"})],
)
def test_calibration_shows_each_experts_own_answers(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, make: Any, form: str, loader: str, asked: Any
) -> None:
    monkeypatch.setattr("driftlens.jobs.study.opening.NEW_TOKENS", NEW)
    tokenizer = word_tokenizer(form)
    models = {}
    for seed, name in enumerate(("base", "cars", "dtd")):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            models[name] = make(len(tokenizer)).eval()
        models[name].save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    rows = "\n".join(json.dumps({"input": question}) for question in QUESTIONS)
    (tmp_path / "rows.jsonl").write_text(rows)
    entry = {
        "kind": "jsonl",
        "calibration": str(tmp_path / "rows.jsonl"),
        "test": str(tmp_path / "rows.jsonl"),
    }
    spec = {
        "version": 1,
        "architecture": {"loader": loader, "source": str(tmp_path / "base")},
        "base": {"weights": str(tmp_path / "base")},
        "merge": {"method": "average"},
        "experts": {task: {"weights": str(tmp_path / task)} for task in ("cars", "dtd")},
        "data": {
            "defaults": {"n": 3, "n_diagnosis": 1, "batch_size": 2},
            "cars": {**entry, **asked},
            "dtd": entry,
        },
    }
    study, _ = open_study(load_spec(spec), access=Access(device="cpu"))
    samples = study.tasks["cars"].calibration
    assert samples is not None and samples.texts is not None and samples.texts.reader is not None
    reader = samples.texts.reader
    budget, study.pool.budget = study.pool.budget, 1000  # of which no model has as few bytes
    with pytest.raises(DataError, match=r"weights of expert:cars don't fit compute.feature_budget"):
        samples.load([0])
    study.pool.budget = budget
    given = samples.load(range(3))
    name = "input_ids" if form == "decoder" else "decoder_input_ids"
    for at, row in enumerate(given[name].tolist()):
        question = reader.questions([samples.text(at).input])[0]
        said = [
            token
            for token in plain(models["cars"], reader, samples.text(at).input)
            if token not in reader.ends
        ]
        text = tokenizer.decode(said, skip_special_tokens=True).strip()
        if form == "decoder":
            answer = [*reader.answer_tokens(f" {text}"), tokenizer.eos_token_id] if text else []
            wanted = question + answer
        else:
            wanted = [reader.start, *reader.answer_tokens(text)]
        assert text, "an answer to compare"
        assert row[: len(wanted)] == wanted and not any(row[len(wanted) :])
    # The beginning of the set, as a calibration on fewer samples takes it, has the same answers.
    assert torch.equal(samples.load([0])[name][0], given[name][0, : samples.load([0])[name].shape[1]])
    told = [notice for notice in study.notices if "the expert's own greedy answers" in notice]
    assert [notice.split(":")[0] for notice in told] == (["cars"] if asked else ["cars", "dtd"])
