"""What a run of language models keeps for its readers: the texts that were asked, and tokens as they read."""

from __future__ import annotations

import pathlib

import pytest
import torch
import transformers

from driftlens.jobs.analyze.job import analyze
from driftlens.jobs.calibrate.job import calibrate
from driftlens.jobs.preflight.job import preflight
from driftlens.runs.layout import LONGEST_TEXT
from driftlens.runs.run import DriftRun
from driftlens.spec import load_spec
from driftlens.spec.requests import AnalysisRequest, CalibrationRequest
from driftlens_app.samples import texts_of
from driftlens_app.views.samples import answers
from driftlens_reports.charts.chart import ChartOptions, charts
from tests.zoo.cases import perturbed
from tests.zoo.suite import PAIRS, Suite

pytestmark = pytest.mark.slow
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


def test_a_run_keeps_what_its_samples_ask(run: DriftRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIFTLENS_APP_ROOT", str(run.path))
    texts = texts_of(run, "pick")
    assert [texts[name] for name in run.sample_ids("pick")] == [WORDS[int(name) - 1][0] for name in texts]
    assert all(len(text) <= LONGEST_TEXT + 3 for text in run.texts("free").values())
    drawn = charts["scatter"].draw(run, ChartOptions(tasks=("pick",)))
    assert any("is it" in text for text in drawn.figure.data[0].text)


def test_tokens_read_as_text_and_a_vocabulary_is_no_list_of_classes(run: DriftRun) -> None:
    assert {task: sorted(names) for task, names in run.manifest.classes.items()} == {"pick": ["no", "yes"]}
    assert run.outputs("free")["label"].isna().all()


def test_a_preflight_knows_the_language_models_own_head_and_the_classes_of_answers(run: DriftRun) -> None:
    found = preflight(load_spec(run.path / "spec.yaml"), estimate=False)
    said = {finding.subject: finding.text for finding in found.findings if finding.level == "ok"}
    assert said["head of free"] == said["head of pick"] == "the language model's own"
    assert said["data of pick"].endswith("2 classes") and said["data of free"].endswith("no classes")


def test_answers_stand_beside_each_other_those_that_differ_first(run: DriftRun) -> None:
    rows = run.scores("free")
    shown = answers(rows[rows["answer"].notna()], [*run.variants, "expert"])
    assert list(shown)[:2] == ["sample", "target"] and {"base", "merged", "expert"} <= {*shown}
    differ = shown[["merged", "expert"]].nunique(axis=1).tolist()
    assert differ == sorted(differ, reverse=True) and len(shown) == len(PAIRS) + 1


def test_the_next_token_is_compared_over_the_whole_vocabulary(run: DriftRun) -> None:
    """Against the library's own models: what they say comes after each question, of all tokens."""
    folder = run.path.parent
    expert, base = (
        transformers.AutoModelForCausalLM.from_pretrained(folder / name).double().eval()
        for name in ("expert", "base")
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
    drawn = charts["next-token-divergence"].draw(run)
    mean = run.outputs("pick", "merged")["token_kl"].mean()
    found = drawn.data.set_index(["task", "variant"]).loc[("pick", "merged"), "mean KL divergence"]
    assert found == pytest.approx(mean)
    shares = charts["next-token"].draw(run).data.set_index(["task", "variant"])
    flipped = run.outputs("free", "merged")["token_flipped"].astype(float).mean()
    assert shares.loc[("free", "merged"), "flipped"] == pytest.approx(flipped)


@pytest.mark.parametrize("form", ["decoder", "encoder-decoder"])
def test_groups_and_the_heaviest_layers_are_calibrated_alone(form: str, tmp_path: pathlib.Path) -> None:
    suite = Suite(form, tmp_path, learns=False)
    suite.model = perturbed(suite.model, 1, 0.3)
    suite.save("expert")
    spec = suite.spec({"pick": suite.data("pick", WORDS, classes=True)})
    spec["metrics"] = {"jacobian": {"samples": 2}}
    made = analyze(spec, AnalysisRequest(out=tmp_path / "run"))
    request = CalibrationRequest(name="part", parameters={"lam": 0.1}, sites=("q", "down"), top_layers=1)
    table = calibrate(made.path, request).calibration("part")
    shares = made.layers("pick", "merged").query("role == 'block'").set_index("layer")["final_share"]
    assert set(table["layer"]) == {shares.idxmax()}
    leaves = {site.rpartition(".")[2] for site in table["site"]}
    assert leaves == ({"q_proj", "down_proj"} if form == "decoder" else {"q", "wo"})
