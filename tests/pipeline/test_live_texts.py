"""Live language models with their tokenizer: what they answer is scored as it is from files."""

from __future__ import annotations

import pathlib
from typing import Any

import pandas as pd
import pytest
import torch
import transformers

import driftlens as dl
from driftlens.base.errors import DataError, IncompatibleModelsError, SpecError
from driftlens.jobs.analyze.job import analyze
from driftlens.spec.requests import AnalysisRequest
from tests.zoo.cases import perturbed, with_seed
from tests.zoo.suite import CLASSES, PAIRS, Suite
from tests.zoo.tokenizers import word_tokenizer

WORDS = {"no it": "yes", "no is": "red", "yes": "green"}
RULES: dict[str, dict[str, Any]] = {
    "free": {"metric": ["exact_match", "perplexity"], "prompt": "question : {input}"},
    "pick": {"classes": ["no it", "no is", "yes"]},
    "word": {"words": WORDS},
}
ROWS = {"free": PAIRS, "pick": [*CLASSES.items()], "word": [*CLASSES.items()]}


def suite_of(form: str, folder: pathlib.Path) -> tuple[Suite, dict[str, Any]]:
    """Models in files, and the same in memory; the expert is a base of other weights."""
    suite = Suite(form, folder, learns=False)
    base, expert = (type(suite.model).from_pretrained(folder / name).eval() for name in ("base", "expert"))
    for parameter in expert.parameters():
        parameter.data.mul_(1.1)
    suite.model = expert
    suite.save("expert")
    return suite, {"base": base, "merged": base, "experts": dict.fromkeys(ROWS, expert)}


@pytest.mark.slow
@pytest.mark.parametrize("form", ["decoder", "encoder-decoder"])
def test_scores_are_those_of_the_same_models_in_files(form: str, tmp_path: pathlib.Path) -> None:
    suite, modules = suite_of(form, tmp_path)
    data = {task: suite.data(task, ROWS[task], **RULES[task]) for task in ROWS}
    spec = suite.spec(data)
    spec["data"]["defaults"]["n_diagnosis"] = 4
    spec["data"]["free"]["n_diagnosis"] = len(PAIRS)
    files = analyze(spec, AnalysisRequest(out=tmp_path / "files", attribution=False))
    shown = {"calibration": {task: rows[:2] for task, rows in ROWS.items()}, "texts": RULES}
    live = dl.analyze(
        **modules, data=ROWS, tokenizer=suite.tokenizer, **shown, out=tmp_path / "live", progress="none"
    )
    for table, key in (("accuracy", "metric"), ("outputs", "sample_id")):
        one, other = (
            getattr(run, table)().sort_values(["task", "variant", key]).reset_index(drop=True)
            for run in (files, live)
        )  # lines of a file are counted from 1, rows from 0
        pd.testing.assert_frame_equal(
            one.drop(columns="sample_id", errors="ignore"),
            other.drop(columns="sample_id", errors="ignore"),
            rtol=1e-5,
            atol=1e-4,  # scores as large as 30 in float32, and differences of such
        )
    assert live.manifest.architecture["tokenizer"] == files.manifest.architecture["tokenizer"]
    assert live.manifest.classes == files.manifest.classes
    again = live.calibrate(dl.FeatCal(lam=0.01, rho=1.0, update=("linear",)), name="fc")
    assert set(again.accuracy(variant="calibrated:fc")["metric"]) == set(files.accuracy()["metric"])
    bare = dl.open_run(live.path)
    with pytest.raises(SpecError, match="tokenizer"):
        bare.calibrate(dl.FeatCal(), name="no", modules={**modules, "data": ROWS})
    fitted = dl.FeatCal(lam=0.01, rho=1.0, update=("linear",)).fit(
        modules["merged"], modules["base"], modules["experts"], ROWS, tokenizer=suite.tokenizer, texts=RULES
    )
    assert len(fitted.history_)


SIZES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 40,
}


@pytest.mark.slow
def test_encoders_read_texts_as_they_read_tokens(tmp_path: pathlib.Path) -> None:
    tokenizer, head = word_tokenizer("encoder"), torch.nn.Linear(16, 2)
    models = [with_seed(lambda: transformers.BertModel(transformers.BertConfig(**SIZES)))() for _ in "ab"]
    models = [perturbed(model, seed, 0.1).eval() for seed, model in enumerate(models)]
    texts, labels = ["is it red", "it is blue", "no question"], [0, 1, 1]
    batch = dict(tokenizer(texts, padding=True, return_tensors="pt"))
    common = {"merged": models[0], "experts": {"a": models[1]}, "heads": {"a": head}, "progress": "none"}
    plain = dl.analyze(**common, data={"a": [(batch, torch.tensor(labels))]}, out=tmp_path / "plain")
    pairs = [*zip(texts, labels, strict=True)]
    read = dl.analyze(**common, data={"a": pairs}, tokenizer=tokenizer, out=tmp_path / "read")
    for table in ("accuracy", "layers"):
        pd.testing.assert_frame_equal(getattr(plain, table)(), getattr(read, table)(), rtol=1e-4, atol=1e-6)
    assert tokenizer.padding_side == "right" and len(read.accuracy()) == 2


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        ({"tokenizer": None, "texts": {"a": {}}}, SpecError, "texts= is given without tokenizer="),
        ({"texts": {"b": {}}}, SpecError, r"experts are given for \['a'\], texts for \['a', 'b'\]"),
        ({"texts": {"a": {"prompts": "{input}"}}}, SpecError, r"texts\['a'\]: .*prompts"),
        ({"data": {"a": [torch.zeros(2, 3)]}}, DataError, r"data\['a'\]"),
        ({"merged": torch.nn.Linear(2, 2)}, IncompatibleModelsError, "the Linear is of type None"),
        ({"kind": "gpt2"}, IncompatibleModelsError, "GPT2LMHeadModel is of type gpt2"),
    ],
)
def test_what_can_not_be_read_as_texts_is_refused_before_a_run_is_begun(
    given: dict[str, Any], error: type[Exception], told: str, tmp_path: pathlib.Path
) -> None:
    given = dict(given)
    config = transformers.AutoConfig.for_model(given.pop("kind", "llama"), **SIZES)
    module = given.get("merged") or transformers.AutoModelForCausalLM.from_config(config)
    everything = {"merged": module, "experts": {"a": module}, "data": {"a": [("is it red", "yes")]}}
    everything |= {"tokenizer": word_tokenizer("decoder"), **given}
    with pytest.raises(error, match=told):
        dl.analyze(**everything, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
