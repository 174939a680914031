"""What language models answer, scored: generated, chosen and as likely as they find it, from files to tables."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import re
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from driftlens.base.errors import DataError, SpecError
from driftlens.findings.arena import arena_rows
from driftlens.jobs.analyze.evaluation import SPARE_TOKENS
from driftlens.jobs.analyze.job import analyze, evaluate
from driftlens.jobs.calibrate.job import calibrate
from driftlens.jobs.contest.sweep import sweep
from driftlens.jobs.preflight.job import preflight
from driftlens.models.language.generation import generate, log_likelihoods
from driftlens.runs.run import DriftRun, open_run
from driftlens.spec import load_spec
from driftlens.spec.requests import AnalysisRequest, CalibrationRequest, PreflightRequest, SweepRequest
from driftlens_reports.charts.chart import ChartOptions, charts
from driftlens_reports.terminal import sweep_text
from tests.zoo.suite import CLASSES, PAIRS, Suite

NUMBERS = {"is it red": "3", "is it blue": "1.5", "it is green": "2", "yes": "4"}


def value(run: DriftRun, task: str, variant: str, metric: str) -> float:
    rows = run.accuracy(task, variant).set_index("metric")
    return float(rows.loc[metric, "value"])


@pytest.mark.slow
@pytest.mark.parametrize("form", ["decoder", "encoder-decoder"])
def test_an_expert_that_knows_the_answers_gives_them(form: str, tmp_path: pathlib.Path) -> None:
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
        assert (
            value(run, task, "expert", "exact_match") == 1 and value(run, task, "merged", "exact_match") < 0.5
        )
    answers = run.scores("free", "expert")
    assert answers["answer"].tolist() == [answer for _, answer in PAIRS] and len(answers) == len(PAIRS)
    assert run.scores("similar", "merged")["reference"].tolist() == [3, 1.5, 2, 4]
    assert (
        1 <= value(run, "likely", "expert", "perplexity") < 1.2 < value(run, "likely", "base", "perplexity")
    )
    # The classes begin alike, so that no single token tells them apart.
    assert any(
        "pick: the answers of two classes begin with the same token" in text for text in run.manifest.notices
    )
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
    again = evaluate(run.path, again=True).accuracy()
    assert again["value"].tolist() == found["value"].tolist()
    small = suite.spec(data) | {"compute": {"feature_budget": 4096}}
    bare = analyze(small, AnalysisRequest(out=tmp_path / "small", attribution=False))
    assert bare.accuracy().empty
    (said,) = (
        text
        for text in bare.manifest.notices
        if "exact_match of expert not measured" in text and "free" in text
    )
    assert said in charts["accuracy"].missing(bare, ChartOptions())


@pytest.mark.slow
@pytest.mark.parametrize("form", ["decoder", "encoder-decoder"])
@pytest.mark.parametrize("method", ["react", "surgery_v2", "interv_merge"])
def test_maps_act_while_the_librarys_own_model_answers(
    form: str, method: str, tmp_path: pathlib.Path
) -> None:
    """Against generation and likelihoods by the plain model, to whose modules the saved tensors are hooked by hand."""
    suite = Suite(form, tmp_path, learns=False)
    suite.learn(PAIRS[:4])
    suite.save("expert")
    run = analyze(
        suite.spec({"free": suite.data("free", PAIRS[:4], metric=["exact_match", "perplexity"])}),
        AnalysisRequest(out=tmp_path / "run", attribution=False),
    )
    settings = {} if method == "react" else {"steps": 20, "lr": 0.05}
    request = CalibrationRequest(name="maps", method=method, parameters=settings)
    run = calibrate(run.path, request.changed(attribution=False))
    assert not any("not measured" in text for text in run.manifest.notices)
    saved = load_file(run.path / "calibrations/maps/attachments.safetensors")
    model = type(suite.model).from_pretrained(tmp_path / "base").eval()
    reader = dataclasses.replace(suite.reader, ends=(3, model.generation_config.eos_token_id))
    base = [generate(model, reader, [question], 4 + SPARE_TOKENS)[0] for question, _ in PAIRS[:4]]
    blocks = (
        list(model.model.layers)
        if form == "decoder"
        else [*model.encoder.block, model.encoder.final_layer_norm, *model.decoder.block]
    )
    final = model.model.norm if form == "decoder" else model.decoder.final_layer_norm
    places = [None, None, *blocks, final]
    for place in {key.split("/")[0] for key in saved}:
        own = {key.split("/")[1]: value for key, value in saved.items() if key.split("/")[0] == place}
        at, _, site = place.partition(":")
        hook = _changes_output(own)
        (places[int(at)].get_submodule(site) if site else places[int(at)]).register_forward_hook(hook)
    questions = [question for question, _ in PAIRS[:4]]
    wanted = [generate(model, reader, [question], 4 + SPARE_TOKENS)[0] for question in questions]
    space = " " if form == "decoder" else ""
    nats, counts = log_likelihoods(
        model, suite.reader, questions, [[space + answer] for _, answer in PAIRS[:4]]
    )
    assert value(run, "free", "calibrated:maps", "perplexity") == pytest.approx(
        math.exp(-float(nats.sum() / counts.sum())), rel=1e-4
    )
    assert (
        run.scores("free", "calibrated:maps").set_index("metric").loc["exact_match", "answer"].tolist()
        == wanted
    )
    assert wanted != base
    row = next(row for row in arena_rows(run) if row["model"] == "maps")
    assert row["score"] == value(run, "free", "calibrated:maps", "exact_match")


def _changes_output(own: dict[str, torch.Tensor]) -> Any:
    def corrected(f: torch.Tensor) -> torch.Tensor:
        if "matrix" in own:
            return f @ own["matrix"].T
        if "down" in own:
            return f - torch.relu(f @ own["down"].T) @ own["up"].T
        edit = f @ own["source"].T + own["source_bias"] - f @ own["project"].T - own["project_bias"]
        return f + edit @ own["project"]

    def hook(_module: Any, _args: Any, output: Any) -> Any:
        return (corrected(output[0]), *output[1:]) if isinstance(output, tuple) else corrected(output)

    return hook


@pytest.mark.slow
def test_calibration_sweep_and_preflight_tell_the_metrics_that_a_run_has(tmp_path: pathlib.Path) -> None:
    suite = Suite("decoder", tmp_path)
    data = {
        "free": suite.data("free", PAIRS),
        "likely": suite.data("likely", PAIRS, metric="perplexity"),
        "pick": suite.data("pick", [*CLASSES.items()], classes=["no it", "no is", "yes"]),
    }
    spec = suite.spec(data)
    texts = [
        finding.text
        for finding in preflight(load_spec(spec), PreflightRequest(deep=True), estimate=False).findings
    ]
    assert any(
        "expert of free scores 100.0 %" in text and "in exact match on 2 samples" in text for text in texts
    )
    assert any("in perplexity on" in text and "no better" not in text for text in texts)
    run = analyze(spec, AnalysisRequest(out=tmp_path / "run", attribution=False)).path
    said: list[str] = []
    request = CalibrationRequest(name="fc", parameters={"lam": 0.1, "rho": 1.0})
    found = calibrate(run, request, on_first=said.append)
    for metric in ("exact match", "perplexity", "choice accuracy"):
        assert re.search(
            rf"; {metric} with 95 % interval \(n = 2\) merged \S+.*, fc \S+.*, expert \S+", said[0]
        )
    swept = sweep(run, SweepRequest(param={"lam": [0.1, 1.0]})).sweeps()
    for task, metric in (("free", "exact_match"), ("likely", "perplexity"), ("pick", "choice")):
        rows = swept[(swept["task"] == task)]
        assert rows[metric].notna().all() and rows["accuracy"].isna().all() and (rows["n_test"] > 0).all()
    table = sweep_text(open_run(run), "lam")
    assert all(title in table for title in ("exact match", "perplexity", "choice accuracy"))
    drawn = charts["sweeps"].draw(open_run(run), ChartOptions())
    assert {"exact_match", "perplexity", "choice"} <= set(drawn.data["measure"])
    assert found.accuracy("likely", "calibrated:fc")["metric"].tolist() == ["perplexity"]


def test_what_a_task_lacks_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    suite = Suite("decoder", tmp_path, learns=False)

    def refused(error: type[Exception], words: str, **entry: Any) -> None:
        data = {"ask": suite.data("ask", PAIRS, **entry)}
        with pytest.raises(error, match=words):
            analyze(suite.spec(data), AnalysisRequest(out=tmp_path / "run", attribution=False))

    refused(SpecError, "data.ask.metric: choice needs classes", metric="choice")
    refused(SpecError, "data.ask.metric: accuracy needs labels", metric=["accuracy"])
    refused(SpecError, "no metric 'bleu'", metric="bleu")
    refused(DataError, "' yes', is no number", metric="spearman")


@pytest.mark.slow
def test_real_models_have_the_scores_that_their_makers_measured(tmp_path: pathlib.Path) -> None:
    real = pathlib.Path(__file__).resolve().parents[3] / "shared" / "real_text"
    if not real.is_dir():
        pytest.skip("the folder of real texts is not on this machine")
    wanted = json.loads((real / "accuracies.json").read_text())["t5"]
    metrics = {"equation": {"exact_match": "exact"}, "pos": {"exact_match": "exact", "choice": "rank"}}
    splits = {"calibration": "train", "test": "test"}
    data = {
        task: {"kind": "jsonl", "metric": [*names], "classes": task == "pos"}
        | {split: str(real / "data" / task / f"{name}.jsonl") for split, name in splits.items()}
        for task, names in metrics.items()
    }
    spec = {
        **{"version": 1, "name": "real", "metrics": {"jacobian": False}},
        "architecture": {"loader": "hf-t5", "source": str(real / "t5/base")},
        **{name: {"weights": str(real / "t5/base")} for name in ("base", "merged")},
        "experts": {task: {"weights": str(real / "t5" / task)} for task in metrics},
        "data": {"defaults": {"n": 4, "n_diagnosis": 4, "batch_size": 50}, **data},
    }
    run = analyze(spec, AnalysisRequest(out=tmp_path / "run", attribution=False))
    for task, names in metrics.items():
        for variant in ("base", "expert"):
            for metric, name in names.items():
                assert value(run, task, variant, metric) == pytest.approx(wanted[variant][task][name])
