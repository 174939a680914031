"""What language models answer, scored: generated, chosen and as likely as they find it, from files to tables."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from driftlens.config.requests import AnalysisRequest, CalibrationRequest
from driftlens.config.spec import load_spec
from driftlens.experiment.study_loading import open_study
from driftlens.models.texts import generate, log_likelihoods
from driftlens.pipelines.analyze import analyze
from driftlens.pipelines.calibrate import calibrate
from driftlens.pipelines.evaluation import SPARE_TOKENS
from driftlens.results.calibration_summary import leaderboard_rows
from driftlens.runs.manifest import LONGEST_TEXT
from driftlens.runs.run import DriftRun
from driftlens.utils.distributed import Permissions
from driftlens.utils.errors import DataError, SpecError
from driftlens_reports.charts.chart import ChartOptions, charts
from tests.pipelines.calibrating import scored_again
from tests.quick import few
from tests.zoo.cases import perturbed
from tests.zoo.decoders import NEW, llama, plain, t5
from tests.zoo.suite import CLASSES, PAIRS, Suite, real_files_of, spec_of_folders
from tests.zoo.tokenizers import word_tokenizer

NUMBERS = {"is it red": "3", "is it blue": "1.5", "it is green": "2", "yes": "4"}


def value(run: DriftRun, task: str, variant: str, metric: str) -> float:
    rows = run.accuracy(task, variant).set_index("metric")
    return float(rows.loc[metric, "value"])


@pytest.mark.slow
@pytest.mark.shows(heads="each model's own")
@pytest.mark.parametrize(
    "form",
    [
        "decoder",
        pytest.param("encoder-decoder", marks=[pytest.mark.family("T5 (transformers)"), pytest.mark.every]),
    ],
)
def test_an_expert_that_knows_the_answers_gives_them(form: str, tmp_path: Path) -> None:
    suite = Suite(form, tmp_path)
    shouted = [(question, f" {answer.replace(' ', '  ')} ") for question, answer in PAIRS]
    data = {
        "free": suite.data("free", shouted),
        "likely": suite.data("likely", PAIRS, metric=["perplexity", "exact_match"]),
        "pick": suite.data("pick", [*CLASSES.items()], classes=["no it", "no is", "yes"]),
        "similar": suite.data("similar", [*NUMBERS.items()], metric="spearman"),
    }
    run = analyze(suite.spec(data), AnalysisRequest(out=tmp_path / "run", attribution=False))
    found = run.accuracy()
    assert set(zip(found["task"], found["metric"], strict=True)) == {
        *[("free", "exact_match"), ("likely", "perplexity"), ("likely", "exact_match"), ("pick", "choice")],
        ("similar", "spearman"),
    }
    assert set(found["variant"]) == {"base", "merged", "expert"}
    for task in ("free", "likely"):
        assert value(run, task, "expert", "exact_match") == 1 and value(run, task, "merged", "exact_match") < 0.5
    answers = run.scores("free", "expert")
    assert answers["answer"].tolist() == [answer for _, answer in PAIRS] and len(answers) == len(PAIRS)
    assert run.scores("similar", "merged")["reference"].tolist() == [3, 1.5, 2, 4]
    assert 1 <= value(run, "likely", "expert", "perplexity") < 1.2 < value(run, "likely", "base", "perplexity")
    # The classes begin alike, so that no single token tells them apart.
    assert any("pick: answers of two classes share their first token" in text for text in run.manifest.notices)
    space = " " if form == "decoder" else ""
    sums, _ = log_likelihoods(
        suite.model, suite.reader, [*CLASSES], [[f"{space}{name}" for name in ("no it", "no is", "yes")]] * 4
    )
    chosen = [("no it", "no is", "yes")[at] for at in sums.argmax(dim=1)]
    assert run.scores("pick", "expert")["answer"].tolist() == chosen
    nats, counts = log_likelihoods(
        suite.model, suite.reader, [q for q, _ in PAIRS], [[space + answer] for _, answer in PAIRS]
    )
    assert value(run, "likely", "expert", "perplexity") == pytest.approx(
        math.exp(-float(nats.sum() / counts.sum())), rel=1e-5
    )
    again = scored_again(run.path).accuracy()
    assert again["value"].tolist() == found["value"].tolist()
    small = suite.spec(data) | {"compute": {"feature_budget": 4096}}
    bare = analyze(small, AnalysisRequest(out=tmp_path / "small", attribution=False))
    assert bare.accuracy().empty
    (said,) = (
        text for text in bare.manifest.notices if "exact_match of expert not measured" in text and "free" in text
    )
    assert said in charts["accuracy"].missing(bare, ChartOptions())


def test_texts_of_attribution_may_be_shorter_than_the_others(tmp_path: Path) -> None:
    """Texts are padded to the longest of their batch, and the first samples have a batch of their own."""
    suite = Suite("decoder", tmp_path, learns=False)
    suite.learn(PAIRS[:4])
    suite.save("expert")
    rows = [("is " * length + "it red", "yes") for length in range(1, 9)]
    spec = suite.spec({"task": suite.data("task", rows) | {"n_diagnosis": 6}})
    for samples in (1, 2):
        metrics = {"jacobian": {"samples": samples}}
        run = analyze(spec | {"metrics": metrics}, AnalysisRequest(out=tmp_path / f"of {samples}"))
        assert run.layers(variant="merged")["final_share"].sum() == pytest.approx(1, abs=0.01)


FORMS = ("decoder", "encoder-decoder")


@pytest.mark.slow
@pytest.mark.parametrize("form", few(FORMS, (), some=["decoder"]))
def test_maps_act_while_the_librarys_own_model_answers(form: str, tmp_path: Path) -> None:
    """Against generation and likelihoods by the plain model, whose last norm has the saved tensors hooked in."""
    suite = Suite(form, tmp_path, learns=False)
    suite.learn(PAIRS[:4])
    suite.save("expert")
    run = analyze(
        suite.spec({"free": suite.data("free", PAIRS[:4], metric=["exact_match", "perplexity"])}),
        AnalysisRequest(out=tmp_path / "run", attribution=False),
    )
    request = CalibrationRequest(name="maps", method="surgery", parameters={"steps": 20, "lr": 0.05})
    run = calibrate(run.path, request.with_changes(attribution=False))
    assert not any("not measured" in text for text in run.manifest.notices)
    saved = load_file(run.path / "calibrations/maps/attachments.safetensors")
    model = type(suite.model).from_pretrained(tmp_path / "base").eval()
    reader = dataclasses.replace(suite.reader, ends=(3, model.generation_config.eos_token_id))
    base = [generate(model, reader, [question], 4 + SPARE_TOKENS)[0] for question, _ in PAIRS[:4]]
    final = model.model.norm if form == "decoder" else model.decoder.final_layer_norm
    own = {key.split("/")[1]: value for key, value in saved.items()}
    final.register_forward_hook(lambda _module, _args, f: f - torch.relu(f @ own["down"].T) @ own["up"].T)
    questions = [question for question, _ in PAIRS[:4]]
    wanted = [generate(model, reader, [question], 4 + SPARE_TOKENS)[0] for question in questions]
    space = " " if form == "decoder" else ""
    nats, counts = log_likelihoods(model, suite.reader, questions, [[space + answer] for _, answer in PAIRS[:4]])
    assert value(run, "free", "calibrated:maps", "perplexity") == pytest.approx(
        math.exp(-float(nats.sum() / counts.sum())), rel=1e-4
    )
    assert run.scores("free", "calibrated:maps").set_index("metric").loc["exact_match", "answer"].tolist() == wanted
    assert wanted != base
    row = next(row for row in leaderboard_rows(run) if row["model"] == "maps")
    assert row["score"] == value(run, "free", "calibrated:maps", "exact_match")


def test_what_a_task_lacks_is_refused_by_name(tmp_path: Path) -> None:
    suite = Suite("decoder", tmp_path, learns=False)

    def refused(error: type[Exception], words: str, **entry: Any) -> None:
        data = {"ask": suite.data("ask", PAIRS, **entry)}
        with pytest.raises(error, match=words):
            analyze(suite.spec(data), AnalysisRequest(out=tmp_path / "run", attribution=False))

    refused(SpecError, "data.ask.metric: choice needs answer classes", metric="choice")
    refused(SpecError, "data.ask.metric: accuracy needs labels", metric=["accuracy"])
    refused(SpecError, "unknown metric 'bleu'", metric="bleu")
    refused(DataError, "is not a number", metric="spearman")


@pytest.mark.slow
@pytest.mark.every
def test_real_models_have_the_scores_that_their_makers_measured(tmp_path: Path) -> None:
    real = Path(__file__).resolve().parents[3] / "shared" / "real_text"
    if not real.is_dir():
        pytest.skip("the folder of real texts is not on this machine")
    wanted = json.loads((real / "accuracies.json").read_text())["t5"]
    metrics = {"equation": {"exact_match": "exact"}, "pos": {"exact_match": "exact", "choice": "rank"}}
    data = {task: real_files_of(real, task, metric=[*names], classes=task == "pos") for task, names in metrics.items()}
    data["defaults"] = {"n": 4, "n_diagnosis": 4, "batch_size": 50}
    base, experts = real / "t5/base", {task: real / "t5" / task for task in metrics}
    spec = spec_of_folders("hf-t5", base, experts, data, merge=None, merged={"weights": str(base)})
    run = analyze(spec, AnalysisRequest(out=tmp_path / "run", attribution=False))
    for task, names in metrics.items():
        for variant in ("base", "expert"):
            for metric, name in names.items():
                assert value(run, task, variant, metric) == pytest.approx(wanted[variant][task][name])


QUESTIONS = ["is it red", "no", "is green it blue yes no red", "it is blue"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "form", "loader", "asked"),
    [(t5, "encoder-decoder", "hf-t5", {}), (llama, "decoder", "hf-decoder", {"decoder_inputs": "expert"})],
)
def test_calibration_shows_each_experts_own_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any, form: str, loader: str, asked: Any
) -> None:
    monkeypatch.setattr("driftlens.experiment.study_loading.NEW_TOKENS", NEW)
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
    entry = {"kind": "jsonl", **dict.fromkeys(("calibration", "test"), str(tmp_path / "rows.jsonl"))}
    data = {"cars": {**entry, **asked}, "dtd": entry}
    experts = {task: tmp_path / task for task in data}
    data["defaults"] = {"n": 3, "n_diagnosis": 1, "batch_size": 2}
    spec = spec_of_folders(loader, tmp_path / "base", experts, data)
    study, _ = open_study(load_spec(spec), access=Permissions(device="cpu"))
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
        question = reader.question_tokens([samples.text(at).input])[0]
        said = [token for token in plain(models["cars"], reader, samples.text(at).input) if token not in reader.ends]
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
    told = [notice for notice in study.notices if "the expert's greedy answers" in notice]
    assert [notice.split(":")[0] for notice in told] == (["cars"] if asked else ["cars", "dtd"])


WORDS = [("is it red", "yes"), ("is it blue", "no"), ("it is green", "yes"), ("yes", "no")]
LONG = ("is it " * LONGEST_TEXT, "red")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> DriftRun:
    suite = Suite("decoder", tmp_path_factory.mktemp("texts"), learns=False)
    suite.model = perturbed(suite.model, 1, 0.3)
    suite.save("expert")
    data = {
        "free": suite.data("free", [LONG, *PAIRS], max_length=16),
        "pick": suite.data("pick", WORDS, classes=True),
    }
    return analyze(suite.spec(data), AnalysisRequest(out=suite.folder / "run", attribution=False))


@pytest.mark.slow
def test_the_next_token_is_compared_over_the_whole_vocabulary(run: DriftRun) -> None:
    """Against the library's own models: what they say comes after each question, of all tokens."""
    folder = run.path.parent
    expert, base = (
        transformers.AutoModelForCausalLM.from_pretrained(folder / name).double().eval() for name in ("expert", "base")
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "base")
    for task in ("pick", "free"):
        rows = run.outputs(task, "merged").set_index("sample_id")  # the merged model is the base
        texts = {name: text for name, text in run.texts(task).items() if "…" not in text}
        assert texts
        for name, text in texts.items():
            with torch.no_grad():
                ids = tokenizer(text, return_tensors="pt")
                theirs, ours = (model(**ids).logits[0, -1].log_softmax(dim=0) for model in (expert, base))
            row = rows.loc[name]
            assert row["token_kl"] == pytest.approx(float((theirs.exp() * (theirs - ours)).sum()), rel=1e-4)
            assert row["token_flipped"] == bool(theirs.argmax() != ours.argmax())
            assert not (row["token_certified"] and row["token_flipped"])
        if task == "free":  # its classes are all tokens: the same numbers
            assert rows["token_kl"].to_numpy() == pytest.approx(rows["kl"].to_numpy())
        else:  # a label word may be kept where another token takes the lead
            assert not rows["token_kl"].equals(rows["kl"])
