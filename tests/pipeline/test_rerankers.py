"""Rerankers from folders to repaired ones: a score of a query and a passage that are read together."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from scipy.stats import spearmanr

import driftlens as dl
from driftlens.base.access import Access
from driftlens.base.errors import DataError, DriftLensError, IncompatibleModelsError, SpecError
from driftlens.jobs.preflight.job import preflight
from driftlens.jobs.study.opening import open_data
from driftlens.models.architecture import load_architecture
from driftlens.spec import load_spec
from tests.refusing import refusing
from tests.zoo.cases import perturbed, with_seed
from tests.zoo.related import SENTENCES, by_hand, rows_of, table
from tests.zoo.sentences import DECODER
from tests.zoo.small import small
from tests.zoo.suite import spec_of_folders
from tests.zoo.tokenizers import word_tokenizer

ENCODER = {"bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
RERANKERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "BERT": ("hf-encoder", "Bert", {}),
    "XLM-RoBERTa": ("hf-encoder", "XLMRoberta", {}),
    "ModernBERT": ("hf-auto", "ModernBert", ENCODER),
    "Qwen3": ("hf-auto", "Qwen3", DECODER),
}
"""By family, the loader, the beginning of the class in transformers, and what of its configuration is its own."""
LENGTH = 9
"""Tokens of two texts at most, so that the longer one of some is cut."""
TASKS = ("corpus", "own", "pairs")


def reranker(family: str, seed: int, labels: int = 1) -> Any:
    """A classifier with one score, near those of all other seeds."""
    _, kind, settings = RERANKERS[family]
    sizes = {"vocab_size": len(tokenizer_of(family)), "pad_token_id": 0, "max_position_embeddings": 24}
    whole = f"{kind}ForSequenceClassification"
    made = with_seed(lambda: small(whole, num_labels=labels, **sizes, **settings))().eval()
    return perturbed(perturbed(made, 0, 0.2), seed, 0.05)


def tokenizer_of(family: str) -> Any:
    form = "decoder" if family == "Qwen3" else "encoder"
    return word_tokenizer(form, model_max_length=LENGTH)


def save(model: Any, folder: Path, family: str, *, is_library: bool = False) -> Path:
    """As transformers saves it, with what sentence-transformers puts beside a cross-encoder."""
    model.save_pretrained(folder)
    tokenizer_of(family).save_pretrained(folder)
    if is_library:
        kind = "sentence_transformers.base.modules.transformer.Transformer"
        contents: dict[str, Any] = {
            "modules.json": [{"idx": 0, "name": "0", "path": "", "type": kind}],
            "config_sentence_transformers.json": {
                "model_type": "CrossEncoder",
                "activation_fn": "torch.nn.modules.linear.Identity",
                "prompts": {"ask": "question : "},
                "default_prompt_name": "ask",
            },
            "sentence_bert_config.json": {
                "transformer_task": "sequence-classification",
                "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
                "module_output_name": "scores",
            },
        }
        for name, content in contents.items():
            (folder / name).write_text(json.dumps(content))
    return folder


def entries(folder: Path) -> dict[str, Any]:
    """Queries that look in a corpus, queries with passages of their own, and pairs with numbers."""
    keys = [{"passage": text, "topic": f"t{at % 4}"} for at, text in enumerate(SENTENCES[:16])]
    rows = [
        {"text": text, "topic": [f"t{at % 4}"], "good": [SENTENCES[at]], "bad": SENTENCES[30:33]}
        | {"other": SENTENCES[-1 - at], "score": (at * 7) % 20 / 4}
        for at, text in enumerate(SENTENCES[36:54])
    ]
    plain = {
        "kind": "jsonl",
        "input": "text",
        "calibration": table(folder / "train.jsonl", rows[:10]),
        "test": table(folder / "test.jsonl", rows[10:]),
    }
    corpus = {"file": table(folder / "corpus.jsonl", keys), "text": "passage", "key": "topic"}
    return {
        "corpus": plain | {"positive": "topic", "corpus": corpus},
        "own": plain | {"positive": "good", "negative": "bad"},
        "pairs": plain | {"pair": "other", "target": "score"},
    }


def spec_of(folder: Path, loader: str, data: dict[str, Any], **more: Any) -> dict[str, Any]:
    counts = {"n": 10, "n_diagnosis": 6, "batch_size": 5}
    experts = {task: folder / task for task in data}
    merge = {"method": "task_arithmetic", "scaling": 0.4}
    settings = {"merge": merge, "compute": {"dtype": "float64"}} | more
    return spec_of_folders(loader, folder / "base", experts, {"defaults": counts, **data}, **settings)


def score(model: Any, tokenizer: Any, query: str, passage: str) -> float:
    """What the library says of two texts alone, in float64."""
    inputs = tokenizer(query, passage, truncation=True, return_tensors="pt")
    with torch.no_grad():
        return float(model.double()(**inputs).logits)


def _param(family: str, loader: str) -> Any:
    more = [] if family == "BERT" else [pytest.mark.slow, pytest.mark.shows("attribution")]
    marks = [pytest.mark.family(f"{family}, as a reranker"), pytest.mark.shows(files=loader), *more]
    return pytest.param(family, marks=marks)


@pytest.mark.slow
@pytest.mark.shows("drift", "sites", "reloads", heads="one score of two texts, by rank or with numbers")
@pytest.mark.parametrize("family", [_param(name, loader) for name, (loader, *_) in RERANKERS.items()])
def test_rerankers_are_scored_repaired_and_reloaded(family: str, tmp_path: Path) -> None:
    (loader, *_), is_library, is_slow = RERANKERS[family], family == "XLM-RoBERTa", family != "BERT"
    tasks = ("own",) if is_slow else TASKS
    models = {name: reranker(family, seed) for seed, name in enumerate(("base", *tasks))}
    for name, model in models.items():
        save(model, tmp_path / name, family, is_library=is_library)
    data = {task: entry for task, entry in entries(tmp_path).items() if task in tasks}
    spec = spec_of(tmp_path, loader, data, metrics={"jacobian": is_slow and {"samples": 1}})
    run = dl.analyze(spec, out=tmp_path / "run", progress="none")
    rows = run.layers(variant="merged")
    assert rows["closure_error"].max() < 1e-9
    if is_slow:
        assert rows[["final_share", "remainder_share"]].sum().sum() == pytest.approx(1, abs=1e-6)
    else:
        said = "reads 128 pairs, 8 queries with each of 16 passages"
        assert any(said in text for text in run.manifest.notices)
    run.calibrate(dl.FeatCal(), name="featcal", save_weights=tmp_path / "saved")
    run = dl.open_run(tmp_path / "run")
    for task in tasks:
        expert = partial(score, models[task], tokenizer_of(family))
        for variant, of in (("expert", expert), ("calibrated:featcal", load_saved(tmp_path / "saved", task))):
            _assert_scored(run, task, variant, data[task], of, "question : " * is_library)


@pytest.mark.parametrize("is_library", [False, True], ids=["of transformers", "of sentence-transformers"])
def test_scores_of_a_repaired_folder_are_those_of_cross_encoders(is_library: bool, tmp_path: Path) -> None:
    if importlib.util.find_spec("sentence_transformers") is None:
        pytest.skip("sentence-transformers is not installed")
    from sentence_transformers import CrossEncoder

    for seed, name in enumerate(("base", "pairs")):
        save(reranker("BERT", seed), tmp_path / name, "BERT", is_library=is_library)
    data = {"pairs": entries(tmp_path)["pairs"]}
    run = dl.analyze(spec_of(tmp_path, "hf-encoder", data), out=tmp_path / "run", progress="none")
    run.calibrate(dl.FeatCal(), name="featcal", save_weights=tmp_path / "saved")
    model = CrossEncoder(str(tmp_path / "saved"), device="cpu", activation_fn=torch.nn.Identity())
    model.model.load_state_dict(load_file(tmp_path / "saved" / "heads" / "pairs.safetensors"), strict=False)
    scores = model.predict([(row["text"], row["other"]) for row in rows_of(data["pairs"])])
    stored = dl.open_run(tmp_path / "run").scores("pairs", "calibrated:featcal")["value"].astype(float)
    np.testing.assert_allclose(stored, scores, rtol=1e-4, atol=1e-5)


def load_saved(folder: Path, task: str) -> Callable[[str, str], float]:
    """What transformers makes of a saved folder and a task's own head."""
    kind = transformers.AutoModelForSequenceClassification
    model, info = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    model.load_state_dict(load_file(folder / "heads" / f"{task}.safetensors"), strict=False)
    return partial(score, model.eval(), transformers.AutoTokenizer.from_pretrained(folder))


def _assert_scored(
    run: dl.DriftRun,
    task: str,
    variant: str,
    entry: dict[str, Any],
    of: Callable[[str, str], float],
    lead: str,
) -> None:
    """The scores of a run are those of the library, ranked by hand."""
    queries, found = rows_of(entry), run.accuracy(task, variant).set_index("metric")
    if task == "pairs":
        wanted = [of(lead + row["text"], row["other"]) for row in queries]
        np.testing.assert_allclose(run.scores(task, variant)["value"].astype(float), wanted, rtol=1e-5)
        correlation = spearmanr(wanted, [row["score"] for row in queries])[0]
        assert found.loc["spearman", "value"] == pytest.approx(correlation, abs=1e-6)
        return
    keys = rows_of({"test": entry["corpus"]["file"]}) if task == "corpus" else []
    shares: dict[str, list[float]] = {}
    for row in queries:
        passages = list(dict.fromkeys(one["passage"] for one in keys)) or [*row["bad"], *row["good"]]
        right = {one["passage"] for one in keys if one["topic"] in row["topic"]} or set(row["good"])
        scores = torch.tensor([of(lead + row["text"], passage) for passage in passages])
        ranked = [passages[at] in right for at in scores.argsort(descending=True, stable=True)]
        for name, value in by_hand(ranked, len(right)).items():
            shares.setdefault(name, []).append(value)
    for name, values in shares.items():
        assert found.loc[name, "value"] == pytest.approx(np.mean(values), abs=1e-9), (variant, name)
        assert found.loc[name, "ci_low"] <= found.loc[name, "value"] <= found.loc[name, "ci_high"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rerankers")
    for seed, name in enumerate(("base", *TASKS)):
        save(reranker("BERT", seed), folder / name, "BERT")
    return folder


def test_queries_are_read_by_turns_with_what_answers_them_and_what_does_not(folders: Path) -> None:
    data = entries(folders)
    spec = load_spec(spec_of(folders, "hf-encoder", data))
    known = load_architecture("hf-encoder", str(folders / "base"))
    for task, more in (("own", 4), ("corpus", 6)):
        opened = open_data(spec, task, known, access=Access())
        rows = {str(line): row for line, row in enumerate(rows_of(data[task], "calibration"), 1)}
        right = {one["passage"]: one["topic"] for one in rows_of({"test": data["corpus"]["corpus"]["file"]})}
        for turn, name in enumerate(opened.calibration.ids):
            passage: Any = opened.calibration.text(turn)[2]
            own = rows[name]
            answers = passage in own["good"] if task == "own" else right[passage] in own["topic"]
            assert answers == (turn % 2 == 0), (task, turn)
        # A smaller draw is the beginning of a larger one.
        few = {**data, task: data[task] | {"n": more}}
        part = open_data(load_spec(spec_of(folders, "hf-encoder", few)), task, known, access=Access())
        assert [*map(part.calibration.text, range(more))] == [*map(opened.calibration.text, range(more))]


@pytest.mark.slow
def test_a_card_says_how_a_cross_encoder_scores(tmp_path: Path) -> None:
    for seed, name in enumerate(("base", "own")):
        save(reranker("BERT", seed), tmp_path / name, "BERT", is_library=True)
    spec = spec_of(tmp_path, "hf-encoder", {"own": entries(tmp_path)["own"]})
    assert not preflight(load_spec(spec)).problems
    dl.merge(spec, method="average", out=tmp_path / "out")
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert (card.data.library_name, card.data.pipeline_tag) == ("sentence-transformers", "text-ranking")
    (code,) = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
    assert 'load_file("heads/own.safetensors")' in code and "CrossEncoder" in code
    compile(code, "card", "exec")


def _without_positives(data: dict[str, Any]) -> None:
    data["corpus"]["corpus"]["key"] = "passage"


def _without_passages(data: dict[str, Any]) -> None:
    data["own"]["calibration"] = table(
        Path(data["own"]["test"]).with_name("bare.jsonl"), [{"text": "red"}] * 10
    )


def _empty(data: dict[str, Any]) -> None:
    rows = [row | {"text": " "} for row in rows_of(data["own"])]
    data["own"]["test"] = table(Path(data["own"]["test"]).with_name("empty.jsonl"), rows)


@pytest.mark.parametrize(
    ("spoil", "error", "words", "hint"),
    [
        pytest.param(
            _without_positives, DataError, "have no positive in the corpus", "letter by letter", id="corpus"
        ),
        pytest.param(_without_passages, DataError, "single texts", "good, or bad", id="calibration"),
        pytest.param(_empty, DataError, "nothing is asked", "Leave such rows out", id="empty query"),
    ],
)
def test_what_a_reranker_cant_read_is_refused(
    spoil: Callable[[dict[str, Any]], None],
    error: type[DriftLensError],
    words: str,
    hint: str,
    folders: Path,
    tmp_path: Path,
) -> None:
    data = entries(folders)
    spoil(data)
    with refusing(error, match=words, hint=hint):
        dl.analyze(spec_of(folders, "hf-encoder", data), out=tmp_path / "run", progress="none")
    assert not (tmp_path / "run").exists()


def test_a_classifier_with_several_scores_is_no_reranker(folders: Path, tmp_path: Path) -> None:
    data = {"own": entries(folders)["own"]}
    spec = spec_of(folders, "hf-encoder", data)
    save(reranker("BERT", 1, labels=3), tmp_path / "own", "BERT")
    several = spec | {"experts": {"own": {"weights": str(tmp_path / "own")}}}
    with refusing(SpecError, "gives 3 scores", hint="num_labels: 1", code=2):
        dl.analyze(several, out=tmp_path / "run", progress="none")
    assert not (tmp_path / "run").exists()


YES, NO = 13, 14
"""Tokens of answers."""


def judging(folder: Path, seed: int) -> Any:
    """A language model whose answer is a score, as sentence-transformers saves it since version 6."""
    sizes = {"vocab_size": len(tokenizer_of("Qwen3")), "pad_token_id": 0, "max_position_embeddings": 24}
    model = perturbed(with_seed(lambda: small("Qwen3ForCausalLM", **sizes, **DECODER))().eval(), seed, 0.2)
    save(model, folder, "Qwen3", is_library=True)
    kind = "sentence_transformers.cross_encoder.modules.logit_score.LogitScore"
    modules = json.loads((folder / "modules.json").read_text())
    modules.append({"idx": 1, "name": "1", "path": "1_LogitScore", "type": kind})
    stated = {"true_token_id": YES, "false_token_id": NO, "module_input_name": "causal_logits"}
    (folder / "1_LogitScore").mkdir()
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps(stated))
    (folder / "modules.json").write_text(json.dumps(modules))
    return model


def test_a_language_model_whose_answer_is_a_score_is_refused_with_a_way_on(tmp_path: Path) -> None:
    """The classifier that the hint tells of gives the same score of the same tokens; merged folders stay whole."""
    model, data = judging(tmp_path / "base", 0), {"own": entries(tmp_path)["own"]}
    judging(tmp_path / "own", 1)
    spec = spec_of(tmp_path, "hf-auto", data)
    way = f"score.weight[0] = lm_head.weight[{YES}] - lm_head.weight[{NO}]"
    with refusing(IncompatibleModelsError, "LogitScore of sentence-transformers", hint=way, code=4):
        dl.analyze(spec, out=tmp_path / "run", progress="none")
    assert not (tmp_path / "run").exists()
    kind = transformers.AutoModelForSequenceClassification
    classifier = kind.from_pretrained(tmp_path / "base", num_labels=1).eval()
    head = model.get_output_embeddings().weight.detach()
    classifier.score.weight.data[0] = head[YES] - head[NO]
    ids = tokenizer_of("Qwen3")("is it red", "blue", return_tensors="pt")
    with torch.no_grad():
        logits = model(**ids).logits[0, -1]
        torch.testing.assert_close(classifier(**ids).logits[0, 0], logits[YES] - logits[NO])
    dl.merge(spec, method="average", out=tmp_path / "out")
    for name in ("modules.json", "1_LogitScore/config.json"):
        assert json.loads((tmp_path / "out" / name).read_text()) == json.loads(
            (tmp_path / "base" / name).read_text()
        )
